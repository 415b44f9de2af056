"""A line with file and reason and nothing else done: what commands make of hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import save_checkpoint
from gpt_parity.cli import main
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.bundle import Bundle
from parity_tests.hostile.seeds import CONFIG, VOCABULARY, reference

TEXT = "abcde" * 100
BIAS = "output.output.bias"
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return reference()


def checkpoint(path: str = "c.safetensors", config: GPTConfig = CONFIG, **options: Any) -> bytes:
    model = build_model("numpy", config)
    optimizer = load_backend("numpy").AdamWOptimizer(model.parameters())
    letters = VOCABULARY[: config.vocab_size]
    given = {"vocabulary": letters, "optimizer": optimizer, **options}
    save_checkpoint(Path(path), model, config=config, **given)
    return Path(path).read_bytes()


def joined(header: str | dict[str, Any], payload: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + payload


COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "--prompt", "a", "--checkpoint"],
    "verify": ["verify", "--data", "text.txt", "--steps", "0", "--checkpoint"],
    "export": ["oracle", "export", "-o", "new", "--weights"],
}


def contents(folder: Path) -> dict[str, bytes | None]:
    files = sorted(folder.rglob("*"))
    return {str(p): p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in files}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that exits with 2 and leaves every file as it was."""
    before = contents(Path.cwd())
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("gpt-parity: error: ") and err.count("\n") == 1, err
    assert err[:-1].isprintable() and len(err) < 1200
    assert contents(Path.cwd()) == before
    return err


def check(mine: str, ref: str) -> list[str]:
    return ["oracle", "check", mine, "--ref", ref]


def npy(header: str, data: bytes = bytes(4), version: int = 1, length: int | None = None) -> bytes:
    text = header.encode()
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes((version, 0)) + size.to_bytes(2 * version, "little") + text + data


def described(shape: str, descr: str = "<f4") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
