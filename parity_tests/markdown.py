"""Pages of the documentation as tests read them: their text, and what stands between fences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(page: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """What stands between fences of one language."""
    return [block for found, block in BLOCK.findall(text) if found == language]


def run(page: str) -> dict[str, Any]:
    """The names that a page defines, all of its Python run in one namespace."""
    namespace: dict[str, Any] = {}
    exec(compile("\n".join(blocks(read(page), "python")), page, "exec"), namespace)
    return namespace
