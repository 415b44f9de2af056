"""The suite's own comparers, and the proof, before any test runs, that comparers reject."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpt_parity.oracle.compare import PARAMETER, compare, compare_traces
from gpt_parity.oracle.lockstep import judge_step
from gpt_parity.oracle.rounding import FLOAT64, bound
from gpt_parity.oracle.tolerance import Tolerance, Tolerances, norms
from gpt_parity.oracle.trace import Trace
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


def assert_same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """The same names, dtypes, shapes and bits, in arrays that share nothing; at least one array."""
    assert one and list(one) == list(other), f"{list(one)}, not {list(other)}"
    for name, x in one.items():
        y = other[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{name}: {x.dtype} {x.shape}"
        assert not np.shares_memory(x, y), f"{name}: one array, not two"
        assert x.tobytes() == y.tobytes(), f"{name}: not the same bits"


def _with(x: np.ndarray, value: float) -> np.ndarray:
    """One element of the smallest row changed: `value` is a factor, or takes its place."""
    x = x.copy()
    rows = x.reshape(-1, x.shape[-1])
    norms = np.linalg.norm(rows, axis=-1)
    row = rows[np.where(norms > 0.0, norms, np.inf).argmin()]
    place = np.abs(row).argmax()
    row[place] = row[place] * value if np.isfinite(value) else value
    return x


BROKEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: x.swapaxes(-1, -2).copy(),
    "scaled by 1.001": lambda x: x * x.dtype.type(1.001),
    "one element of one row changed": lambda x: _with(x, 1.001),
    "NaN": lambda x: _with(x, np.nan),
    "infinite": lambda x: _with(x, np.inf),
    "of another dtype": lambda x: x.astype("float32" if x.dtype == "float64" else "float64"),
    "empty": lambda x: x[:0].copy(),
}

# Tensors of one pass, by the part of the trace that holds them.
TENSORS = (
    ("values", "transformers.0.attention.softmax.output"),
    ("values", "transformers.1.attention.mask.output"),
    ("gradients", "transformers.0.feed_forward.gelu.output"),
    ("parameters", "transformers.0.attention.output.weight"),
)


def accepted_mistakes() -> list[str]:
    """What a comparer accepts of arrays that it must reject; it must accept a right one too."""
    judges = [*_trace_judges(), *_array_judges()]
    accepted = [
        f"{who} accepts what is {fault}"
        for who, right, _, judge in judges
        for fault, broken in BROKEN.items()
        if _accepts(judge, broken(right))
    ]
    accepted += [f"{who} accepts the reference itself" for who, _, reference, judge in judges
                 if _accepts(judge, reference)]  # fmt: skip
    accepted += [f"{who} rejects what is right" for who, right, _, judge in judges
                 if not _accepts(judge, right.copy())]  # fmt: skip
    # Rows and whole tensors are judged each by its own tolerance.
    x = np.outer([1e6, 1.0], np.ones(50))
    small_row, everywhere = x.copy(), x * (1.0 + 0.9e-9)
    small_row[1, 3] += 1e-6
    for fault, wrong, tolerance in (
        ("in a small row beside a large one", small_row, Tolerance(1e-2, 1e-9 * norms(x)[1])),
        ("a little in every row", everywhere, Tolerance(1e-10 * norms(x)[0], 1e-9 * norms(x)[1])),
    ):
        if compare("x", PARAMETER, wrong, x, tolerance, "float64").ok:
            accepted.append(f"compare accepts what is wrong {fault}")
    return accepted


Judge = Callable[[np.ndarray], None]


def _trace_judges() -> Iterator[tuple[str, np.ndarray, np.ndarray, Judge]]:
    """For some tensors of a pass: who compares, a right candidate, the reference, the comparer.

    The sizes are equal, so that a transpose does not show in a shape.
    """
    for dtype in ("float64", "float32"):
        clean, tolerances = reference(ModelCase(SIZES["square"], "normal", 0.5, 0), dtype)
        parts = ("values", "gradients", "parameters")
        right = {p: {n: x.astype(dtype) for n, x in getattr(clean, p).items()} for p in parts}

        def judge(
            candidate: np.ndarray, part: str, name: str, clean: Trace = clean,
            tolerances: Tolerances = tolerances, right: Any = right, dtype: str = dtype,
        ) -> None:  # fmt: skip
            arrays = {**right, part: {**right[part], name: candidate}}
            trace = replace(clean, loss=clean.loss.astype(dtype), **arrays)
            report = compare_traces(trace, clean, tolerances, dtype)
            assert report.ok and report.complete

        for part, name in TENSORS:
            who = f"compare_traces, {part} in {dtype}"
            judge_one = functools.partial(judge, part=part, name=name)
            yield who, right[part][name], getattr(clean, part)[name], judge_one


def _array_judges() -> Iterator[tuple[str, np.ndarray, np.ndarray, Judge]]:
    x = np.random.default_rng(0).standard_normal((4, 4))
    allowed = bound(np.abs(x), FLOAT64)
    yield "assert_within", x, x, lambda y: assert_within(y, x, allowed, "x")
    yield "assert_agree", x, x, lambda y: assert_agree("x", 1, y, x)
    yield "assert_same_bits", x, x, lambda y: assert_same_bits({"x": y}, {"x": x})
    tolerances = {"weights w": Tolerance(1e-12, np.full(4, 1e-12))}

    def judge(y: np.ndarray) -> None:
        judgements = judge_step({"weights w": y}, {"weights w": x}, tolerances, FLOAT64)
        assert all(j.ok for j in judgements)

    yield "judge_step", x, x, judge


def _accepts(judge: Judge, candidate: np.ndarray) -> bool:
    try:
        judge(candidate)
    except (AssertionError, ValueError):
        return False
    return True
