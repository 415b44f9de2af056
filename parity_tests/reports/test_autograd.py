"""Reported faults of reverse-mode autograds: order, depth, broadcasting, repeated ids.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from gpt_parity.choices import BACKENDS
from numpy_impl.tensor import Tensor
from parity_tests.registry import NUMPY, TORCH, Twin
from parity_tests.reports.common import (
    backward,
    both_twins,
    f64,
    gradients,
    trainer_of,
)

pytestmark = pytest.mark.reference("by hand")


@both_twins
def test_B01_a_value_on_two_paths_is_propagated_once(twin: Twin) -> None:
    a = twin.tensor(f64(1.0))
    b = a + a
    (b + b).backward()
    assert twin.array(a.grad) == 4.0

    def of_square(x: Any) -> Any:
        y = x * x
        return (y + y * y).sum()

    (dx,) = gradients(twin, of_square, f64([1, 2]))
    np.testing.assert_array_equal(dx, [6.0, 36.0])


@both_twins
def test_B01_paths_of_unequal_depth(twin: Twin) -> None:
    a = twin.tensor(f64(2.0))
    b = 3.0 * a
    c = b + 1.0
    e = b * c + c
    e.backward()
    assert (twin.array(e), twin.array(a.grad)) == (49.0, 42.0)


@both_twins
def test_B01_attention_uses_its_input_three_times(twin: Twin) -> None:
    tril, softmax = twin.layers.Tril(-1e9), twin.layers.Softmax()
    x = twin.tensor(f64([[[1, 0], [0, 1]]]))
    weights = softmax(tril(x @ x.transpose(-2, -1) / math.sqrt(2.0)))
    backward(twin, weights @ x, f64([[[0, 0], [1, 0]]]))
    np.testing.assert_allclose(
        twin.array(weights)[0], [[1.0, 0.0], [0.330238450673, 0.669761549327]], rtol=1e-11
    )
    np.testing.assert_allclose(
        twin.array(x.grad)[0],
        [[0.330238450673, 0.156398596545], [0.826160145872, -0.312797193090]],
        rtol=1e-11,
    )


# Each uses x twice by way of other operations; the derivative at 3 is worked out by hand.
TWICE = {
    "difference of itself": (lambda x: x - x, 0.0),
    "quotient by itself": (lambda x: x / x, 0.0),
    "cube": (lambda x: x * x * x, 27.0),
    "through a transpose": (lambda x: x @ x.transpose(-2, -1), 6.0),
    "through a reshape": (lambda x: x.reshape(1, 1, 1) * x, 6.0),
    "through a sum": (lambda x: x * x.sum(), 6.0),
}


@both_twins
@pytest.mark.parametrize("case", TWICE)
def test_B01_two_uses_through_other_operations(twin: Twin, case: str) -> None:
    function, expected = TWICE[case]
    (dx,) = gradients(twin, lambda x: function(x).sum(), f64([[3]]))
    assert dx == [[expected]]


CHAINS = {
    "add": lambda y: y + 1.0,
    "sub": lambda y: y - 1.0,
    "mul": lambda y: y * 1.0,
    "div": lambda y: y / 1.0,
    "transpose": lambda y: y.transpose(0, 1),
    "reshape": lambda y: y.reshape(1, 1),
}


@both_twins
@pytest.mark.parametrize("depth", [3_000, 50_000])
def test_B03_a_deep_chain_needs_no_recursion(twin: Twin, depth: int) -> None:
    limit = sys.getrecursionlimit()
    x = twin.tensor(f64(1.0))
    y = x
    for _ in range(depth):
        y = y + 1.0
    y.backward()
    assert (twin.array(y), twin.array(x.grad)) == (1.0 + depth, 1.0)
    assert sys.getrecursionlimit() == limit


@both_twins
@pytest.mark.parametrize("name", CHAINS)
def test_B03_deep_chains_of_every_operation(twin: Twin, name: str) -> None:
    x = twin.tensor(f64([[1.0]]))
    y = x
    for _ in range(3_000):
        y = CHAINS[name](y)
    y.backward()
    assert twin.array(x.grad) == [[1.0]]


@both_twins
def test_B03_a_reused_value_is_walked_once(twin: Twin) -> None:
    """Sixty doublings: 2^60 paths, which nobody can walk one by one."""
    x = twin.tensor(f64(1.0))
    y = x
    for _ in range(60):
        y = y + y
    y.backward()
    assert twin.array(x.grad) == 1152921504606846976.0


BROADCASTS: dict[str, Any] = {
    "bias": (lambda a, b: a + b, np.ones((2, 3)), np.ones(3), np.ones((2, 3)), [2, 2, 2]),
    "positions": (lambda a, b: a + b, np.ones((2, 3, 4)), np.ones((3, 4)), np.ones((2, 3, 4)),
                  np.full((3, 4), 2)),
    "scalar": (lambda a, b: a * b, np.ones((2, 3)), np.array(1.0), np.ones((2, 3)), 6),
    "outer": (lambda a, b: a * b, f64([[1], [2], [3], [4]]), np.ones((1, 4)), np.full((4, 1), 4),
              [[10] * 4]),
    "subtrahend": (lambda a, b: a - b, np.ones((2, 3)), np.ones((1, 3)), np.ones((2, 3)),
                   [[-2] * 3]),
    "divisor": (lambda a, b: a / b, np.ones((2, 3)), f64([[2], [2]]), np.full((2, 3), 0.5),
                [[-0.75], [-0.75]]),
    "both sides": (lambda a, b: a + b, np.ones((2, 1, 3)), np.ones((4, 1)), np.full((2, 1, 3), 4),
                   np.full((4, 1), 6)),
    "length 1 kept": (lambda a, b: a * b, np.ones((1, 3)), np.ones((1, 1)), np.ones((1, 3)), [[3]]),
}  # fmt: skip


@both_twins
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", BROADCASTS)
def test_B05_a_gradient_has_the_shape_of_its_operand(twin: Twin, dtype: str, case: str) -> None:
    function, a, b, da, db = BROADCASTS[case]
    a, b = np.asarray(a, dtype), np.asarray(b, dtype)
    found = gradients(twin, function, a, b, g=np.ones(np.broadcast_shapes(a.shape, b.shape), dtype))
    for grad, operand, expected in zip(found, (a, b), (da, db), strict=True):
        assert (grad.shape, grad.dtype) == (operand.shape, dtype)
        np.testing.assert_array_equal(grad, np.broadcast_to(expected, operand.shape))


@both_twins
def test_B06_an_unbatched_weight_sums_over_the_batch(twin: Twin) -> None:
    x = np.arange(12.0).reshape(2, 3, 2)
    _, dw = gradients(twin, lambda x, w: (x @ w).sum(), x, np.ones((2, 2)))
    np.testing.assert_array_equal(dw, [[30, 30], [36, 36]])
    dx, dw, db = gradients(twin, lambda *args: twin.functional.linear(*args).sum(), x,
                           np.ones((2, 2)), np.zeros(2))  # fmt: skip
    np.testing.assert_array_equal(dw, [[30, 36], [30, 36]])  # (out, in)
    np.testing.assert_array_equal(db, [6, 6])
    assert dx.shape == x.shape
    # An unbatched left operand, and a batch of one against a batch of four.
    da, _ = gradients(twin, lambda a, x: (a @ x).sum(), np.ones((1, 3)), x)
    np.testing.assert_array_equal(da, [[0 + 1 + 6 + 7, 2 + 3 + 8 + 9, 4 + 5 + 10 + 11]])
    da, db = gradients(twin, lambda a, b: (a @ b).sum(), np.ones((2, 1, 3, 2)), np.ones((4, 2, 1)))
    np.testing.assert_array_equal(da, np.full((2, 1, 3, 2), 4))
    np.testing.assert_array_equal(db, np.full((4, 2, 1), 6))


def test_B06_a_vector_operand_is_refused_by_name() -> None:
    """PyTorch has a product with vectors; here it is an error that names both shapes."""
    a, v = f64([[1, 2, 3], [4, 5, 6]]), f64([1, 0, -1])
    da, dv = gradients(TORCH, lambda a, v: (a @ v).sum(), a, v)
    np.testing.assert_array_equal(da, [[1, 0, -1], [1, 0, -1]])
    np.testing.assert_array_equal(dv, [5, 7, 9])
    for left, right in ((a, v), (v, a.T), (v, v), (f64(1), a)):
        with pytest.raises(ValueError, match=r"matmul: got .* @ .*, needed \(\.\.\., M, K\)"):
            Tensor(left) @ Tensor(right)
    with pytest.raises(ValueError, match="out of bounds"):
        Tensor(v).transpose(-2, -1)
    # As a column it is the same product.
    da, dv = gradients(NUMPY, lambda a, v: (a @ v).sum(), a, v[:, None])
    np.testing.assert_array_equal(da, [[1, 0, -1], [1, 0, -1]])
    np.testing.assert_array_equal(dv, [[5], [7], [9]])


@both_twins
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_B08_every_occurrence_of_a_token_counts(twin: Twin, dtype: str) -> None:
    ids = np.array([[0, 0, 2], [0, 2, 1]], dtype)
    (dw,) = gradients(twin, lambda w: twin.functional.embedding(w, ids), np.zeros((3, 2)),
                      g=np.ones((2, 3, 2)))  # fmt: skip
    np.testing.assert_array_equal(dw, [[3, 3], [1, 1], [2, 2]])


@both_twins
@pytest.mark.parametrize("size", [3, 40_000])  # both ways to the sums: a product, and sorting
def test_B08_one_token_at_all_positions(twin: Twin, size: int) -> None:
    g = np.random.default_rng(0).integers(-9, 10, (4, 8, 2)).astype(np.float64)
    (dw,) = gradients(twin, lambda w: twin.functional.embedding(w, np.full((4, 8), 1)),
                      np.zeros((size, 2)), g=g)  # fmt: skip
    np.testing.assert_array_equal(dw[1], g.sum(axis=(0, 1)))
    assert np.count_nonzero(dw) == np.count_nonzero(dw[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_B08_a_text_of_one_character(backend: str) -> None:
    """In 'aaaa', batch 4, context 8, the row of 'a' gets the sum of what all positions get."""
    trainer, dataset = trainer_of(backend, "a" * 900)
    tokens = dataset.batch("train", 0)[0]
    assert tokens.shape == (4, 8) and not tokens.any()
    # With one class the loss is 0; a cotangent of ones reaches the table through the logits.
    logits = trainer.model(tokens)
    backward(NUMPY if backend == "numpy" else TORCH, logits, np.ones((4, 8, 1)))
    table, positions = list(trainer.model.parameters())[:2]
    whole = np.asarray(positions.grad).sum(axis=0)  # each position, summed over the batch before
    assert whole.any()
    # 32 terms a row, summed in another order: at most 32 u times the sum of their sizes each.
    bound = 2 * 32 * 2.0**-53 * 32 * np.abs(np.asarray(positions.grad)).max()
    assert np.abs(np.asarray(table.grad)[0] - whole).max() <= bound
