"""Generic mutants of the NumPy twin and of the oracle: which of them do the tests kill?"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App

from gpt_parity.cli import run_app
from gpt_parity.record import record
from gpt_parity.schedule import require_integer
from parity_tests.planted.survivors import reason_for

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = {"numpy_impl": "numpy_impl", "oracle": "gpt_parity.oracle"}
NEEDED = 0.95


def mutants(
    package: Literal["numpy_impl", "oracle"] = "numpy_impl", *, survivors: bool = False,
    processes: int = 2,
) -> int:  # fmt: skip
    """Run mutmut (configured in pyproject.toml), explain each survivor, write docs/power.md.

    Fewer than 95 % killed, or a survivor without a reason: exit 1. Needs the extra `mutants`.

    Example: python scripts/mutants.py numpy_impl

    Parameters
    ----------
    package
        What is mutated: all of numpy_impl, or gpt_parity/oracle without its tables and sentences.
    survivors
        Test again only what survived last time without a reason, after tests were added.
    processes
        Mutants tested side by side.
    """
    require_integer("processes", processes, 1)
    if importlib.util.find_spec("mutmut") is None:
        raise ValueError("mutmut: is not installed, needed the extra `mutants`")
    pattern = f"{PACKAGES[package]}.*"
    again = [pattern]
    if survivors:
        lived = [name for name, status in _results(pattern) if status != "killed"]
        again = [name for name in lived if not reason_for(*_change(name))]
    if again:
        _mutmut("run", "--max-children", str(processes), *again)
    # A timeout may be a machine that was busy: it counts once it has happened alone as well.
    late = [name for name, status in _results(pattern) if status == "timeout"]
    if late:
        _mutmut("run", "--max-children", "1", *late)
    results = _results(pattern)
    if not results:
        raise ValueError(f"mutmut: no mutants of {PACKAGES[package]}, needed some")
    counts = Counter(status for _, status in results)
    killed = counts["killed"] + counts["timeout"]
    share = killed / len(results)
    explained, unexplained = [], []
    for name, status in results:
        if status not in ("killed", "timeout"):
            function, before, after = _change(name)
            reason = reason_for(function, before, after)
            line = f"| {function} | `{before}` | `{after}` | {reason or status} |"
            (explained if reason else unexplained).append(line)
    lines = [
        f"{killed} of {len(results)} mutants killed ({100.0 * share:.1f} %, {counts['timeout']} "
        f"of them by a timeout that came twice); {len(explained)} survivors explained, "
        f"{len(unexplained)} not.",
        "",
        "| function | before | after | why no test can see it |", "|---|---|---|---|",
        *sorted(explained), *sorted(unexplained),
    ]  # fmt: skip
    print("\n".join(lines))
    record(f"Generic mutants of {PACKAGES[package]}", lines)
    return 0 if share >= NEEDED and not unexplained else 1


def _mutmut(*arguments: str) -> str:
    """Output of a mutmut command; one thread, or forked children hang in PyTorch's pool."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    result = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=CHECKOUT, env={**os.environ, **one}, encoding="utf-8",
        stdout=subprocess.PIPE if arguments[0] != "run" else None,
    )  # fmt: skip
    if result.returncode != 0:
        raise ValueError(f"mutmut {arguments[0]}: ended with code {result.returncode}, needed 0")
    return result.stdout or ""


def _results(pattern: str) -> list[tuple[str, str]]:
    start = pattern.rstrip("*")
    pairs = (
        line.strip().rpartition(": ") for line in _mutmut("results", "--all", "true").splitlines()
    )
    return [(name, status) for name, _, status in pairs if name.startswith(start)]


def _change(name: str) -> tuple[str, str, str]:
    """The function that a mutant is in, and its lines that change, before and after."""
    module, _, mangled = name.rpartition(".")
    mangled = re.sub(r"__mutmut_\d+$", "", mangled)
    # x_function, or x, class and method with a separator before each.
    parts = mangled.split("ǁ")[1:] or [mangled.removeprefix("x_")]
    lines = [x for x in _mutmut("show", name).splitlines() if not x.startswith(("---", "+++"))]
    before, after = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return ".".join([module, *parts]), before, after


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(mutants)
    sys.exit(run_app(app))
