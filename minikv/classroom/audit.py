"""`python -m minikv check --audit [NN]`: are the checks any good? Right and wrong answers, kept.

`tests/answers/NN.py` holds them for chapter NN. Like a source it is cut into cells, each a whole
answer that takes the place of the answer cell whose title it names:

    # ruff: noqa: F811, F821

    # %% ex-1-1 right: negated floor division
    def num_blocks(num_tokens):
        return -(-num_tokens // BLOCK_SIZE)

    # %% ex-1-1 wrong: floor
    # says: the last block may be partly full
    def num_blocks(num_tokens):
        return num_tokens // BLOCK_SIZE

    # %% ex-1-1 delegates: the package's own count
    # says: counts the token just sampled
    def num_blocks(num_tokens):
        return minikv.kv_cache.base.blocks_for(num_tokens)

An answer may be given as its difference from the solution's: each run of `# -` lines is a text
that stands there exactly once (a whole line, several, or part of one), and the `# +` lines after it
take its place. `from:` names a right answer of this file to differ from instead.

    # %% ex-1-1 wrong: one block too many where the last is full
    # says: a full block needs no other
    # - -(-num_tokens // BLOCK_SIZE)
    # + num_tokens // BLOCK_SIZE + 1

`wrong` is followed by the name of its misconception, and by `says:`, the phrase that the check's
message must contain (upper and lower case are the same). `delegates` is a wrong answer that hands
the work to the package. Where the package has nothing to hand it to, say so once:

    # %% ex-1-1 no delegate: the package never counts the blocks of a bare number

Every answer cell of a chapter needs at least MIN_WRONG wrong answers, one of them delegating, and
MIN_RIGHT right ones. All run in this process: the solution's cells up to the exercise, the answer,
the rest up to the exercise's last check. A wrong answer must raise AssertionError with its own
phrase and with no other misconception's; a right one must pass and print what the solution prints.
"""

import ast
import contextlib
import io
import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from minikv.classroom.arc import without_magics
from minikv.classroom.nbval_print import called_from
from minikv.classroom.source import (
    BEGIN,
    END,
    CourseError,
    chapter_names,
    exercise_of,
    find_chapter,
    read_source,
    role_of,
)

MIN_WRONG = 5
MIN_RIGHT = 2
HEADER = re.compile(r"# %% +(\S+) +(right|wrong|delegates|no delegate): *(\S.*)")
SAYS = re.compile(r"^# says: *(\S.*)$", re.M)
FROM = re.compile(r"^# from: *(\S.*)$", re.M)
CHANGE = re.compile(r"((?:^# -(?: .*)?\n)+)((?:^# \+(?: .*)?\n)*)", re.M)


@dataclass
class Answer:
    """One kept answer. `says` is the phrase by which its misconception is named, if it is wrong."""

    cell_id: str
    kind: str
    name: str
    source: str
    says: str = ""


class ChecksOutput(io.StringIO):
    """What the cells after the answer print by themselves; `check` compares nothing else."""

    def __init__(self, file, files):
        super().__init__()
        self.file, self.files = file, files

    def write(self, text):
        if called_from(self.files, {self.file}):
            return super().write(text)
        return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)


@dataclass
class Outcome:
    """What a check made of an answer: `error` is None when it passed."""

    answer: Answer
    error: BaseException | None
    printed: str

    @property
    def message(self):
        return "" if self.error is None else str(self.error)


def read_answers(path, solutions=()):
    """The answers of one file; raises CourseError that lists everything wrong with its form.

    solutions: {cell's id: the solution's source}, for answers that are given as a difference.
    """
    if not path.exists():
        raise CourseError(f"{path} does not exist; it must hold right and wrong answers")
    answers, problems, solutions = [], [], dict(solutions)
    rights = {}  # (cell's id, name) -> source of a right answer
    for part in re.split(r"^(?=# %%)", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        header, _, source = part.partition("\n")
        match = HEADER.fullmatch(header.strip())
        if not match:
            problems.append(
                f"{path.name}: {header!r} is not '# %% ex-1-1 right|wrong|delegates|no delegate: "
                "NAME'"
            )
            continue
        says = SAYS.search(source)
        where = f"{path.name}: {match[1]} {match[2]}: {match[3]}"
        try:
            source = _changed(source, match[1], solutions, rights)
        except CourseError as error:
            problems.append(f"{where}: {error}")
        answer = Answer(
            match[1], match[2], match[3], source.strip(), says[1].strip() if says else ""
        )
        if answer.kind == "right":
            rights[answer.cell_id, answer.name] = answer.source
        if (answer.kind in ("wrong", "delegates")) != bool(says):
            problems.append(f"{where}: {'needs a' if not says else 'has no use for a'} says: line")
        try:
            ast.parse(answer.source)
        except SyntaxError as error:
            problems.append(f"{where}: is not valid Python: {error}")
        answers.append(answer)
    if problems:
        raise CourseError("\n".join(problems))
    return answers


def _changed(source, cell_id, solutions, rights):
    """The whole answer: the source itself, or, if it is a difference, what it is a difference from
    with its changes."""
    changes = CHANGE.findall(f"{source.rstrip()}\n")
    if not changes:
        return source
    if any(line.strip() and not line.startswith("#") for line in source.splitlines()):
        raise CourseError("code beside a difference; give the whole answer, or the difference")
    named = FROM.search(source)
    whole = rights.get((cell_id, named[1].strip())) if named else solutions.get(cell_id)
    if whole is None:
        what = f"right answer {named[1].strip()!r} above" if named else f"solution {cell_id!r}"
        raise CourseError(f"there is no {what} to differ from")
    for old, new in (map(_uncommented, change) for change in changes):
        if whole.count(old) != 1:
            raise CourseError(f"{old!r} stands {whole.count(old)} times in it, not once")
        whole = whole.replace(old, new)
    return whole


def _uncommented(lines):
    """What stands behind `# - ` or `# + `, line by line."""
    return "\n".join(line[4:] for line in lines.splitlines())


def _without_markers(source):
    return "\n".join(line for line in source.splitlines() if BEGIN not in line and END not in line)


def audit_chapter(root, name):
    """([Outcome], [problem]) of one chapter; neither if it has no coded exercises."""
    root = Path(root)
    source = root / "solutions" / "src" / f"{name}.py"
    if not source.exists():
        return [], []
    notebook = read_source(source)
    answer_ids = [cell.id for cell in notebook.cells if role_of(cell) == "answer"]
    if not answer_ids:
        return [], []
    solutions = {c.id: _without_markers(c.source) for c in notebook.cells if c.id in answer_ids}
    answers = read_answers(root / "tests" / "answers" / f"{name.split('_')[0]}.py", solutions)
    problems = _counts(answer_ids, answers)
    outcomes = []
    for cell_id in answer_ids:
        mine = [a for a in answers if a.cell_id == cell_id and a.kind != "no delegate"]
        runs = run_answers(root, notebook, cell_id, mine)
        outcomes += runs[1:]
        problems += _judge(runs[0], runs[1:])
    return outcomes, problems


def _counts(answer_ids, answers):
    problems = []
    for cell_id in sorted({answer.cell_id for answer in answers} - set(answer_ids)):
        problems.append(f"{cell_id}: has answers, but the solutions have no such cell")
    for cell_id in answer_ids:
        kinds = [answer.kind for answer in answers if answer.cell_id == cell_id]
        wrong, right = kinds.count("wrong") + kinds.count("delegates"), kinds.count("right")
        if wrong < MIN_WRONG:
            problems.append(f"{cell_id}: {wrong} wrong answers, under {MIN_WRONG}")
        if right < MIN_RIGHT:
            problems.append(f"{cell_id}: {right} right answers, under {MIN_RIGHT}")
        if "delegates" not in kinds and "no delegate" not in kinds:
            problems.append(f"{cell_id}: no answer delegates to the package, and none says why not")
    return problems


def run_answers(root, notebook, cell_id, answers):
    """Outcomes of the solution itself, then of each answer, in the place of the cell `cell_id`."""
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    ids = [cell.id for cell in cells]
    exercise = exercise_of(cells[ids.index(cell_id)])
    checks = [c.id for c in cells if role_of(c) == "check" and exercise_of(c) == exercise]
    here, last = ids.index(cell_id), ids.index(checks[-1])
    # Neither other exercises' checks nor what only the solutions show is needed to get here.
    needed = [
        cell
        for cell in cells[: last + 1]
        if "solution" not in cell.metadata.get("tags", [])
        and (role_of(cell) != "check" or cell.id in checks)
    ]
    before = [cell for cell in needed if ids.index(cell.id) < here]
    after = [cell for cell in needed if ids.index(cell.id) > here]
    solution = Answer(cell_id, "right", "the solution itself", cells[here].source)
    with _like_a_kernel(root):
        namespace = _fresh_namespace()
        with contextlib.redirect_stdout(io.StringIO()):  # an earlier part's check prints
            for cell in before:
                _run(cell.id, cell.source, namespace)
        outcomes = []
        for answer in [solution, *answers]:
            # The same dictionary each time: functions defined above look their names up in it.
            kept = dict(namespace)
            outcomes.append(_outcome(answer, after, namespace))
            namespace.clear()
            namespace.update(kept)
    return outcomes


def _outcome(answer, after, namespace):
    files = {f"<{cell.id}>" for cell in after}
    printed, error = ChecksOutput(f"<{answer.cell_id}>", files), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            _run(answer.cell_id, answer.source, namespace)
            for cell in after:
                _run(cell.id, cell.source, namespace)
        except (Exception, SystemExit) as caught:
            error = caught
    return Outcome(answer, error, printed.getvalue())


def _run(cell_id, source, namespace):
    source = without_magics(source)
    filename = f"<{cell_id}>"
    # So that inspect.getsource works on what a cell defines, as it does in a kernel.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)


def _fresh_namespace():
    from IPython.display import display

    return {"__name__": "__main__", "display": display}


@contextlib.contextmanager
def _like_a_kernel(root):
    kept = {name: os.environ.get(name) for name in ("MINIKV_STATIC", "MPLBACKEND")}
    os.environ.update(MINIKV_STATIC="1", MPLBACKEND="Agg")
    try:
        with contextlib.chdir(Path(root, "notebooks")):
            yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _judge(solution, outcomes):
    """What is wrong with the checks of one exercise, or with its answers."""
    if solution.error is not None:
        return [f"{solution.answer.cell_id}: the solution itself fails: {solution.error!r}"]
    phrases = {o.answer.says.lower() for o in outcomes if o.answer.says}
    problems = []
    for outcome in outcomes:
        answer, message = outcome.answer, outcome.message.lower()
        where = f"{answer.cell_id} {answer.kind}: {answer.name}"
        if answer.kind == "right":
            if outcome.error is not None:
                problems.append(f"{where}: fails with {outcome.error!r}")
            elif outcome.printed != solution.printed:
                problems.append(f"{where}: the check prints something else than for the solution")
            continue
        if outcome.error is None:
            problems.append(f"{where}: passes")
            continue
        if not isinstance(outcome.error, AssertionError):
            name = type(outcome.error).__name__
            problems.append(f"{where}: ends in {name}, not in a check's own message")
        if answer.says.lower() not in message:
            problems.append(f"{where}: the message does not say {answer.says!r}: {outcome.message}")
        for phrase in sorted(phrases - {answer.says.lower()}):
            if phrase in message:
                problems.append(f"{where}: the message names another misconception: {phrase!r}")
    return problems


def main(root, wanted=None):
    """Prints every outcome, then the problems; returns the exit status."""
    names = chapter_names(root)
    if wanted:
        names = [find_chapter(names, wanted)]
    problems = []
    for name in tqdm(names, desc="audit", unit="chapter", disable=None):
        try:
            outcomes, found = audit_chapter(root, name)
        except CourseError as error:
            problems += str(error).splitlines()
            continue
        problems += found
        for outcome in outcomes:
            verdict = "passes" if outcome.error is None else "caught"
            first = (outcome.message.splitlines() or [""])[0]
            answer = outcome.answer
            print(f"{answer.cell_id:<9} {answer.kind:<9} {verdict}  {answer.name}")
            if first:
                print(f"{'':29}{first[:160]}")
    for problem in problems:
        print(f"  {problem}")
    print(f"{len(problems)} problem{'s' * (len(problems) != 1)}")
    return 1 if problems else 0
