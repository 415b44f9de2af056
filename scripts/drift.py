"""Why float32 and float64, and NumPy and PyTorch, end at different test losses."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cyclopts import App, Parameter
from rich.progress import track

from gpt_parity.backends import thread_limit
from gpt_parity.cli import run_app
from gpt_parity.config import TrainConfig
from gpt_parity.lessons.config import LockstepConfig
from gpt_parity.lessons.constants import (
    SMALL,
    expected_excess,
    measured_excess,
    with_float32,
)
from gpt_parity.lessons.drift import lockstep_runs
from gpt_parity.lessons.drift_runs import Drift
from gpt_parity.lessons.endings import ARITHMETICS, CONSTANTS, Ending, Group, difference, endings
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.record import DOCS, record
from gpt_parity.schedule import require_integer
from gpt_parity.verify import subject_of

PAGE = DOCS / "drift.md"
Part = Literal["constants", "early", "endings"]
WHOLE = ("numpy float32", "torch float32", "numpy float64", CONSTANTS)
STEPS_OF_CONSTANTS, EARLY = 1000, 4000


def main(
    parts: Annotated[tuple[Part, ...], Parameter(consume_multiple=True)] = get_args(Part), *,
    runs: Annotated[tuple[int, int, int, int], Parameter(consume_multiple=True)] = (5, 5, 5, 1),
    early_runs: int = 1, seed: int = 42, steps: int | None = None,
    data: Path | None = None, results: Path | None = None, write: bool = False,
) -> int:  # fmt: skip
    """Measure what float32 makes of AdamW's constants, and where many whole runs end.

    Example: python scripts/drift.py --results runs/drift.jsonl --write

    Parameters
    ----------
    parts
        What to measure; "endings" takes one to three minutes for each run, "early" a fourth of it.
    runs
        Whole runs of numpy float32, torch float32, numpy float64, and numpy float64 with float32's
        constants: from the start of `seed`, then from others changed in the last bit.
    early_runs
        Runs of each arithmetic in the part "early", from the same starts.
    seed
        Seed of the initial weights.
    steps
        Steps of each whole run; by default the two epochs of the recipe.
    data
        UTF-8 text; by default as in training.
    results
        File to which each finished run is added; what it holds already is not computed again.
    write
        Record the results in docs/drift.md.
    """
    for name, count in (("early_runs", early_runs), *(("runs", n) for n in runs)):
        require_integer(name, count, 1)
    bodies: dict[str, Callable[[], tuple[str, list[str]]]] = {
        "constants": lambda: constants(seed, data),
        "early": lambda: early(early_runs, seed, steps, data, results),
        "endings": lambda: ends(runs, seed, steps, data, results),
    }
    for part in parts:
        heading, lines = bodies[part]()
        print("\n".join([heading, *lines, ""]), flush=True)
        if write:
            record(heading, lines, PAGE)
    return 0


def constants(seed: int, data: Path | None) -> tuple[str, list[str]]:
    """The second moment in float32 against float64: alone, then in training."""
    lines = [
        "Second moment in float32 over that in float64, on the same random gradients, minus 1 "
        f"(mean over {SMALL.parameter_count():,} elements, standard error), and what the "
        "rounded constants alone make of it:", "",
        "| steps | `numpy` | `torch` | constants alone |", "|---|---|---|---|",
    ]  # fmt: skip
    for steps in (100, 1000, 10_000):
        found = (measured_excess(backend, steps) for backend in ("numpy", "torch"))
        cells = [f"{mean:.3e} ± {error:.0e}" for mean, error in found]
        lines.append(f"| {steps:,} | {' | '.join(cells)} | {expected_excess(steps):.3e} |")
    lines += [
        "", f"Distance of all second moments together in the first steps of {STEPS_OF_CONSTANTS:,} "
        "in training, \\|a - b\\| / \\|b\\|, from a `numpy` float64 run with AdamW's constants as "
        "they are, and from one with the constants that float32 holds:", "",
    ]  # fmt: skip
    header, rows = "| step |", {}
    for backend in ("numpy", "torch"):
        for name, prepare in (
            ("exact", lambda a, b: None),
            ("rounded", lambda a, b: with_float32(b, ["constants"])),
        ):
            config = LockstepConfig(
                a=f"{backend}:float32", b="numpy:float64", steps=STEPS_OF_CONSTANTS, seed=seed,
                data=data, envelope_steps=0,
            )  # fmt: skip
            found: Drift = lockstep_runs(config, subject_of(VerifyConfig(data=data, seed=seed)),
                                         prepare=prepare)  # fmt: skip
            header += f" `{backend}` float32, {name} |"
            for look in found.looks:
                if look.step in (10, 100, 316, STEPS_OF_CONSTANTS):
                    rows.setdefault(look.step, []).append(look.whole("exp_avg_sq", "distance"))
    lines += [header, "|---" * (header.count("|") - 1) + "|"]
    lines += [f"| {step} | {' | '.join(f'{x:.1e}' for x in row)} |" for step, row in rows.items()]
    return "AdamW's constants", lines


def early(
    starts: int, seed: int, steps: int | None, data: Path | None, results: Path | None
) -> tuple[str, list[str]]:
    """The beginning of such runs, before last-bit changes have grown: what of float32 acts?"""
    dataset = subject_of(VerifyConfig(data=data, seed=seed)).dataset
    steps = steps or TrainConfig().epochs * dataset.batch_count("train")
    stop = min(steps, EARLY)
    wanted = [(name, start) for start in range(starts) for name in ARITHMETICS]
    found: list[Ending] = []
    for run in track(wanted, description="beginnings", disable=not sys.stdout.isatty()):
        found += endings([run], dataset, seed, steps, stop, results)
    reference = group(found, "numpy float64")
    lines = [
        f"Test loss after {stop:,} of the {steps:,} steps, from the starts described below, and "
        "the difference of its mean from `numpy` float64. Parts of float32 are put into the "
        "AdamW of a float64 run: its constants, or what it stores, rounded at every step.", "",
        "| arithmetic | test losses from start 0, 1, ... | difference |", "|---|---|---|",
    ]  # fmt: skip
    for name in ARITHMETICS:
        runs = group(found, name)
        cells = " ".join(f"{x:.6f}" for x in runs.losses)
        gap = runs.mean - reference.mean
        lines.append(f"| {name} | {cells} | {gap:+.1e} |" if name != "numpy float64"
                     else f"| {name} | {cells} | |")  # fmt: skip
    return f"After {stop:,} steps", lines


def ends(
    runs: tuple[int, ...], seed: int, steps: int | None, data: Path | None,
    results: Path | None,
) -> tuple[str, list[str]]:  # fmt: skip
    """Whole runs of every arithmetic from the same starts."""
    dataset = subject_of(VerifyConfig(data=data, seed=seed)).dataset
    steps = steps or TrainConfig().epochs * dataset.batch_count("train")
    counts = dict(zip(WHOLE, runs, strict=True))
    wanted = [(n, start) for start in range(max(runs)) for n in WHOLE if start < counts[n]]
    found: list[Ending] = []
    for run in track(wanted, description="whole runs", disable=not sys.stdout.isatty()):
        found += endings([run], dataset, seed, steps, steps, results)
    return "Where whole runs end", [
        f"Test loss after {steps:,} steps of the source text's recipe, seed {seed}. Start 0 is the "
        "float32 draw of the initial weights; in the others every weight has moved to the float32 "
        "number above or below, by the toss of a coin. float64 runs begin at the same float32 "
        "numbers.", "",
        *table_of_losses(found), "",
        "Differences of means. The last column is the exact permutation test: how often runs "
        "dealt at random to the two groups lie as far apart.", "",
        *table_of_differences(found), "",
        "Least and greatest test loss on the way, after how many steps:", "",
        *table_of_steps(found), "",
        "The same weights read in float64 give a test loss that differs by at most "
        f"{max(abs(e.loss - e.loss_float64) for e in found):.0e}.",
    ]  # fmt: skip


def group(found: list[Ending], *names: str) -> Group:
    return Group(tuple(e.loss for e in found if e.arithmetic in names))


def table_of_losses(found: list[Ending]) -> list[str]:
    lines = [
        "| arithmetic | test losses from start 0, 1, ... | mean | standard deviation |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for name in WHOLE:
        runs = group(found, name)
        cells = " ".join(f"{x:.4f}" for x in runs.losses)
        deviation = f"{runs.deviation:.4f}" if len(runs.losses) > 1 else "-"
        lines.append(f"| {name} | {cells} | {runs.mean:.4f} | {deviation} |")
    return lines


def table_of_differences(found: list[Ending]) -> list[str]:
    pairs = (
        ("numpy float32 - torch float32", ["numpy float32"], ["torch float32"]),
        ("numpy float32 - numpy float64", ["numpy float32"], ["numpy float64"]),
        ("torch float32 - numpy float64", ["torch float32"], ["numpy float64"]),
        ("all float32 - numpy float64", ["numpy float32", "torch float32"], ["numpy float64"]),
        (f"{CONSTANTS} - numpy float64", [CONSTANTS], ["numpy float64"]),
    )  # fmt: skip
    lines = ["| | difference | standard error | share |", "|---|---|---|---|"]
    for name, one, other in pairs:
        gap, error, share = difference(group(found, *one), group(found, *other))
        cell = "-" if math.isnan(error) else f"{error:.4f}"
        lines.append(f"| {name} | {gap:+.4f} | {cell} | {share:.2f} |")
    return lines


def table_of_steps(found: list[Ending]) -> list[str]:
    steps = list(found[0].losses)
    lines = [
        "| arithmetic | " + " | ".join(f"{int(step):,}" for step in steps) + " |",
        "|---" * (len(steps) + 1) + "|",
    ]  # fmt: skip
    for name in WHOLE:
        runs = [e.losses for e in found if e.arithmetic == name]
        texts = [sorted({f"{r[step]:.6f}" for r in runs}) for step in steps]
        cells = [" to ".join(dict.fromkeys((t[0], t[-1]))) for t in texts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(main)
    with thread_limit(1, "torch"):
        sys.exit(run_app(app))
