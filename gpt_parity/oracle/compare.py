"""Comparison of a candidate with a reference: error in units of tolerance, first divergence.

NaN equals nothing; shape and dtype are part of equality; zero against zero passes only where the
tolerance is zero too, and is counted as exact. An infinite tolerance says that rounding decides:
shape, dtype and fill count, values are not judged. A report in which nothing is judged that is
different from zero is an error, as is a comparison of an array with itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gpt_parity.oracle.tolerance import Tolerance, Tolerances, norms
from gpt_parity.oracle.trace import Trace

LOSS, FORWARD, GRADIENT, PARAMETER = "loss", "forward", "gradient", "parameter gradient"


@dataclass(frozen=True)
class Judgement:
    """One tensor: `ratio` is the worst error in units of tolerance, whole tensor or row.

    `error` is the relative 2-norm of the whole error; `row` the index of the worst row where a
    row is worse than the whole; `exact_zero` marks zero against zero with zero tolerance;
    `judged` is False where the tolerance is infinite; `reason` says in words why a tensor fails
    that has no finite ratio.
    """

    name: str
    kind: str
    ratio: float
    error: float
    row: tuple[int, ...] | None = None
    exact_zero: bool = False
    judged: bool = True
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0


def compare(
    name: str, kind: str, candidate: np.ndarray, reference: np.ndarray, tolerance: Tolerance,
    dtype: str, kept: np.ndarray | None = None,
) -> Judgement:  # fmt: skip
    """Judge `candidate`, which must have `dtype`, against a float64 `reference`.

    Outside `kept`, both must hold the same fill. Raises ValueError for a reference that is not
    finite or shares memory with the candidate.
    """
    if np.shares_memory(candidate, reference):
        raise ValueError(f"{name}: candidate and reference are one array, needed two")

    def fails(reason: str) -> Judgement:
        return Judgement(name, kind, math.inf, math.inf, reason=reason)

    if candidate.shape != reference.shape:
        return fails(f"shape {candidate.shape}, needed {reference.shape}")
    if candidate.dtype != dtype:
        return fails(f"dtype {candidate.dtype}, needed {dtype}")
    if kept is not None:
        if not np.array_equal(candidate[~kept], _representable(reference[~kept], dtype)):
            return fails("masked positions differ")
        candidate, reference = np.where(kept, candidate, 0.0), np.where(kept, reference, 0.0)
    if math.isinf(tolerance.whole):
        return Judgement(name, kind, 0.0, math.nan, judged=False)
    if not np.isfinite(reference).all():
        raise ValueError(f"{name}: the reference is not finite, needed a point that can be judged")
    if not np.isfinite(candidate).all():
        return fails("not finite")
    difference = candidate.astype(np.float64) - reference
    error, errors = norms(difference)
    norm, _ = norms(reference)
    whole, rows = _ratio(error, tolerance.whole), _ratio(errors, tolerance.rows)
    worst = np.unravel_index(int(np.argmax(rows)), rows.shape) if rows.size else ()
    by_row = bool(rows.size) and rows[worst] > whole
    return Judgement(
        name, kind,
        ratio=float(rows[worst]) if by_row else float(whole),
        error=error / norm if norm > 0.0 else math.inf if error > 0.0 else 0.0,
        row=tuple(int(i) for i in worst) if by_row and worst else None,
        exact_zero=norm == 0.0 and error == 0.0 and tolerance.whole == 0.0,
    )  # fmt: skip


def _representable(fill: np.ndarray, dtype: str) -> np.ndarray:
    """The fill of a mask in another dtype: rounded, and its minimum where it would overflow."""
    least = float(np.finfo(dtype).min)
    return np.where(np.isfinite(fill), np.maximum(fill, least), fill).astype(dtype)


def _ratio(error: np.ndarray | float, tolerance: np.ndarray | float) -> np.ndarray:
    """error / tolerance, where 0 / 0 is 0 and anything else over 0 is infinite."""
    error, tolerance = np.asarray(error), np.asarray(tolerance)
    safe = np.where(tolerance > 0.0, tolerance, 1.0)
    return np.where(tolerance > 0.0, error / safe, np.where(error > 0.0, math.inf, 0.0))


@dataclass(frozen=True)
class Report:
    """Judgements in the order: loss, forward values, their gradients, parameter gradients."""

    judgements: list[Judgement]

    def __post_init__(self) -> None:
        if all(j.exact_zero or not j.judged for j in self.judgements):
            raise ValueError("report: every tensor judged is zero, needed one that is not")

    @property
    def ok(self) -> bool:
        return all(j.ok for j in self.judgements)

    @property
    def worst(self) -> Judgement:
        """The tensor that is furthest out in units of its tolerance."""
        return max(self.judgements, key=lambda j: j.ratio)

    @property
    def complete(self) -> bool:
        """Whether every tensor was judged."""
        return all(j.judged for j in self.judgements)

    @property
    def exact_zeros(self) -> int:
        return sum(j.exact_zero for j in self.judgements)

    @property
    def first(self) -> Judgement | None:
        """The first divergence: forward in topological order, else backward in reverse order."""
        for kind, reverse in ((FORWARD, False), (LOSS, False), (GRADIENT, True), (PARAMETER, True)):
            found = [j for j in self.judgements if j.kind == kind and not j.ok]
            if found:
                return found[-1] if reverse else found[0]
        return None


def compare_traces(
    candidate: Trace, reference: Trace, tolerances: Tolerances, dtype: str
) -> Report:
    """Judge every entry, every gradient, every parameter gradient and the loss of a trace.

    Raises ValueError where the candidate lacks a tensor or has one too many.
    """
    judgements = [
        compare(LOSS, LOSS, candidate.loss, reference.loss, tolerances.loss, dtype),
    ]
    for kind, part in ((FORWARD, "values"), (GRADIENT, "gradients"), (PARAMETER, "parameters")):
        mine, theirs, allowed = (getattr(x, part) for x in (candidate, reference, tolerances))
        if list(mine) != list(theirs):
            raise ValueError(f"{kind}: got {list(mine)}, needed {list(theirs)}")
        judgements += [
            compare(name, kind, mine[name], theirs[name], allowed[name], dtype,
                    reference.kept.get(name) if kind == FORWARD else None)
            for name in theirs
        ]  # fmt: skip
    return Report(judgements)
