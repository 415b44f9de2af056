"""`docs/reports.md` and the tests list the same reports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference("exact property")

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "reports.md"
REPORTS = 42


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| B")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def ids_in_tests() -> set[str]:
    """The ids in the names of the tests of this folder."""
    found = set()
    for file in FOLDER.glob("test_*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found |= set(re.findall(r"^test_(B\d\d)_[a-z]", node.name))
    return found


def test_every_report_has_a_row_and_a_test() -> None:
    listed = [row[0] for row in rows()]
    assert listed == sorted(set(listed)) and len(listed) == REPORTS
    assert set(listed) == ids_in_tests()


def test_every_row_says_where_and_what() -> None:
    for row in rows():
        assert len(row) == 4 and all(row), row[0]
        for source in row[2].split(", "):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source), source
