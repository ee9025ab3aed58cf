"""The audit: it must catch every way in which a check, or a set of answers, can be bad."""

import pytest

from minikv.classroom import audit
from minikv.classroom.source import CourseError

SOURCE = """# %% setup
import math

BLOCK_SIZE = 16

# %% ex-1-1
def num_blocks(num_tokens):
    ### BEGIN SOLUTION
    return -(-num_tokens // BLOCK_SIZE)
    ### END SOLUTION

# %% report-it
def report(num_tokens):
    return f"{num_tokens} tokens: {num_blocks(num_tokens)} blocks"

# %% check-1-1 points=2
for num_tokens in (16, 17, 40):
    got, want = num_blocks(num_tokens), math.ceil(num_tokens / BLOCK_SIZE)
    assert isinstance(got, int), f"blocks are whole: {num_tokens} tokens gave {got}"
    assert got >= want, f"the last block may be partly full: {num_tokens} tokens gave {got}"
    assert got <= want, f"a full block needs no other: {num_tokens} tokens gave {got}"
    print(report(num_tokens))

# %% shown tags=["solution"]
raise RuntimeError("what only the solutions show is not needed")

# %% ex-1-2
def unused(num_tokens):
    ### BEGIN SOLUTION
    return num_blocks(num_tokens) * BLOCK_SIZE - num_tokens
    ### END SOLUTION

# %% check-1-2
assert unused(16) == 0, f"nothing is unused in a full block: {unused(16)}"
assert unused(17) == 15, f"count from the block's end: {unused(17)}"
print(unused(17))
"""
WRONG = {
    "floor": ("partly full", "return n // 16"),
    "floor, but one": ("partly full", "return max(1, n // 16)"),
    "one more": ("needs no other", "return n // 16 + 1"),
    "true division": ("are whole", "return n / 16"),
    "package": ("needs no other", "return n"),
}
RIGHT = {"negated": "return -(-n // BLOCK_SIZE)", "added": "return (n + 15) // 16"}
SECOND = {
    "tail": ("full block", "return 16 - n % 16"),
    "none": ("block's end", "return 0"),
    "used": ("block's end", "return n % 16"),
    "all": ("full block", "return n"),
    "blocks": ("full block", "return num_blocks(n)"),
}


def answer(cell_id, kind, name, body, says=None, function="num_blocks"):
    line = f"# says: {says}\n" if says else ""
    return f"# %% {cell_id} {kind}: {name}\n{line}def {function}(n):\n    {body}\n\n"


def answers(wrong=WRONG, right=RIGHT, extra=""):
    text = "# ruff: noqa: F811, F821\n\n"
    for name, (says, body) in wrong.items():
        kind = "delegates" if name == "package" else "wrong"
        text += answer("ex-1-1", kind, name, body, says)
    for name, body in right.items():
        text += answer("ex-1-1", "right", name, body)
    for name, (says, body) in SECOND.items():
        text += answer("ex-1-2", "wrong", name, body, says, "unused")
    for body in ("return -n % 16", "return num_blocks(n) * 16 - n"):
        text += answer("ex-1-2", "right", body, body, function="unused")
    return text + "# %% ex-1-2 no delegate: the package does not count them\n" + extra


def problems(tmp_path, text, source=SOURCE):
    for folder, content in (("solutions/src/01_tiny.py", source), ("tests/answers/01.py", text)):
        path = tmp_path / folder
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "notebooks").mkdir(exist_ok=True)
    return audit.audit_chapter(tmp_path, "01_tiny")[1]


def test_a_good_set_is_clean_and_says_what_each_check_said(tmp_path, capsys):
    assert problems(tmp_path, answers()) == []
    assert audit.main(tmp_path) == 0
    out = capsys.readouterr().out
    assert "ex-1-1    wrong     caught  floor\n" in out
    assert "the last block may be partly full: 17 tokens gave 1" in out
    assert "ex-1-1    right     passes  negated\n" in out
    assert "0 problems" in out


@pytest.mark.parametrize(("change", "said"), [
    # the check lets a wrong answer through
    (lambda: answers({**WRONG, "floor": ("partly full", "return -(-n // 16) or 7")}),
     "ex-1-1 wrong: floor: passes"),
    # the check refuses a right one
    (lambda: answers(right={**RIGHT, "added": "return (n + 16) // 16"}),
     "ex-1-1 right: added: fails with AssertionError"),
    # it says something else
    (lambda: answers({**WRONG, "floor": ("drops the tail", "return n // 16")}),
     "ex-1-1 wrong: floor: the message does not say 'drops the tail'"),
    # a message that would fit several mistakes
    (lambda: answers({**WRONG, "vague": ("tokens gave", "return 0")}),
     "ex-1-1 wrong: floor: the message names another misconception: 'tokens gave'"),
    # the check falls over instead of speaking
    (lambda: answers({**WRONG, "none": ("partly full", "return undefined")}),
     "ex-1-1 wrong: none: ends in NameError, not in a check's own message"),
    # too few
    (lambda: answers({k: v for k, v in WRONG.items() if k != "floor"}),
     "ex-1-1: 4 wrong answers, under 5"),
    (lambda: answers(right={"one": RIGHT["added"]}), "ex-1-1: 1 right answers, under 2"),
    (lambda: answers().replace("delegates:", "wrong:"),
     "ex-1-1: no answer delegates to the package"),
    (lambda: answers(extra=answer("ex-1-9", "right", "x", "return 1")),
     "ex-1-9: has answers, but the solutions have no such cell"),
])  # fmt: skip
def test_bad_checks_and_bad_sets_are_caught(tmp_path, change, said):
    found = problems(tmp_path, change())
    assert any(line.startswith(said) for line in found), found
    assert audit.main(tmp_path) == 1


def test_a_right_answer_must_also_print_what_the_solution_prints(tmp_path):
    source = SOURCE.replace("    print(report(num_tokens))", "    print(num_blocks.__doc__)")
    right = {**RIGHT, "documented": '"Blocks."\n    return -(-n // 16)'}
    found = problems(tmp_path, answers(right=right), source)
    assert found == [
        "ex-1-1 right: documented: the check prints something else than for the solution"
    ]


def test_a_broken_solution_is_reported_as_such(tmp_path):
    source = SOURCE.replace("return -(-num_tokens // BLOCK_SIZE)", "return num_tokens")
    assert problems(tmp_path, answers(), source)[0].startswith(
        "ex-1-1: the solution itself fails: AssertionError"
    )


def test_one_answer_does_not_reach_the_next(tmp_path):
    right = {
        "leaves a name": "return -(-n // 16)\n\nleft = 1",
        "finds none": "return -(-n // 16) if 'left' not in globals() else 0",
    }
    assert problems(tmp_path, answers(right=right)) == []


@pytest.mark.parametrize(("text", "said"), [
    ("# %% ex-1-1 rong: x\n", "is not '# %% ex-1-1 right"),
    ("# %% ex-1-1 wrong: x\ndef f(): pass\n", "needs a says: line"),
    ("# %% ex-1-1 right: x\n# says: y\n", "has no use for a says: line"),
    ("# %% ex-1-1 right: x\ndef f(:\n", "is not valid Python"),
])  # fmt: skip
def test_the_form_of_an_answers_file_is_checked(tmp_path, text, said):
    with pytest.raises(CourseError, match=said.replace("(", r"\(")):
        problems(tmp_path, text)
    assert audit.main(tmp_path) == 1


def test_missing_answers_are_a_problem_and_no_exercises_are_none(tmp_path, capsys):
    problems(tmp_path, answers())
    (tmp_path / "tests/answers/01.py").unlink()
    assert audit.main(tmp_path, "1") == 1
    assert "01.py does not exist" in capsys.readouterr().out
    (tmp_path / "solutions/src/01_tiny.py").unlink()
    assert audit.main(tmp_path) == 0


# ------------------------------------------------------------------------------------- differences


def difference(*lines, kind="wrong", name="one more", says="needs no other"):
    says = f"# says: {says}\n" if kind == "wrong" else ""
    return f"# %% ex-1-1 {kind}: {name}\n{says}" + "\n".join(lines) + "\n\n"


def test_an_answer_may_be_a_difference_from_the_solution_or_from_another_answer(tmp_path):
    extra = difference("# - -(-num_tokens // BLOCK_SIZE)", "# + num_tokens // BLOCK_SIZE + 1")
    extra += difference("# from: added", "# - return (n + 15)", "# + n += 16",
                        "# +     return n", name="two lines")  # fmt: skip
    extra += difference("# from: two lines", "# -     n += 15", kind="right", name="unknown base")
    with pytest.raises(CourseError, match="no right answer 'two lines' above to differ from"):
        problems(tmp_path, answers(extra=extra))
    extra = extra[: extra.rindex("# %%")]
    extra += difference("# -     return -(-num_tokens", "# - nowhere", name="two lines at once")
    with pytest.raises(CourseError, match=r"'    return .*nowhere' stands 0 times in it, not once"):
        problems(tmp_path, answers(extra=extra))
    extra = extra[: extra.rindex("# %%")]
    extra += difference("# from: added", "# -     return (n + 15) // 16", "# +     n -= 1",
                        "# +     return n // 16 + 1", kind="right", name="a right one")  # fmt: skip
    assert problems(tmp_path, answers(extra=extra)) == []
    path = tmp_path / "tests/answers/01.py"
    solutions = {"ex-1-1": "def num_blocks(num_tokens):\n    return -(-num_tokens // BLOCK_SIZE)"}
    found = {a.name: a.source for a in audit.read_answers(path, solutions)}
    assert found["two lines"] == "def num_blocks(n):\n    n += 16\n    return n // 16"
    assert found["one more"] == (
        "def num_blocks(num_tokens):\n    return num_tokens // BLOCK_SIZE + 1"
    )


@pytest.mark.parametrize(("lines", "said"), [
    (["# - num_tokens", "# + n"], "'num_tokens' stands 2 times in it, not once"),
    (["# - BLOCK_SIZE", "# + 16", "x = 1"], "code beside a difference"),
    (["# - BLOCK_SIZE", "# + (16"], "is not valid Python"),
])  # fmt: skip
def test_a_difference_must_be_clear(tmp_path, lines, said):
    with pytest.raises(CourseError, match=said):
        problems(tmp_path, answers(extra=difference(*lines)))
