"""Training in several processes, by PyTorch's own engine: data parallel, or sharded.

Each process takes its rows of every batch. Its loss is the sum over its tokens, times the number of
processes, over the tokens of the whole batch, so that the mean over processes, which is what
`DistributedDataParallel` and `fully_shard` make of the gradients, is the gradient of the mean over
the batch, however the rows divide. A process without rows takes part with a weight of 0.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np

from gpt_parity.backends import load_backend
from gpt_parity.config import CHECKPOINT, VALIDATION, TrainConfig
from gpt_parity.corpus import CharDataset
from gpt_parity.interrupts import Stop, StopBetweenSteps
from gpt_parity.precision import Engine
from gpt_parity.training import GPTTrainer, StepResult, parts_of
from gpt_parity.weights import named_parameters, set_weights

# A process that waits longer for the others gives up: far more than a step or a save takes.
PATIENCE = timedelta(seconds=600)
# How processes exchange tensors of a device; numbers and the like are on the CPU.
CONNECTIONS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
READY, TOLD, JOB = "gpt-parity/ready", "gpt-parity/told", "gpt-parity/job"
# Tenths of a second in which the first process must have found out too.
PATIENCE_WITH_FIRST = 50
# What PyTorch's RuntimeErrors say where a connection breaks or nobody answers.
BROKEN = re.compile("gloo|nccl|connection|timed out|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class Group:
    """This process among those that train together; `rank` 0 writes the files."""

    rank: int = 0
    size: int = 1
    store: Any = field(default=None, repr=False)
    connection: str = "gloo"

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def neighbours(self) -> int:
        """The processes on this machine, which share its cores."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) if self.store is not None else 1

    def start(self, job: dict[str, Any] | None = None) -> None:
        """Connect the processes, once each has all that it needs.

        Those that wait listen to signals meanwhile, and to what the others tell. Raises ValueError
        where `job`, what it is that they train, is not that of the first process.
        """
        if self.store is None:
            return
        from torch import distributed

        with self.exchange():
            if self.leads:
                self.store.set(JOB, json.dumps(job))
            self._wait_until(lambda: self.store.check([JOB]))
            mine, first = json.loads(json.dumps(job)), json.loads(self.store.get(JOB))
            differing = [name for name in mine or () if mine[name] != first[name]]
            if differing:
                raise ValueError(
                    f"process {self.rank} has another {differing[0]} than process 0, the same in "
                    "all is needed"
                )
            self.store.add(READY, 1)
            self._wait_until(lambda: self.store.add(READY, 0) == self.size)
            distributed.init_process_group(
                self.connection, store=self.store, rank=self.rank, world_size=self.size,
                timeout=PATIENCE,
            )  # fmt: skip

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self.store.check([TOLD]):
                raise LostProcessError(f"one of the {self.size} processes cannot start")
            time.sleep(0.05)

    def meet(self) -> None:
        """Wait until all processes have come to this line."""
        self.largest(0)

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers; all have to ask."""
        return round(self._reduced(float(number), "MAX")) if self.size > 1 else number

    def sum(self, number: float) -> float:
        """The sum of the processes' numbers; all have to ask."""
        return self._reduced(number, "SUM") if self.size > 1 else number

    def _reduced(self, number: float, how: str) -> float:
        import torch
        from torch import distributed

        value = torch.tensor(number, dtype=torch.float64)
        with self.exchange():
            distributed.all_reduce(value, getattr(distributed.ReduceOp, how))
        return value.item()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A block in which the processes talk; LostProcessError where one is not there."""
        try:
            yield
        except RuntimeError as error:
            if not BROKEN.search(str(error)):
                raise
            _deafen()
            raise LostProcessError(
                f"one of the {self.size} processes has ended or does not answer"
            ) from error


ALONE = Group()


def _deafen() -> None:
    """torchrun ends those that are left, which have something to save and to say first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def size_of_job() -> int:
    """How many processes torchrun started, 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@functools.cache
def _rendezvous() -> tuple[Any, int, int]:
    """Where the processes of the job leave notes for each other; rank and size."""
    from torch import distributed

    try:
        return next(distributed.rendezvous("env://", timeout=PATIENCE))
    except RuntimeError as error:
        raise LostProcessError(f"the processes do not find each other: {error}") from error


def first_to_tell() -> bool:
    """Whether this process is to say what went wrong, since no other of the job has.

    The first process goes before the others, which wait for it some seconds.
    """
    return size_of_job() == 1 or _first_to_tell()


@functools.cache
def _first_to_tell() -> bool:
    _deafen()
    with suppress(ImportError, ValueError, LostProcessError, RuntimeError):
        store, rank, _ = _rendezvous()
        for _ in range(PATIENCE_WITH_FIRST if rank else 0):
            if store.check([TOLD]):
                return False
            time.sleep(0.1)
        return store.add(TOLD, 1) == 1
    return os.environ["RANK"] == "0"  # nobody to ask


@contextmanager
def joined(config: TrainConfig) -> Iterator[Group]:
    """The group of the processes that torchrun started, this one among them; left at the end.

    A process by itself is a group of one. Raises ValueError for several processes of another
    backend than torch, for shards without torchrun, and for `anomaly` in several processes.
    """
    started, size = "RANK" in os.environ, size_of_job()
    config.require_shards()
    if config.backend != "torch" and size > 1:
        raise ValueError(
            f"backend is {config.backend}, which trains in one process; torchrun started {size}"
        )
    if config.shard and not started:
        raise ValueError("shard is set, which needs: torchrun --nproc-per-node N scripts/train.py")
    if not started or (size == 1 and not config.shard):
        yield ALONE
        return
    if config.anomaly:
        raise ValueError("anomaly is set, which needs one process, without shards")
    load_backend("torch")
    from torch import distributed

    store, rank, size = _rendezvous()
    try:
        yield Group(rank, size, store, CONNECTIONS[config.device])
    except Exception:
        first_to_tell()  # before the others see the connection break
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process of a job with an exit code, without taking the interpreter down.

    Shards keep gloo's threads alive beyond `destroy_process_group`. Where one of them lets go of
    its last tensor while the interpreter is being taken down, the process is aborted, and torchrun
    calls a run failed that is whole. Files are closed by now; what was printed is flushed here.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)


class LostProcessError(ConnectionError):
    """Another process of the group has ended, or does not answer."""


class DistributedTrainer(GPTTrainer):
    """A trainer whose batches are divided among the processes of a group.

    Takes over the model and the optimizer of `trainer`, which are the same in every process. Every
    process makes the same calls with the same batches; results are those of the whole batch. With
    `again`, each process keeps a part of weights, gradients and moments alone, and `again()` is a
    new trainer like `trainer`, to hold them all for a moment.
    """

    def __init__(
        self, trainer: GPTTrainer, group: Group, again: Callable[[], GPTTrainer] | None = None
    ) -> None:
        super().__init__(
            trainer.model, trainer.loss_fn, trainer.optimizer, trainer.max_norm,
            accumulate=trainer.accumulate, engine=trainer.engine,
        )  # fmt: skip
        self.steps, self.group, self.again = trainer.steps, group, again
        self.shard = again is not None
        if self.shard:
            self._shard()
        else:
            from torch.nn.parallel import DistributedDataParallel

            with group.exchange():
                self.exchanged = DistributedDataParallel(self.engine.module)
            self.engine = self.engine.wrapped(self.exchanged)

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # The models change nothing in place, which is what it warns of.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        state = self.optimizer.state()
        device = next(self.model.parameters()).device.type
        with self.group.exchange():
            mesh = init_device_mesh(device, (self.group.size,))
            for transformer in self.model.transformers:
                fully_shard(transformer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.engine = Engine(self.model, self.engine.precision, self.engine.compile)
        old = self.optimizer.optimizer.defaults
        self.optimizer = type(self.optimizer)(
            self.model.parameters(), self.optimizer.lr, old["betas"], old["eps"],
            old["weight_decay"],
        )  # fmt: skip
        if any(state["steps"]):
            self.optimizer.load_state(state)

    def train_step(self, tokens: np.ndarray, targets: np.ndarray) -> StepResult:
        """As `GPTTrainer.train_step`; raises LostProcessError, with the weights as they were."""
        with self.group.exchange():
            return super().train_step(tokens, targets)

    def _backward(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        total = 0.0
        parts = parts_of(self.rows(len(tokens)), self.accumulate)
        for number, part in enumerate(parts, start=1):
            count = part.stop - part.start
            if count == 0:
                part = slice(0, 1)  # takes part in the exchange, with a weight of 0
            with self._exchange(last=number == len(parts)):
                loss = self.loss_fn(self.engine(tokens[part]), targets[part])
                weight = self.weight(count, len(tokens))
                # Of the gradients the engine takes the mean over the processes.
                (loss * (weight * self.group.size)).backward()
            total += loss.item() * weight
        total = self.group.sum(total)
        if not math.isfinite(total):  # in all processes, so that none waits for the others
            raise FloatingPointError(f"loss: got {total}, needed a finite number")
        return total

    def test(
        self, dataset: CharDataset, *, on_batch: Callable[[int], None] | None = None
    ) -> tuple[np.ndarray, float]:
        """As `GPTTrainer.test`, in all processes; raises LostProcessError."""
        with self.group.exchange():  # of shards
            return super().test(dataset, on_batch=on_batch)

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this process takes."""
        return parts_of(slice(0, batch), self.group.size)[self.group.rank]

    def weight(self, rows: int, batch: int) -> float:
        """The share of so many rows in the loss of the whole batch; all rows have T tokens."""
        return rows / batch

    def _exchange(self, last: bool) -> Any:
        """Gradients are exchanged once, in the backward pass of the last part."""
        if self.shard:
            self.model.set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else self.exchanged.no_sync()

    def _first_non_finite(self, tokens: np.ndarray, targets: np.ndarray) -> str:
        return "" if self.shard else super()._first_non_finite(tokens, targets)

    def whole(self) -> GPTTrainer | None:
        """This trainer as that of one process, for files and samples; None in the others.

        All processes have to ask. Of shards it is a copy.
        """
        if not self.shard:
            return self if self.group.leads else None
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        optimizer = self.optimizer.optimizer
        with self.group.exchange():
            weights = get_model_state_dict(self.model, options=options)
            # Asked for the state of an optimizer that has none yet, it takes a step to make one.
            moments = {}
            if optimizer.state:
                moments = get_optimizer_state_dict(self.model, optimizer, options=options)
        if not self.group.leads:
            return None
        assert self.again is not None
        whole = self.again()
        set_weights(whole.model, weights)
        if state := moments.get("state"):
            names = list(named_parameters(whole.model))
            parts = {k: [state[n][k].numpy() for n in names] for k in ("exp_avg", "exp_avg_sq")}
            steps = [int(state[n]["step"]) for n in names]
            whole.optimizer.load_state({**parts, "steps": steps})
        whole.steps = self.steps
        return whole


class Follower:
    """A run in the processes that write nothing: the same steps, exchanges and validations.

    It makes the calls of `training_run.Run` in the same order, since all processes have to.
    """

    def __init__(
        self, config: TrainConfig, dataset: CharDataset, trainer: DistributedTrainer, total: int,
    ) -> None:  # fmt: skip
        self.config, self.dataset, self.trainer, self.total = config, dataset, trainer, total
        self.stop = StopBetweenSteps()
        self.saved: int | None = None
        if config.resume is not None:
            self.saved = trainer.steps
        self.save()

    def finish(self) -> int:
        """Take the steps that are left; returns the exit code."""
        config, trainer = self.config, self.trainer
        try:
            if config.resume is not None and config.point(trainer.steps, self.total) == VALIDATION:
                self.validate()
            trainer.train(
                self.dataset, config.epochs, config.scheduler(self.total), start=trainer.steps,
                max_steps=self.total, on_step=self.after_step, windows_seed=config.windows_seed,
            )  # fmt: skip
            self.validate()
            trainer.whole()  # for the sample
        except Stop as signal_seen:
            self.save()
            trainer.group.meet()  # the first one has written it: torchrun ends it after this one
            return 128 + signal_seen.number
        except LostProcessError as error:
            goes_on = f"; go on from the last checkpoint with --resume {config.run_folder}"
            raise LostProcessError(f"{error}{goes_on}") from error
        return 0

    def after_step(self, step: int, _: object) -> None:
        point = self.config.point(step, self.total)
        if point == VALIDATION:
            self.validate()
        elif point == CHECKPOINT:
            self.save()
        agreed(self.stop, self.trainer.group)

    def validate(self) -> None:
        self.save()
        self.trainer.test(self.dataset)

    def save(self) -> None:
        if self.saved != self.trainer.steps:
            self.trainer.whole()
            self.saved = self.trainer.steps


def agreed(stop: StopBetweenSteps, group: Group) -> None:
    """Raise Stop in all processes where one of them has received a signal."""
    received = group.largest(stop.received or 0)
    if received:
        raise Stop(received)
