"""The sampler against plain Python: the inverse of the cumulative sum, frequencies, edges."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_parity.sampling import sample

pytestmark = pytest.mark.reference("by hand")

TOP = math.nextafter(1.0, 0.0)

finite = st.floats(-50.0, 50.0)
logit_lists = st.lists(finite | st.just(-math.inf), min_size=1, max_size=12).filter(
    lambda logits: max(logits) > -math.inf
)
uniforms = st.floats(0.0, 1.0, exclude_max=True) | st.sampled_from([0.0, TOP])
temperatures = st.floats(0.05, 20.0) | st.sampled_from([1.0, math.inf])
top_ks = st.none() | st.integers(1, 15)


def kept_ids(logits: list[float], top_k: int | None) -> list[int]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    return sorted(order[:top_k])


def probabilities(logits: list[float], temperature: float, top_k: int | None) -> list[float]:
    """Softmax over the kept ids, by scalar arithmetic."""
    kept = kept_ids(logits, top_k)
    top = max(logits)
    weights = [0.0] * len(logits)
    for i in kept:
        if logits[i] > -math.inf:
            weights[i] = math.exp((logits[i] - top) / temperature)
    total = math.fsum(weights)
    return [w / total for w in weights]


@given(logit_lists, temperatures, top_ks, uniforms)
def test_inverts_the_cumulative_sum(
    logits: list[float], temperature: float, top_k: int | None, uniform: float
) -> None:
    p = probabilities(logits, temperature, top_k)
    found = sample(np.array(logits), temperature, top_k, uniform)
    assert p[found] > 0
    # Rounding of at most 12 exponentials and sums: the interval of the id, a hair wider.
    hair = 1e-14
    assert math.fsum(p[:found]) - hair <= uniform <= math.fsum(p[: found + 1]) + hair


@pytest.mark.reference("exact property")
@given(st.integers(0, 4), st.data())
def test_equal_logits_share_the_unit_interval_exactly(power: int, data: st.DataObject) -> None:
    size = 2**power
    uniform = data.draw(st.integers(0, 4 * size - 1)) / (4 * size)
    padded = [-math.inf, *[0.75] * size, -math.inf]
    assert sample(padded, 1.0, None, uniform) == 1 + math.floor(uniform * size)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (0.5, 3), (TOP, 3)])
def test_ids_of_probability_zero_are_never_returned(uniform: float, expected: int) -> None:
    minus = -math.inf
    assert sample([minus, 0.0, minus, 0.0, minus], 1.0, None, uniform) == expected
    assert sample([minus, 0.0, minus, 0.0, minus], math.inf, None, uniform) == expected
    assert sample([-1e4, 0.0, -1e4, 0.0, -1e4], 1.0, None, uniform) == expected
    assert sample([minus, 0.0, minus, 0.0, minus], 1.0, 5, uniform) == expected


@pytest.mark.reference("exact property")
@given(st.lists(finite, min_size=1, max_size=12))
def test_top_of_the_unit_interval_stays_inside(logits: list[float]) -> None:
    assert 0 <= sample(logits, 1.0, None, TOP) < len(logits)


@pytest.mark.parametrize("temperature", [1.0, math.inf])
def test_the_top_of_the_unit_interval_by_hand(temperature: float) -> None:
    """0.1 is rounded, and ten of them add up to 1 - 2^-53, which is `TOP`: below no sum is left."""
    assert sum([0.1] * 10) == TOP == 1.0 - 2.0**-53
    assert sample([0.0] * 10, temperature, None, TOP) == 9
    assert sample([-math.inf, *[0.0] * 10, -math.inf], temperature, None, TOP) == 10


@pytest.mark.parametrize("k", range(10))
def test_tenths_choose_among_ten_equal_ids(k: int) -> None:
    """10 (k / 10) is k in float64 for every k; three rounded tenths are more than 3 / 10."""
    assert sample([0.0] * 10, 1.0, None, k / 10) == k


@pytest.mark.reference("exact property")
@given(logit_lists, temperatures, top_ks, uniforms, uniforms)
def test_a_larger_number_never_gives_a_lower_id(
    logits: list[float], temperature: float, top_k: int | None, a: float, b: float
) -> None:
    low, high = sorted((a, b))
    assert sample(logits, temperature, top_k, low) <= sample(logits, temperature, top_k, high)


@pytest.mark.reference("exact property")
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=12), st.integers(-9999, 9999), uniforms)
def test_adding_a_constant_to_all_logits_changes_nothing(
    logits: list[int], constant: int, uniform: float
) -> None:
    shifted = [logit + constant for logit in logits]
    assert sample(shifted, 0.7, None, uniform) == sample(logits, 0.7, None, uniform)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 15))
def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie(logits: list[int], top_k: int) -> None:
    kept = kept_ids(logits, top_k)
    # Even shares at infinite temperature: the middle of each share is clear of all rounding.
    middles = [(j + 0.5) / len(kept) for j in range(len(kept))]
    assert [sample(logits, math.inf, top_k, middle) for middle in middles] == kept


def test_top_k_by_hand() -> None:
    logits = [1.0, 2.0, 1.0, 2.0, 1.0]
    drawn = {sample(logits, 1.0, 3, j / 64) for j in range(64)}
    assert drawn == {0, 1, 3}


@given(logit_lists, temperatures | st.just(0.0), uniforms)
def test_top_k_one_is_the_first_of_the_largest(
    logits: list[float], temperature: float, uniform: float
) -> None:
    assert sample(logits, temperature, 1, uniform) == logits.index(max(logits))


@given(logit_lists, top_ks, uniforms, st.sampled_from([0, 0.0, -0.0]))
def test_temperature_zero_is_the_first_of_the_largest(
    logits: list[float], top_k: int | None, uniform: float, temperature: float
) -> None:
    assert sample(logits, temperature, top_k, uniform) == logits.index(max(logits))


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-38, np.float32(1e-38), 5e-324])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_small_temperatures_are_greedy_without_a_warning(temperature: float, dtype: type) -> None:
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for uniform in (0.0, 0.5, TOP):
            assert sample(np.array([1, 3, 2], dtype), temperature, None, uniform) == 1


@pytest.mark.reference("exact property")
def test_huge_logits_overflow_nowhere() -> None:
    with np.errstate(all="raise"):
        assert sample([-1.7e308, 1.7e308], 1.0, None, 0.0) == 1
        assert sample([-1.7e308, 1.7e308], math.inf, None, 0.0) == 0
        assert sample([1e308, 1e308], 1e308, None, 0.75) == 1


@pytest.mark.reference("exact property")
def test_infinite_temperature_is_uniform_over_the_candidates() -> None:
    logits = [1.0, -math.inf, 3.0, 2.0, 2.5]
    assert [sample(logits, math.inf, None, u) for u in (0, 0.25, 0.5, 0.75)] == [0, 2, 3, 4]
    assert [sample(logits, math.inf, 2, u) for u in (0, 0.25, 0.5, 0.75)] == [2, 2, 4, 4]


@pytest.mark.parametrize(
    ("size", "temperature", "top_k"), [(65, 1.0, None), (65, 0.8, 20), (3, 1.0, None)]
)
def test_frequencies(size: int, temperature: float, top_k: int | None) -> None:
    generator = np.random.default_rng(2024)
    logits = generator.standard_normal(size).astype(np.float32)
    if size == 3:
        # The single-precision softmax of these sums to 1 - 7e-8, which numpy.random.choice refuses.
        logits = np.array([0.3, -0.3, 1.3], np.float32)
    draws = 10_000
    drawn = [sample(logits, temperature, top_k, u) for u in generator.random(draws)]
    counts = np.bincount(drawn, minlength=size)
    p = np.array(probabilities([float(x) for x in logits], temperature, top_k))
    assert np.all(counts[p == 0] == 0)
    expected = draws * p[p > 0]
    statistic = float(np.sum((counts[p > 0] - expected) ** 2 / expected))
    freedom = expected.size - 1
    # Mean and five standard deviations of chi-square.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_single_precision_logits_are_taken_at_their_exact_value() -> None:
    logits = np.random.default_rng(7).standard_normal(65).astype(np.float32)
    wide = logits.astype(np.float64)
    for uniform in np.linspace(0, 1, 512, endpoint=False):
        assert sample(logits, 0.9, 40, uniform) == sample(wide, 0.9, 40, uniform)


def test_result_is_an_int_and_the_logits_are_left_alone() -> None:
    logits = np.array([0.5, 2.0, 1.0])
    logits.flags.writeable = False
    for temperature in (0.0, 1.0):
        assert type(sample(logits, temperature, 2, 0.5)) is int
    assert logits.tolist() == [0.5, 2.0, 1.0]
    assert sample(np.array([0.0, 9.0, 0.0, 9.0])[::2], 1.0, None, 0.5) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample([1, 3, 2], -1, None, 0.5), r"^temperature is -1\.0, 0 or more is needed$"),
        (lambda: sample([1, 3, 2], math.nan, None, 0.5), "^temperature is nan"),
        (lambda: sample([1, 3, 2], -math.inf, None, 0.5), "^temperature is -inf"),
        (lambda: sample([1, 3, 2], 1, 0, 0.5), "^top_k is 0, at least 1 is needed$"),
        (lambda: sample([1, 3, 2], 0, -4, 0.5), "^top_k is -4"),
        (lambda: sample([1, 3, 2], 1, None, 1.0), r"^uniform is 1\.0, a number in \[0, 1\)"),
        (lambda: sample([1, 3, 2], 0, None, 1.0), r"^uniform is 1\.0"),
        (lambda: sample([1, 3, 2], 1, None, -1e-300), "^uniform is -1e-300"),
        (lambda: sample([1, 3, 2], 1, None, math.nan), "^uniform is nan"),
        (lambda: sample([1, math.nan], 1, None, 0.5), "^logits hold nan at id 1, finite or -inf"),
        (lambda: sample([1, math.nan], 0, None, 0.5), "^logits hold nan at id 1"),
        (lambda: sample([math.inf, 1], 1, None, 0.5), "^logits hold inf at id 0"),
        (lambda: sample([-math.inf] * 3, 1, None, 0.5), "^logits are -inf at all 3 ids"),
        (lambda: sample([-math.inf] * 3, 0, None, 0.5), "^logits are -inf at all 3 ids"),
        (lambda: sample([], 1, None, 0.5), r"^logits have shape \(0,\)"),
        (lambda: sample([[1.0, 2.0]], 1, None, 0.5), r"^logits have shape \(1, 2\)"),
        (lambda: sample(1.0, 1, None, 0.5), r"^logits have shape \(\)"),
    ],
)
def test_refuses_values_out_of_range(call: Callable[[], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample([1, 2], "1", None, 0.5), "^temperature is '1', a real number is needed$"),
        (lambda: sample([1, 2], True, None, 0.5), "^temperature is True"),
        (lambda: sample([1, 2], 1, 2.0, 0.5), r"^top_k is 2\.0, an integer is needed$"),
        (lambda: sample([1, 2], 1, True, 0.5), "^top_k is True"),
        (lambda: sample([1, 2], 1, None, None), "^uniform is None"),
        (lambda: sample([1j, 2], 1, None, 0.5), "^logits have dtype complex128"),
        (lambda: sample([True, False], 1, None, 0.5), "^logits have dtype bool"),
        (lambda: sample(["a"], 1, None, 0.5), "^logits have dtype <U1"),
    ],
)
def test_refuses_values_of_another_type(call: Callable[[], int], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
