"""Training in several processes against training in one, and the slips that such training invites.

Every process of the job is started here, on this machine, with the trainer that torchrun's
processes have. The reference is the NumPy twin, which takes each batch whole; the allowed distance
is that to its own copies under Monte Carlo arithmetic, as in all training.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.backends import thread_limit
from gpt_parity.distributed import DistributedTrainer, Group, leave
from gpt_parity.interrupts import interrupts_ignored
from gpt_parity.oracle.lockstep import (
    NOISY_TRAININGS,
    Outcome,
    Runner,
    Setting,
    Spread,
    State,
    judge_step,
    noisy_step,
    step_tolerances,
)
from gpt_parity.oracle.rounding import FLOAT64
from gpt_parity.oracle.slips import Sighting
from gpt_parity.oracle.tolerance import noisy_runs
from gpt_parity.training import StepResult, parts_of

STEPS = 20
# Below every gradient norm, so that all steps are clipped.
MAX_NORM = 0.1
ACCUMULATE = 3


class Summed(DistributedTrainer):
    """Slip: the gradients of the processes are added up, and not averaged."""

    description = "gradients summed, not averaged"

    def weight(self, rows: int, batch: int) -> float:
        return super().weight(rows, batch) * self.group.size


class MeanOfMeans(DistributedTrainer):
    """Slip: each process takes the mean over its own rows, however many it has."""

    description = "the mean of the processes' means"

    def weight(self, rows: int, batch: int) -> float:
        return 1.0 / self.group.size


class ClippedFirst(DistributedTrainer):
    """Slip: each process clips its own gradient, and the average is not clipped any more."""

    description = "clipped before the exchange"

    def _backward(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        from torch import distributed

        with self.exchanged.no_sync():
            total = super()._backward(tokens, targets)
        self.optimizer.clip_grad_norm(self.max_norm)
        for parameter in self.optimizer.parameters:
            distributed.all_reduce(parameter.grad)
            parameter.grad /= self.group.size
        return total


class SameRows(DistributedTrainer):
    """Slip: all processes take the same rows of the batch."""

    description = "all processes given the same rows"

    def rows(self, batch: int) -> slice:
        return parts_of(slice(0, batch), self.group.size)[0]


SLIPS = (Summed, MeanOfMeans, ClippedFirst, SameRows)


@dataclass(frozen=True)
class Trial:
    """One run of several processes: which setting, and how its batches go through the model."""

    setting: int
    accumulate: int = 1
    shard: bool = False
    trainer: type[DistributedTrainer] = DistributedTrainer

    def name(self, rows: int) -> str:
        parts = f", {self.accumulate} parts" if self.accumulate > 1 else ""
        return f"{rows} rows{parts}{', sharded' if self.shard else ''}"


def row_counts(processes: int) -> tuple[int, int, int]:
    """Rows of a batch that divide evenly, of one that does not, of one that leaves one out."""
    return 2 * processes, 2 * processes - 1, max(1, processes - 1)


def several_processes(
    settings: list[Setting], processes: int
) -> tuple[Outcome, list[Sighting]]:  # fmt: skip
    """Train in float64 in so many processes, every setting in four ways; judge each step.

    settings: one for each of `row_counts`. The slips are planted into the second. Raises
    MissingBackendError without PyTorch, ChildProcessError where a process ends early.
    """
    settings = [replace(s, recipe=replace(s.recipe, max_norm=MAX_NORM)) for s in settings]
    ways = [(1, False), (ACCUMULATE, False), (1, True), (ACCUMULATE, True)]
    trials = [Trial(k, *way) for k in range(len(settings)) for way in ways]
    trials += [Trial(1, trainer=slip) for slip in SLIPS]
    references = [_reference(setting) for setting in settings]
    outcome = Outcome("float64", STEPS)
    sightings = []
    for trial, states in zip(trials, _started(settings, trials, processes), strict=True):
        rows = len(settings[trial.setting].batches[0][0])
        judgements = [
            judge_step(state, clean, tolerances, FLOAT64)
            for state, (clean, tolerances) in zip(states, references[trial.setting], strict=True)
        ]
        if trial.trainer is DistributedTrainer:
            for t, judged in enumerate(judgements):
                outcome.add(f"{processes} processes, {trial.name(rows)}", t, judged)
        else:
            worst = max((j for judged in judgements for j in judged), key=lambda j: j.ratio)
            description = trial.trainer.description
            sightings.append(Sighting(description, worst.name, worst.ratio, True))
    return outcome, sightings


def _reference(setting: Setting) -> list[tuple[State, Spread]]:
    """State and tolerances after each step of the NumPy twin."""
    clean = Runner("numpy", "float64", setting)
    streams = noisy_runs(
        lambda noise: (Runner("numpy", "float64", setting), noise), FLOAT64, 3, NOISY_TRAININGS
    )
    found = []
    for batch, rate in zip(setting.batches, setting.rates, strict=True):
        state = clean.state(clean.step(batch, rate))
        noisy = [noisy_step(runner, batch, rate, noise) for runner, noise in streams]
        found.append((state, step_tolerances(state, noisy, FLOAT64)))
    return found


def _started(
    settings: list[Setting], trials: list[Trial], processes: int
) -> Iterable[list[State]]:  # fmt: skip
    """The states of every trial, step by step, from processes of their own."""
    context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = context.Pipe(duplex=False)
        job = [
            context.Process(
                target=_work, args=(rank, processes, Path(folder) / "store", settings, trials,
                                    theirs if rank == 0 else None), daemon=True,
            )
            for rank in range(processes)
        ]  # fmt: skip
        with interrupts_ignored():
            for process in job:
                process.start()
        theirs.close()
        try:
            for _ in trials:
                while not mine.poll():  # at its end too there is something
                    wait([mine, *(process.sentinel for process in job if process.is_alive())])
                    if any(process.exitcode for process in job):
                        raise _early(processes)
                try:
                    yield mine.recv()
                except EOFError:
                    raise _early(processes) from None
            for process in job:
                process.join()
        finally:
            for process in job:
                process.terminate()
                process.join()


def _early(processes: int) -> ChildProcessError:
    return ChildProcessError(f"one of the {processes} processes ended before the training did")


def _work(
    rank: int, size: int, store: Path, settings: list[Setting], trials: list[Trial],
    results: Connection | None,
) -> None:  # fmt: skip
    """All trials in one process of the job; the first one sends what came out."""
    # Nothing goes to another machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch import distributed

    group = Group(rank, size, distributed.FileStore(str(store), size))
    with thread_limit(1, "torch"):
        group.start()
        for trial in trials:
            states = _trained(settings[trial.setting], trial, group)
            if results is not None:
                results.send(states)
        torch.distributed.destroy_process_group()
    leave(0)


def _trained(setting: Setting, trial: Trial, group: Group) -> list[State]:
    def plain() -> Any:
        trainer = Runner("torch", "float64", setting).trainer
        trainer.accumulate = trial.accumulate
        return trainer

    runner = Runner("torch", "float64", setting)
    again: Callable[[], Any] | None = plain if trial.shard else None
    trainer = trial.trainer(plain(), group, again)
    states = []
    for batch, rate in zip(setting.batches, setting.rates, strict=True):
        trainer.optimizer.lr = rate
        result: StepResult = trainer.train_step(*batch)
        whole = trainer.whole()
        if whole is not None:
            runner.model, runner.optimizer = whole.model, whole.optimizer
            states.append(runner.state(result))
    return states
