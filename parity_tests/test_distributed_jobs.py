"""Jobs under torchrun from start to end, by signals and kills too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from gpt_parity.backends import build_model
from gpt_parity.checkpoint import Checkpoint, load_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset
from gpt_parity.oracle import processes
from gpt_parity.oracle.compare import compare
from gpt_parity.oracle.lockstep import Setting, Spread, State
from gpt_parity.weights import get_weights
from parity_tests.reliability.jobs import CHECKOUT, ERROR, SIZES, TEXT, Job, killed_among_others
from parity_tests.reliability.jobs import saved_step as saved

pytestmark = [
    pytest.mark.reference("other backend"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="run on Linux"),
]

TOTAL = 12
# Which processes come to the end of the interpreter.
SAID_AT_THE_END = """
import atexit, os, pathlib
atexit.register(pathlib.Path(f"rank-{os.environ.get('RANK', 'none')}").touch)
"""
FLAGS = [
    "--data", "text.txt", *SIZES, "--backend", "torch", "--dtype", "float64", "--batch-size", "3",
    "--warmup", "3", "--sample-tokens", "20", "--save-every", "3", "--keep", "9", "--log-every",
    "4",
]  # fmt: skip


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
    (run.parent / "sitecustomize.py").write_text(SAID_AT_THE_END)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(run.parent))
        job = Job(3, run.parent, "--resume", str(earlier), "--shard", "--accumulate", "1")
    with job:
        code, _, error = job.end()
    assert code == 0, error
    return earlier.parent, error


def test_no_interpreter_is_taken_down_while_threads_of_shards_may_live(
    in_three_shards: tuple[Path, str],
) -> None:
    """Where its threads get no time, such a process aborts, after all its work."""
    taken_down = [path.name for path in in_three_shards[0].parent.glob("rank-*")]
    assert taken_down == ["rank-none"]  # torchrun itself


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


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_loses_nothing(tmp_path: Path) -> None:
    begin = time.perf_counter()
    ends = killed_among_others(2, 7, tmp_path)
    assert len(ends.seconds) == 2 and sum(ends.seconds) < time.perf_counter() - begin
