"""Numbers in prose: which must be accounted for, and by what."""

import nbformat
import pytest

from minikv.classroom import prose


def must_find(text):
    return [written for written, _ in prose.numbers_in_prose(text)]


@pytest.mark.parametrize(("text", "written"), [
    ("It took 12 steps, 3.5 GiB and 1,024 tokens.", ["12", "3.5", "1,024"]),
    ("Only 3 ms, 2%, 4× and 5 tokens.", ["3", "2", "4", "5"]),
    ("In 3 steps, of 2 requests, 10 blocks.", []),
    ("Eleven is 11.", ["11"]),
    ("From 0–15 or 0-15, 128K in all, 16GiB.", ["15", "15", "128", "16"]),
    ("The pool is `16 GiB`, made by `block_size=16` or `[0, 17]`; `4096`.", ["16", "4096"]),
    ("```\n99 bottles\n```\nand 98", ["98"]),
    ("Tokens: 512. Blocks: 40.", ["512", "40"]),
    ("In chapter 3 and 40 of 100 fail.", ["100"]),
    ("1e-4 and 4e5", ["1e-4", "4e5"]),
    ("$2 \\times 32 \\times 8 = 512$", ["32", "512"]),
    ("2048 tokens (2048) in 2100", ["2048", "2048", "2100"]),
    ("the pool moved 246M blocks", ["246"]),
    ("At 2000 tokens", ["2000"]),
    ("an optimum 37", ["37"]),
])  # fmt: skip
def test_quantities_are_looked_up(text, written):
    assert must_find(text) == written


@pytest.mark.parametrize("text", [
    "# 01 One token at a time",
    "## 12. Positions",
    "11. an item\n12. another\n   13) nested",
    "chapter 11, chapters 11 and 12, exercise 11.1, Figure 12, step 15, § 14, request 17",
    "slot 20, position 30, layer 28, rows 11–14",
    "bf16, fp32, H100, SmolLM2-135M, GPT-20, v0.35, Qwen3-8B, 15th, 64D, top-50",
    "Llama 3.1 8B and 70B, Mistral 7B v0.3, Python 3.11, PyTorch 2.13",
    "Kwon et al. 2023, (2023), SOSP 2023, in 2024 vLLM, 2026-11-30, arXiv:2309.06180",
    "[the paper](https://arxiv.org/abs/2309.06180) https://example.org/4711",
    "<img width=640> <!-- 77 -->",
    "version 3.11.14",
    "An A100 moves 2,039 GB/s. <!-- source: its datasheet -->",
])  # fmt: skip
def test_names_orders_and_years_are_not(text):
    assert must_find(text) == []


def chapter(text, *outputs):
    cells = [nbformat.v4.new_markdown_cell(text)]
    for output in outputs:
        cells.append(nbformat.v4.new_code_cell("x", outputs=[output]))
    return nbformat.v4.new_notebook(cells=cells)


def stream(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def result(**data):
    data = {key.replace("_", "/"): value for key, value in data.items()}
    return nbformat.v4.new_output("display_data", data=data)


def test_a_number_is_found_by_value_in_any_kind_of_output():
    text = "1,024 and 1.50 and 33 and 44.\n\nAnd 55."
    good = [stream("1024\n1.5"), result(text_html="<td style='x: 1'>33</td>", text_plain="44 55")]
    assert prose.unsupported_numbers(chapter(text, *good)) == []
    altered = [stream("1025\n1.5"), good[1]]
    problems = prose.unsupported_numbers(chapter(text, *altered))
    assert len(problems) == 1 and problems[0].startswith("1,024 in ")
    assert "print it, or name its source" in problems[0]


def test_neither_a_pictures_size_nor_an_attribute_supports_a_number():
    outputs = [
        result(image_png="x", text_plain="<Figure size 640x480 with 1 Axes>"),
        result(
            text_html="<td width=320>1</td><style>p {height: 12px}</style>"
            '<script type="application/json">[13]</script>'
        ),
    ]
    problems = prose.unsupported_numbers(chapter("640, 320, 12 and 13 px", *outputs))
    assert [problem.split()[0] for problem in problems] == ["640", "320", "12", "13"]


def test_a_source_covers_its_paragraph_only():
    text = "77 GB <!-- source: a datasheet -->\n\n78 GB <!-- from somewhere -->"
    assert [p.split()[0] for p in prose.unsupported_numbers(chapter(text))] == ["78"]


def test_words_are_counted_without_comments():
    assert prose.count_words(chapter("one two <!-- three four --> five")) == 3
