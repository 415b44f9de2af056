"""Error maps: every element of a tensor in units of the tolerance of its row, on a log scale.

The squares of a row's elements, in these units, add up to the square of the row's own ratio, so
what a map shows is what was judged. Large tensors are reduced by the maximum over blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gpt_parity.html.markup import svg, text
from gpt_parity.oracle.compare import Judgement, Pair
from gpt_parity.oracle.tolerance import in_rows, norms

# Upper ends of the levels: below the first is level 1, exactly zero is level 0.
EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 1e3, 1e5, 1e8)
WITHIN = EDGES.index(1.0) + 1  # the last level inside the tolerance
BEYOND = len(EDGES) + 1
NOT_FINITE = BEYOND + 1
HIDDEN = -1
# Cells a side, of a tensor that differs and of one that agrees.
MOST, FEWER = 64, 32
# Pixels a cell, and the columns that the strip of rows takes.
SMALLEST, LARGEST, WIDTH = 5.0, 14.0, 320.0
STRIP = 2


@dataclass(frozen=True)
class Errors:
    """Errors in units of the row's tolerance: of elements (R, N) and of whole rows (R,).

    `hidden` (R, N) are positions that a mask covers.
    """

    elements: np.ndarray
    rows: np.ndarray
    hidden: np.ndarray


def errors(pair: Pair) -> Errors | None:
    """The errors behind a judgement; None where shapes differ or nothing is judged."""
    candidate, reference = pair.candidate, pair.reference
    if candidate.shape != reference.shape or math.isinf(pair.tolerance.whole):
        return None
    candidate, reference = (in_rows(x, pair.tolerance) for x in (candidate, reference))
    length = reference.shape[-1] if reference.ndim else 1
    hidden = np.zeros(reference.shape, bool) if pair.kept is None else ~pair.kept
    with np.errstate(over="ignore", invalid="ignore"):
        difference = candidate.astype(np.float64) - reference
    difference = np.where(hidden, 0.0, difference)
    finite = np.isfinite(difference)
    _, sizes = norms(np.where(finite, difference, 0.0))
    sizes = np.where(finite.all(axis=-1) if reference.ndim else finite, sizes, math.inf)
    allowed = pair.tolerance.rows.reshape(-1, 1)
    return Errors(
        _units(np.abs(difference).reshape(sizes.size, length), allowed),
        _units(sizes.reshape(-1, 1), allowed)[:, 0],
        hidden.reshape(sizes.size, length),
    )


def _units(error: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """error / allowed; nothing over nothing is 0, and what is not finite is infinite."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratio = np.where(error > 0.0, error / allowed, 0.0)
    return np.where(np.isfinite(error), ratio, math.inf)


def levels(ratios: np.ndarray) -> np.ndarray:
    """Which of the colours a ratio has."""
    found = np.searchsorted(EDGES, ratios, side="left") + 1
    found = np.where(ratios == 0.0, 0, found)
    return np.where(np.isfinite(ratios), found, NOT_FINITE)


def heat_map(ident: str, judgement: Judgement, pair: Pair, label: str = "") -> str:
    """The map of one tensor with its caption; a sentence where there is none to draw."""
    found = errors(pair)
    who = f"{label}: " if label else ""
    if found is None:
        reason = judgement.reason or "not judged, its tolerance is infinite"
        return f'<p class="soft">{text(f"{who}no map, {reason}.")}</p>'
    if found.elements.size == 0:
        return f'<p class="soft">{text(f"{who}no map, there are no elements.")}</p>'
    most = FEWER if judgement.ok else MOST
    shown = np.where(found.hidden, -1.0, found.elements)
    (cells, tall, wide), (rows, _, _) = _blocks(shown, most), _blocks(found.rows[:, None], most)
    grid = np.where(cells < 0.0, HIDDEN, levels(cells))
    height, width = grid.shape
    size = min(LARGEST, max(SMALLEST, WIDTH / (width + STRIP)))
    body = _paths([(levels(rows), 0), (grid, STRIP)])
    caption = _caption(found, pair, tall, wide)
    title = f"{who}errors of {judgement.name} in units of tolerance"
    picture = svg(ident, title, caption, (width + STRIP, height), body, style="heat", scale=size)
    return (
        f"<figure>\n{picture}\n<figcaption>{text(f'{who}{_verdict(judgement)} {caption}')}"
        "</figcaption>\n</figure>"
    )


def _verdict(judgement: Judgement) -> str:
    status = "agrees" if judgement.ok else "DIFFERS"
    return f"{status}, {judgement.describe()}."


def _caption(found: Errors, pair: Pair, tall: int, wide: int) -> str:
    """What is seen: sizes, blocks, the largest row and the largest element."""
    shape = in_rows(pair.reference, pair.tolerance).shape
    count, length = found.elements.shape
    said = f"{count} {'row' if count == 1 else 'rows'} of {length}, shape {shape}."
    if tall > 1 or wide > 1:
        said += f" Each cell is the maximum over up to {tall} x {wide} elements."
    if found.hidden.any():
        said += " Masked positions are left blank."
    row = int(np.argmax(found.rows))
    i, j = np.unravel_index(int(np.argmax(found.elements)), found.elements.shape)
    leading = shape[:-1]

    def place(index: int) -> tuple[int, ...]:
        return tuple(int(n) for n in np.unravel_index(index, leading)) if leading else ()

    at = f" in row {place(row)}" if leading else ""
    element = (*place(int(i)), int(j)) if shape else ()
    where = f" at {element}" if element else ""
    over = int((found.elements > 1.0).sum())
    said += f" Largest row {found.rows[row]:.3g}{at}, largest element {found.elements[i, j]:.3g}"
    said += where
    return f"{said}, {over} of {int((~found.hidden).sum())} elements alone beyond their row's."


def _blocks(x: np.ndarray, most: int) -> tuple[np.ndarray, int, int]:
    """Maxima over blocks, at most `most` a side, and the blocks' height and width."""
    tall, wide = (max(1, math.ceil(n / most)) for n in x.shape)
    x = np.maximum.reduceat(x, np.arange(0, x.shape[0], tall), axis=0)
    return np.maximum.reduceat(x, np.arange(0, x.shape[1], wide), axis=1), tall, wide


def _paths(parts: list[tuple[np.ndarray, int]]) -> str:
    """A path for each colour of runs of cells, and dashes through what is out of tolerance."""
    runs: dict[int, list[str]] = {}
    over: list[str] = []
    for grid, left in parts:
        for y, row in enumerate(grid.tolist()):
            _add_runs(row, left, y, runs)
            out = [level > WITHIN for level in row]
            marks: dict[int, list[str]] = {}
            _add_runs([int(value) for value in out], left, y, marks)
            over += marks.get(1, [])
    lines = [
        f'<path class="l{level}" d="{"".join(runs[level])}"/>'
        for level in sorted(runs) if level != HIDDEN
    ]  # fmt: skip
    if over:
        lines.append(f'<path class="over" d="{"".join(over)}"/>')
    return '<g transform="translate(0 .5)">\n' + "\n".join(lines) + "\n</g>"


def _add_runs(row: list[int], left: int, y: int, runs: dict[int, list[str]]) -> None:
    start = 0
    for x in range(1, len(row) + 1):
        if x == len(row) or row[x] != row[start]:
            runs.setdefault(row[start], []).append(f"M{left + start} {y}h{x - start}")
            start = x


def legend() -> str:
    """The colours in words."""
    ends = ["exactly 0", f"to {EDGES[0]:g}"]
    ends += [f"{low:g} to {high:g}" for low, high in pairwise(EDGES)]
    ends += [f"over {EDGES[-1]:g}", "not finite"]
    items = "\n".join(
        f'<li><i class="l{level}{" over" if level > WITHIN else ""}"></i>{text(words)}</li>'
        for level, words in enumerate(ends)
    )
    return (
        '<p class="soft">A cell is the error of an element divided by the tolerance of its row; '
        "the strip on the left is each row as a whole, as it was judged. A dash through a cell "
        "says that it is out of tolerance.</p>\n"
        f'<ul class="legend" aria-label="Colours of the maps">\n{items}\n</ul>'
    )
