"""Layer norm of both twins: by hand, its errors, exact properties, and where squares overflow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.oracle.bounds import backward_bound, forward_bound
from gpt_parity.oracle.rounding import FLOAT64
from numpy_impl import functional as F
from numpy_impl.tensor import Tensor
from parity_tests.comparers import assert_within
from parity_tests.registry import BY_ID, NUMPY, TORCH, TWINS, Twin
from parity_tests.test_operations import COMPLEX_STEP, run_numpy, torch_vjp

pytestmark = pytest.mark.reference("by hand")

both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
exact_property = pytest.mark.reference("exact property")

INF, NAN = math.inf, math.nan
EPS = 1e-5


def run(twin: Twin, *arrays: Any, g: Any = None, op: str = "layer_norm") -> list[np.ndarray]:
    """The result of an operation on arrays, and the gradients for the cotangent g."""
    leaves = [twin.tensor(np.asarray(x)) for x in arrays]
    out = getattr(twin.functional, op)(*leaves)
    if g is None:
        return [twin.array(out)]
    g = np.asarray(g, leaves[0].data.numpy().dtype if twin is TORCH else leaves[0].dtype)
    out.backward(TORCH.tensor(g) if twin is TORCH else g)
    return [twin.array(out), *(twin.array(leaf.grad) for leaf in leaves)]


def ones(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight of 1 and a bias of 0."""
    return np.ones(x.shape[-1], x.dtype), np.zeros(x.shape[-1], x.dtype)


@both_twins
def test_two_numbers_have_biased_variance_and_eps_inside_the_root(twin: Twin) -> None:
    """Of (1, 3) mean and biased variance are 2 and 1:  z = -+1 / sqrt(1.00001)."""
    z = 0.9999950000374997
    found = run(twin, [[1.0, 3.0]], [2.0, 3.0], [0.5, -1.0])[0]
    np.testing.assert_allclose(found, [[0.5 - 2.0 * z, -1.0 + 3.0 * z]], rtol=1e-15)
    assert abs(z - 1.0 / (1.0 + EPS)) > 1e-6 and abs(z - 1.0 / math.sqrt(2.0)) > 0.1


@both_twins
def test_gradients_by_hand(twin: Twin) -> None:
    """Of (0, 3, -3) the mean is 0 and s^2 = 6.00001; a = g w = (1, 2, 4).

    mean(a) = 7/3 and mean(a z) = -2/s:  dx = (a - 7/3 + 2 z / s) / s.
    """
    x, w, g = [0.0, 3.0, -3.0], [1.0, -2.0, 0.5], [1.0, -1.0, 8.0]
    z = 1.2247438507721386  # 3 / s
    y, dx, dw, db = run(twin, [x, x], w, [0.0, 0.0, 1.0], g=[g, [2.0 * v for v in g]])
    np.testing.assert_allclose(y, [[0.0, -2.0 * z, 1.0 - 0.5 * z]] * 2, rtol=4e-16)
    row = np.array([-0.5443306003431727, 0.2721646197594700, 0.2721659805837028])
    np.testing.assert_allclose(dx, [row, 2.0 * row], rtol=1e-14)
    np.testing.assert_allclose(dw, [0.0, -3.0 * z, -24.0 * z], rtol=4e-16)
    np.testing.assert_array_equal(db, [3.0, -3.0, 24.0])


@both_twins
def test_leading_axes_of_any_number(twin: Twin) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    w, b = np.array([1.0, -2.0, 3.0, 0.5]), np.arange(4.0)
    whole = run(twin, x, w, b)[0]
    for i in np.ndindex(2, 3):
        np.testing.assert_array_equal(run(twin, x[i], w, b)[0], whole[i])


@pytest.mark.reference("complex step")
def test_gradients_against_the_complex_step() -> None:
    rng = np.random.default_rng(1)
    arrays, g = [rng.standard_normal(s) for s in ((2, 3), 3, 3)], rng.standard_normal((2, 3))
    out = F.layer_norm(*map(Tensor, arrays))
    for i, closure in enumerate(out.gradient_fn(g)):
        numeric = np.empty(closure.shape)
        for position in np.ndindex(closure.shape):
            moved = [x.astype(np.complex128) for x in arrays]
            moved[i][position] += 1j * COMPLEX_STEP
            y = F.layer_norm(*map(Tensor, moved)).data
            assert y.dtype == np.complex128
            numeric[position] = (g * y.imag).sum() / COMPLEX_STEP
        allowed = 2.0 * np.asarray(backward_bound(out, i, g, FLOAT64))
        assert_within(closure, numeric, allowed, f"gradient {i}")


@both_twins
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_dtype_is_kept(twin: Twin, dtype: Any) -> None:
    x = np.array([[1.0, 3.0], [-1.0, 5.0]], dtype)
    assert {a.dtype for a in run(twin, x, *ones(x), g=x)} == {np.dtype(dtype)}


@both_twins
def test_errors(twin: Twin) -> None:
    wanted = r"layer_norm: got input \(2, 3\), weight {}, bias {}, needed \(\.\.\., E\), \(E,\)"
    for weight, bias in (((2,), (3,)), ((3,), (2,)), ((1,), (1,)), ((2, 3), (2, 3)), ((), ())):
        message = wanted.format(*(str(s).replace("(", r"\(").replace(")", r"\)") for s in
                                  (weight, bias)))  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run(twin, np.ones((2, 3)), np.ones(weight), np.ones(bias))
    with pytest.raises(ValueError, match=r"layer_norm: got input \(\), weight"):
        run(twin, np.ones(()), np.ones(()), np.ones(()))
    three = [np.ones(3), np.ones(3), np.ones(3)]
    for i in range(3):
        mixed = [x.astype(np.float32) if i == j else x for j, x in enumerate(three)]
        # PyTorch's own operation speaks for itself.
        with pytest.raises(TypeError if twin is NUMPY else RuntimeError):
            run(twin, *mixed)
    with pytest.raises(TypeError, match="layer_norm: got float64, float32, float64, needed one"):
        F.layer_norm(*(Tensor(np.ones(3, t)) for t in (np.float64, np.float32, np.float64)))


@exact_property
@both_twins
@given(st.data())
def test_the_gradient_of_x_sums_to_zero_and_is_orthogonal_to_z_but_for_eps(
    twin: Twin, data: st.DataObject
) -> None:
    """In exact arithmetic  sum dx = 0  and  sum dx z = (1e-5 / s^2) sum g w z / s  in every row."""
    example = data.draw(BY_ID["layer_norm"].inputs)
    arrays = example.arrays(np.float64)
    x, w, _ = arrays
    _, out = run_numpy(BY_ID["layer_norm"], arrays, [])
    g = example.cotangent(out.shape, np.float64)
    allowed = np.broadcast_to(backward_bound(out, 0, g, FLOAT64), x.shape)
    if twin is NUMPY:
        dx = np.asarray(out.gradient_fn(g)[0])
    else:
        dx = torch_vjp(BY_ID["layer_norm"], arrays, [], g)[0]
    for i in np.ndindex(x.shape[:-1]):
        # In extended precision, beside which the bound of float64 is wide.
        row, a = x[i].astype(np.longdouble), g[i].astype(np.longdouble) * w
        d = row - row.mean()
        s2 = (d * d).mean() + np.longdouble("1e-5")
        z = d / np.sqrt(s2)
        assert abs(dx[i].sum(dtype=np.longdouble)) <= allowed[i].sum()
        leftover = (a * z).sum() / np.sqrt(s2) * np.longdouble("1e-5") / s2
        assert abs((dx[i] * z).sum() - leftover) <= (allowed[i] * (np.abs(z) + 1e-3)).sum()


@exact_property
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_vjp_is_linear_in_powers_of_two_and_zero_at_zero(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    x, w, b = (rng.standard_normal(shape).astype(dtype) for shape in ((4, 5), 5, 5))
    out = F.layer_norm(Tensor(x), Tensor(w), Tensor(b))
    g = rng.standard_normal((4, 5)).astype(dtype)
    for once, twice, none in zip(*map(out.gradient_fn, (g, 2 * g, 0 * g)), strict=True):
        assert once.any() and not none.any()
        np.testing.assert_array_equal(twice, 2 * once, strict=True)


@exact_property
@both_twins
def test_equal_numbers_give_the_bias(twin: Twin) -> None:
    """Their deviations are 0, and only eps is left:  dx = (a - mean(a)) / sqrt(1e-5)."""
    x, b = np.full((2, 4), 7.0), np.array([1.0, -2.0, 0.5, 0.0])
    y, dx, dw, db = run(twin, x, np.full(4, 3.0), b, g=[[1.0, 2.0, 4.0, -3.0]] * 2)
    np.testing.assert_array_equal(y, [b, b])
    assert not dw.any()
    np.testing.assert_array_equal(db, [2.0, 4.0, 8.0, -6.0])
    np.testing.assert_allclose(
        dx, [[0.0, 3.0 / math.sqrt(EPS), 9.0 / math.sqrt(EPS), -12.0 / math.sqrt(EPS)]] * 2,
        rtol=4e-16,
    )  # fmt: skip


@exact_property
@both_twins
def test_one_number_gives_the_bias_and_no_gradient(twin: Twin) -> None:
    y, dx, dw, db = run(twin, [[5.0], [-8.0]], [3.0], [0.25], g=[[2.0], [3.0]])
    np.testing.assert_array_equal(y, [[0.25], [0.25]])
    assert not dx.any() and db == [5.0]
    # PyTorch subtracts x / s and m / s, each rounded: sums of 5 and 8 over sqrt(1e-5), times g.
    assert np.abs(dw) <= (0.0 if twin is NUMPY else 2.0**-52 * 34.0 / math.sqrt(EPS))


LARGE = [
    (np.float16, 300.0), (np.float32, 1.9e19), (np.float32, 1e30), (np.float32, 1e38),
    (np.float64, 1e155), (np.float64, 1e308),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "scale"), LARGE, ids=str)
def test_squares_that_overflow_change_nothing(dtype: Any, scale: float) -> None:
    """Of (c, -c, c) z is (1, -2, 1) / sqrt(2), and dx is along (1, 0, -1), beside a small row."""
    x = np.array([[scale, -scale, scale], [1.0, 3.0, 2.0]], dtype)
    unit = np.finfo(dtype).eps
    small = run(NUMPY, x[1:], *ones(x), g=[[1.0, 2.0, 4.0]])
    y, dx, *_ = run(NUMPY, x, *ones(x), g=[[1.0, 2.0, 4.0]] * 2)
    root = math.sqrt(2.0)
    np.testing.assert_allclose(y[0], [1.0 / root, -root, 1.0 / root], rtol=4 * unit)
    size = 1.5 / math.sqrt(8.0 / 9.0) / float(x[0, 0])
    errors = np.abs(dx[0].astype(np.float64) - [-size, 0.0, size])
    assert (errors <= 8 * unit * size + np.finfo(dtype).smallest_subnormal).all()
    for found, alone in zip((y, dx), small[:2], strict=True):
        assert found[1].tobytes() == alone[0].tobytes()


@both_twins
@pytest.mark.parametrize("scale", [1e-30, 1e-44, 0.0])
def test_small_numbers_are_divided_by_the_root_of_eps(twin: Twin, scale: float) -> None:
    x = np.array([[scale, -scale, scale]], np.float32)
    y, dx, *_ = run(twin, x, *ones(x), g=[[1.0, 2.0, 4.0]])
    exact = (x - x.astype(np.float64).mean()) / math.sqrt(EPS)
    tiny = np.finfo(np.float32).smallest_subnormal / math.sqrt(EPS)  # of the mean
    assert (np.abs(y - exact) <= 4 * np.finfo(np.float32).eps * np.abs(exact) + tiny).all()
    np.testing.assert_allclose(dx, (np.array([[1, 2, 4]]) - 7 / 3) / math.sqrt(EPS), rtol=1e-6)


@both_twins
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_number_that_is_not_finite_spoils_its_row_alone(twin: Twin, bad: float) -> None:
    x = np.array([[1.0, bad, 2.0], [1.0, 3.0, 2.0]])
    y, dx, *_ = run(twin, x, *ones(x), g=np.ones((2, 3)))
    assert np.isnan(y[0]).all() and np.isnan(dx[0]).all()
    assert np.isfinite(y[1]).all() and np.isfinite(dx[1]).all()


def test_differences_that_overflow_are_nan() -> None:
    x = np.array([[3e38, -3e38, 3e38]], np.float32)
    assert np.isnan(run(NUMPY, x, *ones(x))[0]).all()


def test_pytorch_loses_rows_whose_squares_overflow() -> None:
    found = []
    for scale in (1.9e19, 1e30):
        x = np.array([[scale, -scale, scale]], np.float32)
        found.append(run(TORCH, x, *ones(x))[0])
    assert not found[0].any() and np.isnan(found[1]).all(), (
        "PyTorch's layer norm survives squares that overflow now: remove this test and the remark "
        "in both docstrings"
    )


@exact_property
def test_the_layout_of_the_arrays_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    x, g = rng.standard_normal((6, 4, 5)), rng.standard_normal((6, 4, 5))
    w, b = rng.standard_normal((2, 5))
    expected = F.layer_norm(Tensor(x), Tensor(w), Tensor(b))
    gradients = expected.gradient_fn(g)
    strided = [np.asfortranarray(x), np.repeat(w, 2)[::2], b[::-1].copy()[::-1]]
    leaves, out = run_numpy(BY_ID["layer_norm"], strided, [])
    assert not any(leaf.data.flags.c_contiguous for leaf in leaves)
    assert_within(out.data, expected.data, 2.0 * forward_bound(expected, FLOAT64), "result")
    for i, found in enumerate(out.gradient_fn(np.asfortranarray(g))):
        allowed = 2.0 * backward_bound(expected, i, g, FLOAT64)
        assert_within(np.array(found), gradients[i], allowed, f"gradient {i}")
