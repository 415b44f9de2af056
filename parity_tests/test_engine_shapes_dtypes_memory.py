"""The NumPy engine's arrays: broadcasting undone, memory that is not shared, dtypes, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import numpy_impl
from numpy_impl import functional as F
from numpy_impl import tape
from numpy_impl.layers import Parameter
from numpy_impl.tensor import Tensor
from parity_tests.tensors import tensor

pytestmark = pytest.mark.reference("by hand")


# --- shapes of gradients


def test_broadcasting_is_undone() -> None:
    b = tensor([0.5, 0.5, 0.5])
    (Tensor(np.ones((2, 3))) + b).backward(np.ones((2, 3)))
    np.testing.assert_array_equal(b.grad, [2.0, 2.0, 2.0])

    positions = Tensor(np.zeros((3, 4)))
    (Tensor(np.ones((2, 3, 4))) + positions).backward(np.ones((2, 3, 4)))
    np.testing.assert_array_equal(positions.grad, np.full((3, 4), 2.0))

    k = tensor(3.0)
    (k * Tensor(np.ones((2, 3)))).backward(np.ones((2, 3)))
    assert k.grad.shape == () and k.grad == 6.0

    a, b = tensor([[1.0], [2.0], [3.0], [4.0]]), tensor([[1.0, 1.0, 1.0, 1.0]])
    (a * b).backward(np.ones((4, 4)))
    np.testing.assert_array_equal(a.grad, [[4.0]] * 4)
    np.testing.assert_array_equal(b.grad, [[10.0] * 4])


@pytest.mark.parametrize(
    ("axis", "mean", "gradient"),
    [
        (None, 6.0, [[2.0] * 3] * 2),  # (1 + 2 + 6 + 3 + 8 + 16) / 6, and 12 / 6
        (0, [2.0, 5.0, 11.0], [[6.0] * 3] * 2),  # columns of 2
        (1, [3.0, 9.0], [[4.0] * 3] * 2),  # rows of 3
        (-1, [3.0, 9.0], [[4.0] * 3] * 2),
        ((0, 1), 6.0, [[2.0] * 3] * 2),
    ],
)
@pytest.mark.parametrize("keepdims", (False, True))
def test_mean_divides_by_the_elements_summed(
    axis: Any, mean: Any, gradient: Any, keepdims: bool
) -> None:
    x = tensor([[1.0, 2.0, 6.0], [3.0, 8.0, 16.0]])
    out = x.mean(axis, keepdims)
    out.backward(np.full(out.shape, 12.0))
    assert out.ndim == (2 if keepdims else np.ndim(mean))
    np.testing.assert_array_equal(out.data.reshape(np.shape(mean)), mean)
    assert x.mean(axis).ndim == np.ndim(mean)
    np.testing.assert_array_equal(x.grad, gradient)


def test_unbroadcast_refuses_what_did_not_broadcast() -> None:
    for grad, shape in (((2, 3), (2, 4)), ((3,), (2, 3)), ((2, 3), (3, 2))):
        with pytest.raises(ValueError, match="does not reduce to"):
            tape.unbroadcast(np.ones(grad), shape)


def test_batched_product_with_a_plain_matrix() -> None:
    x, w = Tensor(np.arange(12.0).reshape(2, 3, 2)), Tensor(np.ones((2, 2)))
    (x @ w).sum().backward()
    np.testing.assert_array_equal(w.grad, [[30.0, 30.0], [36.0, 36.0]])
    np.testing.assert_array_equal(x.grad, np.full((2, 3, 2), 2.0))
    with pytest.raises(ValueError, match=r"got \(2, 3\) @ \(3,\), needed"):
        tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]) @ tensor([1.0, 0.0, -1.0])


# --- memory


@pytest.mark.reference("exact property")
def test_gradients_of_two_leaves_share_no_memory() -> None:
    x, y = tensor(0.5, 0.25), tensor(1.0, 2.0)
    g = np.array([3.0, 4.0])
    (x + y).backward(g)
    assert not np.shares_memory(x.grad, y.grad) and not np.shares_memory(x.grad, g)
    x.grad += 1.0
    np.testing.assert_array_equal(y.grad, [3.0, 4.0])
    np.testing.assert_array_equal(g, [3.0, 4.0])

    p, q = Parameter(np.array([0.0])), Parameter(np.array([0.0]))
    optimizer = numpy_impl.AdamWOptimizer([p, q])
    (p + q).backward(np.array([3.0]))
    assert optimizer.clip_grad_norm(1.0) == np.sqrt(18.0)
    scaled = 3.0 * (1.0 / (np.sqrt(18.0) + 1e-6))
    np.testing.assert_allclose([p.grad[0], q.grad[0]], [scaled, scaled], rtol=1e-15)


def test_scaling_one_gradient_in_place_leaves_the_others() -> None:
    """d(x + y) hands (3, 4) to both: halved, one is (1.5, 2), the other still (3, 4)."""
    x, y, g = tensor(0.5, 0.25), tensor(1.0, 2.0), np.array([3.0, 4.0])
    (x + y).backward(g)
    x.grad *= 0.5
    assert (x.grad.tolist(), y.grad.tolist(), g.tolist()) == ([1.5, 2.0], [3.0, 4.0], [3.0, 4.0])


def test_gelu_of_one_tensor_twice() -> None:
    x = tensor([0.5])
    y = F.gelu(x) + F.gelu(x)
    y.backward(np.ones(1))
    np.testing.assert_allclose(y.data, [0.6914280196502879], rtol=1e-15)
    np.testing.assert_allclose(x.grad, [1.734739807069], rtol=1e-12)


def test_writing_into_data_before_backward_is_as_silent_as_in_torch() -> None:
    x = tensor([1.0, 2.0, 3.0])
    y = (x * x).sum()
    x.data += 1.0
    y.backward()
    twin = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    z = (twin * twin).sum()
    twin.data += 1.0
    z.backward()
    np.testing.assert_array_equal(x.grad, twin.grad.numpy())


def test_augmented_assignment_makes_a_new_tensor() -> None:
    x = tensor([1.0, 2.0])
    t = x
    t += x * x
    assert t is not x
    np.testing.assert_array_equal(x.data, [1.0, 2.0])
    t.backward(np.ones(2))
    np.testing.assert_array_equal(x.grad, [3.0, 5.0])


# --- what the cotangent and the dtype must be


def test_scaling_the_loss_scales_the_gradient() -> None:
    for scaled, expected in (
        (lambda loss: loss * 3.0, [[-1.5, 1.5]]),
        (lambda loss: loss * 0.25, [[-0.125, 0.125]]),
        (lambda loss: loss + loss, [[-1.0, 1.0]]),
    ):
        logits = tensor([[0.0, 0.0]])
        scaled(F.cross_entropy(logits, np.array([0]))).backward()
        np.testing.assert_array_equal(logits.grad, expected)


def freed() -> Tensor:
    loss = tensor(1.0) * 2.0
    loss.backward()
    return loss


ERRORS = {
    "no scalar": (lambda: tensor(1.0, 2.0).backward(), ValueError, "is no scalar, needed a gradi"),
    "shape": (lambda: tensor(1.0, 2.0).backward(np.ones(3)), ValueError, r"of \(3,\), needed \(2,"),
    "dtype": (lambda: tensor(1.0).backward(np.float32(1.0)), TypeError, "float32 gradient, nee"),
    "complex": (lambda: Tensor(np.array(1j)).backward(), TypeError, "complex128, needed a re"),
    "freed": (lambda: freed().backward(), RuntimeError, "freed by an earlier backward"),
    "integers": (lambda: Tensor(np.array(1)).backward(), RuntimeError, "has no history"),
    "detached": (lambda: tensor(1.0).detach().backward(), RuntimeError, "has no history"),
    "mixed": (lambda: tensor(1.0) + Tensor([1.0]), TypeError, "float64 and float32, needed"),
    "array": (lambda: tensor(1.0) * np.ones(2, np.float32), TypeError, "needed the same dtype"),
    "matmul": (lambda: tensor([[1.0]]) @ tensor([[1.0], [2.0]]), ValueError, r"\(1, 1\) @ \(2,"),
    "no array": (lambda: Tensor("text"), TypeError, "got str, needed an array or numbers"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_what_was_found_and_needed(case: str) -> None:
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_gradient_of_the_wrong_dtype_is_refused() -> None:
    x = Tensor(np.ones(2, np.float32))
    out = Tensor.from_op("double", x.data * 2, (x,), lambda grad: (grad * np.float64(2.0),))
    with pytest.raises(TypeError, match="double: gradient 0 is float64, needed float32"):
        out.backward(np.ones(2, np.float32))


def test_a_gradient_for_a_one_element_tensor_may_be_a_number() -> None:
    x = tensor([[2.0]])
    (x * x).backward(3.0 * np.ones((1, 1)))
    assert x.grad.shape == (1, 1) and x.grad[0, 0] == 12.0
    y = tensor(2.0)
    (y * y).backward(3.0)
    assert y.grad == 12.0
    z = tensor(2.0)
    (z * z).backward(Tensor(np.array(3.0)))
    assert z.grad == 12.0


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
def test_strong_scalars_leave_the_dtype_alone(dtype: Any) -> None:
    x = Tensor(np.zeros(3, dtype))
    for factor in (np.float64(2.0), np.float32(2.0), 2.0, np.array(2.0), np.sqrt(2.0 / np.pi), 2):
        for result in (x * factor, factor * x, x + factor, x - factor, factor - x, x / factor):
            assert result.dtype == dtype
    (np.float64(1.0) / (x + 1.0)).backward(np.ones(3, dtype))
    assert x.grad.dtype == dtype
    matrix = Tensor(np.zeros((2, 2), dtype))
    for out in (F.tril(matrix, -1e9), F.gelu(matrix), F.softmax(matrix), matrix.mean(), -matrix):
        assert out.dtype == dtype
        out.backward(np.ones(out.shape, dtype))
    assert matrix.grad.dtype == dtype


def test_reflected_operators_take_arrays_and_numbers() -> None:
    x = tensor([[1.0, 2.0], [3.0, 4.0]])
    a = np.array([[5.0, 6.0], [7.0, 8.0]])
    for out, expected in (
        (a @ x, a @ x.data), (a - x, a - x.data), (a / x, a / x.data), (2.0 - x, 2.0 - x.data),
        (a + x, a + x.data), (a * x, a * x.data), (2.0 / x, 2.0 / x.data),
    ):  # fmt: skip
        assert isinstance(out, Tensor)
        np.testing.assert_array_equal(out.data, expected)


def test_a_number_as_divisor_costs_no_gradient() -> None:
    x = tensor(3.0, 4.0)
    quotient = x / 2.0
    grad, none = quotient.gradient_fn(np.ones(2))
    assert grad.tolist() == [0.5, 0.5] and none is None
    assert x.detach().requires_grad is False


def test_an_operation_may_give_a_parent_no_gradient() -> None:
    """The other parents get theirs, and what stands above the one without stays without."""
    a, b = tensor(2.0), tensor(3.0)
    above, beside = a * a, b * b
    for parents in ((above, beside), (beside, above)):
        gradients = [None if p is above else np.array(5.0) for p in parents]
        Tensor.from_op("half", np.array(1.0), parents, lambda g, each=gradients: each).backward(
            retain_graph=True
        )
    assert a.grad is None and b.grad == 2 * 5.0 * 6.0


def test_a_new_tensor_is_a_plain_leaf() -> None:
    x = Tensor([1, 2])
    assert (x.op, x.attributes, x.parents, x.grad) == ("leaf", {}, (), None)
    assert x.requires_grad is True and x.retains_grad is False
    assert [Tensor(number).dtype for number in (1.5, 2, True)] == [np.float32] * 3
    assert (x + 1.0).parents[1].requires_grad is False
    assert [Tensor(np.array(n)).dtype.kind for n in (np.uint8(1), True, 1)] == ["u", "b", "i"]


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
def test_a_cotangent_of_plain_numbers_takes_the_dtype(dtype: Any) -> None:
    x = Tensor(np.array([1.0, 2.0], dtype))
    (x * x).backward([3, 4.5])
    assert x.grad.tolist() == [6.0, 18.0] and x.grad.dtype == dtype


def test_data_is_copied_in_and_out() -> None:
    array = np.ones(2)
    x = Tensor(array)
    for other in (x.data, x.numpy(), x.detach().data):
        assert not np.shares_memory(other, array)
    assert not np.shares_memory(x.numpy(), x.data)
    assert not np.shares_memory(x.detach().data, x.data)
    assert Tensor([1, 2]).dtype == np.float32 and Tensor(np.array([1, 2])).dtype.kind == "i"
    assert len(x) == 2 and Tensor(3.0).item() == 3.0
