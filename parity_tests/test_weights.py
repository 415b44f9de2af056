"""Weights: exchange by name without aliasing, and checkpoints that come back to the bit."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from gpt_parity.backends import backend_of, build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.config import BACKENDS, DTYPES, GPTConfig
from gpt_parity.files import write_atomically
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import copy_weights, get_weights, named_parameters, set_weights
from parity_tests.comparers import assert_same_bits

pytestmark = pytest.mark.reference("by hand")

CONFIG = GPTConfig(vocab_size=7, context_size=5, embedding_size=4, blocks=1)
VOCABULARY = "\n abcdé"
WAYS = list(itertools.product(BACKENDS, BACKENDS))
ATTENTION = "transformers.0.attention.output.weight"  # the only square weight
EMBEDDING = "embedding.embedding.weight"  # (7, 4)


def random_arrays(config: GPTConfig, dtype: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in config.parameter_shapes().items()
    }


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


@pytest.mark.reference("exact property")
@given(
    vocab=st.integers(1, 9), context=st.integers(1, 7), width=st.integers(1, 6),
    blocks=st.integers(1, 3), dtype=st.sampled_from(DTYPES),
    ways=st.sampled_from(WAYS), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_round_trips_between_backends_are_bitwise(
    vocab: int, context: int, width: int, blocks: int, dtype: str, ways: tuple[str, str], seed: int
) -> None:
    config = GPTConfig(vocab, context, width, blocks)
    arrays = random_arrays(config, dtype, seed)
    source, target = (build_model(b, config, seed=i, dtype=dtype) for i, b in enumerate(ways))
    set_weights(source, arrays)
    copy_weights(source, target)
    assert_same_bits(get_weights(target), arrays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_shapes_and_count_are_those_of_the_config(backend: str) -> None:
    config = GPTConfig(11, 3, 5, 2)
    model = build_model(backend, config)
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(own.items()) == list(config.parameter_shapes().items())
    assert GPTConfig(65).parameter_count() == 84_929  # the source text's model


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("ways", WAYS)
def test_models_share_nothing_after_a_copy(ways: tuple[str, str]) -> None:
    source, target = (build_model(b, CONFIG, seed=i, dtype="float64") for i, b in enumerate(ways))
    copy_weights(source, target)
    before = get_weights(source)
    implementation = load_backend(ways[1])
    trainer = GPTTrainer(
        target, implementation.GPTLoss(), implementation.AdamWOptimizer(target.parameters(), 1.0)
    )
    trainer.train_step(*batches(1)[0])
    moved = get_weights(target)
    assert not any((moved[n] == before[n]).all() for n in before if n.endswith("output.weight"))
    assert_same_bits(get_weights(source), before)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_share_nothing_with_the_model(backend: str) -> None:
    model = build_model(backend, CONFIG, dtype="float64")
    arrays = random_arrays(CONFIG, "float64", 1)
    given_bits = {name: array.tobytes() for name, array in arrays.items()}
    parameters = named_parameters(model)
    places = {n: id(p) for n, p in parameters.items()}
    memory = {n: p.data.ctypes.data if backend == "numpy" else p.data_ptr()
              for n, p in parameters.items()}  # fmt: skip
    set_weights(model, arrays)
    for name, array in arrays.items():
        array[...] = 0.0  # must not reach the model
        assert get_weights(model)[name].tobytes() == given_bits[name]
    for array in get_weights(model).values():
        array[...] = 0.0  # nor may what came out
    assert {n: a.tobytes() for n, a in get_weights(model).items()} == given_bits
    after = named_parameters(model)
    assert places == {n: id(p) for n, p in after.items()}  # copied in place, for the optimizer
    assert memory == {n: p.data.ctypes.data if backend == "numpy" else p.data_ptr()
                      for n, p in after.items()}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_memory_layout_is_copied(backend: str) -> None:
    arrays = random_arrays(CONFIG, "float32", 2)
    strange = {}
    for i, (name, array) in enumerate(arrays.items()):
        layouts: list[Callable[[np.ndarray], np.ndarray]] = [
            lambda a: a[::-1].copy()[::-1],  # negative strides
            np.asfortranarray,
            lambda a: np.repeat(a, 2, axis=0)[::2],  # gaps
            lambda a: a.astype(">f4"),  # the other byte order
        ]
        strange[name] = layouts[i % 4](array)
        strange[name].flags.writeable = False
    model = build_model(backend, CONFIG)
    set_weights(model, strange)
    assert_same_bits(get_weights(model), arrays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_the_model_itself_can_be_given(backend: str) -> None:
    model = build_model(backend, CONFIG)
    before = get_weights(model)
    parameter = named_parameters(model)[ATTENTION]
    own = parameter.data if backend == "numpy" else parameter.detach().numpy()
    set_weights(model, {**before, ATTENTION: own.T})
    assert (get_weights(model)[ATTENTION] == before[ATTENTION].T).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_square_weight_is_never_transposed(backend: str) -> None:
    """y = x W^T with W stored (out, in): x = [1, 0] picks the first column of W."""
    config = GPTConfig(3, 1, 2, 1)
    arrays = {n: np.zeros(shape) for n, shape in config.parameter_shapes().items()}
    arrays["embedding.embedding.weight"][:] = [1.0, 0.0]
    arrays[ATTENTION] = np.array([[1.0, 3.0], [2.0, 4.0]])
    model = build_model(backend, config, dtype="float64")
    set_weights(model, arrays)
    attention = model.transformers[0].attention
    x = model.embedding(np.array([[2]]))
    assert attention(x).detach().numpy().tolist() == [[[1.0, 2.0]]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop(EMBEDDING), f"{EMBEDDING} missing"),
        (lambda a: a.update(extra=np.zeros(2)), "extra unexpected"),
        (lambda a: a.update({"net." + EMBEDDING: a.pop(EMBEDDING)}),
         f"{EMBEDDING} missing, net.{EMBEDDING} unexpected"),
        (lambda a: a.update({EMBEDDING: a[EMBEDDING].T}),
         rf"{EMBEDDING} has shape \(4, 7\), \(7, 4\) is needed"),
        (lambda a: a.update({EMBEDDING: np.full((7, 4), np.nan, "f4")}),
         f"{EMBEDDING} has 28 of 28 values that are nan or inf"),
        (lambda a: a["output.output.bias"].__setitem__(2, -np.inf),
         "output.output.bias has 1 of 7 values"),
        (lambda a: a.update({EMBEDDING: a[EMBEDDING].astype(int)}), f"{EMBEDDING} is int64"),
        (lambda a: a.update({EMBEDDING: a[EMBEDDING].astype(object)}), f"{EMBEDDING} is object"),
        (lambda a: a.update({EMBEDDING: a[EMBEDDING].astype("f8")}),
         f"{EMBEDDING} is float64, float32 is needed"),
        (lambda a: a.update({EMBEDDING: a[EMBEDDING].astype("c8")}), f"{EMBEDDING} is complex64"),
        (lambda a: a.update({"module." + EMBEDDING: a[EMBEDDING]}), "names collide"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(
    backend: str, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    model = build_model(backend, CONFIG)
    before = get_weights(model)
    arrays = random_arrays(CONFIG, "float32", 4)
    change(arrays)
    with pytest.raises(ValueError, match=message) as caught:
        set_weights(model, arrays)
    assert "\n" not in str(caught.value)
    assert_same_bits(get_weights(model), before)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrower_weights_are_widened_exactly(backend: str) -> None:
    arrays = random_arrays(CONFIG, "float32", 5)
    model = build_model(backend, CONFIG, dtype="float64")
    set_weights(model, arrays)
    assert_same_bits(get_weights(model), {n: a.astype("float64") for n, a in arrays.items()})


def test_backend_of_names_what_it_cannot_place() -> None:
    assert backend_of(build_model("numpy", CONFIG)) == "numpy"
    assert backend_of(build_model("torch", CONFIG)) == "torch"
    with pytest.raises(TypeError, match="model is a dict"):
        backend_of({})


def wrapped(model: torch.nn.Module, wrapper: str) -> torch.nn.Module:
    if wrapper == "compiled":
        return torch.compile(model, backend="eager")
    if wrapper == "parallel":
        return torch.nn.DataParallel(model)
    return torch.nn.DataParallel(torch.compile(model, backend="eager"))


@pytest.mark.parametrize("wrapper", ["compiled", "parallel", "both"])
def test_wrapped_models_exchange_plain_names(wrapper: str, tmp_path: Path) -> None:
    plain = build_model("torch", CONFIG, seed=8)
    model = wrapped(plain, wrapper)
    raw = dict(model.state_dict())
    assert next(iter(raw)).startswith(("_orig_mod.", "module."))  # what there is to undo
    assert list(get_weights(model)) == list(CONFIG.parameter_shapes())
    save_checkpoint(tmp_path / "c", model, config=CONFIG, vocabulary=VOCABULARY)
    assert {
        n for n in load((tmp_path / "c").read_bytes()) if "_orig_mod" in n or "module" in n
    } == (set())
    saved = load_checkpoint(tmp_path / "c")
    for backend in BACKENDS:
        target = build_model(backend, CONFIG)
        set_weights(target, raw)
        assert_same_bits(get_weights(target), get_weights(plain))
        assert_same_bits(get_weights(saved.build_model(backend)), get_weights(plain))
    other = build_model("numpy", CONFIG, seed=9)
    copy_weights(other, model)
    assert_same_bits(get_weights(plain), get_weights(other))


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


@pytest.mark.parametrize("sizes", [(65, 32, 64, 2), (1, 1, 1, 1), (11, 6, 7, 3)])
def test_the_count_is_that_of_the_shapes(sizes: tuple[int, int, int, int]) -> None:
    config = GPTConfig(*sizes)
    assert config.parameter_count() == sum(map(math.prod, config.parameter_shapes().values()))


@pytest.mark.parametrize(
    ("held", "options", "fits"),
    [
        # 84,929 numbers of 4 bytes and 16 objects of 2,000 are 371,716 bytes.
        (371_716, {}, True), (371_715, {}, False),
        # Gradients and moments: 4 times the numbers.
        (1_390_864, {"training": True}, True), (1_390_863, {"training": True}, False),
        # In each of 2 blocks, for 4 * 32 rows, 32 scores and 8 * 64 values more.
        (371_716 + 4 * 2 * 128 * 544, {"batch_size": 4, "length": 32}, True),
        (371_715 + 4 * 2 * 128 * 544, {"batch_size": 4, "length": 32}, False),
    ],
)  # fmt: skip
def test_what_cannot_fit_into_memory_is_refused_before_it_is_built(
    held: int, options: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt_parity.machine.physical_memory", lambda: held)
    if fits:
        GPTConfig(65).require_memory("float32", **options)
    else:
        with pytest.raises(ValueError, match="a model of 84,929 parameters in 2 blocks needs"):
            GPTConfig(65).require_memory("float32", **options)
        with pytest.raises(ValueError, match="a model of 84,929 parameters in 2 blocks needs"):
            GPTConfig(65).require_memory("float64", **options)


def test_a_machine_that_does_not_say_its_memory_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("gpt_parity.machine.os.sysconf")
    GPTConfig(65, embedding_size=10**9).require_memory("float32")
