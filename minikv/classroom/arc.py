"""Which public name belongs to which chapter: nothing is used before it has been built.

A name's chapter is that of the name itself where the table of names has it, else that of the module
which it is taken from. What neither table knows has no chapter yet, which is a violation too.
"""

import ast

# What `import minikv` offers; wherever it is imported from, a name counts with this chapter.
NAMES = {
    "LLM": 0,
    "SamplingParams": 0,
    "Request": 0,
    "RequestOutput": 0,
    "show": 0,
    "ModelSpec": 1,
    "KVCacheManager": 1,
    "OutOfKVMemory": 1,
    "MemoryReport": 1,
    "ContiguousKVCacheManager": 2,
    "Scheduler": 2,
    "record": 2,
    "rows_of": 2,
    "MemoryRecorder": 3,
    "enough_in_sum": 3,
    "RefusalRecorder": 3,
    "Refusal": 3,
    "with_much_free": 3,
    "moment": 3,
    "moment_of": 3,
    "memory_map": 3,
    "memory_maps": 3,
    "memory_strip": 3,
    "memory_strips": 3,
    "memory_player": 3,
    "free_vs_largest": 3,
    "free_extent_histogram": 3,
    "fragmentation_lab": 3,
    "lab_run": 3,
    "lab_figure": 3,
    "LabSettings": 3,
    "BlockPool": 4,
    "FreeKVCacheBlockQueue": 4,
    "PagedKVCacheManager": 4,
    "block_table_map": 4,
    "labels_of": 4,
    "translate": 4,
    "translation": 4,
    "translation_player": 4,
    "beside": 5,
    "excerpt": 5,
    "gather_map": 5,
    "gathered_blocks": 5,
    "online_softmax": 5,
    "softmax_at": 5,
    "softmax_player": 5,
    "softmax_states": 5,
    "BeamSearchParams": 7,
    "PrefixCachingKVCacheManager": 7,
    "RadixKVCacheManager": 7,
    "LifeRecorder": 7,
    "block_lives": 7,
    "fork_tree": 7,
    "lives_player": 7,
    "prompt_hits": 7,
    "prompt_tree": 7,
    "prompts_lab": 7,
    "prompts_run": 7,
    "MOONCAKE_PAPER": 7,
    "facts_of": 7,
    "hits_run": 7,
    "open_for_hits": 7,
}
MODULES = {
    "minikv.engine": 0,
    "minikv.request": 0,
    "minikv.observe": 0,
    "minikv.viz": 0,
    "minikv.classroom": 0,
    "minikv.machine": 0,
    "minikv.specs": 1,
    "minikv.kv_cache.base": 1,
    "minikv.model.loader": 1,
    "minikv.model.sampler": 1,
    "minikv.model.tiny": 1,
    "minikv.metrics": 2,
    "minikv.observe.tokens": 2,
    "minikv.observe.steps": 2,
    "minikv.observe.memory": 3,
    "minikv.observe.refusals": 3,
    "minikv.viz.batch": 2,
    "minikv.viz.gantt": 2,
    "minikv.viz.owners": 3,
    "minikv.viz.maps": 3,
    "minikv.viz.strips": 3,
    "minikv.viz.fragmentation": 3,
    "minikv.viz.lab": 3,
    "minikv.viz.tables": 4,
    "minikv.viz.board": 4,
    "minikv.viz.gathered": 5,
    "minikv.viz.softmax": 5,
    "minikv.kv_cache.contiguous": 2,
    "minikv.scheduler": 2,
    "minikv.static_batching": 2,
    "minikv.core": 2,
    "minikv.simulator": 2,
    "minikv.experiments": 3,
    "minikv.experiments.hits": 7,
    "minikv.experiments.radix_vs_hash": 7,
    "minikv.workloads": 2,
    "minikv.workloads.traces": 7,
    "minikv.kv_cache.extents": 3,
    "minikv.kv_cache.extent_base": 3,
    "minikv.kv_cache.extent_tree": 3,
    "minikv.kv_cache.buddy": 3,
    "minikv.kv_cache.paged": 4,
    "minikv.model.attention": 5,
    "minikv.model.backends": 5,
    "minikv.model.kernels": 5,
    "minikv.model.runner": 5,
    "minikv.engine.beam_search": 7,
    "minikv.experiments.fig15": 7,
    "minikv.experiments.sharing": 7,
    "minikv.kv_cache.prefix": 7,
    "minikv.kv_cache.block_cache": 7,
    "minikv.kv_cache.eviction": 7,
    "minikv.observe.blocks": 7,
    "minikv.experiments.prompts": 7,
    "minikv.viz.prompts": 7,
    "minikv.viz.sharing": 7,
    "minikv.viz.swimlane": 7,
    "minikv.kv_cache.radix": 7,
    "minikv.kv_cache.radix_tree": 7,
    "minikv.bench": 8,
}


def chapter_of(name):
    """The chapter of a dotted name (`minikv.LLM`, `minikv.specs.GPUS`); None if it has none."""
    parts = name.split(".")
    # `minikv.LLM.generate` counts as LLM: methods come with their class.
    for part in parts[1:]:
        if part in NAMES:
            return NAMES[part]
    for length in range(len(parts), 1, -1):
        if ".".join(parts[:length]) in MODULES:
            return MODULES[".".join(parts[:length])]
    return None


def names_used(source):
    """The dotted minikv names that a piece of Python imports or reaches as attributes."""
    tree = ast.parse(source)
    aliases, used = {}, set()  # local name -> dotted minikv name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "minikv":
                    aliases[alias.asname or "minikv"] = alias.name if alias.asname else "minikv"
                    if alias.name != "minikv":
                        used.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "minikv":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = name
                used.add(name)
    inner = set()  # `minikv.viz` inside `minikv.viz.draw`: only the whole chain is a use
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            chain, root = [], node
            while isinstance(root, ast.Attribute):
                chain.append(root.attr)
                root = root.value
                inner.add(root)
            if isinstance(root, ast.Name) and root.id in aliases:
                used.add(".".join([aliases[root.id], *reversed(chain)]))
    return {name for name in used if name != "minikv"}


def violations(source, chapter):
    """One line for each name in a chapter's code that belongs to a later chapter, or to none."""
    found = []
    for name in sorted(names_used(source)):
        home = chapter_of(name)
        if name.endswith("__"):  # minikv.__version__, __file__
            continue
        if home is None:
            found.append(f"{name} has no chapter; add it to minikv/classroom/arc.py")
        elif home > chapter:
            found.append(f"{name} belongs to chapter {home:02d}, used in chapter {chapter:02d}")
    return found


def without_magics(source):
    """A cell as plain Python: cell magics are dropped whole, line magics and shell lines pass."""
    if source.startswith("%%"):
        return ""
    try:
        ast.parse(source)
        return source  # a line that begins with % may also go on with a remainder
    except SyntaxError:
        pass
    lines = []
    for line in source.splitlines():
        bare = line.lstrip()
        # It may be the whole body of a block, so something must stand in its place.
        lines.append(line[: -len(bare)] + "pass" if bare.startswith(("%", "!")) else line)
    return "\n".join(lines)


def code_of(notebook):
    """A notebook's code as one Python text."""
    return "\n".join(without_magics(c.source) for c in notebook.cells if c.cell_type == "code")
