"""The table of `gpt-parity oracle names`."""

from __future__ import annotations

from rich import box
from rich.table import Table

from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.bundle_files import load_bundle
from gpt_parity.oracle.styles import Entry, names
from gpt_parity.oracle_config import PRESETS, NamesConfig


def names_table(config: NamesConfig) -> Table:
    """Every parameter of a model, what it is called in a style, and how it lies there.

    Of each, our name with our shape stands above theirs. Raises ValueError for a style that the
    model has not, and for a bundle that cannot be read.
    """
    model = load_bundle(config.ref).config if config.ref else None
    model = model or PRESETS[config.preset or "gpt2-tiny"].model
    entries = names(model, config.style)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column(f"parameter, and in style {config.style}", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for entry in entries:
        table.add_row(*_cells(entry, model))
    return table


def _cells(entry: Entry, model: GPTConfig) -> tuple[str, str, str]:
    shape = str(model.parameter_shapes()[entry.ours])
    if entry.ours == entry.theirs:
        return entry.ours, shape, entry.layout
    return f"{entry.ours}\n  {entry.theirs}", f"{shape}\n{entry.shape}", f"\n{entry.describe()}"
