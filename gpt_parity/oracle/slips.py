"""Three fixed mistakes that every comparison is shown first: who misses one, judges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gpt_parity.oracle.compare import FORWARD, PARAMETER, compare_traces
from gpt_parity.oracle.tolerance import Tolerances
from gpt_parity.oracle.trace import Trace

# A slip must stand out by more than this many tolerances.
VISIBLE = 3.0


@dataclass(frozen=True)
class Slip:
    """One planted mistake in a trace, and the tensor that must be found wrong."""

    description: str
    kind: str
    name: str
    trace: Trace


@dataclass(frozen=True)
class Sighting:
    """By how many tolerances a slip stood out in its tensor, and whether in that one alone."""

    description: str
    name: str
    ratio: float
    alone: bool

    @property
    def ok(self) -> bool:
        return self.ratio > VISIBLE and self.alone


def planted_slips(trace: Trace, dtype: str) -> Iterator[Slip]:
    """The slips, each in a copy of `trace` rounded to `dtype`."""
    trace = replace(
        trace, loss=trace.loss.astype(dtype), values=_rounded(trace.values, dtype),
        gradients=_rounded(trace.gradients, dtype), parameters=_rounded(trace.parameters, dtype),
    )  # fmt: skip
    scaled = "transformers.0.feed_forward.input.weight"
    longer = (trace.parameters[scaled] * 1.01).astype(dtype)
    yield Slip(
        "a gradient 1 % too long", PARAMETER, scaled,
        replace(trace, parameters={**trace.parameters, scaled: longer}),
    )  # fmt: skip
    square = "transformers.0.attention.output.weight"
    transposed = trace.parameters[square].T.copy()
    yield Slip(
        "a gradient transposed", PARAMETER, square,
        replace(trace, parameters={**trace.parameters, square: transposed}),
    )  # fmt: skip
    weights = "transformers.0.attention.softmax.output"
    value = trace.values[weights].copy()
    rows = value.reshape(-1, value.shape[-1])  # of all heads
    rows[-1, rows[-1].argmax()] *= 1.01
    yield Slip(
        "the largest attention weight of one position 1 % off", FORWARD, weights,
        replace(trace, values={**trace.values, weights: value}),
    )  # fmt: skip


def _rounded(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    return {name: array.astype(dtype) for name, array in arrays.items()}


def show_slips(reference: Trace, tolerances: Tolerances, dtype: str) -> list[Sighting]:
    """Judge the reference with each slip planted into it, as any candidate is judged."""
    sightings = []
    for slip in planted_slips(reference, dtype):
        report = compare_traces(slip.trace, reference, tolerances, dtype)
        own = {(j.kind, j.name): j for j in report.judgements}[slip.kind, slip.name]
        others = [j for j in report.judgements if not j.ok and j is not own]
        sightings.append(Sighting(slip.description, slip.name, own.ratio, not others))
    return sightings
