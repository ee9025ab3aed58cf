import pytest


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
