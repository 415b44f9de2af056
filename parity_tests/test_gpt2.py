"""What only GPT-2 has: a table in two roles, heads, norms, and a cache of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gpt_parity.backends import build_model
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.compare import PARAMETER, compare
from gpt_parity.oracle.rounding import FLOAT64, bound
from gpt_parity.oracle.tolerance import model_tolerances
from gpt_parity.oracle.trace import trace
from gpt_parity.weights import get_weights, set_weights
from parity_tests.models import (
    BACKENDS,
    GPT2_SIZES,
    ModelCase,
    build,
    candidate_trace,
    fill,
    model_cases,
    named_case,
    reference,
)  # fmt: skip

pytestmark = pytest.mark.reference("other backend")

TABLE = "embedding.embedding.weight"
BABY = GPT2Config(65)


# --- one table in two roles -----------------------------------------------------------------------


def gradients_of_the_roles(case: ModelCase) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the table as embedding and as output, by PyTorch with a copy for each role."""
    weights, tokens, targets = fill(case)
    model, loss_fn = build("torch", "float64", case, weights)
    output = torch.from_numpy(weights[TABLE].copy()).requires_grad_()
    x = model.embedding(tokens)
    for transformer in model.transformers:
        x = transformer(x)
    loss_fn(torch.einsum("bte,ve->btv", model.norm(x), output), targets).backward()
    return model.embedding.embedding.weight.grad.numpy(), output.grad.numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=max(1, settings.default.max_examples // 5))
@given(case=model_cases("gpt2"))
def test_the_gradient_of_the_table_is_the_sum_of_both_roles(backend: str, case: ModelCase) -> None:
    tolerances = reference(case, "float64")[1]
    total = np.add(*gradients_of_the_roles(case))
    found = candidate_trace(backend, "float64", case).parameters[TABLE]
    judgement = compare(TABLE, PARAMETER, found, total, tolerances.parameters[TABLE], "float64")
    assert judgement.ok, (case, judgement)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_no_text_uses_learns_as_output_alone(backend: str) -> None:
    case = named_case("gpt2", "distinct primes", "repeated tokens", 0.5, 4)
    unused = np.setdiff1d(np.arange(case.config.vocab_size), fill(case)[1])
    assert unused.size == 15
    as_embedding, as_output = gradients_of_the_roles(case)
    assert not as_embedding[unused].any() and as_embedding.any()
    found = candidate_trace(backend, "float64", case).parameters[TABLE][unused]
    # The logits' rows round in the sum over all 35 positions.
    assert np.abs(found - as_output[unused]).max() <= bound(np.abs(as_output).sum(), FLOAT64)
    assert (np.abs(found) > 1e-6).all()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_table_is_one_parameter(backend: str) -> None:
    """What is written to it is in both roles, and the optimizer moves it once."""
    model = build_model(backend, BABY, dtype="float64")
    assert list(get_weights(model)) == list(BABY.parameter_shapes())
    tokens = np.arange(8)[None]
    before = model.predict(tokens)
    weights = get_weights(model)
    weights[TABLE][40] = 0.0  # no token here
    set_weights(model, weights)
    after = model.predict(tokens)
    assert not after[..., 40].any() and before[..., 40].all()
    np.testing.assert_array_equal(np.delete(after, 40, -1), np.delete(before, 40, -1))


# --- the order of the tensors ---------------------------------------------------------------------


def test_traces_have_the_same_entries_aliases_and_masks() -> None:
    case = named_case("gpt2", "general", "normal", 0.3, 0)
    mine, theirs = (candidate_trace(name, "float64", case) for name in BACKENDS)
    block = [
        "attention_norm.output", "attention.input.output", "attention.mask.input",
        "attention.mask.output", "attention.softmax.output", "attention.output.input",
        "attention.output.output", "feed_forward_norm.input", "feed_forward_norm.output",
        "feed_forward.input.output", "feed_forward.gelu.output", "feed_forward.output.output",
        "output",
    ]  # fmt: skip
    expected = [
        "embedding.embedding.output", "embedding.positional_embedding.output", "embedding.output",
        *(f"transformers.{i}.{entry}" for i in range(2) for entry in block), "norm.output",
        "output",
    ]  # fmt: skip
    assert list(mine.values) == list(theirs.values) == expected
    assert mine.aliases == theirs.aliases
    assert mine.aliases["norm.input"] == "transformers.1.output"
    assert mine.aliases["transformers.0.attention_norm.input"] == "embedding.output"
    assert list(mine.kept) == list(theirs.kept) == [e for e in expected if "mask.output" in e]
    assert {kept.shape for kept in mine.kept.values()} == {(3, 2, 4, 4)}
    assert list(mine.parameters) == list(theirs.parameters) == list(case.config.parameter_shapes())


# --- heads ----------------------------------------------------------------------------------------


@pytest.mark.reference("by hand")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", GPT2_SIZES)
def test_a_head_sees_its_own_part_of_queries_keys_and_values(sizes: str, backend: str) -> None:
    """Attention of one block, head by head on slices of the projection, in plain loops."""
    case = named_case("gpt2", sizes, "normal", 0.5, 2)
    tokens = fill(case)[1]
    t = candidate_trace(backend, "float64", case)
    qkv = t.values["transformers.0.attention.input.output"]
    width, size = case.config.embedding_size, case.config.embedding_size // case.heads
    expected = np.zeros((*tokens.shape, width))
    m = np.zeros_like(expected)
    for h in range(case.heads):
        q, k, v = (qkv[..., at * width + h * size :][..., :size] for at in range(3))
        for b, i in np.ndindex(tokens.shape):
            scores = [float(q[b, i] @ k[b, j]) / size**0.5 for j in range(i + 1)]
            p = np.exp(np.array(scores) - max(scores))
            p /= p.sum()
            expected[b, i, h * size : (h + 1) * size] = p @ v[b, : i + 1]
            roundings = 2.0 + (i + 1) + 2.0 * size * np.abs(q[b, i]).sum() * np.abs(k[b]).max()
            m[b, i, h * size : (h + 1) * size] = roundings * (p @ np.abs(v[b, : i + 1]))
    found = t.values["transformers.0.attention.output.input"]
    assert found.shape == expected.shape
    assert (np.abs(found - expected) <= bound(m, FLOAT64)).all()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_permuted_heads_give_the_same_logits(backend: str) -> None:
    """Rows of the projection and columns of the output move along with their head."""
    case = named_case("gpt2", "distinct primes", "normal", 0.5, 5)
    weights, tokens, targets = fill(case)
    clean, tolerances = reference(case, "float64")
    width = case.config.embedding_size
    order = np.arange(width).reshape(case.heads, -1)[[2, 0, 1]].reshape(-1)
    for i in range(case.config.blocks):
        name = f"transformers.{i}.attention"
        rows = np.concatenate([at * width + order for at in range(3)])
        for part in ("weight", "bias"):
            weights[f"{name}.input.{part}"] = weights[f"{name}.input.{part}"][rows]
        weights[f"{name}.output.weight"] = weights[f"{name}.output.weight"][:, order]
    found = trace(*build(backend, "float64", case, weights), tokens, targets)
    # Other sums round on both sides.
    error = np.linalg.norm(found.values["output"] - clean.values["output"])
    assert error <= 2.0 * tolerances.values["output"].whole
    moved = np.linalg.norm(
        found.values["transformers.0.attention.output.input"][..., order]
        - clean.values["transformers.0.attention.output.input"]
    )
    assert moved > 1e-3  # the order above was not the identity, nor its own inverse


# --- norms and residuals --------------------------------------------------------------------------


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_common_to_all_columns_is_lost_in_the_norms(backend: str) -> None:
    """One number added to every column of the positions moves the rows, and no logit."""
    case = named_case("gpt2", "distinct primes", "normal", 0.5, 9)
    weights, tokens, targets = fill(case)
    clean, tolerances = reference(case, "float64")
    weights["embedding.positional_embedding.weight"] += 0.5
    moved, allowed = model_tolerances(
        *build("numpy", "float64", case, weights), tokens, targets, FLOAT64
    )
    found = trace(*build(backend, "float64", case, weights), tokens, targets).values
    error = np.linalg.norm(found["output"] - clean.values["output"])
    assert error <= tolerances.values["output"].whole + allowed.values["output"].whole
    assert np.abs(moved.values["transformers.1.output"]
                  - clean.values["transformers.1.output"] - 0.5).max() < 1e-9  # fmt: skip


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_whose_outputs_are_zero_hands_on_what_it_got(backend: str) -> None:
    case = named_case("gpt2", "general", "normal", 0.5, 6)
    weights, tokens, targets = fill(case)
    for name, weight in weights.items():
        if ".output." in name:
            weight[...] = 0.0
    t = trace(*build(backend, "float64", case, weights), tokens, targets)
    np.testing.assert_array_equal(t.values["transformers.1.output"], t.values["embedding.output"])
    np.testing.assert_array_equal(
        t.gradients["transformers.1.output"], t.gradients["embedding.output"]
    )
    assert t.gradients["embedding.output"].any()


# --- the cache ------------------------------------------------------------------------------------


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_logits_take_no_work_for_other_positions(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the projections, the feed-forward layers and the last norm see."""
    model = build_model(backend, BABY)
    tokens = np.random.default_rng(0).integers(0, 65, (1, 8))
    layers = {"projection": model.transformers[1].attention.input, "norm": model.norm,
              "feed-forward": model.transformers[1].feed_forward}  # fmt: skip
    rows: dict[str, list[int]] = {name: [] for name in layers}
    for name, layer in layers.items():
        monkeypatch.setattr(
            layer, "forward",
            lambda x, name=name, right=layer.forward: rows[name].append(x.shape[1]) or right(x),
        )  # fmt: skip
    _, past = model.predict_next(tokens[:, :7])
    model.predict_next(tokens, past)
    assert rows == {"projection": [7, 1], "norm": [1, 1], "feed-forward": [7, 1]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_past_of_other_shapes_is_refused(backend: str) -> None:
    model: Any = build_model(backend, BABY)
    past = model.predict_next(np.zeros((2, 3), int))[1]
    assert [tuple(x.shape) for x in past] == [(2, 2, 4, 3, 16)] * 2
    for tokens in (np.zeros((2, 3), int), np.zeros((2, 5), int), np.zeros((1, 4), int)):
        with pytest.raises(ValueError, match=r"past: got shapes \[\(2, 2, 4, 3, 16\), "):
            model.predict_next(tokens, past)
    with pytest.raises(ValueError, match=r"past: got shapes \[\], needed"):
        model.predict_next(np.zeros((2, 4), int), [])
    with pytest.raises(ValueError, match="tokens: got 33 positions, needed at most 32"):
        model.predict_next(np.zeros((1, 33), int))
