"""Reported faults of AdamW, of clipping and of learning rate schedules.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.choices import BACKENDS
from gpt_parity.config import TrainConfig
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.tensors import as_array
from gpt_parity.weights import get_weights
from parity_tests.registry import TWINS, Twin
from parity_tests.reports.common import (
    both_twins,
    f32,
    f64,
    optimizer_of,
    set_grad,
    trainer_of,
)

pytestmark = pytest.mark.reference("by hand")

INF, NAN = math.inf, math.nan
STEPS = {"p": 1.0, "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.0}


def adamw_by_hand(grads: list[float], p: float, lr: float, beta1: float, beta2: float,
                  eps: float, decay: float) -> float:  # fmt: skip
    """Algorithm 2 of the paper in plain numbers."""
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        corrected = m / (1.0 - beta1**t), v / (1.0 - beta2**t)
        p -= lr * (corrected[0] / (math.sqrt(corrected[1]) + eps) + decay * p)
    return p


def after(twin: Twin, grads: list[float], start: np.ndarray, **arguments: Any) -> np.ndarray:
    (p,), optimizer = optimizer_of(twin, start, **arguments)
    for g in grads:
        set_grad(twin, p, np.full_like(start, g))
        optimizer.step()
    return twin.array(p)


@both_twins
def test_B31_eps_is_added_after_the_correction_and_outside_the_root(twin: Twin) -> None:
    """0.9969 before the correction, 0.99999 inside the root, 0.9903 without correction."""
    p = after(twin, [1e-8], f64([1]), lr=0.1, weight_decay=0.0)
    np.testing.assert_allclose(p, [0.95], rtol=1e-14)
    p = after(twin, [1e-8], f32([1]), lr=0.1, weight_decay=0.0)
    np.testing.assert_allclose(p, [0.95], rtol=2 * 2.0**-23)


@both_twins
@pytest.mark.parametrize(
    "grads", [[1e-8, -2e-8, 3e-9], [1e-12] * 5, [1.0, 0.0, 0.0], [0.0, 1e-7]], ids=str
)
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_B31_the_first_steps_follow_the_paper(
    twin: Twin, grads: list[float], shape: tuple[int, ...]
) -> None:
    found = after(twin, grads, np.ones(shape), lr=0.1, weight_decay=0.0)
    np.testing.assert_allclose(found, np.full(shape, adamw_by_hand(grads, **STEPS)), rtol=1e-14)


@both_twins
def test_B31_a_gradient_whose_square_underflows(twin: Twin) -> None:
    """In float32 1e-30 squared is 0: what is left is m / eps, and not 0 / 0."""
    moved = 1.0 - after(twin, [1e-30], f32([1]), lr=1e22, weight_decay=0.0)
    np.testing.assert_allclose(moved, [1.0], rtol=2.0**-20)  # 1e22 * 1e-30 / 1e-8
    np.testing.assert_array_equal(after(twin, [0.0], f32([1]), weight_decay=0.0), [1])


@both_twins
def test_B32_decay_is_decoupled_and_multiplied_by_the_rate(twin: Twin) -> None:
    """A matrix: 2 (1 - 0.1 * 0.1). L2 in the gradient: 1.9, without the rate: 1.8."""
    found = after(twin, [0.0], f64([[2]]), lr=0.1, weight_decay=0.1)
    np.testing.assert_allclose(found, [[1.98]], rtol=4e-16)
    np.testing.assert_array_equal(after(twin, [0.0], f64([2]), lr=0.1, weight_decay=0.1), [2])
    (p,), optimizer = optimizer_of(twin, f64([[2]]), lr=0.1, weight_decay=0.1)
    set_grad(twin, p, f64([[0]]))
    optimizer.step()
    state = optimizer.state()
    assert (state["exp_avg"][0], state["exp_avg_sq"][0]) == ([[0]], [[0]])  # nothing mixed in


@both_twins
@pytest.mark.parametrize("earlier", [False, True])
def test_B32_without_a_gradient_nothing_decays(twin: Twin, earlier: bool) -> None:
    """Neither before the first gradient nor after one, when moments would move it."""
    (p, q), optimizer = optimizer_of(twin, f64([[2]]), f64([[2]]), lr=0.1, weight_decay=0.1)
    if earlier:
        for parameter in (p, q):
            set_grad(twin, parameter, f64([[1]]))
        optimizer.step()
    before = twin.array(p).copy()
    set_grad(twin, p, None)
    set_grad(twin, q, f64([[0]]))
    optimizer.step()
    np.testing.assert_array_equal(twin.array(p), before)
    assert optimizer.state()["steps"] == [int(earlier), 1 + int(earlier)]


def test_B32_both_optimizers_have_the_defaults_of_torch() -> None:
    expected = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    for optimizer in (*(twin.optim.AdamWOptimizer for twin in TWINS), torch.optim.AdamW):
        parameters = inspect.signature(optimizer).parameters
        assert {name: parameters[name].default for name in expected} == expected
    recipe = TrainConfig()
    assert (recipe.learning_rate, recipe.betas, recipe.eps, recipe.weight_decay) == tuple(
        expected.values()
    )


CLIPS: dict[str, Any] = {
    "zeros": ([f64([0, 0])], [[0, 0]], 0.0),
    "short": ([f64([0.3, 0.4])], [[0.3, 0.4]], 0.5),
    "long": ([f64([3, 4])], [[0.599999880000024, 0.799999840000032]], 5.0),
    "two parameters": ([f64([3]), f64([4])], [[0.599999880000024], [0.799999840000032]], 5.0),
    "one of them idle": ([f64([3]), None, f64([4])],
                         [[0.599999880000024], None, [0.799999840000032]], 5.0),
    "at the limit": ([f64([1, 0])], [[0.9999990000010001, 0]], 1.0),
    "inf": ([f64([INF, 1])], [[NAN, 0]], INF),
    "-inf": ([f64([-INF, 1])], [[NAN, -0.0]], INF),
    "nan": ([f64([NAN, 1])], [[NAN, NAN]], NAN),
    "nan in another": ([f64([NAN]), f64([1])], [[NAN], [NAN]], NAN),
    "overflow": ([f64([1e200, 1e200])], [[0, 0]], INF),
    "overflow in float32": ([f32([3e19, 4e19])], [[0, 0]], INF),
    "underflow": ([f64([1e-200, 1e-200])], [[1e-200, 1e-200]], 0.0),
    "subnormal": ([f64([5e-324, 0])], [[5e-324, 0]], 0.0),
}  # fmt: skip


def clipped(twin: Twin, grads: list[Any], max_norm: float, **options: Any) -> tuple[Any, Any, Any]:
    arrays = [np.zeros(1) if g is None else np.zeros_like(g) for g in grads]
    parameters, optimizer = optimizer_of(twin, *arrays)
    for p, array in zip(parameters, arrays, strict=True):
        set_grad(twin, p, np.ones_like(array))  # of an earlier step, which must not count
    optimizer.clip_grad_norm(INF)
    optimizer.zero_grad()
    for p, g in zip(parameters, grads, strict=True):
        set_grad(twin, p, g if g is None else g.copy())
    return parameters, optimizer, lambda: optimizer.clip_grad_norm(max_norm, **options)


@both_twins
@pytest.mark.parametrize("case", CLIPS)
def test_B33_one_global_norm_as_in_torch(twin: Twin, case: str) -> None:
    grads, expected, norm = CLIPS[case]
    parameters, _, clip = clipped(twin, grads, 1.0, error_if_nonfinite=False)
    np.testing.assert_equal(clip(), norm)
    for p, g in zip(parameters, expected, strict=True):
        if g is None:
            assert p.grad is None
        else:
            np.testing.assert_allclose(as_array(p.grad), g, rtol=4e-16)


@both_twins
@pytest.mark.parametrize("case", [case for case in CLIPS if not np.isfinite(CLIPS[case][2])])
def test_B33_a_norm_that_is_not_finite_is_refused(twin: Twin, case: str) -> None:
    grads = CLIPS[case][0]
    parameters, _, clip = clipped(twin, grads, 1.0)
    with pytest.raises(FloatingPointError, match=r"gradient norm: got .*, needed a finite number"):
        clip()
    for p, g in zip(parameters, grads, strict=True):
        np.testing.assert_array_equal(as_array(p.grad), g)


@both_twins
def test_B33_an_infinite_limit_never_scales(twin: Twin) -> None:
    (p,), _, clip = clipped(twin, [f64([3, 4])], INF)
    assert clip() == 5.0
    np.testing.assert_array_equal(as_array(p.grad), [3, 4])
    for limit in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match=r"max_norm: got .*, needed a positive number"):
            clipped(twin, [f64([3, 4])], limit)[2]()


# Maximum 1e-3, minimum 1e-4, 10 steps of which 4 warm up, by (t + 1) / 4 and half a cosine.
RATES = [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 9.39711e-4, 7.75e-4, 5.5e-4, 3.25e-4, 1.60289e-4]


def test_B35_the_rate_of_every_step() -> None:
    scheduler = WarmupCosineScheduler(1e-3, 10, 4, 1e-4)
    for step, rate in enumerate(RATES):  # printed to six digits, so half a unit in the sixth
        assert math.isclose(scheduler(step), rate, rel_tol=5e-6), step
    assert scheduler(3) == 1e-3
    assert [scheduler(step) for step in (10, 11, 10**9)] == [1e-4] * 3


@pytest.mark.parametrize(
    ("total", "warmup"),
    [(10, 4), (10, 0), (4, 4), (0, 0), (0, 4), (4, 10), (1, 0), (1, 1), (5, 4), (10**9, 1)],
)
def test_B35_every_rate_is_above_zero_and_at_most_the_highest(total: int, warmup: int) -> None:
    scheduler = WarmupCosineScheduler(1e-3, total, warmup, 1e-4)
    rates = [scheduler(step) for step in range(20)]
    assert all(0.0 < rate <= 1e-3 for rate in rates)
    assert max(rates[: warmup + 1]) == 1e-3  # reached, whatever the counts
    if warmup >= total:
        assert rates[warmup:] == [1e-3, *[1e-4] * (19 - warmup)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("total", "warmup"), [(10, 4), (2, 100), (4, 4), (0, 0)])
def test_B35_the_first_step_moves_the_weights(backend: str, total: int, warmup: int) -> None:
    trainer, dataset = trainer_of(backend)
    before = get_weights(trainer.model)
    scheduler = WarmupCosineScheduler(1e-3, total, warmup, 1e-4)
    results = trainer.train(dataset, 1, scheduler, max_steps=2)
    assert [r.lr for r in results] == [scheduler(0), scheduler(1)]
    moved = [not np.array_equal(before[n], w) for n, w in get_weights(trainer.model).items()]
    assert all(moved)
