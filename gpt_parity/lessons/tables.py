"""Tables of numbers by position that fit into 80 columns, for any length and any words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

WIDTH, NARROWEST, INDENT = 80, 40, 2
DECIMALS = 4
GAP = "…"
LEAST_LABEL, MOST_LABEL = 8, 16
COLD, HOT = (247, 251, 255), (8, 69, 148)

# Positions in the order shown; None is the gap where some are left out.
Places = list[int | None]


def pick(length: int, most: int) -> Places:
    """All positions, or the first and last where there are more than `most`."""
    if length <= most:
        return list(range(length))
    last = most * 3 // 8
    return [*range(most - last), None, *range(length - last, length)]


def kept(places: Places) -> list[int]:
    return [place for place in places if place is not None]


def clip(text: str, width: int) -> str:
    """`text` in at most `width` cells, with an ellipsis for what is cut; wide letters take two."""
    short = Text(text)
    short.truncate(max(1, width), overflow="ellipsis")
    # Half of a wide letter is a space.
    return short.plain.removesuffix(" …") + "…" if short.plain.endswith(" …") else short.plain


def number(x: float, decimals: int = DECIMALS) -> str:
    """A number with so many decimals; a bare 0 is exactly 0, and nothing else looks like 0."""
    if x == 0:
        return "0"
    text = f"{x:.{decimals}f}"
    return f"{x:.0e}" if math.isfinite(x) and float(text) == 0 else text


def heat(share: float) -> Style:
    """A background from light (0) to dark (1)."""
    share = min(1.0, max(0.0, share))
    red, green, blue = (round(c + (h - c) * share) for c, h in zip(COLD, HOT, strict=True))
    return Style(
        color="black" if share < 0.5 else "bright_white", bgcolor=f"rgb({red},{green},{blue})"
    )


@dataclass(frozen=True)
class Matrix:
    """A block of a table: the values (R, C) of the columns shown, with a header for each.

    headers: by column. group: a line above each header. low, high: what is coldest and hottest;
    where they are equal nothing is coloured. whole: integers, without decimals.
    """

    values: np.ndarray
    headers: Sequence[str]
    columns: Places
    group: str = ""
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    def cell(self, i: int, j: int, decimals: int) -> Text:
        x = float(self.values[i, j])
        if x == 0 or not math.isfinite(x):
            return Text(number(x), style="dim")
        style = heat((x - self.low) / (self.high - self.low)) if self.high > self.low else ""
        return Text(number(x, 0 if self.whole else decimals), style=style)


@dataclass(frozen=True)
class Words:
    """A column of words beside a matrix, one for each row."""

    header: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "left"


@dataclass
class _Column:
    """A column of a table; one that `shrinks` may lose the end of its cells."""

    header: str
    cells: list[Text]
    justify: Literal["left", "right"] = "right"
    shrinks: bool = False
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.least

    @property
    def least(self) -> int:
        widest = max(1, *(cell.cell_len for cell in self.cells))
        return min(LEAST_LABEL, widest) if self.shrinks else widest

    @property
    def most(self) -> int:
        words = [*self.header.split("\n"), *(cell.plain for cell in self.cells)]
        return min(MOST_LABEL, max(map(cell_len, words)))


def print_table(
    console: Console, rows: Places, labels: Sequence[str], *blocks: Matrix | Words
) -> None:
    """Print blocks side by side, a line for each of `rows`, with as many decimals as fit."""
    room = width_of(console) - INDENT
    left = _Column("", [Text(GAP if i is None else labels[i]) for i in rows], "left", shrinks=True)
    for decimals in range(DECIMALS, 0, -1):
        columns = [left, *_all_columns(blocks, rows, decimals)]
        if sum(column.least + 1 for column in columns) <= room + 1:
            break
    _widen(columns, room)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for column in columns:
        header = "\n".join(clip(line, column.width) for line in column.header.split("\n"))
        table.add_column(
            Text(header), justify=column.justify, no_wrap=True,
            min_width=column.width, max_width=column.width,
        )  # fmt: skip
    for cells in zip(*(column.cells for column in columns), strict=True):
        pairs = zip(columns, cells, strict=True)
        table.add_row(*(Text(clip(cell.plain, c.width), cell.style) for c, cell in pairs))
    console.print()
    console.print(Padding(table, (0, 0, 0, INDENT), expand=False))


def _widen(columns: Sequence[_Column], room: int) -> None:
    """Give what is left of the line to columns too narrow for their words, labels of rows first."""
    spare = room + 1 - sum(column.width + 1 for column in columns)
    while spare > 0:
        narrow = [column for column in columns if column.width < column.most]
        if not narrow:
            return
        min(narrow, key=lambda column: (not column.shrinks, column.width)).width += 1
        spare -= 1


def _all_columns(blocks: Sequence[Matrix | Words], rows: Places, decimals: int) -> list[_Column]:
    """The columns of every block, with a line between two matrices."""
    columns: list[_Column] = []
    for before, block in zip((None, *blocks), blocks, strict=False):
        if isinstance(before, Matrix) and isinstance(block, Matrix):
            columns.append(_Column("│\n│", [Text("│") for _ in rows]))
        columns += _columns(block, rows, decimals)
    return columns


def _columns(block: Matrix | Words, rows: Places, decimals: int) -> list[_Column]:
    if isinstance(block, Words):
        words = [Text(GAP if i is None else block.cells[i]) for i in rows]
        return [_Column(block.header, words, block.justify, shrinks=block.justify == "left")]
    made = []
    for j in block.columns:
        if j is None:
            made.append(_Column("\n" * bool(block.group) + GAP, [Text(GAP) for _ in rows]))
            continue
        header = f"{block.group}\n{block.headers[j]}" if block.group else block.headers[j]
        cells = [Text(GAP) if i is None else block.cell(i, j, decimals) for i in rows]
        made.append(_Column(header, cells))
    return made


def width_of(console: Console) -> int:
    """Columns to use: never more than WIDTH, and enough for a table of a few numbers."""
    return max(NARROWEST, min(WIDTH, console.width))


def fitting(most: int, console: Console) -> int:
    """How many columns a narrow console takes of those that fit into WIDTH."""
    return max(1, most * width_of(console) // WIDTH)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, wrapped; nothing in it is taken for markup."""
    for line in Text(text, style=style).wrap(console, width_of(console)):
        line.rstrip()
        console.print(line, highlight=False)


def heading(console: Console, text: str) -> None:
    say(console, f"\n{text}", "bold")
