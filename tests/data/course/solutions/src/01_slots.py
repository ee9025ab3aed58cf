# %% [markdown]
# # Exercises of chapter 01

# %% setup
import math

BLOCK_SIZE = 16

# %% [markdown]
# ## Exercise 1.1: blocks of a request

# %% ex-1-1
def num_blocks(num_tokens):
    """Blocks that hold `num_tokens` tokens."""
    ### BEGIN SOLUTION
    return -(-num_tokens // BLOCK_SIZE)
    ### END SOLUTION

# %% check-1-1 points=2
for num_tokens in (0, 1, 16, 17):
    got = num_blocks(num_tokens)
    want = math.ceil(num_tokens / BLOCK_SIZE)
    need = f"{num_tokens} tokens need {want}"
    assert got <= want, f"one block too many: {need}, not {got}"
    assert got >= want, f"the last block may be partly full: {need}"
    print(num_tokens, got)

# %% why tags=["solution"]
num_blocks(33)

# %% [markdown]
# ## Exercise 1.2: unused slots

# %% ex-1-2
def unused_slots(num_tokens):
    """Slots of its last block that a request leaves empty."""
    ### BEGIN SOLUTION
    return num_blocks(num_tokens) * BLOCK_SIZE - num_tokens
    ### END SOLUTION

# %% check-1-2
for num_tokens in (1, 16, 17):
    print(num_tokens, unused_slots(num_tokens))

# %% [markdown]
# ## Exercise 1.3: in your own words

# %% [markdown] written-1-3 points=2
# Paging leaves at most one block partly empty per request.
#
# Rubric: one point for "one block", one for "per request".
