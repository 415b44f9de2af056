"""The benchmark of GPT-2: contenders, its key/value cache, and the size of 124 million."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from gpt_parity.bench import gpt2_parts, parts, timing
from gpt_parity.bench.config import BENCHMARKS, BenchConfig, BenchPart, BenchSize
from gpt_parity.bench.contenders import Contender, contenders, trainer_of
from gpt_parity.bench.gpt2_worker import measure_cache, require_same_logits
from gpt_parity.bench.parts import PARTS, bytes_that_must_live, rivals
from gpt_parity.bench.processes import run_worker
from gpt_parity.bench.worker import (
    MEASURES,
    has_gradient,
    measure_operations,
    random_batches,
    require_same_work,
)
from gpt_parity.cli import main
from gpt_parity.model_config import GPT2Config, GPTConfig, Preset
from numpy_impl.gpt2 import GPT2, GPT2Attention
from numpy_impl.layers import Tril

pytestmark = pytest.mark.reference("by hand")

TINY = Preset(GPT2Config(7, 6, 4, 2, heads=2), batch_size=3, length=5)
UNCOMPILED = ["numpy", "torch", "torch on one thread", "torch unchecked", "torch sdpa"]
GIB = 2**30


# --- Sizes and contenders -------------------------------------------------------------------------


def test_every_part_and_every_size_can_be_asked_for() -> None:
    assert set(PARTS) == set(get_args(BenchPart)) and set(BENCHMARKS) == set(get_args(BenchSize))


def test_what_takes_minutes_is_no_default() -> None:
    config = BenchConfig()
    assert "baby" in config.sizes and "gpt2" not in config.sizes
    assert "cache" in config.parts and "large" not in config.parts


def test_the_sizes_of_gpt2_are_the_published_ones() -> None:
    assert asdict(BENCHMARKS["gpt2"].model) | {"mask_value": 0} == {
        "vocab_size": 50257, "context_size": 1024, "embedding_size": 768, "blocks": 12,
        "heads": 12, "mask_value": 0,
    }  # fmt: skip
    assert BENCHMARKS["gpt2"].model.parameter_count() == 124_439_808


def test_a_trainer_of_a_gpt2_has_its_heads() -> None:
    model = trainer_of("numpy", TINY).model
    assert isinstance(model, GPT2) and model.transformers[1].attention.heads == 2


def test_a_gpt2_is_split_by_its_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """640 tokens: 4.4e8 operations a step, of the text's model 3.5e8; from 4e8 it pays."""
    monkeypatch.setattr("gpt_parity.config.available_cores", lambda: 4)
    sizes = (7, 64, 64, 2)
    for model, threads in ((GPT2Config(*sizes, heads=2), 4), (GPTConfig(*sizes), 1)):
        trainer = trainer_of("numpy", Preset(model, batch_size=10, length=64), threads=None)
        assert trainer.parts is not None and trainer.parts.threads == threads


def test_the_floor_is_that_of_the_text_model_alone() -> None:
    with pytest.raises(ValueError, match="floor: got a GPT-2, needed a model of the source text"):
        contenders(["floor"], TINY, 1)
    for threads in (1, 2):
        assert "floor" not in rivals("baby", threads) and "torch compiled" in rivals("baby", 1)
        assert rivals("gpt2", threads) == ["numpy", "torch"]
    assert "floor" in rivals("small", 1)


@pytest.mark.reference("other backend")
def test_all_contenders_do_the_same_step_of_a_gpt2() -> None:
    found = contenders(UNCOMPILED, TINY, 1)
    batches = random_batches(TINY)
    require_same_work(found, batches)
    norms = {c.name: c.step(*batches[0])[1] for c in found}
    forward = {c.name: c.forward(*batches[1]) for c in found}
    for name in UNCOMPILED[1:]:
        assert np.isclose(norms[name], norms["numpy"], rtol=1e-4, atol=0.0), norms
        assert np.isclose(forward[name], forward["numpy"], rtol=1e-5, atol=0.0), forward


@pytest.mark.reference("other backend")
def test_a_gpt2_that_sees_the_future_does_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = contenders(["torch unchecked"], TINY, 1)
    monkeypatch.setattr(Tril, "forward", lambda mask, scores: scores)
    with pytest.raises(RuntimeError, match="differ: "):
        require_same_work([right, *contenders(["numpy"], TINY, 1)], random_batches(TINY))


def test_only_the_bias_of_the_keys_may_differ() -> None:
    """AdamW makes whole steps of a gradient that is rounding alone."""

    def pair(name: str, place: int) -> list[Contender]:
        def contender(own: str, step: float) -> Contender:
            w = np.zeros(6)

            def train(*batch: np.ndarray) -> tuple[float, float]:
                w[:] += 1.0
                w[place] += step
                return 4.0, 1.0

            return Contender(own, train, lambda *batch: 4.0, lambda: {name: w.copy()})

        return [contender("a", 0.0), contender("b", -2.0)]

    bias = "transformers.0.attention.input.bias"
    for place in (2, 3):
        require_same_work(pair(bias, place), random_batches(TINY))
    for name, place in ((bias, 1), (bias, 4), ("transformers.0.attention.input.weight", 2)):
        with pytest.raises(RuntimeError, match=f"weights differ: {name} of a"):
            require_same_work(pair(name, place), random_batches(TINY))


@pytest.mark.reference("exact property")
def test_the_bias_of_the_keys_has_a_gradient_of_rounding_alone() -> None:
    trainer = trainer_of("numpy", TINY)
    trainer.loss_fn(
        trainer.model(random_batches(TINY)[0][0]), random_batches(TINY)[0][1]
    ).backward()
    for name, parameter in trainer.model.named_parameters():
        kept, grad = has_gradient(name, parameter.data), np.abs(parameter.grad)
        if not kept.all():
            assert name.endswith("attention.input.bias") and kept.sum() == 8
            assert grad[~kept].max() < 1e-5 * grad[kept].max()


def test_bytes_of_a_gpt2_that_must_live_by_hand() -> None:
    """Baby: 4 blocks, of each token 14 * 128 numbers, two deviations, and 4 rows of 64 weights."""
    count = (65 + 64 + 2) * 128 + 4 * (12 * 128**2 + 13 * 128)
    rows = 12 * 64 * (4 * (14 * 128 + 2 + 4 * 64) + 128 + 1 + 65)
    assert bytes_that_must_live("baby") == 4 * (4 * count + rows)


def test_operations_of_a_step_of_gpt2_are_counted_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BENCHMARKS, "baby", TINY)
    found = measure_operations("baby", steps=2)
    assert found["forward layer_norm"]["calls"] == 5 and found["forward unbind"]["calls"] == 6
    assert found["forward linear"]["calls"] == 9  # four a block, and the logits without a bias
    assert found["backward linear"]["calls"] == 26
    assert all(each["seconds"] > 0 for each in found.values())


# --- Tables ---------------------------------------------------------------------------------------


def test_a_summary_leaves_out_who_was_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def worker(name: str, cores: int = 1, **arguments: Any) -> Any:
        names = arguments["names"]
        return {n: {"median": 0.002 * (k + 1), "lower": 0.0, "upper": 1.0}
                for k, n in enumerate(names)}  # fmt: skip

    monkeypatch.setattr(parts, "run_worker", worker)
    monkeypatch.setattr(parts, "available_cores", lambda: 1)
    assert main(["bench", "--parts", "step", "--sizes", "source", "baby", "gpt2"]) == 0
    printed = capsys.readouterr().out.replace("\n", "")
    assert "that of torch, one thread: source 0.50, baby 0.50, gpt2 0.50." in printed
    assert "that of torch compiled, one thread: source 0.20, baby 0.20." in printed
    assert "that of floor, one thread: source 0.17." in printed
    assert main(["bench", "--parts", "step", "--sizes", "baby"]) == 0
    assert "that of floor" not in capsys.readouterr().out


def test_times_of_the_cache_come_as_rows_by_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Milliseconds: cached 4 + T / 64, anew T² / 2**12, and PyTorch takes twice as long."""
    twins = {"numpy": 1, "torch": 2}

    def worker(name: str, cores: int = 1, **arguments: Any) -> Any:
        assert name == "cache" and cores == 1 and arguments["seconds"] == 2.0
        assert GPT2Config(**arguments["model"]) == gpt2_parts.CACHED_MODEL
        return [
            {"length": n}
            | {f"{twin} cached": {"median": k * (4 + n / 64) / 1e3} for twin, k in twins.items()}
            | {f"{twin} anew": {"median": k * n * n / 2**12 / 1e3} for twin, k in twins.items()}
            for n in arguments["lengths"]
        ]

    monkeypatch.setattr(gpt2_parts, "run_worker", worker)
    assert main(["bench", "--parts", "cache", "--seconds", "2"]) == 0
    printed = capsys.readouterr().out
    rows = [
        line.split() for line in printed.splitlines() if line.split()[:1] in (["16"], ["1,024"])
    ]
    assert rows == [
        ["16", "4.250", "8.500", "0.062", "0.125", "0.50", "0.0"],
        ["1,024", "20.0", "40.0", "256.0", "512.0", "0.50", "12.8"],
    ]
    assert "numpy cached 2.5, torch cached 2.5, numpy anew 16.0, torch anew 16.0" in (
        printed.replace("\n", " ").replace("  ", " ")
    )


@pytest.mark.parametrize(
    ("limited", "said"),
    [(True, "was refused more than 8 GiB."), (False, "does not refuse a process more than 8 GiB.")],
)
def test_time_and_memory_of_the_large_model_are_rows(
    limited: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NumPy under the limit, PyTorch without one, both in turns for the times."""
    asked = []

    def worker(measure: str, cores: int = 1, **arguments: Any) -> Any:
        asked.append((measure, arguments.get("limit"), arguments.get("which")))
        assert arguments["size"] == "gpt2"
        if measure == "passes":
            seconds = 1.5 if arguments["which"] == "step" else 0.5
            return {"numpy": {"median": seconds}, "torch": {"median": 2 * seconds}}
        scale = 1.0 if arguments["name"] == "numpy" else 0.5
        return {"limited": limited, "built": 1e9 * scale, "forward": 2e9 * scale,
                "step": 3e9 * scale}  # fmt: skip

    monkeypatch.setattr(gpt2_parts, "run_worker", worker)
    assert main(["bench", "--parts", "large"]) == 0
    assert asked == [("large", 8 * GIB, None), ("large", None, None),
                     ("passes", None, "forward"), ("passes", None, "step")]  # fmt: skip
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    rows = [line[-3:] for line in lines if line[:1] in (["forward"], ["training"], ["peak"])]
    assert rows == [["0.50", "1.00", "0.50"], ["1.50", "3.00", "0.50"],
                    ["2.00", "1.00", "2.00"], ["3.00", "1.50", "2.00"]]  # fmt: skip
    said_in_one_line = printed.replace("\n", " ").replace("  ", " ")
    assert "124,439,808 parameters" in printed and said in said_in_one_line


# --- In real processes ----------------------------------------------------------------------------


def test_the_cache_is_timed_at_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS_PER_TURN", 1e-9)
    found = measure_cache(asdict(TINY.model), lengths=[2, 6], names=["numpy"], seconds=1e-9)
    assert [row["length"] for row in found] == [2, 6]
    for row in found:
        assert set(row) == {"length", "numpy cached", "numpy anew"}
        assert row["numpy cached"]["median"] > 0 and row["numpy anew"]["calls"] > 0


def test_a_cache_that_is_not_used_right_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GPT2Attention.following

    def following(attention: Any, x: Any, past: Any) -> Any:
        """Forgets the last position."""
        if past is None:
            return right(attention, x, past)
        found, present = right(attention, x, past[..., :-1, :])
        return found, np.concatenate((past, present[..., -1:, :]), axis=-2)

    monkeypatch.setattr(GPT2Attention, "following", following)
    with pytest.raises(RuntimeError, match=r"logits differ: numpy anew is \S+ from numpy cached"):
        measure_cache(asdict(TINY.model), lengths=[6], names=["numpy"], seconds=1e-9)
    require_same_logits({"a": np.ones(3), "b": np.ones(3) + 1e-6})


def test_memory_of_a_gpt2_holds_what_must_live() -> None:
    must = bytes_that_must_live("baby")
    assert must < run_worker("memory", size="baby", name="numpy")["peak"] < 5 * must


def test_a_model_that_exceeds_its_limit_is_refused() -> None:
    """The large measurement on the small size: within 1 GiB it works, within 64 MiB it cannot."""
    found = run_worker("large", size="baby", name="numpy", limit=GIB, steps=1)
    assert 0 < found["built"] <= found["forward"] <= found["step"] < GIB
    assert found["losses"] == pytest.approx([np.log(65)], rel=0.05)
    if found["limited"] and sys.platform == "linux":
        with pytest.raises(ChildProcessError, match="benchmark of large: "):
            run_worker("large", size="baby", name="numpy", limit=2**26, steps=1)


@pytest.mark.slow
def test_a_step_of_124_million_parameters_fits_into_8_gib() -> None:
    """Two steps in float32, NumPy, in a process that is refused more; random ids at the start."""
    found = run_worker("large", size="gpt2", name="numpy", limit=8 * GIB, steps=2)
    must = bytes_that_must_live("gpt2")
    assert must < found["step"] < 1.5 * must < 8 * GIB
    assert found["losses"] == pytest.approx([np.log(50257)] * 2, rel=0.05)


def test_the_worker_knows_every_measurement_by_name() -> None:
    assert {"cache", "large"} <= set(MEASURES)
    result = subprocess.run(
        [sys.executable, "-m", "gpt_parity.bench.worker", "cache", "{}"], capture_output=True,
        text=True, cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip
    assert result.returncode == 1 and "missing 4 required positional arguments" in result.stderr
