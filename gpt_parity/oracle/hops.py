"""A training run that changes its backend again and again, by its checkpoint file alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpt_parity.checkpoint import CHECKPOINT_NAME, load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.oracle.lockstep import (
    NOISY_TRAININGS,
    Outcome,
    Runner,
    Setting,
    judge_step,
    noisy_step,
    step_tolerances,
)
from gpt_parity.oracle.rounding import FLOAT64
from gpt_parity.oracle.tolerance import noisy_runs

STEPS_PER_HOP = 10


def steps_of(hops: int) -> int:
    """The steps of a run with so many hops: as many before the first as after each."""
    return STEPS_PER_HOP * (hops + 1)


def hopping_float64(setting: Setting, hops: int) -> Outcome:
    """Train in float64 with a hop to the other backend every 10 steps; judge each step.

    At a hop the run is saved, and a new model of the other backend, which knows nothing of the
    first, goes on from the file. The reference is the unbroken run of the NumPy twin, and the
    allowed distance that to its own copies under Monte Carlo arithmetic, as for `free_float64`.
    """
    vocabulary = "".join(map(chr, range(setting.config.vocab_size)))
    clean = Runner("numpy", "float64", setting)
    streams = noisy_runs(
        lambda noise: (Runner("numpy", "float64", setting), noise), FLOAT64, 2, NOISY_TRAININGS
    )
    hopper = Runner(BACKENDS[0], "float64", setting)
    outcome = Outcome("float64", steps_of(hops))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CHECKPOINT_NAME
        for t in range(steps_of(hops)):
            batch, rate = setting.batches[t], setting.rates[t]
            if t and t % STEPS_PER_HOP == 0:
                save_checkpoint(
                    path, hopper.model, config=setting.config, vocabulary=vocabulary, step=t,
                    optimizer=hopper.optimizer,
                )  # fmt: skip
                backend = BACKENDS[t // STEPS_PER_HOP % len(BACKENDS)]
                hopper = Runner.from_checkpoint(backend, load_checkpoint(path), setting)
            reference = clean.state(clean.step(batch, rate))
            noisy = [noisy_step(runner, batch, rate, noise) for runner, noise in streams]
            tolerances = step_tolerances(reference, noisy, FLOAT64)
            candidate = hopper.state(hopper.step(batch, rate))
            outcome.add(f"{hops} hops", t, judge_step(candidate, reference, tolerances, FLOAT64))
    return outcome
