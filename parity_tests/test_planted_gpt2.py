"""The planted mistakes of a GPT-2: both twins and every part have some, and they do run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_impl.layers
from gpt_parity.backends import build_model
from gpt_parity.corpus import CharDataset
from gpt_parity.model_config import GPT2Config
from gpt_parity.weights import get_weights, set_weights
from numpy_impl import functional as F
from numpy_impl.tensor import Tensor
from parity_tests.planted import gpt2_models, planted, power
from parity_tests.planted.gpt2_run_bugs import GPT2_BUGS
from parity_tests.planted.table import BUGS

BY_NAME = {bug.name: bug for bug in GPT2_BUGS}
PARTS = {"norm", "heads", "unbind", "residual", "tying", "init", "cache", "windows"}


def test_every_part_of_a_gpt2_has_mistakes_and_so_have_both_twins() -> None:
    assert len(GPT2_BUGS) >= 48
    parts = Counter(bug.name.split("-")[1] for bug in GPT2_BUGS)
    assert {bug.name.split("-")[0] for bug in GPT2_BUGS} == {"gpt2"}
    assert set(parts) == PARTS and min(parts.values()) >= 4
    packages = Counter(bug.place.partition(".")[0] for bug in GPT2_BUGS)
    assert packages["numpy_impl"] >= 24 and packages["torch_impl"] >= 12
    assert sum(bool(bug.tensor) for bug in GPT2_BUGS) >= 24


def norm_of_two() -> list[float]:
    """Of 1 and 3, whose variance is 1 (divided by one less: 2)."""
    y = F.layer_norm(Tensor(np.array([1.0, 3.0])), Tensor(np.ones(2)), Tensor(np.zeros(2)))
    return [round(value, 4) for value in y.data.tolist()]


def gradient_of_parts() -> list[float]:
    x = Tensor(np.zeros(3))
    a, b, c = x.unbind()
    (a * 2.0 + b * 3.0 + c * 5.0).backward()
    return x.grad.tolist()


def logits_of_normalised_inputs() -> int:
    """The likeliest token where the stream is its embedding, but for the final normalisation."""
    config = GPT2Config(3, 2, 2, 1, heads=1)
    model = build_model("torch", config, dtype="float64")
    weights = {name: 0.0 * weight for name, weight in get_weights(model).items()}
    weights["embedding.embedding.weight"] = np.array([[9.0, 8.0], [1.0, -1.0], [0.0, 0.0]])
    weights["norm.weight"] = np.ones(2)
    set_weights(model, weights)
    return int(model.predict(np.array([[0]]))[0, 0].argmax())


def deviation_of_output() -> float:
    """In units of 0.02, of a model of 8 blocks:  1 / sqrt(16)."""
    weights = get_weights(build_model("numpy", GPT2Config(3, 2, 64, 8, heads=1)))
    return round(float(weights["transformers.5.attention.output.weight"].std()) / 0.02, 1)


def random_targets() -> list[int]:
    tokens, targets = CharDataset("abcd" * 10, context_size=3, batch_size=1).random_batch(
        "train", 0, 0
    )
    return ((targets - tokens)[0] % 4).tolist()


LIVE: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "gpt2-norm-variance-unbiased": (norm_of_two, [-1.0, 1.0], [-0.7071, 0.7071]),
    "gpt2-norm-eps-of-bert": (
        lambda: torch_impl.layers.LayerNorm(2, torch.float64).eps, 1e-5, 1e-12,
    ),
    "gpt2-norm-final-missing": (logits_of_normalised_inputs, 1, 0),
    "gpt2-unbind-last-only": (gradient_of_parts, [2.0, 3.0, 5.0], [0.0, 0.0, 5.0]),
    "gpt2-unbind-everywhere": (gradient_of_parts, [2.0, 3.0, 5.0], [10.0, 10.0, 10.0]),
    "gpt2-init-residual-scale-missing": (deviation_of_output, 0.2, 1.0),
    "gpt2-windows-targets-not-shifted": (random_targets, [1, 1, 1], [0, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", LIVE)
def test_the_running_code_makes_the_mistake(name: str) -> None:
    run, right, wrong = LIVE[name]
    assert run() == right
    with planted(BY_NAME[name]):
        assert run() == wrong
    assert run() == right


@pytest.mark.parametrize(
    ("name", "located"),
    [
        ("gpt2-norm-eps-outside-root", "transformers.0.attention_norm.output"),
        ("gpt2-norm-weight-gradient-without-z", "norm.weight"),
        ("gpt2-residual-skip-detached", "transformers.1.feed_forward_norm.input"),
    ],
)
def test_a_mistake_in_a_gpt2_is_located_in_gpt2s(name: str, located: str) -> None:
    finding = power.Finding(BY_NAME[name])
    with planted(finding.bug):
        power._localise(finding)
    assert finding.located == {located: len(gpt2_models.CASES)}
    assert finding.is_localised and finding.ratio >= 1e6


def test_without_a_mistake_nothing_is_located() -> None:
    finding = power.Finding(GPT2_BUGS[0])
    power._localise(finding)
    assert not finding.located and 0.0 < finding.ratio <= 0.6


def test_mistakes_of_the_text_s_model_stay_with_it() -> None:
    assert {judge.func for judge in power._models(BUGS[0])} == {power.judge}
    assert {judge.func for judge in power._models(GPT2_BUGS[0])} == {gpt2_models.judge}
