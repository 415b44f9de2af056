"""Weights: exchange by name without aliasing, and their count and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from gpt_parity.backends import backend_of, build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS, DTYPES
from gpt_parity.model_config import GPTConfig
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import copy_weights, get_weights, named_parameters, set_weights
from parity_tests.comparers import assert_same_bits
from parity_tests.trained_models import CONFIG, EMBEDDING, VOCABULARY, WAYS, batches

pytestmark = pytest.mark.reference("by hand")

ATTENTION = "transformers.0.attention.output.weight"  # the only square weight


def random_arrays(config: GPTConfig, dtype: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in config.parameter_shapes().items()
    }


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
