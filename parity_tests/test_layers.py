"""Layers, loss and optimizer of both twins: known values, parameters, memory, errors, AdamW."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.oracle.rounding import OPERATION_FACTOR, UNITS
from numpy_impl import layers
from numpy_impl.layers import Layer, Linear, Parameter, ParameterBuffer
from numpy_impl.tape import Observer, observe
from numpy_impl.tensor import Tensor
from parity_tests.registry import NUMPY, TORCH, TWINS, Twin
from parity_tests.strategies import seeds, shapes

pytestmark = pytest.mark.reference("by hand")

both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)

INF, NAN = math.inf, math.nan


def vjp(twin: Twin, function: Any, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    leaf = twin.tensor(x)
    function(leaf).backward(TORCH.tensor(g) if twin is TORCH else g)
    return twin.array(leaf.grad)


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


# --- GELU and softmax


@both_twins
def test_gelu_is_the_tanh_form(twin: Twin) -> None:
    x = np.array([-2.0, 0.5, 1.0, 3.0])
    tanh = [-0.04540230591222494, 0.34571400982514394, 0.8411919906082768, 2.996362607918227]
    gelu = twin.layers.GELU()
    np.testing.assert_allclose(twin.array(gelu(twin.tensor(x))), tanh, rtol=1e-14)
    grid = np.linspace(-6.0, 6.0, 120_001)
    erf = torch.nn.functional.gelu(torch.tensor(grid)).numpy()
    gap = np.abs(twin.array(gelu(twin.tensor(grid))) - erf)
    np.testing.assert_allclose(gap.max(), 4.7323552e-4, rtol=1e-7)
    assert abs(abs(grid[gap.argmax()]) - 2.699) < 1e-3


@both_twins
def test_softmax_and_its_gradient_by_hand(twin: Twin) -> None:
    softmax = twin.layers.Softmax()
    x = np.array([1.0, 2.0, 3.0])
    p = [0.090030573170, 0.244728471055, 0.665240955775]
    np.testing.assert_allclose(twin.array(softmax(twin.tensor(x))), p, rtol=1e-10)
    np.testing.assert_allclose(
        twin.array(softmax(twin.tensor(np.array([1000.0, 1001.0, 1002.0])))), p, rtol=1e-10
    )
    np.testing.assert_allclose(
        vjp(twin, softmax, x, np.array([1.0, 0.0, 0.0])),
        [0.081925069065, -0.022033044520, -0.059892024545],
        rtol=1e-10,
    )
    # p (1 - sum p) is 0 up to a unit roundoff or two
    assert np.abs(vjp(twin, softmax, x, np.ones(3))).max() <= 2.0**-52

    g = np.random.default_rng(0).standard_normal((2, 2, 3))
    rows = np.broadcast_to(x, (2, 2, 3)) + 0.0
    found = vjp(twin, softmax, rows, g)
    for index in np.ndindex(2, 2):
        expected = (np.diag(p) - np.outer(p, p)) @ g[index]
        np.testing.assert_allclose(found[index], expected, rtol=1e-9)


@both_twins
def test_softmax_sums_to_one_over_the_last_axis(twin: Twin) -> None:
    def softmax(x: np.ndarray) -> np.ndarray:
        return twin.array(twin.layers.Softmax()(twin.tensor(x)))

    np.testing.assert_array_equal(softmax(np.zeros((2, 2))), np.full((2, 2), 0.5))
    x = np.random.default_rng(0).standard_normal((2, 3, 3))
    assert np.abs(softmax(x).sum(axis=-1) - 1.0).max() <= 1e-15
    assert np.abs(softmax(x.astype(np.float32)).sum(axis=-1) - 1.0).max() <= 1e-6
    np.testing.assert_array_equal(softmax(np.array([1e4, -1e4], np.float32)), [1.0, 0.0])


@both_twins
def test_softmax_of_rows_that_are_not_finite(twin: Twin) -> None:
    x = np.array([[-INF, -INF], [-INF, 0.0], [INF, 0.0], [NAN, 0.0]])
    expected = [[NAN, NAN], [0.0, 1.0], [NAN, NAN], [NAN, NAN]]
    np.testing.assert_array_equal(twin.array(twin.layers.Softmax()(twin.tensor(x))), expected)


@both_twins
def test_a_weight_of_zero_hides_large_values_but_not_nan(twin: Twin) -> None:
    weights = twin.tensor(np.array([[1.0, 0.0], [0.5, 0.5]]))
    out = twin.array(weights @ twin.tensor(np.array([[1.0], [NAN]])))
    assert np.isnan(out).all()
    assert twin.array(weights @ twin.tensor(np.array([[1.0], [1e300]])))[0, 0] == 1.0


# --- the mask


def weights_of(twin: Twin, scores: np.ndarray, fill: float = -1e9) -> np.ndarray:
    return twin.array(twin.layers.Softmax()(twin.layers.Tril(fill)(twin.tensor(scores))))


@both_twins
def test_the_mask_is_aligned_to_the_top_left(twin: Twin) -> None:
    np.testing.assert_array_equal(
        weights_of(twin, np.zeros((1, 2, 5))), [[[1.0, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]]
    )
    np.testing.assert_array_equal(
        weights_of(twin, np.zeros((1, 5, 2))), [[[1.0, 0.0], *[[0.5, 0.5]] * 4]]
    )
    third = 1.0 / 3.0
    np.testing.assert_array_equal(
        weights_of(twin, np.zeros((1, 3, 3))), [[[1, 0, 0], [0.5, 0.5, 0], [third] * 3]]
    )
    square = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [third, third, third, 0], [0.25] * 4]
    np.testing.assert_array_equal(
        weights_of(twin, np.zeros((2, 3, 4, 4))), np.broadcast_to(square, (2, 3, 4, 4))
    )
    np.testing.assert_array_equal(weights_of(twin, np.zeros((2, 2))), [[1, 0], [0.5, 0.5]])
    with pytest.raises(ValueError, match=r"tril: got shape \(3,\), needed at least two axes"):
        twin.layers.Tril(-1e9)(twin.tensor(np.zeros(3)))


@both_twins
def test_a_fill_of_zero_leaks_and_a_large_negative_one_does_not(twin: Twin) -> None:
    scores = np.array([[-2.0, 1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(weights_of(twin, scores)[0], [1.0, 0.0])
    np.testing.assert_allclose(
        weights_of(twin, scores, 0.0)[0], [0.11920292202211755, 0.8807970779778825], rtol=1e-15
    )


@both_twins
def test_masking_selects_and_does_not_multiply(twin: Twin) -> None:
    """A product with the triangle would leave 0 for the future, and NaN where g is not finite."""
    tril = twin.layers.Tril(-1e9)
    x = np.array([[1.0, INF], [2.0, 3.0]])
    np.testing.assert_array_equal(twin.array(tril(twin.tensor(x))), [[1.0, -1e9], [2.0, 3.0]])
    found = vjp(twin, tril, x, np.array([[1.0, INF], [2.0, 3.0]]))
    np.testing.assert_array_equal(found, [[1.0, 0.0], [2.0, 3.0]])


@both_twins
def test_a_half_type_takes_its_own_minimum(twin: Twin) -> None:
    x = np.zeros((1, 2, 2), np.float16)
    np.testing.assert_array_equal(
        twin.array(twin.layers.Tril(-1e9)(twin.tensor(x))),
        np.array([[[0.0, -65504.0], [0.0, 0.0]]], np.float16),
    )
    np.testing.assert_array_equal(weights_of(twin, x), [[[1.0, 0.0], [0.5, 0.5]]])
    assert weights_of(twin, x).dtype == np.float16


def test_bfloat16_takes_its_own_minimum() -> None:
    scores = TORCH.layers.Tril(-1e39)(torch.zeros(1, 2, 2, dtype=torch.bfloat16))
    assert scores[0, 0, 1] == torch.finfo(torch.bfloat16).min
    assert torch.softmax(scores, -1).tolist() == [[[1.0, 0.0], [0.5, 0.5]]]


# --- embedding and loss


@both_twins
def test_every_occurrence_of_an_id_counts(twin: Twin) -> None:
    ids = np.array([[0, 0, 2], [0, 2, 1]])
    found = vjp(twin, lambda w: twin.functional.embedding(w, ids), np.zeros((3, 2)),
                np.ones((2, 3, 2)))  # fmt: skip
    np.testing.assert_array_equal(found, [[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]])
    g = np.random.default_rng(0).integers(-9, 10, (4, 8, 2)).astype(np.float64)
    found = vjp(twin, lambda w: twin.functional.embedding(w, np.full((4, 8), 1)),
                np.zeros((3, 2)), g)  # fmt: skip
    np.testing.assert_array_equal(found, [[0.0, 0.0], g.sum(axis=(0, 1)), [0.0, 0.0]])


LOSSES = {
    22.0: 22.00000000027895, 23.0: 23.00000000010262, 23.1: 23.100000000092855,
    24.0: 24.00000000003775, 50.0: 50.0,
}  # fmt: skip


@both_twins
@pytest.mark.parametrize("gap", LOSSES)
def test_the_loss_of_a_confident_wrong_answer_is_not_clipped(twin: Twin, gap: float) -> None:
    logits = twin.tensor(np.array([[0.0, gap]]))
    loss = twin.loss.GPTLoss()(logits, np.array([0]))
    np.testing.assert_allclose(twin.array(loss), LOSSES[gap], rtol=1e-15)
    clipped = -math.log(max(1.0 / (1.0 + math.exp(gap)), 1e-10))
    if gap <= 23.0:  # the source text's loss agrees to rounding where p > 1e-10 ...
        np.testing.assert_allclose(twin.array(loss), clipped, rtol=1e-15)
    else:  # ... and below is constant, although its gradient says move
        assert clipped == 23.025850929940457
    loss.backward()
    p = 1.0 / (1.0 + math.exp(-gap))
    np.testing.assert_allclose(twin.array(logits.grad), [[-p, p]], rtol=1e-14)


@both_twins
@pytest.mark.parametrize("labels", ([-1], [3], [-100], [0, -100]), ids=str)
def test_labels_out_of_range_raise(twin: Twin, labels: list[int]) -> None:
    logits = twin.tensor(np.log(np.array([[0.2, 0.3, 0.5]] * len(labels))))
    with pytest.raises(ValueError, match=rf"targets: got {labels[-1]}, needed 0 to 2"):
        twin.loss.GPTLoss()(logits, np.array(labels))
    table = twin.tensor(np.zeros((3, 2)))
    with pytest.raises(ValueError, match=rf"ids: got {labels[-1]}, needed 0 to 2"):
        twin.functional.embedding(table, np.array(labels))


@both_twins
def test_labels_of_every_integer_dtype(twin: Twin) -> None:
    logits = twin.tensor(np.log(np.array([[0.2, 0.3, 0.5]] * 2)))
    loss = twin.loss.GPTLoss()
    for dtype in (np.int64, np.int32, np.uint8, np.int8, np.uint64):
        found = twin.array(loss(logits, np.array([0, 2], dtype)))
        np.testing.assert_allclose(found, 1.1512925464970227, rtol=1e-15)
    for labels in (np.array([0.0, 2.0]), np.array([0.0, 1.9999999]), np.array([True, False])):
        with pytest.raises(TypeError, match=r"targets: got dtype .*, needed integers"):
            loss(logits, labels)
        with pytest.raises(TypeError, match=r"ids: got dtype .*, needed integers"):
            twin.functional.embedding(logits, labels)


@both_twins
def test_classes_are_on_the_last_axis(twin: Twin) -> None:
    logits = twin.tensor(np.log([[[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]]))
    for labels, expected in (([[0, 1, 2]], 0.4987030757), ([[1, 0, 2]], 1.6094379124)):
        found = twin.array(twin.loss.GPTLoss()(logits, np.array(labels)))
        np.testing.assert_allclose(found, expected, rtol=1e-10)


@both_twins
def test_targets_of_another_shape_raise(twin: Twin) -> None:
    logits = twin.tensor(np.zeros((2, 3, 4)))
    for shape in ((2,), (3, 2), (6,), (2, 3, 1)):
        with pytest.raises(ValueError, match="needed one target per row and at least one row"):
            twin.loss.GPTLoss()(logits, np.zeros(shape, int))
    with pytest.raises(ValueError, match="at least one row"):
        twin.loss.GPTLoss()(twin.tensor(np.zeros((0, 4))), np.zeros(0, int))


@both_twins
def test_linear_names_both_sizes(twin: Twin) -> None:
    layer = twin.layers.Linear(3, 2, rng(), twin.dtypes["float64"])
    # PyTorch's own module speaks for itself; the function has one message in both twins.
    with pytest.raises((ValueError, RuntimeError)):
        layer(twin.tensor(np.zeros((2, 4))))
    with pytest.raises(ValueError, match=r"linear: got input \(2, 4\), needed \(\.\.\., 3\)"):
        twin.functional.linear(twin.tensor(np.zeros((2, 4))), layer.weight, layer.bias)


@both_twins
def test_linear_refuses_mixed_dtypes(twin: Twin) -> None:
    layer = twin.layers.Linear(3, 2, rng(), twin.dtypes["float64"])
    with pytest.raises((TypeError, RuntimeError)):
        layer(twin.tensor(np.zeros((2, 3), np.float32)))


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
    assert model.eval() is model and not any(module.training for module in every)
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


# --- AdamW and clipping


def optimizer_of(twin: Twin, arrays: list[np.ndarray], **arguments: Any) -> tuple[list[Any], Any]:
    parameters = [twin.parameter(array) for array in arrays]
    return parameters, twin.optim.AdamWOptimizer(parameters, **arguments)


def set_grad(twin: Twin, parameter: Any, grad: np.ndarray | None) -> None:
    parameter.grad = torch.tensor(grad) if twin is TORCH and grad is not None else grad


@both_twins
def test_eps_stands_outside_the_root_and_after_the_correction(twin: Twin) -> None:
    (p,), optimizer = optimizer_of(twin, [np.array([1.0])], lr=0.1, weight_decay=0.0)
    set_grad(twin, p, np.array([1e-8]))
    optimizer.step()
    np.testing.assert_allclose(twin.array(p), [0.95], rtol=1e-14)


@both_twins
def test_decay_is_decoupled_and_for_matrices_only(twin: Twin) -> None:
    arrays = [np.array([[2.0]]), np.array([2.0]), np.array([[2.0]])]
    (matrix, vector, idle), optimizer = optimizer_of(twin, arrays, lr=0.1, weight_decay=0.1)
    set_grad(twin, matrix, np.zeros((1, 1)))
    set_grad(twin, vector, np.zeros(1))
    optimizer.step()
    np.testing.assert_allclose(twin.array(matrix), [[1.98]], rtol=1e-15)
    assert twin.array(vector) == 2.0
    assert twin.array(idle) == 2.0
    assert optimizer.state()["steps"] == [1, 1, 0]


def test_optimizers_have_the_same_defaults() -> None:
    ours, theirs = (inspect.signature(twin.optim.AdamWOptimizer) for twin in TWINS)
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    for signature in (ours, theirs):
        assert {name: signature.parameters[name].default for name in defaults} == defaults


CLIPS = {
    "zeros": ([[0.0, 0.0]], [[0.0, 0.0]], 0.0),
    "small": ([[0.3, 0.4]], [[0.3, 0.4]], 0.5),
    "large": ([[3.0, 4.0]], [[0.599999880000024, 0.799999840000032]], 5.0),
    "two": ([[3.0], [4.0]], [[0.599999880000024], [0.799999840000032]], 5.0),
    "at the limit": ([[1.0, 0.0]], [[0.9999990000010001, 0.0]], 1.0),
    "inf": ([[INF, 1.0]], [[NAN, 0.0]], INF),
    "nan": ([[NAN, 1.0]], [[NAN, NAN]], NAN),
    "overflow": ([[1e200, 1e200]], [[0.0, 0.0]], INF),
}


@both_twins
@pytest.mark.parametrize("case", CLIPS)
def test_clipping_by_one_global_norm(twin: Twin, case: str) -> None:
    grads, expected, norm = CLIPS[case]
    parameters, optimizer = optimizer_of(twin, [np.zeros(len(g)) for g in grads])
    for p, g in zip(parameters, grads, strict=True):
        set_grad(twin, p, np.array(g))
    if not math.isfinite(norm):
        with pytest.raises(FloatingPointError, match=r"gradient norm: got .* needed a finite"):
            optimizer.clip_grad_norm(1.0)
        for p, g in zip(parameters, grads, strict=True):
            np.testing.assert_array_equal(twin.array(p.grad), g)
    found = optimizer.clip_grad_norm(1.0, error_if_nonfinite=False)
    np.testing.assert_equal(found, norm)
    for p, g in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(twin.array(p.grad), g, rtol=1e-15)


@both_twins
def test_clipping_in_float32_overflows_to_zero_as_in_torch(twin: Twin) -> None:
    (p,), optimizer = optimizer_of(twin, [np.zeros(2, np.float32)])
    set_grad(twin, p, np.array([3e19, 4e19], np.float32))
    assert optimizer.clip_grad_norm(1.0, error_if_nonfinite=False) == INF
    np.testing.assert_array_equal(twin.array(p.grad), [0.0, 0.0])
    for max_norm in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match=r"max_norm: got .*, needed a positive number"):
            optimizer.clip_grad_norm(max_norm)


@both_twins
@pytest.mark.parametrize(
    "arguments",
    ({"lr": -1.0}, {"lr": NAN}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8},
     {"weight_decay": -0.1}),
    ids=str,
)  # fmt: skip
def test_hyperparameters_out_of_range_raise(twin: Twin, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        optimizer_of(twin, [np.zeros((1, 1))], **arguments)


@both_twins
def test_an_optimizer_needs_parameters(twin: Twin) -> None:
    with pytest.raises(ValueError, match="parameters: got none, needed at least one"):
        twin.optim.AdamWOptimizer([])


@both_twins
def test_an_optimizer_made_after_backward_keeps_the_gradients(twin: Twin) -> None:
    parameters = [twin.parameter(np.array([1.0])), twin.parameter(np.array([2.0]))]
    seed = np.array([3.0])
    (parameters[0] + parameters[1]).backward(torch.tensor(seed) if twin is TORCH else seed)
    optimizer = twin.optim.AdamWOptimizer(parameters, lr=0.1)
    np.testing.assert_allclose(optimizer.clip_grad_norm(10.0), math.sqrt(18.0), rtol=1e-15)


def test_replaced_memory_is_noticed() -> None:
    (p,), optimizer = optimizer_of(NUMPY, [np.zeros(2)])
    p.data = np.ones(2)
    p.grad = np.ones(2)
    with pytest.raises(RuntimeError, match="memory was replaced"):
        optimizer.step()


Flat = list[np.ndarray]


def adamw_step(
    w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, t: int, lr: float,
    betas: tuple[float, float], eps: float, decay: float,
) -> tuple[Flat, Flat]:  # fmt: skip
    """Algorithm 2 of Loshchilov & Hutter in float64: weight and moments, and their magnitudes.

    The weight inherits the magnitude of the first moment, which may cancel.
    """
    b1, b2 = betas
    new_m, new_v = b1 * m + (1.0 - b1) * g, b2 * v + (1.0 - b2) * g * g
    m_size = np.abs(m) + (1.0 - b1) * np.abs(g)
    denominator = np.sqrt(new_v / (1.0 - b2**t)) + eps
    step = lr / (1.0 - b1**t) / denominator
    new_w = (w - lr * decay * w if w.ndim >= 2 else w) - step * new_m
    return [new_w, new_m, new_v], [np.abs(w) + step * m_size, m_size, new_v]


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@given(
    st.lists(shapes(1, 3), min_size=1, max_size=4),
    st.sampled_from((1e-3, 0.1, 1.0)),
    st.sampled_from(((0.9, 0.999), (0.0, 0.5), (0.8, 0.0))),
    st.sampled_from((1e-8, 1e-3)),
    st.sampled_from((0.0, 0.01, 0.3)),
    st.integers(-30, 10),
    seeds,
)
def test_adamw_step_by_step(
    dtype: str, sizes: list[tuple[int, ...]], lr: float, betas: tuple[float, float], eps: float,
    decay: float, exponent: int, seed: int,
) -> None:  # fmt: skip
    """Each step starts from the state of the NumPy twin; both twins against the formula."""
    random = np.random.default_rng(seed)
    unit = UNITS[dtype]
    arrays = [random.standard_normal(shape).astype(dtype) for shape in sizes]
    arguments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
    made = [optimizer_of(twin, arrays, **arguments) for twin in TWINS]
    for _ in range(3):
        scale = 2.0 ** (exponent + random.integers(-3, 4))
        grads = [
            None if random.random() < 0.25
            else (scale * random.standard_normal(shape)).astype(dtype)
            for shape in sizes
        ]  # fmt: skip
        (ours, first), (theirs, second) = made
        state = first.state()
        weights = [NUMPY.array(p) for p in ours]
        for p, w in zip(theirs, weights, strict=True):
            p.data.copy_(torch.tensor(w))
        second.load_state(state)
        for twin, (parameters, optimizer) in zip(TWINS, made, strict=True):
            for p, g in zip(parameters, grads, strict=True):
                set_grad(twin, p, g)
            optimizer.step()
        after = [(twin, p, o.state()) for twin, (p, o) in zip(TWINS, made, strict=True)]
        for i, g in enumerate(grads):
            before = [x.astype(np.float64) for x in
                      (weights[i], state["exp_avg"][i], state["exp_avg_sq"][i])]  # fmt: skip
            t = state["steps"][i] + 1
            for twin, parameters, now in after:
                found = [twin.array(parameters[i]), now["exp_avg"][i], now["exp_avg_sq"][i]]
                if g is None:
                    assert now["steps"][i] == t - 1
                    for x, old in zip(found, before, strict=True):
                        np.testing.assert_array_equal(x, old)
                    continue
                assert now["steps"][i] == t
                expected, magnitudes = adamw_step(
                    before[0], g.astype(np.float64), before[1], before[2], t, **{
                        "lr": lr, "betas": betas, "eps": eps, "decay": decay
                    }
                )  # fmt: skip
                for x, exact, m in zip(found, expected, magnitudes, strict=True):
                    assert x.dtype == dtype
                    allowed = OPERATION_FACTOR * (unit.u * m + unit.eta)
                    assert (np.abs(x - exact) <= allowed).all(), f"{twin.name}, parameter {i}"


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@given(
    st.lists(shapes(1, 3), min_size=1, max_size=4),
    st.sampled_from((1e-3, 1.0, 50.0)),
    st.integers(-30, 10),
    seeds,
)
def test_clipping_of_random_gradients(
    dtype: str, sizes: list[tuple[int, ...]], max_norm: float, exponent: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    unit = UNITS[dtype]
    grads = [(2.0**exponent * random.standard_normal(shape)).astype(dtype) for shape in sizes]
    exact = math.sqrt(math.fsum(float(x) ** 2 for g in grads for x in g.flat))
    scale = min(1.0, max_norm / (exact + 1e-6))
    count = sum(g.size for g in grads)
    for twin in TWINS:
        parameters, optimizer = optimizer_of(twin, [np.zeros_like(g) for g in grads])
        for p, g in zip(parameters, grads, strict=True):
            set_grad(twin, p, g)
        norm = optimizer.clip_grad_norm(max_norm)
        slack = OPERATION_FACTOR * math.sqrt(count) * unit.u
        assert abs(norm - exact) <= slack * exact
        for p, g in zip(parameters, grads, strict=True):
            found, expected = twin.array(p.grad), g.astype(np.float64) * scale
            assert found.dtype == dtype
            assert (np.abs(found - expected) <= slack * np.abs(expected) + unit.eta).all()


@pytest.mark.reference("other backend")
@both_twins
def test_clipping_skips_parameters_without_a_gradient(twin: Twin) -> None:
    (p, idle), optimizer = optimizer_of(twin, [np.zeros(2), np.zeros(2)])
    set_grad(twin, idle, np.array([100.0, 100.0]))
    optimizer.step()
    optimizer.zero_grad()
    assert p.grad is None and idle.grad is None
    set_grad(twin, p, np.array([3.0, 4.0]))
    assert optimizer.clip_grad_norm(10.0) == 5.0
    assert idle.grad is None
    moved = twin.array(idle)
    optimizer.step()
    np.testing.assert_array_equal(twin.array(idle), moved)
    assert optimizer.state()["steps"] == [1, 1]


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
