"""The instruments themselves: each comparer must reject what is wrong, whoever made it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import numpy_impl
from gpt_parity.backends import build_model, load_backend
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.compare import FORWARD, PARAMETER, Judgement, Report, compare, compare_traces
from gpt_parity.oracle.complex_step import complex_step_votes
from gpt_parity.oracle.noise import MonteCarloArithmetic
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64, Call, row
from gpt_parity.oracle.slips import planted_slips, show_slips
from gpt_parity.oracle.tolerance import (
    Tolerance,
    model_tolerances,
    norms,
    spread_tolerance,
)  # fmt: skip
from gpt_parity.oracle.trace import Trace, trace
from gpt_parity.weights import get_weights, set_weights
from numpy_impl import functional as F
from numpy_impl.tape import observe
from numpy_impl.tensor import Tensor
from parity_tests.models import (
    SIZES,
    ModelCase,
    build,
    candidate_trace,
    fill,
    named_case,
    reference,
)  # fmt: skip

CASE = ModelCase(SIZES["distinct primes"], "normal", 0.5, 2)
CASES = {"gpt": CASE, "gpt2": named_case("gpt2", "distinct primes", "normal", 0.5, 2)}
WEIGHT = "transformers.0.attention.output.weight"


@pytest.fixture(
    scope="module", params=[(m, d) for m in CASES for d in ("float64", "float32")],
    ids=lambda param: " ".join(param),
)  # fmt: skip
def judged(request: pytest.FixtureRequest) -> tuple[Trace, Trace, object, str]:
    """A clean candidate from PyTorch with the reference, tolerances and dtype."""
    model, dtype = request.param
    case = CASES[model]
    return candidate_trace("torch", dtype, case), *reference(case, dtype), dtype


def with_parameter(t: Trace, name: str, array: np.ndarray) -> Trace:
    return replace(t, parameters={**t.parameters, name: array})


def test_a_clean_candidate_passes(judged) -> None:
    report = compare_traces(*judged)
    assert report.ok and report.first is None and report.worst.ratio > 0.0


@pytest.mark.parametrize(
    ("description", "change"),
    [
        ("transposed", lambda g: g.T.copy()),
        ("scaled by 1.001", lambda g: (g * 1.001).astype(g.dtype)),
        ("negated", lambda g: -g),
        ("zero", np.zeros_like),
        ("one element of one row", lambda g: _one_element(g)),
        ("NaN", lambda g: np.where(np.eye(*g.shape, dtype=bool), np.nan, g).astype(g.dtype)),
        ("infinite", lambda g: np.where(np.eye(*g.shape, dtype=bool), np.inf, g).astype(g.dtype)),
        ("half precision", lambda g: g.astype(np.float16)),
        ("rounded to eight bits", lambda g: _eight_bits(g)),
        ("a row short", lambda g: g[:-1].copy()),
        ("one axis more", lambda g: g[None].copy()),
        ("empty", lambda g: g[:0].copy()),
    ],
)
def test_a_wrong_gradient_is_rejected_alone(judged, description, change) -> None:
    candidate, clean, tolerances, dtype = judged
    wrong = with_parameter(candidate, WEIGHT, change(candidate.parameters[WEIGHT]))
    report = compare_traces(wrong, clean, tolerances, dtype)
    assert [(j.kind, j.name) for j in report.judgements if not j.ok] == [(PARAMETER, WEIGHT)]
    assert report.worst.ratio > 3.0


def _eight_bits(g: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(g)
    return np.ldexp(np.round(mantissa * 256.0) / 256.0, exponent).astype(g.dtype)


def _one_element(g: np.ndarray) -> np.ndarray:
    g = g.copy()
    g[1, 0] *= 1.01
    return g


def test_a_tensor_missing_or_added_is_an_error(judged) -> None:
    candidate, clean, tolerances, dtype = judged
    fewer = {n: g for n, g in candidate.parameters.items() if n != WEIGHT}
    for parameters in (fewer, {**candidate.parameters, "extra": np.zeros(3)}):
        with pytest.raises(ValueError, match="parameter gradient: got"):
            compare_traces(replace(candidate, parameters=parameters), clean, tolerances, dtype)


def test_comparison_with_itself_is_an_error(judged) -> None:
    _, clean, tolerances, _ = judged
    with pytest.raises(ValueError, match="one array, needed two"):
        compare_traces(clean, clean, tolerances, "float64")


def test_a_reference_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference is not finite"):
        compare(
            "x", FORWARD, np.zeros(2), np.array([1.0, np.nan]), Tolerance(1, np.ones(())), "float64"
        )


def test_a_report_of_nothing_but_zeros_is_an_error() -> None:
    tolerance = Tolerance(0.0, np.zeros(3))
    zero = compare("x", FORWARD, np.zeros((3, 2)), np.zeros((3, 2)), tolerance, "float64")
    assert zero.exact_zero and zero.ok
    with pytest.raises(ValueError, match="every tensor judged is zero"):
        Report([zero])


def test_zero_tolerance_asks_for_equality() -> None:
    tolerance = Tolerance(0.0, np.zeros(3))
    almost = np.zeros((3, 2))
    almost[2, 1] = 5e-324  # its square underflows
    judgement = compare("x", FORWARD, almost, np.zeros((3, 2)), tolerance, "float64")
    assert judgement.ratio == math.inf and not judgement.exact_zero
    minus_zero = compare("x", FORWARD, -np.zeros((3, 2)), np.zeros((3, 2)), tolerance, "float64")
    assert minus_zero.ok


def test_a_bad_row_is_seen_among_large_ones() -> None:
    reference = np.full((1000, 4), 1e6)
    reference[7] = 1.0
    tolerance = Tolerance(1e-2, 1e-8 * np.linalg.norm(reference, axis=-1))
    candidate = reference.copy()
    candidate[7, 2] += 1e-5
    judgement = compare("x", FORWARD, candidate, reference, tolerance, "float64")
    assert judgement.row == (7,) and judgement.ratio == pytest.approx(500.0, rel=1e-6)


def test_masked_positions_must_hold_the_fill_and_do_not_count() -> None:
    kept = np.tri(3, dtype=bool)
    reference = np.where(kept, 1.0, -1e9)
    tolerance = Tolerance(1e-12, np.full(3, 1e-12))
    off = reference.copy()
    off[2, 0] += 1e-9
    assert compare("x", FORWARD, off, reference, tolerance, "float64", kept).ratio > 100.0
    leak = reference.copy()
    leak[0, 2] = -1e8
    judgement = compare("x", FORWARD, leak, reference, tolerance, "float64", kept)
    assert judgement.reason == "masked positions differ"


def test_every_planted_slip_is_seen_in_its_tensor_alone(judged) -> None:
    sightings = show_slips(*judged[1:])
    assert len(sightings) == 3 and all(s.ok for s in sightings), sightings


def test_a_comparer_with_huge_tolerances_misses_the_slips(judged) -> None:
    """The self-test can fail: this is what `verify` refuses to go on with."""
    _, clean, tolerances, dtype = judged

    def wide(part):
        return {n: Tolerance(t.whole * 1e15, t.rows * 1e15) for n, t in part.items()}

    blind = replace(
        tolerances, values=wide(tolerances.values), parameters=wide(tolerances.parameters)
    )
    assert not any(s.ok for s in show_slips(clean, blind, dtype))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_attention_weight_that_slips_is_the_largest_of_the_last_row(case: ModelCase) -> None:
    candidate = candidate_trace("numpy", "float64", case)
    slip = list(planted_slips(candidate, "float64"))[-1]
    before, after = candidate.values[slip.name], slip.trace.values[slip.name]
    (*at, column) = np.argwhere(before != after)[0]
    assert (before != after).sum() == 1 and at == [size - 1 for size in before.shape[:-1]]
    assert before[(*at, column)] == before[tuple(at)].max()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_slips_leave_the_trace_alone(case: ModelCase) -> None:
    candidate = candidate_trace("numpy", "float64", case)
    before = {n: g.copy() for n, g in {**candidate.values, **candidate.parameters}.items()}
    list(planted_slips(candidate, "float64"))
    for name, array in {**candidate.values, **candidate.parameters}.items():
        np.testing.assert_array_equal(array, before[name])


def test_tolerance_is_the_stated_formula() -> None:
    clean, noisy = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[3.0, 4.5], [0.0, 0.0]])
    tolerance = spread_tolerance(clean, [clean.copy(), noisy], FLOAT32)
    expected = 16.0 * 0.5 + 12.0 * 2.0**-24 * 5.0
    assert tolerance.whole == pytest.approx(expected, rel=1e-15)
    assert tolerance.rows.tolist() == [pytest.approx(expected, rel=1e-15), 0.0]


def test_tolerances_need_a_float64_model() -> None:
    weights, tokens, targets = fill(CASE)
    with pytest.raises(ValueError, match="needed float64"):
        model_tolerances(*build("numpy", "float32", CASE, weights), tokens, targets, FLOAT32)


def test_noise_is_bounded_by_the_table_and_reaches_every_rounded_element() -> None:
    rng = np.random.default_rng(0)
    a, b = Tensor(rng.standard_normal((5, 7))), Tensor(rng.standard_normal((7, 3)))
    clean = a @ b
    for unit in (FLOAT32, FLOAT64):
        with observe(MonteCarloArithmetic(unit, rng)):
            noisy = a @ b
        m = math.sqrt(7) * (np.abs(a.data) @ np.abs(b.data))
        error = np.abs(noisy.data - clean.data)
        # Two uniform numbers, and one rounding of the sum itself.
        assert (error <= 2.0 * (unit.u * m + unit.eta) + 2.0**-52 * np.abs(clean.data)).all()
        assert (error > 0.0).mean() > 0.5  # in float64 some noise is lost in the last bit


def test_noise_reaches_results_that_are_almost_zero() -> None:
    """Below the underflow unit of the dtype judged, its flush to zero is rounding too."""
    x = Tensor(np.array([[5e-324, 1.0]]))
    with observe(MonteCarloArithmetic(FLOAT32, np.random.default_rng(0))):
        noisy = (x * 1.0).data - x.data
    assert 0.0 < abs(noisy[0, 0]) <= 2.0 * FLOAT32.eta


def test_noise_leaves_exact_results_alone() -> None:
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((4, 4)))
    zero = Tensor(np.zeros((4, 4)))
    with observe(MonteCarloArithmetic(FLOAT32, rng)):
        np.testing.assert_array_equal(x.transpose(-2, -1).data, x.data.T)
        np.testing.assert_array_equal((x @ zero).data, zero.data)


def test_equal_values_of_one_result_share_half_of_their_noise() -> None:
    """Repeated tokens err alike in a real run: their errors must not average out."""
    x = Tensor(np.full((1, 4000), 0.1))
    noise = MonteCarloArithmetic(FLOAT64, np.random.default_rng(0))
    means = []
    for _ in range(20):
        with observe(noise):
            y = x * 3.0
        means.append(((y.data - 0.1 * 3.0) / (2.0**-53 * 0.3)).mean())
    assert np.std(means) > 0.3  # independent noise alone would leave 0.58 / sqrt(4000) = 0.009


def test_halves_of_the_columns_err_apart_and_each_half_together() -> None:
    """The last columns of a matrix product are summed in an order of their own."""
    x = Tensor(np.full((500, 8), 0.1))
    noise = MonteCarloArithmetic(FLOAT64, np.random.default_rng(1))
    apart = []
    for _ in range(20):
        with observe(noise):
            y = x * 3.0
        columns = ((y.data - 0.1 * 3.0) / (2.0**-53 * 0.3)).mean(axis=0)
        apart.append(np.ptp(columns))
    assert np.median(apart) > 0.2  # independent noise alone: 8 means within 0.12
    assert min(apart) < 0.12  # now and then all columns are in one half, or the halves agree


def test_the_error_of_a_derivative_follows_the_operand() -> None:
    """Equal rows meet different cotangents, and the error of GELU' is the same in all of them."""
    rng = np.random.default_rng(0)
    g = rng.uniform(0.5, 2.0, (4000, 1))
    x = Tensor(np.full((4000, 1), 1.5), requires_grad=True)
    noise = MonteCarloArithmetic(FLOAT32, rng)
    means = []
    for _ in range(20):
        with observe(noise):
            y = F.gelu(x)
        y.backward(g)
        clean = x.grad.copy()
        x.grad = None
        with observe(noise):
            F.gelu(x).backward(g)
        means.append(((x.grad - clean) / (2.0**-24 * g)).mean())
        x.grad = None
    assert np.std(means) > 0.2  # noise that follows the products averages out: 0.02


@pytest.mark.parametrize(("length", "groups", "factor"), [
    (1000, 1, 1000.0),  # all rows equal: their errors add up
    (1000, 1000, math.sqrt(1000.0)),  # all different: they average out
    (1000, 10, math.sqrt(10 * 100.0**2)),
    (64, 1, 8.0),  # in short sums the factor of the tolerance covers it
])  # fmt: skip
def test_equal_terms_of_a_long_sum_count_in_full(length: int, groups: int, factor: float) -> None:
    rng = np.random.default_rng(0)
    g = rng.standard_normal((groups, 3))[np.arange(length) % groups]
    g *= 1.0 + 1e-6 * rng.standard_normal(g.shape)  # as far apart as noise puts equal rows
    x, weight = np.ones((length, 2)), np.zeros((3, 2))
    call = Call((x, weight, np.zeros(3)), np.zeros(3), FLOAT32, {}, g, 2)
    m = row("linear").backward(call)
    np.testing.assert_allclose(m, factor * np.abs(g).sum(axis=0), rtol=1e-12)
    ids = np.zeros(length, int)
    call = Call((np.zeros((4, 3)), ids), np.zeros((4, 3)), FLOAT32, {}, g, 0)
    m = row("embedding").backward(call)
    np.testing.assert_allclose(m[0], factor * np.abs(g).sum(axis=0), rtol=1e-12)
    assert not m[1:].any()


@pytest.mark.parametrize("number", [0.3, 0.0])
def test_a_sum_with_one_number_for_all_weights_counts_in_full(number: float) -> None:
    x, weight, bias = np.ones((2, 9)), np.full((4, 9), 0.3), np.full(4, 0.5)
    weight[3, 8] = number
    forward = Call((x, weight, bias), np.zeros((2, 4)), FLOAT32, {})
    backward = Call((x, weight, bias), np.zeros((2, 9)), FLOAT32, {}, np.ones((2, 4)), 0)
    terms, columns = np.abs(weight).sum(axis=1) + 0.5, np.abs(weight).sum(axis=0)
    for call, m, factors in (
        (forward, row("linear").forward(forward), (9.0, 3.0)),
        (backward, row("linear").backward(backward), (4.0, 2.0)),
    ):
        factor = factors[0] if number else factors[1]
        expected = factor * (terms if call is forward else columns)
        np.testing.assert_allclose(m, np.broadcast_to(expected, m.shape), rtol=1e-14)


def test_an_operation_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="no row for operation 'swish'"):
        row("swish")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_complex_step_finds_a_wrong_gradient_and_says_whose(case: ModelCase) -> None:
    weights, tokens, targets = fill(case)
    clean, tolerances = reference(case, "float64")
    autograd = candidate_trace("torch", "float64", case)
    wrong = with_parameter(autograd, WEIGHT, autograd.parameters[WEIGHT] * (1.0 + 1e-9))
    model, loss_fn = build("numpy", "complex128", case, weights)
    votes = complex_step_votes(model, loss_fn, tokens, targets, clean, wrong, tolerances)
    bad = [v for v in votes if v.autograd > 1.0]
    assert [v.name for v in bad] == [WEIGHT] and bad[0].closure <= 1.0
    nan = with_parameter(autograd, WEIGHT, np.full_like(autograd.parameters[WEIGHT], np.nan))
    votes = complex_step_votes(model, loss_fn, tokens, targets, clean, nan, tolerances)
    assert [v.autograd for v in votes if v.name == WEIGHT] == [math.inf]
    longer = with_parameter(autograd, WEIGHT, autograd.parameters[WEIGHT][None])
    with pytest.raises(
        ValueError, match=rf"{WEIGHT}: got shape \(1, (\d), \1\), needed \(\1, \1\)"
    ):
        complex_step_votes(model, loss_fn, tokens, targets, clean, longer, tolerances)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_traces_leave_no_gradients_and_no_hooks(case: ModelCase) -> None:
    weights, tokens, targets = fill(case)
    for backend in ("numpy", "torch"):
        model, loss_fn = build(backend, "float64", case, weights)
        first, second = (trace(model, loss_fn, tokens, targets) for _ in range(2))
        assert all(p.grad is None for p in model.parameters())
        for name, gradient in first.parameters.items():
            np.testing.assert_array_equal(gradient, second.parameters[name])
            assert not np.shares_memory(gradient, second.parameters[name])
    assert not any(m._forward_hooks for m in model.modules())


def test_judgement_orders_by_ratio() -> None:
    fine = Judgement("a", FORWARD, 0.5, 0.0)
    out = Judgement("b", FORWARD, 2.0, 0.0)
    assert Report([fine, out]).worst is out and Report([fine, out]).first is out
    assert Report([fine]).ok and not Report([fine, out]).ok


@pytest.mark.parametrize("scale", [5e-324, 1e-170, 1.0, 1e170])
def test_norms_survive_squares_that_do_not(scale: float) -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0]]) * scale
    whole, rows = norms(x)
    assert rows.tolist() == pytest.approx([5.0 * scale, 0.0, scale], rel=1e-15)
    assert whole == pytest.approx(math.sqrt(26.0) * scale, rel=0.05 if scale < 1e-300 else 1e-15)


@pytest.mark.parametrize("fill", [-math.inf, -12345.678, -1e300])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_any_fill_that_does_not_leak_is_compared(backend: str, fill: float) -> None:
    """The fill itself may not be a float32 number: both twins round or clamp it alike."""
    config = GPTConfig(5, 4, 6, 2, mask_value=fill)
    tokens = np.array([[0, 1, 2, 3]])
    model = build_model("numpy", config, dtype="float64")
    candidate = build_model(backend, config, dtype="float32")
    loss_fn = load_backend(backend).GPTLoss()
    set_weights(model, {n: w.astype(np.float64) for n, w in get_weights(candidate).items()})
    clean, tolerances = model_tolerances(model, numpy_impl.GPTLoss(), tokens, tokens, FLOAT32)
    report = compare_traces(trace(candidate, loss_fn, tokens, tokens), clean, tolerances, "float32")
    assert report.ok, report.first


def test_a_leak_that_both_twins_share_is_no_difference() -> None:
    config = GPTConfig(5, 4, 6, 2, mask_value=-5.0)
    tokens = np.array([[0, 1, 2, 3]])
    models = [build_model(b, config, dtype="float64", allow_leak=True) for b in ("numpy", "torch")]
    clean, tolerances = model_tolerances(models[0], numpy_impl.GPTLoss(), tokens, tokens, FLOAT64)
    candidate = trace(models[1], load_backend("torch").GPTLoss(), tokens, tokens)
    assert compare_traces(candidate, clean, tolerances, "float64").ok
