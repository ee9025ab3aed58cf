"""The course's figures: pure functions from plain data to (figure, the data that it drew).

What they draw is noted by `minikv.observe`, some of whose names are here, too. Nothing in this
folder serves a request, imports torch, touches matplotlib's global settings or keeps a figure
open. A figure is a `Card` (style.py): it shows itself in a notebook, on a light background and
with alt text.
"""

from minikv.observe import (
    LifeRecorder,
    MemoryRecorder,
    PoolSnapshot,
    Slots,
    enough_in_sum,
    labels_of,
    lines_of_minikv,
    moment,
    moment_of,
    snapshot,
    translate,
)
from minikv.viz.board import translation, translation_player
from minikv.viz.fragmentation import free_extent_histogram, free_vs_largest
from minikv.viz.gathered import gather_map, gathered_blocks
from minikv.viz.lab import fragmentation_lab, lab_figure
from minikv.viz.maps import memory_map, memory_maps
from minikv.viz.players import memory_player, pool_player
from minikv.viz.pool import pool_at_steps, pool_map, pool_over_steps, token_map
from minikv.viz.prompts import prompt_hits, prompts_lab
from minikv.viz.sharing import fork_tree, prompt_tree
from minikv.viz.softmax import online_softmax, softmax_at, softmax_player, softmax_states
from minikv.viz.strips import memory_strip, memory_strips
from minikv.viz.style import Card, figure
from minikv.viz.swimlane import block_lives, lives_player
from minikv.viz.tables import block_table_map

__all__ = [
    "Card",
    "LifeRecorder",
    "MemoryRecorder",
    "PoolSnapshot",
    "Slots",
    "block_lives",
    "block_table_map",
    "enough_in_sum",
    "figure",
    "fork_tree",
    "fragmentation_lab",
    "free_extent_histogram",
    "free_vs_largest",
    "gather_map",
    "gathered_blocks",
    "lab_figure",
    "labels_of",
    "lines_of_minikv",
    "lives_player",
    "memory_map",
    "memory_maps",
    "memory_player",
    "memory_strip",
    "memory_strips",
    "moment",
    "moment_of",
    "online_softmax",
    "pool_at_steps",
    "pool_map",
    "pool_over_steps",
    "pool_player",
    "prompt_hits",
    "prompt_tree",
    "prompts_lab",
    "snapshot",
    "softmax_at",
    "softmax_player",
    "softmax_states",
    "token_map",
    "translate",
    "translation",
    "translation_player",
]
