"""Generic mutants of the NumPy twin and of the oracle: which of them do the tests kill?"""

from __future__ import annotations

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
from parity_tests.planted.survivors import reason_for
from parity_tests.record import record

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = {"numpy_impl": "numpy_impl", "oracle": "gpt_parity.oracle"}
NEEDED = 0.95


def mutants(
    package: Literal["numpy_impl", "oracle"] = "numpy_impl", *, processes: int = 2,
    rerun: bool = True,
) -> int:  # fmt: skip
    """Run mutmut (configured in pyproject.toml), explain each survivor, write docs/power.md.

    Fewer than 95 % killed, or a survivor without a reason: exit 1. Needs the extra `mutants`.

    Example: python scripts/mutants.py numpy_impl

    Parameters
    ----------
    package
        What is mutated.
    processes
        Mutants tested side by side.
    rerun
        Test all mutants; else only report on what was tested before.
    """
    pattern = f"{PACKAGES[package]}.*"
    if rerun:
        _mutmut("run", "--max-children", str(processes), pattern)
        # A timeout may be a machine that was busy: it counts once it has happened alone as well.
        late = [name for name, status in _results(pattern) if status == "timeout"]
        if late:
            _mutmut("run", "--max-children", "1", *late)
    results = _results(pattern)
    counts = Counter(status for _, status in results)
    killed = counts["killed"] + counts["timeout"]
    share = killed / len(results)
    explained, unexplained = [], []
    for name, status in results:
        if status not in ("killed", "timeout"):
            function, change = _change(name)
            reason = reason_for(function, change)
            line = f"| {function} | `{change}` | {reason or status} |".replace("||", "\\|\\|")
            (explained if reason else unexplained).append(line)
    lines = [
        f"{killed} of {len(results)} mutants killed ({100.0 * share:.1f} %, {counts['timeout']} "
        f"of them by a timeout that came twice); {len(explained)} survivors explained, "
        f"{len(unexplained)} not.",
        "",
        "| function | change | why no test can or need see it |", "|---|---|---|",
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
        raise RuntimeError(f"mutmut {arguments[0]}: ended with code {result.returncode}")
    return result.stdout or ""


def _results(pattern: str) -> list[tuple[str, str]]:
    start = pattern.rstrip("*")
    pairs = (
        line.strip().rpartition(": ") for line in _mutmut("results", "--all", "true").splitlines()
    )
    return [(name, status) for name, _, status in pairs if name.startswith(start)]


def _change(name: str) -> tuple[str, str]:
    """The function that a mutant is in, and its changed lines as `old => new`."""
    module, _, mangled = name.rpartition(".")
    function = re.sub(r"__mutmut_\d+$", "", mangled).removeprefix("x").strip("_ǁ")
    lines = _mutmut("show", name).splitlines()
    lines = [line for line in lines if not line.startswith(("---", "+++"))]
    old = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    new = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return f"{module}.{function.replace('ǁ', '.')}", f"{old} => {new}"


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(mutants)
    sys.exit(run_app(app))
