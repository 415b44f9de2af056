"""A small subject for the command `lockstep`, and that command in one call."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.cli import main
from gpt_parity.lessons import drift as command
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.verify import Subject, subject_of

CHECKOUT = Path(__file__).resolve().parents[1]
TEXT = "To be, or not to be, that is the question.\n" * 30


@pytest.fixture
def small_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with text.txt, and a model that takes a millisecond a step."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(command, "subject_of", small)


def small(config: VerifyConfig) -> Subject:
    """The subject of the command, in sizes that take a millisecond a step."""
    whole = subject_of(config)
    sizes = GPTConfig(whole.config.vocab_size, context_size=32, embedding_size=8, blocks=1)
    rng = np.random.default_rng(config.seed)
    shapes = sizes.parameter_shapes()
    weights = {
        name: (0.3 * rng.standard_normal(shape)).astype(np.float32).astype(np.float64)
        for name, shape in shapes.items()
    }
    return replace(whole, config=sizes, weights=weights)


def lockstep(*flags: str, steps: int = 12) -> int:
    return main(["lockstep", "--data", "text.txt", "--steps", str(steps), *flags])


def figures(*flags: str, steps: int = 12) -> dict[str, Any]:
    assert lockstep("--json", "drift.json", *flags, steps=steps) == 0
    return json.loads(Path("drift.json").read_text(encoding="utf-8"))


def names() -> list[str]:
    return list(GPTConfig(len(set(TEXT)), embedding_size=8, blocks=1).parameter_shapes())


def rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for look in content["looks"] for row in look["distances"]]


def pair(a: str, b: str) -> tuple[str, ...]:
    return ("--a", a, "--b", b)
