"""Progress bars over simulated time, for `on_step`; on a terminal only."""

import sys


class Progress:
    """A bar over finished requests, for Simulation's on_step; on a terminal only."""

    def __init__(self, num_requests, core):
        from tqdm import tqdm

        self._bar = tqdm(total=num_requests, unit="request", file=sys.stderr, disable=None)
        self._seen, self._core = 0, core

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self(self._core)
        self._bar.close()

    def __call__(self, core):
        if core.num_ended > self._seen:
            self._bar.set_postfix_str(f"{core.clock.now():,.0f} s simulated", refresh=False)
            self._bar.update(core.num_ended - self._seen)
            self._seen = core.num_ended


class SecondsProgress:
    """The same for many runs one after another: a bar over the seconds simulated in all."""

    def __init__(self, num_runs, duration_s):
        from tqdm import tqdm

        total = round(num_runs * duration_s)
        self._bar = tqdm(total=total, unit="s simulated", file=sys.stderr, disable=None)
        self._seen, self._core = 0, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def __call__(self, core):
        if core is not self._core:
            self._seen, self._core = 0, core
        now = int(core.clock.now())
        if now > self._seen:
            self._bar.update(now - self._seen)
            self._seen = now


class RequestsProgress:
    """A bar over requests, of many runs one after another; called once for each."""

    def __init__(self, total):
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="request", file=sys.stderr, disable=None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def __call__(self):
        self._bar.update()
