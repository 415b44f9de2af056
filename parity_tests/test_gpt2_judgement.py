"""What a GPT-2 alone needs of a judge: thirds of a bias, masks of any scores, hints of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import torch_impl.gpt2
from gpt_parity.backends import build_model
from gpt_parity.html.heat import errors, heat_map
from gpt_parity.oracle import cmp
from gpt_parity.oracle.bundle import Bundle, make_bundle, pass_arrays
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.lockstep import Runner, judge_step, noisy_step, step_tolerances
from gpt_parity.oracle.noise import MonteCarloArithmetic
from gpt_parity.oracle.rounding import FLOAT32, FLOAT64
from gpt_parity.oracle.subject import export, order_one
from gpt_parity.oracle.submission import with_fill
from gpt_parity.oracle.trace import trace
from gpt_parity.oracle.verdict import check_arrays
from gpt_parity.oracle_config import PRESETS, ExportConfig
from gpt_parity.weights import set_weights
from numpy_impl.loss import GPTLoss
from parity_tests.candidates import submission

CONFIG = PRESETS["gpt2-tiny"].model
BIAS = "transformers.0.attention.input.bias"
STEP_BIAS = f"step/1/weight/{BIAS}"
THIRDS = {"queries": 0, "values": 2}
MASK = "value/transformers.0.attention.mask"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return export(ExportConfig(out=Path("ref"), preset="gpt2-tiny", steps=1))


def wrong_in_a_third(bundle: Bundle, third: str) -> dict[str, np.ndarray]:
    """A step that moves one third of the bias by a twentieth more."""
    mine = submission("torch", bundle, "float32")
    width = CONFIG.embedding_size
    part = slice(THIRDS[third] * width, (THIRDS[third] + 1) * width)
    start = bundle.weights[BIAS].astype(np.float32)
    mine[STEP_BIAS][part] += np.float32(0.05) * (mine[STEP_BIAS] - start)[part]
    return mine


# --- Thirds of the bias whose middle one has no gradient


def test_the_keys_bias_has_no_gradient_but_what_rounding_leaves(bundle: Bundle) -> None:
    """A softmax does not see what is added to a whole row, which the same bias of all keys is."""
    queries, keys, values = np.abs(bundle.parameters[BIAS].reshape(3, -1)).max(axis=1)
    assert keys < 1e-14 * min(queries, values)


@pytest.mark.parametrize("third", THIRDS)
def test_noise_at_the_keys_hides_no_other_third_in_a_step(bundle: Bundle, third: str) -> None:
    report = check_arrays(wrong_in_a_third(bundle, third), bundle)
    (wrong,) = (j for j in report.judgements if not j.ok)
    assert wrong.name == STEP_BIAS and wrong.row == (THIRDS[third],)
    assert f"in row ({THIRDS[third]},)" in wrong.describe()
    assert not any(n.startswith("cannot see") and BIAS in n for n in report.notes)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_right_steps_pass_by_thirds(bundle: Bundle, backend: str, dtype: str) -> None:
    report = check_arrays(submission(backend, bundle, dtype), bundle)
    assert report.ok and report.worst.ratio < 0.6
    assert not any(BIAS in note for note in report.notes)


def test_training_in_lockstep_judges_thirds_too(bundle: Bundle) -> None:
    setting = bundle.setting(1)
    clean, candidate = (Runner("numpy", dtype, setting) for dtype in ("float64", "float32"))
    batch, rate = setting.batches[0], setting.rates[0]
    noisy = [
        noisy_step(
            Runner("numpy", "float64", setting), batch, rate,
            MonteCarloArithmetic(FLOAT32, np.random.default_rng(k)),
        )
        for k in range(3)
    ]  # fmt: skip
    reference = clean.state(clean.step(batch, rate))
    state = candidate.state(candidate.step(batch, rate))
    tolerances = step_tolerances(reference, noisy, FLOAT32)
    assert all(j.ok for j in judge_step(state, reference, tolerances, FLOAT32))
    key = f"weights {BIAS}"
    start = bundle.weights[BIAS].astype(np.float32)
    values = slice(2 * CONFIG.embedding_size, None)
    state[key][values] += np.float32(0.05) * (state[key] - start)[values]
    wrong = [j for j in judge_step(state, reference, tolerances, FLOAT32) if not j.ok]
    assert [(j.name, j.row) for j in wrong] == [(BIAS, (2,))]


def test_bundles_with_and_without_thirds_can_be_read(bundle: Bundle, tmp_path: Path) -> None:
    save_bundle(tmp_path / "new", bundle)
    again = load_bundle(tmp_path / "new")
    mine = wrong_in_a_third(bundle, "values")
    assert again.tolerances["float32"][STEP_BIAS].rows.shape == (3,)
    assert not check_arrays(mine, again).ok
    # As it was written before: a whole tensor alone.
    old = {
        dtype: {
            k: replace(t, rows=np.array(t.whole)) if k.endswith("attention.input.bias") else t
            for k, t in tolerances.items()
        }
        for dtype, tolerances in bundle.tolerances.items()
    }
    save_bundle(tmp_path / "old", replace(bundle, tolerances=old))
    assert load_bundle(tmp_path / "old").tolerances["float32"][STEP_BIAS].rows.shape == ()
    assert check_arrays(submission("numpy", bundle, "float32"), load_bundle(tmp_path / "old")).ok


def test_a_picture_of_the_bias_has_three_rows(bundle: Bundle) -> None:
    report = check_arrays(wrong_in_a_third(bundle, "values"), bundle, keep=True)
    judgement = next(j for j in report.judgements if not j.ok)
    pair = report.pairs[judgement.kind, judgement.name]
    found = errors(pair)
    assert found is not None and found.elements.shape == (3, CONFIG.embedding_size)
    assert found.rows.argmax() == 2 and found.rows[2] == pytest.approx(judgement.ratio)
    assert "Largest row" in heat_map("m", judgement, pair)


# --- Fills of a mask


@pytest.fixture(scope="module")
def negative() -> Bundle:
    """A GPT-2 all of whose scores are far below zero: queries and keys point apart."""
    weights, width = order_one(CONFIG, 0), CONFIG.embedding_size
    for block in range(CONFIG.blocks):
        bias = weights[f"transformers.{block}.attention.input.bias"]
        bias[:width], bias[width : 2 * width] = 30.0, -30.0
    tokens, targets = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 2, 6))
    return make_bundle(CONFIG, weights, tokens, targets, votes=False)


def masked(bundle: Bundle, fill: float, dtype: str) -> np.ndarray:
    scores = bundle.arrays[f"{MASK}.input"]
    keep = np.tri(*scores.shape[-2:], dtype=bool)
    return np.where(keep, scores, fill).astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_fill_above_the_scores_is_wrong_however_low(negative: Bundle, dtype: str) -> None:
    least = -104.0 if dtype == "float32" else -746.0
    scores = negative.arrays[f"{MASK}.input"]
    lowest = float(scores.min())
    assert scores.max() < least  # low enough beside scores of 0, and yet the future wins
    for hidden, ok in ((least, False), (lowest + least - 1.0, True), (-np.inf, True)):
        mine = {f"{MASK}.output": masked(negative, hidden, dtype)}
        mine["loss"] = negative.arrays["loss"].astype(dtype)
        mine["grad/norm.bias"] = negative.arrays["grad/norm.bias"].astype(dtype)
        report = check_arrays(mine, negative)
        assert report.ok is ok, hidden
        assert cmp(f"{MASK}.output", mine[f"{MASK}.output"], negative).ok is ok
        if not ok:
            assert report.first is not None and report.first.name == f"{MASK}.output"
            assert report.first.reason == "masked positions differ"


def test_a_fill_that_leaks_beside_one_row_alone_is_wrong(negative: Bundle) -> None:
    """Each row has its own largest score: a fill may serve all others."""
    scores = negative.arrays[f"{MASK}.input"]
    keep = np.tri(*scores.shape[-2:], dtype=bool)
    mine = np.where(keep, scores, -np.inf).astype(np.float32)
    assert cmp(f"{MASK}.output", mine, negative).ok
    mine[0, 0, 0, 1] = mine[0, 0, 0, 0] - 50.0
    assert not cmp(f"{MASK}.output", mine, negative).ok


# --- Hints


def _first_sum(block: torch_impl.gpt2.GPT2Transformer, x: object) -> object:
    x = block.attention(block.attention_norm(x))
    return x + block.feed_forward(block.feed_forward_norm(x))


def _second_sum(block: torch_impl.gpt2.GPT2Transformer, x: object) -> object:
    x = x + block.attention(block.attention_norm(x))
    return block.feed_forward(block.feed_forward_norm(x))


def _no_norm(model: torch_impl.gpt2.GPT2, x: object) -> object:
    return torch_impl.gpt2.linear(x + 0.0 * model.norm(x), model.embedding.embedding.weight)


FORGOTTEN = {
    "first": ("GPT2Transformer.forward", _first_sum,
              "residual: x is not added to the branch, at the first sum of all blocks"),
    "second": ("GPT2Transformer.forward", _second_sum,
               "residual: x is not added to the branch, at the second sum of all blocks"),
    "norm": ("GPT2.logits", _no_norm, "layer norm: there is none, x goes on as it is, at norm"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("what", FORGOTTEN)
def test_gradients_betray_what_was_forgotten_in_every_block(
    what: str, dtype: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, forward, hint = FORGOTTEN[what]
    monkeypatch.setattr(f"torch_impl.gpt2.{place}", forward)
    report = check_arrays(submission("torch", bundle, dtype, "parameters"), bundle)
    assert len(report.hints) == 1 and report.hints[0].startswith(f"{hint} (explains all"), report


@pytest.mark.parametrize("largest", [-100.0, 0.0, 100.0])
def test_a_fill_serves_where_it_is_far_below_scores_and_zero(largest: float) -> None:
    """exp(-746) is 0 in float64, exp(-745) is not: beside the largest score and beside 0."""
    kept = np.tri(2, dtype=bool)
    reference = np.where(kept, largest, -1e9)
    for below, serves in ((746.0, True), (744.0, False)):
        mine = np.where(kept, largest, min(largest, 0.0) - below)
        judged = with_fill(mine, kept, reference, FLOAT64)
        assert np.array_equal(judged, reference if serves else mine), below


def test_scores_beside_the_fill_are_no_reference() -> None:
    """At weights of thousands the reference itself would read later tokens."""
    weights = {n: 1000.0 * w for n, w in order_one(CONFIG, 1).items()}
    tokens, targets = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 2, 6))
    with pytest.raises(ValueError, match=r"leave later tokens a weight, beside a fill of -1e\+09"):
        make_bundle(CONFIG, weights, tokens, targets, votes=False)


def test_a_fill_that_cannot_be_told_is_not_named() -> None:
    """In a saturated softmax a fill of -1e4 does what 0 does."""
    weights = {n: np.float32(100.0) * w for n, w in order_one(CONFIG, 1).items()}
    tokens, targets = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 2, 6))
    bundle = make_bundle(CONFIG, weights, tokens, targets, votes=False)
    leaking = build_model("numpy", replace(CONFIG, mask_value=-1e4), dtype="float64",
                          allow_leak=True)  # fmt: skip
    set_weights(leaking, bundle.weights)
    found = pass_arrays(trace(leaking, GPTLoss(), tokens, targets))
    ends = ("value/output", "loss", *(f"grad/{n}" for n in bundle.weights))
    report = check_arrays({key: found[key] for key in ends}, bundle)
    said = [hint for hint in report.hints if hint.startswith("mask: filled with")]
    assert said and all("a number that leaves the future a weight" in hint for hint in said)


@pytest.mark.parametrize(("vocab_size", "named"), [(2, False), (3, True)])
def test_of_two_tokens_every_bias_gradient_is_a_multiple(vocab_size: int, named: bool) -> None:
    config = replace(CONFIG, vocab_size=vocab_size)
    tokens, targets = np.random.default_rng(5).integers(0, vocab_size, (2, 2, 6))
    bundle = make_bundle(config, order_one(config, 0), tokens, targets, votes=False)
    report = check_arrays({"grad/norm.bias": 0.7475 * bundle.arrays["grad/norm.bias"]}, bundle)
    assert not report.ok
    assert any("a constant factor of 0.7475" in hint for hint in report.hints) is named
