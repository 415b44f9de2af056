"""What rounding alone decides is not judged; what it leaves of constant rows is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.bundle import make_bundle
from gpt_parity.oracle.compare import (
    FORWARD,
    GRADIENT,
    LOSS,
    PARAMETER,
    Report,
    compare,
    compare_traces,
)
from gpt_parity.oracle.rounding import FLOAT32
from gpt_parity.oracle.subject import order_one
from gpt_parity.oracle.tolerance import Tolerance, undecided_scores
from gpt_parity.oracle.trace import Trace
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.weights import get_weights
from numpy_impl import functional
from numpy_impl.tensor import Tensor
from parity_tests.candidates import submission
from parity_tests.models import SIZES, ModelCase, candidate_trace, reference

WEIGHT = "transformers.0.attention.output.weight"


@pytest.mark.parametrize(
    ("tau", "lead", "undecided"),
    [
        (1.0, 0.0, False),  # a tie, but rounding is too small to settle it
        (1.1, 0.0, True),
        (30.0, 59.0, True),  # 59 < 60: the other may win
        (30.0, 76.0, True),  # it cannot win, but exp(-16) is not nothing
        (30.0, 77.0, False),  # exp(-17) < 2^-24
    ],
)
def test_scores_are_undecided_where_rounding_may_choose(tau, lead, undecided) -> None:
    kept = np.array([[True, False, False], [True, True, False], [True, True, True]])
    scores = np.array([[0.0, 1e9, 1e9], [0.0, lead, 1e9], [0.0, 200.0, -200.0]])
    logits = np.array([[0.0, 500.0]])
    nothing = np.zeros((1, 1))
    values = {"a.mask.output": scores, "output": logits}
    clean = Trace(nothing, values, {}, {}, kept={"a.mask.output": kept})
    tolerances = {
        "a.mask.output": Tolerance(0.0, np.array([1e9, tau, 0.5])),
        "output": Tolerance(0.0, np.array([200.0])),
    }
    expected = "a.mask.output" if undecided else ""
    assert undecided_scores(clean, tolerances, FLOAT32) == expected
    tolerances["output"] = Tolerance(0.0, np.array([250.0]))
    assert undecided_scores(clean, tolerances, FLOAT32) == (expected or "output")


def test_what_depends_on_undecided_scores_is_not_judged() -> None:
    """At scale 5 the scores of the second block have errors of thousands in float32."""
    case = ModelCase(SIZES["general"], "ties", 5.0, 0)
    clean, tolerances = reference(case, "float32")
    scores = "transformers.1.attention.mask.output"
    assert tolerances.undecided == scores
    candidate = candidate_trace("torch", "float32", case)
    report = compare_traces(candidate, clean, tolerances, "float32")
    judged = [j.name for j in report.judgements if j.judged]
    assert judged == list(clean.values)[: list(clean.values).index(scores) + 1]
    assert not report.complete and report.ok
    early = "transformers.0.feed_forward.input.output"
    wrong = candidate.values[early] * np.float32(1.001)
    report = compare_traces(
        replace(candidate, values={**candidate.values, early: wrong}), clean, tolerances, "float32"
    )
    assert [j.name for j in report.judgements if not j.ok] == [early]
    short = {**candidate.parameters, WEIGHT: candidate.parameters[WEIGHT][:-1].copy()}
    report = compare_traces(replace(candidate, parameters=short), clean, tolerances, "float32")
    assert [j.name for j in report.judgements if not j.ok] == [WEIGHT]
    with pytest.raises(ValueError, match="every tensor judged is zero"):
        Report([j for j in report.judgements if not j.judged])


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_norms_of_constant_rows_are_judged_by_what_rounding_makes_of_them(backend: str) -> None:
    """Of equal weights every row is: its mean is wrong by one number, which a bias hides not."""
    case = ModelCase((64, 31, 46, 3, 14, 16), "equal weights", 0.0364, 568538505, heads=2)
    clean, tolerances = reference(case, "float32")
    report = compare_traces(candidate_trace(backend, "float32", case), clean, tolerances, "float32")
    assert report.ok and report.complete and report.worst.ratio < 0.3


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_what_follows_a_norm_of_rounding_alone_is_not_judged(backend: str) -> None:
    """Rows of 6,600 in every place, whose float32 neighbours are further apart than eps hides."""
    case = ModelCase((8, 4, 36, 3, 8, 1), "equal weights", 3.8527594354780983, 2370247221, heads=2)
    clean, tolerances = reference(case, "float32")
    rows = "transformers.0.feed_forward_norm.input"
    assert tolerances.undecided == rows
    report = compare_traces(candidate_trace(backend, "float32", case), clean, tolerances, "float32")
    judged = [j.name for j in report.judgements if j.judged]
    assert judged == list(clean.values)[: list(clean.values).index(rows) + 1]
    assert report.ok and not report.complete
    assert reference(case, "float64")[1].undecided == "transformers.2.output"


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_gradient_that_overflows_where_none_is_judged_is_not_accused(backend: str) -> None:
    """Rounding of 1e-7 in a softmax of scores of 1e24 grows in two more blocks beyond float32."""
    case = ModelCase((15, 8, 37, 3, 16, 6), "ties", 9.235951334818571, 1642721741)
    clean, tolerances = reference(case, "float32")
    with np.errstate(all="ignore"):
        candidate = candidate_trace(backend, "float32", case)
    assert not np.isfinite(candidate.gradients["embedding.output"]).all()
    assert np.abs(clean.gradients["embedding.output"]).max() < 1e30
    report = compare_traces(candidate, clean, tolerances, "float32")
    assert report.ok and not report.complete
    # Values and the loss stay finite in every right candidate.
    late = "transformers.2.feed_forward.output.output"
    broken = np.full_like(candidate.values[late], np.nan)
    for wrong, name in (
        (replace(candidate, values={**candidate.values, late: broken}), late),
        (replace(candidate, loss=np.array(np.inf, np.float32)), "loss"),
    ):
        report = compare_traces(wrong, clean, tolerances, "float32")
        assert [j.name for j in report.judgements if not j.ok] == [name]


@pytest.mark.parametrize("kind", [GRADIENT, PARAMETER, "step", FORWARD, LOSS])
def test_overflow_is_held_against_values_even_where_nothing_is_judged(kind: str) -> None:
    nowhere = Tolerance(math.inf, np.array(math.inf))
    verdict = compare("x", kind, np.array(np.inf), np.array(1.0), nowhere, "float64")
    assert verdict.ok is (kind not in (FORWARD, LOSS)) and verdict.judged is not verdict.ok


def in_order(x: np.ndarray) -> np.ndarray:
    """The sum over the last axis, one term after the other, as a loop has it."""
    return np.cumsum(x, axis=-1, dtype=x.dtype)[..., -1:]


def layer_norm_in_order(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    width = x.dtype.type(x.shape[-1])
    centred = x.data - in_order(x.data) / width
    s = np.sqrt(in_order(centred * centred) / width + x.dtype.type(1e-5))
    z = centred / s

    def gradient_fn(g: np.ndarray) -> tuple[np.ndarray, ...]:
        a = g * weight.data
        mean, along = a.mean(axis=-1, keepdims=True), (a * z).mean(axis=-1, keepdims=True)
        rows = (-1, x.shape[-1])
        return (a - mean - z * along) / s, (g * z).reshape(rows).sum(0), g.reshape(rows).sum(0)

    return Tensor.from_op("layer_norm", z * weight.data + bias.data, (x, weight, bias), gradient_fn)


@pytest.mark.parametrize(("width", "seed"), [(256, 2), (512, 2)])
def test_sums_in_order_over_constant_rows_are_no_alarm(
    width: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal terms round alike: the error of such a sum grows with its length, not with the root."""
    config = GPT2Config(11, 16, width, 1, heads=4)
    tokens, targets = np.random.default_rng(seed).integers(0, 11, (2, 2, 16))
    weights = order_one(config, seed)
    for name in weights:
        if "embedding" in name:  # each row of both tables is one number
            weights[name] = np.repeat(weights[name][:, :1], width, axis=1)
    bundle = make_bundle(config, weights, tokens, targets, votes=False)
    monkeypatch.setattr(functional, "layer_norm", layer_norm_in_order)
    report = check_arrays(submission("numpy", bundle, "float32", "parameters"), bundle)
    assert report.ok and report.complete and report.worst.ratio < 0.3, str(report)


def constant(config: GPT2Config, number: float) -> dict[str, np.ndarray]:
    """The weights that training starts from, with one number in all matrices and tables."""
    weights = get_weights(build_model("numpy", config, 0, "float32"))
    return {n: np.full_like(w, number) if w.ndim == 2 else w for n, w in weights.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_where_every_gradient_is_lost_in_rounding_there_is_no_pass(dtype: str) -> None:
    """Of equal weights the logits are equal, and all gradients but one are 0, or should be."""
    config = GPT2Config(65, 16, 32, 2, heads=4)
    tokens, targets = np.random.default_rng(0).integers(0, 65, (2, 4, 16))
    bundle = make_bundle(config, constant(config, 0.02), tokens, targets, votes=False)
    mine = submission("torch", bundle, dtype, "parameters")
    zeros = {k: np.zeros_like(a) if k.startswith("grad/") else a for k, a in mine.items()}
    for arrays in (mine, zeros):
        with pytest.raises(ValueError, match="no gradient that was handed in tells anything in"):
            check_arrays(arrays, bundle)
    assert not check_arrays({**mine, "loss": mine["loss"] + mine["loss"].dtype.type(1)}, bundle).ok
    assert check_arrays({"loss": mine["loss"]}, bundle).ok


@pytest.mark.parametrize(
    ("whole", "rows", "hidden"),
    [
        (5.1, [3.1, 4.1], True),
        (4.9, [3.1, 4.1], False),
        (9.0, [2.9, 9.0], False),  # the first row tells
        (math.inf, [math.inf, math.inf], True),
    ],
)
def test_what_zeros_would_be_taken_for_is_hidden(
    whole: float, rows: list[float], hidden: bool
) -> None:
    reference = np.array([[0.0, 3.0], [4.0, 0.0]])
    tolerance = Tolerance(whole, np.array(rows))
    zeros = compare("x", PARAMETER, np.zeros((2, 2)), reference, tolerance, "float64")
    assert tolerance.hides(reference) is hidden is zeros.ok
    assert Tolerance(0.0, np.zeros(2)).hides(np.zeros((2, 2)))


def test_gradients_that_are_lost_in_rounding_are_named_and_not_counted() -> None:
    config = GPT2Config(11, 16, 256, 1, heads=4)
    tokens, targets = np.random.default_rng(2).integers(0, 11, (2, 2, 16))
    weights: dict[str, Any] = order_one(config, 2)
    for name in weights:
        if "embedding" in name:
            weights[name] = np.repeat(weights[name][:, :1], 256, axis=1)
    bundle = make_bundle(config, weights, tokens, targets, votes=False)
    mine = submission("torch", bundle, "float32", "parameters")
    notes = check_arrays(mine, bundle).notes
    lost = "grad/transformers.0.attention_norm.weight"
    assert f"cannot see: anything at all in {lost}, where rounding is as large" in notes
    assert any(n.startswith("floor: ") and "of the other gradients" in n for n in notes)
    # That is so: zeros pass there, and in no other place.
    for key in mine:
        if key.startswith("grad/"):
            report = check_arrays({**mine, key: np.zeros_like(mine[key])}, bundle)
            assert report.ok is (key == lost), key


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_norm_of_one_number_leaves_nothing_undecided(backend: str) -> None:
    """x - mean(x) is 0 then, however large the error of x is beside eps."""
    config = GPT2Config(7, 6, 1, 1, heads=1)
    tokens, targets = np.random.default_rng(0).integers(0, 7, (2, 2, 5))
    weights = order_one(config, 0)
    for name in weights:
        if "embedding" in name:
            weights[name] += 10.0
    bundle = make_bundle(config, weights, tokens, targets, votes=False)
    report = check_arrays(submission(backend, bundle, "float32"), bundle)
    assert report.ok and report.complete
