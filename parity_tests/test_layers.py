"""Layers and models of both twins: parameters, state, memory, errors."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numpy_impl import layers
from numpy_impl.layers import Layer, Linear, Parameter, ParameterBuffer
from numpy_impl.tape import Observer, observe
from numpy_impl.tensor import Tensor
from parity_tests.registry import NUMPY, TORCH, TWINS, Twin

pytestmark = pytest.mark.reference("by hand")

both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)

INF, NAN = math.inf, math.nan


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


# --- parameters: initialisation, discovery, state, memory


@both_twins
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_initial_weights_follow_the_formula(twin: Twin, dtype: str) -> None:
    linear = twin.layers.Linear(3, 5, rng(7), twin.dtypes[dtype])
    weight = rng(7).randn(5, 3) * math.sqrt(2.0 / 3.0)
    np.testing.assert_array_equal(twin.array(linear.weight), weight.astype(dtype), strict=True)
    np.testing.assert_array_equal(twin.array(linear.bias), np.zeros(5, dtype), strict=True)
    embedding = twin.layers.Embedding(5, 3, rng(7), twin.dtypes[dtype])
    table = rng(7).randn(5, 3) * 0.02
    np.testing.assert_array_equal(twin.array(embedding.weight), table.astype(dtype), strict=True)


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_both_models_start_from_the_same_weights(dtype: str) -> None:
    ours, theirs = (twin.gpt.GPT(65, 32, 64, 2, seed=42, dtype=twin.dtypes[dtype])
                    for twin in TWINS)  # fmt: skip
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert list(mine) == list(other)
    for name, parameter in mine.items():
        np.testing.assert_array_equal(
            parameter.data, TORCH.array(other[name]), strict=True, err_msg=name
        )
    assert sum(p.data.size for p in mine.values()) == 84_929
    assert sum(p.numel() for p in other.values()) == 84_929
    seeded = NUMPY.gpt.GPT(65, 32, 64, 2, seed=43, dtype=dtype)
    assert (seeded.output.output.weight.data != ours.output.output.weight.data).any()


class Nested(Layer):
    """Lists, a layer used twice, a parameter used twice."""

    def __init__(self) -> None:
        self.scale = Parameter(np.ones(1))
        self.blocks = [Linear(2, 3, rng(), np.float64), Linear(3, 2, rng(1), np.float64)]
        self.again = self.blocks[0]
        self.tied = [self.scale, Parameter(np.zeros((1, 1)))]
        self.note = "no layer"


def test_parameters_are_found_by_attribute_each_once() -> None:
    layer = Nested()
    assert [name for name, _ in layer.named_parameters()] == [
        "scale", "tied.1", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias",
    ]  # fmt: skip
    assert [name for name, _ in layer.named_modules()] == ["", "blocks.0", "blocks.1"]
    assert len(list(layer.parameters())) == 6
    with pytest.raises(TypeError, match="Nested has no forward"):
        layer()


@both_twins
def test_train_and_eval_reach_every_layer(twin: Twin) -> None:
    model = twin.gpt.GPT(5, 4, 3, 2)
    every = [module for _, module in model.named_modules()]
    assert all(module.training for module in every)
    assert len(every) == (24 if twin is NUMPY else 25)  # PyTorch's list is a module too
    assert model.eval() is model and {module.training for module in every} == {False}
    assert model.train() is model and all(module.training for module in every)


@pytest.mark.reference("exact property")
def test_state_never_aliases() -> None:
    model = NUMPY.gpt.GPT(5, 4, 3, 1, seed=1)
    parameters = dict(model.named_parameters())
    views = {name: p.data for name, p in parameters.items()}
    state = model.state_dict()
    before = {name: array.copy() for name, array in state.items()}
    for array in state.values():
        array += 1.0
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(parameter.data, before[name])
    model.load_state_dict(state)
    for name, parameter in parameters.items():
        assert parameter.data is views[name]
        np.testing.assert_array_equal(parameter.data, before[name] + np.float32(1.0))
        state[name] += 1.0
        np.testing.assert_array_equal(parameter.data, before[name] + np.float32(1.0))


@pytest.mark.reference("exact property")
def test_a_state_of_another_precision_is_rounded() -> None:
    model = NUMPY.gpt.GPT(5, 4, 3, 1)
    state = NUMPY.gpt.GPT(5, 4, 3, 1, seed=2, dtype=np.float64).state_dict()
    model.load_state_dict(state)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, state[name].astype(np.float32), strict=True)


@both_twins
@pytest.mark.parametrize("dtype", ("uint8", "uint64", "int16", "int64"))
def test_tokens_of_every_integer_dtype(twin: Twin, dtype: str) -> None:
    model = twin.gpt.GPT(5, 4, 3, 1)
    tokens = np.array([[4, 0, 1]])
    np.testing.assert_array_equal(model.predict(tokens.astype(dtype)), model.predict(tokens))


@both_twins
def test_the_default_seed_is_zero(twin: Twin) -> None:
    weights, others = (
        twin.array(next(model.parameters()))
        for model in (twin.gpt.GPT(5, 4, 3, 1), twin.gpt.GPT(5, 4, 3, 1, seed=0))
    )
    np.testing.assert_array_equal(weights, others)


@pytest.mark.parametrize("fault", ("missing", "extra", "shape", "complex"))
def test_a_state_that_does_not_fit_changes_nothing(fault: str) -> None:
    model = NUMPY.gpt.GPT(5, 4, 3, 1, seed=1)
    before = model.state_dict()
    state = NUMPY.gpt.GPT(5, 4, 3, 1, seed=2).state_dict()
    name = "output.output.bias"
    if fault == "missing":
        del state[name]
    elif fault == "extra":
        state["other"] = np.zeros(1)
    elif fault == "shape":
        state[name] = np.zeros((1, 5), np.float32)
    else:
        state[name] = state[name].astype(np.complex128)
    expected = {
        "missing": rf"missing \['{name}'\], unexpected \[\]",
        "extra": r"missing \[\], unexpected \['other'\]",
        "shape": rf"{name} is float32 \(1, 5\), needed float32 \(5,\)",
        "complex": rf"{name} is complex128 \(5,\), needed float32 \(5,\)",
    }[fault]
    with pytest.raises(ValueError, match=expected):
        model.load_state_dict(state)
    for key, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[key])


def test_parameters_of_a_model_are_views_into_one_buffer() -> None:
    model = NUMPY.gpt.GPT(5, 4, 3, 2, dtype=np.float64)
    parameters = list(model.parameters())
    buffer = parameters[0].buffer
    assert buffer.data.size == buffer.grad.size == sum(p.data.size for p in parameters)
    loss = NUMPY.loss.GPTLoss()(model(np.array([[1, 2, 3]])), np.array([[2, 3, 4]]))
    loss.backward()
    matrices = sum(p.data.size for p in parameters if p.ndim >= 2)
    taken = np.zeros(buffer.data.size, int)
    for p, rows in zip(parameters, buffer.slices, strict=True):
        assert p.buffer is buffer
        taken[rows] += 1
        for array, flat in ((p.data, buffer.data), (p.grad, buffer.grad)):
            assert np.shares_memory(array, flat)
            np.testing.assert_array_equal(array.reshape(-1), flat[rows])
        assert (rows.stop <= matrices) == (p.ndim >= 2)
    assert (taken == 1).all() and buffer.grad.any()
    first = [p.grad.copy() for p in parameters]
    NUMPY.loss.GPTLoss()(model(np.array([[1, 2, 3]])), np.array([[2, 3, 4]])).backward()
    for p, grad in zip(parameters, first, strict=True):
        assert np.shares_memory(p.grad, buffer.grad)
        np.testing.assert_array_equal(p.grad, 2.0 * grad)


@pytest.mark.parametrize("part", ("all", "reversed", "some"))
def test_an_optimizer_of_all_parameters_works_in_the_memory_of_the_model(part: str) -> None:
    model = NUMPY.gpt.GPT(5, 4, 3, 1)
    parameters = list(model.parameters())
    memory = parameters[0].buffer
    chosen = {"all": parameters, "reversed": parameters[::-1], "some": parameters[1:]}[part]
    optimizer = NUMPY.optim.AdamWOptimizer(chosen)
    assert (optimizer.buffer is memory) is (part == "all")
    for p, rows in zip(chosen, optimizer.buffer.slices, strict=True):
        np.testing.assert_array_equal(p.data.reshape(-1), optimizer.buffer.data[rows])


def test_a_buffer_refuses_duplicates_and_mixed_dtypes() -> None:
    p = Parameter(np.ones(2))
    with pytest.raises(ValueError, match="one of them stands twice"):
        ParameterBuffer([p, p])
    with pytest.raises(TypeError, match="none or mixed dtypes"):
        ParameterBuffer([p, Parameter(np.ones(2, np.float32))])


def test_a_parameter_copies_its_array() -> None:
    array = np.ones(2)
    p = Parameter(array)
    p.data += 1.0
    np.testing.assert_array_equal(array, [1.0, 1.0])


# --- the model's own checks


@both_twins
@pytest.mark.parametrize("size", (0, -1, True, 1.5, "8", None), ids=repr)
@pytest.mark.parametrize("place", range(4))
def test_sizes_must_be_positive_integers(twin: Twin, size: Any, place: int) -> None:
    arguments: list[Any] = [5, 4, 3, 1]
    arguments[place] = size
    name = ("vocab_size", "context_size", "embedding_size", "blocks")[place]
    with pytest.raises(ValueError) as caught:
        twin.gpt.GPT(*arguments)
    assert str(caught.value) == f"{name}: got {size!r}, needed a positive integer"


@both_twins
@pytest.mark.parametrize(("dtype", "bound"), (("float32", -104), ("float64", -746)))
def test_a_fill_that_leaks_is_refused(twin: Twin, dtype: str, bound: int) -> None:
    number = np.dtype(dtype).type
    assert np.exp(number(bound)) == 0.0 < np.exp(number(bound + 1))
    kind = twin.dtypes[dtype]
    for fits in (bound, -1e9, -INF):
        twin.gpt.GPT(5, 4, 3, 1, dtype=kind, mask_value=fits)
    for leaks in (bound + 1, -1.0, 0.0, 1e9, INF):
        with pytest.raises(ValueError, match=f"mask_value: got .*, needed at most {bound} in"):
            twin.gpt.GPT(5, 4, 3, 1, dtype=kind, mask_value=leaks)
        twin.gpt.GPT(5, 4, 3, 1, dtype=kind, mask_value=leaks, allow_leak=True)
    with pytest.raises(ValueError, match="mask_value: got nan"):
        twin.gpt.GPT(5, 4, 3, 1, dtype=kind, mask_value=NAN, allow_leak=True)


@pytest.mark.reference("exact property")
@both_twins
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@given(st.floats(0.9, 1.2))
def test_every_fill_accepted_weighs_exactly_nothing(twin: Twin, dtype: str, part: float) -> None:
    """Around the fills whose exponentials are the smallest numbers, normal and subnormal."""
    number = np.dtype(dtype).type
    fill = part * math.log(np.finfo(dtype).tiny)
    try:
        twin.gpt.GPT(2, 2, 1, 1, dtype=twin.dtypes[dtype], mask_value=fill)
    except ValueError:
        assert np.exp(number(fill + 1.0)) > 0.0  # no fill is refused that is clear of the bound
    else:
        assert np.exp(number(fill)) == 0.0


@pytest.mark.reference("exact property")
@both_twins
def test_only_a_leaking_fill_shows_the_future(twin: Twin) -> None:
    kind = twin.dtypes["float64"]
    for fill, leaks in ((-1e9, False), (0.0, True)):
        model = twin.gpt.GPT(6, 4, 8, 2, seed=3, dtype=kind, mask_value=fill, allow_leak=leaks)
        a, b = (model.predict(np.array([[1, 2, 3, last]])) for last in (4, 5))
        assert (a[:, :3] != b[:, :3]).any() == leaks
        assert (a[:, 3] != b[:, 3]).any()


TOKENS = {
    "floats": (np.zeros((1, 2)), TypeError, "tokens: got dtype float64, needed integers"),
    "one axis": (np.zeros(2, int), ValueError,
                 "tokens: got shape (2,), needed (B, T), neither of them 0"),
    "empty": (np.zeros((1, 0), int), ValueError,
              "tokens: got shape (1, 0), needed (B, T), neither of them 0"),
    "no batch": (np.zeros((0, 2), int), ValueError,
                 "tokens: got shape (0, 2), needed (B, T), neither of them 0"),
    "long": (np.zeros((1, 5), int), ValueError, "tokens: got 5 positions, needed at most 4"),
    "negative": (np.array([[0, -1]]), ValueError, "tokens: got id -1, needed 0 to 4"),
    "large": (np.array([[5, 0]]), ValueError, "tokens: got id 5, needed 0 to 4"),
}  # fmt: skip


@both_twins
@pytest.mark.parametrize("case", TOKENS)
def test_tokens_that_do_not_fit(twin: Twin, case: str) -> None:
    tokens, kind, message = TOKENS[case]
    with pytest.raises(kind) as caught:
        twin.gpt.GPT(5, 4, 3, 1)(tokens)
    assert str(caught.value) == message


def test_a_complex_model_carries_the_complex_step() -> None:
    real, model = (NUMPY.gpt.GPT(5, 4, 3, 1, seed=1, dtype=d) for d in (np.float64, np.complex128))
    assert {p.dtype for p in model.parameters()} == {np.dtype(np.complex128)}
    tokens, targets = np.array([[1, 2, 3]]), np.array([[2, 3, 4]])
    bias = model.transformers[0].attention.output.bias
    bias.data[1] += 2.0**-100 * 1j
    loss = NUMPY.loss.GPTLoss()(model(tokens), targets)
    reference = NUMPY.loss.GPTLoss()(real(tokens), targets)
    reference.backward()
    np.testing.assert_allclose(loss.data.real, reference.data, rtol=1e-14)
    expected = real.transformers[0].attention.output.bias.grad[1]
    np.testing.assert_allclose(loss.data.imag / 2.0**-100, expected, rtol=1e-12)
    with pytest.raises(TypeError, match="backward: got dtype complex128"):
        loss.backward()


class OneDtype(Observer):
    """Every result and gradient has the dtype of the model."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.count = dtype, 0

    def forward(self, op: str, out: Tensor, parents: tuple[Tensor, ...]) -> None:
        self.count += 1
        assert out.dtype == self.dtype, op

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Tensor, ...]
    ) -> None:
        self.count += 1
        assert grad.dtype == self.dtype, op


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_a_model_keeps_its_dtype_through_training(dtype: str) -> None:
    model = NUMPY.gpt.GPT(5, 4, 3, 2, dtype=dtype)
    optimizer = NUMPY.optim.AdamWOptimizer(model.parameters(), lr=np.float64(0.1))
    with observe(OneDtype(dtype)) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            NUMPY.loss.GPTLoss()(model(np.array([[1, 2]])), np.array([[2, 3]])).backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
    assert seen.count > 50
    state = optimizer.state()
    for array in (*state["exp_avg"], *state["exp_avg_sq"]):
        assert array.dtype == dtype
    for p in model.parameters():
        assert p.dtype == dtype and p.grad.dtype == dtype


def test_layers_of_both_twins_have_the_same_names() -> None:
    for name in ("Linear", "Embedding", "Softmax", "Tril", "GELU"):
        assert issubclass(getattr(NUMPY.layers, name), layers.Layer)
        assert issubclass(getattr(TORCH.layers, name), torch.nn.Module)
    for module in ("GPTEmbedding", "GPTAttention", "GPTFeedForward", "GPTTransformer", "GPTOutput"):
        assert inspect.signature(getattr(NUMPY.gpt, module)).parameters.keys() == (
            inspect.signature(getattr(TORCH.gpt, module)).parameters.keys()
        )
    assert inspect.signature(NUMPY.gpt.GPT).parameters.keys() == (
        inspect.signature(TORCH.gpt.GPT).parameters.keys()
    )
