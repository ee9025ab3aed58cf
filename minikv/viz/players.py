"""The players of the pool, step by step, and of memory over time."""

from minikv.viz.maps import memory_map, memory_maps, verdict
from minikv.viz.owners import colours_of
from minikv.viz.player import play
from minikv.viz.pool import pool_at_steps, pool_map


def pool_player(snapshots, *, blocks_per_row=None, names=None):
    """A Player of the pool, one picture per snapshot, named by its step. Its picture: the pool at
    four of the steps. Raises ValueError for no snapshot."""
    if not snapshots:
        raise ValueError("there is no snapshot to play")
    if names is None:  # so that a request keeps its colour from step to step
        names = list(dict.fromkeys(name for snap in snapshots for name in snap.tables))
    return play(
        snapshots,
        lambda snap: pool_map(snap, blocks_per_row=blocks_per_row, names=names)[0],
        lambda snap: f"after step {snap.step}",
        name="The pool, step by step",
        picture=pool_at_steps(snapshots, blocks_per_row=blocks_per_row)[0],
    )


def memory_player(recording, *, count=20):
    """A Player of memory over time: `count` moments, evenly spread and named by their seconds.

    recording: a Recording, drawn as memory_map, or several, [(title, Recording)], over pools of one
    size and at the same times, drawn as memory_maps. Its picture: four of the moments. Raises
    ValueError where a recording holds no moment, and for a count below 2.
    """
    named = recording if isinstance(recording, list) else [("", recording)]
    for title, each in named:
        if not each.moments:
            raise ValueError(f"the recording {title!r} holds no moment")
    if count < 2:
        raise ValueError(f"count {count}: it must be at least 2, for the start and the end")
    both = {n: of for _, each in named for n, of in colours_of(each.moments).items()}
    start = min(each.moments[0].time_s for _, each in named)
    end = max(each.moments[-1].time_s for _, each in named)

    def at(each, time_s):
        return next((m for m in reversed(each.moments) if m.time_s <= time_s), each.moments[0])

    def draw(time_s):
        moments = [(title, at(each, time_s)) for title, each in named]
        if len(moments) > 1:
            return memory_maps(moments, colours=both, title=f"{time_s:,.1f} s")[0]
        title = f"{time_s:,.1f} s: {verdict(moments[0][1])}"
        return memory_map(moments[0][1], colours=both, title=title, room_below=True)[0]

    # The ends of four quarters: at the start there is little to see.
    four = [
        (f"{title} {moment.time_s:,.1f} s".strip(), moment)
        for i in (1, 2, 3, 4)
        for title, each in named
        for moment in [at(each, start + (end - start) * i / 4)]
    ]
    return play(
        [start + (end - start) * i / (count - 1) for i in range(count)],
        draw,
        lambda time_s: f"{time_s:,.1f} s",
        name="Memory over time",
        picture=memory_maps(four, colours=both)[0],
        dpi=120,  # hundreds of hatched pieces in each: the largest player of the course
    )
