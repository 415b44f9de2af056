"""The NumPy engine's backward pass: its order, accumulation, what it keeps, overlapping passes."""

from __future__ import annotations

import itertools
import subprocess
import sys
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
from numpy_impl.layers import Parameter
from numpy_impl.tensor import Tensor
from parity_tests.comparers import assert_agree
from parity_tests.tensors import tensor

pytestmark = pytest.mark.reference("by hand")


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


# --- several passes over one parameter


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
