"""Whole models: both twins on shared weights, and properties that hold without tolerance.

What holds for the model of the source text and for GPT-2 stands here; what only GPT-2 has, in
test_gpt2.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, target

from gpt_parity.backends import build_model
from gpt_parity.choices import MODELS, ModelName
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.compare import FORWARD, GRADIENT, PARAMETER, Report, compare_traces
from gpt_parity.oracle.complex_step import complex_step_votes
from gpt_parity.oracle.rounding import FLOAT64, bound
from gpt_parity.oracle.trace import trace
from gpt_parity.weights import get_weights, set_weights
from parity_tests.models import (
    BACKENDS,
    SIZES,
    ModelCase,
    build,
    candidate_trace,
    fill,
    judge,
    model_cases,
    named_case,
    reference,
)  # fmt: skip

pytestmark = pytest.mark.reference("other backend")

CONFIGS = {"gpt": GPTConfig(vocab_size=65), "gpt2": GPT2Config(vocab_size=65)}
SOURCE = CONFIGS["gpt"]


def judge_worst(case: ModelCase, backend: str, dtype: str) -> Report:
    """The report, whose worst ratio the nightly profile drives up in search of a false alarm."""
    report = judge(case, backend, dtype)
    label = f"{backend} {dtype}, {case.heads > 0}"
    target(math.log10(max(report.worst.ratio, 1e-3)), label=label)
    return report


def moderate(case: ModelCase, scale: float) -> bool:
    """Whether weights up to `scale` keep scores so small that every tensor must be judged.

    Where all weights of a matrix are equal, the terms of a sum do not cancel, and results are
    larger by the root of its length, which is 4 to 11 in the models drawn.
    """
    return case.scale <= (scale / 10.0 if case.structure == "equal weights" else scale)


@given(model_cases())
def test_torch_float64_agrees_in_values_gradients_and_loss(case: ModelCase) -> None:
    report = judge_worst(case, "torch", "float64")
    assert report.ok, f"{case}: {report.first}"
    assert report.complete or not moderate(case, 1.0), f"{case} is not judged whole"


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("numpy", marks=pytest.mark.reference("a priori bound")),
        pytest.param("torch", marks=pytest.mark.reference("other backend")),
    ],
)
@given(case=model_cases())
def test_float32_agrees_with_the_numpy_twin_in_float64(backend: str, case: ModelCase) -> None:
    report = judge_worst(case, backend, "float32")
    assert report.ok, f"{case}: {report.first}"
    assert report.complete or not moderate(case, 0.1), f"{case} is not judged whole"


@pytest.mark.reference("complex step")
@pytest.mark.parametrize(("model", "tensors"), [("gpt", 36), ("gpt2", 59)])
@pytest.mark.parametrize("structure", ["normal", "one token", "confident and wrong"])
def test_complex_step_confirms_every_gradient_of_both_twins(
    structure: str, model: ModelName, tensors: int
) -> None:
    case = named_case(model, "distinct primes", structure, 0.3, 7)
    weights, tokens, targets = fill(case)
    clean, tolerances = reference(case, "float64")
    votes = complex_step_votes(
        *build("numpy", "complex128", case, weights), tokens, targets, clean,
        candidate_trace("torch", "float64", case), tolerances,
    )  # fmt: skip
    assert len(votes) == tensors
    worst = max(votes, key=lambda v: max(v.closure, v.autograd))
    assert max(worst.closure, worst.autograd) <= 1.0, worst


@pytest.mark.reference("complex step")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_complex_step_meets_its_own_bound_at_the_training_initialisation(
    config: GPTConfig,
) -> None:
    tokens = np.random.default_rng(0).integers(0, 65, (4, 32))
    targets = np.random.default_rng(1).integers(0, 65, (4, 32))
    traces = {}
    for name, package in BACKENDS.items():
        model = build_model(name, config, 42, "float64")
        traces[name] = trace(model, package.GPTLoss(), tokens, targets)
    model = build_model("numpy", config, 42, "complex128")
    loss_fn = BACKENDS["numpy"].GPTLoss()
    votes = complex_step_votes(model, loss_fn, tokens, targets, traces["numpy"], traces["torch"])
    worst = max(votes, key=lambda v: max(v.closure, v.autograd))
    assert max(worst.closure, worst.autograd) <= 1.0, worst


def test_traces_have_the_same_entries_aliases_and_masks() -> None:
    case = ModelCase(SIZES["general"], "normal", 0.3, 0)
    mine, theirs = (candidate_trace(name, "float64", case) for name in BACKENDS)
    block = [
        "attention.mask.input", "attention.mask.output", "attention.softmax.output",
        "attention.output.input", "attention.output.output", "feed_forward.input.output",
        "feed_forward.gelu.output", "feed_forward.output.output",
    ]  # fmt: skip
    expected = [
        "embedding.embedding.output", "embedding.positional_embedding.output", "embedding.output",
        *(f"transformers.{i}.{entry}" for i in range(2) for entry in block),
        "output.output.output",
    ]  # fmt: skip
    assert list(mine.values) == list(theirs.values) == expected
    assert mine.aliases == theirs.aliases
    assert mine.aliases["transformers.1.input"] == "transformers.0.feed_forward.output.output"
    assert list(mine.kept) == list(theirs.kept) == [e for e in expected if "mask.output" in e]
    assert len(mine.parameters) == 16


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("model", MODELS)
def test_the_trace_gradient_is_the_total_derivative_over_all_uses(model: ModelName) -> None:
    """The sum of the embeddings is query, key and value at once, or input of a norm and residual.

    Everything that reaches the positional embeddings passes through it.
    """
    t = candidate_trace("numpy", "float64", named_case(model, "general", "normal", 0.5, 3))
    total = t.gradients["embedding.output"]
    error = np.abs(total.sum(axis=0) - t.parameters["embedding.positional_embedding.weight"])
    assert (error <= bound(np.abs(total).sum(axis=0), FLOAT64)).all()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@given(case=model_cases())
def test_logits_do_not_depend_on_later_tokens(backend: str, case: ModelCase) -> None:
    weights, tokens, _ = fill(case)
    model, _ = build(backend, "float64", case, weights)
    before = model.predict(tokens)
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % case.config.vocab_size
    after = model.predict(changed)
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    # With large weights the last position may attend to another one alone; a norm leaves of one
    # dimension nothing, and of two the signs.
    telling = case.config.embedding_size > (2 if case.heads else 0)
    if case.structure == "normal" and case.scale <= 0.3 and telling:
        assert (before[:, -1] != after[:, -1]).any()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [
    GPTConfig(5, 4, 6, 2, mask_value=0.0), GPT2Config(5, 4, 6, 2, mask_value=0.0, heads=2),
], ids=MODELS)  # fmt: skip
def test_a_fill_of_zero_leaks_later_tokens(config: GPTConfig, backend: str) -> None:
    """The causality test can fail: the source text offers this fill as an exercise."""
    with pytest.raises(ValueError, match="leak"):
        build_model(backend, config)
    model = build_model(backend, config, dtype="float64", allow_leak=True)
    before, after = (model.predict(np.array([[0, 1, 2, last]])) for last in (3, 4))
    assert (before[:, :-1] != after[:, :-1]).any()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@given(case=model_cases("gpt"))
def test_rows_of_unused_tokens_have_no_gradient(backend: str, case: ModelCase) -> None:
    t = candidate_trace(backend, "float64", case)
    unused = np.setdiff1d(np.arange(case.config.vocab_size), fill(case)[1])
    assert not t.parameters["embedding.embedding.weight"][unused].any()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@given(case=model_cases())
def test_backward_twice_gives_twice_the_gradient(backend: str, case: ModelCase) -> None:
    weights, tokens, targets = fill(case)
    model, loss_fn = build(backend, "float64", case, weights)
    once = trace(model, loss_fn, tokens, targets).parameters
    for _ in range(2):
        loss_fn(model(tokens), targets).backward()
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(np.asarray(parameter.grad), 2.0 * once[name], err_msg=name)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=max(1, settings.default.max_examples // 4))  # 1 to 16 passes each
@given(case=model_cases())
def test_a_batch_is_the_mean_of_its_rows(backend: str, case: ModelCase) -> None:
    """Gradient accumulation: the mean over single rows is within the batch's own tolerance."""
    weights, tokens, targets = fill(case)
    model, loss_fn = build(backend, "float64", case, weights)
    clean, tolerances = reference(case, "float64")
    rows = [trace(model, loss_fn, x[None], y[None]) for x, y in zip(tokens, targets, strict=True)]
    for name, tolerance in tolerances.parameters.items():
        mean = sum(r.parameters[name] for r in rows) / len(rows)
        error = np.linalg.norm(mean - clean.parameters[name])
        # Each row's run and the sum of n rows round as well: one tolerance for each side.
        assert error <= 2.0 * tolerance.whole, name


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", MODELS)
def test_dtype_is_kept_in_every_value_gradient_and_moment(
    model: ModelName, backend: str, dtype: str
) -> None:
    case = named_case(model, "general", "normal", 0.3, 1)
    weights, tokens, targets = fill(case)
    twin, loss_fn = build(backend, dtype, case, weights)
    optimizer = BACKENDS[backend].AdamWOptimizer(twin.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        t = trace(twin, loss_fn, tokens, targets)
        loss_fn(twin(tokens), targets).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    arrays = [t.loss, *t.values.values(), *t.gradients.values(), *t.parameters.values()]
    arrays += [*optimizer.state()["exp_avg"], *optimizer.state()["exp_avg_sq"]]
    arrays += [*get_weights(twin).values()]
    assert {a.dtype.name for a in arrays} == {dtype}


@pytest.mark.parametrize(("model", "parameters"), [("gpt", 84_929), ("gpt2", 106_304)])
def test_both_backends_start_from_the_same_numbers(model: ModelName, parameters: int) -> None:
    config = CONFIGS[model]
    a, b = (get_weights(build_model(name, config, 42, "float32")) for name in BACKENDS)
    assert sum(w.size for w in a.values()) == config.parameter_count() == parameters
    assert list(a) == list(b) == list(config.parameter_shapes())
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [GPTConfig(5, 4, 6, 1), GPT2Config(5, 4, 6, 1, heads=2)],
                         ids=MODELS)  # fmt: skip
def test_model_errors_are_the_same_in_both(config: GPTConfig, backend: str) -> None:
    model, loss_fn = build_model(backend, config), BACKENDS[backend].GPTLoss()
    for tokens, error, message in (
        ([[0, 5]], ValueError, "id 5, needed 0 to 4"),
        ([[-1, 0]], ValueError, "id -1, needed 0 to 4"),
        ([[0, 1, 2, 3, 4]], ValueError, "5 positions, needed at most 4"),
        ([0, 1], ValueError, r"shape \(2,\), needed \(B, T\)"),
        (np.zeros((0, 3), int), ValueError, r"shape \(0, 3\)"),
        ([[0.0, 1.0]], TypeError, "float64, needed integers"),
    ):
        with pytest.raises(error, match=message):
            model(np.array(tokens))
    logits = model(np.array([[0, 1]]))
    for targets, error, message in (
        ([[0, 5]], ValueError, "got 5, needed 0 to 4"),
        ([[0, -1]], ValueError, "got -1"),
        ([[0, -100]], ValueError, "got -100"),
        ([[0.0, 1.9999999]], TypeError, "needed integers"),
        ([0, 1], ValueError, "one target per row"),
    ):
        with pytest.raises(error, match=message):
            loss_fn(logits, np.array(targets))


@pytest.mark.parametrize("model", MODELS)
def test_the_first_divergence_is_where_the_mistake_is(model: ModelName) -> None:
    """A weight changed in one block: everything before it agrees, the layer itself is named."""
    case = named_case(model, "general", "normal", 0.5, 11)
    weights, tokens, targets = fill(case)
    twin, loss_fn = build("torch", "float64", case, weights)
    name = "transformers.1.feed_forward.input.weight"
    weights[name] = weights[name] * (1.0 + 1e-6)
    set_weights(twin, weights)
    candidate = trace(twin, loss_fn, tokens, targets)
    report = compare_traces(candidate, *reference(case, "float64"), "float64")
    assert report.first is not None
    assert report.first.kind == FORWARD
    assert report.first.name == "transformers.1.feed_forward.input.output"
    failed = {j.name for j in report.judgements if j.kind == FORWARD and not j.ok}
    assert not any(name.startswith("transformers.0") for name in failed)
    assert {j.kind for j in report.judgements if not j.ok} >= {GRADIENT, PARAMETER}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60)
@given(case=model_cases())
def test_the_next_logits_are_those_of_the_last_position(backend: str, case: ModelCase) -> None:
    """From all tokens at once, and one token after the other with what is known of those before.

    Judged like the logits of a candidate, by the tolerance of the whole tensor's last rows.
    """
    weights, tokens, _ = fill(case)
    model, _ = build(backend, "float64", case, weights)
    clean, tolerances = reference(case, "float64")
    name = list(clean.values)[-1]
    expected, allowed = clean.values[name][:, -1], tolerances.values[name].rows[:, -1]
    past = None
    for length in range(1, tokens.shape[1] + 1):
        logits, past = model.predict_next(tokens[:, :length], past)
        assert [x.shape[-2] for x in past] == [length] * case.config.blocks
    for found in (logits, model.predict_next(tokens)[0]):
        assert found.shape == expected.shape and found.dtype == np.float64
        errors = np.linalg.norm(found - expected, axis=-1)
        assert (errors <= allowed).all(), (case, (errors / allowed).max())


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_logits_take_no_work_for_other_positions(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the output layer and the last block's feed-forward see."""
    model = build_model(backend, SOURCE)
    tokens = np.random.default_rng(0).integers(0, 65, (1, 8))
    rows: dict[str, list[int]] = {"first": [], "last": [], "output": []}
    layers = {"first": model.transformers[0].feed_forward, "output": model.output,
              "last": model.transformers[1].feed_forward}  # fmt: skip
    for name, layer in layers.items():
        monkeypatch.setattr(
            layer, "forward",
            lambda x, name=name, right=layer.forward: rows[name].append(x.shape[1]) or right(x),
        )  # fmt: skip
    _, past = model.predict_next(tokens[:, :7])
    model.predict_next(tokens, past)
    assert rows == {"first": [7, 1], "last": [1, 1], "output": [1, 1]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_logits_refuse_what_the_model_refuses(backend: str) -> None:
    model = build_model(backend, SOURCE)
    with pytest.raises(ValueError, match="tokens: got 33 positions, needed at most 32"):
        model.predict_next(np.zeros((1, 33), int))
    with pytest.raises(TypeError, match="tokens: got dtype float64, needed integers"):
        model.predict_next(np.zeros((1, 3)))
    past = model.predict_next(np.zeros((2, 3), int))[1]
    for tokens in (np.zeros((2, 3), int), np.zeros((2, 5), int), np.zeros((1, 4), int)):
        with pytest.raises(ValueError, match=r"past: got shapes \[\(2, 3, 64\), .* for each of 2"):
            model.predict_next(tokens, past)
    with pytest.raises(ValueError, match=r"past: got shapes \[\], needed"):
        model.predict_next(np.zeros((2, 4), int), [])


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [
    GPTConfig(7, 6, 8, 3, mask_value=-1.0), GPT2Config(7, 6, 8, 3, mask_value=-1.0, heads=2),
], ids=MODELS)  # fmt: skip
def test_a_model_that_leaks_computes_its_past_anew(config: GPTConfig, backend: str) -> None:
    """Its earlier rows attend to the last token, so what was known of them is no longer right."""
    model = build_model(backend, config, dtype="float64", allow_leak=True)
    set_weights(model, {n: 3.0 * w for n, w in get_weights(model).items()})
    tokens = np.array([[1, 4, 2, 6]])
    past = model.predict_next(tokens[:, :3])[1]
    anew = model.predict_next(tokens)[0]
    np.testing.assert_array_equal(model.predict_next(tokens, past)[0], anew)
