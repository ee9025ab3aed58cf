"""RadixAttention (Zheng et al., NeurIPS 2024, section 3): a prefix cache that keeps what it knows
in a tree of tokens.

`prefix.py` asks a map for each block of a prompt, by a key that stands for all that comes before
it. Here the prompt is walked down a tree. Nothing is hashed, so nothing can collide; and the tree
shows how far two prompts agree inside a block, so that a hit can end there: the block is copied.
Blocks are given up in the order of prefix.py, the least recently used first.
"""

from array import array

from minikv.kv_cache.base import InvariantBroken, cdiv
from minikv.kv_cache.block_cache import CachingKVCacheManager
from minikv.kv_cache.prefix import block_names
from minikv.kv_cache.radix_tree import RadixBlockPool, RadixNode


class RadixKVCacheManager(CachingKVCacheManager):
    """Paged blocks, of which the full ones are found again by whoever has the same beginning.

    A request holds a path: from the root of its tree to the last of its blocks that lies there. The
    path is locked, and nothing on it is evicted. Each cache_salt has a tree of its own.

    Where a block has several tokens, a hit may end inside one, which is copied (see copies()). So
    num_cached_tokens need be no multiple of block_size, and of a whole prompt that is found only
    the last token is left to run.

    Requests that compute the same tokens at once end with one copy of them: cache_blocks() puts the
    tree's blocks into the table of whoever comes later, and gives its own back.

    num_evictions: cached blocks that were taken for something else.
    """

    def __init__(self, num_blocks, block_size, *, max_model_len=None):
        super().__init__(num_blocks, block_size, max_model_len=max_model_len)
        self._held = {}  # request_id -> (last node of its path, number of blocks on the path)
        self._last_found = None, 0, ((), 0)  # who asked last, num_unpublished, the answer

    def _new_pool(self):
        return RadixBlockPool(self.num_blocks)

    # -- looking up, and taking ----------------------------------------------------------------

    def _tree_of(self, request):
        """(The name of its tree, the entries of a key for each block.) Tokens and names of blocks
        lie in different trees."""
        is_named = request.token_ids is None
        return (is_named, request.cache_salt), 1 if is_named else self.block_size

    def _key(self, request, start, stop):
        """The tokens in its blocks start to stop; the blocks' names if it has no tokens."""
        if request.token_ids is not None:
            return array("q", request.token_ids[start * self.block_size : stop * self.block_size])
        made_with = self.block_size, type(self)
        if request.keys_made_with != made_with:
            request.block_keys, request.keys_made_with = [], made_with
        names = request.block_keys
        names += block_names(request, self.block_size, len(names), stop)
        return names[start:stop]

    def match_prefix(self, request):
        """(The cached blocks of its known tokens, the number of tokens found.) The last block may
        be found in part. The last known token must be run for its logits: it is never counted."""
        name, width = self._tree_of(request)
        root = self.block_pool.trees.get(name)
        if root is None:
            return [], 0
        num_blocks = request.num_tokens // self.block_size
        key = self._key(request, 0, num_blocks + (width > 1))  # the tokens after them, too
        found, node, num_passed = root.match(key, width)
        num_tokens = len(found) * self.block_size
        if width > 1:
            block, num_more = node.match_in_block(num_passed, key[num_tokens : num_tokens + width])
            if num_more:
                found.append(block)
                num_tokens += num_more
        return found, min(num_tokens, request.num_tokens - 1)

    def get_num_cached_tokens(self, request):
        answer = self.match_prefix(request)
        self._last_found = request, self.block_pool.num_unpublished, answer
        return answer[1]

    def _admit_with_hit(self, request, num_tokens, num_cached_tokens, must_fit, keep_free):
        # Admission follows the question, whose answer holds unless a block was forgotten since.
        asked, num_unpublished, (found, num_found) = self._last_found
        if asked is not request or num_unpublished != self.block_pool.num_unpublished:
            found, num_found = self.match_prefix(request)
        if num_cached_tokens > num_found or request.request_id in self.tables:
            raise ValueError(
                f"num_cached_tokens is {num_cached_tokens}, but {num_found} tokens are found for "
                f"request {request.request_id!r}"
            )
        num_hit_blocks, num_copied_tokens = divmod(num_cached_tokens, self.block_size)
        hit = found[:num_hit_blocks]
        num_new_blocks = cdiv(num_tokens, self.block_size) - num_hit_blocks
        num_needed = max(num_new_blocks, cdiv(must_fit, self.block_size) - num_hit_blocks)
        num_idle = sum(block.ref_cnt == 0 for block in hit)  # free until now, and not from now on
        if num_needed + num_idle + keep_free > self.num_obtainable_blocks(request):
            return None
        self.block_pool.touch(hit)
        blocks = hit + self.block_pool.get_new_blocks(num_new_blocks)
        table = self.set_table(request, [block.block_id for block in blocks])
        self._hold(request, num_hit_blocks)
        if num_copied_tokens:
            # Nobody holds the source for us. Evicted or not, it is read before this step writes.
            source, own = found[num_hit_blocks].block_id, table[num_hit_blocks]
            self._origins[own] = self._origins.get(source, source)
        return table

    def _hold(self, request, num_blocks):
        """From now on it holds the path of the first num_blocks blocks of its table, no other."""
        before, _ = self._held.pop(request.request_id, (None, 0))
        if num_blocks:
            last = self.block_pool.blocks[self.tables[request.request_id][num_blocks - 1]]
            node = last.key
            if node.blocks[-1] is not last:
                node = node.split(node.blocks.index(last) + 1)
            node.lock(1)
            self._held[request.request_id] = node, num_blocks
        if before is not None:
            before.lock(-1)

    # -- putting in, and letting go --------------------------------------------------------------

    def cache_blocks(self, request):
        # Tokens counted: those whose K and V are written. A block is full when all of its are.
        num_full_blocks = request.num_computed_tokens // self.block_size
        held, num_held = self._held.get(request.request_id, (None, 0))
        if num_full_blocks <= num_held:
            return
        pool, table = self.block_pool, self.tables[request.request_id]
        own = [pool.blocks[block_id] for block_id in table[num_held:num_full_blocks]]
        key, (name, width) = self._key(request, num_held, num_full_blocks), self._tree_of(request)
        start = held or pool.trees.setdefault(name, RadixNode(name))
        found, node, num_passed = start.match(key, width)
        if found:  # another has computed them meanwhile
            pool.touch(found)
            table[num_held : num_held + len(found)] = [block.block_id for block in found]
            pool.free_blocks(own[: len(found)][::-1])
        key, own = key[len(found) * width :], own[len(found) :]
        if own and node is held and node.lock_ref == 1 and not node.children:
            node.extend(key, own)  # a leaf that nobody else holds grows with its request
            self._held[request.request_id] = node, num_full_blocks
            return
        if own:
            parent = node.split(num_passed) if num_passed < len(node.blocks) else node
            parent.add(RadixNode(tuple(key[:width]), key, own))
        self._hold(request, num_full_blocks)

    def free(self, request):
        self._hold(request, 0)
        super().free(request)
        if request.finish_reason is not None:  # names of its own would keep the request alive
            request.block_keys = []

    def fork(self, parent, child):
        if parent.request_id in self.tables:
            self.cache_blocks(parent)  # then full blocks that they share are on both their paths
        if not super().fork(parent, child):
            return False
        if child.token_ids is None and not child.block_keys:
            child.block_keys = parent.block_keys[: child.num_computed_tokens // self.block_size]
            child.keys_made_with = parent.keys_made_with
        _, num_held = self._held.get(parent.request_id, (None, 0))
        self._hold(child, min(num_held, len(self.tables[child.request_id])))
        return True

    def _make_own(self, request, table, tail, new_blocks):
        if tail.key is not None:  # it was full for the parent: the last block of this path
            self._hold(request, table.index(tail.block_id))
            if tail.ref_cnt == 1:
                self.block_pool.prune(tail.key)
        super()._make_own(request, table, tail, new_blocks)

    def check(self):
        """As above, and: the trees are whole (see RadixBlockPool.check_index); a request's table
        begins with the blocks of its path, whose key is its tokens, and has no other cached one."""
        super().check()
        for request_id, (node, num_blocks) in self._held.items():
            table, path, key = self.tables.get(request_id, ())[:num_blocks], [], []
            while node.parent is not None:
                path, key, node = [*node.blocks, *path], [*node.key, *key], node.parent
            if [block.block_id for block in path] != [*table]:
                raise InvariantBroken(f"request {request_id!r} holds {path}: its table is {table}")
            request = self.requests[request_id]
            name, width = self._tree_of(request)
            num_written = request.num_computed_tokens * width // self.block_size
            tokens = [*self._key(request, 0, num_blocks)]
            if node.name != name or tokens[:num_written] != key[:num_written]:
                raise InvariantBroken(f"request {request_id!r} holds the path of {key}: {tokens}")
        for request_id, table in self.tables.items():
            _, num_held = self._held.get(request_id, (None, 0))
            for block_id in table[num_held:]:
                if self.block_pool.blocks[block_id].key is not None:
                    raise InvariantBroken(
                        f"request {request_id!r} names block {block_id}, which is cached, but "
                        f"holds only its first {num_held}"
                    )
