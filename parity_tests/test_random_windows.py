"""Windows that are drawn, presets of GPT-2, and how many steps a run of either takes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.backends import build_model, load_backend
from gpt_parity.config import GPT2_PRESETS, LATER, TrainConfig
from gpt_parity.corpus import CharDataset
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import get_weights

pytestmark = pytest.mark.reference("exact property")

# Every place of this text is another character, so that a window says where it comes from.
TEXT = "".join(map(chr, range(200)))
SPLITS = {"train": (0, 180), "test": (180, 200)}


def dataset(context: int = 8, batch: int = 4, text: str = TEXT, **options: Any) -> CharDataset:
    return CharDataset(
        text, context_size=context, batch_size=batch, **{"drop_last": False} | options
    )


# --- windows


@given(
    split=st.sampled_from(["train", "test"]), context=st.integers(1, 19), batch=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1), step=st.integers(0, 10**6),
)  # fmt: skip
def test_windows_lie_in_their_part_and_targets_are_one_further(
    split: str, context: int, batch: int, seed: int, step: int
) -> None:
    tokens, targets = dataset(context, batch).random_batch(split, seed, step)
    start, end = SPLITS[split]
    assert tokens.shape == targets.shape == (batch, context)
    assert tokens.dtype == targets.dtype == np.int64
    assert (np.diff(tokens, axis=1) == 1).all()
    np.testing.assert_array_equal(targets, tokens + 1)
    assert start <= tokens.min() and targets.max() < end
    assert not np.shares_memory(tokens, targets)


@pytest.mark.parametrize("split", SPLITS)
def test_every_start_is_drawn_about_equally_often_and_both_ends_are(split: str) -> None:
    start, end = SPLITS[split]
    data = dataset(8, 50)
    starts = np.concatenate([data.random_batch(split, 1, i)[0][:, 0] for i in range(200)])
    counts = np.bincount(starts - start)
    possible = end - start - 8  # the last one has a target for each of its tokens
    assert len(counts) == possible and starts.size == 10_000
    expected = starts.size / possible
    # Mean and five standard deviations of chi-square.
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < possible - 1 + 5 * np.sqrt(2 * (possible - 1))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    data = dataset()
    first = data.random_batch("train", 7, 3)
    first[0][...] = 0  # the caller's own
    for step in (9, 0, 4):
        data.random_batch("test", 1, step)
    again, other = data.random_batch("train", 7, 3), dataset().random_batch("train", 7, 3)
    np.testing.assert_array_equal(again, other)
    assert again[0].any()


def test_other_seeds_and_steps_give_other_windows() -> None:
    data = dataset()
    batches = [(seed, step) for seed in range(5) for step in range(40)]
    starts = {tuple(data.random_batch("train", *at)[0][:, 0]) for at in batches}
    assert len(starts) == len(batches)


def test_bad_arguments() -> None:
    data = dataset()
    for arguments, error, message in (
        (("valid", 0, 0), ValueError, "^split is 'valid', 'train' or 'test' is needed$"),
        (("train", -1, 0), ValueError, "^seed is -1, at least 0 is needed$"),
        (("train", 0, -1), ValueError, "^step is -1, at least 0 is needed$"),
        (("train", 0.0, 0), TypeError, "^seed is 0.0, an integer is needed$"),
        (("train", 0, True), TypeError, "^step is True, an integer is needed$"),
    ):
        with pytest.raises(error, match=message):
            data.random_batch(*arguments)


# --- the trainer


def trainer(backend: str = "numpy") -> GPTTrainer:
    implementation = load_backend(backend)
    model = build_model(backend, GPT2Config(200, 8, 8, 1, heads=2), 42, "float64")
    return GPTTrainer(
        model, implementation.GPTLoss(), implementation.AdamWOptimizer(model.parameters(), 1e-2)
    )


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_training_is_its_steps_on_the_windows_of_the_seed(backend: str) -> None:
    """To the bit, and beyond the epoch."""
    data = dataset()
    assert data.batch_count("train") == 11
    ours, theirs = trainer(backend), trainer(backend)
    results = ours.train(data, 1, lambda step: 1e-2 / (step + 1), max_steps=13, windows_seed=5)
    for step, result in enumerate(results):
        theirs.optimizer.lr = 1e-2 / (step + 1)
        assert result == theirs.train_step(*data.random_batch("train", 5, step))
    assert len(results) == ours.steps == 13
    for name, array in get_weights(ours.model).items():
        assert array.tobytes() == get_weights(theirs.model)[name].tobytes(), name


def test_training_goes_on_with_the_windows_of_the_step() -> None:
    data, (whole, parts) = dataset(), (trainer(), trainer())
    options = {"max_steps": 5, "windows_seed": 0}
    expected = whole.train(data, 1, lambda step: 1e-2, **options)
    found = parts.train(data, 1, lambda step: 1e-2, max_steps=2, windows_seed=0)
    found += parts.train(data, 1, lambda step: 1e-2, start=2, **options)
    assert found == expected
    other = trainer().train(data, 1, lambda step: 1e-2, max_steps=5, windows_seed=1)
    assert [r.loss for r in other] != [r.loss for r in expected]


def test_without_a_number_of_steps_there_are_as_many_as_in_the_epochs() -> None:
    data = dataset(batch=16)
    assert len(trainer().train(data, 2, lambda step: 1e-3, windows_seed=0)) == (
        2 * data.batch_count("train")
    )


def test_windows_in_order_are_what_they_were() -> None:
    data, (ours, theirs) = dataset(), (trainer(), trainer())
    results = ours.train(data, 1, lambda step: 1e-2, max_steps=3)
    for step, result in enumerate(results):
        theirs.optimizer.lr = 1e-2
        assert result == theirs.train_step(*data.batch("train", step))


# --- configuration


def test_the_values_of_the_presets() -> None:
    baby = TrainConfig(model="gpt2", preset="baby")
    sizes = ("context_size", "embedding_size", "blocks", "heads", "batch_size", "max_steps")
    assert [getattr(baby, name) for name in sizes] == [64, 128, 4, 4, 12, 2000]
    rates = ("learning_rate", "min_learning_rate", "warmup", "weight_decay", "betas", "windows")
    assert [getattr(baby, name) for name in rates] == [4e-3, 1e-4, 100, 0.1, (0.9, 0.99), "random"]
    large = TrainConfig(model="gpt2", preset="gpt2")
    assert [getattr(large, name) for name in sizes] == [1024, 768, 12, 12, 4, None]
    assert [getattr(large, n) for n in rates] == [6e-4, 6e-5, 100, 0.1, (0.9, 0.95), "random"]
    assert large.model_config(50257) == GPT2Config(50257, 1024, 768, 12, heads=12)


@pytest.mark.parametrize("preset", GPT2_PRESETS)
def test_what_is_given_goes_before_the_preset_also_if_it_is_the_default(preset: str) -> None:
    values = GPT2_PRESETS[preset]
    for name in values:
        default = getattr(TrainConfig, name)
        others = {"heads": 16} if name == "embedding_size" else {}
        config = TrainConfig(model="gpt2", preset=preset, **{name: default} | others)
        assert getattr(config, name) == default
        kept = set(values) - {name} - set(others)
        assert {n: getattr(config, n) for n in kept} == {n: values[n] for n in kept}


def test_a_gpt2_without_a_preset_has_the_recipe_of_the_text() -> None:
    config, text = TrainConfig(model="gpt2"), TrainConfig()
    assert config.recipe == text.recipe | {"model": "gpt2"}
    assert config.model_config(9) == GPT2Config(9, heads=4)
    assert text.model_config(9) == GPTConfig(9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "baby"}, "^preset is baby, which only --model gpt2 has$"),
        ({"heads": 2}, "^heads is 2, which only --model gpt2 has$"),
        ({"heads": 4}, "^heads is 4, which only --model gpt2 has$"),
        ({"model": "gpt", "heads": 8}, "^heads is 8, which only --model gpt2 has$"),
        ({"model": "gpt2", "preset": "huge"}, "^preset is 'huge', one of .*'baby', 'gpt2'.* is"),
        ({"preset": "huge"}, "^preset is 'huge'"),
        ({"model": "gpt3"}, "^model is 'gpt3', one of .* is needed$"),
        ({"windows": "all"}, "^windows is 'all', one of .* is needed$"),
        ({"model": "gpt2", "heads": 3}, "^embedding_size is 64, a multiple of heads = 3 is needed"),
        ({"model": "gpt2", "heads": 0}, "^heads is 0"),
        ({"model": "gpt2", "preset": "baby", "embedding_size": 66}, "^embedding_size is 66, a mul"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**given)


def test_a_recipe_survives_json_and_replacement() -> None:
    config = TrainConfig(model="gpt2", preset="baby", blocks=2, seed=7)
    back = TrainConfig.from_recipe(json.loads(json.dumps(config.recipe)))
    assert back == config and back.recipe == config.recipe
    moved = replace(config, backend="torch", seed=8)
    changed = {f.name for f in fields(config) if getattr(moved, f.name) != getattr(config, f.name)}
    assert changed == {"backend", "seed"}
    assert replace(TrainConfig(), heads=4) == TrainConfig()


def test_a_recipe_from_before_these_fields_is_that_of_the_text() -> None:
    old = {n: v for n, v in TrainConfig(seed=7).recipe.items() if n not in LATER}
    assert len(TrainConfig().recipe) - len(old) == len(LATER) > 0
    assert TrainConfig.from_recipe(old) == TrainConfig(seed=7)
    for name in set(old) - LATER:
        with pytest.raises(ValueError, match="recipe has"):
            TrainConfig.from_recipe({n: v for n, v in old.items() if n != name})
    with pytest.raises(ValueError, match="recipe has"):
        TrainConfig.from_recipe(old | {"dropout": 0})


def test_the_folder_of_a_run_names_the_model() -> None:
    assert TrainConfig().run_folder == Path("runs/numpy-float32-seed42")
    config = TrainConfig(model="gpt2", backend="torch", seed=7, dtype="float64")
    assert config.run_folder == Path("runs/gpt2-torch-float64-seed7")
    assert replace(config, out=Path("x")).run_folder == Path("x")


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 20), ({"max_steps": 7}, 7), ({"max_steps": 70}, 20), ({"epochs": 3}, 30),
        ({"windows": "random"}, 20), ({"windows": "random", "max_steps": 7}, 7),
        ({"windows": "random", "max_steps": 70}, 70),
        ({"model": "gpt2", "preset": "baby"}, 2000),
        ({"model": "gpt2", "preset": "baby", "windows": "ordered"}, 20),
        ({"model": "gpt2", "preset": "gpt2"}, 20),
    ],
)  # fmt: skip
def test_steps_of_a_run_with_ten_batches_an_epoch(given: dict[str, Any], steps: int) -> None:
    assert TrainConfig(**given).total_steps(10) == steps
