"""Errors that do not average out: common to rows or columns whose results cancelled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt_parity.oracle.compare import compare_traces
from gpt_parity.oracle.noise import MonteCarloArithmetic
from gpt_parity.oracle.rounding import FLOAT64
from parity_tests.models import ModelCase, candidate_trace, reference


@pytest.mark.parametrize("columns", [1.0, np.linspace(0.5, 2.0, 8)], ids=["equal", "distinct"])
def test_results_that_cancelled_share_noise_where_their_magnitudes_agree(columns: Any) -> None:
    """What is left of them is rounding, in which no two agree; their operands still do."""
    m = np.broadcast_to(np.asarray(columns), (500, 8))
    left = 2.0**-53 * m * np.random.default_rng(0).uniform(-4.0, 4.0, m.shape)
    noise = MonteCarloArithmetic(FLOAT64, np.random.default_rng(1))
    means = np.array([
        ((noise.perturbed(left, m) - left) / (2.0**-53 * m)).mean(axis=0) for _ in range(40)
    ])  # fmt: skip
    # Rows err together: independent noise alone would leave 0.58 / sqrt(500) = 0.026.
    assert means.std() > 0.3
    correlation = np.corrcoef(means.T)[np.triu_indices(8, 1)]
    if np.ndim(columns):
        assert np.abs(correlation).mean() < 0.4  # each column by itself
    else:
        assert correlation.mean() > 0.3  # all that are in one of two halves


def test_a_result_that_did_not_cancel_shares_noise_by_its_value() -> None:
    """Its magnitude says less: other sums have the same."""
    values = np.random.default_rng(0).uniform(0.5, 1.0, (4000, 1))
    noise = MonteCarloArithmetic(FLOAT64, np.random.default_rng(1))
    means = [
        ((noise.perturbed(values, np.ones_like(values)) - values) / 2.0**-53).mean()
        for _ in range(20)
    ]
    assert np.std(means) < 0.05


@pytest.mark.reference("a priori bound")
@pytest.mark.parametrize("case", [
    ModelCase((33, 43, 39, 2, 11, 35), "equal weights", 0.04103759276691479, 1193673359, 1),
    ModelCase((46, 57, 16, 3, 14, 33), "ties", 0.954818500182186, 3192304770, 8),
], ids=["the mean of constant rows", "sums over tied logits"])  # fmt: skip
def test_errors_common_to_rows_or_columns_are_no_alarm(case: ModelCase) -> None:
    """With noise by the values of cancelled results, clean ratios were 1.53 and 0.59 here."""
    clean, tolerances = reference(case, "float32")
    for backend in ("numpy", "torch"):
        candidate = candidate_trace(backend, "float32", case)
        report = compare_traces(candidate, clean, tolerances, "float32")
        assert report.worst.ratio <= 0.3, report.worst
