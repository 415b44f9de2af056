"""How time and memory of a step grow with T, E, B and the number of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt_parity.model_config import GPTConfig, Preset
from gpt_parity.plots import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = {"T": 64, "E": 128, "B": 8, "blocks": 2}
AXES = {
    "T": [32, 64, 128, 256, 512],
    "E": [32, 64, 128, 256, 512],
    "B": [2, 4, 8, 16, 32],
    "blocks": [1, 2, 4, 8, 16],
}
VOCAB_SIZE = 65


def preset(axis: str, value: int) -> Preset:
    """The sizes of the base with one of them replaced."""
    sizes = {**BASE, axis: value}
    model = GPTConfig(VOCAB_SIZE, sizes["T"], sizes["E"], sizes["blocks"])
    return Preset(model, batch_size=sizes["B"], length=sizes["T"])


def operations(axis: str, value: int) -> int:
    """Additions and multiplications in the matrix products of a step."""
    sizes = preset(axis, value)
    return sizes.model.operations(sizes.batch_size, sizes.length)


def exponent(values: list[int], y: list[float]) -> float:
    """The slope of log y over log value, by least squares:  y ~ value^slope."""
    return float(np.polyfit(np.log(values), np.log(y), 1)[0])


def growth_section(figures: dict[str, Any]) -> tuple[str, list[str], list[list[str]], list[str]]:
    """Heading, header, rows and notes: a row for each axis."""
    rows = []
    for axis, points in figures.items():
        values = [point["value"] for point in points]
        time = exponent(values, [point["seconds"] for point in points])
        upper = exponent(values[-3:], [point["seconds"] for point in points[-3:]])
        memory = exponent(values, [point["bytes"] for point in points])
        work = [float(operations(axis, value)) for value in values]
        rows.append([
            axis, f"{values[0]} to {values[-1]}", f"{exponent(values, work):.2f}", f"{time:.2f}",
            f"{exponent(values[-3:], work[-3:]):.2f}", f"{upper:.2f}", f"{memory:.2f}",
        ])  # fmt: skip
    base = ", ".join(f"{name} = {value}" for name, value in BASE.items())
    header = ["of", "values", "operations", "time", "operations, upper half",
              "time, upper half", "memory"]  # fmt: skip
    return "Growth: exponents of a NumPy step", header, rows, [
        f"One size varies, the others stay at {base}. Operations are those of the matrix products; "
        "memory is what a step allocates at its peak. The upper half are the three largest values.",
    ]  # fmt: skip


def plot_growth(figures: dict[str, Any], path: Path) -> None:
    """Time of a step over each size, beside the operations scaled to the largest; an SVG file."""

    def plot(figure: Figure) -> None:
        axes = figure.subplots(1, len(figures), sharey=True, squeeze=False)
        for axis, (name, points) in zip(axes[0], figures.items(), strict=True):
            values = [point["value"] for point in points]
            seconds = np.array([point["seconds"] for point in points])
            work = np.array([operations(name, value) for value in values])
            axis.loglog(values, seconds * 1e3, marker="o", label="step")
            axis.loglog(values, work * seconds[-1] / work[-1] * 1e3, "--", label="operations")
            axis.set_xticks(values, map(str, values))
            axis.minorticks_off()
            axis.set_xlabel(name)
        axes[0, 0].set_ylabel("milliseconds")
        axes[0, 0].legend()

    draw(path, plot, (3.2 * len(figures), 3.0))
