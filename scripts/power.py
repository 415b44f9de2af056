"""What the suite catches: every planted bug against the tests, and the band to clean models."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App

from gpt_parity.cli import run_app
from gpt_parity.files import write_atomically
from gpt_parity.provenance import provenance
from gpt_parity.record import record
from gpt_parity.schedule import require_integer
from parity_tests.planted.power import ALL_BUGS, Finding, Plan, clean_ratio, examine_all

SMALLEST_PLANTED, LARGEST_CLEAN = 3.0, 0.6


def main(
    *, only: str = "", every: int = 1, kinds: int = 2, tests: int = 1,
    profile: Literal["power-short", "power"] = "power-short", models: int = 50,
    processes: int = 2, write: bool = False, json_file: Path | None = None,
) -> int:  # fmt: skip
    """Plant every bug, run the tests it concerns, and say what caught it.

    Example: python scripts/power.py --kinds 4 --tests 2 --write

    Parameters
    ----------
    only
        Examine only bugs whose name contains this.
    every
        Of these examine the first and every so many after it, for a shorter run.
    kinds
        Kinds of reference to look for.
    tests
        Failing tests to look for of each kind.
    profile
        10 examples a property, or as many as the suite draws (100).
    models
        Clean models for the upper end of the band.
    processes
        Bugs examined side by side.
    write
        Record the result in docs/power.md.
    json_file
        Also write every finding to this file.
    """
    require_integer("every", every, 1)
    bugs = [bug for bug in ALL_BUGS if only in bug.name][::every]
    if not bugs:
        raise ValueError(f"only: no bug has {only!r} in its name")
    require_integer("models", models, 1)
    require_integer("processes", processes, 1)
    require_integer("kinds", kinds, 2)
    require_integer("tests", tests, 1)
    findings = examine_all(bugs, Plan(profile, kinds, tests, processes))
    clean = clean_ratio(models, seed=1)
    lines, ok = summary(findings, clean, models)
    print("\n".join(lines))
    if json_file is not None:
        write_atomically(json_file, json.dumps(as_json(findings, clean), indent=1).encode())
    if write:
        record("Planted bugs", [*(f"- {line}" for line in lines), "", *table(findings)])
    return 0 if ok else 1


def summary(findings: list[Finding], clean: float, models: int) -> tuple[list[str], bool]:
    """The lines that count, and whether all of them are as they should be."""
    visible = [f for f in findings if not f.bug.equivalent]
    loud = [f for f in visible if f.is_loud]
    silent = [f for f in visible if not f.is_loud]
    missed = [f for f in silent if not f.is_caught]
    numeric = [f for f in visible if f.bug.tensor]
    lost = [f for f in numeric if not f.is_localised]
    seen = [f for f in findings if f.bug.equivalent and (f.caught or f.problem)]
    smallest = min((f.ratio for f in numeric), default=float("inf"))
    lines = [
        f"{len(silent) - len(missed)} of {len(silent)} planted bugs caught by at least two "
        f"independent kinds of reference; {len(loud)} more end most tests in an exception",
        *(f"missed: {f.bug.name} (caught by: {f.references or 'nothing'}) {f.problem}"
          for f in missed),
        *(f"not shown to be equivalent: {f.bug.name} (caught by: {f.references}) {f.problem}"
          for f in seen),
        f"{len(numeric) - len(lost)} of {len(numeric)} numeric ones localised by the comparer",
        *(f"not localised: {f.bug.name} at {f.bug.tensor}: {f.located} {f.problem}"
          for f in lost),
        f"band: smallest planted error {smallest:.3g} of tolerance in float64, largest clean one "
        f"{clean:.3g} ({models} models, float64 and float32)",
    ]  # fmt: skip
    ok = not missed and not seen and 20 * len(lost) <= len(numeric)
    return lines, ok and smallest >= SMALLEST_PLANTED and clean <= LARGEST_CLEAN


def table(findings: list[Finding]) -> list[str]:
    """One line per bug."""
    lines = [
        "Kinds of reference that caught it, with the number of failing tests (no more were looked "
        "for than the command says), and the fewest examples that one of them needed; largest "
        "error in units of tolerance, and the comparer's first divergence.", "",
        "| bug | mistake | caught by | examples | error | first divergence |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for f in findings:
        if f.bug.equivalent:
            lines.append(f"| {f.bug.name} | {f.bug.description} | equivalent: {f.bug.equivalent} |")
            continue
        kinds = ", ".join(f"{kind} ({len(tests)})" for kind, tests in sorted(f.caught.items()))
        examples = min((n for tests in f.caught.values() for n in tests.values()), default="")
        ratio = f"{f.ratio:.2g}" if f.bug.tensor else ""
        place = max(f.located, key=lambda name: f.located[name], default="")
        lines.append(
            f"| {f.bug.name} | {f.bug.description} | {kinds} | {examples} | {ratio} | {place} |"
        )
    return lines


def as_json(findings: list[Finding], clean: float) -> dict[str, Any]:
    """Everything that was found."""
    found = [
        {**asdict(f), "bug": f.bug.name, "ratio": str(f.ratio), "equivalent": f.bug.equivalent}
        for f in findings
    ]
    return {"findings": found, "clean_ratio": clean, "provenance": provenance()}


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(main)
    sys.exit(run_app(app))
