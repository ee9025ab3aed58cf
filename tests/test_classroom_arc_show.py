"""Which name belongs to which chapter, and the package's source in a cell."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import minikv
from minikv.classroom import arc
from minikv.classroom.show import Source, beside, excerpt, show

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_has_a_chapter():
    assert [name for name in minikv.__all__ if arc.chapter_of(f"minikv.{name}") is None] == []


def test_a_names_own_chapter_comes_before_its_modules():
    assert arc.chapter_of("minikv.LLM") == 0
    assert arc.chapter_of("minikv.LLM.generate") == 0
    assert arc.chapter_of("minikv.kv_cache.paged.BlockPool.get") == 4
    assert arc.chapter_of("minikv.kv_cache.extents.anything") == 3
    assert arc.chapter_of("minikv.kv_cache.unknown") is None


@pytest.mark.parametrize(("code", "names"), [
    ("from minikv import LLM, Request as R", {"minikv.LLM", "minikv.Request"}),
    ("import minikv\nminikv.LLM.generate()", {"minikv.LLM.generate"}),
    ("import minikv as m\nm.show(1)", {"minikv.show"}),
    ("import minikv.specs", {"minikv.specs"}),
    ("import minikv.specs as s\ns.GPUS['a'].x", {"minikv.specs", "minikv.specs.GPUS"}),
    ("from minikv import viz\nviz.strip.draw()", {"minikv.viz", "minikv.viz.strip.draw"}),
    ("def f():\n    from minikv.core import loop", {"minikv.core.loop"}),
    ("import os, minikvx\nminikvx.a\nos.path", set()),
])  # fmt: skip
def test_names_used(code, names):
    assert arc.names_used(code) == names


def test_violations_name_the_chapter_or_its_absence():
    code = "import minikv\nfrom minikv import PagedKVCacheManager, nothing\nminikv.__file__"
    assert arc.violations(code, 4) == [
        "minikv.nothing has no chapter; add it to minikv/classroom/arc.py"
    ]
    assert arc.violations(code, 3)[0] == (
        "minikv.PagedKVCacheManager belongs to chapter 04, used in chapter 03"
    )


def test_magics_are_passed_over_and_remainders_are_not():
    assert arc.without_magics("%%bash\nls") == ""
    assert arc.without_magics("if 1:\n    %time f()\n!ls") == "if 1:\n    pass\npass"
    assert arc.without_magics("x = (7\n  % 4)") == "x = (7\n  % 4)"


# ------------------------------------------------------------------------------------------- show


def test_show_prints_the_source_with_its_place():
    text = repr(show(show))
    assert text.startswith("# minikv/classroom/show.py\ndef show(obj):\n")


def test_show_takes_classes_methods_and_modules():
    assert "class Source:" in show(Source).text
    assert show(Source.__repr__).text.startswith("def __repr__(self):\n    return")  # dedented
    module = show(arc)
    assert module.where == "minikv/classroom/arc.py" and module.text.startswith('"""Which public')


def test_show_is_highlighted_and_always_the_same():
    html = show(Source)._repr_html_()
    assert html == show(Source)._repr_html_()
    assert "<style" not in html and "color:" in html  # inline: GitHub drops style sheets
    assert "&lt;" not in show(Source).text


@pytest.mark.parametrize(("value", "error", "said"), [
    (3, TypeError, "not int 3"),
    ("LLM", TypeError, "not str 'LLM'"),
    (print, ValueError, "print is defined in builtins"),
    (subprocess.run, ValueError, "run is defined in subprocess"),
])  # fmt: skip
def test_show_refuses_what_is_not_minikvs(value, error, said):
    with pytest.raises(error, match=said):
        show(value)


ONLINE, TRITON = "model/kernels/online.py", "model/kernels/triton_paged.py"


def test_an_excerpt_is_the_lines_asked_for_of_a_file_that_need_not_be_importable():
    one = excerpt(TRITON, "in_reach = slot < end")
    assert repr(one) == f"# minikv/{TRITON}\nin_reach = slot < end"  # dedented
    several = excerpt(TRITON, "row_max = tl.full", "mixed = tl.zeros").text.splitlines()
    assert [line.split(" = ")[0] for line in several] == ["row_max", "row_sum", "mixed"]
    assert repr(excerpt("model/kernels/cpu.cpp", "struct bf16 {")).startswith("// minikv/model")
    assert "cpu.cpp" in excerpt("model/kernels/cpu.cpp", "struct bf16 {")._repr_html_()


@pytest.mark.parametrize(("path", "lines", "said"), [
    ("model/nothing.py", ("x",), "no file 'model/nothing.py'"),
    ("../pyproject.toml", ("name",), "no file"),
    (ONLINE, ("no such line",), "0 lines of .* contain 'no such line'"),
    (ONLINE, ("return ",), "lines of .* it must be 1"),
    (ONLINE, ("def why_not", "def attend("), "no line of .* contains 'def attend.' after"),
], ids=["no file", "outside", "no line", "several", "no end"])  # fmt: skip
def test_an_excerpt_that_is_not_there_is_refused(path, lines, said):
    with pytest.raises(ValueError, match=said):
        excerpt(path, *lines)


def test_two_files_beside_each_other():
    shown = beside(ONLINE, TRITON, [
        ("<scores>", "scores = self.query @ keys.mT", "scores = tl.dot(q"),
        ("only there", None, ("k = tl.load(keys", "v = tl.load(values")),
    ])  # fmt: skip
    text = repr(shown).splitlines()
    assert text[0] == "-- <scores>" and text[3] == "-- only there" and len(text) == 6
    assert text[1] == "      online.py | scores = self.query @ keys.mT"
    assert text[2].startswith("triton_paged.py | scores = tl.dot(")
    assert all(line.startswith("triton_paged.py | ") for line in text[4:])
    html = shown._repr_html_()
    assert "&lt;scores&gt;" in html and html.count("<tr ") == 1 + 2 * 2 and "<style" not in html
    with pytest.raises(ValueError, match="0 lines"):
        beside(ONLINE, TRITON, [("gone", "scores = what was there", None)])


class Elements(HTMLParser):
    """Notes tag and inline style of every element."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs).get("style", "")))


# JupyterLab gives each of these a background or a colour of its theme's.
THEMED = {"pre", "code", "table", "thead", "tr", "th", "td"}
SHOWN = [
    show(Source),
    excerpt("model/kernels/cpu.cpp", "struct bf16 {"),
    beside(ONLINE, TRITON, [("less <than>", "self.largest = query.new_full", "row_max = tl.full")]),
]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: type(shown).__name__)
def test_no_theme_mixes_its_colours_with_ours(shown):
    elements = [e for e in Elements(shown._repr_html_()).found if e[0] in THEMED]
    assert elements
    for tag, style in elements:
        names = {part.partition(":")[0].strip() for part in style.split(";")}
        assert {"color", "background"} <= names, (tag, style)


def test_no_other_module_writes_html_of_its_own():
    """Whoever adds one: name it here, and put an object of it into SHOWN above. (Pictures and
    players, in viz, bring their own background.)"""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "minikv").rglob("*.py")
        if re.search(r"def _repr_html_|HTML\(", path.read_text(encoding="utf-8"))
    }
    assert {path for path in found if "/viz/" not in path} == {"minikv/classroom/show.py"}


def test_words_are_not_broken():
    page = SHOWN[2]._repr_html_()
    assert page.count("word-break:normal") == page.count("<pre")
    assert '<span style="white-space:nowrap">float(&quot;-inf&quot;))</span>' in page


def test_show_is_exported_lazily():
    assert minikv.show is show
    code = "import sys, minikv; assert 'minikv.classroom' not in sys.modules; minikv.show; "
    code += "assert 'torch' not in sys.modules and 'pygments' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
