"""Batches in parts, training in several processes, and what the processes tell each other."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gpt_parity import distributed
from gpt_parity.backends import build_model
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.config import TrainConfig
from gpt_parity.distributed import DistributedTrainer, Group, joined
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle import lockstep, processes
from gpt_parity.oracle.lockstep import Outcome, Runner, Setting, judge_step
from gpt_parity.oracle.processes import SLIPS, STEPS, Trial, row_counts, several_processes
from gpt_parity.oracle.rounding import FLOAT64
from gpt_parity.oracle.slips import VISIBLE
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import GPTTrainer, parts_of
from gpt_parity.weights import get_weights
from parity_tests.distributed_bugs import BUGS
from parity_tests.reliability.jobs import CHECKOUT, ERROR
from torch_impl import AdamWOptimizer

pytestmark = [
    pytest.mark.reference("other backend"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="run on Linux"),
]

CONFIG = GPTConfig(vocab_size=7, context_size=4, embedding_size=6, blocks=1)
FEW = 8  # steps


def setting(rows: int, steps: int = STEPS) -> Setting:
    """A small model on random text, at a rate that makes the weights move."""
    rng = np.random.default_rng(rows)
    shape = (rows, CONFIG.context_size)
    batches = [(rng.integers(0, 7, shape), rng.integers(0, 7, shape)) for _ in range(steps)]
    weights = get_weights(build_model("numpy", CONFIG, seed=1, dtype="float32"))
    scheduler = WarmupCosineScheduler(1e-2, 50, 5, 1e-3)
    return Setting(
        CONFIG, TrainConfig(), {n: w.astype(np.float64) for n, w in weights.items()}, batches,
        [scheduler(t) for t in range(steps)],
    )  # fmt: skip


def assert_fine(outcome: Outcome) -> None:
    for who, quantities in outcome.worst.items():
        for quantity, (judgement, step) in quantities.items():
            assert judgement.ok, f"{who} {quantity} at step {step}: {judgement}"
        assert quantities["weights"][0].ratio > 0.0, f"{who}: nothing was compared"


# --- a batch in parts -----------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60))
def test_parts_follow_each_other_and_differ_by_one_row(start: int, size: int, count: int) -> None:
    parts = parts_of(slice(start, start + size), count)
    assert [row for part in parts for row in range(start + size)[part]] == list(
        range(start, start + size)
    )
    sizes = [part.stop - part.start for part in parts]
    assert len(sizes) == count and max(sizes) - min(sizes) <= 1


# Of five rows: uneven, one each, more parts than rows.
@pytest.mark.parametrize("parts", [2, 5, 7])
def test_float64_training_in_parts_is_that_of_whole_batches(parts: int) -> None:
    chosen = setting(rows=5)
    outcome = Outcome("float64", STEPS)
    reference = processes._reference(chosen)
    for backend in BACKENDS:
        runner = Runner(backend, "float64", chosen)
        runner.trainer.accumulate = parts
        for t, (batch, rate) in enumerate(zip(chosen.batches, chosen.rates, strict=True)):
            state = runner.state(runner.step(batch, rate))
            outcome.add(backend, t, judge_step(state, *reference[t], FLOAT64))
    assert_fine(outcome)


@pytest.mark.parametrize("parts", [2, 5, 7])
def test_a_float32_step_in_parts_is_that_of_the_whole_batch(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InParts(Runner):
        def __init__(self, backend: str, dtype: str, setting: Setting) -> None:
            super().__init__(backend, dtype, setting)
            if dtype == "float32":  # the candidates
                self.trainer.accumulate = parts

    monkeypatch.setattr(lockstep, "Runner", InParts)
    outcome = lockstep.common_state_float32(setting(rows=5))
    assert set(outcome.worst) == set(BACKENDS)
    assert_fine(outcome)


def test_parts_that_count_alike_whatever_their_rows_would_be_seen() -> None:
    """The mean of the parts' means, in place of the mean over the batch."""
    chosen = setting(rows=5, steps=1)
    ((clean, tolerances),) = processes._reference(chosen)
    runner = Runner("numpy", "float64", chosen)
    (tokens, targets), rate = chosen.batches[0], chosen.rates[0]
    trainer, total = runner.trainer, 0.0

    def mean_of_means(tokens: np.ndarray, targets: np.ndarray) -> float:
        total = 0.0
        for part in parts_of(slice(0, 5), 2):
            loss = trainer.loss_fn(trainer.model(tokens[part]), targets[part]) * 0.5
            loss.backward()
            total += loss.item()
        return total

    trainer._backward = mean_of_means
    found = judge_step(runner.state(runner.step((tokens, targets), rate)), clean, tolerances,
                       FLOAT64)  # fmt: skip
    wrong = {j.kind for j in found if j.ratio > VISIBLE}
    assert {"loss", "gradient norm", "exp_avg"} <= wrong and total == 0.0


# --- several processes, step by step --------------------------------------------------------------


@pytest.fixture(scope="module")
def in_two() -> tuple[Outcome, list[Any]]:
    return several_processes([setting(rows, FEW) for rows in row_counts(2)], 2)


def test_two_processes_train_like_one(in_two: tuple[Outcome, list[Any]]) -> None:
    outcome, _ = in_two
    assert len(outcome.worst) == 12  # three sizes of batches, in four ways
    assert_fine(outcome)


@pytest.mark.parametrize("number", range(len(SLIPS)), ids=[slip.__name__ for slip in SLIPS])
def test_each_slip_stands_out(number: int, in_two: tuple[Outcome, list[Any]]) -> None:
    sighting = in_two[1][number]
    assert sighting.description == SLIPS[number].description and sighting.ok, sighting


@pytest.mark.slow
def test_three_processes_train_like_one() -> None:
    outcome, sightings = several_processes([setting(rows, FEW) for rows in row_counts(3)], 3)
    assert_fine(outcome)
    assert len(sightings) == len(SLIPS) and all(sighting.ok for sighting in sightings)


@pytest.fixture(scope="module")
def with_bugs() -> dict[type, float]:
    """By how many tolerances the worst array is off, by bug."""
    chosen = replace(setting(3, FEW), recipe=TrainConfig(max_norm=processes.MAX_NORM))
    reference = processes._reference(chosen)
    trials = [Trial(0, parts, shard, bug) for bug, (parts, shard) in BUGS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHECKOUT))  # where the processes find the bugs
        runs = list(processes._started([chosen], trials, 2))
    return {
        trial.trainer: max(
            judgement.ratio
            for state, (clean, tolerances) in zip(run, reference, strict=True)
            for judgement in judge_step(state, clean, tolerances, FLOAT64)
        )
        for trial, run in zip(trials, runs, strict=True)
    }


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_stands_out(bug: type, with_bugs: dict[type, float]) -> None:
    assert with_bugs[bug] > VISIBLE


def test_a_process_that_ends_early_is_told_and_not_waited_for() -> None:
    """A trial of a setting that is not there: both processes fail."""
    with pytest.raises(ChildProcessError, match="one of the 2 processes ended before"):
        list(processes._started([], [Trial(0)], 2))


# --- what the processes tell each other -----------------------------------------------------------


class Notes:
    """A store of one process, which others have written to before."""

    def __init__(self, **found: Any) -> None:
        self.found = found

    def set(self, key: str, value: str) -> None:
        self.found[key] = value

    def get(self, key: str) -> bytes:
        return self.found[key].encode()

    def add(self, key: str, count: int) -> int:
        self.found[key] = self.found.get(key, 0) + count
        return self.found[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.found for key in keys)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    """This process as that of rank 1, without a connection."""
    notes = Notes()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "_rendezvous", lambda: (notes, 1, 2))
    monkeypatch.setattr(distributed, "PATIENCE_WITH_FIRST", 3)
    distributed._first_to_tell.cache_clear()
    before = signal.getsignal(signal.SIGTERM)
    yield notes
    signal.signal(signal.SIGTERM, before)
    distributed._first_to_tell.cache_clear()


def test_a_process_that_alone_has_an_error_tells_it(
    second_of_two: Notes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "nothere"]) == 2
    assert capsys.readouterr().err.startswith(f"{ERROR}: nothere: cannot be read")


def test_what_the_first_process_has_told_is_not_told_again(
    second_of_two: Notes, capsys: pytest.CaptureFixture[str]
) -> None:
    second_of_two.add(distributed.TOLD, 1)
    assert main(["train", "--resume", "nothere"]) == 2
    assert capsys.readouterr().err == ""


def test_who_waits_for_the_start_is_not_left_waiting_by_an_error() -> None:
    notes = Notes(**{distributed.TOLD: 1})
    with pytest.raises(distributed.LostProcessError, match="cannot start"):
        Group(0, 2, notes).start({})
    with pytest.raises(distributed.LostProcessError, match="cannot start"):
        Group(1, 2, Notes(**{distributed.TOLD: 1})).start({})


def test_processes_with_other_texts_do_not_start() -> None:
    notes = Notes(**{distributed.READY: 1, distributed.JOB: '{"text": "a", "step": 1}'})
    with pytest.raises(ValueError, match="process 1 has another text than process 0"):
        Group(1, 2, notes).start({"text": "b", "step": 1})
    assert notes.found[distributed.READY] == 1  # so that the first one does not go on


CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51075"


def raising(message: str) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise RuntimeError(message)

    return call


@pytest.fixture
def sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("call", ["train_step", "test"])
def test_a_lost_process_is_found_wherever_they_talk(
    call: str, monkeypatch: pytest.MonkeyPatch, sigterm_as_before: None
) -> None:
    trainer = object.__new__(DistributedTrainer)
    trainer.group = Group(0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(GPTTrainer, call, raising(CLOSED))
        with pytest.raises(distributed.LostProcessError, match="one of the 2 processes has ended"):
            getattr(trainer, call)(*[None] * (2 if call == "train_step" else 1))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # torchrun's, while this saves
        patch.setattr(GPTTrainer, call, raising("shapes differ"))
        with pytest.raises(RuntimeError, match="shapes differ"):
            getattr(trainer, call)(*[None] * (2 if call == "train_step" else 1))


def test_a_lost_process_is_no_gradient_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = AdamWOptimizer([parameter])
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", raising(CLOSED))
    with pytest.raises(RuntimeError, match="Connection closed"):
        optimizer.clip_grad_norm(1.0)


def test_numpy_under_torchrun_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun started 2"), joined(TrainConfig()):
        raise AssertionError("joined")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined(TrainConfig()) as group:
        assert group is distributed.ALONE
