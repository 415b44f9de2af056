"""The whole suite again and again, each time with other random examples: does it ever fail?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App
from rich.progress import track

from gpt_parity.cli import run_app
from gpt_parity.record import record
from gpt_parity.schedule import require_integer

CHECKOUT = Path(__file__).resolve().parents[1]


def repeat_suite(runs: int = 10, seed: int = 1, *, write: bool = False) -> int:
    """Run the suite with seeds that follow each other, on one and on two threads in turn.

    Exit 1 if a run fails; its output is printed.

    Example: python scripts/repeat_suite.py 10 --write

    Parameters
    ----------
    runs
        Number of runs.
    seed
        Hypothesis seed of the first run.
    write
        Record the result in docs/power.md.
    """
    require_integer("runs", runs, 1)
    require_integer("seed", seed, 0)
    lines = ["| seed | threads | result |", "|---|---|---|"]
    failed = 0
    for k in track(range(runs), description="runs"):
        threads = 1 + k % 2
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
             "--hypothesis-profile=seeded", f"--hypothesis-seed={seed + k}"],
            cwd=CHECKOUT, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            capture_output=True, encoding="utf-8",
        )  # fmt: skip
        last = re.sub(r" in .*", "", result.stdout.strip().splitlines()[-1].strip("= "))
        lines.append(f"| {seed + k} | {threads} | {last} |")
        if result.returncode != 0:
            failed += 1
            print(result.stdout)
    print("\n".join(lines))
    if write:
        record("The suite with other random examples", lines)
    return 1 if failed else 0


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(repeat_suite)
    sys.exit(run_app(app))
