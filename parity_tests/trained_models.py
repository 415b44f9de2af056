"""A small model after some steps, and its checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPTConfig
from gpt_parity.training import GPTTrainer

CONFIG = GPTConfig(vocab_size=7, context_size=5, embedding_size=4, blocks=1)
VOCABULARY = "\n abcdé"
WAYS = list(itertools.product(BACKENDS, BACKENDS))

EMBEDDING = "embedding.embedding.weight"  # (7, 4)


def trained(backend: str, dtype: str, steps: int = 3) -> GPTTrainer:
    implementation = load_backend(backend)
    model = build_model(backend, CONFIG, seed=3, dtype=dtype)
    optimizer = implementation.AdamWOptimizer(model.parameters(), lr=1e-2)
    trainer = GPTTrainer(model, implementation.GPTLoss(), optimizer)
    for tokens, targets in batches(steps):
        trainer.train_step(tokens, targets)
    return trainer


def batches(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 7, (2, 2, 5))) for _ in range(count)]


def save_trained(path: Path, trainer: GPTTrainer, **options: Any) -> Path:
    save_checkpoint(
        path, trainer.model, config=CONFIG, vocabulary=VOCABULARY, step=trainer.steps,
        optimizer=trainer.optimizer, **options,
    )  # fmt: skip
    return path
