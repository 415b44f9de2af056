"""GPT-2 of both twins against its equations, and the table that is input and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.rounding import UNITS
from gpt_parity.oracle.tolerance import Tolerances, model_tolerances
from gpt_parity.oracle.trace import Trace, trace
from gpt_parity.weights import get_weights, named_parameters, set_weights
from parity_tests.gpt2_by_hand import SIZES, Sizes, draw, logits, loss

pytestmark = pytest.mark.reference("by hand")

TABLE = "embedding.embedding.weight"
STEP = 1e-30

both_backends = pytest.mark.parametrize("backend", BACKENDS)
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def built(backend: str, sizes: Sizes, weights: dict[str, np.ndarray], dtype: str) -> Any:
    model = build_model(backend, sizes.config, dtype=dtype)
    set_weights(model, {name: array.astype(dtype) for name, array in weights.items()})
    return model


def oracle(
    sizes: Sizes, weights: dict[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray,
    dtype: str = "float64",
) -> tuple[Trace, Tolerances]:  # fmt: skip
    """The clean pass in float64, and what a candidate of `dtype` may be off."""
    model = built("numpy", sizes, weights, "float64")
    return model_tolerances(model, load_backend("numpy").GPTLoss(), tokens, targets, UNITS[dtype])


def in_float32(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Numbers that both dtypes hold."""
    return {name: a.astype(np.float32).astype(np.float64) for name, a in weights.items()}


# --- the model by hand


@both_backends
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [0.1, 0.5])
@every_size
def test_logits_are_those_of_the_papers_equations(
    sizes: Sizes, scale: float, dtype: str, backend: str
) -> None:
    weights, tokens, targets = draw(sizes, scale)
    weights = in_float32(weights)
    _, tolerances = oracle(sizes, weights, tokens, targets, dtype)
    expected = logits(weights, sizes, tokens)
    model = built(backend, sizes, weights, dtype)
    found = model.predict(tokens)
    assert found.shape == expected.shape and found.dtype == dtype
    errors = np.linalg.norm(found - expected, axis=-1)
    assert (errors <= tolerances.values["output"].rows).all()
    value = load_backend(backend).GPTLoss()(model(tokens), targets).item()
    assert abs(value - loss(expected, targets)) <= tolerances.loss.whole


@pytest.mark.reference("complex step")
@every_size
def test_gradients_are_those_of_the_papers_equations_by_complex_step(sizes: Sizes) -> None:
    """Some elements of each weight, of both twins; the equations have no backward pass."""
    weights, tokens, targets = draw(sizes, 0.4, seed=1)
    clean, tolerances = oracle(sizes, weights, tokens, targets)
    torch_trace = trace(
        built("torch", sizes, weights, "float64"), load_backend("torch").GPTLoss(), tokens, targets
    )
    rng = np.random.default_rng(2)
    for name, array in weights.items():
        rows = tolerances.parameters[name].rows
        thirds = array.ndim == rows.ndim  # of one bias
        each = np.repeat(rows, array.size // len(rows)) if thirds else rows[..., None]
        each = np.broadcast_to(each, array.shape)
        for _ in range(3):
            place = tuple(int(rng.integers(n)) for n in array.shape)
            if name == TABLE:
                place = (int(rng.choice(tokens.ravel())), place[1])
            moved = array.astype(complex)
            moved[place] += 1j * STEP
            numeric = loss(logits({**weights, name: moved}, sizes, tokens), targets).imag / STEP
            for found in (clean, torch_trace):
                assert abs(found.parameters[name][place] - numeric) <= each[place], name


@both_backends
@every_size
def test_later_tokens_change_nothing_before_them(sizes: Sizes, backend: str) -> None:
    weights, tokens, _ = draw(sizes, 0.5)
    model = built(backend, sizes, weights, "float64")
    before, changed = model.predict(tokens), tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % sizes.vocab_size
    after = model.predict(changed)
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] != after[:, -1]).any()


@both_backends
def test_a_fill_of_zero_leaks_if_it_is_allowed(backend: str) -> None:
    """The test of causality above can fail."""
    config = GPT2Config(5, 4, 6, 2, mask_value=0.0, heads=2)
    with pytest.raises(ValueError, match="leak"):
        build_model(backend, config)
    model = build_model(backend, config, dtype="float64", allow_leak=True)
    before, after = (model.predict(np.array([[0, 1, 2, last]])) for last in (3, 4))
    assert (before[:, :-1] != after[:, :-1]).any()


# --- the tied table


@both_backends
def test_the_table_is_the_weight_of_the_output(backend: str) -> None:
    """Twice the row of an id that is no input: twice its logits, exactly, and no others."""
    sizes = SIZES[0]
    weights, _, _ = draw(sizes, 0.5)
    tokens = np.array([[0, 1, 2], [3, 1, 0]])
    model = built(backend, sizes, weights, "float64")
    before = model.predict(tokens)
    weights[TABLE][9] *= 2.0
    set_weights(model, weights)
    after = model.predict(tokens)
    np.testing.assert_array_equal(after[..., 9], 2.0 * before[..., 9])
    others = np.arange(13) != 9
    np.testing.assert_array_equal(after[..., others], before[..., others])
    assert before[..., 9].all()


@pytest.mark.reference("complex step")
def test_the_gradient_of_the_table_is_the_sum_of_both_roles() -> None:
    """Two tables in the equations, each moved alone; neither part is small."""
    sizes = SIZES[0]
    weights, tokens, targets = draw(sizes, 0.5, seed=3)
    clean, tolerances = oracle(sizes, weights, tokens, targets)
    table = weights[TABLE]
    for token in np.unique(tokens)[:3]:
        moved = table.astype(complex)
        moved[token, 5] += 1j * STEP
        as_input = logits({**weights, TABLE: moved}, sizes, tokens, output_table=table)
        as_output = logits(weights, sizes, tokens, output_table=moved)
        parts = [loss(x, targets).imag / STEP for x in (as_input, as_output)]
        allowed = tolerances.parameters[TABLE].rows[token]
        assert abs(clean.parameters[TABLE][token, 5] - sum(parts)) <= allowed
        assert all(abs(part) > 1e3 * allowed for part in parts)


@both_backends
def test_the_table_stands_once_everywhere(backend: str, tmp_path: Path) -> None:
    config = GPT2Config(7, 5, 8, 1, heads=2)
    model = build_model(backend, config)
    assert sum(tuple(a.shape) == (7, 8) for a in model.state_dict().values()) == 1
    assert not any("norm" not in n and n.startswith("output") for n in named_parameters(model))
    save_checkpoint(tmp_path / "c", model, config=config, vocabulary="abcdefg")
    loaded = load_checkpoint(tmp_path / "c")
    assert loaded.config == config and list(loaded.weights) == list(config.parameter_shapes())
    assert (tmp_path / "c").read_bytes().count(f"model/{TABLE}".encode()) == 1
    for other in BACKENDS:
        for name, array in get_weights(loaded.build_model(other)).items():
            np.testing.assert_array_equal(array, get_weights(model)[name], strict=True)


def test_states_of_the_twins_fit_each_other() -> None:
    config = GPT2Config(7, 5, 8, 2, heads=2)
    ours, theirs = (build_model(name, config, seed) for seed, name in enumerate(BACKENDS))
    theirs.load_state_dict({n: torch.tensor(a) for n, a in ours.state_dict().items()})
    tokens = np.array([[1, 6, 0]])
    ours.load_state_dict({n: t.numpy() for n, t in theirs.state_dict().items()})
    for name, array in ours.state_dict().items():
        np.testing.assert_array_equal(array, theirs.state_dict()[name].numpy(), strict=True)
    assert ours.predict(tokens).shape == theirs.predict(tokens).shape == (1, 3, 7)
