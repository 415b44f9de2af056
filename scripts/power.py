"""What the suite catches: every planted bug against the tests, and the band to clean models."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App

from gpt_parity.cli import run_app
from gpt_parity.files import write_atomically
from gpt_parity.provenance import provenance
from parity_tests.planted import power
from parity_tests.planted.power import Finding, Plan

SUMMARY = Path(__file__).resolve().parents[1] / "docs" / "power.md"
SMALLEST_PLANTED, LARGEST_CLEAN = 3.0, 0.6


def main(
    *, full: bool = False, only: str = "", models: int = 100, processes: int = 2,
    json_file: Path | None = None,
) -> int:  # fmt: skip
    """Plant every bug, run the tests it concerns, and say what caught it.

    Example: python scripts/power.py --full

    Parameters
    ----------
    full
        Run all the tests of a bug, and write docs/power.md; else stop at two kinds of reference.
    only
        Examine only bugs whose name contains this.
    models
        Clean models for the upper end of the band.
    processes
        Bugs examined side by side.
    json_file
        Also write every finding to this file.
    """
    bugs = [bug for bug in power.ALL_BUGS if only in bug.name]
    findings = power.examine_all(bugs, Plan(quickest=not full, processes=processes))
    clean = power.clean_ratio(models, seed=1)
    lines, ok = summary(findings, clean, models)
    print("\n".join(lines))
    if json_file is not None:
        write_atomically(json_file, json.dumps(as_json(findings, clean), indent=1).encode())
    if full and not only:
        SUMMARY.parent.mkdir(exist_ok=True)
        write_atomically(SUMMARY, ("\n".join(page(findings, lines)) + "\n").encode())
    return 0 if ok else 1


def summary(findings: list[Finding], clean: float, models: int) -> tuple[list[str], bool]:
    """The lines that count, and whether all of them are as they should be."""
    visible = [f for f in findings if not f.bug.equivalent]
    missed = [f for f in visible if not f.is_caught]
    numeric = [f for f in visible if f.bug.tensor]
    lost = [f for f in numeric if not f.is_localised]
    smallest = min((f.ratio for f in numeric), default=float("inf"))
    lines = [
        f"{len(visible) - len(missed)} of {len(visible)} planted bugs caught by at least two "
        "independent kinds of reference",
        *(f"  missed: {f.bug.name} (caught by: {f.references or 'nothing'}) {f.problem}"
          for f in missed),
        f"{len(numeric) - len(lost)} of {len(numeric)} numeric ones localised by the comparer",
        *(f"  not localised: {f.bug.name} at {f.bug.tensor}: {f.located} {f.problem}"
          for f in lost),
        f"band: smallest planted error {smallest:.3g} of tolerance, largest clean one "
        f"{clean:.3g} ({models} models, float64)",
    ]  # fmt: skip
    ok = not missed and 20 * len(lost) <= len(numeric)
    return lines, ok and smallest >= SMALLEST_PLANTED and clean <= LARGEST_CLEAN


def page(findings: list[Finding], lines: list[str]) -> list[str]:
    """The summary as a page, with one line per bug."""
    facts = provenance()
    rows = [
        f"| {f.bug.name} | {f.bug.description} | {', '.join(f.references)} | "
        f"{sum(map(len, f.caught.values()))} | "
        f"{min((n for tests in f.caught.values() for n in tests.values()), default='')} | "
        f"{next(iter(f.located), '') if f.bug.tensor else ''} |"
        for f in findings
    ]
    return [
        "# What the suite catches", "",
        f"Written by `{facts['command']}` (NumPy {facts['numpy']}, PyTorch "
        f"{facts.get('torch')}, Python {facts['python']}).", "",
        *lines, "",
        "Columns: kinds of reference that caught it, number of tests that failed, fewest examples "
        "that a test needed, where the comparer's first divergence was.", "",
        "| bug | mistake | caught by | tests | examples | first divergence |",
        "|---|---|---|---|---|---|", *rows,
    ]  # fmt: skip


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
