"""The torch twin at its smallest: a model, a batch and a run of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from gpt_parity.backends import build_model
from gpt_parity.cli import main
from gpt_parity.oracle_config import PRESETS

TEXT = "the cat sat on the mat, the mat sat on the cat; " * 20
MODELS = ("gpt", "gpt2")
SIZES = {"gpt": PRESETS["tiny"], "gpt2": PRESETS["gpt2-tiny"]}
FLAGS = ("--data", "text.txt", "--max-steps", "6", "--context-size", "8",
         "--embedding-size", "8", "--blocks", "1", "--sample-tokens", "5", "--save-every", "3",
         "--log-every", "1", "--seed", "7")  # fmt: skip


def train(out: str, *flags: str, backend: str = "torch") -> int:
    return main(["train", "--backend", backend, *FLAGS, "--out", out, *flags])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("gpt-parity: error: ") and error.count("\n") == 1
    return error.removeprefix("gpt-parity: error: ").rstrip()


def batch(model: str) -> tuple[np.ndarray, np.ndarray]:
    size = SIZES[model]
    rng = np.random.RandomState(3)
    return tuple(rng.randint(0, size.model.vocab_size, (2, size.batch_size, size.length)))


def tiny(model: str, dtype: str = "float32") -> Any:
    return build_model("torch", SIZES[model].model, seed=1, dtype=dtype)


def content(folder: str) -> dict[str, bytes]:
    arrays = load_file(Path(folder, "checkpoint.safetensors"))
    return {name: array.tobytes() for name, array in arrays.items()}
