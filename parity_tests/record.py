"""docs/power.md: one section for each long run, written by the run itself."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from gpt_parity.files import write_atomically
from gpt_parity.provenance import provenance

PAGE = Path(__file__).resolve().parents[1] / "docs" / "power.md"
TITLE = """# How much the suite sees, and how often it cries wolf

Each section is the last result of the command that it names, written by that command.
"""


def record(heading: str, lines: Iterable[str]) -> None:
    """Put `lines` under `heading` in docs/power.md, in place of what stood there."""
    facts = provenance()
    text = PAGE.read_text() if PAGE.exists() else TITLE
    commit = (facts["commit"] or "unknown").replace("+", " + ")
    section = "\n".join([
        f"## {heading}", "",
        f"`python scripts/{facts['command']}`, {date.today()}, commit {commit}, NumPy "
        f"{facts['numpy']}, PyTorch {importlib.metadata.version('torch')}, "
        f"Python {facts['python']}.", "",
        *lines, "", "",
    ])  # fmt: skip
    found = re.compile(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    known = found.search(text) is not None
    text = found.sub(lambda _: section, text) if known else f"{text}\n{section}"
    PAGE.parent.mkdir(exist_ok=True)
    write_atomically(PAGE, (text.rstrip("\n") + "\n").encode())
