"""Checkpoints: they come back to the bit, moments included, and what is none is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS, DTYPES
from gpt_parity.files import write_atomically
from gpt_parity.model_config import GPTConfig
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import get_weights, named_parameters, set_weights
from parity_tests.comparers import assert_same_bits
from parity_tests.trained_models import (
    CONFIG,
    EMBEDDING,
    VOCABULARY,
    WAYS,
    batches,
    save_trained,
    trained,
)

pytestmark = pytest.mark.reference("by hand")


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ways", WAYS)
def test_checkpoints_round_trip_bitwise(ways: tuple[str, str], dtype: str, tmp_path: Path) -> None:
    source = trained(ways[0], dtype)
    path = save_trained(tmp_path / "a.safetensors", source, provenance={"numpy": "x"})
    checkpoint = load_checkpoint(path, config=CONFIG, vocabulary=VOCABULARY)
    assert (checkpoint.backend, checkpoint.dtype, checkpoint.step) == (ways[0], dtype, 3)
    assert (checkpoint.config, checkpoint.tokenizer.vocabulary) == (CONFIG, VOCABULARY)
    assert checkpoint.provenance == {"numpy": "x"}

    target = trained(ways[1], dtype, steps=1)
    set_weights(target.model, checkpoint.weights)
    checkpoint.load_optimizer(target.model, target.optimizer)
    assert_same_bits(get_weights(target.model), get_weights(source.model))
    state, expected = target.optimizer.state(), source.optimizer.state()
    assert state["steps"] == expected["steps"] == [3] * len(state["steps"])
    for moment in ("exp_avg", "exp_avg_sq"):
        for a, b in zip(state[moment], expected[moment], strict=True):
            assert a.dtype == dtype and a.tobytes() == b.tobytes()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_goes_on_from_a_checkpoint_to_the_bit(backend: str, tmp_path: Path) -> None:
    straight, first = trained(backend, "float32"), trained(backend, "float32")
    checkpoint = load_checkpoint(save_trained(tmp_path / "c", first))
    resumed = trained(backend, "float32", steps=0)
    set_weights(resumed.model, checkpoint.weights)
    checkpoint.load_optimizer(resumed.model, resumed.optimizer)
    for tokens, targets in batches(4, seed=1):
        assert straight.train_step(tokens, targets) == resumed.train_step(tokens, targets)
    assert_same_bits(get_weights(straight.model), get_weights(resumed.model))


def exchanged(parameters: list[Any]) -> list[Any]:
    """The two biases of the block of shape (4,) change places: no shape tells them apart."""
    first, second = [i for i, p in enumerate(parameters) if tuple(p.shape) == (4,)]
    parameters[first], parameters[second] = parameters[second], parameters[first]
    return parameters


ORDERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "exchanged": exchanged,
    "reversed": lambda parameters: parameters[::-1],
    "in a circle": lambda parameters: parameters[3:] + parameters[:3],
}


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ways", WAYS)
def test_moments_stay_with_their_parameters_in_any_order(
    ways: tuple[str, str], order: str, tmp_path: Path
) -> None:
    """Saved from an optimizer of one order, loaded into one of another."""
    source, target = (build_model(backend, CONFIG, seed=3) for backend in ways)
    first = load_backend(ways[0]).AdamWOptimizer(ORDERS[order](list(source.parameters())))
    second = load_backend(ways[1]).AdamWOptimizer(target.parameters())
    trainer = GPTTrainer(source, load_backend(ways[0]).GPTLoss(), first)
    for tokens, targets in batches(2):
        trainer.train_step(tokens, targets)
    checkpoint = load_checkpoint(save_trained(tmp_path / "c", trainer))
    checkpoint.load_optimizer(target, second)
    found = [moments_by_name(*pair) for pair in ((source, first), (target, second))]
    assert_same_bits(*found)
    assert len({array.tobytes() for array in found[0].values()}) == len(found[0])


def moments_by_name(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    state, places = optimizer.state(), {id(p): i for i, p in enumerate(optimizer.parameters)}
    return {
        f"{moment}/{name}": state[moment][places[id(parameter)]]
        for name, parameter in named_parameters(model).items()
        for moment in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_are_saved_under_the_names_of_their_parameters(
    backend: str, tmp_path: Path
) -> None:
    """The optimizer holds the two biases of the block, exchanged, with moments 1, 2 and 3, 4."""
    model = build_model(backend, CONFIG)
    biases = ["transformers.0.feed_forward.output.bias", "transformers.0.attention.output.bias"]
    optimizer = load_backend(backend).AdamWOptimizer(exchanged(list(model.parameters())))
    named = named_parameters(model)
    state = optimizer.state()
    for name, first, second, steps in zip(biases, (1.0, 2.0), (3.0, 4.0), (5, 6), strict=True):
        i = next(i for i, p in enumerate(optimizer.parameters) if p is named[name])
        state["exp_avg"][i][...], state["exp_avg_sq"][i][...] = first, second
        state["steps"][i] = steps
    optimizer.load_state(state)
    save_checkpoint(
        tmp_path / "c", model, config=CONFIG, vocabulary=VOCABULARY, optimizer=optimizer
    )
    saved = load_checkpoint(tmp_path / "c").optimizer
    assert [saved["exp_avg"][name].tolist() for name in biases] == [[1.0] * 4, [2.0] * 4]
    assert [saved["exp_avg_sq"][name].tolist() for name in biases] == [[3.0] * 4, [4.0] * 4]
    assert [saved["steps"][name] for name in biases] == [5, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_content_gives_the_same_bytes_in_the_agreed_layout(
    backend: str, tmp_path: Path
) -> None:
    facts = {"threads": {"b": 1, "a": 2}, "numpy": "x"}
    one = save_trained(tmp_path / "1", trained(backend, "float32"), provenance=facts).read_bytes()
    two = save_trained(
        tmp_path / "2", trained(backend, "float32"), provenance=dict(reversed(facts.items()))
    ).read_bytes()
    assert one == two
    names = set(CONFIG.parameter_shapes())
    assert set(load(one)) == {
        prefix + name
        for prefix in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/", "state/steps/")
        for name in names
    }
    header = json.loads(one[8 : 8 + int.from_bytes(one[:8], "little")])
    assert set(header["__metadata__"]) == {"manifest"}


def test_a_checkpoint_without_optimizer_says_so(tmp_path: Path) -> None:
    trainer = trained("numpy", "float32")
    save_checkpoint(tmp_path / "c", trainer.model, config=CONFIG, vocabulary=VOCABULARY)
    checkpoint = load_checkpoint(tmp_path / "c")
    assert checkpoint.optimizer is None
    with pytest.raises(ValueError, match="holds no optimizer state"):
        checkpoint.load_optimizer(trainer.model, trainer.optimizer)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    trainer, other = trained("numpy", "float32"), trained("numpy", "float32")
    checkpoint = load_checkpoint(save_trained(tmp_path / "c", trainer))
    with pytest.raises(ValueError, match="optimizer has other parameters"):
        checkpoint.load_optimizer(trainer.model, other.optimizer)


def rewritten(
    path: Path,
    arrays: Callable[[dict[str, np.ndarray]], Any] = lambda a: None,
    manifest: Callable[[dict[str, Any]], Any] = lambda m: None,
) -> None:
    data = path.read_bytes()
    tensors = dict(load(data))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    content = json.loads(header["__metadata__"]["manifest"])
    arrays(tensors)
    manifest(content)
    path.write_bytes(save(tensors, metadata={"manifest": json.dumps(content)}))


BIAS = "model/output.output.bias"

BAD_CONTENT: list[tuple[dict[str, Any], str]] = [
    ({"arrays": lambda a: a.pop(BIAS)}, "model: output.output.bias missing"),
    ({"arrays": lambda a: a.update({"model/x": np.zeros(1, "f4")})}, "model: x unexpected"),
    ({"arrays": lambda a: a.update({"model/_orig_mod.output.output.bias": a.pop(BIAS)})},
     "model: output.output.bias missing, _orig_mod.output.output.bias unexpected"),
    ({"arrays": lambda a: a.update({"weights": np.zeros(1, "f4")})}, "arrays: weights unexpected"),
    ({"arrays": lambda a: a.update({BIAS: np.zeros(6, "f4")})},
     r"output.output.bias has shape \(6,\), \(7,\) is needed"),
    ({"arrays": lambda a: a.update({BIAS: np.zeros(7, "f8")})},
     "output.output.bias is float64, float32 is needed"),
    ({"arrays": lambda a: a.update({BIAS: np.full(7, np.inf, "f4")})},
     "output.output.bias has 7 of 7 values that are nan or inf"),
    ({"arrays": lambda a: a.pop("optimizer/exp_avg/output.output.bias")}, "exp_avg: output"),
    ({"arrays": lambda a: a.pop("state/steps/output.output.bias")}, "steps: output.output.bias"),
    ({"arrays": lambda a: a.update({"state/steps/output.output.bias": np.array(-1)})},
     "steps: output.output.bias is -1"),
    ({"manifest": lambda m: m.update(version=4)}, "format version is 4, at most 3 can be read"),
    ({"manifest": lambda m: m.update(version="1")}, "format version is '1'"),
    ({"manifest": lambda m: m.update(format="else")}, "another kind of file"),
    ({"manifest": lambda m: m.pop("vocabulary")}, "vocabulary is None, str is needed"),
    ({"manifest": lambda m: m.update(vocabulary="abc")}, "vocabulary has 3 characters, 7"),
    ({"manifest": lambda m: m["config"].update(blocks=2)}, "transformers.1.attention"),
    ({"manifest": lambda m: m["config"].update(blocks=0)}, "blocks is 0"),
    ({"manifest": lambda m: m["config"].update(dropout=0)}, "config has"),
    ({"manifest": lambda m: m.update(dtype="int8")}, "numpy in int8"),
    ({"manifest": lambda m: m.update(step=-1)}, "step is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD_CONTENT)
def test_a_file_of_other_content_is_refused_by_name_and_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_trained(tmp_path / "c.safetensors", trained("numpy", "float32", steps=1))
    rewritten(path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    whole = save_trained(tmp_path / "c", trained("numpy", "float32", steps=1)).read_bytes()
    contents = {
        "truncated": (whole[:-1], "is not a whole safetensors file"),
        "half a header": (whole[:50], "is not a whole safetensors file"),
        "empty": (b"", "is not a whole safetensors file"),
        "text": (b"not a checkpoint at all", "is not a whole safetensors file"),
        "plain": (save({"w": np.zeros(2)}), "has no manifest"),
        "not json": (save({"w": np.zeros(2)}, metadata={"manifest": "{"}), "manifest is not JSON"),
        "nested": (
            save({"w": np.zeros(2)}, metadata={"manifest": "[" * 100_000}),
            "manifest is not JSON",
        ),
        "list": (save({"w": np.zeros(2)}, metadata={"manifest": "[]"}), "another kind of file"),
    }
    for name, (data, message) in contents.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message) as caught:
            load_checkpoint(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read, No such file"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors: cannot be read, No such file"):
        load_checkpoint(tmp_path)


def test_another_configuration_or_vocabulary_than_expected_is_refused(tmp_path: Path) -> None:
    path = save_trained(tmp_path / "c", trained("torch", "float32", steps=1))
    with pytest.raises(ValueError, match=r"context_size=5, .*context_size=6, .* is needed"):
        load_checkpoint(path, config=GPTConfig(7, 6, 4, 1))
    with pytest.raises(ValueError, match=r"another vocabulary .*\['e', 'é'\]"):
        load_checkpoint(path, vocabulary="\n abcde")


def test_saving_refuses_what_loading_would(tmp_path: Path) -> None:
    trainer = trained("numpy", "float32")
    save_trained(tmp_path / "c", trainer)
    good = (tmp_path / "c").read_bytes()
    with pytest.raises(ValueError, match="vocabulary has 2 characters, 7 are needed"):
        save_checkpoint(tmp_path / "c", trainer.model, config=CONFIG, vocabulary="ab")
    two = build_model("numpy", GPTConfig(2, 5, 4, 1))
    with pytest.raises(ValueError, match="vocabulary holds two surrogates"):
        save_checkpoint(
            tmp_path / "c", two, config=GPTConfig(2, 5, 4, 1), vocabulary="\udbff\udc00"
        )
    with pytest.raises(ValueError, match=r"transformers\.1\.attention"):
        save_checkpoint(
            tmp_path / "c", trainer.model, config=GPTConfig(7, 5, 4, 2), vocabulary=VOCABULARY
        )
    named_parameters(trainer.model)[EMBEDDING].data[0, 0] = np.nan
    with pytest.raises(ValueError, match=f"checkpoint: {EMBEDDING} has 1 of 28 values"):
        save_trained(tmp_path / "c", trainer)
    assert (tmp_path / "c").read_bytes() == good
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_a_failed_write_leaves_the_old_file_and_no_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpt_parity.files.os.fsync", full)
    with pytest.raises(OSError, match="file: cannot be written, No space left") as caught:
        write_atomically(path, b"new")
    assert str(caught.value).startswith(str(path))
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_file_is_on_the_disk_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    calls: list[str] = []

    def recorded(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(f"gpt_parity.files.os.{name}", call)

    recorded("fsync")
    recorded("replace")
    write_atomically(tmp_path / "file", b"x")
    assert calls[:2] == ["fsync", "replace"]
