"""Reported faults of masks, softmax and GELU.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.compare import compare_traces
from gpt_parity.oracle.trace import trace
from gpt_parity.tensors import as_array
from gpt_parity.weights import set_weights
from numpy_impl import functional
from numpy_impl.tensor import Tensor
from parity_tests.models import BACKENDS as MODULES
from parity_tests.models import SIZES, ModelCase, fill, reference
from parity_tests.registry import NUMPY, TORCH, Twin
from parity_tests.reports.common import both_twins, f32, f64, gradients, values

pytestmark = pytest.mark.reference("by hand")

INF, NAN = math.inf, math.nan
THIRD = 1.0 / 3.0
SMALL = GPTConfig(vocab_size=7, context_size=4, embedding_size=6, blocks=2)


def weights_of(twin: Twin, scores: np.ndarray, fill: float = -1e9) -> np.ndarray:
    mask, softmax = twin.layers.Tril(fill), twin.layers.Softmax()
    return values(twin, lambda x: softmax(mask(x)), scores)


@both_twins
def test_B14_a_mask_that_is_not_square_is_aligned_top_left(twin: Twin) -> None:
    np.testing.assert_array_equal(
        weights_of(twin, np.zeros((1, 2, 5))), [[[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]]
    )
    np.testing.assert_array_equal(
        weights_of(twin, np.zeros((1, 5, 2))), [[[1, 0], *[[0.5, 0.5]] * 4]]
    )
    square = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [THIRD, THIRD, THIRD, 0], [0.25] * 4]
    for shape in ((4, 4), (2, 3, 4, 4)):
        np.testing.assert_array_equal(
            weights_of(twin, np.zeros(shape)), np.broadcast_to(square, shape)
        )
    for shape in ((), (3,)):  # np.tril would take one axis
        with pytest.raises(ValueError, match="needed at least two axes"):
            twin.functional.tril(twin.tensor(np.zeros(shape)), -1e9)


@both_twins
def test_B14_attention_of_more_keys_than_queries_is_aligned_alike(twin: Twin) -> None:
    q, k, v = (twin.tensor(np.zeros((1, n, 2))) for n in (2, 5, 5))
    _, weights = twin.functional.causal_attention(q, k, v)
    np.testing.assert_array_equal(twin.array(weights), [[[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_B14_one_query_over_kept_keys_sees_all_of_them(backend: str) -> None:
    """With cached keys the last position comes alone (T = 1): bottom right, not top left."""
    model = build_model(backend, SMALL, seed=3, dtype="float64")
    tokens = np.array([[1, 2, 3, 4]])
    _, past = model.predict_next(tokens[:, :3])
    alone, _ = model.predict_next(tokens, past)
    whole = model.predict(tokens)[:, -1]
    np.testing.assert_allclose(alone, whole, rtol=1e-12)
    assert not np.allclose(whole, model.predict(tokens[:, :1])[:, -1], rtol=1e-3)


@both_twins
def test_B16_weights_look_back_and_at_themselves(twin: Twin) -> None:
    expected = [[[1, 0, 0], [0.5, 0.5, 0], [THIRD, THIRD, THIRD]]]
    np.testing.assert_array_equal(weights_of(twin, np.zeros((1, 3, 3))), expected)
    for mask in (np.tri(3, dtype=bool), np.tri(3, dtype=np.int64)):  # true, 1: may attend
        q = twin.tensor(np.zeros((1, 3, 2)))
        found = twin.array(twin.functional.self_attention(q, q, q, mask)[1])
        np.testing.assert_array_equal(found, expected)
        with pytest.raises(ValueError, match="may attend to nothing"):  # the other convention
            twin.functional.self_attention(q, q, q, 1 - mask.astype(np.int64))
    with pytest.raises(TypeError, match="needed booleans"):  # a mask to be added
        twin.functional.self_attention(q, q, q, np.where(np.tri(3), 0.0, -INF))


@both_twins
def test_B16_a_fill_of_zero_and_a_product_with_the_mask_leak(twin: Twin) -> None:
    scores = f64([[-2, 1], [0, 0]])
    np.testing.assert_array_equal(weights_of(twin, scores)[0], [1, 0])
    leak = [0.11920292202211755, 0.8807970779778825]
    np.testing.assert_allclose(weights_of(twin, scores, 0.0)[0], leak, rtol=1e-15)
    product = values(twin, lambda x: twin.layers.Softmax()(x * twin.tensor(np.tri(2))), scores)
    np.testing.assert_allclose(product[0], leak, rtol=1e-15)


def change_of_the_past(model: Any) -> float:
    """The largest change of the logits of positions 0 to 2 when the last token changes."""
    before = model.predict(np.array([[1, 2, 3, 4]]))
    after = model.predict(np.array([[1, 2, 3, 5]]))
    assert np.abs(after - before)[:, 3].max() > 0.0
    return float(np.abs(after - before)[:, :3].max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_B16_no_logit_depends_on_a_later_token(backend: str, dtype: str) -> None:
    assert change_of_the_past(build_model(backend, SMALL, seed=3, dtype=dtype)) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_B16_the_perturbation_shows_every_leak(backend: str) -> None:
    """A fill of 0, a product with the triangle and a mask that is dropped, in one block each."""
    leaking = GPTConfig(7, 4, 6, 2, mask_value=0.0)
    with pytest.raises(ValueError, match="later tokens leak into earlier ones"):
        build_model(backend, leaking)
    model = build_model(backend, leaking, seed=3, dtype="float64", allow_leak=True)
    assert change_of_the_past(model) > 0.0
    tensor = (NUMPY if backend == "numpy" else TORCH).tensor
    for mistake in (lambda x: x * tensor(np.tri(4)), lambda x: x):
        model = build_model(backend, SMALL, seed=3, dtype="float64")
        model.transformers[1].attention.mask.forward = mistake
        assert change_of_the_past(model) > 0.0


@both_twins
def test_B17_a_half_type_takes_its_own_minimum(twin: Twin) -> None:
    x = np.zeros((1, 2, 2), np.float16)
    found = values(twin, twin.layers.Tril(-1e9), x)
    np.testing.assert_array_equal(found, np.array([[[0, -65504], [0, 0]]], np.float16))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(weights_of(twin, x), [[[1, 0], [0.5, 0.5]]])
    # Fills beyond other ends: above the range, and of float32; infinities stay what they are.
    assert values(twin, twin.layers.Tril(1e9), x)[0, 0, 1] == 65504
    assert values(twin, twin.layers.Tril(-1e39), f32(x))[0, 0, 1] == np.finfo(np.float32).min
    for fill_value in (INF, -INF):
        assert values(twin, twin.layers.Tril(fill_value), x)[0, 0, 1] == fill_value


def test_B17_bfloat16_takes_its_own_minimum() -> None:
    scores = TORCH.layers.Tril(-1e39)(torch.zeros(1, 2, 2, dtype=torch.bfloat16))
    assert scores[0, 0, 1] == torch.finfo(torch.bfloat16).min
    scores = TORCH.layers.Tril(-1e9)(torch.zeros(1, 2, 2, dtype=torch.bfloat16))
    assert torch.softmax(scores, -1).tolist() == [[[1, 0], [0.5, 0.5]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_B17_a_whole_model_in_half_precision(backend: str) -> None:
    model = build_model(backend, SMALL, seed=3, dtype="float16")
    logits = model.predict(np.array([[1, 2, 3, 4]]))
    assert logits.dtype == np.float16 and np.isfinite(logits).all()
    assert change_of_the_past(model) == 0.0


@both_twins
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_B19_rows_that_are_not_finite(twin: Twin, dtype: str) -> None:
    x = np.array([[-INF, -INF], [-INF, 0], [INF, 0], [NAN, 0]], dtype)
    expected = [[NAN, NAN], [0, 1], [NAN, NAN], [NAN, NAN]]
    np.testing.assert_array_equal(values(twin, twin.layers.Softmax(), x), expected)  # NaN on NaN


@both_twins
def test_B19_a_masked_nan_poisons_and_a_masked_large_value_does_not(twin: Twin) -> None:
    weights = f64([[1, 0], [0.5, 0.5]])
    found = values(twin, lambda w, v: w @ v, weights, f64([[1], [NAN]]))
    assert np.isnan(found).all()
    found = values(twin, lambda w, v: w @ v, weights, f64([[1], [1e300]]))
    np.testing.assert_array_equal(found, [[1], [0.5e300]])
    # Through attention as a whole, where the value is that of the future.
    q, v = np.zeros((2, 1)), f64([[1], [NAN]])
    found = values(twin, lambda q, v: twin.functional.causal_attention(q, q, v)[0], q, v)
    assert np.isnan(found).all()


@both_twins
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_B19_infinities_elsewhere_are_quiet_and_alike(twin: Twin, dtype: str) -> None:
    """0 * -inf in GELU, and a target of probability 0 in the loss."""
    x = np.array([INF, -INF, NAN], dtype)
    np.testing.assert_array_equal(values(twin, twin.layers.GELU(), x), [INF, NAN, NAN])
    if dtype != "float16":
        loss_of = twin.loss.GPTLoss()
        loss = values(twin, lambda z: loss_of(z, np.array([1])), np.array([[0, -INF]], dtype))
        assert loss == INF
        loss = values(twin, lambda z: loss_of(z, np.array([0])), np.array([[0, -INF]], dtype))
        assert loss == 0.0


P = [0.090030573170, 0.244728471055, 0.665240955775]


@both_twins
def test_B21_the_gradient_of_softmax_has_both_parts(twin: Twin) -> None:
    softmax, x = twin.layers.Softmax(), f64([1, 2, 3])
    np.testing.assert_allclose(values(twin, softmax, x), P, rtol=1e-11)
    (dx,) = gradients(twin, softmax, x, g=f64([1, 0, 0]))
    np.testing.assert_allclose(dx, [0.081925069065, -0.022033044520, -0.059892024545], rtol=1e-10)
    (dx,) = gradients(twin, softmax, x, g=np.ones(3))
    assert np.abs(dx).max() <= 2.0**-52  # p (1 - sum p), two roundings of 1 (the report: 1e-16)


@both_twins
def test_B21_each_row_has_its_own_jacobian(twin: Twin) -> None:
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((2, 2, 3)), rng.standard_normal((2, 2, 3))
    (dx,) = gradients(twin, twin.layers.Softmax(), x, g=g)
    targets = np.array([[0, 1], [2, 1]])
    (dlogits,) = gradients(twin, lambda z: twin.functional.cross_entropy(z, targets), x)
    for at in np.ndindex(2, 2):
        e = [math.exp(value) for value in x[at]]
        p = f64(e) / math.fsum(e)
        jacobian = np.diag(p) - np.outer(p, p)
        size = np.abs(jacobian) @ np.abs(g[at])
        assert (np.abs(dx[at] - jacobian @ g[at]) <= 16 * 2.0**-53 * size).all()
        onehot = np.eye(3)[targets[at]]  # the fused gradient, of which p is the off-diagonal part
        assert (np.abs(dlogits[at] - (p - onehot) / 4) <= 16 * 2.0**-53).all()


@both_twins
def test_B22_large_scores_neither_overflow_nor_warn(twin: Twin) -> None:
    softmax = twin.layers.Softmax()
    np.testing.assert_allclose(values(twin, softmax, f64([1000, 1001, 1002])), P, rtol=1e-11)
    np.testing.assert_array_equal(values(twin, softmax, np.zeros((2, 2))), np.full((2, 2), 0.5))
    np.testing.assert_array_equal(values(twin, softmax, f32([1e4, -1e4])), [1, 0])
    x = np.random.default_rng(0).standard_normal((2, 3, 3))
    for dtype, off in (("float64", 1e-15), ("float32", 1e-6)):
        sums = values(twin, softmax, x.astype(dtype)).sum(axis=-1)
        assert np.abs(sums - 1.0).max() <= off


@both_twins
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_B22_the_ends_of_the_range_neither_overflow_nor_warn(twin: Twin, dtype: str) -> None:
    """The difference of the two ends is -inf, whose exponential is 0 all the same."""
    ends = np.array([np.finfo(dtype).max, np.finfo(dtype).min], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(values(twin, twin.layers.Softmax(), ends), [1, 0])
        for label, expected in ((0, 0.0), (1, INF)):
            loss = values(twin, lambda z, y=label: twin.functional.cross_entropy(z, np.array([y])),
                          ends[None])  # fmt: skip
            assert loss == expected


TANH = [-0.04540230591222494, 0.34571400982514394, 0.8411919906082768, 2.996362607918227]
ERF = [-0.04550026389635842, 0.34573123063700656, 0.841344746068543, 2.99595030590511]


@both_twins
def test_B23_gelu_is_the_tanh_form(twin: Twin) -> None:
    gelu, x = twin.layers.GELU(), f64([-2, 0.5, 1, 3])
    np.testing.assert_allclose(values(twin, gelu, x), TANH, rtol=1e-14)
    exact = torch.nn.functional.gelu
    np.testing.assert_allclose(exact(torch.tensor(x)).numpy(), ERF, rtol=1e-14)
    grid = np.linspace(-6.0, 6.0, 120_001)
    gap = np.abs(values(twin, gelu, grid) - exact(torch.tensor(grid)).numpy())
    np.testing.assert_allclose(gap.max(), 4.7323552e-4, rtol=1e-7)
    assert abs(abs(grid[gap.argmax()]) - 2.699) < 1e-3
    assert torch.nn.GELU().approximate == "none"  # PyTorch's default
    assert TORCH.layers.GELU().approximate == "tanh"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_B23_the_comparison_notices_the_other_form(dtype: str) -> None:
    """At a training scale, where activations are small, and in either precision."""
    case = ModelCase(SIZES["general"], "normal", 0.3, 5)
    weights, tokens, targets = fill(case)
    model = build_model("torch", case.config, dtype=dtype)
    set_weights(model, {n: w.astype(dtype) for n, w in weights.items()})
    loss_of = MODULES["torch"].GPTLoss()
    clean, tolerances = reference(case, dtype)
    assert compare_traces(trace(model, loss_of, tokens, targets), clean, tolerances, dtype).ok
    model.transformers[1].feed_forward.gelu.approximate = "none"
    report = compare_traces(trace(model, loss_of, tokens, targets), clean, tolerances, dtype)
    assert not report.ok
    assert report.first.name == "transformers.1.feed_forward.gelu.output"


def test_B23_no_other_gelu_is_in_the_model() -> None:
    model = build_model("torch", SMALL)
    forms = [m.approximate for m in model.modules() if isinstance(m, torch.nn.GELU)]
    assert forms == ["tanh", "tanh"]
    x = f64([0.7])
    np.testing.assert_array_equal(
        as_array(functional.gelu(Tensor(x))), values(NUMPY, NUMPY.layers.GELU(), x)
    )
