"""Every number in a chapter's prose is printed by one of its cells, or names its source.

The rule for authors: print a number as you write it. A number in a Markdown cell is looked up, as
a value (`1,024` is `1024`, `1.50` is `1.5`), among the numbers in the chapter's stored outputs
(printed text, results, tables; not pictures). A paragraph (up to the next blank line) that takes
its numbers from elsewhere says so in a comment, which readers do not see:

    An A100 moves 2,039 GB each second. <!-- source: NVIDIA A100 80 GB datasheet -->

Not looked up:
* code in fences and in `code spans`, unless the span is nothing but a number and its unit;
* addresses, HTML tags, comments; numbers of headings and of list items;
* ordinals and names: `3rd`, `bf16`, `H100`, `GPT-2`, `Llama 3.1 8B`, `v0.3`, and what follows a
  word such as chapter, step, figure, section, exercise, request, block, token, position;
* a date, a year in a citation: `2026-11-30`, `(2023)`, `Kwon et al. 2023`, `SOSP 2023`;
* a whole number up to 10 without a unit: "in 3 steps". With one ("3 ms", "2%", "4×") it is.
Numbers in words are not seen.
"""

import re
from decimal import Decimal

SOURCE = re.compile(r"<!--\s*source:\s*\S.*?-->", re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
FENCE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$", re.S | re.M)
SPAN = re.compile(r"(`+)(.+?)\1", re.S)
LINK = re.compile(r"\]\([^)]*\)|<https?://[^>]*>|https?://\S+")
TAG = re.compile(r"</?[A-Za-z][^>]*>")
HEADING_NUMBER = re.compile(r"^#+\s*\d+(\.\d+)*[.:)]?(?=\s)", re.M)
ITEM_NUMBER = re.compile(r"^([ \t>]*)\d+[.)](?=\s)", re.M)
# Digits in groups of three, or plain; a decimal part; an exponent.
NUMBER = re.compile(r"(?:\d{1,3}(?:[,\u2009\u202f_]\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
UNIT = re.compile(
    r"[ \u00a0\u2009\u202f]?(?:%|×|[GTM]i?B/s|(?:x|[KMGT]i?B|[KMGTB]|bytes?|bits?|[mnµμ]?s|min"
    r"|minutes?|(?:milli)?seconds?|hours?|[KMGTP]?FLOPs?|FLOP/s|tokens?|times)\b)"
)
# A thing that is counted off, or a product, before its number: `chapter 3`, `Llama 3.1`.
THING = (
    r"chapters?|notebooks?|sections?|parts?|steps?|figures?|fig\.|tables?|exercises?|examples?"
    r"|equations?|eq\.|lines?|items?|questions?|appendix|level|floor|pages?|cells?|versions?"
    r"|incidents?|requests?|blocks?|tokens?|positions?|slots?|layers?|rows?|columns?|heads?|arxiv:"
)
PRODUCT = (
    r"llama|qwen|mistral|gemma|phi|gpt|opt|smollm|deepseek|python|pytorch|torch|cuda|triton|ubuntu"
    r"|vllm|sglang|transformers"
)
NUMBERED = re.compile(rf"(?:\b(?:{THING})|§)[ #]*(?:[\d.]+(?:,? (?:and|or|to) |–|-))*$", re.I)
PRODUCT_BEFORE = re.compile(rf"\b(?:{PRODUCT})(?:[-\d][-\w.]*)? (?:[\d.]+ )?$", re.I)
YEAR_BEFORE = re.compile(r"(?:\(|\bin |et al\.,? )$")
CITED_BEFORE = re.compile(r"[A-Z]\w*,? $")
PICTURE = re.compile(r"<img |<iframe ")
MARKUP = re.compile(r"<(style|script).*?</\1>|<[^>]*>", re.S)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def unsupported_numbers(notebook):
    """A problem for every number in the prose that no output holds and no source explains."""
    printed = _printed_numbers(notebook)
    problems = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for paragraph in _paragraphs(cell.source):
            for text, value in numbers_in_prose(paragraph):
                if value not in printed:
                    near = " ".join(paragraph.split())
                    problems.append(
                        f"{text} in {cell.id!r} ({near[:50]}...) is in no output; print it, or "
                        "name its source"
                    )
    return problems


def numbers_in_prose(paragraph):
    """[(as written, value)] of the numbers of one paragraph that must be accounted for."""
    if SOURCE.search(paragraph):
        return []
    text = COMMENT.sub(" ", paragraph)
    text = SPAN.sub(_span_text, text)
    for pattern, instead in (
        (LINK, "]"),
        (TAG, " "),
        (DATE, " "),
        (HEADING_NUMBER, "#"),
        (ITEM_NUMBER, r"\1"),
    ):
        text = pattern.sub(instead, text)
    found = []
    for match in NUMBER.finditer(text):
        before, after = text[: match.start()], text[match.end() :]
        if not _is_name(match[0], before, after):
            found.append((match[0], _value(match[0])))
    return found


def _is_name(number, before, after):
    """Whether digits are part of a name or an order, not a quantity."""
    if re.search(r"(?:\w|[A-Za-z]\d*[-.]|\d\.)$", before):  # bf16, GPT-2, v0.3, 3.1.2
        return True
    if re.match(r"B\b(?!/)|\.\d", after):  # 8B is a model's size; bytes have a space
        return True
    unit = UNIT.match(after)
    if re.match(r"[A-Za-z_]", after) and not unit:  # 3rd, 3D
        return True
    if PRODUCT_BEFORE.search(before) or (NUMBERED.search(before) and not unit):
        return True
    if not number.isdecimal() or unit:
        return False
    if 1990 <= int(number) <= 2035:
        cited = CITED_BEFORE.search(before) and not re.match(r" [a-z]", after)
        return bool(cited or YEAR_BEFORE.search(before))
    return int(number) <= 10


def _span_text(match):
    inside = match[2].strip()
    number = NUMBER.match(inside)
    if number:
        rest = inside[number.end() :]
        unit = UNIT.match(rest)
        if not rest or (unit and unit.end() == len(rest)):
            return inside
    return " "


def _paragraphs(text):
    return re.split(r"\n\s*\n", FENCE.sub("", text))


def _value(text):
    return Decimal(re.sub(r"[,\u2009\u202f_]", "", text)).normalize()


def _printed_numbers(notebook):
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts += [output.get("text", ""), output.get("evalue", "")]
            data = output.get("data", {})
            if not PICTURE.search(data.get("text/html", "")) and "image/png" not in data:
                texts.append(data.get("text/plain", ""))  # beside a picture stands its alt text
            texts.append(data.get("text/markdown", ""))
            texts.append(MARKUP.sub(" ", data.get("text/html", "")))
    text = ANSI.sub("", "\n".join(texts))
    return {_value(match[0]) for match in NUMBER.finditer(text)}


def count_words(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return len(COMMENT.sub(" ", text).split())
