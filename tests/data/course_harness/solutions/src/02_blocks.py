# %% [markdown]
# # Exercises of chapter 02

# %% setup
import random

from minikv.classroom.harness import begin, check, examine, list_of_numbers, ours
from minikv.kv_cache.base import cdiv

begin(
    globals(),
    forbidden={"minikv.kv_cache.": "the package's own manager"},
    allowed=["minikv.kv_cache.base"],
)

# %% [markdown]
# ## Exercise 2.1: slots of a table

# %% ex-2-1
def slots(table, block_size, num_tokens):
    """The slot of each of the first `num_tokens` tokens, in order."""
    ### BEGIN SOLUTION
    all_slots = [block * block_size + i for block in table for i in range(block_size)]
    return all_slots[:num_tokens]
    ### END SOLUTION

# %% cases-2-1 jupyter={"source_hidden": true}
BLOCK_IDS = "Those are block ids; a slot counts tokens."


@ours
def case_2_1(value, table, block_size, num_tokens):
    """One table: what was asked, got, wanted, and the usual slips."""
    got = list_of_numbers(value, "slots must return a list of slots")
    each = [(table[i // block_size], i % block_size) for i in range(num_tokens)]
    asked = f"table = {table}, block_size = {block_size}, num_tokens = {num_tokens}"
    return asked, {"slots": got}, {"slots": [b * block_size + i for b, i in each]}, {"slots": {
        BLOCK_IDS: [b for b, _ in each],
        "Blocks need not be neighbours.": [table[0] * block_size + i for i in range(num_tokens)],
        "A block begins at slot block * block_size.": [b + i for b, i in each],
    }}  # fmt: skip


@ours
def inputs_2_1():
    rng = random.Random(21)
    yield from [([2], 1, 1), ([1], 3, 2), ([2, 0], 3, 5)]
    for size in (1, 2, 4):
        table = rng.sample(range(9), 3)
        yield table, size, rng.randint(2 * size + 1, 3 * size)

# %% check-2-1 points=2
@check
def exercise_2_1(slots):
    inputs = list(inputs_2_1())
    examine(slots, inputs, case_2_1)
    sizes = sum(size for _, size, _ in inputs)
    print(f"{len(inputs)} tables right, {sizes} slots in a block")

# %% [markdown]
# ## Exercise 2.2: blocks of a request

# %% ex-2-2
def blocks(num_tokens, block_size):
    """Blocks that hold `num_tokens` tokens."""
    ### BEGIN SOLUTION
    return -(-num_tokens // block_size)
    ### END SOLUTION

# %% check-2-2
@check
def exercise_2_2(blocks):
    def case(value, num_tokens, size):
        (got,) = list_of_numbers([value], "blocks must return a number")
        asked = f"{num_tokens} tokens, block_size = {size}"
        return asked, got, cdiv(num_tokens, size), {"Round up.": num_tokens // size}

    examine(blocks, [(4, 4), (5, 4), (1, 1)], case)
    print("Exercise 2.2: passed")
