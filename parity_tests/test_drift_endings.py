"""What float32 makes of AdamW part by part, and the statistics of where whole runs end."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset
from gpt_parity.lessons import endings as lesson
from gpt_parity.lessons.constants import (
    PARTS,
    Rounded,
    expected_excess,
    measured_excess,
    with_float32,
)
from gpt_parity.lessons.endings import (
    ARITHMETICS,
    Group,
    difference,
    endings,
    read_endings,
    start_weights,
)
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.lockstep import Runner, Setting
from gpt_parity.weights import get_weights

pytestmark = pytest.mark.reference("by hand")

SIZES = GPTConfig(vocab_size=7, context_size=8, embedding_size=8, blocks=1)
TEXT = "gabe dcbaedcga fbad" * 30


def runner(parts: tuple[str, ...] | None) -> Runner:
    weights = {
        name: np.random.default_rng(1).standard_normal(shape).astype(np.float32).astype(np.float64)
        for name, shape in SIZES.parameter_shapes().items()
    }
    made = Runner("numpy", "float64", Setting(SIZES, TrainConfig(), weights, [], []))
    if parts is not None:
        with_float32(made, parts)
    return made


def trained(parts: tuple[str, ...] | None, steps: int) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(2), runner(parts)
    for _ in range(steps):
        batch = rng.integers(0, 7, (2, 3, 8))
        result = made.step((batch[0], batch[1]), 1e-3)
    return {k: x for k, x in made.state(result).items() if x.ndim}


def test_the_excess_of_the_second_moment_is_that_of_the_rounded_constants() -> None:
    """0.001 rounded over 1 - (0.999 rounded), in exact fractions."""
    beta2, rest = Fraction(float(np.float32(0.999))), Fraction(float(np.float32(0.001)))
    assert expected_excess(100_000) == pytest.approx(float(rest / (1 - beta2) - 1), rel=1e-4)
    assert expected_excess(1) == pytest.approx(float(rest / Fraction(1, 1000) - 1), abs=1e-9)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_both_backends_have_that_excess_in_float32(backend: str) -> None:
    found, error = measured_excess(backend, 300)
    assert abs(found - expected_excess(300)) < 5.0 * error + 0.01 * expected_excess(300)
    assert expected_excess(300) > 100.0 * error


def test_adamw_with_nothing_in_float32_is_adamw() -> None:
    plain, same = trained(None, 20), trained((), 20)
    for key, array in plain.items():
        np.testing.assert_allclose(same[key], array, rtol=1e-9, atol=0.0, err_msg=key)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_in_float32_moves_the_run_by_as_much_as_float32_rounds(part: str) -> None:
    plain, rounded = trained((), 5), trained((part,), 5)
    gap = max(
        np.linalg.norm(rounded[key] - array) / np.linalg.norm(array) for key, array in plain.items()
    )
    assert 1e-8 < gap < 1e-4


@pytest.mark.parametrize("part", ["weights", "exp_avg", "exp_avg_sq"])
def test_what_is_stored_in_float32_is_a_float32_number_and_nothing_else_is(part: str) -> None:
    for key, array in trained((part,), 3).items():
        exact = np.array_equal(array, array.astype(np.float32))
        assert exact == (key.split()[0] == part), key


def test_last_bit_changes_go_to_neighbours_in_float32() -> None:
    model = get_weights(build_model("numpy", SIZES, 5, "float32"))
    same, changed, again = (start_weights(SIZES, 5, start) for start in (0, 1, 1))
    other = start_weights(SIZES, 5, 2)
    up = down = 0
    for name, w in model.items():
        assert np.array_equal(same[name], w) and same[name].dtype == np.float64
        assert np.array_equal(changed[name], again[name])
        moved = changed[name].astype(np.float32)
        assert np.array_equal(moved, changed[name])
        higher, lower = (np.nextafter(w, np.float32(x)) for x in (math.inf, -math.inf))
        assert np.array_equal((moved == higher) | (moved == lower), w != 0.0)
        assert np.array_equal(moved[w == 0.0], w[w == 0.0])
        up, down = up + int((moved == higher).sum()), down + int((moved == lower).sum())
    assert 0.4 < up / (up + down) < 0.6
    assert any(not np.array_equal(changed[name], other[name]) for name in model)


def test_a_difference_of_means_its_error_and_its_share() -> None:
    """Two groups of two and three that do not overlap: 2 of the 10 deals are as far apart."""
    gap, error, share = difference(Group((1.0, 2.0)), Group((5.0, 6.0, 7.0)))
    assert gap == -4.5
    assert error == pytest.approx(math.sqrt(0.5 / 2 + 1.0 / 3))
    assert share == pytest.approx(1 / 10)
    assert difference(Group((1.0, 4.0)), Group((2.0, 3.0)))[2] == 1.0
    assert math.isnan(Group((1.0,)).deviation)


def test_runs_that_a_file_holds_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesson, "TrainConfig", Small)
    dataset = CharDataset(TEXT, context_size=8, batch_size=4)
    path = tmp_path / "runs.jsonl"
    wanted = [("numpy float32", 0), ("numpy float64", 1)]
    found = endings(wanted, dataset, 5, 40, 30, path)
    assert [e.identity for e in found] == [(*run, 5, 40, 30) for run in wanted]
    assert all(e.loss == e.losses["30"] and abs(e.loss - e.loss_float64) < 1e-5 for e in found)
    assert found[0].loss != found[1].loss
    assert len(path.read_text().splitlines()) == 2
    more = []
    monkeypatch.setattr(lesson, "train", lambda *a: more.append(a) or found[0])
    assert endings(wanted, dataset, 5, 40, 30, path) == found and not more
    endings([("numpy float32", 0)], dataset, 5, 50, 30, path)  # another schedule
    assert len(more) == 1


def Small() -> TrainConfig:
    return TrainConfig(context_size=8, embedding_size=8, blocks=1)


@pytest.mark.parametrize("content", ["{", '{"loss": 1}', "[1]\n"])
def test_a_file_of_something_else_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"runs\.jsonl: holds no runs .*, a file of this") as found:
        read_endings(path)
    assert "\n" not in str(found.value)
    assert read_endings(tmp_path / "absent") == []


def test_every_arithmetic_can_be_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test loss after two steps that all agree on, to what float32 rounds."""
    monkeypatch.setattr(lesson, "TrainConfig", Small)
    dataset = CharDataset(TEXT, context_size=8, batch_size=4)
    used: list[Any] = []
    step = Rounded.step
    monkeypatch.setattr(Rounded, "step", lambda self: used.append(self.parts) or step(self))
    found = endings([(name, 0) for name in ARITHMETICS], dataset, 5, 40, 2)
    losses = [e.loss for e in found]
    assert max(losses) - min(losses) < 1e-5 and len(set(losses)) > 3
    assert set(used) == {frozenset([part]) for part in PARTS} | {frozenset(PARTS)}
    assert json.dumps(found[0].losses)
