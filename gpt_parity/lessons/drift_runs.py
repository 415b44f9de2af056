"""Two training runs side by side, and the distance that rounding alone would put between them.

Both start from the same weights, which float32 represents, and see the same batches and rates.
Nothing is copied between them afterwards. The envelope is that of `oracle.lockstep`: a clean
float64 run of the NumPy twin and its copies under Monte Carlo arithmetic in the coarser of the two
dtypes, all of them free as well. Neither of the two runs is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpt_parity.corpus import CharDataset
from gpt_parity.lessons.config import Side
from gpt_parity.oracle.compare import compare
from gpt_parity.oracle.lockstep import (
    NOISY_TRAININGS,
    Batch,
    Runner,
    Setting,
    State,
    noisy_step,
    step_tolerances,
)
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64, Unit
from gpt_parity.oracle.tolerance import Tolerance, noisy_runs, norms
from gpt_parity.training import GPTTrainer, StepResult

# In the order in which a step computes them; a mistake shows in the first of them.
KINDS = ("loss", "exp_avg", "exp_avg_sq", "weights")
LOOKS_PER_DECADE = 8
NOISE_STREAM = 3  # `oracle` has the streams before it


@dataclass(frozen=True)
class Distance:
    """How far apart one array is after a step, all norms in units of that of run b.

    distance: |a - b|. spread: that of the furthest noisy run from the clean one. envelope: the
    tolerance of `oracle.lockstep` for the whole array. ratio: distance in units of tolerance, of
    the whole or of the worst row. The last three are None where the envelope was not followed.
    """

    kind: str
    name: str
    distance: float
    norm: float
    spread: float | None = None
    envelope: float | None = None
    ratio: float | None = None

    @property
    def is_out(self) -> bool:
        return self.ratio is not None and self.ratio > 1.0


@dataclass(frozen=True)
class Look:
    """Both runs after `step` steps: losses before its update, and every distance after it."""

    step: int
    losses: tuple[float, float]
    distances: list[Distance]

    @property
    def out(self) -> list[Distance]:
        """What is outside of the envelope, in the order of computation, furthest first."""
        return sorted(
            (d for d in self.distances if d.is_out), key=lambda d: (KINDS.index(d.kind), -d.ratio)
        )

    @property
    def worst(self) -> Distance:
        """The tensor that is furthest out, in tolerances where they are known."""
        tensors = [d for d in self.distances if d.kind != "loss"]
        return max(tensors, key=lambda d: d.distance if d.ratio is None else d.ratio)

    def of(self, kind: str) -> list[Distance]:
        return [d for d in self.distances if d.kind == kind]

    def whole(self, kind: str, what: str) -> float | None:
        """`distance`, `spread` or `envelope` of all arrays of a kind taken as one."""
        parts = [(getattr(d, what), d.norm) for d in self.of(kind)]
        if any(value is None for value, _ in parts):
            return None
        norm = math.hypot(*(n for _, n in parts))
        if norm == 0.0:
            return 0.0 if all(value == 0.0 for value, _ in parts) else math.inf
        return math.hypot(*(value * n for value, n in parts if n > 0.0)) / norm


@dataclass
class Drift:
    """Losses of every step, and what was seen at the steps that were looked at."""

    unit: Unit
    envelope_steps: int
    losses: list[tuple[float, float]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)

    @property
    def parting(self) -> tuple[Look | None, Look] | None:
        """The first look outside of the envelope, with the one before it; None if there is none."""
        before: Look | None = None
        for look in self.looks:
            if look.out:
                return before, look
            before = look
        return None


def looks(steps: int) -> list[int]:
    """Steps to look at: evenly spaced in their logarithm, and the last one."""
    count = LOOKS_PER_DECADE * math.ceil(math.log10(steps) + 1)
    spaced = {round(10 ** (k / LOOKS_PER_DECADE)) for k in range(count)}
    return sorted({step for step in spaced if step < steps} | {steps})


class SideRunner(Runner):
    """A runner on threads of its own, in steps that alternate with those of others."""

    def __init__(self, side: Side, setting: Setting) -> None:
        super().__init__(side.backend, side.dtype, setting)
        self.side = side
        self.trainer = GPTTrainer(
            self.model, self.trainer.loss_fn, self.optimizer, setting.recipe.max_norm,
            threads=side.threads,
        )  # fmt: skip

    def step(self, batch: Batch, rate: float) -> StepResult:
        if self.side.backend == "torch":
            import torch

            torch.set_num_threads(self.side.threads)
        return super().step(batch, rate)


class Envelope:
    """The clean float64 run and its noisy copies."""

    def __init__(self, setting: Setting, unit: Unit) -> None:
        self.unit = unit
        self.clean = Runner("numpy", "float64", setting)
        self.noisy = noisy_runs(
            lambda noise: (Runner("numpy", "float64", setting), noise),
            unit, NOISE_STREAM, NOISY_TRAININGS,
        )  # fmt: skip

    def step(self, batch: Batch, rate: float) -> tuple[State, list[State]]:
        clean = self.clean.state(self.clean.step(batch, rate))
        return clean, [noisy_step(runner, batch, rate, noise) for runner, noise in self.noisy]


def drift(
    sides: tuple[Side, Side], setting: Setting, dataset: CharDataset, rate: Callable[[int], float],
    steps: int, envelope_steps: int, on_step: Callable[[], Any] = lambda: None,
    prepare: Callable[[SideRunner, SideRunner], None] = lambda a, b: None,
) -> Drift:  # fmt: skip
    """Train both sides for `steps` steps, and look at them now and then.

    `prepare` may change the two runners before the first step. Raises FloatingPointError where
    one of the runs diverges.
    """
    a, b = (SideRunner(side, setting) for side in sides)
    prepare(a, b)
    unit = FLOAT32 if "float32" in (a.dtype, b.dtype) else FLOAT64
    envelope = Envelope(setting, unit) if envelope_steps else None
    result = Drift(unit, min(steps, envelope_steps))
    looked, count = {*looks(steps), result.envelope_steps}, dataset.batch_count("train")
    for t in range(steps):
        batch = dataset.batch("train", t % count)
        results = [runner.step(batch, rate(t)) for runner in (a, b)]
        result.losses.append((results[0].loss, results[1].loss))
        states = envelope.step(batch, rate(t)) if t < result.envelope_steps and envelope else None
        if t + 1 in looked:
            pair = [runner.state(r) for runner, r in zip((a, b), results, strict=True)]
            result.looks.append(Look(t + 1, result.losses[-1], distances(*pair, states, unit)))
        if t + 1 == result.envelope_steps:
            envelope = None  # its memory
        on_step()
    return result


def distances(
    a: State, b: State, envelope: tuple[State, list[State]] | None, unit: Unit
) -> list[Distance]:
    """The distance of every array of two states, and where it lies in the envelope."""
    tolerances = step_tolerances(*envelope, unit) if envelope is not None else {}
    found = []
    for key in a:
        kind, _, name = key.partition(" ")
        if kind in KINDS:
            spread = None
            if envelope is not None:
                clean, noisy = envelope
                spread = max(norms(state[key] - clean[key])[0] for state in noisy)
            mine, theirs = (np.asarray(state[key], dtype=np.float64) for state in (a, b))
            found.append(_distance(kind, name or kind, mine, theirs, tolerances.get(key), spread))
    return found


def _distance(
    kind: str, name: str, a: np.ndarray, b: np.ndarray, tolerance: Tolerance | None,
    spread: float | None,
) -> Distance:  # fmt: skip
    error, norm = norms(a - b)[0], norms(b)[0]

    def relative(x: float) -> float:
        return x / norm if norm > 0.0 else math.inf if x > 0.0 else 0.0

    if tolerance is None or spread is None:
        return Distance(kind, name, relative(error), norm)
    ratio = compare(name, kind, a, b, tolerance, "float64").ratio
    return Distance(
        kind, name, relative(error), norm, relative(spread), relative(tolerance.whole), ratio
    )
