"""The main program of the source text, written once and run on either backend."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import numpy_impl
import torch_impl
from gpt_parity.corpus import CharDataset
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import GPTTrainer, StepResult

TEXT = "".join(
    f"{number} times {number + 1} is {number * (number + 1)}, and half of it a triangle.\n"
    for number in range(40)
)
CONTEXT_SIZE, BATCH_SIZE, EPOCHS = 16, 4, 3


class Outcome(NamedTuple):
    steps: list[StepResult]
    predictions: np.ndarray
    loss: float
    text: str


def program(implementation: ModuleType, **options: Any) -> Outcome:
    """Data set, model, loss, optimizer, schedule; then train, test and generate."""
    dataset = CharDataset(TEXT, context_size=CONTEXT_SIZE, batch_size=BATCH_SIZE)
    model = implementation.GPT(dataset.vocab_size, CONTEXT_SIZE, 24, 2, seed=42, **options)
    loss_fn = implementation.GPTLoss()
    optimizer = implementation.AdamWOptimizer(model.parameters(), lr=3e-3)
    trainer = GPTTrainer(model, loss_fn, optimizer)

    total_steps = EPOCHS * dataset.batch_count("train")
    scheduler = WarmupCosineScheduler(3e-3, total_steps, 10, 3e-4)
    steps = trainer.train(dataset, EPOCHS, scheduler)
    predictions, loss = trainer.test(dataset)
    text = trainer.generate(dataset, "7 times", 60, temperature=0.8, seed=1)
    return Outcome(steps, predictions, loss, text)


@pytest.mark.reference("other backend")
def test_the_program_is_the_same_on_both_backends() -> None:
    """Losses to the rounding of float64 over all steps (see `assert_agree` in test_training)."""
    ours, theirs = (program(backend, dtype="float64") for backend in (numpy_impl, torch_impl))
    count = len(ours.steps)
    windows = (int(0.9 * len(TEXT)) - CONTEXT_SIZE - 1) // (CONTEXT_SIZE // 2) + 1
    assert count == len(theirs.steps) == EPOCHS * (windows // BATCH_SIZE)
    bound = 50 * count * 2.0**-53
    for step, (a, b) in enumerate(zip(ours.steps, theirs.steps, strict=True), start=1):
        assert abs(a.loss - b.loss) <= 50 * step * 2.0**-53 * b.loss, f"loss of step {step}"
        assert abs(a.grad_norm - b.grad_norm) <= 50 * step * 2.0**-53 * b.grad_norm
        assert a.lr == b.lr
    assert abs(ours.loss - theirs.loss) <= bound * theirs.loss
    assert (ours.predictions == theirs.predictions).all()
    assert ours.text == theirs.text and len(ours.text) == len("7 times") + 60
    assert ours.loss < ours.steps[0].loss - 0.5  # it has learnt something


@pytest.mark.reference("exact property")
def test_the_program_repeats_itself_in_float32() -> None:
    """The default dtype, twice: the same to the bit, and near the other backend's."""
    once, again = program(numpy_impl), program(numpy_impl)
    assert (once.steps, once.loss, once.text) == (again.steps, again.loss, again.text)
    other = program(torch_impl)
    assert other.steps[0].lr == once.steps[0].lr
    assert abs(other.steps[0].loss - once.steps[0].loss) <= 50 * 2.0**-24 * once.steps[0].loss
