"""Comparison of a candidate with a reference: error in units of tolerance, first divergence.

NaN equals nothing; shape and dtype are part of equality; zero against zero passes only where the
tolerance is zero too, and is counted as exact. An infinite tolerance says that rounding decides:
shape, dtype and fill count, values are not judged. A report in which nothing is judged that is
different from zero is an error, as is a comparison of an array with itself.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gpt_parity.oracle.tolerance import Tolerance, Tolerances, in_rows, norms
from gpt_parity.oracle.trace import Trace

if TYPE_CHECKING:
    from gpt_parity.oracle.bundle import Bundle

LOSS, FORWARD, GRADIENT, PARAMETER = "loss", "forward", "gradient", "parameter gradient"
LONGEST = 25  # lines of a printed report


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

    def describe(self) -> str:
        """How far out it is, in words."""
        row = f" in row {self.row}" if self.row is not None else ""
        return self.reason or (f"{self.ratio:.3g} tolerances{row}, relative error {self.error:.2g}")


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
    # Where no gradient can be judged, overflow cannot either, nor that of a step with it: what
    # rounding leaves in a saturated softmax is multiplied by the size of the scores, block after
    # block.
    may_overflow = math.isinf(tolerance.whole) and kind not in (FORWARD, LOSS)
    if not may_overflow and not np.isfinite(candidate).all():
        return fails("not finite")
    if math.isinf(tolerance.whole):
        return Judgement(name, kind, 0.0, math.nan, judged=False)
    if not np.isfinite(reference).all():
        raise ValueError(f"{name}: the reference is not finite, needed a point that can be judged")
    with np.errstate(over="ignore", invalid="ignore"):
        error, errors = norms(in_rows(candidate.astype(np.float64) - reference, tolerance))
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
    with np.errstate(over="ignore"):
        return np.where(tolerance > 0.0, error / safe, np.where(error > 0.0, math.inf, 0.0))


@dataclass(frozen=True, eq=False)
class Pair:
    """The arrays behind a judgement; `kept` is where a masked one holds scores."""

    candidate: np.ndarray
    reference: np.ndarray
    tolerance: Tolerance
    kept: np.ndarray | None = None


@dataclass(frozen=True)
class Report:
    """Judgements in the order in which a mistake would show first.

    That is forward values in topological order, the loss, their gradients in reverse, those of
    parameters in reverse, then whatever else there is.
    `hints` are explanations that were verified, `notes` are further lines for the reader.
    `pairs` are the arrays by kind and name, and `bundle` is the reference of a submission, both
    only where they were asked for.
    Printed, it has at most 25 lines. Raises ValueError where nothing is judged.
    """

    judgements: list[Judgement]
    hints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    title: str = ""
    pairs: Mapping[tuple[str, str], Pair] = field(default_factory=dict, compare=False, repr=False)
    bundle: Bundle | None = field(default=None, compare=False, repr=False)

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
    def first(self) -> Judgement | None:
        """The first divergence, in the order of the judgements."""
        return next((j for j in self.judgements if not j.ok), None)

    def verdict(self) -> str:
        """One sentence."""
        judged = sum(j.judged for j in self.judgements)
        count = str(judged) if self.complete else f"{judged} of {len(self.judgements)}"
        one = len(self.judgements) == 1
        tensors = f"{count} tensor{'' if one else 's'}"
        if self.ok:
            agree = f"agree{'s' if one else ''}"
            return (
                f"PASS: {tensors} {'' if self.complete else 'could be judged and '}{agree}, worst "
                f"{self.worst.ratio:.3f} of tolerance ({self.worst.name})"
            )
        wrong = sum(not j.ok for j in self.judgements)
        return f"FAIL: {wrong} of {len(self.judgements)} tensors out of tolerance"

    def lines(self) -> Iterator[str]:
        """What is printed: verdict, first divergence, hints, notes."""
        yield f"{self.title}: {self.verdict()}" if self.title else self.verdict()
        if self.first is not None:
            yield f"first: {self.first.name}, {self.first.describe()}"
        yield from (f"hint: {hint}" for hint in self.hints)
        yield from self.notes

    def __str__(self) -> str:
        lines = list(self.lines())
        if len(lines) > LONGEST:
            lines[LONGEST - 1 :] = [f"... and {len(lines) - LONGEST + 1} more lines"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(j.name)}</td><td>{j.ratio:.3g}</td>"
            f"<td>{j.error:.2g}</td><td>{'agrees' if j.ok else 'differs'}</td></tr>"
            for j in self.judgements
        )
        return (
            f"<pre>{html.escape(str(self))}</pre><details><summary>all tensors</summary><table>"
            "<tr><th>tensor</th><th>error / tolerance</th><th>relative error</th><th></th></tr>"
            f"{rows}</table></details>"
        )


def compare_traces(
    candidate: Trace, reference: Trace, tolerances: Tolerances, dtype: str, *, keep: bool = False
) -> Report:
    """Judge every entry, every gradient, every parameter gradient and the loss of a trace.

    `keep`: the report holds the arrays too. Raises ValueError where the candidate lacks a tensor
    or has one too many.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    for kind, part in ((FORWARD, "values"), (GRADIENT, "gradients"), (PARAMETER, "parameters")):
        mine, theirs, allowed = (getattr(x, part) for x in (candidate, reference, tolerances))
        if list(mine) != list(theirs):
            raise ValueError(f"{kind}: got {list(mine)}, needed {list(theirs)}")
        for name in theirs if kind == FORWARD else reversed(theirs):
            kept = reference.kept.get(name) if kind == FORWARD else None
            pairs[kind, name] = Pair(mine[name], theirs[name], allowed[name], kept)
        if kind == FORWARD:
            pairs[LOSS, LOSS] = Pair(candidate.loss, reference.loss, tolerances.loss)
    judgements = [
        compare(name, kind, pair.candidate, pair.reference, pair.tolerance, dtype, pair.kept)
        for (kind, name), pair in pairs.items()
    ]
    return Report(judgements, pairs=pairs if keep else {})
