"""Reported faults of generation: sampling, temperatures, prompts, and modes afterwards.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPTConfig
from gpt_parity.sampling import sample
from gpt_parity.training import layers_of
from numpy_impl import tape
from parity_tests.reports.common import lively, logits_of_last, trainer_of

pytestmark = pytest.mark.reference("by hand")


def test_B44_single_precision_logits_never_stop_the_sampling() -> None:
    """NumPy's own choice refuses these probabilities, whose float32 sum is off by 7.45e-8."""
    logits = np.array([0.3, -0.3, 1.3], np.float32)
    p = np.array([0.23435154557228088, 0.1286148577928543, 0.6370335221290588], np.float32)
    assert abs(p.astype(np.float64).sum() - 1.0) > 1.5e-8
    for choose in (np.random.RandomState(0).choice, np.random.default_rng(0).choice):
        with pytest.raises(ValueError, match=r"do not sum to 1|sum to 1"):
            choose(3, p=p.astype(np.float64))
        with pytest.raises(ValueError, match="sum to 1"):
            choose(3, p=p.tolist())
    for given in (logits, logits.astype(np.float64), logits.tolist()):
        assert [sample(given, 1.0, None, u) for u in (0.0, 0.3, 0.5, 1 - 2**-53)] == [0, 1, 2, 2]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_B44_frequencies_of_ten_thousand_draws(dtype: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(65).astype(dtype)
    drawn = [sample(logits, 1.0, None, u) for u in rng.random(10_000)]
    e = [math.exp(float(x)) for x in logits]
    p = np.array(e) / math.fsum(e)
    off = np.abs(np.bincount(drawn, minlength=65) - 10_000 * p)
    assert (off <= 6.0 * np.sqrt(10_000 * p * (1 - p))).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_B44_every_number_of_the_unit_interval_gives_a_token(backend: str) -> None:
    trainer, dataset = trainer_of(backend, dtype="float32")
    logits = logits_of_last(trainer.model, dataset.tokenizer, "What")
    assert logits.dtype == np.float32
    for u in (0.0, 5e-324, 0.5, 1.0 - 2.0**-53, *np.linspace(0.0, 0.999, 50)):
        assert 0 <= sample(logits, 1.0, None, float(u)) < dataset.vocab_size


@pytest.mark.parametrize("logits", [[1, 3, 2], [1, 3, 3], np.array([1, 3, 2], np.float32)],
                         ids=["list", "ties", "float32"])  # fmt: skip
def test_B45_temperature_zero_takes_the_first_of_the_largest(logits: Any) -> None:
    for u in (0.0, 0.5, 1.0 - 2.0**-53):
        assert sample(logits, 0.0, None, u) == sample(logits, -0.0, None, u) == 1
    for temperature in (1e-4, 1e-38, np.float32(1e-38), 5e-324):
        assert sample([1, 3, 2], temperature, None, 0.999) == 1
    drawn = [sample(logits, math.inf, None, u) for u in (0.0, 0.34, 0.67)]
    assert drawn == [0, 1, 2]
    for bad in (-1.0, math.nan, -math.inf, -1e-300):
        with pytest.raises(ValueError, match=r"temperature is .*, 0 or more is needed"):
            sample(logits, bad, None, 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_B45_greedy_text_of_both_backends(backend: str) -> None:
    trainer, dataset = trainer_of(backend, context=4)
    lively(trainer)
    greedy = trainer.generate(dataset, "What", 12, temperature=0.0)
    assert greedy == trainer.generate(dataset, "What", 12, temperature=1e-300, seed=9)
    text = "What"
    for _ in range(12):
        logits = logits_of_last(trainer.model, dataset.tokenizer, text[-4:])
        text += dataset.tokenizer.decode([int(logits.argmax())])
    assert greedy == text and len(set(text[4:])) > 1
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="temperature is"):
            trainer.generate(dataset, "What", 1, temperature=bad)
    assert len(trainer.generate(dataset, "What", 5, temperature=math.inf)) == 9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("context", "length"), [(4, 10), (4, 4), (4, 5), (4, 3), (1, 10), (1, 1)])
def test_B47_a_long_prompt_is_kept_and_cropped_for_the_model(
    backend: str, context: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, dataset = trainer_of(backend, context=context)
    lively(trainer)
    seen: list[np.ndarray] = []

    def noted(logits: np.ndarray, *arguments: Any) -> int:
        seen.append(logits.copy())
        return sample(logits, *arguments)

    monkeypatch.setattr("gpt_parity.training.sample", noted)
    prompt = "What was seen"[:length]
    out = trainer.generate(dataset, prompt, 5, seed=3)
    assert len(out) == length + 5 and out.startswith(prompt)
    # Sampling judges its arguments once before the first character.
    for number, logits in enumerate(seen[-5:]):
        text = out[: length + number]
        alone = logits_of_last(trainer.model, dataset.tokenizer, text[-context:])
        size = np.linalg.norm(alone)
        assert np.linalg.norm(logits - alone) <= 1e-13 * size
    assert trainer.generate(dataset, prompt, 0) == prompt


@pytest.mark.parametrize("backend", BACKENDS)
def test_B47_the_model_itself_refuses_more_than_its_context(backend: str) -> None:
    model = build_model(backend, GPTConfig(5, 4, 4, 1))
    for call in (model, model.predict, model.predict_next):
        with pytest.raises(ValueError, match="tokens: got 6 positions, needed at most 4"):
            call(np.zeros((1, 6), int))
        with pytest.raises(ValueError, match=r"tokens: got shape \(1, 0\)"):
            call(np.zeros((1, 0), int))
    with pytest.raises(ValueError, match="past: got shapes"):
        model.predict_next(np.zeros((1, 4), int), model.predict_next(np.zeros((1, 4), int))[1])
    with pytest.raises(ValueError, match="context_size"):
        build_model(backend, GPTConfig(5, 0, 4, 1))


class Broken(Exception):
    pass


def modes(model: Any) -> list[bool]:
    return [layer.training for layer in layers_of(model)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", ["train", "eval", "mixed"])
@pytest.mark.parametrize("call", ["generate", "stream", "test", "broken test", "broken train"])
def test_B50_the_mode_before_is_the_mode_after(backend: str, start: str, call: str) -> None:
    """The data set has no mode: the same call gives the same batch, whatever went before."""
    trainer, dataset = trainer_of(backend)
    for i, layer in enumerate(layers_of(trainer.model)):
        layer.training = start == "train" or (start == "mixed" and i % 3 == 0)
    before, batch = modes(trainer.model), dataset.batch("train", 1)[0]

    def fail(*arguments: Any) -> None:
        raise Broken

    with suppress(Broken):
        if call == "generate":
            trainer.generate(dataset, "What", 3)
        elif call == "stream":
            characters = trainer.stream(dataset, "What", 5)
            next(characters)
            assert modes(trainer.model) == before  # between two characters too
            characters.close()
        elif call == "test":
            trainer.test(dataset)
        elif call == "broken test":
            trainer.test(dataset, on_batch=fail)
        else:
            trainer.train(dataset, 1, lambda step: 1e-3, on_step=fail)
    assert modes(trainer.model) == before
    assert tape.is_grad_enabled() and torch.is_grad_enabled()
    np.testing.assert_array_equal(dataset.batch("train", 1)[0], batch)
