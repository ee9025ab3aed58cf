"""Players: what they store is what was drawn, and needs neither a kernel nor the network."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from minikv.viz import batch, decode, player, players, softmax, widgets
from minikv.viz.style import Card, figure

TEXT = "</script><b>&amp;"  # a token may be anything
BLOCKS, VALUES = [[2.0, 0.0], [1.0, 4.0], [3.0]], [[10.0, 20.0], [30.0, 40.0], [50.0]]


def bars(height, width=3.0):
    card, ax = figure(width, 1.5, alt=f"a bar of {height}, {TEXT}")
    ax.bar([0], [height])
    ax.set_ylim(0, 4)
    return card


def three():
    return player.play(
        (1, 3, 1), bars, lambda n: f"{n} tokens", name="bars <of> tokens", picture=bars(9)
    )


class Page(HTMLParser):
    """Elements with their attributes, and the text in each script."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data


def stored(of):
    return json.loads(Page(of._repr_html_()).scripts[0])


def image(text):
    return Image.open(io.BytesIO(base64.b64decode(text.removeprefix(player.PNG))))


def test_each_picture_put_together_is_the_one_that_was_drawn():
    data, same = stored(three()), []
    for (label, alt, over), height in zip(data["frames"], (1, 3, 1), strict=True):
        assert (label, alt) == (f"{height} tokens", f"a bar of {height}, {TEXT}")
        shown = image(data["base"]).convert("RGBA")
        if over:
            shown.alpha_composite(image(over).convert("RGBA"))
        exact = player._pixels(bars(height), player.DPI).astype(int)
        off = np.abs(np.asarray(shown)[..., :3] - exact).max(axis=2)
        assert (off > 24).mean() < 0.001 and off.mean() < 1  # 64 colours are enough
        same.append(not over)
    assert same == [True, False, True]  # what equals the first is not stored again


def test_a_change_is_stored_and_not_the_whole_picture():
    data = stored(three())
    seen = np.asarray(image(data["frames"][1][2]).convert("RGBA"))[..., 3] > 0
    assert 0.05 < seen.mean() < 0.6


def test_the_output_is_the_same_each_time_and_asks_nobody():
    text = three()._repr_html_()
    assert text == three()._repr_html_()
    page = Page(text)
    assert len(page.scripts) == 2 and "</" not in page.scripts[0]
    assert not re.search(r'"(?!data:)[A-Za-z0-9+/=]{200}', page.scripts[0])  # as nbval knows them
    for tag, attrs in page.found:
        assert tag in ("div", "style", "img", "script") and "id" not in attrs
        assert not attrs.get("src", "data:").partition("data:")[0]
    assert not re.search(r"https?:|@import|url\(|fetch\(", text)


def test_without_scripts_a_picture_with_alt_text_is_left():
    [(_, attrs)] = [each for each in Page(three()._repr_html_()).found if each[0] == "img"]
    assert attrs["alt"] == f"a bar of 9, {TEXT}" and attrs["src"].startswith("data:image/png;")
    assert repr(three()) == f"bars <of> tokens: 3 pictures, 1 tokens to 1 tokens. {attrs['alt']}"


def test_a_player_needs_pictures_of_one_size():
    with pytest.raises(ValueError, match="'none' has no frame"):
        player.Player([], name="none", picture=bars(1))
    mixed = [("a", bars(1)), ("b", bars(1, width=4.0))]
    with pytest.raises(ValueError, match="'mixed' have 2 sizes"):
        player.Player(mixed, name="mixed", picture=bars(1))
    with pytest.raises(ValueError, match="no snapshot"):
        players.pool_player([])


# --- online softmax ----------------------------------------------------------------------------


def test_the_softmax_player_goes_through_the_states():
    of = softmax.softmax_player(BLOCKS, values=VALUES)
    states = softmax.softmax_states(BLOCKS, VALUES)
    assert of.labels == ["after block 0", "after block 1", "after block 2"]
    for (_, card), state in zip(of.frames, states, strict=True):
        assert f"largest {state.largest:g}, sum {state.total:.2f}, mixed" in card.alt
    shrinks = ["multiplied by 0.14" in card.alt for _, card in of.frames]
    assert shrinks == [False, True, False]
    assert isinstance(of.picture, Card) and "after block 2: largest 4" in of.picture.alt


def test_one_moment_of_softmax_shows_what_was_read_and_no_more():
    card, state = softmax.softmax_at(BLOCKS, 1, values=VALUES)
    assert state == softmax.softmax_states(BLOCKS, VALUES)[1]
    scores, weights = ([text.get_text() for text in ax.texts] for ax in card.axes)
    assert scores[:4] == ["2", "0", "1", "4"] and "3" not in scores  # block 2 is unread
    assert weights[:4] == [f"{w:.2f}" for w in state.weights]
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f"index {index}: it must be one of the 3"):
            softmax.softmax_at(BLOCKS, index)
    with pytest.raises(ValueError, match="needs a slot"):
        softmax.softmax_at([[1.0], []], 0)


# --- widgets that compute ----------------------------------------------------------------------


def test_a_widget_leaves_a_picture_and_what_to_run(monkeypatch):
    ipywidgets = pytest.importorskip("ipywidgets")
    shown, card = [], bars(2)
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    widgets.Computing(ipywidgets.VBox([]), card)._ipython_display_()
    widget, note = shown
    assert "application/vnd.jupyter.widget-view+json" in widget
    assert widget["text/plain"] == card.alt and "alt=" in widget["text/html"]
    assert "Run All Above" in note["text/html"] and widgets.KEYS in note["text/html"]


def test_the_explorer_is_such_a_widget(monkeypatch):
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr(batch, "is_live", lambda: True)
    monkeypatch.setattr(batch, "hoverable", lambda card, drawn: card.alt)
    live = batch.batch_explorer(lambda length: (bars(length), None), length=(2, 1, 3))
    assert isinstance(live, widgets.Computing) and live.card.alt.startswith("a bar of 2")


def test_each_label_says_what_it_counts():
    steps = decode.cache_steps(["a", "b", "c", "d"], 2, 4)
    assert decode.cache_player(steps).labels == ["forward 1", "forward 2"]
