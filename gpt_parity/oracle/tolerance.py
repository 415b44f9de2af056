"""Tolerances of a whole model, measured by Monte Carlo arithmetic and never tuned.

One clean float64 run G_0 of the NumPy twin, then K runs with every result perturbed by the
rounding of the dtype judged:  tol = 16 max_k ||G_k - G_0|| + 12 u ||G_0||,  for the whole tensor
and for each row of its last axis. The spread is taken around the same engine's clean run, so that
a difference in meaning is never absorbed as noise. A tolerance of 0 asks for equality.

Where rounding alone may choose another winner of a softmax, no finite tolerance is honest: what
depends on it gets an infinite one, and counts as not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpt_parity.oracle.noise import MonteCarloArithmetic
from gpt_parity.oracle.rounding import Unit
from gpt_parity.oracle.trace import Trace, trace
from numpy_impl.functional import LAYER_NORM_EPS

# A row is often one number with one error. Of the hundreds of rows of a model some draw only small
# noise K times, and their tolerance is that much too small: with K = 6 clean rows reach 0.8 of it.
NOISY_RUNS = 12
PROJECTION_BIAS = ".attention.input.bias"
NORM_OUTPUT = "norm.output"
UNDECIDED = (
    "rounding alone may choose the winner of a softmax, or the sign in a norm of equal numbers"
)
SPREAD_FACTOR = 16.0
RESULT_FACTOR = 12.0


@dataclass(frozen=True)
class Tolerance:
    """Allowed 2-norm of the error: of the whole tensor, and of each row of its last axis."""

    whole: float
    rows: np.ndarray

    def hides(self, reference: np.ndarray) -> bool:
        """Whether zeros would be taken for the reference, be it zero itself or not judged."""
        whole, rows = norms(in_rows(reference, self))
        return bool(whole <= self.whole and (rows <= self.rows).all())


def by_thirds(name: str, x: np.ndarray) -> np.ndarray:
    """x, of the bias of a GPT-2's joint projection as (..., 3, E): queries, keys, values.

    The gradient of the keys' third is exactly 0, and what rounding leaves of it AdamW makes an
    update like any other: as one row, that noise would hide the other two.
    """
    return x.reshape(*x.shape[:-1], 3, -1) if name.endswith(PROJECTION_BIAS) else x


def in_rows(x: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """x, of one axis by the rows of its tolerance where that has several."""
    several = x.ndim == 1 and tolerance.rows.ndim == 1
    return x.reshape(len(tolerance.rows), -1) if several else x


def norms(x: np.ndarray) -> tuple[float, np.ndarray]:
    """2-norm of the whole tensor and of each row of its last axis, in float64."""
    x = np.asarray(x, dtype=np.float64)
    rows = row_norms(x) if x.ndim else np.abs(x)
    return float(row_norms(rows.reshape(-1))), rows


def row_norms(x: np.ndarray) -> np.ndarray:
    """2-norm over the last axis, also where squares underflow or overflow."""
    squares = np.einsum("...i,...i->...", x, x)
    extreme = ~((squares > 1e-280) & (squares < 1e280))
    rows = np.sqrt(squares)
    if extreme.any():
        largest = np.abs(x[extreme]).max(axis=-1, initial=0.0)
        known = (largest > 0.0) & np.isfinite(largest)
        scaled = (
            np.where(known[..., None], x[extreme], 1.0) / np.where(known, largest, 1.0)[..., None]
        )
        rows = np.asarray(rows)
        rows[extreme] = largest * np.sqrt((scaled * scaled).sum(axis=-1))
    return rows


def spread_tolerance(
    clean: np.ndarray, noisy: Sequence[np.ndarray], unit: Unit, name: str = ""
) -> Tolerance:
    """tol = 16 max_k ||G_k - G_0|| + 12 u ||G_0||,  with rows `by_thirds` of the name."""
    spreads = by_thirds(name, np.stack(noisy) - clean)  # (K, ...)
    clean = by_thirds(name, clean)
    whole, rows = norms(clean)
    spread_rows = row_norms(spreads) if clean.ndim else np.abs(spreads)
    spread_whole = row_norms(spread_rows.reshape(len(noisy), -1))
    return Tolerance(
        SPREAD_FACTOR * float(spread_whole.max()) + RESULT_FACTOR * unit.u * whole,
        SPREAD_FACTOR * spread_rows.max(axis=0) + RESULT_FACTOR * unit.u * rows,
    )


def noisy_runs(
    run: Callable[[MonteCarloArithmetic], Any], unit: Unit, seed: int, count: int = NOISY_RUNS
) -> list[Any]:
    """`run` once per noisy run, each with its own stream of Monte Carlo arithmetic."""
    return [run(MonteCarloArithmetic(unit, np.random.default_rng([seed, k]))) for k in range(count)]


@dataclass(frozen=True)
class Tolerances:
    """Tolerances of everything that a trace holds, by the names of the trace.

    `undecided` names the first scores between which rounding may choose, or rows of which a layer
    norm would show little else ("" if there are none).
    """

    unit: Unit
    loss: Tolerance
    values: dict[str, Tolerance]
    gradients: dict[str, Tolerance]
    parameters: dict[str, Tolerance]
    undecided: str = ""


def undecided_scores(clean: Trace, values: dict[str, Tolerance], unit: Unit) -> str:
    """Name of the first input of a softmax or layer norm whose result rounding may decide, or "".

    A softmax is linear in errors up to about 1. With a tolerance tau > 1, the largest score wins
    for certain only where its lead is over 2 tau and what is left of the others' weight,
    exp(2 tau - lead), is under u. A layer norm of a row that is constant but for less than tau is
    the direction of its errors, once tau is more than eps hides.
    """
    logits = list(clean.values)[-1]
    for name, x in clean.values.items():
        if name.endswith(NORM_OUTPUT):
            layer = name.removesuffix("output") + "input"
            row = clean.aliases.get(layer, layer)
            # A number less itself is 0 however it is rounded.
            alone = clean.values[row].shape[-1] == 1
            if not alone and (values[row].rows > _deviation(clean.values[row])).any():
                return row
        if name not in clean.kept and name != logits:
            continue
        scores = np.where(clean.kept[name], x, -math.inf) if name in clean.kept else x
        scores = np.concatenate([scores, np.full((*x.shape[:-1], 1), -math.inf)], axis=-1)
        second, first = np.moveaxis(np.partition(scores, -2, axis=-1)[..., -2:], -1, 0)
        tau = values[name].rows
        if ((tau > 1.0) & (first - second < 2.0 * tau - math.log(unit.u))).any():
            return name
    return ""


def _deviation(x: np.ndarray) -> np.ndarray:
    """2-norm of each row of the last axis about its mean, and of as many roots of eps."""
    squares = (x - x.mean(axis=-1, keepdims=True)) ** 2 + LAYER_NORM_EPS
    return np.sqrt(squares.sum(axis=-1))


def _without_judgement(tolerances: Tolerances) -> Tolerances:
    """Infinite tolerances for all that depends on undecided scores: what follows, and gradients."""

    def endless(part: dict[str, Tolerance], names: Sequence[str]) -> dict[str, Tolerance]:
        wide = {n: Tolerance(math.inf, np.full_like(part[n].rows, math.inf)) for n in names}
        return {**part, **wide}

    names = list(tolerances.values)
    later = names[names.index(tolerances.undecided) + 1 :]
    loss = endless({"loss": tolerances.loss}, ["loss"] if later else [])["loss"]
    return replace(
        tolerances, loss=loss, values=endless(tolerances.values, later),
        gradients=endless(tolerances.gradients, list(tolerances.gradients)),
        parameters=endless(tolerances.parameters, list(tolerances.parameters)),
    )  # fmt: skip


def trace_tolerances(clean: Trace, noisy: list[Trace], unit: Unit) -> Tolerances:
    """Tolerances from a clean and several noisy traces; masked scores count where they are kept."""

    def kept(name: str, x: np.ndarray) -> np.ndarray:
        return np.where(clean.kept[name], x, 0.0) if name in clean.kept else x

    def part(of: Callable[[Trace], dict[str, np.ndarray]]) -> dict[str, Tolerance]:
        return {
            name: spread_tolerance(x, [of(t)[name] for t in noisy], unit, name)
            for name, x in of(clean).items()
        }

    values = {
        name: spread_tolerance(kept(name, x), [kept(name, t.values[name]) for t in noisy], unit)
        for name, x in clean.values.items()
    }
    tolerances = Tolerances(
        unit,
        spread_tolerance(clean.loss, [t.loss for t in noisy], unit),
        values,
        part(lambda t: t.gradients),
        part(lambda t: t.parameters),
        undecided_scores(clean, values, unit),
    )
    return _without_judgement(tolerances) if tolerances.undecided else tolerances


def model_tolerances(
    model: Any, loss_fn: Any, tokens: np.ndarray, targets: np.ndarray, unit: Unit, seed: int = 0
) -> tuple[Trace, Tolerances]:
    """Clean trace of a float64 NumPy model, and the tolerances for a candidate with `unit`.

    Raises ValueError for a model of another dtype, RuntimeError for one that does not repeat
    itself to the bit.
    """
    if model.embedding.embedding.weight.dtype != np.float64:
        raise ValueError("tolerance: the reference model is not float64, needed float64")
    clean, again = (trace(model, loss_fn, tokens, targets) for _ in range(2))
    for name, gradient in clean.parameters.items():
        # State that one pass leaves to the next would pass for rounding.
        if not np.array_equal(gradient, again.parameters[name], equal_nan=True):
            raise RuntimeError(f"reference: the gradient of {name} differs when computed again")
    noisy = noisy_runs(lambda a: trace(model, loss_fn, tokens, targets, a), unit, seed)
    return clean, trace_tolerances(clean, noisy, unit)
