"""Judgement of one result of any array library against a reference of its own tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt_parity.choices import DTYPES
from gpt_parity.oracle.bounds import largest, ratios
from gpt_parity.oracle.compare import Judgement, compare
from gpt_parity.oracle.rounding import UNITS, Unit
from gpt_parity.oracle.tolerance import Tolerance, norms
from gpt_parity.tensors import as_array


def unit_of(dtype: str, title: str = "dtype") -> Unit:
    """The unit of "float32" or "float64"; ValueError, beginning with `title`, for others."""
    if dtype not in DTYPES:
        raise ValueError(f"{title}: got {dtype}, needed one of {', '.join(DTYPES)}")
    return UNITS[dtype]


@dataclass(frozen=True)
class Expected:
    """A float64 reference, and what a candidate may be off: norm-wise, or a bound per element."""

    reference: np.ndarray
    allowed: Tolerance | np.ndarray | float


def judge(name: str, kind: str, candidate: Any, expected: Expected, dtype: str) -> Judgement:
    """Judge an array of any library, of which shape and dtype must be right; None is not judged.

    With a bound per element, `ratio` is the largest error in units of it, `row` the index of that
    element, and equal infinities agree.
    """
    if candidate is None:
        return Judgement(name, kind, 0.0, math.nan, judged=False)
    candidate, reference = as_array(candidate), np.asarray(expected.reference)
    if isinstance(expected.allowed, Tolerance):
        return compare(name, kind, candidate, reference, expected.allowed, dtype)

    def fails(reason: str, at: tuple[int, ...] | None = None) -> Judgement:
        return Judgement(name, kind, math.inf, math.inf, row=at or None, reason=reason)

    if candidate.shape != reference.shape:
        return fails(f"shape {candidate.shape}, needed {reference.shape}")
    if candidate.dtype != dtype:
        return fails(f"dtype {candidate.dtype}, needed {dtype}")
    errors, units = ratios(candidate, reference, expected.allowed)
    at = largest(units)
    if not np.isfinite(errors[at]):
        return fails(f"{candidate[at]} at {at}, needed {reference[at]:.6g}", at)
    (error, _), (norm, _) = norms(errors), norms(np.where(np.isfinite(reference), reference, 0.0))
    return Judgement(
        name, kind,
        ratio=float(units[at]),
        error=error / norm if norm > 0.0 else math.inf if error > 0.0 else 0.0,
        row=at or None,
        exact_zero=not reference.any() and error == 0.0 and not np.any(expected.allowed),
    )  # fmt: skip
