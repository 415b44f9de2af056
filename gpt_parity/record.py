"""Pages of docs/: one section for each long run, written by the run itself."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from gpt_parity.files import write_atomically
from gpt_parity.provenance import provenance

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "power.md"
TITLES = {
    "power.md": "How much the suite sees, and how often it cries wolf",
    "performance.md": "How fast it is, and how large",
    "drift.md": "How far two runs drift apart, and why",
    "reliability.md": "What was tried to lose a run, and to fool a reader",
}
OPENING = "Each section is the last result of the command that it names, written by that command."


def record(
    heading: str, lines: Iterable[str], page: Path | None = None,
    facts: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Put `lines` under `heading` in a page, docs/power.md, in place of what stood there.

    The section goes to the end of a page that has none of that heading, and makes a page that is
    not there. `facts` are the provenance at another moment than this, such as before the first of
    several sections changed the page.
    """
    page = PAGE if page is None else page
    facts = provenance() if facts is None else facts
    if page.exists():
        text = page.read_text(encoding="utf-8")
    else:
        text = f"# {TITLES[page.name]}\n\n{OPENING}\n" if page.name in TITLES else ""
    commit = (facts["commit"] or "unknown").replace("+", " + ")
    command = facts["command"]
    if command.partition(" ")[0].endswith(".py"):
        command = f"python scripts/{command}"
    section = "\n".join([
        f"## {heading}", "",
        f"`{command}`, {date.today()}, commit {commit}, NumPy "
        f"{facts['numpy']}, PyTorch {importlib.metadata.version('torch')}, "
        f"Python {facts['python']}.", "",
        *lines, "", "",
    ])  # fmt: skip
    found = re.compile(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    known = found.search(text) is not None
    text = found.sub(lambda _: section, text) if known else f"{text}\n{section}"
    page.parent.mkdir(exist_ok=True)
    write_atomically(page, (text.strip("\n") + "\n").encode())
