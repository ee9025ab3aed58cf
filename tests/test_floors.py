"""The house stands: a floor imports only floors below it, and what only accounts needs no torch.

The order is the design's. Imports inside functions count as well. A new file has to be placed in
FLOORS, or this fails.
"""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import minikv

ROOT = Path(minikv.__file__).parent.parent

# part of minikv (a file, or a folder with all that is in it) -> its floor
FLOORS = {
    "request": 1,
    "specs": 1,
    "metrics": 1,
    "kv_cache": 2,
    "scheduler": 3,
    "workloads": 3,
    "static_batching": 4,
    "core": 4,
    "simulator": 5,
    "model": 5,
    "engine": 6,
    "machine": 6,
    "observe": 6,
    "viz": 7,
    "experiments": 7,
    "classroom": 8,
    "bench": 8,
    "commands": 9,
    "__main__": 10,
}
WITHOUT_TORCH = [part for part, floor in FLOORS.items() if floor <= 5 and part != "model"]
WITHOUT_TORCH += ["observe", "viz", "experiments"]
STDLIB_ONLY = ["minikv", "minikv.__main__", "minikv.commands.lab", "minikv.commands.test"]
STDLIB_ONLY += ["minikv.commands.fresh"]


def part_of(module):
    """minikv.kv_cache.base -> kv_cache; None for minikv itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def module_of(path):
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def all_files():
    return sorted((ROOT / "minikv").rglob("*.py"))


def imports_of(source, module, is_package):
    """The modules of minikv that this source names in an import, anywhere in it."""
    package = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = package.split(".")
            above = names[: len(names) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base == "minikv":  # `from minikv import LLM` comes from where LLM lives
                found |= {minikv._HOMES.get(a.name, f"minikv.{a.name}") for a in node.names}
            else:
                found.add(base)
        elif isinstance(node, ast.Call) and node.args:  # import_module("minikv.engine")
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            text = node.args[0]
            if name in ("import_module", "__import__") and isinstance(text, ast.Constant):
                found.add(text.value)
    return {name for name in found if name.split(".")[0] == "minikv"}


def violations(module, imported):
    """What this module may not import. Within one part everything may."""
    here = part_of(module)
    if here is None:  # minikv itself imports nothing: its names are looked up when used
        return sorted(imported)
    bad = []
    for name in sorted(imported):
        there = part_of(name)
        if there is not None and there != here and FLOORS[there] >= FLOORS[here]:
            bad.append(f"{module} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})")
    return bad


def test_every_file_has_its_floor():
    parts = {part_of(module_of(path)) for path in all_files()} - {None}
    assert parts <= FLOORS.keys(), f"place these in FLOORS: {sorted(parts - FLOORS.keys())}"


def test_every_name_lives_in_a_part_that_has_a_floor():
    assert {part_of(home) for home in minikv._HOMES.values()} <= FLOORS.keys()


@pytest.mark.parametrize("path", all_files(), ids=lambda path: module_of(path))
def test_a_floor_imports_only_floors_below_it(path):
    source = path.read_text(encoding="utf-8")
    module = module_of(path)
    imported = imports_of(source, module, path.name == "__init__.py")
    assert not violations(module, imported)


def test_the_wings_stand_side_by_side():
    assert FLOORS["simulator"] == FLOORS["model"]  # so neither may import the other


@pytest.mark.parametrize(
    "module, source",
    [
        ("minikv.request", "import minikv.scheduler"),
        ("minikv.request", "from minikv.metrics import Metrics"),
        ("minikv.kv_cache.base", "from ..scheduler import Scheduler"),
        ("minikv.kv_cache.base", "from .. import core"),
        ("minikv.scheduler", "from minikv import LLM"),
        ("minikv.scheduler", "from minikv import workloads"),
        ("minikv.core", "def f():\n    from minikv.model.runner import ModelRunner"),
        ("minikv.core", "import importlib\nimportlib.import_module('minikv.engine')"),
        ("minikv.simulator.paradox", "from minikv.model import loader"),
        ("minikv.model.runner", "import minikv.simulator as s"),
        ("minikv", "from minikv.request import Request"),
    ],
)
def test_an_import_upwards_is_seen(module, source):
    assert violations(module, imports_of(source, module, is_package=module == "minikv"))


@pytest.mark.parametrize(
    "module, source",
    [
        ("minikv.scheduler", "from minikv.kv_cache.base import OutOfKVMemory\nimport minikv"),
        ("minikv.kv_cache.paged", "from .base import cdiv\nfrom minikv import Request"),
        ("minikv.engine", "from minikv import Scheduler\nimport torch"),
    ],
)
def test_an_import_downwards_is_fine(module, source):
    assert not violations(module, imports_of(source, module, is_package=False))


# -- what an import pulls in -------------------------------------------------------------------


def modules_after(*names):
    """The top-level modules that these imports add, in a process of its own."""
    code = (
        "import sys, importlib; before = set(sys.modules)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules_in(part):
    return [module_of(path) for path in all_files() if part_of(module_of(path)) == part]


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_what_only_accounts_leaves_torch_out(part):
    names = modules_in(part)
    if names:  # some are built in later chapters
        assert not {"torch", "transformers"} & modules_after(*names)


def test_the_way_in_needs_only_the_standard_library():
    """`python -m minikv lab` runs before anything is installed."""
    assert modules_after(*STDLIB_ONLY) - {"minikv"} <= sys.stdlib_module_names


def test_all_names_are_lazy_and_real():
    for name, home in minikv._HOMES.items():
        assert getattr(minikv, name) is getattr(importlib.import_module(home), name)
    assert set(minikv._HOMES) <= set(dir(minikv))
    with pytest.raises(AttributeError, match=r"minikv has no attribute 'LMM'; it offers .*LLM"):
        minikv.LMM  # noqa: B018


def loaded_after(part):
    """All modules that are there once every module of this part has been imported."""
    code = (
        "import sys, importlib\n"
        f"for name in {modules_in(part)!r}: importlib.import_module(name)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_is_observed_needs_no_figure():
    assert "minikv.observe.memory" in (loaded := loaded_after("observe"))
    assert not {"matplotlib", "minikv.viz"} & loaded


def test_figures_are_drawn_without_whatever_serves_requests():
    """Not even indirectly: a figure is a function of plain data."""
    assert "minikv.viz.lab" in (loaded := loaded_after("viz"))
    serving = {"simulator", "engine", "model", "scheduler", "static_batching", "core"}
    assert not {f"minikv.{part}" for part in serving | {"experiments"}} & loaded
