"""What a figure or a report is drawn from: snapshots, recordings, refusals, steps; plain data all.

Recorders watch a running engine and decide nothing. Nothing here draws, or needs torch.
"""

from minikv.observe.blocks import LifeRecorder
from minikv.observe.house import lines_of_minikv
from minikv.observe.memory import MemoryRecorder, enough_in_sum, moment, moment_of
from minikv.observe.pool import PoolSnapshot, Slots, slots_of, snapshot
from minikv.observe.refusals import Refusal, RefusalRecorder, with_much_free
from minikv.observe.steps import record
from minikv.observe.tokens import labels_of, rows_of, translate

__all__ = [
    "LifeRecorder",
    "MemoryRecorder",
    "PoolSnapshot",
    "Refusal",
    "RefusalRecorder",
    "Slots",
    "enough_in_sum",
    "labels_of",
    "lines_of_minikv",
    "moment",
    "moment_of",
    "record",
    "rows_of",
    "slots_of",
    "snapshot",
    "translate",
    "with_much_free",
]
