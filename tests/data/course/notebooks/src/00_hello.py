# %% [markdown]
# # 00 Hello
#
# The smallest chapter: it prints 42 and 1,024.

# %% print-numbers
print(42, 2**10)

# %% meant-error tags=["raises-exception"]
1 / 0

# %% [markdown]
# An A100 moves 2,039 GB each second. <!-- source: NVIDIA A100 80 GB datasheet -->
