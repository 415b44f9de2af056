"""What the tests of public reports share: both backends by name, gradients, small trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model, load_backend
from gpt_parity.corpus import CharDataset, CharTokenizer
from gpt_parity.model_config import GPTConfig
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import get_weights, set_weights
from parity_tests.registry import TORCH, TWINS, Twin

both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)

TEXT = "What was seen once elsewhere, and named, is looked for here; who names it, finds it.\n" * 8


def f64(values: Any) -> np.ndarray:
    return np.array(values, np.float64)


def f32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def gradients(
    twin: Twin, function: Callable[..., Any], *arrays: np.ndarray, g: np.ndarray | None = None
) -> list[np.ndarray]:
    """The gradients of `function` by each array, for the cotangent `g`; none for a scalar."""
    leaves = [twin.tensor(array) for array in arrays]
    backward(twin, function(*leaves), g)
    return [twin.array(leaf.grad) for leaf in leaves]


def backward(twin: Twin, y: Any, g: np.ndarray | None = None, **options: Any) -> None:
    if g is None:
        y.backward(**options)
    else:
        y.backward(torch.tensor(g) if twin is TORCH else g, **options)


def values(twin: Twin, function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    return twin.array(function(*(twin.tensor(array) for array in arrays)))


def set_grad(twin: Twin, parameter: Any, grad: np.ndarray | None) -> None:
    parameter.grad = torch.tensor(grad) if twin is TORCH and grad is not None else grad


def optimizer_of(twin: Twin, *arrays: np.ndarray, **arguments: Any) -> tuple[list[Any], Any]:
    parameters = [twin.parameter(array) for array in arrays]
    return parameters, twin.optim.AdamWOptimizer(parameters, **arguments)


def trainer_of(
    backend: str, text: str = TEXT, dtype: str = "float64", context: int = 8, batch: int = 4,
    threads: int = 1, **options: Any,
) -> tuple[GPTTrainer, CharDataset]:  # fmt: skip
    """A small trainer of seed 1 and the batches of `text`."""
    implementation = load_backend(backend)
    dataset = CharDataset(text, context_size=context, batch_size=batch, **options)
    model = build_model(backend, GPTConfig(dataset.vocab_size, context, 6, 2), seed=1, dtype=dtype)
    optimizer = implementation.AdamWOptimizer(model.parameters(), lr=1e-2)
    return GPTTrainer(model, implementation.GPTLoss(), optimizer, threads=threads), dataset


def lively(trainer: GPTTrainer) -> GPTTrainer:
    """The trainer with weights of which each token, and its place, changes the logits.

    At the start of a training they hardly do, and with much larger ones each position attends to
    itself alone.
    """
    rng = np.random.default_rng(0)
    weights = {}
    for name, w in get_weights(trainer.model).items():
        scale = 0.7 if name.startswith("embedding.") else 1.0 / np.sqrt(w.shape[-1])
        weights[name] = (scale * rng.standard_normal(w.shape)).astype(w.dtype)
    set_weights(trainer.model, weights)
    return trainer


def logits_of_last(model: Any, tokenizer: CharTokenizer, text: str) -> np.ndarray:
    """The logits (V,) after `text`, by the whole forward pass."""
    return model.predict(tokenizer.encode(text)[None])[0, -1]
