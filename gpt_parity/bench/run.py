"""The body of the command `bench`: run the parts, print their tables, write them down."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gpt_parity.backends import load_backend
from gpt_parity.bench.config import BenchConfig
from gpt_parity.bench.growth import plot_growth
from gpt_parity.bench.parts import PARTS, Section
from gpt_parity.corpus import read_corpus
from gpt_parity.files import write_atomically
from gpt_parity.machine import available_cores
from gpt_parity.plots import require_matplotlib
from gpt_parity.provenance import cpu_model, provenance
from gpt_parity.record import record

SCHEMA = "gpt-parity/benchmark"
SCHEMA_VERSION = 1


def run(config: BenchConfig, console: Console) -> int:
    """Measure, print, and write what was asked for; returns 0.

    Raises MissingBackendError without PyTorch, ChildProcessError where a measurement fails or the
    contenders do not compute the same losses.
    """
    load_backend("torch")
    if "recipe" in config.parts:
        read_corpus(config.data)  # an error now, not after the measurements before it
    if config.report is not None:
        if "growth" in config.parts:
            require_matplotlib("--report with the part growth")
        if config.report.exists():
            config.report.read_text(encoding="utf-8")  # an error now, not after the measurement
    facts, load = provenance(), load_average()
    parts = [*config.parts, *(["profile"] if config.profile else [])]
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(parts):
        with console.status(f"{name}: {(PARTS[name].__doc__ or '').strip()}"):
            figures[name], section = PARTS[name](config)
        print_section(section, console)
        lines = markdown(section)
        if config.report is not None:
            if name == "growth":
                picture = config.report.with_name(f"{config.report.stem}-growth.svg")
                plot_growth(figures[name], picture)
                lines += ["", f"![Time of a step over each size]({picture.name})"]
            place = f"On {machine()}; load average before: {load}."
            record(section.heading, [place, "", *lines], config.report, facts)
        if config.json is not None:
            content = {"schema": SCHEMA, "version": SCHEMA_VERSION, "figures": figures,
                       "provenance": facts}  # fmt: skip
            write_atomically(config.json, (json.dumps(content, indent=2) + "\n").encode())
    return 0


def load_average() -> str:
    """Processes that wanted a core in the last minute."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def machine() -> str:
    """The processor, its cores that may be used, and the system."""
    return f"{cpu_model()}, {available_cores()} cores, {platform.system()} {platform.machine()}"


def print_section(section: Section, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=section.heading, title_justify="left")
    for index, name in enumerate(section.header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in section.rows:
        table.add_row(*row)
    console.print(table)
    for note in section.notes:
        console.print(note, markup=False, highlight=False)


def markdown(section: Section) -> list[str]:
    rows = [section.header, ["---"] * len(section.header), *section.rows]
    table = [f"| {' | '.join(row)} |" for row in rows]
    return [*table, *(line for note in section.notes for line in ("", note))]
