"""Batches in parts, training in several processes, and jobs under torchrun from start to end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gpt_parity import distributed
from gpt_parity.backends import build_model
from gpt_parity.checkpoint import Checkpoint, load_checkpoint
from gpt_parity.cli import main
from gpt_parity.config import BACKENDS, GPTConfig, TrainConfig
from gpt_parity.corpus import CharDataset
from gpt_parity.distributed import DistributedTrainer, Group, joined
from gpt_parity.oracle import lockstep, processes
from gpt_parity.oracle.compare import compare
from gpt_parity.oracle.lockstep import Outcome, Runner, Setting, Spread, State, judge_step
from gpt_parity.oracle.processes import SLIPS, STEPS, Trial, row_counts, several_processes
from gpt_parity.oracle.rounding import FLOAT64
from gpt_parity.oracle.slips import VISIBLE
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import GPTTrainer, parts_of
from gpt_parity.weights import get_weights
from parity_tests.distributed_bugs import BUGS
from parity_tests.reliability.jobs import CHECKOUT, ERROR, SIZES, TEXT, Job, killed_among_others
from parity_tests.reliability.jobs import saved_step as saved
from torch_impl import AdamWOptimizer

pytestmark = [
    pytest.mark.reference("other backend"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="run on Linux"),
]

CONFIG = GPTConfig(vocab_size=7, context_size=4, embedding_size=6, blocks=1)
FEW = 8  # steps
TOTAL = 12
FLAGS = [
    "--data", "text.txt", *SIZES, "--backend", "torch", "--dtype", "float64", "--batch-size", "3",
    "--warmup", "3", "--sample-tokens", "20", "--save-every", "3", "--keep", "9", "--log-every",
    "4",
]  # fmt: skip


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


# --- jobs under torchrun --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def reference(place: Path) -> tuple[State, Spread]:
    """The end of the run in the NumPy twin, and what a run may differ from it."""
    dataset = CharDataset(TEXT, context_size=8, batch_size=3)
    recipe = TrainConfig(context_size=8, embedding_size=8, blocks=1, batch_size=3, warmup=3)
    config = recipe.model_config(dataset.vocab_size)
    rates = recipe.scheduler(TOTAL)
    return processes._reference(Setting(
        config, recipe, get_weights(build_model("numpy", config, recipe.seed, "float64")),
        [dataset.batch("train", t) for t in range(TOTAL)], [rates(t) for t in range(TOTAL)],
    ))[-1]  # fmt: skip


@pytest.fixture(scope="module")
def in_parallel(place: Path) -> tuple[Path, str]:
    """A run in two processes with uneven rows, each in parts, and what it said on stderr."""
    with Job(2, place, *FLAGS, "--max-steps", str(TOTAL), "--eval-every", "6", "--accumulate", "2",
             "--threads", "2", "--out", "parallel") as job:  # fmt: skip
        code, out, error = job.end()
    assert code == 0, error
    assert out.count("validation loss") == 3 and out.count("test loss") == 1, out
    return place / "parallel", error


def assert_is_the_run(checkpoint: Checkpoint, reference: tuple[State, Spread]) -> None:
    """All weights and moments within the tolerance of Monte Carlo arithmetic."""
    clean, tolerances = reference
    found = {f"weights {n}": w for n, w in checkpoint.weights.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        found |= {f"{kind} {n}": array for n, array in checkpoint.optimizer[kind].items()}
    assert set(found) == set(clean) - {"loss", "gradient norm", "learning rate"}
    for key, array in found.items():
        kind, _, name = key.partition(" ")
        judgement = compare(name, kind, array, clean[key], tolerances[key], "float64")
        assert judgement.ok, judgement
    assert checkpoint.step == TOTAL
    assert set(checkpoint.optimizer["steps"].values()) == {TOTAL}


def copied(run: Path, name: str, step: int) -> Path:
    """The run as it was at an earlier step."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    return copy / f"checkpoint-{step}.safetensors"


def test_two_processes_end_where_one_ends(
    in_parallel: tuple[Path, str], reference: tuple[State, Spread]
) -> None:
    run, error = in_parallel
    checkpoint = load_checkpoint(run)
    assert_is_the_run(checkpoint, reference)
    assert checkpoint.run.history[0]["processes"] == 2
    assert checkpoint.run.recipe["threads"] == 2  # of the job, and not of each process
    assert "gpt-parity" not in error and "Warning" not in error


def test_names_in_the_file_are_those_of_one_process(in_parallel: tuple[Path, str]) -> None:
    checkpoint = load_checkpoint(in_parallel[0])
    names = set(get_weights(build_model("torch", checkpoint.config)))
    assert set(checkpoint.weights) == set(checkpoint.optimizer["exp_avg"]) == names
    assert not any("module." in name or "_orig_mod" in name for name in names)


def test_only_the_first_process_writes(in_parallel: tuple[Path, str]) -> None:
    run, _ = in_parallel
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(x["event"], x["step"]) for x in lines]
    assert steps == [
        ("train", 4), ("validation", 6), ("train", 8), ("train", 12), ("validation", 12),
    ]  # fmt: skip
    assert {path.name for path in run.iterdir()} - {"loss.png"} == {
        "config.json", "metrics.jsonl", "checkpoint.safetensors", "sample.txt",
        *(f"checkpoint-{step}.safetensors" for step in (0, 3, 6, 9)),
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_of_two_processes_goes_on_in_one(
    backend: str, in_parallel: tuple[Path, str], reference: tuple[State, Spread],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, _ = in_parallel
    monkeypatch.chdir(run.parent)
    earlier = copied(run, f"one-{backend}", 6)
    assert main(["train", "--resume", str(earlier), "--backend", backend]) == 0
    assert capsys.readouterr().err == ""
    assert_is_the_run(load_checkpoint(earlier.parent), reference)


@pytest.fixture(scope="module")
def in_three_shards(in_parallel: tuple[Path, str]) -> tuple[Path, str]:
    """The run of two processes, gone on with in three from the validation on."""
    run, _ = in_parallel
    earlier = copied(run, "sharded", 6)
    with Job(3, run.parent, "--resume", str(earlier), "--shard", "--accumulate", "1") as job:
        code, _, error = job.end()
    assert code == 0, error
    return earlier.parent, error


def test_it_goes_on_in_three_with_shards(
    in_three_shards: tuple[Path, str], reference: tuple[State, Spread]
) -> None:
    run, error = in_three_shards
    checkpoint = load_checkpoint(run)
    assert_is_the_run(checkpoint, reference)
    assert [entry.get("processes") for entry in checkpoint.run.history] == [2, 3]
    assert "gpt-parity" not in error and "Warning" not in error


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sharded_run_goes_on_in_one(
    backend: str, in_three_shards: tuple[Path, str], reference: tuple[State, Spread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, _ = in_three_shards
    monkeypatch.chdir(run.parent)
    earlier = copied(run, f"whole-{backend}", 9)
    assert main(["train", "--resume", str(earlier), "--backend", backend]) == 0
    assert_is_the_run(load_checkpoint(earlier.parent), reference)


def test_a_sharded_run_generates(
    in_three_shards: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--checkpoint", str(in_three_shards[0]), "--prompt", "To"]) == 0
    assert len(capsys.readouterr().out) == len("To") + 200 + len("\n")


LONG = [*FLAGS, "--windows", "random", "--max-steps", "100000"]


@pytest.mark.parametrize(
    ("shard", "to"),
    [
        (True, "torchrun"),
        (False, "first"),
        pytest.param(False, "other", marks=pytest.mark.slow),
    ],
)
def test_sigterm_saves_and_ends_all_processes(shard: bool, to: str, place: Path) -> None:
    out = f"stopped-{to}"
    with Job(2, place, *LONG, *(["--shard"] if shard else []), "--out", out) as job:
        job.wait_for(lambda: saved(place / out) > 0)
        workers = job.workers()
        pid = {"torchrun": job.process.pid, "first": workers[0], "other": workers[1]}[to]
        os.kill(pid, signal.SIGTERM)
        code, _, error = job.end(timeout=60.0)
    assert code != 0 and ERROR not in error, error
    (line,) = [x for x in error.splitlines() if x.startswith("gpt-parity")]
    step = load_checkpoint(place / out).step
    assert f"stopped by SIGTERM after step {step} of 100000; go on with: torchrun" in line
    assert f"--nproc-per-node 2 {CHECKOUT / 'scripts' / 'train.py'} --resume {out}" in line
    assert line.endswith(" --shard") == shard
    if to != "torchrun":  # which names first the one that ended first, and may end the other
        assert "exitcode  : 143" in error.partition("Root Cause")[2], error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "nothere"], "nothere: cannot be read, No such file or directory"),
        (["--backend", "numpy"],
         "backend is numpy, which trains in one process; torchrun started 2"),
        pytest.param(["--epochs", "0"], "epochs is 0", marks=pytest.mark.slow),
        pytest.param(["--data", "nothere.txt", "--backend", "torch"], "nothere.txt",
                     marks=pytest.mark.slow),
        pytest.param(["--anomaly", "--backend", "torch"], "anomaly is set",
                     marks=pytest.mark.slow),
    ],
    ids=lambda x: x[0].strip("-") if isinstance(x, list) else "",
)  # fmt: skip
def test_a_mistake_of_the_user_is_one_line(flags: list[str], message: str, place: Path) -> None:
    with Job(2, place, *flags) as job:
        code, _, error = job.end()
    said = [line for line in error.splitlines() if "gpt-parity" in line]
    assert code != 0 and len(said) == 1 and said[0].startswith(f"{ERROR}: {message}"), error
    assert not (place / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--shard"]], ids=["parallel", "sharded"])
def test_what_the_first_process_cannot_write_ends_all(flags: list[str], place: Path) -> None:
    out = "moved-" + "".join(flags)
    with Job(2, place, *LONG, *flags, "--out", out) as job:
        job.wait_for(lambda: saved(place / out) > 0)
        (place / out).rename(place / f"{out}-away")
        code, _, error = job.end(timeout=60.0)
    said = [line for line in error.splitlines() if "gpt-parity" in line]
    assert code != 0 and len(said) == 1 and said[0].startswith(f"{ERROR}: {out}"), error
    assert "exitcode  : 2" in error and load_checkpoint(place / f"{out}-away").step > 0


def test_shards_need_torchrun(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main(["train", *FLAGS, "--shard"]) == 2
    assert capsys.readouterr().err == (
        "gpt-parity: error: shard is set, which needs: torchrun --nproc-per-node N "
        "scripts/train.py\n"
    )
    assert main(["train", "--shard"]) == 2
    assert capsys.readouterr().err == (
        "gpt-parity: error: shard is set, which only --backend torch can\n"
    )
    assert not Path("runs").exists()


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


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_loses_nothing(tmp_path: Path) -> None:
    begin = time.perf_counter()
    ends = killed_among_others(2, 7, tmp_path)
    assert len(ends.seconds) == 2 and sum(ends.seconds) < time.perf_counter() - begin
