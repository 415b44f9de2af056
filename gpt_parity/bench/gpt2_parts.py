"""The parts of the benchmark that measure GPT-2 alone: its key/value cache, and its real size."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gpt_parity.bench.config import BENCHMARKS, BenchConfig
from gpt_parity.bench.processes import Section, milliseconds, run_worker
from gpt_parity.choices import Backend
from gpt_parity.model_config import GPT2Config

CACHED_MODEL = GPT2Config(65, 1024, 128, 4, heads=4)
LENGTHS = [16, 64, 256, 1024]
LARGE = "gpt2"
LARGE_STEPS = 3
LIMIT = 8 * 2**30
TWINS: list[Backend] = ["numpy", "torch"]


def cache(config: BenchConfig) -> tuple[Any, Section]:
    """Milliseconds for the next token of a GPT-2 against the length, with its cache and without."""
    figures = run_worker(
        "cache", model=asdict(CACHED_MODEL), lengths=LENGTHS, names=TWINS, seconds=config.seconds
    )
    kinds = [f"{name} {how}" for how in ("cached", "anew") for name in TWINS]
    section = Section(
        "The next token of a GPT-2 by the length of the text, milliseconds",
        ["length", *kinds, "NumPy time / torch, cached", "NumPy, anew / cached"],
    )
    for row in figures:
        numpy, torch, anew, _ = medians = [row[kind]["median"] for kind in kinds]
        section.rows.append([
            f"{row['length']:,}", *map(milliseconds, medians), f"{numpy / torch:.2f}",
            f"{anew / numpy:.1f}",
        ])  # fmt: skip
    first, last = figures[-2:]
    grown = [f"{kind} {last[kind]['median'] / first[kind]['median']:.1f}" for kind in kinds]
    model = CACHED_MODEL
    section.notes += [
        f"Context {model.context_size:,}, width {model.embedding_size}, {model.blocks} blocks, "
        f"{model.heads} heads, a batch of one, on one thread.",
        "Cached, the last position alone is computed: only its row of scores, and the keys and "
        "values that are kept, grow with the length T. Anew, all positions are computed: their "
        "products with the weights grow like T, their scores like T².",
        f"From {first['length']:,} to {last['length']:,} tokens the time grows by factors of "
        f"{', '.join(grown)}.",
    ]  # fmt: skip
    return figures, section


def large(config: BenchConfig) -> tuple[Any, Section]:
    """A forward pass and a training step of GPT-2 with 124 million parameters: time and memory."""
    peaks = {
        name: run_worker(
            "large", size=LARGE, name=name, limit=LIMIT if name == "numpy" else None,
            steps=LARGE_STEPS,
        )
        for name in TWINS
    }  # fmt: skip
    times = {
        which: run_worker(
            "passes", size=LARGE, names=TWINS, threads=1, seconds=config.seconds, which=which
        )
        for which in ("forward", "step")
    }
    section = Section("GPT-2 with 124 million parameters", ["what", *TWINS, "NumPy / torch"])

    def row(what: str, values: list[float]) -> None:
        numpy, torch = values
        section.rows.append([what, *(f"{v:.2f}" for v in values), f"{numpy / torch:.2f}"])

    passes = {"forward": "forward pass with its loss", "step": "training step"}
    for which, words in passes.items():
        row(f"{words}, seconds", [times[which][name]["median"] for name in TWINS])
    for which, words in passes.items():
        row(f"peak of the process, {words}, GB", [peaks[name][which] / 1e9 for name in TWINS])
    sizes, gib = BENCHMARKS[LARGE], LIMIT / 2**30
    limit = (
        f"NumPy's steps ran where the process was refused more than {gib:.0f} GiB."
        if peaks["numpy"]["limited"]
        else f"This system does not refuse a process more than {gib:.0f} GiB."
    )
    section.notes += [
        f"{sizes.model.parameter_count():,} parameters, {sizes.batch_size} text of {sizes.length} "
        "tokens, float32, one thread. Times are taken in turns in one process, which holds both "
        "models; peaks are of resident memory, of processes of their own with their libraries.",
        limit,
    ]  # fmt: skip
    return {"times": times, "peaks": peaks}, section
