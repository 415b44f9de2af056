"""Pieces of a page as text: whatever comes from data is escaped here, and nowhere else."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Mapping, Sequence

from gpt_parity.html.style import STYLE

# What has no shape of its own, or turns the text around it.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")

# Cells with more characters are wrapped.
LONG = 40


def text(value: object) -> str:
    """`value` as text of a page, also inside a quoted attribute; control characters by number."""
    shown = (
        f"\\u{ord(c):04x}" if unicodedata.category(c) in INVISIBLE and c != "\n" else c
        for c in str(value)
    )
    return html.escape("".join(shown), quote=True)


def code(value: object) -> str:
    """A name; long ones may be broken after a dot or a slash."""
    breakable = re.sub(r"([./_])", r"\1<wbr>", text(value))
    return f"<code>{breakable}</code>"


def paragraph(value: object, style: str = "") -> str:
    return f"<p{f' class={style}' if style else ''}>{text(value)}</p>"


def section(ident: str, title: str, *content: str) -> str:
    """A part of the page with its heading; nothing where there is no content."""
    body = "\n".join(part for part in content if part)
    if not body:
        return ""
    return (
        f'<section aria-labelledby="{ident}">\n<h2 id="{ident}">{text(title)}</h2>\n{body}\n'
        "</section>"
    )


def details(summary: str, *content: str, name: str = "", opened: bool = False) -> str:
    """A part that is folded; `summary` is plain text, after a name where there is one."""
    state = " open" if opened else ""
    shown = f"{code(name)} {text(summary)}" if name else text(summary)
    body = "\n".join(content)
    return f"<details{state}>\n<summary>{shown}</summary>\n{body}\n</details>"


def scroller(label: str, content: str) -> str:
    """What may be wider than the screen scrolls by itself, by keyboard too."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(label)}">\n'
        f"{content}\n</div>"
    )


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *,
    numbers: Sequence[int] = (), styles: Sequence[str] = (), names: bool = True,
) -> str:  # fmt: skip
    """A table with a caption; the first cell of a row is its header, a name unless told.

    `numbers` are columns aligned to the right, `styles` a class for each row.
    """

    def cell(column: int, value: object) -> str:
        kind = ' class="number"' if column in numbers else ""
        kind = ' class="status"' if columns[column] == "status" else kind
        if column == 0:
            shown = code(value) if names else text(value)
            return f'<th scope="row"{kind if names else " class=short"}>{shown}</th>'
        if len(str(value)) > LONG:
            kind = ' class="words"'
        return f"<td{kind}>{text(value)}</td>"

    head = "".join(
        f'<th scope="col"{" class=number" if i in numbers else ""}>{text(column)}</th>'
        for i, column in enumerate(columns)
    )
    styles = styles or [""] * len(rows)
    body = "\n".join(
        f"<tr{f' class={style}' if style else ''}>"
        + "".join(cell(i, value) for i, value in enumerate(row))
        + "</tr>"
        for row, style in zip(rows, styles, strict=True)
    )
    return scroller(
        caption,
        f"<table>\n<caption>{text(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>",
    )


def facts(values: Mapping[str, object]) -> str:
    """Names and what they are, as a list of terms."""
    rows = "\n".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in values.items())
    return f"<dl>\n{rows}\n</dl>"


def bullets(values: Sequence[object]) -> str:
    """A list, or nothing."""
    if not values:
        return ""
    return "<ul>\n" + "\n".join(f"<li>{text(value)}</li>" for value in values) + "\n</ul>"


def svg(
    ident: str, title: str, description: str, size: tuple[float, float], body: str, *,
    style: str = "", scale: float = 1.0,
) -> str:  # fmt: skip
    """A picture that a screen reader can name: `size` in its own units, `scale` pixels for each."""
    width, height = size
    return (
        f'<svg role="img" aria-labelledby="{ident}-title {ident}-desc" class="{style}" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width * scale:g}" '
        f'height="{height * scale:g}">\n'
        f'<title id="{ident}-title">{text(title)}</title>\n'
        f'<desc id="{ident}-desc">{text(description)}</desc>\n{body}\n</svg>'
    )


def page(title: str, heading: str, *content: str) -> bytes:
    """The whole file, which needs nothing else to be shown."""
    body = "\n".join(part for part in content if part)
    whole = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{text(heading)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )
    return whole.encode("utf-8")
