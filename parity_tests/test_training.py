"""Training: one loop for both twins, modes and flags restored, and 50 steps in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import numpy_impl.functional
import torch_impl.functional
from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.corpus import CharDataset, CharTokenizer
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.rounding import FLOAT64, TABLE, Call, bound
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.training import GPTTrainer, stream
from gpt_parity.weights import get_weights, named_parameters, set_weights
from numpy_impl import Tensor, tape
from parity_tests.comparers import assert_agree

pytestmark = pytest.mark.reference("by hand")

TEXT = (
    "The tape remembers what was computed, and walks it backwards; each closure returns its "
    "part.\nWho adds them up twice is wrong by two, who forgets one is wrong by it.\n"
) * 4
VOCABULARY = "".join(sorted(set(TEXT)))
SEEDS = (0, 1, 2, 3, 4, 42, 1234, 2**32 - 1)


def build(
    backend: str, dtype: str = "float64", context: int = 8, batch: int = 4, **options: Any
) -> tuple[GPTTrainer, CharDataset]:
    implementation = load_backend(backend)
    dataset = CharDataset(TEXT, context_size=context, batch_size=batch, **options)
    config = GPTConfig(dataset.vocab_size, context, embedding_size=12, blocks=2)
    model = build_model(backend, config, seed=42, dtype=dtype)
    optimizer = implementation.AdamWOptimizer(model.parameters(), lr=1e-2)
    return GPTTrainer(model, implementation.GPTLoss(), optimizer), dataset


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_gradient_clip_and_adamw(backend: str) -> None:
    """The first AdamW step from moments 0, by hand from the gradient of a second model."""
    trainer, dataset = build(backend)
    other, _ = build(backend)
    tokens, targets = dataset.batch("train", 0)
    loss = other.loss_fn(other.model(tokens), targets)
    loss.backward()
    parameters = named_parameters(other.model)
    gradients = {n: np.asarray(p.grad).copy() for n, p in parameters.items()}
    before = get_weights(trainer.model)
    result = trainer.train_step(tokens, targets)
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
    assert result.loss == loss.item() and result.lr == 1e-2
    assert_agree("norm", 1, result.grad_norm, norm)
    for name, after in get_weights(trainer.model).items():
        g = gradients[name] * min(1.0, 1.0 / (norm + 1e-6))
        decayed = before[name] * (1.0 - 1e-2 * 0.01) if g.ndim >= 2 else before[name]
        assert_agree(name, 1, after, decayed - 1e-2 * g / (np.abs(g) + 1e-8))
    assert trainer.steps == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_train_counts_steps_and_rates_from_zero(backend: str) -> None:
    trainer, dataset = build(backend)
    asked: list[int] = []
    seen: list[tuple[int, float]] = []

    def scheduler(step: int) -> float:
        asked.append(step)
        return 1e-3 * (step + 1)

    count = dataset.batch_count("train")
    trainer.train(dataset, 2, scheduler, on_step=lambda step, r: seen.append((step, r.lr)))
    assert asked == list(range(2 * count))
    assert seen == [(step, 1e-3 * step) for step in range(1, 2 * count + 1)]
    assert len(trainer.train(dataset, 2, scheduler, max_steps=3)) == 3
    assert asked[2 * count :] == [0, 1, 2]  # each call starts the schedule anew
    assert trainer.steps == 2 * count + 3
    for options, message in (({"epochs": 0}, "epochs is 0"), ({"max_steps": 0}, "max_steps is 0")):
        with pytest.raises(ValueError, match=message):
            trainer.train(dataset, **{"epochs": 1, "scheduler": scheduler, **options})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_test_is_the_mean_over_tokens_with_the_likeliest_ids(backend: str, drop_last: bool) -> None:
    """A shorter last batch counts by its tokens, as if all windows had been one batch."""
    trainer, dataset = build(backend, batch=4, drop_last=drop_last)
    tokens, targets = (np.concatenate(part) for part in zip(*dataset.batches("test"), strict=True))
    assert (len(tokens) % 4 > 0) is (not drop_last)
    predictions, loss = trainer.test(dataset)
    logits = trainer.model.predict(tokens)
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    whole = -np.take_along_axis(log_p, targets[..., None], -1).mean()
    assert_agree("loss", 1, loss, whole)
    assert predictions.dtype == np.int64 and (predictions == logits.argmax(-1)).all()
    if not drop_last:
        losses = [trainer.loss_fn(trainer.model(x), y).item() for x, y in dataset.batches("test")]
        assert abs(np.mean(losses) - whole) > 1e-6 * whole  # the equal-weight mean is another


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_train_is_its_steps_with_the_rates_of_the_schedule(backend: str) -> None:
    """To the bit, and in a second call as in the first."""
    (trainer, dataset), (other, _) = build(backend), build(backend)
    scheduler = WarmupCosineScheduler(1e-2, 4, 2, 1e-3)
    for _ in range(2):
        results = trainer.train(dataset, 1, scheduler, max_steps=3)
        for t, found in enumerate(results):
            other.optimizer.lr = scheduler(t)
            assert found == other.train_step(*dataset.batch("train", t))
        assert len(results) == 3
    ours, theirs = get_weights(trainer.model), get_weights(other.model)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [4, 6])
def test_test_loss_against_cross_entropy_of_everything_at_once(backend: str, batch: int) -> None:
    """The last batch is shorter than the others; PyTorch's own mean over the same logits."""
    trainer, dataset = build(backend, batch=batch, drop_last=False)
    # Batch by batch, so that the logits are those of `test` to the bit.
    parts = [(trainer.model.predict(x), y) for x, y in dataset.batches("test")]
    assert len(parts) > 1 and len(parts[-1][1]) < batch
    logits, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
    whole = torch.nn.functional.cross_entropy(
        torch.tensor(logits).flatten(0, 1), torch.tensor(targets).flatten()
    ).item()
    m = TABLE["cross_entropy"].forward(Call((logits, targets), np.array(whole), FLOAT64, {}))
    assert abs(trainer.test(dataset)[1] - whole) <= 2.0 * bound(m, FLOAT64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_batch_count_by_their_tokens(backend: str) -> None:
    """Losses 2.0 (one row) and 1.0 (three rows): whole 1.25, db = 0.690256598312265."""
    if backend == "numpy":
        cross_entropy: Callable[..., Any] = numpy_impl.functional.cross_entropy
        bias: Any = Tensor(np.zeros(2))
        tensor: Callable[[Any], Any] = Tensor
    else:
        cross_entropy = torch_impl.functional.cross_entropy
        bias, tensor = torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.tensor
    rows = [[1.854586542131141], [0.541324854612918] * 3]
    parts = [np.array([[0.0, z] for z in part]) for part in rows]
    total = 0.0
    for part in (np.concatenate(parts), *parts):
        bias.grad = None if part is parts[0] else bias.grad
        labels = np.zeros((1, len(part)), int)
        loss = cross_entropy(tensor(part[None]) + bias, labels)
        if len(part) == 4:
            loss.backward()
            assert math.isclose(loss.item(), 1.25, rel_tol=1e-12)
            assert math.isclose(bias.grad[1], 0.690256598312265, rel_tol=1e-12)
        else:
            loss = loss * (len(part) / 4)
            loss.backward()
            total += loss.item()
    assert math.isclose(total, 1.25, rel_tol=1e-12)
    assert math.isclose(bias.grad[1], 0.690256598312265, rel_tol=1e-12)


def modes(model: Any) -> list[bool]:
    return [layer.training for _, layer in model.named_modules()]


def mixed_modes(model: Any) -> list[bool]:
    """Every third layer in evaluation mode, so that restoring one common mode shows."""
    for i, (_, layer) in enumerate(model.named_modules()):
        layer.training = i % 3 != 0
    return modes(model)


class Broken(Exception):
    pass


def break_calls_from(trainer: GPTTrainer, count: int) -> None:
    """Let the loss raise from the `count`-th call on."""
    original, calls = trainer.loss_fn, iter(range(1, 1000))

    def loss_fn(logits: Any, targets: Any) -> Any:
        if next(calls) >= count:
            raise Broken
        return original(logits, targets)

    trainer.loss_fn = loss_fn


def flags() -> tuple[bool, bool, dict[str, str]]:
    return tape.is_grad_enabled(), torch.is_grad_enabled(), np.geterr()


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("failing", [False, True])
def test_modes_and_flags_are_restored(backend: str, failing: bool) -> None:
    trainer, dataset = build(backend)
    for start in (lambda m: m.train(), lambda m: m.eval(), mixed_modes):
        start(trainer.model)
        before, flags_before = modes(trainer.model), flags()
        if failing:
            break_calls_from(trainer, 2)
        with suppress(Broken):
            trainer.test(dataset)
            assert not failing
        assert (modes(trainer.model), flags()) == (before, flags_before)
        with suppress(Broken):
            trainer.train(dataset, 1, lambda step: 1e-3, max_steps=3)
            assert not failing
        assert (modes(trainer.model), flags()) == (before, flags_before)
        with suppress(ValueError):
            trainer.generate(dataset, "#" if failing else "Who", 3)
            assert not failing
        assert (modes(trainer.model), flags()) == (before, flags_before)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_phase_has_its_own_mode_and_records_no_graph(backend: str) -> None:
    trainer, dataset = build(backend)
    mixed_modes(trainer.model)
    seen: dict[str, list[Any]] = {"modes": [], "graph": []}
    forward = trainer.model.output.forward

    def watched(x: Any) -> Any:
        logits = forward(x)
        seen["modes"].append(set(modes(trainer.model)))
        seen["graph"].append(logits.requires_grad)
        return logits

    trainer.model.output.forward = watched
    trainer.train(dataset, 1, lambda step: 1e-3, max_steps=1)
    trainer.test(dataset)
    trainer.generate(dataset, "Who", 2)
    tests = dataset.batch_count("test")
    assert seen["modes"] == [{True}] + [{False}] * (tests + 2)
    assert seen["graph"] == [True] + [False] * (tests + 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_depends_on_its_mode_by_hand(backend: str) -> None:
    """An output of which a bias (ln 3, 0) alone is left doubles its logits in training mode.

    In the text there is one character, id 0. Training: logits (ln 9, 0), loss ln(10/9) =
    0.10536051565782628. Testing: logits (ln 3, 0), loss ln(4/3) = 0.28768207245178093. A rate of
    0 leaves the weights as they are.
    """
    implementation = load_backend(backend)
    dataset = CharDataset("a" * 90, context_size=4, batch_size=2, tokenizer=CharTokenizer("ab"))
    model = build_model(backend, GPTConfig(2, 4, 3, 1), dtype="float64")
    weights = {name: np.zeros_like(array) for name, array in get_weights(model).items()}
    set_weights(model, weights | {"output.output.bias": np.array([math.log(3.0), 0.0])})
    optimizer = implementation.AdamWOptimizer(model.parameters())
    trainer = GPTTrainer(model, implementation.GPTLoss(), optimizer)
    layer, forward = model.output, model.output.forward
    layer.forward = lambda x: forward(x) * (2.0 if layer.training else 1.0)
    model.eval()
    results = trainer.train(dataset, 1, lambda step: 0.0, max_steps=3)
    np.testing.assert_allclose([r.loss for r in results], [0.10536051565782628] * 3, rtol=1e-14)
    model.train()
    np.testing.assert_allclose(trainer.test(dataset)[1], 0.28768207245178093, rtol=1e-14)


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_changes_nothing_between_its_characters(backend: str) -> None:
    trainer, dataset = build(backend)
    mixed_modes(trainer.model)
    before = modes(trainer.model), flags()
    characters = trainer.stream(dataset, "Who", 5)
    assert (modes(trainer.model), flags()) == before
    for _ in range(2):
        next(characters)
        assert (modes(trainer.model), flags()) == before
        trainer.train_step(*dataset.batch("train", 0))  # works in the middle of a stream
    characters.close()
    assert (modes(trainer.model), flags()) == before


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["embedding.embedding.weight", "output.output.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_step_that_is_not_finite_changes_nothing(backend: str, where: str, value: float) -> None:
    """1e200 is finite, but its square is not: the loss or the norm overflows."""
    trainer, dataset = build(backend)
    trainer.train(dataset, 1, lambda step: 1e-3, max_steps=2)
    parameter = named_parameters(trainer.model)[where]
    with torch.no_grad():
        parameter.data[...] = value
    weights, state = get_weights(trainer.model), trainer.optimizer.state()
    if value == 1e200 and where == "output.output.bias":  # equal logits: a fine loss
        assert math.isfinite(trainer.train_step(*dataset.batch("train", 2)).loss)
        return
    part = "loss: got nan" if math.isnan(value) else "(loss|gradient norm): got"
    with pytest.raises(FloatingPointError, match=f"training step 3: {part}"):
        trainer.train_step(*dataset.batch("train", 2))
    assert trainer.steps == 2
    after, after_state = get_weights(trainer.model), trainer.optimizer.state()
    assert all(after[n].tobytes() == weights[n].tobytes() for n in weights)
    assert after_state["steps"] == state["steps"]
    for moment in ("exp_avg", "exp_avg_sq"):
        for a, b in zip(after_state[moment], state[moment], strict=True):
            assert a.tobytes() == b.tobytes()
    assert all(p.grad is None for p in trainer.model.parameters())
    with pytest.raises(FloatingPointError, match="test batch 1: loss: got"):
        trainer.test(dataset)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_overflow_never_reach_the_weights(backend: str) -> None:
    """A finite loss with a norm beyond float32: squares of gradients overflow."""
    trainer, dataset = build(backend, dtype="float32")
    trainer.loss_fn = Scaled(trainer.loss_fn, 1e25)
    weights = get_weights(trainer.model)
    with pytest.raises(FloatingPointError, match="training step 1: gradient norm: got"):
        trainer.train_step(*dataset.batch("train", 0))
    assert all((get_weights(trainer.model)[n] == weights[n]).all() for n in weights)
    assert all(p.grad is None for p in trainer.model.parameters())


class Scaled:
    def __init__(self, loss_fn: Any, factor: float) -> None:
        self.loss_fn, self.factor = loss_fn, factor

    def __call__(self, logits: Any, targets: Any) -> Any:
        return self.loss_fn(logits, targets) * self.factor


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_the_prompt_is_kept_whole_and_cropped_for_the_model(backend: str, length: int) -> None:
    trainer, dataset = build(backend)
    prompt = TEXT[3 : 3 + length]
    text = trainer.generate(dataset, prompt, 5, temperature=0.0)
    assert text.startswith(prompt) and len(text) == length + 5
    for place in range(length, length + 5):
        ids = dataset.tokenizer.encode(text[max(0, place - 8) : place])
        best = trainer.model.predict(ids[None])[0, -1].argmax()
        assert text[place] == dataset.tokenizer.vocabulary[best]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_itself_refuses_more_than_its_context(backend: str) -> None:
    trainer, _ = build(backend)
    with pytest.raises(ValueError, match="got 9 positions, needed at most 8"):
        trainer.model(np.zeros((1, 9), int))


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_uniform_number_per_character(backend: str) -> None:
    """A stream's text is a prefix of a longer one's, and is drawn as RandomState draws."""
    trainer, dataset = build(backend)
    long = trainer.generate(dataset, "Who", 12, seed=5)
    assert trainer.generate(dataset.tokenizer, "Who", 4, seed=5) == long[:7]
    assert trainer.generate(dataset, "Who", 0) == "Who"
    uniforms, ids = np.random.RandomState(5), list(dataset.tokenizer.encode("Who"))
    for _ in range(12):
        logits = trainer.model.predict(np.array([ids[-8:]]))[0, -1]
        p = np.exp(logits - logits.max())
        ids.append(int(np.argmax(np.cumsum(p) / p.sum() > uniforms.random_sample())))
    assert dataset.tokenizer.decode(ids) == long
    assert long != trainer.generate(dataset, "Who", 12, seed=6)


@pytest.mark.reference("other backend")
def test_the_same_text_on_both_backends_from_one_checkpoint(tmp_path: Any) -> None:
    trainer, dataset = build("numpy")
    trainer.train(dataset, 2, lambda step: 1e-2)
    save_checkpoint(
        tmp_path / "c", trainer.model, vocabulary=VOCABULARY,
        config=GPTConfig(len(VOCABULARY), 8, 12, 2),
    )  # fmt: skip
    models = [load_checkpoint(tmp_path / "c").build_model(backend) for backend in BACKENDS]
    for seed in SEEDS:
        for options in ({}, {"temperature": 0.7, "top_k": 5}):
            texts = {
                "".join(stream(model, dataset.tokenizer, "tape ", 30, seed=seed, **options))
                for model in models
            }
            assert len(texts) == 1, f"seed {seed}, {options}: {texts}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_arguments_of_generate_are_judged_at_the_call(backend: str) -> None:
    trainer, dataset = build(backend)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "Who#é"}, "prompt: text holds '#', 'é'"),
        ({"steps": -1}, "steps is -1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"text": CharTokenizer("Who")}, "vocabulary has 3 characters"),
    ]
    for change, message in cases:
        arguments = {"text": dataset, "prompt": "Who", "steps": 2, **change}
        for method in (trainer.generate, trainer.stream):
            with pytest.raises(ValueError, match=message) as caught:
                method(**arguments)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [-100, -1, 99])
def test_ids_and_labels_out_of_range_change_nothing(backend: str, bad: int) -> None:
    trainer, dataset = build(backend)
    weights = get_weights(trainer.model)
    tokens, targets = dataset.batch("train", 0)
    for array in (tokens, targets):
        kept = array[0, 0]
        array[0, 0] = bad
        with pytest.raises(ValueError, match=str(bad)):
            trainer.train_step(tokens, targets)
        array[0, 0] = kept
    assert all((get_weights(trainer.model)[n] == weights[n]).all() for n in weights)


def test_a_trainer_needs_a_model() -> None:
    with pytest.raises(TypeError, match="model is a str"):
        GPTTrainer("gpt", None, None)


def test_stream_is_an_iterator() -> None:
    trainer, dataset = build("numpy")
    assert isinstance(trainer.stream(dataset, "Who", 1), Iterator)
