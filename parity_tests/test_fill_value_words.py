"""What the fill-value experiment says follows its figures, here made-up ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gpt_parity.lessons.fill_value import Measurement, label
from gpt_parity.lessons.fill_value_report import curve, explanation, figures

pytestmark = pytest.mark.reference("by hand")


def made_up(fill: float, train: float, last: float, **changes: Any) -> Measurement:
    causal = fill < -100
    found = Measurement(
        fill=fill, losses=(train,), own_loss=train, hidden_loss=train, next_loss=last,
        future_weight=(0.0, 0.0) if causal else (0.5, 0.25),
        moved=(0.0,) * 4 if causal else (0.2, 0.0, 0.4, 0.6), unmoved=4 if causal else 1,
        sample="a\nb", weights_sha256="same" if causal else "other",
    )  # fmt: skip
    return replace(found, **changes)


BETTER, WORSE, ALIKE = -0.5, 0.5, 0.01


@pytest.mark.parametrize(
    ("train", "last", "end"),
    [
        (BETTER, WORSE, "look better, while {}, got worse."),
        (WORSE, WORSE, "look worse, and {}, got worse too."),
        (WORSE, BETTER, "look worse, while {}, got better."),
        (ALIKE, BETTER, "look the same, while {}, got better."),
        (BETTER, ALIKE, "look better, while {}, stayed the same."),
        (-ALIKE, ALIKE, "The losses of this run do not tell 0 from -1e9; the probe does."),
    ],
)
def test_the_conclusion_follows_the_signs(train: float, last: float, end: str) -> None:
    text = explanation([made_up(-1e9, 2.0, 3.0), made_up(0.0, 2.0 + train, 3.0 + last)])
    end = end.format("generation, which has no future to look at")
    assert text.endswith(end), text
    for name, change, before in (("training loss", train, 2.0), ("position", last, 3.0)):
        said = {
            BETTER: f"{before - 0.5:.4f}, is 0.5000 below that of -1e9, {before:.4f}",
            WORSE: f"{before + 0.5:.4f}, is 0.5000 above that of -1e9, {before:.4f}",
        }.get(change, f"{before + change:.4f}, is about that of -1e9, {before:.4f}")
        assert said in text, (name, text)


def test_a_careless_test_is_called_so_only_where_it_flatters() -> None:
    def text(own: float, hidden: float) -> str:
        return explanation([made_up(0.0, 2.0, 2.0, own_loss=own, hidden_loss=hidden)])

    flattered = text(1.5, 2.75)
    assert "own fill it reaches 1.5000, with the future hidden 2.7500: a test that" in flattered
    assert "flatters it by 1.2500" in flattered
    assert "with the future hidden 2.2500, 0.7500 lower: here the leak did not" in text(3.0, 2.25)
    assert "with the future hidden 3.0100, about the same." in text(3.0, 3.01)


def test_the_trials_and_weights_said_are_those_measured() -> None:
    causal = [made_up(-1e9, 2.0, 2.0), made_up(-math.inf, 2.0, 2.0)]
    leak = made_up(0.0, 2.0, 2.0)
    text = explanation([*causal, leak])
    assert text.startswith(
        "With fills of -1e9 and -inf, changing what follows a position moved no logit there, in "
        "any of 8 trials. They end training with the same weights, to the bit.\n"
        "A fill of 0 leaks: 38% of the attention goes to later characters, and changing them "
        "moved the logits in 3 of 4 trials: 30% of the probability at a position on average, 60% "
        "at most."
    )
    causal[1] = replace(causal[1], weights_sha256="third")
    assert "They end training with different weights." in explanation(causal)
    assert explanation(causal).endswith("No fill here leaks, so there is no leak to compare with.")
    alone = explanation([leak])
    assert "-1e9" not in alone
    assert alone.endswith("No fill here hides the future, so there is nothing to compare with.")
    # A fill that is low and yet moved a logit is no causal one, and the other way round.
    assert "A fill of -1e9 leaks" in explanation([replace(causal[0], unmoved=3)])
    assert "With a fill of 0," in explanation([replace(leak, unmoved=4)])


def test_the_training_loss_is_that_of_the_last_steps() -> None:
    found = made_up(0.0, 2.0, 2.0, losses=(100.0,) * 100 + (1.0, 3.0) * 250)
    assert found.train_loss == figures(found)["training_loss"] == 2.0
    assert figures(found)["training_loss_steps"] == 500
    assert figures(made_up(0.0, 2.0, 2.0))["training_loss_steps"] == 1


def test_labels_are_what_one_would_type_and_never_alike() -> None:
    fills = [-1e9, -math.inf, 0.0, -10.0, -10.0000001, -1e9 - 1, 1e-7, -0.5, 1e20]
    names = ["-1e9", "-inf", "0", "-10", "-10.0000001", "-1000000001.0", "1e-07", "-0.5", "1e20"]
    assert [label(fill) for fill in fills] == names
    assert [float(name) for name in names] == fills


def test_the_curve_is_made_of_means_that_end_at_the_last_step() -> None:
    assert curve([3.0, 2.0]) == [(1, 3.0), (2, 2.0)]
    points = curve([float(i) for i in range(1, 126)])  # means of three, the last of two
    assert points[0] == (3, 2.0) and points[-2:] == [(123, 122.0), (125, 124.5)]
