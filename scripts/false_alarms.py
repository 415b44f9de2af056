"""Clean random models against the tolerances: how often does the comparison cry wolf?"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the reference; candidates set their own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from cyclopts import App
from rich.progress import track

from gpt_parity.backends import thread_limit
from gpt_parity.choices import MODELS, ModelName
from gpt_parity.cli import run_app
from gpt_parity.files import write_atomically
from gpt_parity.oracle.compare import compare_traces
from gpt_parity.oracle.tolerance import SPREAD_FACTOR, UNDECIDED
from gpt_parity.provenance import provenance
from gpt_parity.record import record
from gpt_parity.schedule import require_integer
from parity_tests.models import ModelCase, candidate_trace, random_case, reference

LARGEST_CLEAN = 0.6
CHUNK = 20  # models drawn from one stream, so that the draws do not depend on the processes
QUANTILES = (0.5, 0.9, 0.99, 0.999)
# Of docs/power.md.
HEADINGS: dict[ModelName, str] = {"gpt": "False alarms", "gpt2": "False alarms, GPT-2"}


@dataclass(frozen=True)
class Judged:
    """One clean candidate of one model: the ratio of every tensor that could be judged."""

    case: ModelCase
    backend: str
    dtype: str
    threads: int
    ratios: dict[str, float]
    complete: bool

    @property
    def worst(self) -> float:
        return max(self.ratios.values())

    @property
    def candidate(self) -> str:
        return f"{self.backend} {self.dtype}"


def judge_chunk(stream: tuple[ModelName, int, int, int]) -> list[Judged]:
    """Judge `count` random models, each with torch and with NumPy in another dtype or threads."""
    model, seed, chunk, count = stream
    rng = np.random.default_rng([seed, chunk])
    found = []
    for _ in range(count):
        case, threads = random_case(rng, model), int(rng.integers(1, 3))
        for dtype in ("float64", "float32"):
            with thread_limit(1, "torch"):
                clean, tolerances = reference(case, dtype)
            for backend in ("torch", "numpy"):
                if (backend, dtype, threads) == ("numpy", "float64", 1):
                    continue  # the engine that made the tolerance
                with thread_limit(threads, "torch"), np.errstate(all="ignore"):
                    candidate = candidate_trace(backend, dtype, case)
                report = compare_traces(candidate, clean, tolerances, dtype)
                ratios: dict[str, float] = {}
                for j in report.judgements:
                    if j.judged:
                        name = re.sub(r"\.\d+\.", ".*.", f"{j.kind} {j.name}")
                        ratios[name] = max(ratios.get(name, 0.0), j.ratio)
                found.append(Judged(case, backend, dtype, threads, ratios, report.complete))
    return found


def false_alarms(
    models: int = 300, seed: int = 0, *, model: Literal["gpt", "gpt2", "both"] = "both",
    processes: int = 2, json_file: Path | None = None, write: bool = False,
) -> int:  # fmt: skip
    """Judge clean random models, on one and two threads, rows included; exit 1 on any alarm.

    The candidate is PyTorch, or NumPy in another dtype or on another number of threads, never the
    engine that made the tolerance. Sizes, scales (0.03 to 10) and structures are drawn.

    Example: python scripts/false_alarms.py --models 300

    Parameters
    ----------
    models
        Number of random models of each kind, each judged with every candidate.
    seed
        Seed of the draws.
    model
        The source text's model, GPT-2, or one after the other.
    processes
        Models judged side by side.
    json_file
        Also write every ratio to this file.
    write
        Record the result in docs/power.md.
    """
    require_integer("models", models, 1)
    require_integer("seed", seed, 0)
    require_integer("processes", processes, 1)
    facts, rows, alarm = provenance(), [], False
    for kind in MODELS if model == "both" else (model,):
        found = judge_all(kind, models, seed, processes)
        lines = summary(found, models)
        print("\n".join([f"{HEADINGS[kind]}:", "", *lines]))
        for j in found:
            if j.worst > LARGEST_CLEAN:
                name = max(j.ratios, key=lambda key: j.ratios[key])
                print(f"{j.case} {j.candidate}, {j.threads} threads: {name} {j.worst:.3f}")
                alarm = True
        rows += [[*astuple(j.case), j.candidate, j.threads, j.complete, j.ratios] for j in found]
        if write:
            record(HEADINGS[kind], lines, facts=facts)
    if json_file is not None:
        content = {"judged": rows, "provenance": facts}
        write_atomically(json_file, json.dumps(content).encode())
    return 1 if alarm else 0


def judge_all(model: ModelName, models: int, seed: int, processes: int) -> list[Judged]:
    """Judge random models of one kind, side by side."""
    counts = [min(CHUNK, models - start) for start in range(0, models, CHUNK)]
    streams = [(model, seed, k, count) for k, count in enumerate(counts)]
    context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    with context.Pool(processes) as pool:
        chunks = pool.imap_unordered(judge_chunk, streams)
        description = HEADINGS[model]
        return [j for chunk in track(chunks, description, len(streams)) for j in chunk]


def summary(found: list[Judged], models: int) -> list[str]:
    """Alarms with the bound on their rate, the quantiles of the worst ratios, and kappa."""
    lines = [
        f"{models} models: each judged in every value, gradient and row of {{torch, NumPy}} x "
        "{float64, float32} that is not the engine of the tolerance, on one or two threads.",
        "",
        "| candidate | models | judged whole | alarms | rate below (95 %) | "
        + " | ".join(f"{100 * q:g} %" for q in QUANTILES) + " | worst |",
        "|---|" + "---|" * (5 + len(QUANTILES)),
    ]  # fmt: skip
    groups: dict[str, list[Judged]] = defaultdict(list)
    for j in found:
        groups[j.candidate].append(j)
    for candidate, group in sorted(groups.items()):
        worst = [j.worst for j in group]
        whole = sum(j.complete for j in group)
        alarms = sum(ratio > 1.0 for ratio in worst)
        rate = f"{-math.log(0.05) / whole:.1e}" if alarms == 0 and whole else "-"
        quantiles = " | ".join(f"{q:.3f}" for q in np.quantile(worst, QUANTILES))
        lines.append(
            f"| {candidate} | {len(group)} | {whole} | {alarms} | {rate} | {quantiles} | "
            f"{max(worst):.3f} |"
        )
    tensors: dict[str, list[float]] = defaultdict(list)
    for j in found:
        for name, ratio in j.ratios.items():
            tensors[name].append(ratio)
    largest = max(j.worst for j in found)
    lines += [
        "",
        f"A model is not judged whole where {UNDECIDED}. The "
        f"spread is multiplied by kappa = {SPREAD_FACTOR:g}; about {SPREAD_FACTOR * largest:.1f} "
        "would have been enough for no alarm in these models.",
        "",
        "| tensor, worst block | " + " | ".join(f"{100 * q:g} %" for q in QUANTILES) + " | worst |",
        "|---|" + "---|" * (1 + len(QUANTILES)),
        *(
            f"| {name} | " + " | ".join(f"{q:.3f}" for q in np.quantile(ratios, QUANTILES))
            + f" | {max(ratios):.3f} |"
            for name, ratios in sorted(tensors.items(), key=lambda pair: -max(pair[1]))
        ),
    ]  # fmt: skip
    return lines


if __name__ == "__main__":
    app = App(help_format="plaintext", version_flags=[])
    app.default(false_alarms)
    sys.exit(run_app(app))
