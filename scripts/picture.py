"""The picture of the README: every tensor of one pass, of a right twin and of a wrong one."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from cyclopts import App

import numpy_impl
import torch_impl
from gpt_parity.cli import run_app
from gpt_parity.oracle import FLOAT64, Report, compare_traces, model_tolerances, trace
from gpt_parity.oracle.compare import FORWARD, LOSS
from gpt_parity.plots import draw, require_format, require_matplotlib
from gpt_parity.weights import copy_weights
from torch_impl.gpt import GPTAttention

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

SIZES = (65, 32, 64, 2)  # the source text's
SMALLEST = 1e-4  # where equality to the bit is drawn


class ForgottenKey(GPTAttention):
    """Attention whose backward pass forgets that x is the key too; its values are right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.detach().transpose(-2, -1) / math.sqrt(x.shape[-1])
        return self.output(self.softmax(self.mask(scores)) @ x)


def measured() -> tuple[Report, Report]:
    """Reports on the PyTorch twin as it is, and with the mistake in its last block; float64."""
    tokens, targets = np.random.default_rng(0).integers(0, SIZES[0], (2, 4, SIZES[1]))
    reference, candidate = (
        p.GPT(*SIZES, seed=42, dtype="float64") for p in (numpy_impl, torch_impl)
    )
    copy_weights(reference, candidate)
    clean, tolerances = model_tolerances(
        reference, numpy_impl.GPTLoss(), tokens, targets, FLOAT64
    )  # fmt: skip

    def report() -> Report:
        found = trace(candidate, torch_impl.GPTLoss(), tokens, targets)
        return compare_traces(found, clean, tolerances, "float64")

    right = report()
    candidate.transformers[-1].attention.__class__ = ForgottenKey
    return right, report()


def plot(figure: Figure, right: Report, wrong: Report) -> None:
    """Errors in units of tolerance, values from the tokens to the loss, then gradients back."""
    axes = figure.subplots()
    for report, marker, colour, label in (
        (wrong, "x", "#c8321e", "one line forgotten: the gradient of x as key"),
        (right, "o", "#1f6fb4", "PyTorch twin as it is"),
    ):
        heights = [max(j.ratio, SMALLEST) for j in report.judgements]
        axes.plot(heights, marker, color=colour, label=label, markersize=5)
    values = sum(j.kind in (FORWARD, LOSS) for j in right.judgements)
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", linewidth=1)
    axes.axvline(values - 0.5, color="grey", linewidth=0.6, linestyle=":")
    count = len(right.judgements)
    axes.text(count - 0.5, 1.6, "tolerance", ha="right", va="bottom", fontsize=9)
    top = axes.get_ylim()[1]
    for place, text in (((values - 1) / 2, "values"), ((values + count) / 2, "gradients")):
        axes.text(place, top, text, ha="center", va="bottom", fontsize=9)
    axes.set_xlabel(f"the {count} tensors of one pass")
    axes.set_xticks([])
    axes.set_ylabel("error / tolerance")
    axes.legend(loc="center left", fontsize=9)


def main(out: Path = Path("docs/picture.svg")) -> int:
    """Draw it, from numbers computed now.

    Example: python scripts/picture.py

    Parameters
    ----------
    out
        Where to (.svg or .png).
    """
    require_format("out", out)
    require_matplotlib("the picture")
    right, wrong = measured()
    draw(out, lambda figure: plot(figure, right, wrong), (7.5, 3.2))
    worst, first = max(j.ratio for j in right.judgements), wrong.first
    print(f"as it is: worst {worst:.3f} of tolerance")
    if first is not None:
        print(f"key forgotten: first {first.kind} {first.name}, {first.ratio:.2e} tolerances")
    return 0


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(main)
    sys.exit(run_app(app))
