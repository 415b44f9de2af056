"""Training of both backends side by side, and proof that a wrong recipe is seen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import numpy_impl
import torch_impl
from gpt_parity.backends import build_model
from gpt_parity.checkpoint import Checkpoint
from gpt_parity.choices import MODELS, ModelName
from gpt_parity.config import TrainConfig
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.hops import hopping_float64, steps_of
from gpt_parity.oracle.lockstep import (
    QUANTITIES,
    Outcome,
    Setting,
    common_state_float32,
    free_float64,
)  # fmt: skip
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.weights import get_weights, set_weights

pytestmark = pytest.mark.reference("other backend")

RUNS = {"float64": free_float64, "float32": common_state_float32}


def setting(steps: int, max_norm: float = 1.0, model: ModelName = "gpt") -> Setting:
    """A small model on random text, at a rate that makes the weights move."""
    sizes = {"vocab_size": 11, "context_size": 8, "embedding_size": 12, "blocks": 2}
    config = GPTConfig(**sizes) if model == "gpt" else GPT2Config(**sizes, heads=3)
    recipe = TrainConfig(learning_rate=1e-2, min_learning_rate=1e-3, max_norm=max_norm)
    rng = np.random.default_rng(0)
    shape = (3, config.context_size)
    batches = [(rng.integers(0, 11, shape), rng.integers(0, 11, shape)) for _ in range(steps)]
    scheduler = WarmupCosineScheduler(1e-2, 50, 10, 1e-3)
    weights = get_weights(build_model("numpy", config, seed=1, dtype="float32"))
    return Setting(
        config, recipe, {n: w.astype(np.float64) for n, w in weights.items()}, batches,
        [scheduler(t) for t in range(steps)],
    )  # fmt: skip


def failed(outcome: Outcome) -> dict[str, set[str]]:
    """Quantities out of tolerance, by candidate."""
    return {
        who: {q for q, (j, _) in quantities.items() if not j.ok}
        for who, quantities in outcome.worst.items()
    }


@pytest.mark.parametrize("dtype", RUNS)
@pytest.mark.parametrize("model", MODELS)
def test_fifty_steps_agree_in_everything(model: ModelName, dtype: str) -> None:
    outcome = RUNS[dtype](setting(50, model=model))
    assert list(outcome.worst) == (["torch"] if dtype == "float64" else ["numpy", "torch"])
    for who, quantities in outcome.worst.items():
        assert tuple(quantities) == QUANTITIES
        for quantity, (judgement, step) in quantities.items():
            assert judgement.ok, f"{who} {quantity} at step {step}: {judgement}"
        assert quantities["weights"][0].ratio > 0.0


@pytest.mark.parametrize("model", MODELS)
def test_the_clip_acts_in_some_steps_and_not_in_others(model: ModelName) -> None:
    """Otherwise the runs above would say little about it."""
    norms = []
    original = numpy_impl.AdamWOptimizer.clip_grad_norm

    def recorded(self, max_norm, **options):
        norms.append(original(self, max_norm, **options))
        return norms[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_impl.AdamWOptimizer, "clip_grad_norm", recorded)
        common_state_float32(setting(50, model=model))
    assert min(norms) < 1.0 < max(norms)


def wrong_eps(self) -> None:
    """eps 100 times too large."""
    self.eps, eps = self.eps * 100, self.eps
    STEP(self)
    self.eps = eps


def wrong_decay(self) -> None:
    """Weight decay twice as strong."""
    self.weight_decay, decay = self.weight_decay * 2, self.weight_decay
    STEP(self)
    self.weight_decay = decay


def decayed_biases(self) -> None:
    """Biases decay too."""
    STEP(self)
    for p in self.parameters:
        if p.ndim < 2:
            p.data *= 1.0 - self.lr * self.weight_decay


def no_bias_correction(self) -> None:
    """The step count runs 1000 steps ahead, so the bias correction is gone."""
    self.steps = [t + 1000 for t in self.steps]
    STEP(self)
    self.steps = [t - 1000 for t in self.steps]


def mixed_moments(self) -> None:
    """Second moment decays like the first."""
    self.betas, betas = (self.betas[0], 0.998), self.betas
    STEP(self)
    self.betas = betas


STEP = numpy_impl.AdamWOptimizer.step


@pytest.mark.parametrize("dtype", RUNS)
@pytest.mark.parametrize(
    "bug", [wrong_eps, wrong_decay, decayed_biases, no_bias_correction, mixed_moments]
)
@pytest.mark.parametrize("model", MODELS)
def test_a_wrong_optimizer_is_seen(
    model: ModelName, dtype: str, bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake is in the NumPy twin, which is reference and candidate: torch must stand out."""
    monkeypatch.setattr(numpy_impl.AdamWOptimizer, "step", bug)
    assert failed(RUNS[dtype](setting(3, model=model)))["torch"]


@pytest.mark.parametrize("dtype", RUNS)
@pytest.mark.parametrize("norm", ["transformers.0.attention_norm", "norm"])
def test_a_norm_with_another_eps_is_seen(
    norm: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e-6 in place of 1e-5 in one norm of one twin."""
    right = torch_impl.GPT2.__init__

    def wrong(self: Any, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        layer = self.get_submodule(norm)
        monkeypatch.setattr(
            layer, "forward",
            lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], layer.weight, layer.bias,
                                                     1e-6),
        )  # fmt: skip

    monkeypatch.setattr(torch_impl.GPT2, "__init__", wrong)
    assert {"exp_avg", "weights"} <= failed(RUNS[dtype](setting(3, model="gpt2")))["torch"]


@pytest.mark.parametrize("dtype", RUNS)
def test_a_wrong_clip_is_seen(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the 1e-6 in the divisor of the clip, and with a clip that never acts."""
    monkeypatch.setattr(
        torch_impl.AdamWOptimizer, "clip_grad_norm",
        lambda self, max_norm: math.sqrt(sum(float((p.grad**2).sum()) for p in self.parameters)),
    )  # fmt: skip
    assert "exp_avg" in failed(RUNS[dtype](setting(3, max_norm=0.01)))["torch"]


@pytest.mark.parametrize("dtype", RUNS)
def test_another_learning_rate_is_seen(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that differs in its last bit."""
    lr = torch_impl.AdamWOptimizer.lr
    nextafter = property(lr.fget, lambda self, rate: lr.fset(self, math.nextafter(rate, 1.0)))
    monkeypatch.setattr(torch_impl.AdamWOptimizer, "lr", nextafter)
    assert "learning rate" in failed(RUNS[dtype](setting(1)))["torch"]


# --- changes of the backend -----------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_five_changes_of_the_backend_stay_within_tolerance_of_the_unbroken_run(
    model: ModelName,
) -> None:
    outcome = hopping_float64(setting(steps_of(5), model=model), 5)
    assert outcome.steps == 60 and list(outcome.worst) == ["5 hops"]
    assert tuple(outcome.worst["5 hops"]) == QUANTITIES
    assert outcome.ok
    assert outcome.worst["5 hops"]["weights"][0].ratio > 0.0


def test_a_run_without_hops_is_the_unbroken_one() -> None:
    outcome = hopping_float64(setting(10), 0)
    assert {j.ratio for j, _ in outcome.worst["0 hops"].values()} == {0.0}


def _moments_lost(checkpoint: Checkpoint, model: Any, optimizer: Any) -> None:
    pass


def _counts_start_anew(checkpoint: Checkpoint, model: Any, optimizer: Any) -> None:
    state = {**checkpoint.optimizer, "steps": dict.fromkeys(checkpoint.optimizer["steps"], 0)}
    _load(replace(checkpoint, optimizer=state), model, optimizer)


def _one_moment_through_float32(checkpoint: Checkpoint, model: Any, optimizer: Any) -> None:
    rounded = {
        name: array.astype(np.float32).astype(np.float64)
        for name, array in checkpoint.optimizer["exp_avg"].items()
    }
    _load(
        replace(checkpoint, optimizer={**checkpoint.optimizer, "exp_avg": rounded}),
        model,
        optimizer,
    )


_load = Checkpoint.load_optimizer


@pytest.mark.parametrize(
    ("fault", "quantity"),
    [
        (_moments_lost, "exp_avg"), (_counts_start_anew, "weights"),
        (_one_moment_through_float32, "exp_avg"),
    ],
)  # fmt: skip
def test_what_a_hop_loses_is_seen(
    fault: Any, quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "load_optimizer", fault)
    outcome = hopping_float64(setting(20), 1)
    assert quantity in failed(outcome)["1 hops"]
    assert outcome.worst["1 hops"][quantity][1] >= 10  # not before the hop


def test_weights_that_a_hop_rounds_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(model: Any, arrays: dict[str, np.ndarray]) -> None:
        set_weights(model, {n: a.astype(np.float32) for n, a in arrays.items()})

    monkeypatch.setattr("gpt_parity.oracle.lockstep.set_weights", rounded)
    assert "weights" in failed(hopping_float64(setting(20), 1))["1 hops"]
