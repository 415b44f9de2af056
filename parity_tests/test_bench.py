"""The benchmark: its contenders do the same work, its figures are what their names say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.bench import contenders as contenders_module
from gpt_parity.bench import parts
from gpt_parity.bench.config import BENCHMARKS, BenchConfig
from gpt_parity.bench.contenders import Contender, contenders
from gpt_parity.bench.floor import FloorStep
from gpt_parity.bench.growth import AXES, exponent, growth_section, operations, plot_growth
from gpt_parity.bench.parts import bytes_that_must_live
from gpt_parity.bench.timing import MINIMUM_ROUNDS, Times, interleaved
from gpt_parity.bench.worker import measure_operations, random_batches, require_same_work
from gpt_parity.cli import main
from gpt_parity.model_config import GPTConfig, Preset
from gpt_parity.oracle.compare import LOSS, PARAMETER, compare
from numpy_impl import AdamWOptimizer, GPTLoss
from parity_tests.models import SIZES, ModelCase, build, fill, reference

pytestmark = pytest.mark.reference("by hand")

TINY = Preset(GPTConfig(7, 6, 4, 2), batch_size=3, length=5)
UNCOMPILED = ["numpy", "torch", "torch on one thread", "torch unchecked", "torch sdpa", "floor"]


# --- The floor ------------------------------------------------------------------------------------


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("sizes", ["distinct primes", "short text", "wide", "one position"])
@pytest.mark.parametrize("structure", ["normal", "one token", "confident and wrong"])
def test_the_floor_computes_what_the_engine_computes(sizes: str, structure: str) -> None:
    case = ModelCase(SIZES[sizes], structure, 0.5, 3)
    weights, tokens, targets = fill(case)
    clean, tolerances = reference(case, "float32")
    hand = FloorStep({n: w.astype(np.float32) for n, w in weights.items()}, *tokens.shape)
    loss = np.float32(hand.forward(tokens, targets))
    hand.backward(tokens, targets)
    judgements = [compare(LOSS, LOSS, loss, clean.loss, tolerances.loss, "float32")]
    judgements += [
        compare(name, PARAMETER, hand.grad[name], clean.parameters[name],
                tolerances.parameters[name], "float32") for name in clean.parameters
    ]  # fmt: skip
    assert all(j.ok for j in judgements), [j for j in judgements if not j.ok]
    assert sum(j.judged for j in judgements) > len(judgements) // 2


@pytest.mark.reference("other backend")
def test_the_floor_updates_as_the_optimizer_does() -> None:
    """Three steps with clipping; the error of an update is rounding, of its gradient too."""
    case = ModelCase(SIZES["distinct primes"], "normal", 0.5, 3)
    weights, tokens, targets = fill(case)
    single = {n: w.astype(np.float32) for n, w in weights.items()}
    model, loss_fn = build("numpy", "float64", case, weights), GPTLoss()
    optimizer = AdamWOptimizer(model[0].parameters(), lr=1e-2, weight_decay=0.1)
    hand = FloorStep(single, *tokens.shape, lr=1e-2, weight_decay=0.1, max_norm=0.5)
    for _ in range(3):
        loss, norm = hand.step(tokens, targets)
        optimizer.zero_grad()
        expected = loss_fn(model[0](tokens), targets)
        expected.backward()
        assert np.isclose(norm, optimizer.clip_grad_norm(0.5), rtol=1e-5, atol=0.0) and norm > 0.5
        assert np.isclose(loss, expected.item(), rtol=1e-6, atol=0.0)
        optimizer.step()
    for name, parameter in model[0].named_parameters():
        moved = np.linalg.norm(parameter.data - weights[name])
        assert np.linalg.norm(hand.weight[name] - parameter.data) < 1e-3 * moved, name


@pytest.mark.reference("exact property")
def test_a_floor_that_drifted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders(["floor"], TINY, 1)
    drifted = tmp_path / "floor.py"
    drifted.write_bytes(Path(contenders_module.floor.__file__).read_bytes() + b"\n")
    monkeypatch.setattr(contenders_module.floor, "__file__", str(drifted))
    with pytest.raises(RuntimeError, match=r"floor.py has sha256 \w+, the one on record is"):
        contenders(["floor"], TINY, 1)


# --- Contenders -----------------------------------------------------------------------------------


@pytest.mark.reference("other backend")
def test_all_contenders_do_the_same_step() -> None:
    found = contenders(UNCOMPILED, TINY, 1)
    batches = random_batches(TINY)
    require_same_work(found, batches)
    norms = {c.name: c.step(*batches[0])[1] for c in found}
    forward = {c.name: c.forward(*batches[1]) for c in found}
    for name in UNCOMPILED[1:]:
        assert np.isclose(norms[name], norms["numpy"], rtol=1e-4, atol=0.0), norms
        assert np.isclose(forward[name], forward["numpy"], rtol=1e-5, atol=0.0), forward


@pytest.mark.parametrize(
    ("loss", "norm", "step", "message"),
    [
        (4.001, 1.001, 1.0, ""),
        (4.01, 1.0, 1.0, r"losses differ: a \[4.0, .*\], b \[4.01, "),
        (4.0, 1.1, 1.0, r"gradient norms differ: a \[1.0, .*\], b \[1.1, "),
        (4.0, 1.0, 0.0, "weights differ: w of a moved by 3 and is 3 from that of b"),
        (4.0, 1.0, 0.9, "weights differ: w of a moved by 3 and is 0.3 from that of b"),
    ],
)
def test_other_work_ends_the_benchmark(loss: float, norm: float, step: float, message: str) -> None:
    def contender(name: str, loss: float, norm: float, step: float) -> Contender:
        w = np.zeros(1)

        def train(*batch: np.ndarray) -> tuple[float, float]:
            w[:] += step
            return loss, norm

        return Contender(name, train, lambda *batch: loss, lambda: {"w": w.copy()})

    pair = [contender("a", 4.0, 1.0, 1.0), contender("b", loss, norm, step)]
    if not message:
        require_same_work(pair, random_batches(TINY))
        return
    with pytest.raises(RuntimeError, match=message):
        require_same_work(pair, random_batches(TINY))


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("broken", ["clip_grad_norm", "step"])
def test_a_twin_that_skips_its_update_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamWOptimizer, broken, lambda optimizer, *arguments: 0.0)
    with pytest.raises(RuntimeError, match="differ: "):
        require_same_work(contenders(["torch", "numpy"], TINY, 1), random_batches(TINY))


# --- Times and fits -------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    assert Times.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Times(3.0, 2.0, 4.0, 5)


def test_each_round_begins_with_another_and_no_first_call_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that each call of a function moves on: 1 ms for a, but 9 ms after b; 0.5 s for b."""
    clock, order = [0.0], []

    def function(name: str) -> Callable[[], None]:
        def call() -> None:
            first = not order or order[-1] != name
            order.append(name)
            clock[0] += 0.5 if name == "b" else 0.009 if first else 0.001

        return call

    monkeypatch.setattr("gpt_parity.bench.timing.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("gpt_parity.bench.timing.time.sleep", lambda seconds: None)
    times = interleaved({"a": function("a"), "b": function("b")}, seconds=1e-9)
    assert times["a"].lower == pytest.approx(0.001, rel=1e-9) == times["a"].upper
    assert times["b"] == Times(*[pytest.approx(0.5, rel=1e-9)] * 3, MINIMUM_ROUNDS)
    turns = [name for k, name in enumerate(order) if k == 0 or order[k - 1] != name]
    assert turns[:4] == ["a", "b", "a", "b"] and order[0] == "a" and order[-1] == "b"


def test_exponents_by_hand() -> None:
    assert exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0]) == pytest.approx(2.0, rel=1e-12)
    assert exponent([1, 10], [5.0, 5.0]) == pytest.approx(0.0, abs=1e-12)
    one, two, four = (operations("blocks", n) for n in (1, 2, 4))
    assert four - two == 2 * (two - one) > 0
    assert operations("B", 32) == 16 * operations("B", 2)


def test_bytes_that_must_live_by_hand() -> None:
    """Source: 84,929 weights four times, and 128 rows of 2 (11 * 64 + 32) + 64 + 65 numbers."""
    assert bytes_that_must_live("source") == 4 * (4 * 84_929 + 128 * (2 * 736 + 129))


def growth_figures() -> dict[str, Any]:
    return {
        axis: [{"value": v, "seconds": 1e-3 * v**2, "bytes": 10 * v} for v in values]
        for axis, values in AXES.items()
    }


def test_growth_rows_are_the_exponents() -> None:
    _, header, rows, _ = growth_section(growth_figures())
    assert len(header) == len(rows[0]) and [row[0] for row in rows] == list(AXES)
    assert {(row[3], row[5], row[6]) for row in rows} == {("2.00", "2.00", "1.00")}
    assert rows[2][2] == "1.00"  # operations over B


@pytest.mark.reference("exact property")
def test_the_plot_is_the_same_file_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plots")
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    plot_growth(growth_figures(), one)
    plot_growth(growth_figures(), two)
    assert one.read_bytes() == two.read_bytes() and b"<svg" in one.read_bytes()


def test_operations_of_a_step_are_counted_by_name() -> None:
    found = measure_operations("source", steps=2)
    assert found["forward linear"]["calls"] == 7 and found["forward gelu"]["calls"] == 2
    assert found["backward linear"]["calls"] == 21  # three gradients each
    assert found["clipping and AdamW"]["calls"] == 1
    assert all(each["seconds"] > 0 for each in found.values())


# --- The command ----------------------------------------------------------------------------------


def test_the_command_prints_and_writes_what_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory in real processes: both peaks hold at least what must live."""
    report = tmp_path / "speed.md"
    report.write_text("# Speed\n\n## Other\n\nkept\n")
    assert main(["bench", "--parts", "memory", "--sizes", "source", "--json",
                 str(tmp_path / "figures.json"), "--report", str(report)]) == 0  # fmt: skip
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]["memory"]
    must = bytes_that_must_live("source")
    assert figures["source"]["must_live"] == must
    assert must < figures["source"]["numpy"] < 20 * must
    assert [found["step"] for found in figures["leaks"]] == parts.STEPS_OF_LEAKS
    printed, text = capsys.readouterr().out, report.read_text()
    ratio = f"{figures['source']['numpy'] / must:.2f}"
    assert ratio in printed and f" {ratio} |" in text
    assert text.startswith("# Speed\n\n## Other\n\nkept\n") and " cores, " in text


def test_the_recipe_and_its_growth_run_in_real_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Four steps of the recipe on both backends, and two values of one size."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plots")
    monkeypatch.setattr(parts, "AXES", {"T": [2, 64]})
    (tmp_path / "text.txt").write_text("a tape walks backwards. " * 400)
    assert main([
        "bench", "--parts", "recipe", "growth", "--recipe-steps", "4", "--seconds", "0.01",
        "--data", str(tmp_path / "text.txt"), "--json", str(tmp_path / "figures.json"),
        "--report", str(tmp_path / "speed.md"),
    ]) == 0  # fmt: skip
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    recipe, growth = figures["recipe"], figures["growth"]
    assert recipe["steps"] == 4 and recipe["corpus"] == "text.txt"
    assert recipe["seconds"]["numpy"] > 0 and recipe["seconds"]["torch"] > 0
    losses = recipe["test_loss"]
    assert np.isclose(losses["numpy"], losses["torch"], rtol=1e-5, atol=0.0)
    small, large = growth["T"]
    assert [small["value"], large["value"]] == [2, 64] and 0 < small["bytes"] < large["bytes"]
    assert (tmp_path / "speed-growth.svg").exists()
    assert "(speed-growth.svg)" in (tmp_path / "speed.md").read_text()
    assert "4 steps" in capsys.readouterr().out


def test_times_come_as_rows_with_the_ratio_to_numpy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def worker(name: str, cores: int = 1, **arguments: Any) -> Any:
        asked.append((name, cores, arguments["size"], arguments["threads"], arguments["which"]))
        return {
            n: {"median": 0.002 * (k + 1), "lower": 0.001, "upper": 0.003}
            for k, n in enumerate(arguments["names"])
        }

    monkeypatch.setattr(parts, "run_worker", worker)
    monkeypatch.setattr(parts, "available_cores", lambda: 4)
    assert main(["bench", "--parts", "step", "--sizes", "source"]) == 0
    assert asked == [("passes", 1, "source", 1, "step"), ("passes", 4, "source", None, "step")]
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "2.000" in line]
    assert rows[0][:4] == ["source", "1", "numpy", "2.000"] and rows[0][-1] == "1.00"


def test_a_failing_measurement_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(parts.PARTS, "step", lambda config: parts.run_worker("passes", size="no"))
    assert main(["bench", "--parts", "step"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpt-parity: error: benchmark of passes: ") and error.count("\n") == 1


def test_what_cannot_be_written_is_known_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "run_python", lambda *arguments: pytest.fail("it measured"))
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff")
    assert main(["bench", "--parts", "start", "--report", str(page)]) == 2
    monkeypatch.setattr("gpt_parity.plots.importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--parts", "growth", "--report", str(tmp_path / "new.md")]) == 2
    undecodable, missing = capsys.readouterr().err.splitlines()
    assert "can't decode byte 0xff" in undecodable and "needs matplotlib; install it" in missing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0.0}, "seconds is 0.0, a finite number above 0 is needed"),
        ({"parts": ()}, "parts is empty"),
        ({"parts": ("speed",)}, "parts has 'speed'"),
        ({"sizes": ("large",)}, "sizes has 'large'"),
        ({"recipe_steps": 0}, "recipe_steps is 0, at least 1 is needed"),
        ({"report": Path("a"), "json": Path("a")}, "json and report are both a, two files"),
        ({"report": Path("no/such/folder/file.md")}, "a file in a folder that exists is needed"),
    ],
)
def test_refuses_what_cannot_be_measured(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**arguments)


def test_the_sizes_are_those_of_the_design() -> None:
    found = {n: (p.length, p.model.embedding_size, p.model.blocks, p.batch_size)
             for n, p in BENCHMARKS.items()}  # fmt: skip
    assert found == {"source": (32, 64, 2, 4), "small": (64, 128, 4, 12),
                     "medium": (256, 384, 6, 8), "baby": (64, 128, 4, 12),
                     "gpt2": (64, 768, 12, 1)}  # fmt: skip
