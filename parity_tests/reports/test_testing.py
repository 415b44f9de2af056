"""Reported faults of tests: difference quotients, comparers, flags, deadlines.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_parity.backends import build_model
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle import check, cmp, ops
from gpt_parity.oracle.compare import FORWARD, compare
from gpt_parity.oracle.tolerance import Tolerance
from gpt_parity.weights import set_weights
from numpy_impl.functional import linear
from numpy_impl.tensor import Tensor
from parity_tests.comparers import assert_within
from parity_tests.registry import NUMPY, TORCH
from parity_tests.reports.common import (
    f32,
    f64,
    gradients,
)

pytestmark = pytest.mark.reference("by hand")

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "float64")


def test_B54_a_difference_quotient_cancels_and_the_complex_step_does_not() -> None:
    """x^3 at 1.5, whose derivative is 6.75."""

    def cube(x: Any) -> Any:
        return x * x * x

    for kind, step, expected in (
        (np.float32, 1e-6, 6.4373016), (np.float32, 1e-3, 6.7503448),
        (np.float64, 1e-6, 6.749999999389189),
    ):  # fmt: skip
        h, x = kind(step), kind(1.5)
        quotient = (cube(x + h) - cube(x - h)) / (kind(2) * h)
        np.testing.assert_allclose(quotient, expected, rtol=1e-7 if kind is np.float32 else 1e-15)
    numeric = cube(Tensor(np.array(1.5 + 1e-30j))).data.imag / 1e-30
    np.testing.assert_allclose(numeric, 6.75, rtol=4e-16)
    for twin in (NUMPY, TORCH):
        for make in (f64, f32):
            (found,) = gradients(twin, cube, make(1.5))
            assert found == 6.75


def softmax_and_vjp(x: np.ndarray, g: np.ndarray) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return p, p * (g - (g * p).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_B54_the_oracle_judges_one_operation_in_any_precision(dtype: str) -> None:
    def scaled(x: np.ndarray, g: np.ndarray) -> Any:
        p, dx = softmax_and_vjp(x, g)
        return p, dx * x.dtype.type(1.001)

    assert ops.softmax.check(softmax_and_vjp, dtype, examples=20).ok
    report = ops.softmax.check(scaled, dtype, examples=20)
    assert not report.ok and report.first.ratio > 3.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_B54_the_oracle_judges_a_model_in_any_precision(dtype: str) -> None:
    """What it is handed is float32, what it compares with float64."""
    factor = 1.0

    def candidate(weights: dict[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray) -> Any:
        assert {w.dtype.name for w in weights.values()} == {dtype}
        model = build_model("torch", GPTConfig(11, 6, 7, 2), dtype=dtype)
        set_weights(model, weights)
        loss = TORCH.loss.GPTLoss()(model(tokens), targets)
        loss.backward()
        found = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        found["output.output.bias"] *= np.asarray(factor, dtype)
        return loss.item() if dtype == "float64" else loss.detach(), found

    assert check(candidate, "tiny", dtype).ok
    factor = 1.001
    report = check(candidate, "tiny", dtype)
    assert not report.ok and report.first.name == "grad/output.output.bias"


def test_B55_nothing_here_flushes_subnormal_numbers() -> None:
    for package in ("numpy_impl", "torch_impl", "gpt_parity", "scripts", "parity_tests"):
        for file in (ROOT / package).rglob("*.py"):
            if file != Path(__file__).resolve():
                assert "flush_denormal" not in file.read_text(encoding="utf-8"), file
    assert np.float64(1e-310) * 1.0 == torch.tensor(1e-310, dtype=torch.float64).item() == 1e-310
    assert np.float32(1e-40) * np.float32(1.0) > 0.0


def test_B55_a_flag_that_flushes_reaches_everything() -> None:
    """In a process of its own: NumPy and PyTorch give 0, and Hypothesis refuses to draw."""
    program = (
        "import numpy as np, torch; from hypothesis import strategies as st\n"
        "assert torch.set_flush_denormal(True)\n"
        "print((np.full(8, 1e-310) * 1.0).max(),"
        " (torch.full((8,), 1e-310, dtype=torch.float64) * 1.0).max().item())\n"
        "try:\n    st.floats().validate()\nexcept FloatingPointError as error:\n"
        "    print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0.0", "0.0", "FloatingPointError"], done.stderr


def accepts(mine: np.ndarray, reference: np.ndarray) -> list[bool]:
    """Whether the comparers of the project accept an array, which all of them should alike."""
    tolerance = Tolerance(1e-12, np.full(mine.shape[:-1], 1e-12))
    verdicts = [
        compare("x", FORWARD, mine, reference, tolerance, "float64").ok,
        cmp("x", mine, reference, "float64").ok,
    ]
    try:
        assert_within(mine, reference, 1e-12, "x")
        verdicts.append(True)
    except AssertionError:
        verdicts.append(False)
    return verdicts


def test_B55_the_comparers_agree_on_signed_zeros_and_nan() -> None:
    right = f64([0, 1])
    assert accepts(f64([-0.0, 1]), right) == [True] * 3
    for wrong in (f64([np.nan, 1]), f64([0, np.inf]), f32([0, 1]), f64([[0, 1]]), f64([0, 1.1])):
        assert accepts(wrong, right) == [False] * 3
    # The usual helpers: each has its own answer.
    a, b = f64([0, np.nan]), f64([-0.0, np.nan])
    np.testing.assert_allclose(a, b)
    assert a.tobytes() != b.tobytes() and not np.array_equal(a, b)
    with pytest.raises(AssertionError):
        np.testing.assert_equal(0.0, -0.0)
    np.testing.assert_equal(f64([0]), f64([-0.0]))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


def test_B56_the_profile_has_no_deadline_and_suppresses_nothing() -> None:
    current = settings()
    assert current.deadline is None
    assert current.suppress_health_check == ()
    for file in (ROOT / "parity_tests").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file != Path(__file__).resolve():
            assert "suppress_health_check" not in text.replace("suppress_health_check=()", ""), file
            assert set(re.findall(r"deadline=(\w+)", text)) <= {"None"}, file


def sleeping(**options: Any) -> Callable[[], None]:
    """A property whose first call takes 0.3 s, as one that imports or compiles would."""
    calls: list[int] = []

    @settings(max_examples=2, **options)
    @given(st.integers())
    def property_(number: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            time.sleep(0.3)

    return property_


def test_B56_a_slow_first_call_fails_by_the_usual_deadline_alone() -> None:
    sleeping()()
    with pytest.raises(hypothesis.errors.FlakyFailure):
        sleeping(deadline=200)()


@given(st.data())
@settings(max_examples=3)
def test_B56_examples_are_sizes_and_a_seed(data: st.DataObject) -> None:
    """What is drawn stays small, however large the arrays are: (4, 32, 64) among them."""
    from gpt_parity.oracle.examples import examples

    plan = st.just((((4, 32, 64),), ()))
    example = data.draw(examples(plan))
    (x,) = example.arrays(np.float64)
    assert x.shape == (4, 32, 64) and len(repr(example)) < 1000
    y = linear(Tensor(x), Tensor(np.ones((2, 64))), Tensor(np.zeros(2)))
    assert y.shape == (4, 32, 2)
