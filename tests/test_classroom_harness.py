"""The checks' common part: what must not make a right answer wrong, nor a wrong one right."""

import builtins
import functools
import itertools
import sys
import textwrap
import threading
import warnings
from collections import deque
from fractions import Fraction

import numpy as np
import pytest
import torch
from classroom_course import harness_course

from minikv.classroom import harness
from minikv.classroom.check import check_notebook
from minikv.classroom.execute import execute
from minikv.classroom.files import CourseError, read_notebook, to_bytes
from minikv.classroom.harness import ask, explain, plain, same, text
from minikv.classroom.harness.values import snapshot
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.paged import PagedKVCacheManager

SETUP = """
import math
from functools import partial

from minikv.classroom.harness import (
    ask, begin, bounded, check, examine, explain, lent, list_of_numbers, ours, told
)
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.paged import PagedKVCacheManager

LIMIT = 3
begin(globals(), forbidden={"minikv.kv_cache.": "the package's own manager"},
      allowed=["minikv.kv_cache.base"])
"""
CASES = """
WIDE = "A block is not a slot."

@ours
def case_1(value, table, size):
    got = list_of_numbers(value, "slots must return a list")
    wanted = [block * size + i for block in table for i in range(size)]
    assert len(got) == len(wanted), f"{len(got)} slots, not {sum(1 for _ in wanted)}"
    return f"table {table}", {"slots": got}, {"slots": wanted}, {"slots": {WIDE: list(table)}}


@lent
class Session:
    def __init__(self):
        self.calls = 0

    def run(self):
        self.calls += sum([1])
        return self
"""
CHECK = """
@check
def exercise_1(slots):
    inputs = list([([2], 1), ([2], 3), ([2, 0], 3)])
    examine(slots, inputs, case_1)
    print(sum(map(len, inputs)), LIMIT, math.pi > 3, "passed")
"""
RIGHT = "def slots(table, size):\n    return [b * size + i for b in table for i in range(size)]\n"


def notebook(*cells, name="<cell-%d>"):
    """The namespace after these cells, as a kernel has it."""
    namespace = {"__name__": "__main__"}
    for number, source in enumerate(cells):
        run(source, namespace, name % number)
    return namespace


def run(source, namespace, name="<cell>"):
    source = textwrap.dedent(source)
    exec(compile(source, name, "exec"), namespace)


def said(answer, check=CHECK, before=""):
    """The message of the check for an answer; None if it passed."""
    namespace = notebook(SETUP, CASES, before)
    run(answer, namespace, "<answer>")
    try:
        run(check, namespace, "<check>")
    except AssertionError as error:
        assert error._render_traceback_() == str(error).splitlines()
        return str(error)
    return None


# ------------------------------------------------------------------------- the learner's own names


@pytest.mark.parametrize("cell", [
    "sum = 0",
    "def print(*args, **kw): raise RuntimeError",
    "list = len = map = range = sum = 3",
    "math = cdiv = LIMIT = None",
    "case_1 = examine = list_of_numbers = None",
    "WIDE = None",
])  # fmt: skip
def test_a_right_answer_passes_whatever_names_are_bound(cell, capsys):
    # This answer stands on no name: it is the check that must not care.
    answer = "def slots(t, size):\n    return [b * size + i for b in t for i in (0, 1, 2)[:size]]"
    run(CHECK, notebook(SETUP, CASES, answer, cell))
    assert capsys.readouterr().out == "6 3 True passed\n"


def test_an_answer_keeps_its_own_names():
    """The learner's `sum` is not Python's, and the answer means it."""
    own = "def sum(table, size):\n    return [b * size + i for b in table for i in range(size)]\n"
    assert said(f"{own}def slots(table, size):\n    return sum(table, size)") is None


def test_a_setup_that_runs_again_keeps_what_the_checks_have():
    namespace = notebook(SETUP, CASES, RIGHT, "sum = 0\nLIMIT = 9", SETUP)
    run("case_1 = None", namespace)
    run(CHECK, namespace)


def test_an_answer_that_is_not_there_is_named():
    with pytest.raises(NameError, match="no slots yet: run the cell above"):
        run(CHECK, notebook(SETUP, CASES))


@pytest.mark.parametrize("answer", [
    "from functools import partial\ndef f(size, table):\n"
    "    return [b * size + i for b in table for i in range(size)]\n"
    "slots = lambda *a: None\nslots = partial(lambda f, t, s: f(s, t), f)",
    "class Slots:\n    def __call__(self, table, size):\n"
    "        return (b * size + i for b in table for i in range(size))\nslots = Slots()",
    "import numpy as np\ndef slots(table, size):\n"
    "    return (np.array(table)[:, None] * size + np.arange(size)).reshape(-1)",
    "import torch\ndef slots(table, size):\n"
    "    return (torch.tensor(table)[:, None] * size + torch.arange(size)).reshape(-1)",
    "import numpy as np\nfrom collections import deque\ndef slots(table, size):\n"
    "    return deque(np.int64(b * size + i) for b in table for i in range(size))",
])  # fmt: skip
def test_right_answers_of_any_kind_pass(answer):
    assert said(answer) is None


# -------------------------------------------------------------------------------- their settings


def test_the_checks_run_under_the_usual_settings_and_give_the_learners_back():
    before = (
        "import torch, warnings, numpy as np\ntorch.set_default_dtype(torch.float64)\n"
        "np.seterr(all='raise')\ntorch.set_default_device('meta')\nwarnings.simplefilter('error')\n"
    )
    check = """
    @check
    def exercise(slots):
        import warnings
        import numpy, torch
        warnings.warn("a library's", stacklevel=1)
        numpy.float32(1) / numpy.float32(0)
        x = torch.zeros(2) + torch.tensor(0.5)
        assert (x.dtype, x.device.type, x.sum().item()) == (torch.float32, "cpu", 1.0)
    """
    settings = np.geterr()
    try:
        with warnings.catch_warnings():
            assert said(RIGHT, check, before) is None
            assert torch.get_default_dtype() is torch.float64
            assert torch.get_default_device().type == "meta"
            assert np.geterr()["divide"] == "raise"
            assert warnings.filters[0][0] == "error"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        np.seterr(**settings)


# ------------------------------------------------------------------------------------- the bounds


@pytest.mark.parametrize(("body", "message"), [
    ("while True: pass", "slots does not end: after 10 million"),
    ("while True:\n        try: size += 1\n        except Exception: pass", "does not end"),
    ("while True:\n        try: size += 1\n        except: pass", "does not end"),
    ("    \n    while True: yield 1", None),  # endless, but a generator: its first 1000 count
    ("return map(lambda i: loop(), table)", "does not end"),
    ("return loop2.loop()", "does not end"),
    ("return case_1([-1], table, size)[2]['slots']", "slots hands the work to the check."),
    ("return PagedKVCacheManager(4, 2)", "hands the work to the package's own manager"),
    ("return list(map(PagedKVCacheManager, [4], [2]))", "to the package's own manager"),
    ("return [cdiv(4, 2) and b * size + i for b in table for i in range(size)]", None),
    ("Session().run()\n    return [b * size + i for b in table for i in range(size)]", None),
    ("quit()", "slots called exit()"),
    ("return None", "slots returned None: is its `return` missing?"),
    ("table.append(1); return [0]", "slots changed what it was given: work on a copy."),
])  # fmt: skip
def test_an_answer_ends_and_is_the_learners_own(body, message, monkeypatch):
    monkeypatch.setattr(harness.bounds, "MOST_STEPS", 20_000)
    monkeypatch.setattr(harness.bounds.bounded, "__kwdefaults__",
                        {"steps": 20_000, "memory": None, "finish": None})  # fmt: skip
    monkeypatch.setattr(harness.verdicts.ask, "__kwdefaults__",
                        {"asked": None, "raw": False, "steps": 20_000, "memory": None})  # fmt: skip
    monkeypatch.setattr(builtins, "quit", sys.exit, raising=False)
    module = type(sys)("loop2")
    exec(compile("def loop():\n    while True: pass", "/home/me/loop2.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "loop2", module)
    before = "import loop2\ndef loop():\n    while True: pass"
    found = said(f"def slots(table, size):\n    {body}", before=before)
    if body.strip().endswith("yield 1"):
        assert "1000 slots, not 1" in found
    else:
        assert found is None if message is None else message in found


def test_the_package_itself_is_not_the_answer():
    found = said("slots = PagedKVCacheManager")
    assert "PagedKVCacheManager hands the work to the package's own manager" in found


def test_the_engine_may_use_the_package_but_the_answer_may_not():
    check = """
    @ours
    def engine(answer):
        return PagedKVCacheManager(4, 2), answer([1], 2)

    @check
    def exercise(slots):
        assert bounded(engine, slots)[1] == [2, 3]
    """
    assert said(RIGHT, check) is None
    lazy = "def slots(t, s):\n    return PagedKVCacheManager(4, 2)"
    assert "engine hands the work to the package's own manager" in said(lazy, check)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
@pytest.mark.parametrize("body", [
    "return [0] * 500_000_000",
    "import itertools; return list(itertools.count())",
    "import numpy; return numpy.ones(500_000_000)",
    "import torch; return torch.ones(1_000_000_000)",
])  # fmt: skip
def test_an_answer_of_gigabytes_is_refused(body):
    found = said(f"def slots(table, size):\n    {body}")
    assert "slots took more than 2 GiB of memory" in found
    assert len([0] * 300_000_000)  # the limit is gone again


def test_an_error_in_a_library_names_the_learners_line():
    answer = (
        "import numpy as np\ndef slots(table, size):\n    x = 1\n    return np.zeros(3).reshape(2)"
    )
    import linecache

    linecache.cache["<answer>"] = (1, None, answer.splitlines(keepends=True), "<answer>")
    found = said(answer)
    assert found.splitlines()[:2] == [
        "slots ended in ValueError: cannot reshape array of size 3 into shape (2,)",
        "(line 4: return np.zeros(3).reshape(2))",
    ]
    assert "Its arguments were ([2], 1)" in found


def test_a_message_can_be_sent_whatever_letters_it_holds():
    found = said("def slots(table, size):\n    raise ValueError('π \\ud83d')")
    assert found.encode().decode().startswith("slots ended in ValueError: π ?")


def test_not_yet_written_stays_what_it_is():
    stub = 'def slots(table, size):\n    raise NotImplementedError("Exercise 1.1: write slots")'
    with pytest.raises(NotImplementedError, match="write slots") as caught:
        said(stub)
    assert caught.value._render_traceback_() == ["Exercise 1.1: write slots"]


def test_the_tracer_is_given_back():
    tracer = sys.gettrace()
    with pytest.raises(AssertionError, match="ended in ZeroDivisionError"):
        ask(lambda: 1 // 0)
    assert sys.gettrace() is tracer
    answer = []
    thread = threading.Thread(target=lambda: answer.append(ask(lambda n: n + 1, 2)))
    thread.start()
    thread.join()
    assert answer == [3]


# ------------------------------------------------------------------------------------- the values


@pytest.mark.parametrize(("value", "wanted"), [
    (np.int64(19), 19), (np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.bool_(True), True),
    (torch.tensor(3), 3), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (np.array(3), 3),
    (torch.tensor([True]), [True]), (True, True), (None, None), ("abc", "abc"),
    (("allocate", "A", np.int64(19)), ("allocate", "A", 19)),
    ({np.int64(1): torch.tensor([1, 2])}, {1: [1, 2]}),
    ([(np.int32(1), [torch.tensor(2)])], [(1, [2])]),
    (range(3), [0, 1, 2]), (deque([np.int8(1)]), [1]), (map(abs, [-1]), [1]),
    ({1: 2}.keys(), [1]), ({np.int64(1)}, {1}), (Fraction(1, 2), Fraction(1, 2)), (int, int),
    (torch.ones(2, requires_grad=True), [1.0, 1.0]),
])  # fmt: skip
def test_numbers_are_numbers(value, wanted):
    def types(value):
        if isinstance(value, dict):
            return [*map(types, value), *map(types, value.values())]
        return (
            [type(value), *map(types, value)]
            if isinstance(value, list | tuple | set)
            else type(value)
        )

    found = plain(value)
    assert found == wanted and types(found) == types(wanted)
    assert ask(lambda: value if value is not None else 0) is not None


def test_a_named_tuple_stays_one():
    import collections

    Pair = collections.namedtuple("Pair", "one two")
    assert plain(Pair(np.int64(1), 2)).one == 1


@pytest.mark.parametrize(("one", "other", "wanted"), [
    (1, 1.0, True), (1, 1 + 1e-12, True), (1, 1.001, False), (float("nan"), float("nan"), False),
    (float("inf"), float("inf"), True), ([1, [2]], (1, [2]), True), ([1], [1, 2], False),
    ({1}, {1}, True), ("a", "b", False), ({"a": 1}, {"a": np.int64(1)}, True),
    (torch.ones(2), torch.ones(2) + 1e-6, True), (torch.ones(2), torch.ones(3), False),
    (torch.ones(2).double(), torch.ones(2).double() + 1e-6, False), (torch.ones(2), [1, 1], True),
    (torch.tensor([True]), torch.tensor([1]), False), (torch.ones(2), None, False),
    (np.ones(2), [1, 1], True), (np.ones(2), torch.ones(2), True), (np.int64(3), 3, True),
])  # fmt: skip
def test_same(one, other, wanted):
    assert same(one, other) is wanted
    assert same(other, one) is wanted


@pytest.mark.parametrize(("value", "wanted"), [
    (1234.0, "1,234"), (0.123456789, "0.123457"), ([1, (2, 3.5)], "[1, [2, 3.5]]"), (True, "True"),
    (float("nan"), "nan"), ({"first"}, "{'first'}"), (torch.tensor(2.0), "2"),
    (torch.arange(9), "[0, 1, 2, 3, 4, 5, 6, 7, ... 9 numbers]"), (np.ones(2), "[1, 1]"),
    (torch.tensor([[True, False]]), "\n  x ."),
])  # fmt: skip
def test_text(value, wanted):
    assert text(value) == wanted


def test_numbers_and_lists_of_them():
    assert harness.numbers((np.int64(1), torch.tensor(2.5)), ("a", "b"), "f") == {"a": 1, "b": 2.5}
    assert harness.numbers(np.float32(2), ("a",), "f") == {"a": 2.0}
    for value in (3, (1,), ("1", "2"), (1, None), (1, float("nan")), "12"):
        with pytest.raises(AssertionError, match=r"f must return 2 numbers, \(a, b\), not "):
            harness.numbers(value, ("a", "b"), "f")
    assert harness.list_of_numbers(torch.arange(2), "no") == [0, 1]
    with pytest.raises(AssertionError, match="no, not '12'"):
        harness.list_of_numbers("12", "no")


def test_a_snapshot_sees_changes_in_what_is_data():
    session = object()
    value = [[1], {"a": torch.zeros(2)}, np.array([1.0, np.nan]), session]
    before = snapshot(value)
    assert snapshot(value) == before
    for change in (lambda: value[0].append(2), lambda: value[1]["a"].add_(1),
                   lambda: value[2].fill(3), lambda: value.__setitem__(3, object())):  # fmt: skip
        before = snapshot(value)
        change()
        assert snapshot(value) != before


# ----------------------------------------------------------------------------------- the verdicts

ADD = {"one more": lambda x: x + 1, "one more ": lambda x: x + 2, "twice": lambda x: 2 * x,
       "a third": lambda x: x + 1, "a fourth": lambda x: x + 1}  # fmt: skip


def verdict(got, names, wanted=lambda x: x, inputs=(1, 2, 5)):
    cases = [(f"f({x})", got(x), wanted(x), {name: ADD[name](x) for name in names}) for x in inputs]
    try:
        explain(cases)
    except AssertionError as error:
        return str(error).splitlines()
    return None


def test_a_slip_is_named_if_it_gives_what_all_cases_gave():
    assert verdict(lambda x: x, ADD) is None
    assert verdict(lambda x: 2 * x, ADD) == ["twice", "f(1)", "You returned 2; counted: 1."]
    assert verdict(lambda x: x + 2, ADD)[0] == "one more"
    assert verdict(lambda x: 7, ADD)[:2] == [
        "The answer is wrong in 3 of 3 cases. The smallest of them:", "f(1)",
    ]  # fmt: skip


def test_of_two_slips_that_fit_both_are_named_and_of_more_none():
    assert verdict(lambda x: x + 1, ["one more", "a third"])[:2] == ["one more", "Or: a third"]
    assert verdict(lambda x: x + 1, ["one more", "a third", "a fourth"])[0].startswith("The answer")
    assert verdict(lambda x: x + 1, ["one more", "twice"], inputs=(1,))[:2] == [
        "one more", "Or: twice",
    ]  # fmt: skip


def test_rounding_is_told_from_a_mistake():
    assert verdict(lambda x: round(x / 3, 2), [], lambda x: x / 3)[0] == (
        "The answer is nearly right: please don't round."
    )


def test_of_tensors_that_look_alike_the_worst_place_is_shown():
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    case = ("asked", {"out": one + torch.tensor([0, 1e-6])}, {"out": one}, {"out": {}})
    with pytest.raises(AssertionError, match=r"differ most in number 1: 2.000001, where 2 is exp"):
        explain([case])


def test_of_numbers_that_look_alike_more_digits_are_shown():
    told = verdict(lambda x: x / 3 + 1e-8, [], lambda x: x / 3)
    assert told[-1] == "They differ further back: 0.333333343333, where 0.333333333333 is expected."


def test_no_full_stop_stands_behind_a_picture():
    mask = torch.tensor([[True, False]])
    with pytest.raises(AssertionError, match=r"Your mask:\n  \. x\nCounted:\n  x \.$"):
        explain([("asked", {"mask": ~mask}, {"mask": mask}, {"mask": {}})])


def test_an_error_is_told_only_if_no_slip_explains_what_came_before():
    def answer(x):
        return x + 1 if x < 3 else 1 // 0

    def judge(value, x):
        return f"f({x})", value, x, {"one more": x + 1}

    with pytest.raises(AssertionError, match=r"^one more\n"):
        harness.examine(answer, [(1,), (2,), (5,)], judge)
    with pytest.raises(AssertionError, match="ended in ZeroDivisionError"):
        harness.examine(answer, [(5,)], judge)
    with pytest.raises(AssertionError, match="in words"):
        harness.examine(answer, [(5,)], judge, describe=lambda x: "in words")


def test_names_of_callables():
    assert harness.name_of(functools.partial(cdiv, 2)) == "cdiv"
    assert harness.name_of(itertools.count(1).__next__) == "__next__"
    assert harness.name_of(PagedKVCacheManager) == "PagedKVCacheManager"


# ------------------------------------------------------------------------------ in a real notebook

OWN_NAMES = """from pprint import pprint as print
import torch
torch.set_default_dtype(torch.float64)
sum = len = 0
random = cdiv = BLOCK_IDS = case_2_1 = examine = None
def slots(table, block_size, num_tokens):
    print(table)
    yield from [block * block_size + i for block in table for i in range(block_size)][:num_tokens]
"""


def checked(tmp_path, **answers):
    """{exercise: (status, message)} of the small chapter with these answers."""
    notebook = read_notebook(harness_course() / "exercises/02_blocks.ipynb")
    for cell in notebook.cells:
        cell.source = answers.get(cell.id.replace("-", "_"), cell.source)
    path = tmp_path / "02_blocks.ipynb"
    path.write_bytes(to_bytes(notebook))
    _, verdicts, others = check_notebook(path, harness_course(), 60)
    assert others == []
    return {v.exercise: (v.status, v.message) for v in verdicts}


def test_check_gives_the_verdict_of_the_harness(tmp_path):
    verdicts = checked(
        tmp_path, ex_2_1=OWN_NAMES, ex_2_2="def blocks(n, size):\n    return n // size"
    )
    assert verdicts == {
        "2.1": ("passed", ""),
        "2.2": ("not right yet",
                "Round up.\n5 tokens, block_size = 4\nYou returned 1; counted: 2."),
    }  # fmt: skip
    endless = "def slots(table, block_size, num_tokens):\n    while True: pass"
    library = "import json\ndef blocks(n, size):\n    return json.loads('{')"
    verdicts = checked(tmp_path, ex_2_1=endless, ex_2_2=library)
    assert verdicts["2.1"][1].startswith("slots does not end: after 10 million instructions")
    assert verdicts["2.2"][1].splitlines()[1] == "(line 3: return json.loads('{'))"


def test_a_failed_check_shows_its_message_alone():
    notebook = read_notebook(harness_course() / "exercises/02_blocks.ipynb")
    with pytest.raises(CourseError) as caught:
        execute(notebook, harness_course(), "exercises/02_blocks")
    shown = str(caught.value).split("------------------\n")[-1]
    assert "Exercise 2.1: write slots" in shown
    assert "Cell In" not in shown and "File " not in shown
