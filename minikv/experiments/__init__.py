"""Each experiment once: its run, the paper's numbers, its table. `commands/` prints them,
chapters run them."""

from minikv.experiments.fig2 import FIG2_PAPER, fig2_run
from minikv.experiments.fig13 import FIG13_MODELS, FIG13_PAPER, FIG13_WORKLOADS
from minikv.experiments.hits import MOONCAKE_PAPER, facts_of, hits_run, open_for_hits
from minikv.experiments.lab import LabSettings, lab_run
from minikv.experiments.paper import NUM_SLOTS, paper_manager, paper_run, paper_step_time
from minikv.experiments.paradox import paradox_run, paradox_step_time
from minikv.experiments.prompts import prompts_run

__all__ = [
    "FIG2_PAPER",
    "FIG13_MODELS",
    "FIG13_PAPER",
    "FIG13_WORKLOADS",
    "MOONCAKE_PAPER",
    "NUM_SLOTS",
    "LabSettings",
    "facts_of",
    "fig2_run",
    "hits_run",
    "lab_run",
    "open_for_hits",
    "paper_manager",
    "paper_run",
    "paper_step_time",
    "paradox_run",
    "paradox_step_time",
    "prompts_run",
]
