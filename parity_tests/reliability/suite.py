"""The whole suite under other circumstances: examples, orders, hash seeds, threads, workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Circumstances:
    """What differs from run to run; every number follows from `seed`."""

    seed: int

    @property
    def hash_seed(self) -> int:
        return self.seed % 2

    @property
    def threads(self) -> int:
        return 1 + self.seed // 2 % 2

    @property
    def workers(self) -> int:
        return 2 - self.seed % 2

    def command(self, *tests: str) -> list[str]:
        """pytest with random examples in random order, every warning an error."""
        workers = ["-n", str(self.workers)] if self.workers > 1 else []
        return [
            sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider",
            "--hypothesis-profile=seeded", f"--hypothesis-seed={self.seed}", "--random-order",
            f"--random-order-seed={self.seed}", *workers, *tests,
        ]  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads), "PYTHONHASHSEED": str(self.hash_seed)}

    def row(self, result: str) -> str:
        return f"| {self.seed} | {self.hash_seed} | {self.threads} | {self.workers} | {result} |"


HEADER = [
    "Every run under `python -W error`, with other random examples and in random order.", "",
    "| seed of examples and order | PYTHONHASHSEED | threads | workers | result |",
    "|---|---|---|---|---|",
]  # fmt: skip


def run_suite(circumstances: Circumstances, *tests: str) -> tuple[bool, str, str]:
    """Run the suite, or some of its tests; returns whether it passed, its last line, its output."""
    done = subprocess.run(
        circumstances.command(*tests), cwd=CHECKOUT,
        env={**os.environ, **circumstances.environment}, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    last = re.sub(r" in .*", "", lines[-1].strip("= ")) if lines else "no output"
    return done.returncode == 0, last, done.stdout + done.stderr
