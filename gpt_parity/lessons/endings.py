"""Where whole training runs end: one recipe from starts that differ in the last bit of float32."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from gpt_parity.backends import build_model, load_backend, thread_limit
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset
from gpt_parity.files import write_atomically
from gpt_parity.lessons.constants import PARTS, with_float32
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.lockstep import Runner, Setting
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import get_weights, set_weights
from numpy_impl.memory import keep_freed_memory


@dataclass(frozen=True)
class Arithmetic:
    """What computes a run: a backend, a dtype, and what of a float64 AdamW is in float32."""

    backend: str
    dtype: str
    rounded: tuple[str, ...] = ()


CONSTANTS = "numpy float64, constants in float32"
ARITHMETICS = {
    "numpy float32": Arithmetic("numpy", "float32"),
    "torch float32": Arithmetic("torch", "float32"),
    "numpy float64": Arithmetic("numpy", "float64"),
    **{
        f"numpy float64, {part} in float32": Arithmetic("numpy", "float64", (part,))
        for part in PARTS
    },
    "numpy float64, AdamW in float32": Arithmetic("numpy", "float64", PARTS),
}


@dataclass(frozen=True)
class Ending:
    """One run: test losses after some steps, the last one also with the weights in float64.

    schedule: the steps after which the learning rate would be lowest, of which `steps` were done.
    """

    arithmetic: str
    start: int
    seed: int
    schedule: int
    steps: int
    losses: dict[str, float]
    loss: float
    loss_float64: float
    seconds: float = field(compare=False)

    @property
    def identity(self) -> tuple[str, int, int, int, int]:
        """What determines a run."""
        return self.arithmetic, self.start, self.seed, self.schedule, self.steps


def start_weights(config: GPTConfig, seed: int, start: int) -> dict[str, np.ndarray]:
    """Weights of `seed` in float32, kept in float64; start > 0 moves each to a neighbour.

    Up or down by the toss of a coin; zeros stay, whose neighbours are no last-bit changes.
    """
    weights = get_weights(build_model("numpy", config, seed, "float32"))
    if start:
        rng = np.random.default_rng([seed, start])
        for name, w in weights.items():
            towards = np.where(rng.integers(2, size=w.shape) > 0, np.inf, -np.inf)
            moved = np.nextafter(w, towards.astype(np.float32))
            weights[name] = np.where(w == 0.0, w, moved)
    return {name: w.astype(np.float64) for name, w in weights.items()}


def looks(steps: int) -> list[int]:
    """Steps after which the test part is read, the last one included."""
    return sorted({step for step in (1000, 4000, 15_684) if step < steps} | {steps})


def train(
    arithmetic: str, start: int, dataset: CharDataset, seed: int, schedule: int, steps: int
) -> Ending:
    """Train by the recipe of the source text, and read the test part."""
    kind, recipe, begin = ARITHMETICS[arithmetic], TrainConfig(), time.perf_counter()
    config = recipe.model_config(dataset.vocab_size)
    runner = Runner(
        kind.backend,
        kind.dtype,
        Setting(config, recipe, start_weights(config, seed, start), [], []),
    )
    if kind.rounded:
        with_float32(runner, kind.rounded)
    scheduler = WarmupCosineScheduler(
        recipe.learning_rate, schedule, recipe.warmup, recipe.min_learning_rate
    )
    losses, count = {}, dataset.batch_count("train")
    for t in range(steps):
        runner.step(dataset.batch("train", t % count), scheduler(t))
        if t + 1 in looks(steps):
            losses[str(t + 1)] = runner.trainer.test(dataset)[1]
    exact = build_model("numpy", config, dtype="float64")
    set_weights(exact, get_weights(runner.model))
    loss_fn = load_backend("numpy").GPTLoss()
    return Ending(
        arithmetic, start, seed, schedule, steps, losses, losses[str(steps)],
        GPTTrainer(exact, loss_fn, None).test(dataset)[1], time.perf_counter() - begin,
    )  # fmt: skip


def endings(
    wanted: Iterable[tuple[str, int]], dataset: CharDataset, seed: int, schedule: int,
    steps: int, results: Path | None = None,
) -> list[Ending]:  # fmt: skip
    """The runs `wanted`, (arithmetic, start) each, one after the other on one thread.

    What `results`, a file of one JSON object a line, holds already is not computed again, and what
    is new is added to it. Raises ValueError for a file of another content.
    """
    known = [] if results is None else read_endings(results)
    found = []
    keep_freed_memory()
    for arithmetic, start in wanted:
        same = (arithmetic, start, seed, schedule, steps)
        ending = next((e for e in known if e.identity == same), None)
        if ending is None:
            with thread_limit(1, ARITHMETICS[arithmetic].backend):
                ending = train(arithmetic, start, dataset, seed, schedule, steps)
            known.append(ending)
            if results is not None:
                lines = "".join(json.dumps(asdict(e)) + "\n" for e in known)
                write_atomically(results, lines.encode())
        found.append(ending)
    return found


def read_endings(path: Path) -> list[Ending]:
    """The runs that a file holds, none where there is no file; ValueError for another content."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Ending(**json.loads(line)) for line in lines]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: holds no runs ({error}), a file of this script is needed") from (
            error
        )


@dataclass(frozen=True)
class Group:
    """The final test losses of several runs of one arithmetic: mean, standard deviation, range."""

    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.losses))

    @property
    def deviation(self) -> float:
        """Sample standard deviation; NaN for a single run."""
        return float(np.std(self.losses, ddof=1)) if len(self.losses) > 1 else math.nan


def difference(one: Group, other: Group) -> tuple[float, float, float]:
    """The difference of two means, its standard error, and how often chance makes as large a one.

    The last is the exact two-sided permutation test (Fisher 1935): the share of all ways to deal
    the runs to two groups of these sizes whose means are at least as far apart.
    """
    error = math.hypot(*(g.deviation / math.sqrt(len(g.losses)) for g in (one, other)))
    everything, count = np.array(one.losses + other.losses), len(one.losses)
    deals = np.array(list(itertools.combinations(range(len(everything)), count)))
    sums = everything[deals].sum(axis=1)
    gaps = sums / count - (everything.sum() - sums) / len(other.losses)
    found = one.mean - other.mean
    # A deal that is the same up to rounding counts as one that is as far apart.
    share = float(np.mean(np.abs(gaps) >= abs(found) * (1.0 - 1e-9)))
    return found, error, share
