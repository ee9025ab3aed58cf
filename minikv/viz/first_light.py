"""The figure of README.md: `python -m minikv.viz.first_light` draws it from a real run.

Four questions are put to the default model, in a pool with room for three at once.
"""

from pathlib import Path

from minikv.observe.pool import LIVE, snapshot
from minikv.viz.pool import pool_over_steps
from minikv.viz.style import INK, WHITE, look

PATH = Path(__file__).resolve().parents[2] / "notebooks" / "img" / "first_light.png"
QUESTIONS = {
    "plants": "What is photosynthesis? Answer in one sentence.",
    "Japan": "What is the capital of Japan?",
    "gravity": "What is gravity? Answer in one sentence.",
    "week": "How many days are in a week?",
}


def run():
    """Snapshots of the pool, one after each step."""
    from minikv.engine import LLM
    from minikv.request import SamplingParams

    llm = LLM(kv_cache_manager="contiguous", max_model_len=96, num_gpu_blocks_override=18)
    for name, text in QUESTIONS.items():
        chat = [{"role": "user", "content": text}]
        llm.add_request(chat, SamplingParams(max_tokens=48), request_id=name)
    snapshots = []
    while llm.has_unfinished_requests():
        llm.step()
        snapshots.append(snapshot(llm))
    return snapshots


def first_light(snapshots):
    """(figure, [Slots of each row]): pool_over_steps, and what happens in it said on the spot."""
    title = "Four questions in one KV pool: their keys and values, step by step"
    card, rows = pool_over_steps(snapshots, title=title)
    first, *_, last = QUESTIONS
    with look():
        ax = card.axes[0]
        text = "each step adds the keys\nand values of one token"
        row = _last_row(rows, first)
        edge = rows[row].owners.index(first) + rows[row].count(LIVE, first)
        _note(ax, (edge - 1, row + 1), (8, row + 5.5), text)
        row = _last_row(rows, last)
        text = "an answer ends, and its\nslots are free at once"
        start = rows[row].owners.index(last)
        _note(ax, (start + 48, row + 1), (start + 8, row + 6), text)
    card.alt = f"{title}. {card.alt}"
    return card, rows


def _last_row(rows, name):
    return max(i for i, slots in enumerate(rows) if name in slots.requests)


def _note(ax, point, corner, text):
    arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.0}
    box = {"facecolor": WHITE, "edgecolor": "none", "pad": 2}
    ax.annotate(text, point, corner, arrowprops=arrow, bbox=box, va="center", fontsize=8.5)


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    first_light(run())[0].save(PATH, dpi=200)
    print(PATH)
