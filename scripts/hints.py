"""Every mistake that the oracle explains, planted into random models: does it say so?"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App
from rich.progress import track

from gpt_parity.backends import thread_limit
from gpt_parity.cli import run_app
from gpt_parity.record import DOCS, record
from gpt_parity.schedule import require_integer
from parity_tests.candidates import Part
from parity_tests.planted.gpt2_hint_rows import HINT_ROWS
from parity_tests.planted.hint_rows import Diagnosis, HintRow, diagnose

NEEDED = 0.9
SHOWN = 3
HEADING = "How often the hints are right"


@dataclass(frozen=True)
class Asked:
    """One mistake in one submission of one model, and what was said of it."""

    row: str
    part: Part
    dtype: str
    seed: int
    said: Diagnosis


def main(
    *, models: int = 30, only: str = "", processes: int = 2, write: bool = False,
    verbose: bool = False,
) -> int:  # fmt: skip
    """Plant every mistake into random models and count what is named; exit 1 below 90 %.

    Example: python scripts/hints.py --models 30 --write

    Parameters
    ----------
    models
        Random models for each mistake.
    only
        Plant only mistakes whose name contains this.
    processes
        Models examined side by side.
    write
        Record the result in docs/oracle.md.
    verbose
        Also print every submission of which something else was said.
    """
    rows = [row for row in HINT_ROWS if only in row.name]
    if not rows:
        raise ValueError(f"only: no mistake has {only!r} in its name")
    seeds = range(require_integer("models", models, 1))
    context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    with context.Pool(require_integer("processes", processes, 1)) as pool:
        chunks = pool.imap_unordered(ask_all, [(only, seed) for seed in seeds])
        asked = [a for chunk in track(chunks, total=models) for a in chunk]
    if verbose:
        for a in sorted(asked, key=lambda a: (a.row, a.dtype, a.part, a.seed)):
            if a.said.first and not (a.said.first_right and a.said.hint_right):
                print(f"{a.row} {a.dtype} {a.part} seed {a.seed}: {a.said.first} {a.said.others}")
    lines, ok = summary(rows, asked)
    print("\n".join(lines))
    if write:
        record(HEADING, lines, DOCS / "oracle.md")
    return 0 if ok else 1


def ask_all(job: tuple[str, int]) -> list[Asked]:
    """Every mistake in one model of each kind that is drawn, handed in whole or in part in turn."""
    only, seed = job
    found = []
    with thread_limit(1, "torch"):
        for row in HINT_ROWS:
            if only in row.name:
                part = list(row.first)[seed % len(row.first)]
                found += [
                    Asked(row.name, part, dtype, seed, diagnose(row, part, seed, dtype))
                    for dtype in row.dtypes
                ]
    return found


def summary(rows: list[HintRow], asked: list[Asked]) -> tuple[list[str], bool]:
    """One line for each mistake and dtype, and whether all of them are good enough."""
    groups: dict[tuple[str, str], list[Asked]] = defaultdict(list)
    for a in asked:
        groups[a.row, a.dtype].append(a)
    lines = [
        "Each mistake is planted into the source of a running twin. Of every other model all "
        "results are judged, of the rest the loss and the gradients of the parameters alone (or "
        "the training steps). Some mistakes are below the tolerance of float32; the shares are of "
        "the models, seen, in which the tensor to be named is out of tolerance. In float64 all "
        "models count.",
        "",
        "| mistake | dtype | first right | hint right | seen | of | other hints |",
        "|---|---|---|---|---|---|---|",
    ]
    poor = 0
    for row in rows:
        for dtype in row.dtypes:
            group = groups[row.name, dtype]
            seen = [a for a in group if a.said.seen or dtype == "float64"]
            share = {
                what: sum(getattr(a.said, what) for a in seen) / max(1, len(seen))
                for what in ("first_right", "hint_right")
            }
            poor += min(share.values()) < NEEDED
            others = Counter(o for a in seen for o in {_kind(hint) for hint in a.said.others})
            named = "; ".join(f"{text} ({n})" for text, n in others.most_common(SHOWN))
            lines.append(
                f"| {row.mistake} | {dtype} | {100 * share['first_right']:.0f} % | "
                f"{100 * share['hint_right']:.0f} % | {len(seen)} | {len(group)} | {named} |"
            )
    total = sum(len(row.dtypes) for row in rows)
    lines[2:2] = [f"{total - poor} of {total} lines at {100 * NEEDED:.0f} % or more.", ""]
    return lines, not poor


def _kind(hint: str) -> str:
    """A hint without its place, its numbers and what it explains."""
    hint = re.sub(r" \(explains .*\)$", "", hint)
    hint = re.sub(
        r", (at (the \w+ sum|\S+)( of all blocks)?|everywhere|in all blocks|in step \d+)$", "", hint
    )
    hint = re.sub(r" = [-+.e\d]+", "", hint)
    return re.sub(r"factor of [-+.e\d]+", "factor of some number", hint)


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(main)
    sys.exit(run_app(app))
