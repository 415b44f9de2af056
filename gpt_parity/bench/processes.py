"""A part of the benchmark runs Python processes and makes a table of what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass
class Section:
    """A table, with sentences below it."""

    heading: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_worker(measure: str, cores: int = 1, **arguments: Any) -> Any:
    """The result of one measurement in a fresh process, whose libraries may use `cores` threads.

    Raises ChildProcessError with the last line of its errors where it fails.
    """
    module = ["-m", "gpt_parity.bench.worker", measure, json.dumps(arguments)]
    return json.loads(run_python(module, measure, cores).strip().splitlines()[-1])


def run_python(arguments: list[str], what: str, cores: int = 1, code: int = 0) -> str:
    """What a Python process prints; ChildProcessError where it does not end with `code`."""
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, encoding="utf-8", cwd=CHECKOUT,
        env=_environment(cores),
    )  # fmt: skip
    if result.returncode != code:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise ChildProcessError(f"benchmark of {what}: {(said or ['no reason given'])[-1]}")
    return result.stdout


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, four digits or one decimal."""
    value = seconds * 1e3
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
