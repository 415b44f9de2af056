"""Folders of random GPT-2s, and changes of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpt_parity.checkpoint import Checkpoint
from gpt_parity.hf import import_hf
from gpt_parity.model_config import GPT2Config, GPTConfig

# No two sizes are equal, but that attn.c_proj is square.
CONFIG = GPT2Config(13, 7, 12, 2, heads=3)
SQUARE = "transformer.h.1.attn.c_proj.weight"


def random_checkpoint(dtype: str = "float32", config: GPTConfig = CONFIG, **parts: Any):
    rng = np.random.default_rng(5)
    weights = {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in config.parameter_shapes().items()
    }
    return Checkpoint(config, "", "numpy", dtype, 0, weights, **parts)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**content, **values}.items() if v != "ABSENT"}))


def change_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        import_hf(folder)
    text = str(caught.value)
    assert message in text, text
    assert text.startswith(str(folder)) and "\n" not in text
