"""The commands on a small text: in this process, and in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt_parity.cli import main

CHECKOUT = Path(__file__).resolve().parents[1]
TEXT = "Früh übt sich, was ein Meister werden will.\n" * 12
SMALL = [
    "--context-size", "8", "--embedding-size", "8", "--blocks", "1", "--log-every", "2",
    "--sample-tokens", "5",
]  # fmt: skip


def train(*flags: str, out: str = "run") -> int:
    return main(["train", "--data", "text.txt", "--out", out, *SMALL, *flags])


def checkpoint(capsys: pytest.CaptureFixture[str], *flags: str) -> None:
    assert train("--max-steps", "4", *flags) == 0
    capsys.readouterr()


def one_error(capsys: pytest.CaptureFixture[str], code: int) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("gpt-parity: error: "), lines
    return lines[0].removeprefix("gpt-parity: error: ")


def command(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """The command in a process of its own, without PyTorch and without a locale."""
    environment = {
        **os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(CHECKOUT),
    }  # fmt: skip
    environment.pop("PYTHONUNBUFFERED", None)
    # A background shell starts its programs with SIGINT ignored; the tests send it.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.modules['torch'] = None; from gpt_parity.cli import main; sys.exit(main())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options,
    )  # fmt: skip
