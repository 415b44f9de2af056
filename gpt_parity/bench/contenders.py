"""Who is timed: the twins, PyTorch compiled and with its fused attention, and the floor.

Every contender does the same step on the same batches: forward, loss read out, backward, clipping,
AdamW. PyTorch runs with its fused AdamW, without hooks, and its variants are spared the checks of
the input that the twins make.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.backends import build_model, load_backend
from gpt_parity.bench import floor
from gpt_parity.bench.common import is_gpt2
from gpt_parity.bench.unchecked import unchecked_loss
from gpt_parity.choices import Backend
from gpt_parity.config import TrainConfig
from gpt_parity.model_config import Preset
from gpt_parity.training import GPTTrainer, inference, layers_of, new_trainer
from gpt_parity.weights import get_weights

FLOOR_SHA256 = "e19f8298f6f7039b1628376f6889e1b5842ff69e610e8f28fe635f127568b5dc"

Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]
Forward = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Contender:
    """A training step that returns loss and gradient norm, and a forward pass with its loss.

    `weights` are copies of those that the step has updated.
    """

    name: str
    step: Step
    forward: Forward
    weights: Callable[[], dict[str, np.ndarray]]


def contenders(names: list[str], size: Preset, threads: int | None) -> list[Contender]:
    """The contenders of these names, all with the same initial weights.

    threads: those of the NumPy twin, or None for its own choice. Raises RuntimeError for a floor
    that is not the one on record, ValueError for a floor of GPT-2, and what the backends raise.
    """
    return [BUILDERS[name](name, size, threads) for name in names]


def trainer_of(backend: Backend, size: Preset, threads: int | None = 1) -> GPTTrainer:
    """A trainer by the recipe of the source text for a model of another size."""
    heads = {"model": "gpt2", "heads": size.model.heads} if is_gpt2(size) else {}
    config = TrainConfig(
        backend=backend, threads=threads, batch_size=size.batch_size, context_size=size.length,
        embedding_size=size.model.embedding_size, blocks=size.model.blocks, **heads,
    )  # fmt: skip
    return new_trainer(config, size.model)


def twin(name: Backend, size: Preset, threads: int | None) -> Contender:
    """A twin as it is: "numpy" or "torch"."""
    trainer = trainer_of(name, size, threads)
    layers = layers_of(trainer.model)

    def forward(tokens: np.ndarray, targets: np.ndarray) -> float:
        with inference(trainer.model, layers):
            return trainer.loss_fn(trainer.model(tokens), targets).item()

    return Contender(
        name, lambda *batch: trainer.train_step(*batch)[:2], forward,
        lambda: get_weights(trainer.model),
    )  # fmt: skip


def torch_on_one_thread(name: str, size: Preset, threads: int | None) -> Contender:
    """The torch twin where several cores are at hand and one is faster."""
    contender = twin("torch", size, 1)
    torch = sys.modules["torch"]

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*batch: np.ndarray) -> Any:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return function(*batch)
            finally:
                torch.set_num_threads(before)

        return call

    return Contender(name, alone(contender.step), alone(contender.forward), contender.weights)


def torch_variant(name: str, size: Preset, threads: int | None) -> Contender:
    """PyTorch without the twin's checks of its input: plain, compiled, or with its own attention.

    "torch unchecked" runs the twin's operations, "torch compiled" lets torch.compile fuse them,
    "torch sdpa" replaces the attention by scaled_dot_product_attention.
    """
    load_backend("torch")
    import torch

    trainer = trainer_of("torch", size)
    model, optimizer = trainer.model, trainer.optimizer
    loss_of = unchecked_loss(model, size, fused_attention=name == "torch sdpa")
    if name == "torch compiled":
        loss_of = torch.compile(loss_of)
    tensors = torch.from_numpy

    def step(tokens: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        optimizer.zero_grad()
        loss = loss_of(tensors(tokens), tensors(targets))
        value = loss.item()
        loss.backward()
        norm = optimizer.clip_grad_norm(trainer.max_norm)
        optimizer.step()
        return value, norm

    def forward(tokens: np.ndarray, targets: np.ndarray) -> float:
        with torch.inference_mode():
            return loss_of(tensors(tokens), tensors(targets)).item()

    return Contender(name, step, forward, lambda: get_weights(model))


def floor_step(name: str, size: Preset, threads: int | None) -> Contender:
    """The hand-fused step of the text's model; its threads are those of the matrix products."""
    found = hashlib.sha256(Path(floor.__file__).read_bytes()).hexdigest()
    if found != FLOOR_SHA256:
        raise RuntimeError(f"floor.py has sha256 {found}, the one on record is {FLOOR_SHA256}")
    if is_gpt2(size):
        raise ValueError("floor: got a GPT-2, needed a model of the source text")
    recipe = TrainConfig()
    weights = get_weights(build_model("numpy", size.model, recipe.seed))
    hand = floor.FloorStep(
        weights, size.batch_size, size.length, lr=recipe.learning_rate, betas=recipe.betas,
        eps=recipe.eps, weight_decay=recipe.weight_decay, max_norm=recipe.max_norm,
    )  # fmt: skip
    return Contender(
        name, hand.step, hand.forward, lambda: {n: w.copy() for n, w in hand.weight.items()}
    )


BUILDERS: dict[str, Callable[[Any, Preset, int | None], Contender]] = {
    "numpy": twin,
    "torch": twin,
    "torch on one thread": torch_on_one_thread,
    "torch unchecked": torch_variant,
    "torch compiled": torch_variant,
    "torch sdpa": torch_variant,
    "floor": floor_step,
}
