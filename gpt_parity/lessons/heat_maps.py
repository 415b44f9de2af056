"""Attention as heat maps in one file; what is masked, or exactly 0, is grey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt_parity.lessons.attention import Stages
from gpt_parity.lessons.labels import positions
from gpt_parity.lessons.tables import clip
from gpt_parity.plots import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LABELS, MOST_LABEL, MOST_COLUMNS = 16, 10, 3
INCHES = (4.2, 3.8)


def draw_stages(path: Path, words: Sequence[str], stages: Stages) -> None:
    """Scores, masked scores, weights, weights without the mask, gradients at v and k."""
    labels = positions(words)
    maps: list[tuple[str, np.ndarray, Sequence[str]]] = [
        ("scores", stages.scores, labels),
        ("scores after the mask", stages.masked, labels),
        ("weights", stages.weights, labels),
        ("weights without the mask", stages.open_weights, labels),
    ]
    for name in ("v", "k"):
        g = stages.gradients[name]
        norms = np.where(g.zero, 0.0, g.norms)
        maps.append((f"gradient at {name} from output i", norms, [labels[i] for i in g.rows]))
    draw_maps(path, maps, labels)


def draw_maps(
    path: Path, maps: Sequence[tuple[str, np.ndarray, Sequence[str]]], labels: Sequence[str]
) -> None:
    """Draw each (title, values, labels of its rows); `labels` are those of all columns."""

    def plot(figure: Figure) -> None:
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis, (title, values, row_labels) in zip(axes, maps, strict=False):
            # Weights and norms that are 0 were cut off; a score may be 0 by chance.
            hidden = ~np.isfinite(values) if "scores" in title else values == 0
            picture = axis.imshow(np.ma.masked_array(values, hidden), cmap=colours, aspect="auto")
            figure.colorbar(picture, ax=axis)
            axis.set_title(title, parse_math=False)
            _label(axis.xaxis, labels, rotation=90)
            _label(axis.yaxis, row_labels)
            axis.set_xlabel("position j, which is read")
            axis.set_ylabel("position i, which reads")
        for axis in list(axes):
            axis.set_axis_off()

    from matplotlib import colormaps

    colours = colormaps["viridis"].with_extremes(bad="lightgrey")
    columns = min(MOST_COLUMNS, len(maps))
    rows = math.ceil(len(maps) / columns)
    draw(path, plot, (INCHES[0] * columns, INCHES[1] * rows))


def _label(axis: Any, labels: Sequence[str], rotation: int = 0) -> None:
    """Some of the labels, evenly chosen where there are many."""
    stride = -(-len(labels) // MOST_LABELS)
    places = list(range(0, len(labels), stride))
    texts = [_drawable(clip(labels[i], MOST_LABEL)) for i in places]
    axis.set_ticks(places, texts, rotation=rotation, parse_math=False)


def _drawable(text: str) -> str:
    """`text` with a question mark for each character that the font has no picture of."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(c if ord(c) in known else "?" for c in text)
