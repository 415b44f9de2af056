"""Training in one and in several processes on this machine: tokens per second, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App

from gpt_parity.cli import run_app
from gpt_parity.record import DOCS, record
from gpt_parity.schedule import require_integer

TRAIN = Path(__file__).with_name("train.py")
HEADING = "Measured on one machine"
WAYS = {"one process": (1, ()), "data parallel": (0, ()), "sharded": (0, ("--shard",))}
SIZES = {
    "baby": ("--model", "gpt2", "--preset", "baby"),
    "medium": ("--context-size", "256", "--embedding-size", "384", "--blocks", "6",
               "--batch-size", "8"),
}  # fmt: skip


def scaling(
    *, processes: int = 2, rounds: int = 3, steps: int = 60, data: Path | None = None,
    write: bool = False,
) -> int:  # fmt: skip
    """Train the same batches in one and in several processes of one thread each.

    Example: python scripts/scaling.py --processes 2 --write

    Parameters
    ----------
    processes
        Processes to compare with one.
    rounds
        Runs of each way, in turns; the median counts.
    steps
        Training steps of each run.
    data
        Text to train on, by default as in training.
    write
        Record the result in docs/scale.md.
    """
    require_integer("processes", processes, 2)
    require_integer("rounds", rounds, 1)
    require_integer("steps", steps, 1)
    lines = [
        f"Tokens per second of {steps} steps, {processes} processes of one thread each, median of "
        f"{rounds} runs in turns:",
        "",
        f"| model | {' | '.join(WAYS)} | {processes} over 1 | sharded over 1 |",
        "|---|" + "---|" * (len(WAYS) + 2),
    ]
    for size, flags in SIZES.items():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, (count, more) in WAYS.items():
                found[way].append(_rate(count or processes, steps, data, [*flags, *more]))
        one, parallel, sharded = (median(found[way]) for way in WAYS)
        lines.append(
            f"| {size} | {one:,.0f} | {parallel:,.0f} | {sharded:,.0f} | {parallel / one:.2f} | "
            f"{sharded / one:.2f} |"
        )
    print("\n".join(lines))
    if write:
        record(HEADING, lines, DOCS / "scale.md")
    return 0


def _rate(processes: int, steps: int, data: Path | None, flags: list[str]) -> float:
    """Tokens per second of a run, without its validation; ChildProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(processes), str(TRAIN), "--backend", "torch", "--threads",
            "1", "--max-steps", str(steps), "--log-every", str(steps), "--sample-tokens", "1",
            "--out", str(out), *flags, *(["--data", str(data)] if data else []),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, encoding="utf-8")
        if result.returncode:
            said = [line for line in result.stderr.splitlines() if "gpt-parity: error" in line]
            raise ChildProcessError((said or result.stderr.splitlines() or ["no reason given"])[-1])
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["event"] == "train":
                return float(entry["tokens_per_second"])
    raise ChildProcessError("no line of metrics")


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(scaling)
    sys.exit(run_app(app))
