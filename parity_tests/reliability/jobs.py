"""Jobs of several processes under torchrun, and what is left when one of them is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpt_parity.checkpoint import CHECKPOINT_NAME, load_checkpoint

CHECKOUT = Path(__file__).resolve().parents[2]
TRAIN = CHECKOUT / "scripts" / "train.py"
TEXT = "To be, or not to be, that is the question.\n" * 100
SIZES = ["--context-size", "8", "--embedding-size", "8", "--blocks", "1"]
ERROR = "gpt-parity: error"
LONGEST_END = 60.0  # seconds from the kill to the end of the job
LONGEST_START = 120.0
PROC = Path("/proc")


class Job:
    """`train.py` with some flags in so many processes, or by itself; a block that ends it."""

    def __init__(self, processes: int, folder: Path, *flags: str) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        started = [*torchrun, str(processes)] if processes > 1 else []
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *started, str(TRAIN), *flags], cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.workers().values(), self.process.pid]:
            with suppress(ProcessLookupError):
                if self.process.poll() is None:
                    os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def workers(self) -> dict[int, int]:
        """The process of each rank that torchrun has started and that is still there."""
        found = {}
        for folder in PROC.glob("[0-9]*"):
            with suppress(OSError, ValueError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != self.process.pid:
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
                rank = next(v for v in variables if v.startswith(b"RANK="))
                found[int(rank.removeprefix(b"RANK="))] = int(folder.name)
        return found

    def end(self, timeout: float = LONGEST_START) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, stdout and stderr."""
        try:
            out, error = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job goes on after {timeout:.0f} seconds") from None
        return self.process.returncode, out, error

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until it has happened; AssertionError where the job ends before."""
        for _ in range(int(LONGEST_START / 0.05)):
            if happened():
                return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError(f"nothing happened in {LONGEST_START:.0f} seconds")


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint, -1 where there is none."""
    return load_checkpoint(run).step if (run / CHECKPOINT_NAME).exists() else -1


@dataclass
class Ends:
    """How jobs ended of which a process was killed."""

    seconds: list[float] = field(default_factory=list)
    """From each kill to the end of its job."""
    steps: int = 0
    """Of the run that they all went on with."""


def killed_among_others(kills: int, seed: int, folder: Path) -> Ends:
    """Kill one of two processes of a job at a random moment of training, resume, and so on.

    Data parallel and sharded, the first process and the other one in turns. Raises AssertionError
    where a job does not end in time, says less or more than one line of error, leaves no whole
    checkpoint, or does not come beyond that of the job before.
    """
    (folder / "text.txt").write_text(TEXT)
    flags = [
        "--data", "text.txt", *SIZES, "--backend", "torch", "--windows", "random", "--max-steps",
        "1000000", "--save-every", "10", "--eval-every", "150", "--out", "run",
    ]  # fmt: skip
    draw, result, run = random.Random(seed), Ends(), folder / "run"
    for kill in range(kills):
        shard, victim = bool(kill % 2), kill // 2 % 2
        more = ["--shard"] if shard else []
        with Job(2, folder, *flags, *more) as job:
            before = result.steps
            job.wait_for(lambda before=before: saved_step(run) > before)
            time.sleep(draw.uniform(0.0, 1.0))
            os.kill(job.workers()[victim], signal.SIGKILL)
            begin = time.perf_counter()
            code, _, error = job.end(LONGEST_END)
            result.seconds.append(time.perf_counter() - begin)
        way = f"kill {kill}, process {victim}{', sharded' if shard else ''}"
        assert code != 0, f"{way}: the job ended well"
        assert error.count(ERROR) == 1, f"{way}: {error}"
        assert "--resume" in next(x for x in error.splitlines() if ERROR in x), f"{way}: {error}"
        result.steps = saved_step(run)
        assert result.steps > before, f"{way}: step {before} was saved, {result.steps} is there"
        flags = ["--resume", "run"]
    with Job(1, folder, "--resume", "run", "--backend", "numpy") as alone:
        alone.wait_for(lambda: saved_step(run) > result.steps)
        alone.process.send_signal(signal.SIGTERM)
        code, _, error = alone.end()
    assert code == 128 + signal.SIGTERM, error
    return result
