"""What the fills of the mask led to: a table, what it shows in words, a drawing, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from gpt_parity.config import TrainConfig
from gpt_parity.corpus import Corpus
from gpt_parity.lessons.config import FillValueConfig
from gpt_parity.lessons.fill_value import HIDING, LAST_STEPS, Measurement, label
from gpt_parity.plots import draw
from gpt_parity.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "gpt-parity/fill-value"
SCHEMA_VERSION = 1
WIDTH = 80
POINTS = 60
# Losses closer than this are called about the same: five seeds of the initial weights, after 3,000
# steps with the fill of the source text, end up to 0.053 apart in training and 0.049 at the last
# position.
SAME = 0.05


@dataclass(frozen=True)
class FillValueReport:
    """All that one run of the experiment measured."""

    config: FillValueConfig
    recipe: TrainConfig
    corpus: Corpus
    vocab_size: int
    measurements: tuple[Measurement, ...]

    def print(self, console: Console) -> None:
        """The text, the table, what its columns are, the samples, and what it all shows."""
        width = min(WIDTH, console.width)

        def line(text: str, *, cut: bool = False) -> None:
            console.print(
                text, highlight=False, markup=False, width=width, no_wrap=cut,
                overflow="ellipsis" if cut else "fold",
            )  # fmt: skip

        absent = (
            "data/tinyshakespeare.txt is absent, trained on " if self.corpus.is_fallback else ""
        )
        line(
            f"{absent}{self.corpus.name}: {len(self.corpus.text):,} characters, "
            f"{self.config.steps} steps with each fill, {self.config.backend} "
            f"{self.recipe.dtype}, seed {self.config.seed}"
        )
        console.print(table(self.measurements), width=width)
        line(legend(self.measurements[0]))
        console.print()
        line("What each model writes after the first test window:")
        labels = [label(m.fill) for m in self.measurements]
        for name, m in zip(labels, self.measurements, strict=True):
            # Line feeds and whatever a terminal would obey, as Python writes them.
            line(f"{name:>{max(map(len, labels))}}  {m.sample!r}", cut=True)
        console.print()
        for text in explanation(self.measurements).splitlines():
            line(text)

    def json(self) -> bytes:
        """Everything, under a versioned schema; numbers that are not finite are strings."""
        content = {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "text": {"name": self.corpus.name, "characters": len(self.corpus.text),
                     "sha256": self.corpus.sha256},
            "steps": self.config.steps,
            "recipe": self.recipe.recipe,
            "model": _without_fill(asdict(self.recipe.model_config(self.vocab_size))),
            "hiding_fill": HIDING,
            "fills": [figures(m) for m in self.measurements],
            "explanation": explanation(self.measurements),
            "provenance": provenance(),
        }  # fmt: skip
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def figures(m: Measurement) -> dict[str, Any]:
    """All figures of one fill, as JSON can hold them."""
    return {
        "fill": m.fill if math.isfinite(m.fill) else str(m.fill),
        "training_loss": m.train_loss,
        "training_loss_steps": len(m.losses[-LAST_STEPS:]),
        "test_loss_own_fill": m.own_loss,
        "test_loss_future_hidden": m.hidden_loss,
        "last_position_loss": m.next_loss,
        "future_weight_by_block": list(m.future_weight),
        "probe": {
            "trials": len(m.moved), "exact_zeros": m.unmoved, "moved_mean": m.moved_mean,
            "moved_max": max(m.moved), "moved": list(m.moved),
        },
        "sample": m.sample,
        "weights_sha256": m.weights_sha256,
        "training_curve": [{"step": step, "loss": loss} for step, loss in curve(m.losses)],
    }  # fmt: skip


def curve(losses: Sequence[float]) -> list[tuple[int, float]]:
    """(step, loss) of the training, each the mean over the steps since the one before."""
    stride = -(-len(losses) // POINTS)
    blocks = [losses[i : i + stride] for i in range(0, len(losses), stride)]
    ends = [min(len(losses), stride * (i + 1)) for i in range(len(blocks))]
    return [(end, math.fsum(b) / len(b)) for end, b in zip(ends, blocks, strict=True)]


def table(measurements: Sequence[Measurement]) -> Table:
    """A line per fill; narrow enough for 80 columns."""
    found = Table(
        title="One model, several fills of its mask (losses in nats per character)",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in ("fill", "training\nloss", "test,\nown fill", "test,\nhidden", "last\nposition",
                   "future\nweight", "moved\nmean", "moved\nmax", "exact\nzeros"):  # fmt: skip
        found.add_column(column, justify="right", no_wrap=True)
    for m in measurements:
        losses = (m.train_loss, m.own_loss, m.hidden_loss, m.next_loss)
        shares = (m.future_mean, m.moved_mean, max(m.moved))
        found.add_row(
            label(m.fill), *(f"{loss:.4f}" for loss in losses), *map(share, shares),
            f"[{'green' if m.is_causal else 'red'}]{m.unmoved}[/]",
        )  # fmt: skip
    return found


def share(value: float) -> str:
    """A part of 1 with three digits; "0" is exactly 0."""
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}" if value else "0"


def legend(m: Measurement) -> str:
    """What the columns are; the counts in it are those of every line."""
    return (
        f"training: mean of the last {len(m.losses[-LAST_STEPS:])} steps. own fill: the test part, "
        f"masked as in training. hidden: the same weights with a fill of {label(HIDING)}, whose "
        "exponential is exactly 0, so that nothing of the future is left. last position: own fill, "
        "the last position of each test window, after which there is nothing to see, as in "
        "generation. future weight: attention that goes to later positions. moved: share of the "
        "probability at a position that moves when the characters after it are changed; exact "
        f"zeros: trials, of {len(m.moved)}, in which every logit stayed equal."
    )


def explanation(measurements: Sequence[Measurement]) -> str:
    """What the figures show, and only that; a line for each fill that leaks."""
    causal = [m for m in measurements if m.is_causal]
    leaking = [m for m in measurements if not m.is_causal]
    lines = []
    if causal:
        lines.append(
            f"With {_joined([label(m.fill) for m in causal])}, changing what follows a position "
            f"moved no logit there, in any of {sum(len(m.moved) for m in causal)} trials."
        )
    if len(causal) > 1:
        same = len({m.weights_sha256 for m in causal}) == 1
        ends = "the same weights, to the bit" if same else "different weights"
        lines[-1] += f" They end training with {ends}."
    lines += [" ".join(_leak(m, causal[0] if causal else None)) for m in leaking]
    if not leaking:
        lines.append("No fill here leaks, so there is no leak to compare with.")
    elif not causal:
        lines.append("No fill here hides the future, so there is nothing to compare with.")
    return "\n".join(lines)


def _leak(m: Measurement, reference: Measurement | None) -> list[str]:
    name = label(m.fill)
    sentences = [
        f"A fill of {name} leaks: {_percent(m.future_mean)} of the attention goes to later "
        f"characters, and changing them moved the logits in {len(m.moved) - m.unmoved} of "
        f"{len(m.moved)} trials: {_percent(m.moved_mean)} of the probability at a position on "
        f"average, {_percent(max(m.moved))} at most.",
        _careless(m),
    ]
    if reference is None:
        return sentences
    other = label(reference.fill)
    training = _compared(m.train_loss, reference.train_loss, f"that of {other}")
    last = _compared(m.next_loss, reference.next_loss, f"that of {other}")
    sentences.append(
        f"Its training loss, {training}; its loss at the last position, where no future can help "
        f"it, {last}."
    )
    looks = _sign(m.train_loss, reference.train_loss)
    writes = _sign(m.next_loss, reference.next_loss)
    if not looks and not writes:
        verdict = f"The losses of this run do not tell {name} from {other}; the probe does."
    else:
        seems = ("better", "the same", "worse")[looks + 1]
        became = ("got better", "stayed the same", "got worse")[writes + 1]
        joint, too = ("and", " too") if looks == writes else ("while", "")
        verdict = (
            f"So in this run the leak made training look {seems}, {joint} generation, which has no "
            f"future to look at, {became}{too}."
        )
    return [*sentences, verdict]


def _careless(m: Measurement) -> str:
    gap = m.hidden_loss - m.own_loss
    begin = f"Tested with its own fill it reaches {m.own_loss:.4f}, with the future hidden "
    if abs(gap) < SAME:
        return f"{begin}{m.hidden_loss:.4f}, about the same."
    if gap > 0:
        return (
            f"{begin}{m.hidden_loss:.4f}: a test that leaves the leak open flatters it by "
            f"{gap:.4f}."
        )
    return f"{begin}{m.hidden_loss:.4f}, {-gap:.4f} lower: here the leak did not flatter it."


def _sign(loss: float, reference: float) -> int:
    """-1 lower, 1 higher, 0 about the same."""
    if abs(loss - reference) < SAME:
        return 0
    return -1 if loss < reference else 1


def _compared(loss: float, reference: float, what: str) -> str:
    sign = _sign(loss, reference)
    if sign == 0:
        return f"{loss:.4f}, is about {what}, {reference:.4f}"
    word = "below" if sign < 0 else "above"
    return f"{loss:.4f}, is {abs(loss - reference):.4f} {word} {what}, {reference:.4f}"


def _percent(part: float) -> str:
    return f"{100 * part:.2g}%" if part < 0.1 else f"{100 * part:.0f}%"


def _joined(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"a fill of {names[0]}"
    return f"fills of {', '.join(names[:-1])} and {names[-1]}"


def _without_fill(model: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name != "mask_value"}


def plot_losses(measurements: Sequence[Measurement], path: Path) -> None:
    """Training losses as curves; at their ends a filled mark for the test loss with the future
    hidden and an open one for that with the model's own fill.
    """

    def plot(figure: Figure) -> None:
        axis = figure.subplots()
        for index, m in enumerate(measurements):
            steps, losses = zip(*curve(m.losses), strict=True)
            colour = f"C{index % 10}"
            # Equal curves lie on each other: the later ones are thinner and broken.
            style = ("-", "--", ":", "-.")[index % 4]
            axis.plot(steps, losses, style, color=colour, lw=max(1.2, 3.0 - 0.6 * index),
                      label=f"fill {label(m.fill)}")  # fmt: skip
            size = max(5.0, 11.0 - 2.0 * index)
            axis.plot(steps[-1], m.hidden_loss, "o", color=colour, ms=size, clip_on=False)
            axis.plot(steps[-1], m.own_loss, "o", color=colour, ms=size, mfc="none", clip_on=False)
        axis.plot([], [], "o", color="0.4", label="test loss, future hidden")
        axis.plot([], [], "o", color="0.4", mfc="none", label="test loss, own fill")
        axis.set_xlabel("training step")
        axis.set_ylabel("loss (nats per character)")
        axis.legend()

    draw(path, plot, (7.0, 4.2))
