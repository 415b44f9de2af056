"""A whole GPT-2 against independent references, each of which alone must see a planted mistake."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from gpt_parity.backends import build_model
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.complex_step import complex_step_votes
from gpt_parity.tensors import as_array
from gpt_parity.weights import named_parameters, set_weights
from parity_tests.comparers import assert_agree
from parity_tests.planted.gpt2_models import (
    CASES,
    GPT2Case,
    build,
    candidate_trace,
    fill,
    judge,
    reference,
)

other_backend = pytest.mark.reference("other backend")
complex_steps = pytest.mark.reference("complex step")
exact_property = pytest.mark.reference("exact property")
by_hand = pytest.mark.reference("by hand")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
both_backends = pytest.mark.parametrize("backend", BACKENDS)

Arrays = dict[str, np.ndarray]
DISTINCT = CASES[0]


@other_backend
@every_case
def test_both_twins_compute_the_same_values_and_gradients(case: GPT2Case) -> None:
    report = judge(case, "torch", "float64")
    assert report.ok and report.complete, report.first


@complex_steps
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_complex_step_confirms_every_gradient_of_both_twins(case: GPT2Case) -> None:
    _, tokens, targets = fill(case)
    votes = complex_step_votes(
        *build("numpy", "complex128", case), tokens, targets,
        candidate_trace("numpy", "float64", case), candidate_trace("torch", "float64", case),
        reference(case, "float64")[1],
    )  # fmt: skip
    assert len(votes) == 31 + len(case.config.parameter_shapes())
    worst = max(votes, key=lambda v: max(v.closure, v.autograd))
    assert max(worst.closure, worst.autograd) <= 1.0, worst


def normalised(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    """One row after the other, with the variance as the mean square of the distances."""
    rows = x.copy()
    for row in rows.reshape(-1, x.shape[-1]):
        distances = row - math.fsum(row) / len(row)
        variance = math.fsum(distances**2) / len(row)
        row[...] = distances / math.sqrt(variance + 0.00001)
    return rows * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def mapped(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    return np.einsum("...i,oi->...o", x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]


def attended(x: np.ndarray, weights: Arrays, name: str, heads: int) -> np.ndarray:
    """One sequence, head and position after the other, each attending to those up to itself."""
    width = x.shape[-1]
    size = width // heads
    qkv = mapped(x, weights, f"{name}.input")
    context = np.zeros_like(x)
    for b, head, t in itertools.product(range(len(x)), range(heads), range(x.shape[1])):
        own = slice(head * size, (head + 1) * size)
        q, k, v = (qkv[b, :, i * width : (i + 1) * width][:, own] for i in range(3))
        scores = [float(np.dot(q[t], k[s])) / size**0.5 for s in range(t + 1)]
        shares = [math.exp(score - max(scores)) for score in scores]
        for s, share in enumerate(shares):
            context[b, t, own] += share / math.fsum(shares) * v[s]
    return mapped(context, weights, f"{name}.output")


def logits_by_hand(weights: Arrays, tokens: np.ndarray, config: GPT2Config) -> np.ndarray:
    """The logits (B, T, V), by loops and sums over what the paper describes."""
    table = weights["embedding.embedding.weight"]
    x = np.zeros((*tokens.shape, config.embedding_size))
    for b, t in np.ndindex(tokens.shape):
        x[b, t] = table[tokens[b, t]] + weights["embedding.positional_embedding.weight"][t]
    for i in range(config.blocks):
        block = f"transformers.{i}"
        n = normalised(x, weights, f"{block}.attention_norm")
        x = x + attended(n, weights, f"{block}.attention", config.heads)
        n = normalised(x, weights, f"{block}.feed_forward_norm")
        u = mapped(n, weights, f"{block}.feed_forward.input")
        gelu = 0.5 * u * (1.0 + np.tanh((2.0 / math.pi) ** 0.5 * (u + 0.044715 * u * u * u)))
        x = x + mapped(gelu, weights, f"{block}.feed_forward.output")
    return np.einsum("bte,ve->btv", normalised(x, weights, "norm"), table)


@by_hand
@both_backends
@every_case
def test_logits_are_those_of_the_equations(backend: str, case: GPT2Case) -> None:
    weights, tokens, _ = fill(case)
    model, _ = build(backend, "float64", case)
    assert_agree("logits", 1, model.predict(tokens), logits_by_hand(weights, tokens, case.config))


@by_hand
@both_backends
@every_case
def test_the_next_logits_are_those_of_the_equations(backend: str, case: GPT2Case) -> None:
    weights, tokens, _ = fill(case)
    model, _ = build(backend, "float64", case)
    past = None
    for length in range(1, case.length + 1):
        expected = logits_by_hand(weights, tokens[:, :length], case.config)[:, -1]
        logits, past = model.predict_next(tokens[:, :length], past)
        assert_agree("one by one", 1, logits, expected)
        assert_agree("at once", 1, model.predict_next(tokens[:, :length])[0], expected)


@exact_property
@both_backends
@every_case
def test_what_is_cached_one_by_one_is_what_all_tokens_give_at_once(
    backend: str, case: GPT2Case
) -> None:
    """Logits, keys and values after every prefix, and the logits of the pass for training."""
    _, tokens, _ = fill(case)
    model, _ = build(backend, "float64", case)
    whole = model.predict(tokens)
    past = None
    for length in range(1, case.length + 1):
        logits, past = model.predict_next(tokens[:, :length], past)
        at_once, caches = model.predict_next(tokens[:, :length])
        assert_agree("logits", 1, logits, whole[:, length - 1])
        assert_agree("logits at once", 1, at_once, whole[:, length - 1])
        for mine, cache in zip(past, caches, strict=True):
            assert_agree("keys and values", 1, as_array(mine), np.array(as_array(cache)))


@other_backend
@every_case
@pytest.mark.parametrize("leaking", [False, True])
def test_both_twins_cache_the_same_keys_and_values(case: GPT2Case, leaking: bool) -> None:
    weights, tokens, _ = fill(case)
    config = replace(case.config, mask_value=-0.5) if leaking else case.config
    found = {}
    for backend in BACKENDS:
        model = build_model(backend, config, dtype="float64", allow_leak=leaking)
        set_weights(model, weights)
        past, found[backend] = None, []
        for length in range(1, case.length + 1):
            logits, past = model.predict_next(tokens[:, :length], past)
            found[backend] += [logits, *(np.array(as_array(x)) for x in past)]
    for mine, theirs in zip(*found.values(), strict=True):
        assert_agree("logits or cache", 1, mine, theirs)


@exact_property
@both_backends
def test_a_model_that_leaks_computes_its_keys_and_values_anew(backend: str) -> None:
    """Its earlier rows attend to the last token, so what was known of them is no longer right."""
    weights, tokens, _ = fill(DISTINCT)
    config = replace(DISTINCT.config, mask_value=-0.5)
    model = build_model(backend, config, dtype="float64", allow_leak=True)
    set_weights(model, weights)
    past = model.predict_next(tokens[:, :-1])[1]
    anew = model.predict_next(tokens)[0]
    np.testing.assert_array_equal(model.predict_next(tokens, past)[0], anew)
    assert (anew != model.predict_next(tokens[:, ::-1].copy(), past)[0]).any()


@exact_property
@both_backends
def test_logits_do_not_depend_on_later_tokens(backend: str) -> None:
    _, tokens, _ = fill(DISTINCT)
    model, _ = build(backend, "float64", DISTINCT)
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % DISTINCT.config.vocab_size
    before, after = model.predict(tokens), model.predict(changed)
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] != after[:, -1]).any()


@exact_property
@both_backends
@pytest.mark.parametrize("case", (CASES[0], CASES[2]), ids=lambda case: case.name)
def test_heads_may_change_places(backend: str, case: GPT2Case) -> None:
    """With their rows of the projection and their columns of the output, nothing else changes."""
    weights, tokens, _ = fill(case)
    width, heads = case.config.embedding_size, case.config.heads
    order = np.roll(np.arange(width).reshape(heads, -1), 1, axis=0).reshape(-1)
    model, _ = build(backend, "float64", case)
    before = model.predict(tokens)
    for name in (f"transformers.{i}.attention" for i in range(case.config.blocks)):
        rows = np.concatenate([part * width + order for part in range(3)])
        for part in ("weight", "bias"):
            weights[f"{name}.input.{part}"] = weights[f"{name}.input.{part}"][rows]
        weights[f"{name}.output.weight"] = weights[f"{name}.output.weight"][:, order]
    set_weights(model, weights)
    assert_agree("logits", 1, model.predict(tokens), before)


@exact_property
@both_backends
def test_what_the_stream_carries_beside_the_blocks_is_the_embedding(backend: str) -> None:
    """Where blocks add nothing, the logits are those of the normalised embeddings."""
    weights, tokens, _ = fill(DISTINCT)
    for name, weight in weights.items():
        if ".output." in name:
            weight[...] = 0.0
    model, _ = build(backend, "float64", DISTINCT)
    set_weights(model, weights)
    x = weights["embedding.embedding.weight"][tokens]
    x = x + weights["embedding.positional_embedding.weight"][: tokens.shape[1]]
    expected = normalised(x, weights, "norm") @ weights["embedding.embedding.weight"].T
    assert_agree("logits", 1, model.predict(tokens), expected)


@exact_property
@both_backends
def test_the_table_is_one_parameter_in_two_roles(backend: str) -> None:
    model, loss_fn = build(backend, "float64", DISTINCT)
    _, tokens, targets = fill(DISTINCT)
    assert list(model.state_dict()) == list(named_parameters(model))
    assert len({id(p) for p in model.parameters()}) == len(DISTINCT.config.parameter_shapes())
    loss_fn(model(tokens), targets).backward()
    gradient = as_array(model.embedding.embedding.weight.grad)
    # A token that is never read is still a logit of every row.
    unused = np.setdiff1d(np.arange(DISTINCT.config.vocab_size), tokens)
    assert unused.size and gradient[unused].all()
