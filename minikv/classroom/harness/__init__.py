"""What the checks of all exercises share. A chapter keeps its own cases and slips, and no more.

    # %% setup
    from minikv.classroom.harness import begin, check, examine, list_of_numbers, ours

    begin(globals(), forbidden={"minikv.kv_cache.": "the package's own manager"})

    # %% cases-4-1 jupyter={"source_hidden": true}
    @ours
    def case_4_1(value, table, block_size): ...

    # %% check-4-1
    @check
    def exercise_4_1(slot_mapping):
        examine(slot_mapping, [([2], 4), ([2, 0], 4)], case_4_1)
        print("Exercise 4.1: passed")

* namespace.py  `begin`, `ours`, `lent`: the checks' code stands neither on names that a learner
  binds nor on torch's defaults
* bounds.py     `bounded`, `Endless`, `Delegated`, `where`: an answer ends, and is the learner's own
* values.py     `plain`, `number`, `numbers`, `list_of_numbers`, `same`, `text`: numbers are numbers
* verdicts.py   `check`, `ask`, `told`, `explain`, `examine`, `factors`: what is said when something
  is wrong; `once` remembers what is right

Nothing here imports torch or numpy; tensors and arrays are told by what they can do.
"""

from minikv.classroom.harness.bounds import Delegated, Endless, bounded, name_of, where
from minikv.classroom.harness.namespace import begin, lent, ours
from minikv.classroom.harness.values import (
    list_of_numbers,
    number,
    numbers,
    plain,
    same,
    snapshot,
    text,
)
from minikv.classroom.harness.verdicts import (
    ask,
    check,
    examine,
    explain,
    factors,
    once,
    told,
)

__all__ = [
    "Delegated", "Endless", "ask", "begin", "bounded", "check", "examine", "explain", "factors",
    "lent", "list_of_numbers", "name_of", "number", "numbers", "once", "ours", "plain", "same",
    "snapshot", "text", "told", "where",
]  # fmt: skip
