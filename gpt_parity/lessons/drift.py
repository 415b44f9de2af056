"""The body of the command `lockstep`: train two runs side by side, and say where they part."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gpt_parity.backends import thread_limit
from gpt_parity.files import write_atomically
from gpt_parity.lessons.config import LockstepConfig
from gpt_parity.lessons.drift_plot import plot
from gpt_parity.lessons.drift_runs import Distance, Drift, Look, SideRunner, drift
from gpt_parity.oracle.tolerance import RESULT_FACTOR, SPREAD_FACTOR
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.provenance import provenance
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.verify import Subject, lockstep_setting, subject_of
from numpy_impl.memory import keep_freed_memory

SCHEMA = "gpt-parity/lockstep"
SCHEMA_VERSION = 1
SYMBOLS = {"weights": "w", "exp_avg": "m", "exp_avg_sq": "v"}


def run(config: LockstepConfig, console: Console) -> int:
    """Train, print, draw and write; returns 0, since drift is no fault.

    Raises ValueError for a text that does not do, MissingBackendError without PyTorch where it is
    asked for, FloatingPointError where a run diverges.
    """
    subject = subject_of(VerifyConfig(data=config.data, seed=config.seed))
    progress = Progress(
        TextColumn("training steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
        disable=sys.stderr is None or not sys.stderr.isatty(),
    )  # fmt: skip
    with progress:
        task = progress.add_task("", total=config.steps)
        result = lockstep_runs(config, subject, lambda: progress.advance(task))
    facts = provenance()
    show(config, result, console, subject.corpus.name)
    if config.plot is not None:
        plot(config, result)
    if config.json is not None:
        content = {**as_json(config, result), "corpus": _facts(subject.corpus), "provenance": facts}
        write_atomically(config.json, (json.dumps(content, indent=1) + "\n").encode())
    return 0


def lockstep_runs(
    config: LockstepConfig, subject: Subject, on_step: Callable[[], Any] = lambda: None,
    prepare: Callable[[SideRunner, SideRunner], None] = lambda a, b: None,
) -> Drift:  # fmt: skip
    """Both runs of `config` by the source text's recipe, under its thread limits; see `drift`."""
    setting = lockstep_setting(0, subject)  # batches come one by one: thousands of them are large
    recipe = setting.recipe
    rate = WarmupCosineScheduler(
        recipe.learning_rate, config.steps, recipe.warmup, recipe.min_learning_rate
    )
    backends = {side.backend for side in config.sides}
    # PyTorch's threads change from step to step, and are put back here.
    with thread_limit(1, "torch" if "torch" in backends else "numpy"):
        keep_freed_memory()
        return drift(
            config.sides, setting, subject.dataset, rate, config.steps, config.envelope_steps,
            on_step, prepare,
        )  # fmt: skip


def show(config: LockstepConfig, result: Drift, console: Console, text: str) -> None:
    """The table of all looks, and the sentence that it amounts to."""
    lines = [
        f"a: {config.a}, b: {config.b}, {config.steps} steps on {text}",
        "from the same weights, which float32 represents, on the same batches.",
    ]
    console.print("\n".join(lines), markup=False, highlight=False)
    console.print(_table(result))
    console.print("\n".join(_notes(result)), markup=False, highlight=False)
    style = "bold yellow" if result.parting else "bold green"
    console.print(Text(verdict(result), style))


def verdict(result: Drift) -> str:
    """When the two part and in what first, or for how long they do not."""
    if not result.envelope_steps:
        return "The envelope was not followed (--envelope-steps is 0)."
    parting = result.parting
    if parting is None:
        if all(d.distance == 0.0 for look in result.looks for d in look.distances):
            return "They never part: every distance is exactly 0."
        last = max(look.step for look in result.looks if look.step <= result.envelope_steps)
        return f"They stay within the rounding envelope at every step looked at, up to step {last}."
    before, look = parting
    first = look.out[0]
    if before is None or before.step == look.step - 1:
        when = f"at step {look.step}"
    else:
        when = f"at or before step {look.step}, after step {before.step}"
    name = first.kind if first.kind == first.name else f"{first.kind} of {first.name}"
    more = len(look.out) - 1
    others = f"; {more} more outside then" if more else ""
    return f"They part {when}, first in {name}: {first.ratio:.3g} tolerances{others}."


def _notes(result: Drift) -> list[str]:
    notes = [
        "worst: the tensor furthest out, of w weights, m exp_avg, v exp_avg_sq.",
        "distance: |a - b| / |b|. envelope: the distance that rounding explains,",
        f"{SPREAD_FACTOR:g} times the spread of noisy float64 runs ({result.unit.name} noise) and "
        f"{RESULT_FACTOR:g} u.",
        "out: some array, or a row of one, is further apart than that.",
    ]
    if 0 < result.envelope_steps < len(result.losses):
        notes.append(f"The envelope was followed for {result.envelope_steps} steps.")
    return notes


def _table(result: Drift) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in ("step", "loss a", "loss b", "a - b"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst", no_wrap=True, overflow="ellipsis", max_width=28)
    for name in ("distance", "envelope", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for look in result.looks:
        table.add_row(*_cells(look), style="yellow" if look.out else None)
    return table


def _cells(look: Look) -> list[str]:
    (a, b), worst = look.losses, look.worst
    return [
        str(look.step), f"{a:.4f}", f"{b:.4f}", f"{a - b:.1e}" if a != b else "0", _short(worst),
        _number(worst.distance), _number(worst.envelope), "out" if look.out else "",
    ]  # fmt: skip


def _short(distance: Distance) -> str:
    name = distance.name.removeprefix("embedding.").removeprefix("transformers.")
    return f"{SYMBOLS[distance.kind]} {name.removesuffix('.weight')}"


def _number(x: float | None) -> str:
    return "-" if x is None else "0" if x == 0.0 else f"{x:.1e}"


def as_json(config: LockstepConfig, result: Drift) -> dict[str, Any]:
    """Every figure; JSON has no infinity, which stands for a distance from exact zeros: null."""

    def plain(x: Any) -> Any:
        return None if isinstance(x, float) and not math.isfinite(x) else x

    def row(d: Distance) -> dict[str, Any]:
        return {key: plain(value) for key, value in asdict(d).items()}

    parting = result.parting
    return {
        "schema": SCHEMA, "version": SCHEMA_VERSION,
        "a": asdict(config.sides[0]), "b": asdict(config.sides[1]),
        "steps": config.steps, "seed": config.seed, "envelope_steps": result.envelope_steps,
        "noise": result.unit.name, "verdict": verdict(result),
        "parting": parting and {
            "step": parting[1].step, "after": parting[0].step if parting[0] else 0,
            "outside": [row(d) for d in parting[1].out],
        },
        "losses": {"a": [a for a, _ in result.losses], "b": [b for _, b in result.losses]},
        "looks": [
            {"step": look.step, "distances": [row(d) for d in look.distances]}
            for look in result.looks
        ],
    }  # fmt: skip


def _facts(corpus: Any) -> dict[str, Any]:
    return {"name": corpus.name, "characters": len(corpus.text), "sha256": corpus.sha256}
