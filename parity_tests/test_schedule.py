"""The learning rate: a table worked out by hand, torch's LambdaLR, and its properties."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.schedule import WarmupCosineScheduler

pytestmark = pytest.mark.reference("by hand")

# max 1e-3, 10 steps, 4 of warm-up, min 1e-4: after the warm-up 1e-4 + 4.5e-4 (1 + cos(k pi / 6)),
# with cos(pi / 6) = sqrt(3) / 2 = 0.86602540378443864676.
TABLE = [
    2.5e-4,
    5.0e-4,
    7.5e-4,
    1.0e-3,
    1.0e-3,
    9.3971143170299739104e-4,
    7.75e-4,
    5.5e-4,
    3.25e-4,
    1.6028856829700260896e-4,
    1.0e-4,
    1.0e-4,
]

rates = st.floats(1e-12, 1e3)
step_counts = st.integers(0, 400)


@st.composite
def schedulers(draw: st.DrawFn) -> WarmupCosineScheduler:
    low, high = sorted((draw(rates), draw(rates)))
    return WarmupCosineScheduler(high, draw(step_counts), draw(step_counts), low)


def test_hand_computed_table() -> None:
    scheduler = WarmupCosineScheduler(1e-3, 10, 4, 1e-4)
    for step, expected in enumerate(TABLE):
        assert math.isclose(scheduler(step), expected, rel_tol=1e-15), step


@pytest.mark.parametrize(
    ("total", "warmup", "expected"),
    [
        pytest.param(3, 0, [1.0, 0.875, 0.625, 0.5, 0.5], id="no warm-up"),
        pytest.param(4, 4, [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.5], id="warm-up to the end"),
        pytest.param(2, 4, [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.5], id="warm-up past the end"),
        pytest.param(0, 0, [1.0, 0.5, 0.5], id="no steps"),
    ],
)
def test_degenerate_step_counts(total: int, warmup: int, expected: list[float]) -> None:
    scheduler = WarmupCosineScheduler(1.0, total, warmup, 0.5)
    found = [scheduler(step) for step in range(len(expected))]
    assert all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-15), found, expected)), found


@pytest.mark.reference("other backend")
@given(
    total=st.integers(0, 60),
    warmup=st.integers(0, 60),
    max_lr=st.floats(1e-6, 10.0),
    ratio=st.floats(1e-3, 1.0),
)
def test_lambda_lr_sets_the_same_rates(
    total: int, warmup: int, max_lr: float, ratio: float
) -> None:
    def factor(step: int) -> float:
        if step + 1 <= warmup:
            return (step + 1) / warmup
        if step == warmup:
            return 1.0
        if step >= total:
            return ratio
        # Half-angle form of the same cosine, counted from the end.
        angle = math.pi / 2 * (total - step) / (total - warmup)
        return ratio + (1 - ratio) * math.sin(angle) ** 2

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=max_lr)
    reference = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    scheduler = WarmupCosineScheduler(max_lr, total, warmup, max_lr * ratio)
    for step in range(max(total, warmup) + 3):
        found, expected = scheduler(step), optimizer.param_groups[0]["lr"]
        assert math.isclose(found, expected, rel_tol=1e-13), (step, found, expected)
        weight.grad = torch.zeros(1)
        optimizer.step()
        reference.step()


@pytest.mark.reference("exact property")
@given(schedulers(), st.integers(0, 10**30))
def test_values_stay_above_zero_and_at_most_max_lr(
    scheduler: WarmupCosineScheduler, far: int
) -> None:
    for step in (0, 1, scheduler.warmup_steps, scheduler.warmup_steps + 1, far):
        assert 0 < scheduler(step) <= scheduler.max_lr, step


@pytest.mark.reference("exact property")
def test_rounding_never_lifts_a_value_above_max_lr() -> None:
    ulp = 2.0**-52
    low, high = 1.5 * ulp, 1.0 + 3.0 * ulp
    assert low + (high - low) > high  # two ties, both rounded up
    assert WarmupCosineScheduler(high, 10, 0, low)(0) == high


@pytest.mark.reference("exact property")
@given(schedulers())
def test_rises_strictly_through_the_warmup_to_exactly_max_lr(
    scheduler: WarmupCosineScheduler,
) -> None:
    values = [scheduler(step) for step in range(scheduler.warmup_steps)]
    assert all(a < b for a, b in pairwise(values))
    assert values[-1:] in ([], [scheduler.max_lr])


@pytest.mark.reference("exact property")
@given(schedulers())
def test_never_rises_after_the_warmup_and_stays_at_min_lr(
    scheduler: WarmupCosineScheduler,
) -> None:
    end = max(scheduler.total_steps, scheduler.warmup_steps + 1)
    values = [scheduler(step) for step in range(scheduler.warmup_steps, end + 1)]
    assert math.isclose(values[0], scheduler.max_lr, rel_tol=1e-15)
    assert all(a >= b for a, b in pairwise(values))
    for step in (end, end + 1, 2 * end, 10**400):
        assert scheduler(step) == scheduler.min_lr, step


def test_numpy_numbers_are_numbers() -> None:
    scheduler = WarmupCosineScheduler(np.float32(0.5), np.int64(10), np.int32(4), np.float64(0.25))
    value = scheduler(np.int64(1))
    assert type(value) is float
    assert value == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_lr": 0.0}, r"^max_lr is 0\.0, a finite rate above 0 is needed$"),
        ({"max_lr": -1.0}, "^max_lr is -1"),
        ({"max_lr": math.inf}, "^max_lr is inf"),
        ({"max_lr": 10**400}, "^max_lr is inf"),
        ({"min_lr": math.nan}, "^min_lr is nan"),
        ({"min_lr": 0}, "^min_lr is 0"),
        ({"min_lr": 2.0}, r"^min_lr is 2\.0, at most max_lr = 1\.0 is needed$"),
        ({"total_steps": -1}, "^total_steps is -1, at least 0 is needed$"),
        ({"warmup_steps": -3}, "^warmup_steps is -3, at least 0 is needed$"),
    ],
)
def test_refuses_values_out_of_range(change: dict[str, float], message: str) -> None:
    arguments = {"max_lr": 1.0, "total_steps": 10, "warmup_steps": 4, "min_lr": 0.5}
    with pytest.raises(ValueError, match=message):
        WarmupCosineScheduler(**(arguments | change))


@pytest.mark.parametrize(
    "change",
    [
        {"max_lr": "1e-3"},
        {"min_lr": True},
        {"total_steps": 10.0},
        {"warmup_steps": True},
        {"warmup_steps": np.array([1, 2])},
        {"total_steps": None},
    ],
)
def test_refuses_values_of_another_type(change: dict[str, object]) -> None:
    arguments = {"max_lr": 1.0, "total_steps": 10, "warmup_steps": 4, "min_lr": 0.5}
    with pytest.raises(TypeError, match=f"^{next(iter(change))} is "):
        WarmupCosineScheduler(**(arguments | change))


def test_refuses_a_step_that_is_no_count() -> None:
    scheduler = WarmupCosineScheduler(1.0, 10, 4, 0.5)
    with pytest.raises(ValueError, match=r"^step is -1, at least 0 is needed$"):
        scheduler(-1)
    with pytest.raises(TypeError, match=r"^step is 1\.0, an integer is needed$"):
        scheduler(1.0)
