"""A radix tree over cached blocks: sequences that begin alike share the way from the root, and the
tree branches where they part.

A node holds whole blocks. Two sequences that part inside a block get a child each, and what they
share of that block stands in both. Names are those of SGLang's `radix_cache.py` (Zheng et al.,
NeurIPS 2024, section 3).
"""

from bisect import bisect_left, insort
from itertools import compress, count, pairwise
from operator import ne

from minikv.kv_cache.base import InvariantBroken
from minikv.kv_cache.block_cache import CachingBlockPool
from minikv.kv_cache.eviction import LRU


def num_common(a, b) -> int:
    """How many entries a and b have in common, before the first that differs."""
    return len(a) if a == b else next(compress(count(), map(ne, a, b)), min(len(a), len(b)))


class RadixNode:
    """A piece of a sequence without a branch inside, and the blocks that hold it.

    key: its tokens, block_size for each block; or names of its blocks, one for each.
    blocks: cached blocks; a root has none, and no key. lock_ref: how many requests hold them.
    name: the key of its first block, a tuple, by which its parent finds it; a root's is its tree's.
    children: by name. order: their names in sorted order, if they are of several tokens: what would
        stand between two of them has most in common with the one or the other.
    """

    __slots__ = ("blocks", "children", "key", "lock_ref", "name", "order", "parent")

    def __init__(self, name, key=(), blocks=(), lock_ref=0):
        self.name, self.key, self.blocks, self.lock_ref = name, key, list(blocks), lock_ref
        self.parent, self.children, self.order = None, {}, []
        for block in blocks:
            block.key = self

    def __repr__(self):
        return f"RadixNode({self.name}, {len(self.blocks)} blocks, lock_ref {self.lock_ref})"

    @property
    def width(self) -> int:
        """Entries of key for a block."""
        return len(self.key) // len(self.blocks)

    def add(self, child) -> None:
        child.parent, self.children[child.name] = self, child
        if len(child.name) > 1:
            insort(self.order, child.name)

    def remove(self, child) -> None:
        del self.children[child.name]
        if len(child.name) > 1:
            del self.order[bisect_left(self.order, child.name)]

    def extend(self, key, blocks) -> None:
        self.key += key
        self.blocks += blocks
        for block in blocks:
            block.key = self

    def split(self, num_blocks) -> "RadixNode":
        """Cuts its first blocks off, as a node above it, and returns that. A path is named by its
        last node, so whoever held this one holds both."""
        width, at = self.width, num_blocks * self.width
        upper = RadixNode(self.name, self.key[:at], self.blocks[:num_blocks], self.lock_ref)
        upper.parent, self.parent.children[self.name] = self.parent, upper
        self.key, self.blocks = self.key[at:], self.blocks[num_blocks:]
        self.name = tuple(self.key[:width])
        upper.add(self)
        return upper

    def lock(self, by) -> None:
        """One request more (1) or less (-1) holds it, and all above it."""
        node = self
        while node is not None:
            node.lock_ref += by
            node = node.parent

    def match(self, key, width):
        """Walks down from the end of this node, along key. Returns (the blocks found, the node
        where the walk ended, how many blocks of that node it passed)."""
        node, found, at, num_passed = self, [], 0, len(self.blocks)
        while num_passed == len(node.blocks):
            child = node.children.get(tuple(key[at : at + width]))
            if child is None:
                break
            num_passed = num_common(child.key, key[at : at + len(child.key)]) // width
            found += child.blocks[:num_passed]
            node, at = child, at + num_passed * width
        return found, node, num_passed

    def match_in_block(self, num_passed, tokens):
        """Where the walk ended here: (the block after it that has most of the tokens at its
        beginning, how many). (None, 0) where none has the first."""
        if num_passed < len(self.blocks):
            at, width = num_passed * self.width, self.width
            near = [(tuple(self.key[at : at + width]), self.blocks[num_passed])]
        else:
            place = bisect_left(self.order, tuple(tokens))
            names = self.order[max(0, place - 1) : place + 1]
            near = [(name, self.children[name].blocks[0]) for name in names]
        best, most = None, 0
        for name, block in near:
            if num_common(name, tokens) > most:
                best, most = block, num_common(name, tokens)
        return best, most


class RadixBlockPool(CachingBlockPool):
    """The key of a cached block is its node. Whoever holds a block holds all that stand before it
    and lets go of the last one first: so the least recently used of those that nobody holds is
    always the last block of a leaf.

    trees: the roots by name.
    """

    def __init__(self, num_blocks):
        super().__init__(num_blocks, LRU())
        self.trees = {}

    def forget(self, blocks):
        """Takes them out of their tree: each is the last of a leaf when its turn comes."""
        for block in blocks:
            node, block.key = block.key, None
            del node.key[-node.width :]
            node.blocks.pop()
            if not node.blocks:
                node.parent.remove(node)
                if node.parent.parent is None and not node.parent.children:
                    del self.trees[node.parent.name]

    def prune(self, node) -> None:
        """Nobody finds the blocks of node and of those below it any more."""
        nodes = [node]
        for each in nodes:
            nodes += each.children.values()
        for each in reversed(nodes):
            for block in each.blocks[::-1]:
                self.unpublish(block)

    def check_index(self):
        """A node has the key that its place and its number of blocks ask for, and is locked as
        often as each of its blocks is held. A block with a key lies in that node, once. No block is
        to be taken before one that stands after it."""
        places, nodes = {}, list(self.trees.values())
        for node in nodes:
            nodes += node.children.values()
            if node.order != sorted(name for name in node.children if len(name) > 1):
                raise InvariantBroken(f"{node} has children {[*node.children]}: {node.order}")
            for name, child in node.children.items():
                if child.parent is not node or child.name != name:
                    raise InvariantBroken(f"{child} is found at {name} below {node}")
                width, num_blocks = len(name), len(child.blocks)
                if not num_blocks or len(child.key) != num_blocks * width:
                    raise InvariantBroken(f"{child} has a key of {len(child.key)}")
                if tuple(child.key[:width]) != name:
                    raise InvariantBroken(f"{child} begins with {child.key[:width]}")
                for block in child.blocks:
                    if block in places or block.key is not child:
                        raise InvariantBroken(f"{block} lies in {child}, and elsewhere")
                    if block.ref_cnt != child.lock_ref:
                        raise InvariantBroken(f"{block} lies in {child}")
                    places[block] = child
        if empty := [root for root in self.trees.values() if not root.children]:
            raise InvariantBroken(f"trees without blocks: {empty}")
        if lost := [block for block in self.blocks if block.key and block not in places]:
            raise InvariantBroken(f"{lost} have a node, but lie in no tree")
        turns = {block: i for i, block in enumerate(self.cached_free.get_all_free_blocks())}
        for node in {places[block] for block in turns}:
            line = [*node.parent.blocks[-1:], *node.blocks]
            if any(
                turns.get(before, len(turns)) < turns.get(after, len(turns))
                for before, after in pairwise(line)
            ):
                raise InvariantBroken(f"of {line}, one is to be taken before one after it")
