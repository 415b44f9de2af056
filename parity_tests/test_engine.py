"""The NumPy engine: order of the backward pass, accumulation, modes, the observer, errors."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import numpy_impl
import torch_impl.functional
from gpt_parity.oracle.examples import seeds
from numpy_impl import functional as F
from numpy_impl import tape
from numpy_impl.layers import GELU, Layer, Parameter
from numpy_impl.tape import Observer, no_grad, observe
from numpy_impl.tensor import Tensor
from parity_tests.comparers import assert_agree

pytestmark = pytest.mark.reference("by hand")


def tensor(*values: Any) -> Tensor:
    return Tensor(np.array(values[0] if len(values) == 1 else values, np.float64))


# --- order of the backward pass and accumulation


def test_a_value_on_two_paths_gets_each_path_once() -> None:
    a = tensor(1.0)
    b = a + a
    (b + b).backward()
    assert a.grad == 4.0

    x = tensor(1.0, 2.0)
    y = x * x
    (y + y * y).sum().backward()
    np.testing.assert_array_equal(x.grad, [6.0, 36.0])


def test_paths_of_unequal_depth() -> None:
    a = tensor(2.0)
    b = 3.0 * a
    c = b + 1.0
    d = b * c
    e = d + c
    e.backward()
    assert e.item() == 49.0
    assert a.grad == 42.0


def test_attention_core_uses_its_input_three_times() -> None:
    x = tensor([[[1.0, 0.0], [0.0, 1.0]]])
    weights = F.softmax(F.tril(x @ x.transpose(-2, -1) / np.sqrt(2.0), -1e9))
    out = weights @ x
    g = np.zeros((1, 2, 2))
    g[0, 1, 0] = 1.0
    out.backward(g)
    np.testing.assert_allclose(
        weights.data[0], [[1.0, 0.0], [0.330238450673, 0.669761549327]], rtol=1e-11
    )
    np.testing.assert_allclose(
        x.grad[0],
        [[0.330238450673, 0.156398596545], [0.826160145872, -0.312797193090]],
        rtol=1e-11,
    )


def test_backward_twice_over_one_graph() -> None:
    w = tensor(3.0)
    h = 2.0 * w
    y = h * h
    y.backward(retain_graph=True)
    assert w.grad == 24.0
    w.grad = None
    y.backward(retain_graph=True)
    assert w.grad == 24.0
    y.backward()
    assert w.grad == 48.0
    with pytest.raises(RuntimeError, match="freed by an earlier backward"):
        y.backward()
    assert w.grad == 48.0


def test_a_second_loss_on_freed_inner_tensors() -> None:
    """h = w^2 = 9: the first loss h^2 gives 2 h 2 w = 108, the second 5 h would add 5 2 w = 30."""
    w = tensor(3.0)
    h = w * w
    first, second = h * h, 5.0 * h
    first.backward()
    assert w.grad == 108.0
    with pytest.raises(RuntimeError, match="freed by an earlier backward"):
        second.backward()
    assert w.grad == 108.0

    w = tensor(3.0)
    h = w * w
    first, second = h * h, 5.0 * h
    first.backward(retain_graph=True)
    second.backward()
    assert w.grad == 138.0


SHARED_INNER: dict[str, Any] = {
    "product": (lambda x: x * x, lambda x: x * x),
    "matmul": (lambda x: x @ x, lambda x: x @ x),
    "gelu": (F.gelu, torch_impl.functional.gelu),
    "softmax": (F.softmax, torch_impl.functional.softmax),
}


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("inner", SHARED_INNER)
@pytest.mark.parametrize("retain", (True, False))
def test_two_losses_over_one_inner_tensor(inner: str, retain: bool) -> None:
    """Both backends end the second loss alike, and keep the gradient that was there."""
    x = np.random.default_rng(3).standard_normal((3, 3))
    leaf, twin = Tensor(x), torch.tensor(x, requires_grad=True)
    ended = []
    for own, call in zip((leaf, twin), SHARED_INNER[inner], strict=True):
        h = call(own)
        first, second = (h * h).sum(), (h * 2.0).sum()
        first.backward(retain_graph=retain)
        try:
            second.backward()
        except RuntimeError as error:
            ended.append("retain_graph" in str(error))
        else:
            ended.append(False)
    assert ended == [not retain] * 2
    assert_agree("gradient", 1, leaf.grad, twin.grad.numpy())


def test_two_training_steps_without_zeroing_add_up() -> None:
    w = tensor(3.0)
    for _ in range(2):
        h = 2.0 * w
        (h * h).backward()
    assert w.grad == 48.0


@pytest.mark.parametrize("depth", (3_000, 50_000))
def test_a_deep_graph_needs_no_recursion(depth: int) -> None:
    limit = sys.getrecursionlimit()
    x = tensor(1.0)
    y = x
    for _ in range(depth):
        y = y + 1.0
    y.backward()
    assert x.grad == 1.0
    assert y.item() == depth + 1.0
    assert sys.getrecursionlimit() == limit


def test_sixty_doublings_are_walked_once() -> None:
    x = tensor(1.0)
    y = x
    for _ in range(60):
        y = y + y
    y.backward()
    assert x.grad == 1152921504606846976.0


def test_dropping_a_deep_graph_does_not_crash_the_interpreter() -> None:
    program = (
        "import numpy as np\n"
        "from numpy_impl import Tensor\n"
        "x = y = Tensor(np.array(1.0))\n"
        "for _ in range(200_000):\n"
        "    y = y + 1.0\n"
        "assert y.requires_grad\n"
        "del y\n"
        "print('alive')\n"
    )
    root = Path(numpy_impl.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "alive\n"), run.stderr


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


# --- retained gradients


def test_only_leaves_and_retained_tensors_keep_a_gradient() -> None:
    x = tensor(3.0)
    y = x * x
    z = y + y
    y.retain_grad()
    (z * z).backward()
    assert y.grad == 4.0 * z.item() and z.grad is None
    assert x.grad == 16.0 * 3.0**3


@pytest.mark.reference("exact property")
@given(st.integers(1, 4), seeds)
def test_two_backward_passes_add_exactly_twice(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = Tensor(rng.standard_normal((size, 3))), Tensor(rng.standard_normal((3, size)))
    out = F.softmax(F.gelu(x @ w)) @ x
    g = rng.standard_normal(out.shape)
    out.backward(g, retain_graph=True)
    once = [leaf.grad.copy() for leaf in (x, w)]
    out.backward(g)
    for leaf, grad in zip((x, w), once, strict=True):
        np.testing.assert_array_equal(leaf.grad, 2.0 * grad)


@pytest.mark.parametrize("last", (True, False))
def test_a_failing_backward_leaves_leaves_unchanged(last: bool) -> None:
    x, y = tensor(1.0), tensor(2.0)

    def fails(grad: np.ndarray) -> tuple[np.ndarray]:
        raise ArithmeticError("on purpose")

    broken = Tensor.from_op("broken", y.data, (y,), fails)
    loss = x * 3.0 + broken if last else broken + x * 3.0
    x.grad = np.array(5.0)
    for _ in range(2):  # the graph is not freed either
        with pytest.raises(ArithmeticError, match="on purpose"):
            loss.backward()
        assert x.grad == 5.0 and y.grad is None


# --- modes


@pytest.mark.reference("exact property")
def test_no_grad_nests_and_returns_after_errors() -> None:
    with no_grad():
        with no_grad():
            assert not tape.is_grad_enabled()
        assert not tape.is_grad_enabled()
        assert not (tensor(1.0) * 2.0).requires_grad
    assert tape.is_grad_enabled()
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert tape.is_grad_enabled()
    out = tensor(1.0) * 2.0
    assert out.requires_grad and out.parents
    with no_grad():
        out = tensor(1.0) * 2.0
    assert out.parents == () and out.gradient_fn is None
    with pytest.raises(RuntimeError, match="has no history"):
        out.backward()


def test_no_grad_as_a_decorator() -> None:
    @no_grad()
    def product(fail: bool = False) -> Tensor:
        if fail:
            raise KeyError
        return tensor(1.0) * 2.0

    for _ in range(2):
        assert not product().requires_grad
        assert tape.is_grad_enabled()
    with pytest.raises(KeyError):
        product(fail=True)
    assert tape.is_grad_enabled()


def test_no_grad_inside_a_generator() -> None:
    def generator() -> Iterator[bool]:
        with no_grad():
            for _ in range(3):
                yield (tensor(1.0) * 2.0).requires_grad

    assert list(generator()) == [False] * 3
    assert tape.is_grad_enabled()
    unfinished = generator()
    next(unfinished)
    unfinished.close()
    assert tape.is_grad_enabled()


def test_threads_have_their_own_mode_and_graph() -> None:
    found: dict[int, Any] = {}
    both = threading.Barrier(2, timeout=30)

    def work(k: int) -> None:
        x = Tensor(np.full(50, float(k + 1)))
        both.wait()
        total = x
        for _ in range(200):
            total = total + x * x
        total.backward(np.ones(50))
        found[k] = (tape.is_grad_enabled(), x.grad)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    with no_grad():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not tape.is_grad_enabled()
    for k in range(2):
        enabled, grad = found[k]
        assert enabled
        np.testing.assert_array_equal(grad, np.full(50, 1.0 + 400.0 * (k + 1)))


# --- the observer


class Recorder(Observer):
    def __init__(self, replace: bool = False) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.replace = replace

    def forward(self, op: str, out: Tensor, parents: tuple[Tensor, ...]) -> np.ndarray | None:
        self.events.append(("forward", op, len(parents)))
        return out.data + 100.0 if self.replace and op == "add" else None

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Tensor, ...]
    ) -> np.ndarray | None:
        self.events.append(("backward", op, i))
        if op == "accumulate":
            np.testing.assert_array_equal(grad, upstream[0] + upstream[1])
        return grad * 10.0 if self.replace and op == "add" and i == 1 else None

    def layer(self, layer: Layer, inputs: tuple[Any, ...], output: Any) -> None:
        self.events.append(("layer", type(layer).__name__, len(inputs)))


def test_the_observer_sees_everything_in_order() -> None:
    x, b = Tensor(np.ones((2, 3))), Tensor(np.ones(3))
    with observe(Recorder()) as seen:
        (GELU()(x) + b + x).backward(np.ones((2, 3)))
    assert seen.events == [
        ("forward", "gelu", 1), ("layer", "GELU", 1), ("forward", "add", 2), ("forward", "add", 2),
        ("backward", "add", 0), ("backward", "add", 1),
        ("backward", "add", 0), ("backward", "add", 1), ("backward", "unbroadcast", 1),
        ("backward", "gelu", 0), ("backward", "accumulate", 0),
    ]  # fmt: skip
    before = len(seen.events)
    (x + b).backward(np.ones((2, 3)))
    assert len(seen.events) == before


def test_the_observer_may_replace_results_and_gradients() -> None:
    x, y = tensor(1.0), tensor(2.0)
    with observe(Recorder(replace=True)):
        out = x + y
        out.backward()
    assert out.item() == 103.0
    assert (x.grad, y.grad) == (1.0, 10.0)


def test_observers_nest_and_end_after_errors() -> None:
    with observe(Recorder()) as outer:
        with pytest.raises(KeyError), observe(Recorder()) as inner:
            tensor(1.0) + 1.0
            raise KeyError
        assert tape.current_observer() is outer
        -tensor(1.0)
    assert tape.current_observer() is None
    assert inner.events == [("forward", "add", 2)]
    assert outer.events == [("forward", "neg", 1)]


# --- random graphs

LEAF_SHAPES = ((2, 2), (1, 2), (2, 1), (2,), ())  # any two of them broadcast together
OPERATIONS = ("+", "-", "*", "@", "sum", "T", "neg")


def evaluate(leaves: list[Any], program: list[tuple[str, int, int]], absolute: bool = False) -> Any:
    """Run a program of (operation, operand, operand) on either backend; the last result.

    Where an operation does not fit its operands, they are added.
    """
    nodes = list(leaves)
    for op, i, j in program:
        a, b = nodes[i % len(nodes)], nodes[j % len(nodes)]
        if op == "-" and not absolute:
            nodes.append(a - b)
        elif op == "*":
            nodes.append(a * b)
        elif op == "@" and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
            nodes.append(a @ b)
        elif op == "sum":
            nodes.append(a.sum(0, True) if a.ndim == 2 else a.sum())
        elif op == "T" and a.ndim == 2:
            nodes.append(a.transpose(0, 1))
        elif op == "neg":
            nodes.append(a if absolute else -a)
        else:
            nodes.append(a + b)
    return nodes[-1]


programs = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 30), st.integers(0, 30)),
    min_size=1,
    max_size=12,
)


@pytest.mark.reference("other backend")
@given(st.lists(st.sampled_from(LEAF_SHAPES), min_size=1, max_size=4), programs, seeds)
def test_random_graphs_equal_torch_to_the_bit(
    shapes: list[tuple[int, ...]], program: list[tuple[str, int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(-3, 4, shape).astype(np.float64) for shape in shapes]
    leaves = [Tensor(a) for a in arrays]
    twins = [torch.tensor(a, requires_grad=True) for a in arrays]
    out, theirs = evaluate(leaves, program), evaluate(twins, program)
    g = rng.integers(-3, 4, out.shape).astype(np.float64)
    # With absolute values throughout, results and gradients bound every partial sum, and integers
    # below 2^53 are exact in any order of summation.
    bounds = [torch.tensor(np.abs(a), requires_grad=True) for a in arrays]
    bound = evaluate(bounds, program, absolute=True)
    bound.backward(torch.tensor(np.abs(g)))
    sizes = [bound, *(b.grad for b in bounds if b.grad is not None)]
    assume(all(float(size.detach().max()) < 2.0**53 for size in sizes))
    out.backward(g)
    theirs.backward(torch.tensor(g))
    np.testing.assert_array_equal(out.data, theirs.detach().numpy())
    for leaf, twin in zip(leaves, twins, strict=True):
        if twin.grad is None:
            assert leaf.grad is None
        else:
            assert leaf.grad.shape == leaf.shape
            np.testing.assert_array_equal(leaf.grad, twin.grad.numpy())
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for a, b in itertools.combinations(grads, 2):
        assert not np.shares_memory(a, b)


def test_passes_over_one_parameter_may_overlap() -> None:
    """A second backward pass within the first: 10 from the inner one, 3 from the outer one."""
    p, q = Parameter(np.ones(2)), Parameter(np.ones(2))

    def inner(grad: np.ndarray) -> tuple[np.ndarray]:
        (p * 10.0).sum().backward()
        return (grad,)

    late = Tensor.from_op("late", q.data.copy(), (q,), inner)
    (late.sum() + (p * 3.0).sum()).backward()
    np.testing.assert_array_equal(p.grad, [13.0, 13.0])


def test_a_pass_that_fails_spares_a_gradient_that_was_kept() -> None:
    p, q = Parameter(np.ones(2)), Parameter(np.ones(2))
    (p * 2.0).sum().backward()
    kept, p.grad = p.grad, None

    def fail(grad: np.ndarray) -> tuple[np.ndarray]:
        raise KeyError

    with pytest.raises(KeyError):
        (Tensor.from_op("bad", q.data.copy(), (q,), fail).sum() + (p * 7.0).sum()).backward()
    np.testing.assert_array_equal(kept, [2.0, 2.0])


def test_different_gradients_of_one_parameter_add_up() -> None:
    p = Parameter(np.ones(2))
    (p * 2.0).sum().backward()
    (p * 5.0).sum().backward()
    np.testing.assert_array_equal(p.grad, [7.0, 7.0])


def test_a_pass_that_frees_the_graph_of_another_is_an_error() -> None:
    """From within: what is left of the outer pass would be missing without a word."""
    p, seen = Parameter(np.ones(2)), []
    x = p * 2.0

    def again(grad: np.ndarray) -> tuple[np.ndarray]:
        if not seen:
            seen.append(grad)
            node.sum().backward()
        return (grad,)

    node = Tensor.from_op("again", x.data.copy(), (x,), again)
    with pytest.raises(RuntimeError, match="this graph was freed by another backward meanwhile"):
        node.sum().backward()
    np.testing.assert_array_equal(p.grad, [2.0, 2.0])  # of the inner pass, which was whole
