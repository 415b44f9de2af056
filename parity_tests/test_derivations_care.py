"""What `docs/derivations.md` says about floating point, with its figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from numpy_impl import functional as F
from numpy_impl.layers import Parameter
from numpy_impl.optim import AdamWOptimizer
from numpy_impl.tensor import Tensor
from parity_tests import markdown
from parity_tests.registry import TORCH

pytestmark = pytest.mark.reference("by hand")

PAGE = " ".join(markdown.read("docs/derivations.md").split())
P = markdown.run("docs/derivations.md")


def says(*phrases: str) -> None:
    """The page still has the sentence that a test is about."""
    for phrase in phrases:
        assert phrase in PAGE, phrase


def test_softmax_without_its_shift_is_nan_and_equal_cotangents_hide_it() -> None:
    says("The exponential of 1000 overflows", "if they are all equal the gradient is zero on paper")
    x = np.array([1000.0, 0.0])
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(x)
        assert np.isnan((e / e.sum())[0])
    np.testing.assert_array_equal(P["softmax"](x), [1.0, 0.0])
    p = P["softmax"](np.array([0.0, 0.0]))  # 1/2 and 1/2: exact
    np.testing.assert_array_equal(P["softmax_vjp"](np.zeros(2), g=np.full(2, 3.0)), 0.0 * p)


def test_gelu_cancels_at_minus_five_in_both_twins() -> None:
    says("at -5 is -2.29e-7 and -2.98e-7 comes out", "the true value is -5.9e-9 and zero comes out")
    for x, exact, single in ((-5.0, "-2.29e-07", "-2.98e-07"), (-5.5, "-5.93e-09", "-0.00e+00")):
        u = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        assert f"{x / (1.0 + math.exp(-2.0 * u)):.2e}" == exact  # 1 + tanh(u) = 2 / (1 + e^(-2u))
        assert f"{F.gelu(Tensor(np.array([x], np.float32))).item():.2e}" == single
        assert f"{TORCH.functional.gelu(torch.tensor([x])).item():.2e}" == single


def test_the_plain_gelu_formula_is_nan_far_out_and_the_engine_is_not() -> None:
    says("at 1e20 the formula above gives zero times infinity, NaN, where the derivative is 1")
    x, g = np.array([1e20], np.float32), np.ones(1, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        plain = P["gelu_vjp"](x, g=g)
    assert plain.dtype == np.float32 and np.isnan(plain[0])
    assert P["gelu_vjp"](x.astype(np.float64), g=np.ones(1)) == 1.0
    leaf = Tensor(x)
    F.gelu(leaf).backward(g)
    assert leaf.grad[0] == 1.0


def test_a_mask_that_multiplies_lets_an_infinite_cotangent_through() -> None:
    says("0 times infinity is NaN")
    g = np.array([[1.0, np.inf], [2.0, 3.0]])
    with np.errstate(invalid="ignore"):
        assert np.isnan((g * np.tri(2))[0, 1])
    np.testing.assert_array_equal(P["tril_vjp"](np.zeros((2, 2)), 0.0, g=g), [[1, 0], [2, 3]])


def test_adding_in_place_by_ids_counts_the_last_occurrence_only() -> None:
    says("of each repeated id only the last occurrence counts")
    ids, g = np.array([1, 1, 1]), np.array([[1.0], [2.0], [4.0]])
    table = np.zeros((3, 1))
    table[ids] += g
    np.testing.assert_array_equal(table, [[0.0], [4.0], [0.0]])
    np.testing.assert_array_equal(P["embedding_vjp"](np.zeros((3, 1)), ids, g=g), [[0], [7], [0]])


def test_the_logarithm_of_a_probability_is_infinite_and_log_sum_exp_is_not() -> None:
    says("p underflows to zero in float32 and -ln p is infinite, while ln s - x is 200")
    x, target = np.array([[0.0, 200.0]], np.float32), np.array([0])
    assert F.softmax(Tensor(x)).data[0, 0] == 0.0
    assert F.cross_entropy(Tensor(x), target).item() == 200.0
    assert P["cross_entropy"](x, target) == 200.0


def test_p_minus_one_cancels_where_the_model_is_sure() -> None:
    says("it is -2.06e-9 and float32 gives exactly 0, and 2.06e-9 at the other")
    assert f"{-1.0 / (1.0 + math.exp(20.0)):.2e}" == "-2.06e-09"
    leaf = Tensor(np.array([[20.0, 0.0]], np.float32))
    F.cross_entropy(leaf, np.array([0])).backward()
    assert leaf.grad[0, 0] == 0.0 and f"{leaf.grad[0, 1]:.2e}" == "2.06e-09"


def test_the_quotient_does_not_square_its_denominator() -> None:
    says("b² overflows, or underflows to zero, long before the result does")
    for x in (1e25, 1e-25):
        a, b = np.array([x], np.float32), np.array([x], np.float32)
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            assert not 0.0 < (a / (b * b))[0] < np.inf
        leaf = Tensor(b)
        (Tensor(a) / leaf).backward(np.ones(1, np.float32))
        np.testing.assert_array_equal(leaf.grad, -1.0 / b)
        np.testing.assert_array_equal(P["div_vjp"](a, b, g=np.ones(1, np.float32))[1], -1.0 / b)


def test_the_mask_has_nothing_left_to_take_away_from_the_gradient_of_the_scores() -> None:
    says("The future has weight exactly zero, so its part", "p = 1 and its score has gradient zero")
    rng = np.random.default_rng(0)
    m = P["tril"](rng.standard_normal((4, 4)), -np.inf)
    dm = P["softmax_vjp"](m, g=rng.standard_normal((4, 4)))
    np.testing.assert_array_equal(dm, P["tril_vjp"](m, -np.inf, g=dm))
    assert dm[0, 0] == 0.0 and dm[1, 0] != 0.0
    weak = P["tril"](rng.standard_normal((4, 4)), 0.0)
    dm = P["softmax_vjp"](weak, g=rng.standard_normal((4, 4)))
    assert (np.triu(dm, 1) != 0.0).any()


def test_dropping_or_doubling_a_path_of_the_scores_is_another_gradient() -> None:
    says("Before the mask the scores x x^T are symmetric", "the two paths differ")
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((3, 2)), rng.standard_normal((3, 2))
    dq, dk, _ = P["causal_attention_vjp"](x, x, x, g=g)
    assert np.linalg.norm(dq - dk) > 0.1 * np.linalg.norm(dq + dk)


def test_squares_overflow_in_the_norm_and_the_gradients_stay() -> None:
    says("The squares overflow in float32 from a norm of 1.8e19", "by a millionth")
    for value, fits in ((1.8e19, True), (1.9e19, False)):
        p = Parameter(np.zeros(1, np.float32))
        p.grad = np.array([value], np.float32)
        optimizer = AdamWOptimizer([p])
        if fits:
            assert math.isfinite(optimizer.clip_grad_norm(1e30))
        else:
            with pytest.raises(FloatingPointError):
                optimizer.clip_grad_norm(1.0)
        assert p.grad[0] == np.float32(value)
    (clipped,), norm = P["clip_grad_norm"]([np.array([1.0])], 1.0)
    assert norm == 1.0 and f"{1.0 - clipped[0]:.2e}" == "1.00e-06"


def test_epsilon_inside_the_root_would_act_like_its_root() -> None:
    says("inside it, 1e-8 would act like 1e-4")
    zero, chosen = np.zeros(1), {"lr": 1.0, "betas": (0.9, 0.999), "weight_decay": 0.0}
    w, _, _ = P["adamw_step"](zero, np.array([1e-8]), zero, zero, 1, eps=1e-8, **chosen)
    assert f"{w[0]:.6f}" == "-0.500000"  # g / (|g| + eps)
    assert f"{1e-8 / math.sqrt(1e-16 + 1e-8):.1e}" == "1.0e-04"
