"""Beside the pass of a GPT-2: its first weights, continued text, random windows, training.

As in `test_gpt2_references.py`, each kind of reference alone must see a planted mistake.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model, load_backend
from gpt_parity.choices import BACKENDS
from gpt_parity.corpus import CharDataset, CharTokenizer
from gpt_parity.model_config import GPT2Config
from gpt_parity.sampling import sample
from gpt_parity.training import GPTTrainer, StepResult
from gpt_parity.weights import get_weights, set_weights
from parity_tests.comparers import assert_same_bits

other_backend = pytest.mark.reference("other backend")
exact_property = pytest.mark.reference("exact property")
by_hand = pytest.mark.reference("by hand")

both_backends = pytest.mark.parametrize("backend", BACKENDS)

START = GPT2Config(11, 5, 6, 3, heads=2)


@other_backend
def test_both_twins_start_from_the_same_numbers() -> None:
    assert_same_bits(*(get_weights(build_model(b, START, 7, "float64")) for b in BACKENDS))


@by_hand
@both_backends
def test_the_first_weights_are_one_stream_of_numbers_with_the_deviations_of_the_paper(
    backend: str,
) -> None:
    """0.02, and 0.02 / sqrt(2 L) for the L blocks' two additions to the stream."""
    rng = np.random.RandomState(7)
    found = get_weights(build_model(backend, START, 7, "float64"))
    assert list(found) == list(START.parameter_shapes())
    for name, weight in found.items():
        if name.endswith("bias"):
            expected = np.zeros(weight.shape)
        elif name.endswith("norm.weight"):
            expected = np.ones(weight.shape)
        else:
            adds = name.endswith((".attention.output.weight", ".feed_forward.output.weight"))
            expected = rng.randn(*weight.shape) * (0.02 / math.sqrt(6.0) if adds else 0.02)
        np.testing.assert_array_equal(weight, expected, err_msg=name)


TEXT = "abcdefghijklmnopqrstuvwxyz" * 4


def windows_model(backend: str) -> Any:
    tokenizer = CharTokenizer.from_text(TEXT)
    model = build_model(backend, GPT2Config(tokenizer.vocab_size, 5, 8, 2, heads=2), 3, "float64")
    set_weights(model, {n: 10.0 * w for n, w in get_weights(model).items()})
    return model, tokenizer


def trainer_of(backend: str) -> GPTTrainer:
    package = load_backend(backend)
    model, _ = windows_model(backend)
    return GPTTrainer(model, package.GPTLoss(), package.AdamWOptimizer(model.parameters(), lr=0.01))


@by_hand
@both_backends
def test_text_goes_on_as_from_all_logits_of_the_last_tokens(backend: str) -> None:
    """Three windows long: without anything known of earlier tokens, and one by one."""
    model, tokenizer = windows_model(backend)
    trainer = GPTTrainer(model, None, None)
    text = trainer.generate(tokenizer, "hello", 15, 1.0, None, 11)
    uniforms = np.random.RandomState(11)
    expected = "hello"
    for _ in range(15):
        logits = model.predict(tokenizer.encode(expected)[None, -5:])[0, -1]
        expected += tokenizer.decode([sample(logits, 1.0, None, uniforms.random_sample())])
    assert text == expected


@exact_property
@both_backends
def test_text_goes_on_alike_from_a_prompt_of_the_last_tokens(backend: str) -> None:
    model, tokenizer = windows_model(backend)
    trainer = GPTTrainer(model, None, None)
    whole = trainer.generate(tokenizer, "abc", 16, 1.0, None, np.random.RandomState(5))
    uniforms = np.random.RandomState(5)
    text = "abc"
    for _ in range(16):
        text += trainer.generate(tokenizer, text[-5:], 1, 1.0, None, uniforms)[-1]
    assert whole == text


def dataset() -> CharDataset:
    """81 characters to train on and 9 for the test, each different in its part."""
    text = "".join(chr(0x4E00 + i) for i in range(90))
    return CharDataset(text, context_size=4, batch_size=3)


@exact_property
def test_random_windows_lie_in_their_part_and_targets_are_one_place_on() -> None:
    data = dataset()
    batches = {}
    for split, (first, end) in {"train": (0, 81), "test": (81, 90)}.items():
        for seed, step in itertools.product(range(3), range(40)):
            tokens, targets = data.random_batch(split, seed, step)
            assert tokens.shape == targets.shape == (3, 4)
            np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
            np.testing.assert_array_equal(targets, tokens + 1)  # as this text goes
            assert tokens.min() >= first and targets.max() < end
            batches[split, seed, step] = tokens
    starts = {
        int(start) for (split, _, _), x in batches.items() if split == "test" for start in x[:, 0]
    }
    assert starts == set(range(81, 86))
    distinct = {x.tobytes() for (split, _, _), x in batches.items() if split == "train"}
    assert len(distinct) == 120


@by_hand
@pytest.mark.parametrize("split", ("train", "test"))
def test_random_windows_are_drawn_from_seed_and_step(split: str) -> None:
    first, length = {"train": (0, 81), "test": (81, 9)}[split]
    for seed, step in ((0, 0), (0, 1), (1, 0), (9, 250)):
        starts = np.random.default_rng([seed, step]).integers(length - 4, size=3)
        tokens, targets = dataset().random_batch(split, seed, step)
        for row, target, start in zip(tokens, targets, first + starts, strict=True):
            assert row.tolist() == list(range(start, start + 4))
            assert target.tolist() == list(range(start + 1, start + 5))


@by_hand
def test_every_step_trains_on_its_own_random_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    data, seen = dataset(), []
    trainer = trainer_of("numpy")

    def note(tokens: np.ndarray, targets: np.ndarray) -> StepResult:
        seen.append((tokens.tolist(), targets.tolist()))
        return StepResult(0.0, 0.0, 0.0)

    monkeypatch.setattr(trainer, "train_step", note)
    trainer.train(data, 1, lambda step: 0.1, start=2, max_steps=5, windows_seed=8)
    batches = (data.random_batch("train", 8, step) for step in (2, 3, 4))
    assert seen == [(tokens.tolist(), targets.tolist()) for tokens, targets in batches]


@exact_property
@both_backends
def test_training_in_two_parts_is_training_in_one(backend: str) -> None:
    data = CharDataset(TEXT, context_size=5, batch_size=2)
    found = []
    for parts in ((0, 4), (0, 2, 4)):
        trainer = trainer_of(backend)
        for start, end in itertools.pairwise(parts):
            trainer.train(data, 1, lambda step: 0.01, start=start, max_steps=end, windows_seed=1)
        found.append(get_weights(trainer.model))
    assert_same_bits(*found)
