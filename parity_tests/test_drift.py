"""Two runs side by side: how far apart they are, what rounding explains, and where they part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numpy_impl
import torch_impl
from gpt_parity.config import TrainConfig
from gpt_parity.lessons.drift_runs import KINDS, looks
from gpt_parity.oracle.lockstep import Runner
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.verify import Subject, lockstep_setting
from parity_tests.drifting import (
    figures,
    pair,
    rows,
    small,
    small_drift,
)

__all__ = ["small_drift"]

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.usefixtures("small_drift")]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_equal_runs_have_distance_exactly_zero_and_never_part(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = figures(*pair(f"{backend}:float64", f"{backend}:float64"), steps=6)
    assert {row["distance"] for row in rows(content)} == {0.0}
    assert content["losses"]["a"] == content["losses"]["b"]
    assert content["parting"] is None
    assert capsys.readouterr().out.splitlines()[-1] == (
        "They never part: every distance is exactly 0."
    )


@pytest.mark.parametrize(
    "sides",
    [("numpy:float32", "torch:float32"), ("numpy:float32", "torch:float64"),
     ("torch:float64", "numpy:float64"), ("torch:float32", "numpy:float32:2")],
)  # fmt: skip
def test_honest_runs_stay_within_the_envelope(sides: tuple[str, str]) -> None:
    content = figures(*pair(*sides), steps=12)
    assert content["parting"] is None
    assert content["verdict"].endswith("up to step 12.")
    for kind in KINDS:
        found = [row for row in rows(content) if row["kind"] == kind]
        assert all(row["distance"] <= row["envelope"] and row["ratio"] < 1.0 for row in found)
        assert any(row["distance"] > 0.0 for row in found)


@pytest.mark.parametrize("envelope_steps", [0, 4])
def test_distances_are_relative_norms_of_what_each_run_holds(envelope_steps: int) -> None:
    """Both runs are trained once more, alone, and compared by hand."""
    content = figures(
        *pair("numpy:float32", "torch:float64"), "--envelope-steps", str(envelope_steps), steps=4
    )
    subject = small(VerifyConfig(data=Path("text.txt")))
    states = []
    for backend, dtype in (("numpy", "float32"), ("torch", "float64")):
        runner, dataset, rates = alone(subject, backend, dtype, steps=4)
        for t in range(4):
            batch = dataset.batch("train", t % dataset.batch_count("train"))
            result = runner.step(batch, rates(t))
        states.append(runner.state(result))
    a, b = states
    for row in content["looks"][-1]["distances"]:
        key = "loss" if row["kind"] == "loss" else f"{row['kind']} {row['name']}"
        theirs = np.asarray(b[key], dtype=np.float64)
        expected = np.linalg.norm(np.ravel(a[key] - theirs)) / np.linalg.norm(np.ravel(theirs))
        assert row["distance"] == pytest.approx(expected, rel=1e-12), key


def alone(subject: Subject, backend: str, dtype: str, steps: int) -> tuple[Any, Any, Any]:
    recipe = TrainConfig()
    scheduler = WarmupCosineScheduler(
        recipe.learning_rate, steps, recipe.warmup, recipe.min_learning_rate
    )
    return Runner(backend, dtype, lockstep_setting(0, subject)), subject.dataset, scheduler


def test_steps_are_looked_at_evenly_in_their_logarithm_and_at_the_end() -> None:
    assert looks(1) == [1]
    assert looks(10) == [1, 2, 3, 4, 6, 7, 10]
    seen = looks(31_368)
    assert len(seen) < 40 and seen[-1] == 31_368 and len(set(seen)) == len(seen)
    assert {1, 10, 100, 1000, 10_000} <= set(seen)


def test_the_envelope_does_not_depend_on_the_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the NumPy twin of a run must not widen it, nor another pair change it."""
    spreads = []
    for sides in (("numpy:float32", "torch:float32"), ("torch:float64", "torch:float32")):
        content = figures(*pair(*sides), steps=4)
        spreads.append([
            row["envelope"] * row["norm"] for row in content["looks"][-1]["distances"]
        ])  # fmt: skip
    assert spreads[0] == pytest.approx(spreads[1], rel=1e-12)


def test_the_noise_is_that_of_the_coarser_dtype() -> None:
    fine = figures(*pair("numpy:float64", "torch:float64"), steps=3)
    coarse = figures(*pair("torch:float64", "numpy:float32"), steps=3)
    assert (fine["noise"], coarse["noise"]) == ("float64", "float32")
    for one, other in zip(rows(fine), rows(coarse), strict=True):
        assert 1e-10 < one["envelope"] / other["envelope"] < 1e-7  # 2^-29 and chance


def test_the_envelope_ends_after_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    content = figures("--envelope-steps", "5", steps=10)  # not one of the steps looked at anyway
    for look in content["looks"]:
        known = {row["envelope"] is not None for row in look["distances"]}
        assert known == {look["step"] <= 5}
    printed = capsys.readouterr().out
    assert "The envelope was followed for 5 steps." in printed
    assert printed.splitlines()[-1].endswith("up to step 5.")
    content = figures("--envelope-steps", "0", steps=3)
    assert content["verdict"] == "The envelope was not followed (--envelope-steps is 0)."


# --- planted mistakes -----------------------------------------------------------------------------


def other_beta2(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's second moment decays by 0.998."""
    init = torch_impl.AdamWOptimizer.__init__

    def changed(self: Any, parameters: Any, lr: float, betas: Any, *rest: Any) -> None:
        init(self, parameters, lr, (betas[0], betas[1] - 1e-3), *rest)

    monkeypatch.setattr(torch_impl.AdamWOptimizer, "__init__", changed)


def scaled_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's gradients are 1e-4 too large, which hardly moves the update."""
    step = torch_impl.AdamWOptimizer.step

    def changed(self: Any) -> None:
        for p in self.parameters:
            p.grad *= 1.0 + 1e-4
        step(self)

    monkeypatch.setattr(torch_impl.AdamWOptimizer, "step", changed)


def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NumPy twin corrects the bias of the step after this one."""
    step = numpy_impl.AdamWOptimizer.step

    def changed(self: Any) -> None:
        if self.buffer.data.dtype == np.float32:  # not in the envelope's engine
            self.steps = [t + 1 for t in self.steps]
            step(self)
            self.steps = [t - 1 for t in self.steps]
        else:
            step(self)

    monkeypatch.setattr(numpy_impl.AdamWOptimizer, "step", changed)


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [(other_beta2, "exp_avg_sq"), (scaled_gradient, "exp_avg"), (ahead, "weights")],
)  # fmt: skip
def test_a_planted_mistake_parts_them_at_once_and_in_its_own_array(
    mistake: Any, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake(monkeypatch)
    content = figures(*pair("numpy:float32", "torch:float64"), steps=2)
    assert content["parting"]["step"] == 1 and content["parting"]["after"] == 0
    assert content["parting"]["outside"][0]["kind"] == kind
    assert content["verdict"].startswith(f"They part at step 1, first in {kind} of ")
    assert content["verdict"] in " ".join(capsys.readouterr().out.split())


def test_a_mistake_between_two_looks_is_placed_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch skips the update of step 8; looked at are 7 and 10."""
    step = torch_impl.AdamWOptimizer.step
    calls = []

    def changed(self: Any) -> None:
        calls.append(0)
        if len(calls) == 8:
            for p in self.parameters:
                p.grad.zero_()
        step(self)

    monkeypatch.setattr(torch_impl.AdamWOptimizer, "step", changed)
    content = figures(steps=10)
    assert (content["parting"]["after"], content["parting"]["step"]) == (7, 10)
    assert "at or before step 10, after step 7" in content["verdict"]
