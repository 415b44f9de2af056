"""Processes killed at random moments, while saving and while training, and what they leave."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.checkpoint import TrainingRun, load_checkpoint, save_checkpoint
from gpt_parity.config import TrainConfig
from gpt_parity.run_folder import Checkpoints, earlier_checkpoints
from gpt_parity.training import new_trainer

CHECKOUT = Path(__file__).resolve().parents[2]
VOCABULARY = "abcde"
RECIPE = TrainConfig(context_size=8, embedding_size=16, blocks=2)
KEEP = 3
LONGEST_LIFE = 0.03  # seconds, some saves long


@dataclass
class Kills:
    """What happened to processes that were killed while they saved."""

    kills: int = 0
    half_written: int = 0
    """Kills that left a file under another name, cut off in the middle or not yet renamed."""
    saves: int = 0


def killed_while_saving(count: int, seed: int) -> Kills:
    """Kill `count` processes in the middle of saving checkpoints, and read what is there then.

    Runs in a process of its own, without PyTorch, whose forks are the victims. Raises
    AssertionError at the first checkpoint that was lost or is not what was saved.
    """
    done = subprocess.run(
        [sys.executable, "-m", "parity_tests.reliability.kills", str(count), str(seed)],
        cwd=CHECKOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Kills(*map(int, done.stdout.split()))


def _kill_while_saving(count: int, seed: int) -> Kills:
    draw, result = random.Random(seed), Kills()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = 0
        for _ in range(count):
            last = _one_victim(folder, start, draw.uniform(0.0, LONGEST_LIFE), result)
            found = load_checkpoint(folder).step
            assert found in (last, last + 1), f"step {last} was saved, {found} is there"
            earlier = [path for _, path in earlier_checkpoints(folder)]
            for path in [folder / "checkpoint.safetensors", *earlier]:
                assert _is_whole(path), f"{path.name} is not what was saved"
            remains = list(folder.glob(".*.part"))
            result.half_written += bool(remains)
            for path in remains:
                path.unlink()
            result.saves += found - start
            start = found
    return result


def _one_victim(folder: Path, start: int, life: float, result: Kills) -> int:
    """Start, let live and kill one process; returns the last step that it reported as saved."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        _save_for_ever(folder, start, writer)
    os.close(writer)
    last = int(os.read(reader, 9))  # it has begun
    time.sleep(life)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    result.kills += 1
    while select.select([reader], [], [], 0)[0] and (report := os.read(reader, 9)):
        last = int(report)
    os.close(reader)
    return last


def _save_for_ever(folder: Path, start: int, writer: int) -> None:
    """Save step after step, and report each; every number in a file follows from its step."""
    trainer = new_trainer(RECIPE, RECIPE.model_config(len(VOCABULARY)))
    checkpoints = Checkpoints(folder, KEEP, start or None)
    corpus = {"name": "none", "path": None, "characters": 5, "sha256": ""}
    step = start
    while True:
        step += 1
        trainer.optimizer.buffer.data[...] = step
        trainer.optimizer.exp_avg[...] = step / 2
        sampler = np.random.RandomState(step)
        run = TrainingRun(RECIPE.recipe, corpus, [], 10**9, 0, step, 0.0, 0, 0, sampler)

        def write(path: Path, step: int = step, run: TrainingRun = run) -> None:
            save_checkpoint(
                path, trainer.model, config=RECIPE.model_config(len(VOCABULARY)),
                vocabulary=VOCABULARY, step=step, optimizer=trainer.optimizer, run=run,
            )  # fmt: skip

        checkpoints.save(step, write)
        os.write(writer, f"{step:9d}".encode())


def _is_whole(path: Path) -> bool:
    """Whether all of a file is of one step."""
    saved = load_checkpoint(path)
    same = all((array == saved.step).all() for array in saved.weights.values())
    same &= all((a == saved.step / 2).all() for a in saved.optimizer["exp_avg"].values())
    state = np.random.RandomState(saved.step).get_state()[1]
    return bool(same and (saved.run.sample.get_state()[1] == state).all())


def killed_while_training(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill one training run again and again, resume it each time, and let it end at last.

    Raises AssertionError unless the end is that of the unbroken run, to the bit. Returns the
    steps, and as "kills" those that hit before the last one was saved.
    """
    text = folder / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 100)
    flags = [
        "--context-size", "8", "--embedding-size", "8", "--blocks", "1", "--epochs", str(4 + kills),
        "--eval-every", "250", "--save-every", "10", "--log-every", "7", "--sample-tokens", "50",
    ]  # fmt: skip
    draw = random.Random(seed)

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "gpt_parity", "train", *arguments], cwd=folder,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    first = ["--data", "text.txt", *flags]
    whole = start(*first, "--out", "unbroken")
    _, error = whole.communicate()
    assert whole.returncode == 0, error
    steps = []
    process = start(*first, "--out", "run")
    for _ in range(kills):
        assert process.stdout is not None
        while b"steps" not in process.stdout.readline():  # it trains from here on
            assert process.poll() is None or process.returncode == 0, process.communicate()
            if process.poll() is not None:
                break
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            steps.append(load_checkpoint(folder / "run").step)
        process = start("--resume", "run")
    _, error = process.communicate()
    assert process.returncode == 0, error
    ends = [load_checkpoint(folder / name) for name in ("unbroken", "run")]
    for kind, arrays in (("weights", ends[0].weights), *ends[0].optimizer.items()):
        others = ends[1].weights if kind == "weights" else ends[1].optimizer[kind]
        for name, array in arrays.items():
            assert np.asarray(array).tobytes() == np.asarray(others[name]).tobytes(), (kind, name)
    assert _metrics(folder / "unbroken") == _metrics(folder / "run")
    samples = {(folder / name / "sample.txt").read_bytes() for name in ("unbroken", "run")}
    assert len(samples) == 1
    total = ends[1].step
    return {"kills": sum(step < total for step in steps), "steps": total}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run without what the clock decides."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in m.items() if k != "tokens_per_second"} for m in lines]


if __name__ == "__main__":
    print(*asdict(_kill_while_saving(int(sys.argv[1]), int(sys.argv[2]))).values())
