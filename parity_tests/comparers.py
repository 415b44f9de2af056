"""The suite's own comparers, and the proof, before any test runs, that comparers reject."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gpt_parity.oracle.compare import PARAMETER, compare, compare_traces
from gpt_parity.oracle.rounding import FLOAT64, bound
from parity_tests.models import SIZES, ModelCase, reference


def assert_within(
    candidate: np.ndarray, reference: np.ndarray, allowed: np.ndarray | float, what: str,
    dtype: str = "float64",
) -> None:  # fmt: skip
    """Every element of `candidate`, an array of `dtype`, is off by at most `allowed`."""
    assert candidate.shape == reference.shape, f"{what}: {candidate.shape}, not {reference.shape}"
    assert candidate.dtype == dtype, f"{what}: {candidate.dtype}, not {dtype}"
    assert not np.shares_memory(candidate, reference), f"{what}: one array, not two"
    same = candidate == reference
    with np.errstate(invalid="ignore"):  # equal infinities
        error = np.abs(candidate.astype(np.float64) - reference)
    ok = same | (error <= allowed)
    if not ok.all():
        first = tuple(int(i) for i in np.argwhere(~ok)[0])
        raise AssertionError(
            f"{what}: first at {first}: {candidate[first]!r}, needed {reference[first]!r} "
            f"within {np.broadcast_to(allowed, ok.shape)[first]:.3g}, error {error[first]:.3g}"
        )


def assert_agree(name: str, step: int, a: Any, b: Any) -> None:
    """Two float64 results after `step` steps agree up to accumulated rounding, norm-wise.

    One step composes about 50 roundings in sequence along its longest path (the operations of two
    blocks forward and backward, the clip, AdamW), each of relative size at most u = 2^-53, and an
    error of the weights enters the next step with a factor of about 1. Hence, to first order,
    ||a - b|| <= 50 steps u ||b||. The bound is for training at moderate weights; it is loose.
    """
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype == np.float64, name
    assert a.shape == b.shape, f"{name}: {a.shape}, not {b.shape}"
    assert not np.shares_memory(a, b), f"{name}: one array, not two"
    distance, size = np.linalg.norm(a - b), np.linalg.norm(b)
    assert size > 0.0, f"{name} is zero after step {step}: nothing was compared"
    assert distance <= 50 * step * FLOAT64.u * size, (
        f"{name} after step {step}: off by {distance / size:.1e}"
    )


def _with(x: np.ndarray, place: tuple[int, int], value: float) -> np.ndarray:
    x = x.copy()
    x[place] = value
    return x


BROKEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: x.T.copy(),
    "scaled by 1.001": lambda x: 1.001 * x,
    "one element of one row changed": lambda x: _with(x, (1, 2), 1.001 * x[1, 2]),
    "NaN": lambda x: _with(x, (1, 2), np.nan),
    "of another dtype": lambda x: x.astype(np.float32),
    "empty": lambda x: x[:0].copy(),
    "compared with itself": lambda x: x,
}


def accepted_mistakes() -> list[str]:
    """What a comparer accepts of arrays that it must reject; it must accept a right one too."""
    # A pass at order-one weights; its square gradient has a shape that a transpose does not show.
    clean, tolerances = reference(ModelCase(SIZES["square"], "normal", 0.5, 0), "float64")
    name = "transformers.0.attention.output.weight"
    x, tolerance = clean.parameters[name], tolerances.parameters[name]

    def judge_array(candidate: np.ndarray) -> None:
        assert compare(name, PARAMETER, candidate, x, tolerance, "float64").ok

    def judge_trace(candidate: np.ndarray) -> None:
        parts = {
            part: {n: a.copy() for n, a in getattr(clean, part).items()}
            for part in ("values", "gradients", "parameters")
        }
        parts["parameters"][name] = candidate
        trace = replace(clean, loss=clean.loss.copy(), **parts)
        report = compare_traces(trace, clean, tolerances, "float64")
        assert report.ok and report.complete

    comparers: dict[str, Callable[[np.ndarray], None]] = {
        "compare": judge_array,
        "compare_traces": judge_trace,
        "assert_within": functools.partial(
            assert_within, reference=x, allowed=bound(np.abs(x), FLOAT64), what=name
        ),
        "assert_agree": lambda candidate: assert_agree(name, 1, candidate, x),
    }
    accepted = [
        f"{comparer} accepts what is {fault}"
        for comparer, judge in comparers.items()
        for fault, broken in BROKEN.items()
        if _accepts(judge, broken(x))
    ]
    return accepted + [
        f"{comparer} rejects what is right"
        for comparer, judge in comparers.items()
        if not _accepts(judge, x.copy())
    ]


def _accepts(judge: Callable[[np.ndarray], None], candidate: np.ndarray) -> bool:
    try:
        judge(candidate)
    except (AssertionError, ValueError):
        return False
    return True
