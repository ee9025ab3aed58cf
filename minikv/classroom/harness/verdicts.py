"""Asking an answer, and saying what is wrong with what it gave."""

import inspect
import math
from itertools import combinations

from minikv.classroom.harness.bounds import (
    MOST_MEMORY,
    MOST_STEPS,
    Delegated,
    Endless,
    bounded,
    name_of,
    where,
)
from minikv.classroom.harness.namespace import defaults, moved, running, shelf_of
from minikv.classroom.harness.values import plain, same, snapshot, text

ENDLESS = (
    "{} does not end: after 10 million instructions it was still busy. Is there a loop that never "
    "ends, or far too much work?"
)
DELEGATED = "{} hands the work to {}. Here it is yours to write."
KNOWN = {}  # what `once` has computed
MEMORY = "{} took more than 2 GiB of memory, and was stopped. Does a list grow without end?"


def check(function):
    """Decorates the one function of a check cell, and runs it at once.

    Its parameters are the names of the answers that it checks. A failed assertion is shown by its
    message alone: the frames of the check say nothing to a learner.
    """
    notebook = function.__globals__
    shelf, answers = shelf_of(notebook), []
    for name in inspect.signature(function).parameters:
        if name not in notebook:
            raise NameError(f"there is no {name} yet: run the cell above that defines it")
        answers.append(notebook[name])
    running.append(shelf)
    try:
        with defaults():
            moved(function, shelf)(*answers)
    except (Endless, Delegated) as error:  # of `bounded`, called without `ask`
        raise _brief(AssertionError(told(getattr(error, "answer", "Your code"), error))) from None
    except (AssertionError, NotImplementedError) as error:
        raise _brief(error) from None
    finally:
        running.pop()


def _brief(error):
    said = str(error) or "a check failed without a message"
    # Half a character (a lone surrogate) cannot be sent, and the whole message would be lost.
    said = said.encode(errors="replace").decode()
    error.args = (said,)
    error._render_traceback_ = said.splitlines  # IPython shows what this returns
    return error


def told(name, error, given=""):
    """The message for whatever went wrong inside a learner's function; given: what it was asked."""
    if isinstance(error, Endless):
        said = ENDLESS.format(name)
    elif isinstance(error, Delegated):
        said = DELEGATED.format(name, error)
    elif _out_of_memory(error):
        said = MEMORY.format(name)
    elif isinstance(error, SystemExit):
        said = f"{name} called exit(); an answer must return."
    elif isinstance(error, AssertionError):
        said = str(error)  # a judge's inside the answer: a watched class, say
    else:
        place = where(error)
        said = f"{name} ended in {type(error).__name__}: {error}" + (
            f"\n({place})" if place else ""
        )
    return f"{said}\n{given}" if given else said


def _out_of_memory(error):
    """Python's own has no text, numpy and torch have theirs; a learner's MemoryError has one."""
    words = ("Unable to allocate", "allocate memory")
    bare = isinstance(error, MemoryError) and not str(error)
    return bare or any(word in str(error) for word in words)


def ask(function, *args, asked=None, raw=False, steps=MOST_STEPS, memory=MOST_MEMORY):
    """What the learner's function returns for `args`, which must stay as they are.

    It comes as plain Python numbers, lists and tuples (values.plain), unless `raw`: then as it is.
    asked: what was asked, for the message (default: the arguments). Raises AssertionError for
    every way in which a call can go wrong, NotImplementedError for what is not yet written.
    """
    name, before = name_of(function), snapshot(args)
    given = asked if asked is not None else f"Its arguments were {args!r:.300}"

    finish = None if raw else plain  # within the bounds: the value may be lazy
    try:
        value = bounded(function, *args, steps=steps, memory=memory, finish=finish)
    except (NotImplementedError, KeyboardInterrupt):  # not yet done; the learner's own Ctrl-C
        raise
    except BaseException as error:
        cause = error if isinstance(error, Exception) else None
        raise AssertionError(told(name, error, given)) from cause
    assert snapshot(args) == before, f"{name} changed what it was given: work on a copy.\n{given}"
    assert value is not None, f"{name} returned None: is its `return` missing?\n{given}"
    return value


def examine(function, inputs, judge, describe=None, raw=False):
    """Asks for every input, then explains.

    judge(value, *input): a case, as for `explain`, or AssertionError. describe(*input): what was
    asked, in words. What ends in an error is told only if the answers before it show no known slip.
    """
    cases, failure = [], None
    for args in inputs:
        asked = describe(*args) if describe else None
        try:
            cases.append(judge(ask(function, *args, asked=asked, raw=raw), *args))
        except AssertionError as error:
            failure = error
            break
    explain(cases)
    if failure:
        raise failure


def explain(cases, alike=same):
    """Raises unless every case is right; says which slip gives what all cases gave, if any.

    cases: (what was asked, got, wanted, slips), smallest first. got and wanted: {part: value};
    slips: {part: {what to say: wrong value}}. With one part only: the values themselves, and
    {what to say: wrong value}. Slips whose texts differ in spaces at the end are the same slip.
    """
    cases = [case if isinstance(case[1], dict) else _one_part(case) for case in cases]
    for part in cases[0][1] if cases else ():
        wrong = [case for case in cases if not alike(case[1][part], case[2][part])]
        if not wrong:
            continue
        asked, got, wanted, slips = wrong[0]
        seen = f"{asked}\n{_compared(part, got[part], wanted[part])}"
        fitting = {
            said.strip()
            for said in slips.get(part, {})
            if all(_fits(case, part, said, alike) for case in cases)
        }
        # Of two that fit both are named; of more, none: it may be something else again.
        if 0 < len(fitting) < 3:
            said = "\nOr: ".join(sorted(fitting, key=_order(slips[part])))
            raise AssertionError(f"{said}\n{seen}")
        subject = part or "The answer"
        said = f"{subject} is wrong in {len(wrong)} of {len(cases)} cases. The smallest of them:"
        if _rounded(got[part], wanted[part]):
            said = f"{subject} is nearly right: please don't round."
        raise AssertionError(f"{said}\n{seen}")


def _one_part(case):
    asked, got, wanted, slips = case
    return asked, {"": got}, {"": wanted}, {"": slips}


def _fits(case, part, said, alike):
    slips = case[3].get(part, {})
    return said in slips and alike(case[1][part], slips[said])


def _order(slips):
    return [said.strip() for said in slips].index


def _compared(part, got, wanted):
    mine, right = text(got), text(wanted)
    if mine.startswith("\n"):  # a picture: a full stop behind it would look like a part of it
        return f"Your {part or 'answer'}:{mine}\nCounted:{right}"
    said = (
        f"Your {part}: {mine}. Counted: {right}."
        if part
        else f"You returned {mine}; counted: {right}."
    )
    if mine == right and hasattr(got, "reshape"):
        gap = (got - wanted).abs().reshape(-1)
        at = int(gap.argmax())
        one, other = (plain(value.reshape(-1)[at]) for value in (got, wanted))
        said += f"\nThey differ most in number {at}: {one:.9g}, where {other:.9g} is expected."
    elif mine == right and isinstance(got, int | float) and isinstance(wanted, int | float):
        said += f"\nThey differ further back: {got:.12g}, where {wanted:.12g} is expected."
    return said


def _rounded(got, wanted):
    if not all(isinstance(value, int | float) for value in (got, wanted)):
        return False
    return any(got == round(wanted, digits) for digits in range(1, 8))


def factors(wanted, slips, most=2):
    """{what to say: wrong number} for slips, alone and in pairs; slips: {what to say: factor}."""
    return {
        " And: ".join(names): wanted * math.prod(slips[name] for name in names)
        for count in range(1, most + 1)
        for names in combinations(slips, count)
    }


def once(function, *args):
    """function(*args), computed only once: what is right does not change with the answer."""
    key = function.__qualname__, function.__code__, repr(args)
    if key not in KNOWN:
        KNOWN[key] = function(*args)
    return KNOWN[key]
