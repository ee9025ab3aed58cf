# %% [markdown]
# # 01 Slots
#
# In chapter 1 a slot holds one token, and 16 slots make a block.

# %% block-size
block_size = 16
print(block_size)

# %% noisy
import sys

from minikv.classroom import arc

print("a progress bar", file=sys.stderr)
arc.chapter_of("minikv.LLM")
