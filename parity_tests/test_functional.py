"""Functions of both twins at known values, and their errors."""

from __future__ import annotations

import ctypes
import math
import operator
from typing import Any

import numpy as np
import pytest
import torch

from numpy_impl import functional
from numpy_impl.tape import no_grad
from numpy_impl.tensor import Tensor
from parity_tests.registry import TORCH, TWINS, Twin

pytestmark = pytest.mark.reference("by hand")

both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)

INF, NAN = math.inf, math.nan


def vjp(twin: Twin, function: Any, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    leaf = twin.tensor(x)
    function(leaf).backward(TORCH.tensor(g) if twin is TORCH else g)
    return twin.array(leaf.grad)


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


# --- Products


class Garbage(ctypes.Structure):
    """Signalling NaNs; passed by value, they are left on the stack, below what is in use."""

    _fields_ = [("words", ctypes.c_uint32 * 8192)]


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_a_product_says_nothing_of_numbers_that_are_no_part_of_it(name: str) -> None:
    """With the OpenBLAS of NumPy's wheels on AVX-512, `a @ x` raises here."""
    garbage, leave = Garbage(), ctypes.CDLL(None).labs
    leave.argtypes = [Garbage]
    garbage.words[:] = [0x7FA00001] * 8192
    a = np.arange(-17, 18, dtype=np.float32).reshape(7, 5)
    x = np.float32([[1.0], [2.0], [-1.0], [0.0], [3.0]])
    weight = x if name == "matmul" else x.T.copy()
    function = operator.matmul if name == "matmul" else functional.linear
    left, right = Tensor(a), Tensor(weight)
    with np.errstate(all="raise"):
        leave(garbage)
        y = function(left, right)
    expected = [[sum(int(p) * int(q) for p, q in zip(row, x[:, 0], strict=True))] for row in a]
    np.testing.assert_array_equal(y.data, np.float32(expected), strict=True)


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_a_product_of_zero_and_infinity_is_nan_as_in_pytorch_without_a_warning(name: str) -> None:
    a, b, g = np.array([[INF, 1.0]]), np.array([[0.0, 2.0], [3.0, 4.0]]), np.array([[0.0, 1.0]])
    results = []
    for twin in TWINS:
        left, right = twin.tensor(a), twin.tensor(b)
        with np.errstate(all="raise"):
            y = left @ right if name == "matmul" else twin.functional.linear(left, right)
            y.backward(TORCH.tensor(g) if twin is TORCH else g)
        results.append([twin.array(v) for v in (y, left.grad, right.grad)])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)
    assert np.isnan(results[0][0]).any() and np.isnan(results[0][2]).any()


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
def test_a_loss_of_infinite_logits_is_nan_without_a_warning(twin: Twin) -> None:
    for value in (math.inf, math.nan):
        x = twin.tensor(np.array([[value, 0.0]]))
        assert np.isnan(twin.array(twin.functional.cross_entropy(x, np.array([1]))))


@both_twins
def test_ids_may_be_a_list_or_a_tensor(twin: Twin) -> None:
    table = twin.tensor(np.array([[1.0], [2.0], [3.0]]))
    ids = [2, 0]
    tensor = Tensor(np.array(ids)) if twin.name == "numpy" else torch.tensor(ids)
    for given in (ids, tensor, np.array(ids)):
        assert twin.array(twin.functional.embedding(table, given)).tolist() == [[3.0], [1.0]]


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


def test_ids_may_be_written_to_between_forward_and_backward() -> None:
    """A batch buffer that is filled again must not change the gradient."""
    table, ids = Tensor(np.zeros((3, 2))), np.array([0, 0, 2])
    rows = functional.embedding(table, ids)
    ids[:] = 1
    rows.backward(np.ones((3, 2)))
    np.testing.assert_array_equal(table.grad, [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_numpy_number_as_fill_leaves_the_dtype_alone(dtype: Any) -> None:
    assert functional.tril(Tensor(np.zeros((2, 2), dtype)), np.float64(-1e9)).dtype == dtype


@pytest.mark.parametrize(("data", "number"), [(np.arange(3), 0.5), (np.zeros(3), 1j)])
def test_a_number_that_would_be_cut_is_refused(data: np.ndarray, number: Any) -> None:
    with pytest.raises(TypeError, match="operand is a"):
        Tensor(data) * number


# By product with one-hot rows, and by sorting: the smaller and the larger number of ids.
@pytest.mark.parametrize("limit", [2**62, -1])
@pytest.mark.parametrize("batch", [(), (0,), (1,), (40,), (3, 7, 2)])
def test_both_ways_to_the_gradient_of_a_table(
    limit: int, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers, so that sums are exact; a loop over the ids is the reference."""
    monkeypatch.setattr(functional, "SMALL_LOOKUP", limit)
    rng = np.random.default_rng(len(batch))
    ids, grad = rng.integers(0, 9, batch), rng.integers(-9, 10, (*batch, 5)).astype(np.float32)
    table = Tensor(np.zeros((9, 5), np.float32))
    functional.embedding(table, ids).backward(grad)
    expected = np.zeros((9, 5), np.float32)
    for row, g in zip(ids.reshape(-1), grad.reshape(ids.size, 5), strict=True):
        expected[row] += g
    np.testing.assert_array_equal(table.grad, expected)
    assert table.grad.dtype == np.float32


@pytest.mark.parametrize("limit", [2**62, -1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_stays_in_its_row(
    limit: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "SMALL_LOOKUP", limit)
    table, grad = Tensor(np.zeros((4, 2))), np.ones((3, 2))
    grad[1, 0] = bad
    functional.embedding(table, np.array([0, 2, 0])).backward(grad)
    np.testing.assert_array_equal(table.grad, [[2.0, 2.0], [0.0, 0.0], [bad, 1.0], [0.0, 0.0]])


@pytest.mark.parametrize("size", [functional.BLOCK - 1, functional.BLOCK, 2 * functional.BLOCK + 3])
def test_gelu_in_blocks_is_gelu(size: int) -> None:
    """Elements do not know in which block they are: bits as of each half of the array alone."""
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32) * 4.0
    parts = [Tensor(part) for part in (x, x[: size // 2], x[size // 2 :])]
    whole, *halves = (functional.gelu(part) for part in parts)
    np.testing.assert_array_equal(whole.data, np.concatenate([half.data for half in halves]))
    for y in (whole, *halves):
        y.backward(np.ones_like(y.data))
    np.testing.assert_array_equal(parts[0].grad, np.concatenate([p.grad for p in parts[1:]]))


@pytest.mark.parametrize("grad", [True, False])
def test_gelu_takes_no_derivative_that_nobody_wants(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []
    right = functional._gelu
    monkeypatch.setattr(
        functional, "_gelu", lambda z, y, dy: wanted.append(dy is not None) or right(z, y, dy)
    )
    x = Tensor(np.ones(3), requires_grad=grad)
    functional.gelu(x)
    with no_grad():
        functional.gelu(x)
    assert wanted == [grad, False]
