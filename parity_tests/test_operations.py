"""Every operation and layer of the twins: results, gradients, and the properties of gradients.

Bounds are those of `gpt_parity/oracle/rounding.py`, component by component; two computed results
may differ by the sum of both bounds, and a bound of 0 asks for equality.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.oracle.bounds import backward_bound, forward_bound
from gpt_parity.oracle.examples import Example, cotangent, examples
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64, TABLE, bound
from numpy_impl import functional as F
from numpy_impl.tensor import Tensor
from parity_tests.comparers import assert_within
from parity_tests.registry import BY_ID, ROWS, Row, reduced
from torch_impl import functional as tF

UNITS = {np.float32: FLOAT32, np.float64: FLOAT64}

# A power of two, so that multiplying and dividing by it is exact.
COMPLEX_STEP = 2.0**-100
PERTURBED_ELEMENTS = 60

# The kind of reference of a test: tests of different kinds are independent evidence.
other_backend = pytest.mark.reference("other backend")
a_priori_bound = pytest.mark.reference("a priori bound")
complex_steps = pytest.mark.reference("complex step")
exact_property = pytest.mark.reference("exact property")

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


def run_numpy(row: Row, arrays: list[np.ndarray], others: list[Any]) -> tuple[list[Tensor], Tensor]:
    leaves = [Tensor(array) for array in arrays]
    for leaf, array in zip(leaves, arrays, strict=True):
        leaf.data = array  # Tensor copies into plain memory; keep the layout that was drawn
    return leaves, row.numpy(*leaves, *others)


def run_torch(
    row: Row, arrays: list[np.ndarray], others: list[Any]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    leaves = [torch.tensor(array.copy(), requires_grad=True) for array in arrays]
    return leaves, row.torch(*leaves, *others)


def torch_vjp(row: Row, arrays: list[np.ndarray], others: list[Any], g: np.ndarray) -> list[Any]:
    leaves, out = run_torch(row, arrays, others)
    return [d.numpy() for d in torch.autograd.grad(out, leaves, torch.tensor(g.copy()))]


def arguments(row: Row, data: st.DataObject) -> tuple[Example, list[Any]]:
    example = data.draw(row.inputs, label=row.id)
    return example, example.others()


def test_the_registry_and_the_table_of_rounding_name_the_same_operations() -> None:
    assert {row.name for row in ROWS} == set(TABLE) - {"unbroadcast", "accumulate"}
    assert len(BY_ID) == len(ROWS)


@other_backend
@every_row
@given(st.data())
def test_forward(row: Row, data: st.DataObject) -> None:
    example, others = arguments(row, data)
    arrays = example.arrays(np.float64)
    leaves, out = run_numpy(row, arrays, others)
    assert out.op == row.name
    assert all(p is leaf for p, leaf in zip(out.parents, leaves, strict=False))
    ours = forward_bound(out, FLOAT64)
    theirs = run_torch(row, arrays, others)[1].detach().numpy()
    assert theirs.dtype == out.dtype == np.float64
    assert_within(out.data, theirs, 2.0 * ours, "numpy against torch in float64")


@a_priori_bound
@every_row
@given(st.data())
def test_forward_in_float32(row: Row, data: st.DataObject) -> None:
    """Each backend in float32 against itself in float64, on numbers that both hold."""
    example, others = arguments(row, data)
    single = example.arrays(np.float32)
    double = [a.astype(np.float64) for a in single]
    _, reference = run_numpy(row, double, others)
    allowed = forward_bound(reference, FLOAT32) + forward_bound(reference, FLOAT64)
    mine = run_numpy(row, single, others)[1].data
    assert_within(mine, reference.data, allowed, "numpy in float32", "float32")
    theirs, exact = (run_torch(row, x, others)[1].detach().numpy() for x in (single, double))
    assert_within(theirs, exact, allowed, "torch in float32", "float32")


@other_backend
@every_row
@given(st.data())
def test_vjp(row: Row, data: st.DataObject) -> None:
    example, others = arguments(row, data)
    arrays = example.arrays(np.float64)
    leaves, out = run_numpy(row, arrays, others)
    g = example.cotangent(out.shape, np.float64)
    allowed = [backward_bound(out, i, g, FLOAT64) for i in range(len(leaves))]
    theirs = torch_vjp(row, arrays, others, g)
    out.backward(g)
    for i, leaf in enumerate(leaves):
        assert theirs[i].dtype == leaf.grad.dtype == np.float64
        what = f"gradient {i}, numpy against torch in float64"
        assert_within(leaf.grad, theirs[i], 2.0 * allowed[i], what)


@a_priori_bound
@every_row
@given(st.data())
def test_vjp_in_float32(row: Row, data: st.DataObject) -> None:
    """Each backend in float32 against itself in float64."""
    example, others = arguments(row, data)
    single = example.arrays(np.float32)
    double = [a.astype(np.float64) for a in single]
    references, reference = run_numpy(row, double, others)
    leaves, out = run_numpy(row, single, others)
    g = example.cotangent(out.shape, np.float32)
    g64 = g.astype(np.float64)
    allowed = [
        backward_bound(reference, i, g64, FLOAT32) + backward_bound(reference, i, g64, FLOAT64)
        for i in range(len(leaves))
    ]
    theirs, exact = torch_vjp(row, single, others, g), torch_vjp(row, double, others, g64)
    out.backward(g)
    reference.backward(g64)
    for i, leaf in enumerate(leaves):
        what = f"gradient {i} in float32"
        assert_within(leaf.grad, references[i].grad, allowed[i], f"{what}, numpy", "float32")
        assert_within(theirs[i], exact[i], allowed[i], f"{what}, torch", "float32")


def complex_step(
    row: Row, arrays: list[np.ndarray], others: list[Any], i: int, g: np.ndarray,
    positions: list[tuple[int, ...]],
) -> np.ndarray:  # fmt: skip
    """Derivatives of <g, f> by the elements of operand `i` at `positions`, without a graph."""
    derivatives = []
    for position in positions:
        perturbed = [array.astype(np.complex128) for array in arrays]
        perturbed[i][position] += 1j * COMPLEX_STEP
        _, out = run_numpy(row, perturbed, others)
        assert out.dtype == np.complex128
        derivatives.append((g * out.data.imag).sum() / COMPLEX_STEP)
    return np.array(derivatives)


def check_against_complex_step(row: Row, example: Example) -> None:
    others, arrays = example.others(), example.arrays(np.float64)
    leaves, out = run_numpy(row, arrays, others)
    _, complex_out = run_numpy(row, [a.astype(np.complex128) for a in arrays], others)
    allowed = forward_bound(out, FLOAT64)
    assert_within(complex_out.data.real, out.data, 2.0 * allowed, "complex forward")
    g = example.cotangent(out.shape, np.float64)
    bounds = [backward_bound(out, i, g, FLOAT64) for i in range(len(leaves))]
    out.backward(g)
    for i, leaf in enumerate(leaves):
        positions = list(np.ndindex(leaf.shape))
        chosen = np.random.default_rng(example.seed).permutation(len(positions))
        positions = [positions[j] for j in chosen[:PERTURBED_ELEMENTS]]
        numeric = complex_step(row, arrays, others, i, g, positions)
        closure = np.array([leaf.grad[position] for position in positions])
        # Where something is rounded, the step of 2^-100 can make it underflow besides.
        underflow = 8.0 * np.finfo(np.float64).smallest_subnormal / COMPLEX_STEP * np.abs(g).sum()
        allowed = 2.0 * bounds[i] + underflow * (np.asarray(bounds[i]) > 0.0)
        allowed = np.broadcast_to(allowed, leaf.shape)
        allowed = np.array([allowed[position] for position in positions])
        assert_within(closure, numeric, allowed, f"gradient {i} against the complex step")


@complex_steps
@every_row
@given(st.data())
def test_vjp_against_complex_step(row: Row, data: st.DataObject) -> None:
    check_against_complex_step(row, arguments(row, data)[0])


@complex_steps
@given(BY_ID["tril"].inputs)
def test_tril_gradient_against_complex_step(example: Example) -> None:
    check_against_complex_step(BY_ID["Tril"], example)


@complex_steps
@given(BY_ID["gelu"].inputs)
def test_gelu_gradient_against_complex_step(example: Example) -> None:
    check_against_complex_step(BY_ID["GELU"], example)


@other_backend
@given(BY_ID["tril"].inputs)
def test_tril_gradient_against_torch(example: Example) -> None:
    """Independent of the table: the gradient is the cotangent under `torch.tril`, to the bit."""
    _, value = example.others(), example.rest[0]
    (x,) = example.arrays(np.float32)
    g = example.cotangent(x.shape, np.float32)
    leaf = Tensor(x)
    F.tril(leaf, value).backward(g)
    theirs = torch.tensor(x.copy(), requires_grad=True)
    tF.tril(theirs, value).backward(torch.tensor(g.copy()))
    np.testing.assert_array_equal(leaf.grad, theirs.grad.numpy())
    np.testing.assert_array_equal(leaf.grad, torch.tril(torch.tensor(g.copy())).numpy())


@other_backend
@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_gelu_gradient_against_torch(seed: int, size: int) -> None:
    """In the range of activations, against autograd through the formula written out in torch."""
    rng = np.random.default_rng(seed)
    x, g = 3.0 * rng.standard_normal(size), cotangent(rng, (size,), np.float64)
    leaf = Tensor(x)
    F.gelu(leaf).backward(g)
    y = torch.tensor(x, requires_grad=True)
    t = torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3))
    (0.5 * y * (1.0 + t)).backward(torch.tensor(g))
    twin = torch.tensor(x, requires_grad=True)
    tF.gelu(twin).backward(torch.tensor(g))
    # |d gelu| <= 1.13; the sums inside have magnitudes below 1 + |x| v'(x) <= 1e3 and lose 16 u.
    allowed = 16.0 * FLOAT64.u * np.abs(g) * (1.0 + np.abs(x) * (1.0 + x * x))
    assert_within(leaf.grad, y.grad.numpy(), allowed, "closure against the formula")
    assert_within(leaf.grad, twin.grad.numpy(), allowed, "closure against F.gelu")


@exact_property
@every_row
@given(st.data())
def test_exact_properties_of_the_vjp(row: Row, data: st.DataObject) -> None:
    example, others = arguments(row, data)
    for dtype in UNITS:
        arrays = example.arrays(dtype)
        leaves, out = run_numpy(row, arrays, others)
        g = example.cotangent(out.shape, dtype)
        kept = [array.copy() for array in (g, *arrays)]
        for array in (g, *arrays):
            array.flags.writeable = False
        assert out.dtype == dtype
        count = len(leaves)
        grads = [np.array(d) for d in out.gradient_fn(g)[:count]]
        again = out.gradient_fn(g)[:count]
        doubled, zero = (
            out.gradient_fn(example.cotangent(out.shape, dtype, factor))[:count]
            for factor in (2.0, 0.0)
        )
        tiny = np.finfo(dtype).tiny
        for i in range(count):
            assert grads[i].dtype == doubled[i].dtype == zero[i].dtype == dtype
            assert grads[i].tobytes() == np.asarray(again[i]).tobytes()
            assert not zero[i].any()
            # Doubling commutes with every rounding, except where results are subnormal.
            normal = np.abs(grads[i]) >= tiny
            np.testing.assert_array_equal(doubled[i][normal], 2.0 * grads[i][normal])
            assert (np.abs(doubled[i][~normal]) <= 4.0 * tiny).all()
        for array, copy in zip((g, *arrays), kept, strict=True):
            np.testing.assert_array_equal(array, copy)
        out.backward(g)
        for leaf in leaves:
            assert leaf.grad.dtype == dtype and leaf.grad.shape == leaf.shape
            assert leaf.grad.flags.writeable
        memory = [leaf.grad for leaf in leaves] + [leaf.data for leaf in leaves] + [g]
        for a, b in itertools.combinations(memory, 2):
            assert not np.shares_memory(a, b)


@other_backend
@given(examples(reduced()))
def test_mean(example: Example) -> None:
    """A sum and a division; its gradient is one division."""
    (x,) = example.arrays(np.float64)
    axis, keepdims = example.rest
    leaf, twin = Tensor(x), torch.tensor(x.copy(), requires_grad=True)
    out = leaf.mean(axis, keepdims)
    theirs = twin.mean(dim=tuple(range(x.ndim)) if axis is None else axis, keepdim=keepdims)
    n = x.size // out.data.size
    total = np.abs(x).sum(axis=axis, keepdims=keepdims)
    allowed = 2.0 * bound(math.sqrt(n) * total / n + np.abs(out.data), FLOAT64)
    assert_within(out.data, theirs.detach().numpy(), allowed, "mean")
    g = example.cotangent(out.shape, np.float64)
    out.backward(g)
    theirs.backward(torch.tensor(g.copy()))
    allowed = 2.0 * bound(np.abs(twin.grad.numpy()), FLOAT64)
    assert_within(leaf.grad, twin.grad.numpy(), allowed, "gradient of mean")


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Small integers: products and sums of a few are exact, so totals compare to the bit."""
    return rng.integers(-9, 10, shape).astype(np.float64)


FAN_OUT = {
    "x * x + x": lambda x: x * x + x,
    "x + x": lambda x: x + x,
    "x - x * x": lambda x: x - x * x,
    "x @ x^T": lambda x: x @ x.transpose(-2, -1),
    "x @ x^T @ x": lambda x: x @ x.transpose(-2, -1) @ x,
    "x * sum(x)": lambda x: x * x.sum(-1, True),
    "(h + x) + h": lambda x: h_plus_x_plus_h(x * x, x),
}


def h_plus_x_plus_h(h: Any, x: Any) -> Any:
    return (h + x) + h


@other_backend
@pytest.mark.parametrize("expression", FAN_OUT)
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_tensor_used_several_times_gets_the_total_derivative(
    expression: str, batch: int, t: int, e: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = integers(rng, batch, t, e)
    leaf, twin = Tensor(x), torch.tensor(x, requires_grad=True)
    out, theirs = FAN_OUT[expression](leaf), FAN_OUT[expression](twin)
    g = integers(rng, *out.shape)
    out.backward(g)
    theirs.backward(torch.tensor(g))
    np.testing.assert_array_equal(out.data, theirs.detach().numpy())
    np.testing.assert_array_equal(leaf.grad, twin.grad.numpy())


# Addition hands one array to both operands, of which one gets more from elsewhere.
SHARED_COTANGENT = {
    "(x + y) + x": lambda x, y: (x + y) + x,
    "y + (x + y)": lambda x, y: y + (x + y),
    "(x + y) + (y + x)": lambda x, y: (x + y) + (y + x),
    "(x + y) + (x + y) * x": lambda x, y: (x + y) + (x + y) * x,
}


@other_backend
@pytest.mark.parametrize("expression", SHARED_COTANGENT)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_operands_that_share_a_cotangent_have_gradients_of_their_own(
    expression: str, rows: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [integers(rng, rows, columns) for _ in range(2)]
    leaves = [Tensor(array) for array in arrays]
    twins = [torch.tensor(array, requires_grad=True) for array in arrays]
    out = SHARED_COTANGENT[expression](*leaves)
    g = integers(rng, *out.shape)
    SHARED_COTANGENT[expression](*twins).backward(torch.tensor(g))
    kept = g.copy()
    out.backward(g)
    np.testing.assert_array_equal(g, kept)
    for leaf, twin in zip(leaves, twins, strict=True):
        np.testing.assert_array_equal(leaf.grad, twin.grad.numpy())


@other_backend
@pytest.mark.parametrize("name", ("embedding", "cross_entropy", "Embedding", "GPTLoss"))
@given(st.data())
def test_ids_refilled_between_forward_and_backward(name: str, data: st.DataObject) -> None:
    """One buffer for all batches: what was looked up counts, not what the buffer holds later."""
    row = BY_ID[name]
    example, (ids,) = arguments(row, data)
    (x,) = example.arrays(np.float64)
    size = x.shape[0] if row.name == "embedding" else x.shape[-1]
    ids = np.array(ids, np.int64)
    (leaf,), out = run_numpy(row, [x], [ids])
    (twin,), theirs = run_torch(row, [x], [ids])
    g = example.cotangent(out.shape, np.float64)
    allowed = 2.0 * backward_bound(out, 0, g, FLOAT64)
    ids[...] = (ids + 1) % size
    out.backward(g)
    theirs.backward(torch.tensor(g.copy()))
    assert_within(leaf.grad, twin.grad.numpy(), allowed, "gradient, numpy against torch")


@exact_property
@pytest.mark.parametrize("dtype", UNITS)
@given(st.data())
def test_gelu_gradient_is_finite_for_every_finite_x(dtype: Any, data: st.DataObject) -> None:
    width = 8 * np.dtype(dtype).itemsize
    finite = st.floats(width=width, allow_nan=False, allow_infinity=False)
    x = data.draw(finite | st.sampled_from((-1.0, 1.0)).map(lambda s: s * np.finfo(dtype).max))
    leaf = Tensor(np.array([x], dtype))
    out = F.gelu(leaf)
    out.backward(np.ones(1, dtype))
    assert np.isfinite(out.data).all() and np.isfinite(leaf.grad).all()
    assert abs(leaf.grad[0]) < 1.13
    if abs(x) > 20.0:
        assert leaf.grad[0] == (x > 0.0)
        assert out.data[0] == (dtype(x) if x > 0.0 else 0.0)


def test_gelu_gradient_of_torch_is_nan_where_the_square_overflows() -> None:
    x = torch.tensor([1.8e19, 1.9e19, -1.9e19], requires_grad=True)
    tF.gelu(x).backward(torch.ones(3))
    assert x.grad[0] == 1.0
    assert x.grad[1:].isnan().all(), (
        "PyTorch's tanh GELU gradient is finite at 1.9e19 now: remove this test, the remark in "
        "both docstrings, and the limit of the registry's gelu inputs"
    )
