"""The parts of the benchmark: each runs its measurements and returns figures and a section."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt_parity.bench.common import is_gpt2
from gpt_parity.bench.config import BENCHMARKS, BenchConfig
from gpt_parity.bench.gpt2_parts import cache, large
from gpt_parity.bench.growth import AXES, growth_section
from gpt_parity.bench.processes import Section, milliseconds, run_python, run_worker
from gpt_parity.machine import available_cores
from gpt_parity.model_config import GPT2Config

ONE_THREAD = ["numpy", "torch", "torch unchecked", "torch sdpa", "torch compiled", "floor"]
SEVERAL_THREADS = ["numpy", "torch", "torch on one thread", "torch compiled"]
STEPS_OF_LEAKS = [100, 1000]
GENERATED_TOKENS = 200
STEPS_OF_PROFILE = {"medium": 5, "gpt2": 3}  # of the other sizes 50


def rivals(size: str, threads: int) -> list[str]:
    """Who can be timed at this size: the floor is written for the text's model alone.

    At 124 million parameters more than the twins would not fit into memory side by side.
    """
    if size == "gpt2":
        return ["numpy", "torch"]
    names = ONE_THREAD if threads == 1 else SEVERAL_THREADS
    return [name for name in names if name != "floor" or not is_gpt2(BENCHMARKS[size])]


def thread_counts() -> list[int]:
    """One thread, and all cores where there are several."""
    return sorted({1, available_cores()})


def steps(config: BenchConfig) -> tuple[Any, Section]:
    """Training steps."""
    return _passes(config, "step", "Training step")


def forward(config: BenchConfig) -> tuple[Any, Section]:
    """Forward passes with their loss, without a graph."""
    return _passes(config, "forward", "Forward pass")


def _passes(config: BenchConfig, which: str, heading: str) -> tuple[Any, Section]:
    section = Section(
        f"{heading}, milliseconds",
        ["size", "threads", "contender", "median", "middle half", "NumPy time / its"],
    )
    figures: dict[str, Any] = {}
    for size in config.sizes:
        for threads in thread_counts():
            names = rivals(size, threads)
            found = run_worker(
                "passes", threads, size=size, names=names, threads=1 if threads == 1 else None,
                seconds=config.seconds, which=which,
            )  # fmt: skip
            figures[f"{size}, {threads} threads"] = found
            for name in names:
                t = found[name]
                section.rows.append([
                    size, str(threads), name, milliseconds(t["median"]),
                    f"{milliseconds(t['lower'])} to {milliseconds(t['upper'])}",
                    f"{_ratio(found, name):.2f}",
                ])  # fmt: skip
    section.notes += _summary(figures, config.sizes)
    return figures, section


def _ratio(found: dict[str, Any], name: str) -> float:
    """Time of NumPy over that of another contender."""
    return found["numpy"]["median"] / found[name]["median"]


def _summary(figures: dict[str, Any], sizes: tuple[str, ...]) -> list[str]:
    """One line for each rival: NumPy's time over its, by size."""

    def line(rival: str, threads: int, names: list[str]) -> str:
        timed = {size: figures[f"{size}, {threads} threads"] for size in sizes}
        ratios = [
            f"{size} {max(_ratio(found, n) for n in names if n in found):.2f}"
            for size, found in timed.items()
            if not found.keys().isdisjoint(names)
        ]
        return f"NumPy's time over {rival}: {', '.join(ratios)}." if ratios else ""

    single = ("torch", "torch compiled", "floor")
    lines = [line(f"that of {name}, one thread", 1, [name]) for name in single]
    if (cores := available_cores()) > 1:
        faster = ["torch", "torch on one thread"]
        lines += [
            line(f"that of torch on all or on one of {cores} cores, the faster", cores, faster),
            line(f"that of torch compiled on {cores} cores", cores, ["torch compiled"]),
        ]
    return [line for line in lines if line]


def generation(config: BenchConfig) -> tuple[Any, Section]:
    """Generated tokens per second, batch of one, one thread."""
    section = Section(
        "Generation, tokens per second", ["size", "numpy", "torch", "NumPy rate / torch"]
    )
    figures = {}
    for size in config.sizes:
        found = run_worker(
            "generation", size=size, names=["numpy", "torch"], seconds=config.seconds,
            tokens=GENERATED_TOKENS,
        )  # fmt: skip
        rates = {name: GENERATED_TOKENS / t["median"] for name, t in found.items()}
        figures[size] = rates
        section.rows.append([
            size, f"{rates['numpy']:,.0f}", f"{rates['torch']:,.0f}",
            f"{rates['numpy'] / rates['torch']:.2f}",
        ])  # fmt: skip
    section.notes.append(
        f"{GENERATED_TOKENS} tokens after a prompt of one, on one thread. While the window grows, "
        "only the new position is computed; once it is full, every position moves."
    )
    return figures, section


def oracle(config: BenchConfig) -> tuple[Any, Section]:
    """Seconds of `oracle export` and `oracle check` as commands."""
    section = Section("Oracle at the source size, seconds of wall time", ["command", "median"])
    program = ["-m", "gpt_parity"]
    with tempfile.TemporaryDirectory() as folder:
        reference, right, wrong = (
            str(Path(folder) / name) for name in ("reference.safetensors", "right.npz", "wrong.npz")
        )
        export = ["oracle", "export", "-o", reference, "--overwrite"]
        run_python([*program, *export], "oracle export")
        for out in (right, wrong):
            run_worker("submission", reference=reference, out=out, mistake=out == wrong)
        commands = {
            "gpt-parity --version, the start alone": ["--version"],
            "oracle export": export,
            "oracle check, right results": ["oracle", "check", right, "--ref", reference],
            "oracle check, wrong ones, with hints": ["oracle", "check", wrong, "--ref", reference],
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(5):
            for name, arguments in commands.items():
                start = time.perf_counter()
                run_python([*program, *arguments], name, code=int("wrong" in name))
                found[name].append(time.perf_counter() - start)
    figures = {name: sorted(times)[2] for name, times in found.items()}
    section.rows = [[name, f"{seconds:.2f}"] for name, seconds in figures.items()]
    return figures, section


def memory(config: BenchConfig) -> tuple[Any, Section]:
    """Peak memory of a training step, and whether anything grows."""
    section = Section(
        "Memory of training steps, megabytes above those before the model is built",
        ["size", "must live", "numpy", "torch", "NumPy / must live"],
    )
    figures: dict[str, Any] = {}
    for size in config.sizes:
        must = bytes_that_must_live(size)
        peaks = {
            name: run_worker("memory", size=size, name=name)["peak"] for name in ("numpy", "torch")
        }
        figures[size] = {"must_live": must, **peaks}
        section.rows.append([
            size, *(f"{b / 1e6:.1f}" for b in (must, peaks["numpy"], peaks["torch"])),
            f"{peaks['numpy'] / must:.2f}",
        ])  # fmt: skip
    figures["leaks"] = leaks = run_worker("leaks", steps=STEPS_OF_LEAKS)
    section.notes += [
        "Must live: weights, gradients, both moments, and what the backward pass of the fused "
        "floor reads: per position and block, x, the context, the attention's result (E each), "
        "GELU and its derivative (4 E each) and a row of T weights; the last x and V logits. "
        "GPT-2: both normalised x with their deviations, query, key, value and context (E each), "
        "GELU and its derivative, a row of T weights for each head; the last normalised x and V "
        "logits.",
        "Source size: " + "; ".join(
            f"after step {found['step']:,} there are {found['tensors']} Tensors and "
            f"{found['resident'] / 1e6:.2f} MB" for found in leaks
        ) + ".",
    ]  # fmt: skip
    return figures, section


def bytes_that_must_live(size: str) -> int:
    """Float32 bytes that a step cannot do without; see the note of `memory`."""
    preset = BENCHMARKS[size]
    model, rows, width = (
        preset.model,
        preset.batch_size * preset.length,
        preset.model.embedding_size,
    )
    if isinstance(model, GPT2Config):
        per_row = model.blocks * (14 * width + 2 + model.heads * preset.length)
        per_row += width + 1 + model.vocab_size
    else:
        per_row = model.blocks * (11 * width + preset.length)
        per_row += width + model.vocab_size
    return 4 * (4 * model.parameter_count() + rows * per_row)


def start(config: BenchConfig) -> tuple[Any, Section]:
    """Seconds until the packages are imported."""
    section = Section("Import, seconds of a whole process", ["program", "median"])
    programs = {
        "import numpy": "import numpy",
        "import gpt_parity, numpy_impl": "import gpt_parity, numpy_impl",
        "import torch": "import torch",
    }
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(5):
        for name, program in programs.items():
            begin = time.perf_counter()
            run_python(["-c", program], name)
            found[name].append(time.perf_counter() - begin)
    figures = {name: sorted(times)[2] for name, times in found.items()}
    section.rows = [[name, f"{seconds:.3f}"] for name, seconds in figures.items()]
    return figures, section


def recipe(config: BenchConfig) -> tuple[Any, Section]:
    """The whole recipe of the source text on both backends, one thread, in turns."""
    data = "" if config.data is None else str(config.data.resolve())
    figures = run_worker("recipe", names=["numpy", "torch"], data=data, steps=config.recipe_steps)
    seconds, losses = figures["seconds"], figures["test_loss"]
    section = Section(
        f"The recipe of the source text, {figures['steps']:,} steps",
        ["backend", "seconds", "test loss", "NumPy time / its"],
        [[name, f"{seconds[name]:.1f}", f"{losses[name]:.4f}",
          f"{seconds['numpy'] / seconds[name]:.2f}"] for name in seconds],
        [f"On {figures['corpus']}, one thread, batches included, the backends in turns."],
    )  # fmt: skip
    return figures, section


def growth(config: BenchConfig) -> tuple[Any, Section]:
    """Time and memory of a step over T, E, B and the number of blocks."""
    figures = {
        axis: run_worker("growth", axis=axis, values=values, seconds=config.seconds / 20)
        for axis, values in AXES.items()
    }
    return figures, Section(*growth_section(figures))


def suite(config: BenchConfig) -> tuple[Any, Section]:
    """Seconds of the test suite."""
    begin = time.perf_counter()
    printed = run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider"], "the test suite")
    seconds = time.perf_counter() - begin
    last = printed.strip().splitlines()[-1].strip("= ")
    return {"seconds": seconds, "result": last}, Section(
        "The test suite", ["result", "seconds"], [[last, f"{seconds:.0f}"]]
    )


def profile(config: BenchConfig) -> tuple[Any, Section]:
    """Where the NumPy step spends its time."""
    section = Section(
        "Operations of a NumPy step, milliseconds", ["size", "operation", "calls", "ms", "share"]
    )
    figures = {}
    for size in config.sizes:
        found = run_worker("operations", size=size, steps=STEPS_OF_PROFILE.get(size, 50))
        figures[size] = found
        total = sum(each["seconds"] for each in found.values())
        for name, each in sorted(found.items(), key=lambda item: -item[1]["seconds"]):
            section.rows.append([
                size, name, f"{each['calls']:.0f}", milliseconds(each["seconds"]),
                f"{each['seconds'] / total:.1%}",
            ])  # fmt: skip
    return figures, section


PARTS: dict[str, Callable[[BenchConfig], tuple[Any, Section]]] = {
    "step": steps,
    "forward": forward,
    "generation": generation,
    "cache": cache,
    "oracle": oracle,
    "memory": memory,
    "start": start,
    "profile": profile,
    "recipe": recipe,
    "growth": growth,
    "large": large,
    "suite": suite,
}
