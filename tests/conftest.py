from pathlib import Path

import pytest

# The modules that take longest, in the order in which they run, after all others: what is quick
# fails soonest. Their tests don't share costly fixtures, so each goes to whichever worker is free;
# as one piece per module, the course alone would keep one of two workers busy to the end.
SLOW = (
    "test_setup.py",  # starts the commands, each in an interpreter of its own
    "test_mutants.py",  # a sample of the mutants, each a run of the fuzz
    "test_classroom_build.py",  # builds courses: one kernel for each notebook
    "test_classroom_harness.py",  # the same
    "test_classroom_work.py",  # the same
    "test_classroom_check.py",  # one or two kernels for each kind of submission
    "test_course.py",  # every notebook, exercise and answer of the course
    "test_fuzz.py",  # thousands of traces
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else -1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """loadscope, but each slow test is a scope of its own. None: xdist's, as --dist says."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class SlowOnesApart(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return nodeid if Path(file).name in SLOW else super()._split_scope(nodeid)

    return SlowOnesApart(config, log)


def pytest_addoption(parser):
    parser.addoption(
        "--fuzz-seed", type=int, default=None, help="test_fuzz.py: replay this one trace"
    )


LAPTOP = 848  # pixels that a page of 1280 leaves for an output beside JupyterLab's file list


@pytest.fixture(autouse=True)
def texts_of_figures(monkeypatch, request):
    """Every figure that a test of minikv.viz makes is walked: no text is too small to be read."""
    if not request.path.name.startswith("test_viz"):
        yield
        return
    from minikv.viz import style

    cards, init = [], style.Card.__init__

    def registered(card, *args, **options):
        init(card, *args, **options)
        cards.append(card)

    monkeypatch.setattr(style.Card, "__init__", registered)
    yield
    assert [text for card in cards for text in small_texts(card)] == []


def small_texts(card):
    """(points on a laptop's page, text) of those below 8."""
    from matplotlib.text import Text

    from minikv.viz import style

    with style.look():
        card.draw_without_rendering()  # makes the ticks' texts
    zoom = min(card.shown_size()[0], LAPTOP) / style.PAGE_DPI / card.get_figwidth()
    for text in card.findobj(Text):
        if text.get_visible() and text.get_text().strip() and zoom * text.get_fontsize() < 7.99:
            yield round(zoom * text.get_fontsize(), 1), text.get_text()
