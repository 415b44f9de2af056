"""The drawing of the command `lockstep`: one panel for each kind of array, both axes in decades."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpt_parity.lessons.config import LockstepConfig
from gpt_parity.lessons.drift_runs import KINDS, Drift
from gpt_parity.plots import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (10.0, 7.0)


def plot(config: LockstepConfig, result: Drift) -> None:
    """Draw into the file that `config` names; raises what `plots.draw` raises."""

    def panels(figure: Figure) -> None:
        figure.suptitle(f"{config.a} against {config.b}")
        for axes, kind in zip(figure.subplots(2, 2, sharex=True).flat, KINDS, strict=True):
            _panel(axes, result, kind)

    assert config.plot is not None
    draw(config.plot, panels, SIZE)


def _panel(axes: Axes, result: Drift, kind: str) -> None:
    steps = [look.step for look in result.looks]
    if kind != "loss":
        for name in (d.name for d in result.looks[0].of(kind)):
            values = [next(d.distance for d in look.of(kind) if d.name == name)
                      for look in result.looks]  # fmt: skip
            axes.plot(*_positive(steps, values), color="tab:blue", alpha=0.25, linewidth=0.7)
    axes.plot(
        *_positive(steps, [look.whole(kind, "distance") for look in result.looks]),
        color="tab:blue", marker=".", label="distance of the two runs",
    )  # fmt: skip
    band = [
        (look.step, look.whole(kind, "spread"), look.whole(kind, "envelope"))
        for look in result.looks
        if look.step <= result.envelope_steps
    ]
    drawn = [(s, low, high) for s, low, high in band if low and high and math.isfinite(high)]
    if drawn:
        axes.fill_between(
            *zip(*drawn, strict=True), color="tab:orange", alpha=0.3,
            label="rounding envelope: spread to tolerance",
        )  # fmt: skip
    axes.set_title(kind)
    axes.set_xscale("log")
    axes.set_ylabel("|a - b| / |b|")
    axes.set_xlabel("step")
    if drawn or any(len(line.get_xdata()) for line in axes.lines):
        axes.set_yscale("log")
        axes.legend(loc="best", fontsize="small")
    else:
        axes.set_ylim(0.0, 1.0)
        axes.text(0.5, 0.5, "exactly 0", transform=axes.transAxes, ha="center")


def _positive(steps: list[int], values: list[float | None]) -> tuple[list[int], list[float]]:
    """Those points that a logarithmic axis can show."""
    points = [(s, v) for s, v in zip(steps, values, strict=True) if v and math.isfinite(v)]
    return [s for s, _ in points], [v for _, v in points]
