"""Reported faults of exchanged weights and of checkpoints.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import backend_of, build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPTConfig
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.tensors import as_array
from gpt_parity.training import GPTTrainer, StepResult
from gpt_parity.weights import copy_weights, get_weights, set_weights
from parity_tests.comparers import assert_same_bits
from parity_tests.registry import NUMPY, TORCH, Twin
from parity_tests.reports.common import (
    both_twins,
    f64,
    optimizer_of,
    set_grad,
    trainer_of,
    values,
)

pytestmark = pytest.mark.reference("by hand")

CONFIG = GPTConfig(vocab_size=5, context_size=4, embedding_size=8, blocks=1)
VOCABULARY = "abcde"
SQUARE = "transformers.0.attention.output.weight"
WIDE = "transformers.0.feed_forward.input.weight"  # (32, 8)
EMBEDDING = "embedding.embedding.weight"  # (5, 8)


@both_twins
def test_B58_a_linear_weight_is_out_by_in(twin: Twin) -> None:
    """The report's W = [[1, 2], [3, 4]] is (in, out), so it is transposed once, on the way in."""
    layer = twin.layers.Linear(2, 2, np.random.RandomState(0), twin.dtypes["float64"])
    weight = f64([[1, 2], [3, 4]]).T
    if twin is NUMPY:
        layer.load_state_dict({"weight": weight, "bias": np.zeros(2)})
    else:
        layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.zeros(2)})
    np.testing.assert_array_equal(values(twin, layer, f64([1, 0])), [1, 2])


def test_B58_nothing_is_transposed_on_the_way_between_backends() -> None:
    models = {backend: build_model(backend, CONFIG, seed=s) for s, backend in enumerate(BACKENDS)}
    before = get_weights(models["numpy"])
    assert before[EMBEDDING].shape == (5, 8) and before[WIDE].shape == (32, 8)
    copy_weights(models["numpy"], models["torch"])
    x = np.random.default_rng(0).standard_normal((1, 8)).astype(np.float32)
    numpy_output, torch_output = (m.transformers[0].attention.output for m in models.values())
    y = values(NUMPY, numpy_output, x)
    np.testing.assert_allclose(values(TORCH, torch_output, x), y, rtol=1e-5)
    assert np.abs(y - x @ before[SQUARE]).max() > 0.1 * np.abs(y).max()  # transposed: no such thing
    set_weights(models["numpy"], {n: np.zeros_like(w) for n, w in before.items()})
    copy_weights(models["torch"], models["numpy"])
    assert_same_bits(get_weights(models["numpy"]), before)


WRONG: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "other layout": (lambda w: w.update({WIDE: w[WIDE].T}), r"\(8, 32\).*\(32, 8\)"),
    "transposed table": (lambda w: w.update({EMBEDDING: w[EMBEDDING].T}), r"\(8, 5\).*\(5, 8\)"),
    "missing": (lambda w: w.pop(SQUARE), f"{SQUARE}|1 of"),
    "extra": (lambda w: w.update({"other.weight": w[SQUARE]}), r"other\.weight"),
    "unknown prefix": (lambda w: w.update({f"model.{SQUARE}": w.pop(SQUARE)}), r"model\.transf"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["set_weights", "load_state_dict"])
@pytest.mark.parametrize("fault", WRONG)
def test_B58_what_does_not_fit_is_refused_and_changes_nothing(
    backend: str, way: str, fault: str
) -> None:
    model, weights = build_model(backend, CONFIG), get_weights(build_model("numpy", CONFIG, seed=9))
    change, message = WRONG[fault]
    change(weights)
    before = get_weights(model)
    if way == "set_weights":
        with pytest.raises(ValueError, match=message):
            set_weights(model, weights)
    elif backend == "numpy":
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(weights)
    else:  # PyTorch's own, which is strict by default and says more than one line
        with pytest.raises(RuntimeError):
            model.load_state_dict({n: torch.tensor(w) for n, w in weights.items()})
        return
    assert_same_bits(get_weights(model), before)


def exchanged(source: str, target: str) -> tuple[Any, Any]:
    models = build_model(source, CONFIG, seed=1), build_model(target, CONFIG, seed=2)
    copy_weights(*models)
    return models


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("target", BACKENDS)
def test_B59_training_one_model_leaves_the_other_alone(source: str, target: str) -> None:
    models = exchanged(source, target)
    tokens = np.array([[0, 1, 2, 3]])
    for model, other in (models, models[::-1]):
        implementation = load_backend(backend_of(model))
        trainer = GPTTrainer(
            model, implementation.GPTLoss(), implementation.AdamWOptimizer(model.parameters(), 1.0)
        )
        before, mine = get_weights(other), get_weights(model)
        trainer.train_step(tokens, tokens)
        assert_same_bits(get_weights(other), before)
        for name, array in get_weights(model).items():
            assert not np.array_equal(array, mine[name]), name


@both_twins
def test_B59_an_array_given_or_taken_is_a_copy(twin: Twin) -> None:
    """SGD at rate 1 with gradients of 1: a shared array would become [0, 1]."""
    w = f64([1, 2])
    parameter = twin.parameter(w)
    parameter.data -= 1.0
    np.testing.assert_array_equal(w, [1, 2])
    w -= 5.0
    np.testing.assert_array_equal(twin.array(parameter), [0, 1])
    model = build_model(twin.name, CONFIG, dtype="float64")
    taken = get_weights(model)
    for name, p in model.named_parameters():
        assert taken[name].dtype == np.float64
        assert not np.shares_memory(taken[name], as_array(p))
    (p,), optimizer = optimizer_of(twin, f64([[1, 2]]))
    set_grad(twin, p, f64([[1, 1]]))
    optimizer.step()
    state = optimizer.state()
    kept = state["exp_avg"][0].copy()
    optimizer.step()
    np.testing.assert_array_equal(state["exp_avg"][0], kept)
    optimizer.load_state(state)
    state["exp_avg"][0] += 1.0
    np.testing.assert_array_equal(optimizer.state()["exp_avg"][0], kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_B59_any_memory_layout_is_copied_and_the_dtype_kept(backend: str) -> None:
    arrays = get_weights(build_model("numpy", CONFIG, seed=4, dtype="float64"))
    with pytest.raises(ValueError, match="negative"):  # what PyTorch alone says
        torch.from_numpy(arrays[EMBEDDING][::-1])
    strange = {name: np.asfortranarray(array) for name, array in arrays.items()}
    strange[EMBEDDING] = arrays[EMBEDDING][::-1, ::-1].copy()[::-1, ::-1]
    strange[SQUARE] = arrays[SQUARE].astype(">f8")
    for array in strange.values():
        array.flags.writeable = False
    model = build_model(backend, CONFIG, dtype="float64")
    set_weights(model, strange)
    assert_same_bits(get_weights(model), arrays)


def wrapped(model: torch.nn.Module, wrapper: str) -> torch.nn.Module:
    if "compiled" in wrapper:
        model = torch.compile(model, backend="eager")  # the names alone matter: nothing is run
    return torch.nn.DataParallel(model) if "parallel" in wrapper else model


@pytest.mark.parametrize("wrapper", ["plain", "compiled", "parallel", "parallel of compiled"])
@pytest.mark.parametrize("target", ["plain", "compiled", "numpy"])
def test_B61_a_wrapper_is_in_no_name_of_a_file(wrapper: str, target: str, tmp_path: Path) -> None:
    linear = TORCH.layers.Linear(2, 2, np.random.RandomState(0), torch.float32)
    raw = torch.compile(linear, backend="eager").state_dict()
    assert list(raw) == ["_orig_mod.weight", "_orig_mod.bias"]  # what there is to undo
    plain = build_model("torch", CONFIG, seed=8)
    source = wrapped(plain, wrapper)
    save_checkpoint(tmp_path / "c", source, config=CONFIG, vocabulary=VOCABULARY)
    checkpoint = load_checkpoint(tmp_path / "c")
    assert list(checkpoint.weights) == list(CONFIG.parameter_shapes())
    if target == "numpy":
        into: Any = build_model("numpy", CONFIG)
    else:
        into = wrapped(build_model("torch", CONFIG), target)
    for arrays in (checkpoint.weights, dict(source.state_dict())):
        set_weights(into, {name: np.zeros(shape, np.float32)
                           for name, shape in CONFIG.parameter_shapes().items()})  # fmt: skip
        set_weights(into, arrays)
        assert_same_bits(get_weights(into), get_weights(plain))


GRADS = [1.0, 0.5, -0.25, 2.0]


@both_twins
def test_B63_adamw_goes_on_with_moments_and_count(twin: Twin) -> None:
    """Without moments 0.837641411947443, without the count 0.621177567019747."""

    def run(grads: list[float], start: np.ndarray, state: Any) -> tuple[np.ndarray, Any]:
        (p,), optimizer = optimizer_of(twin, start, lr=0.1, weight_decay=0.01)
        if state is not None:
            optimizer.load_state(state)
        for g in grads:
            set_grad(twin, p, f64([[g]]))
            optimizer.step()
        return twin.array(p).copy(), optimizer.state()

    straight, _ = run(GRADS, f64([[1]]), None)
    np.testing.assert_allclose(straight, [[0.673595433081635]], rtol=1e-14)
    half, state = run(GRADS[:2], f64([[1]]), None)
    assert run(GRADS[2:], half, state)[0].tobytes() == straight.tobytes()
    np.testing.assert_allclose(run(GRADS[2:], half, None)[0], [[0.837641411947443]], rtol=1e-14)
    reset = run(GRADS[2:], half, state | {"steps": [0]})[0]
    np.testing.assert_allclose(reset, [[0.621177567019747]], rtol=1e-14)


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("target", BACKENDS)
def test_B63_moments_travel_between_the_backends(source: str, target: str) -> None:
    """Saved by one, continued by the other: the same number up to rounding."""
    twins = {twin.name: twin for twin in (NUMPY, TORCH)}
    (p,), optimizer = optimizer_of(twins[source], f64([[1]]), lr=0.1, weight_decay=0.01)
    for g in GRADS[:2]:
        set_grad(twins[source], p, f64([[g]]))
        optimizer.step()
    half, state = twins[source].array(p).copy(), optimizer.state()
    (p,), optimizer = optimizer_of(twins[target], half, lr=0.1, weight_decay=0.01)
    optimizer.load_state(state)
    for g in GRADS[2:]:
        set_grad(twins[target], p, f64([[g]]))
        optimizer.step()
    np.testing.assert_allclose(twins[target].array(p), [[0.673595433081635]], rtol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("first", [1, 3, 5])
def test_B63_six_steps_are_three_and_three(
    backend: str, dtype: str, first: int, tmp_path: Path
) -> None:
    """Weights, moments, losses, norms, rates and the sample, to the bit; batches 0 to 5, once."""
    schedule = WarmupCosineScheduler(1e-2, 6, 2, 1e-3)

    def steps(trainer: GPTTrainer, numbers: range) -> list[StepResult]:
        results = []
        for number in numbers:
            trainer.optimizer.lr = schedule(number)
            results.append(trainer.train_step(*dataset.batch("train", number)))
        return results

    straight, dataset = trainer_of(backend, dtype=dtype)
    interrupted, _ = trainer_of(backend, dtype=dtype)
    expected = steps(straight, range(6))
    results = steps(interrupted, range(first))
    model_config = GPTConfig(dataset.vocab_size, 8, 6, 2)
    vocabulary = dataset.tokenizer.vocabulary
    save_checkpoint(
        tmp_path / "c", interrupted.model, config=model_config, vocabulary=vocabulary,
        step=interrupted.steps, optimizer=interrupted.optimizer,
    )  # fmt: skip
    checkpoint = load_checkpoint(tmp_path / "c", config=model_config, vocabulary=vocabulary)
    implementation = load_backend(backend)
    model = checkpoint.build_model()
    resumed = GPTTrainer(
        model, implementation.GPTLoss(), implementation.AdamWOptimizer(model.parameters(), 1e-2)
    )
    checkpoint.load_optimizer(model, resumed.optimizer)
    results += steps(resumed, range(checkpoint.step, 6))
    assert results == expected
    assert [r.lr for r in results] == [schedule(number) for number in range(6)]
    assert_same_bits(get_weights(model), get_weights(straight.model))
    ours, theirs = resumed.optimizer.state(), straight.optimizer.state()
    assert ours["steps"] == theirs["steps"] == [6] * len(ours["steps"])
    for moment in ("exp_avg", "exp_avg_sq"):
        for one, other in zip(ours[moment], theirs[moment], strict=True):
            assert one.tobytes() == other.tobytes() and one.any()
    samples = [t.generate(dataset, "What", 20, seed=5) for t in (resumed, straight)]
    assert samples[0] == samples[1] and len(samples[0]) == 24
