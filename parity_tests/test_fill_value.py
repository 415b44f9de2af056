"""The fill-value experiment: its measures by hand, and its command."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharDataset
from gpt_parity.lessons import fill_value
from gpt_parity.lessons.config import FillValueConfig
from gpt_parity.lessons.fill_value import future_weight, measure, next_loss, probe
from gpt_parity.model_config import GPTConfig
from gpt_parity.training import GPTTrainer
from gpt_parity.weights import get_weights, set_weights
from numpy_impl import Tensor
from numpy_impl.layers import Layer

pytestmark = pytest.mark.reference("by hand")

CHECKOUT = Path(__file__).resolve().parents[1]
LETTERS = "abcdefgh"
# Letters that nothing before them foretells: whoever guesses better than evenly has looked ahead.
NOISE = "".join(np.random.RandomState(7).choice(list(LETTERS), 6000))
PROSE = "A mask hides what comes next, and a fill decides how well it is hidden.\n" * 30


KEYS = {
    "fill", "training_loss", "training_loss_steps", "test_loss_own_fill", "test_loss_future_hidden",
    "last_position_loss", "future_weight_by_block", "probe", "sample", "weights_sha256",
    "training_curve",
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill_value, "SAMPLE_TOKENS", 20)


def small(backend: str = "numpy", steps: int = 20, **options: Any) -> TrainConfig:
    return TrainConfig(
        backend=backend, max_steps=steps, warmup=5, context_size=6, embedding_size=16, blocks=2,
        threads=1, **options,
    )  # fmt: skip


def dataset(text: str = PROSE, context: int = 6) -> CharDataset:
    return CharDataset(text, context_size=context, batch_size=4)


def constant_model(backend: str, fill: float, bias: np.ndarray, context: int = 6) -> Any:
    """A GPT whose weights are all 0, but for the last bias: its scores are 0, its logits `bias`."""
    config = GPTConfig(len(bias), context, 8, 2, mask_value=fill)
    model = build_model(backend, config, dtype="float64", allow_leak=True)
    weights = {name: np.zeros_like(array) for name, array in get_weights(model).items()}
    set_weights(model, {**weights, "output.output.bias": bias})
    return model


# --- What is measured -----------------------------------------------------------------------------


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_and_minus_1e9_give_the_same_bits(backend: str) -> None:
    a, b, leaking = (measure(small(backend), dataset(), f) for f in (-math.inf, -1e9, -3.0))
    assert replace(a, fill=b.fill) == b
    assert a.own_loss == a.hidden_loss and a.future_weight == (0.0, 0.0)
    assert leaking.weights_sha256 != a.weights_sha256 and leaking.losses != a.losses


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_probe_is_exactly_zero_for_causal_fills_alone(backend: str) -> None:
    for fill in (-math.inf, -1e9):
        found = measure(small(backend), dataset(), fill)
        assert found.is_causal and found.unmoved == len(found.moved) >= 100
        assert set(found.moved) == {0.0}
    for fill in (0.0, -10.0):
        found = measure(small(backend), dataset(), fill)
        assert not found.is_causal and found.unmoved == 0
        assert min(found.moved) > 0.0 and max(found.moved) <= 1.0
        assert min(found.future_weight) > 0.0


class Peeking(Layer):
    """Of two tokens, predicts with 0.9 the one that stands `ahead` places later; evenly at the end.

    ahead = 0 is the token at the position itself.
    """

    vocab_size = 2

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def forward(self, tokens: np.ndarray) -> Tensor:
        seen = np.full((*tokens.shape, 2), 0.5)
        last = tokens.shape[1] - self.ahead
        seen[:, :last] = np.where(np.eye(2, dtype=bool)[tokens[:, self.ahead :]], 0.9, 0.1)
        return Tensor(np.log(seen))


def test_the_probe_measures_the_share_of_probability_that_moves() -> None:
    tokens = np.random.RandomState(0).randint(0, 2, (3, 9))
    moved, unmoved = probe(Peeking(1), tokens, seed=1)
    # Five positions in each window; every later token changes, so 0.9 and 0.1 change places.
    assert unmoved == 0 and len(moved) == 15
    assert np.allclose(moved, 0.8, rtol=1e-12, atol=0.0)
    # From the last position but one there is no token two places later.
    moved, unmoved = probe(Peeking(2), tokens, seed=1)
    assert unmoved == 3 and moved.count(0.0) == 3 and len(moved) == 15
    assert probe(Peeking(0), tokens, seed=1) == ([0.0] * 15, 15)
    # However short the window, something follows each position that is looked at.
    for length in range(2, 9):
        moved, unmoved = probe(Peeking(1), tokens[:, :length], seed=1)
        assert unmoved == 0 and min(moved) > 0.5
    with pytest.raises(ValueError, match=r"tokens have shape \(3, 1\), \(B, T\) with T >= 2"):
        probe(Peeking(0), tokens[:, :1], seed=1)


def test_a_move_of_one_logit_by_one_unit_in_the_last_place_is_no_zero() -> None:
    class Nudged(Peeking):
        def forward(self, tokens: np.ndarray) -> Tensor:
            logits = super().forward(tokens).data
            logits[:, 0, 0] = np.where(tokens[:, -1], logits[:, 0, 0],
                                       np.nextafter(logits[:, 0, 0], 0.0))  # fmt: skip
            return Tensor(logits)

    tokens = np.random.RandomState(0).randint(0, 2, (3, 9))
    assert probe(Nudged(0), tokens, seed=1)[1] == 12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fill", [0.0, -2.0, -1e9])
def test_the_weight_of_the_future_by_hand(backend: str, fill: float) -> None:
    """Scores of 0: each of the n later positions has e^fill, each of the others 1."""
    length, e = 6, math.exp(fill)
    rows = [n * e / (length - n + n * e) for n in range(length - 1, 0, -1)]
    model = constant_model(backend, fill, np.zeros(4))
    trainer = GPTTrainer(model, load_backend(backend).GPTLoss(), None)
    tokens = np.random.RandomState(0).randint(0, 4, (3, length))
    found = future_weight(trainer, tokens, tokens)
    assert len(found) == 2
    assert np.allclose(found, np.mean(rows), rtol=1e-12, atol=0.0)
    assert (fill != 0.0) or found == pytest.approx((0.5, 0.5), rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_positions_loss_by_hand(backend: str) -> None:
    data = dataset(NOISE)
    bias = np.linspace(-1.0, 2.0, 8)
    targets = np.concatenate([y[:, -1] for _, y in data.batches("test")])
    expected = math.log(sum(math.exp(b) for b in bias)) - np.mean(bias[targets])
    found = next_loss(constant_model(backend, 0.0, bias), data)
    assert math.isclose(found, expected, rel_tol=1e-12)
    # Another position, or every one, would have another mean.
    everywhere = np.concatenate([y.ravel() for _, y in data.batches("test")])
    assert abs(np.mean(bias[everywhere]) - np.mean(bias[targets])) > 1e-4


def test_where_the_future_helps_a_leak_flatters() -> None:
    """Of random letters no model without the future can know more than their number."""
    recipe = small(steps=500, learning_rate=1e-2)
    leaking, causal = (measure(recipe, dataset(NOISE), fill) for fill in (0.0, -1e9))
    evenly = math.log(len(LETTERS))
    assert leaking.own_loss < evenly - 0.1 < leaking.hidden_loss
    assert leaking.train_loss < evenly - 0.1 < causal.train_loss
    # Where nothing follows, it knows no more than the other, or less.
    assert leaking.next_loss > evenly - 0.05
    assert causal.own_loss == causal.hidden_loss


def test_divergence_names_the_fill() -> None:
    with pytest.raises(FloatingPointError, match=r"^fill -10: training step \d+: .*not finite"):
        measure(small(learning_rate=1e30), dataset(), -10.0)


# --- The command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    Path("text.txt").write_text(PROSE, encoding="utf-8")
    return tmp_path


def experiment(*flags: str) -> int:
    return main(["experiment", "fill-value", "--data", "text.txt", *flags])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command_prints_writes_and_draws(
    backend: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plots")
    monkeypatch.setenv("COLUMNS", "200")
    flags = ("--values", "-1e9", "-inf", "0", "-10", "--steps", "3", "--backend", backend)
    assert experiment(*flags, "--json", "a.json", "--plot", "a.svg") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 80
    report = json.loads((folder / "a.json").read_text(encoding="utf-8"))
    assert (report["schema"], report["version"]) == ("gpt-parity/fill-value", 1)
    assert [f["fill"] for f in report["fills"]] == [-1e9, "-inf", 0.0, -10.0]
    assert report["recipe"]["backend"] == backend and report["steps"] == 3
    assert report["model"] == {"vocab_size": len(set(PROSE)), "context_size": 32,
                               "embedding_size": 64, "blocks": 2}  # fmt: skip
    assert report["provenance"]["numpy"] == np.__version__ and report["text"]["characters"] == len(
        PROSE
    )
    assert "".join(report["explanation"].split()) in "".join(captured.out.split())
    for found, name in zip(report["fills"], ("-1e9", "-inf", "0", "-10"), strict=True):
        assert set(found) == KEYS
        row = next(line.split() for line in lines if line.split()[:1] == [name])
        keys = ("training_loss", "test_loss_own_fill", "test_loss_future_hidden",
                "last_position_loss")  # fmt: skip
        assert row[1:5] == [f"{found[key]:.4f}" for key in keys]
        assert row[8] == str(found["probe"]["exact_zeros"]) == ("20" if name < "-10" else row[8])
        assert found["training_curve"][-1]["step"] == 3 and len(found["sample"]) == 20
        assert any(line.lstrip().startswith(f"{name}  {found['sample']!r}"[:60]) for line in lines)
    assert (folder / "a.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.reference("exact property")
def test_the_same_command_gives_the_same_files(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plots")
    drawings, fills = [], []
    for _ in range(2):
        flags = ("--values", "0", "-inf", "--steps", "3", "--json", "a.json", "--plot", "a.svg")
        assert experiment(*flags) == 0
        drawings.append((folder / "a.svg").read_bytes())
        fills.append(json.loads((folder / "a.json").read_text(encoding="utf-8"))["fills"])
    assert drawings[0] == drawings[1] and fills[0] == fills[1]


@pytest.mark.reference("exact property")
def test_it_trains_as_the_command_train_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Past the warm-up, through several epochs, and with another seed than the default."""
    steps = ["--steps", "120", "--seed", "3"]
    assert experiment("--values", "-1e9", *steps, "--json", "a.json") == 0
    flags = [
        "train",
        "--data",
        "text.txt",
        "--max-steps",
        "120",
        "--epochs",
        "4",
        "--seed",
        "3",
        "--out",
        "run",
    ]
    assert main(flags) == 0
    (found,) = json.loads((folder / "a.json").read_text(encoding="utf-8"))["fills"]
    assert f"test loss {found['test_loss_own_fill']:.4f} over" in capsys.readouterr().out
    assert CharDataset(PROSE, context_size=32, batch_size=4).batch_count("train") < 60
    model = build_model("numpy", GPTConfig(len(set(PROSE))), dtype="float32")
    set_weights(model, load_checkpoint(Path("run")).weights)
    weights = b"".join(array.tobytes() for array in get_weights(model).values())
    assert found["weights_sha256"] == hashlib.sha256(weights).hexdigest()


def test_it_works_without_torch_matplotlib_and_terminal(folder: Path) -> None:
    """And writes nothing but its result, without warnings, whatever the text holds."""
    Path("text.txt").write_bytes(("ä \x1b[31m \0\r\n\u4e2d中" * 300).encode())
    program = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; "
        "from gpt_parity.cli import main; sys.exit(main())"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, "experiment", "fill-value", "--data",
         "text.txt", "--values", "0", "-inf", "--steps", "2"],
        capture_output=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, b"")
    out = result.stdout.decode("utf-8")
    assert "\x1b" not in out and "\0" not in out and "\r" not in out
    assert max(map(len, out.split("\n"))) <= 80
    samples = out.partition("first test window:\n")[2].partition("\n\n")[0].split("\n")
    assert [line.split()[0] for line in samples] == ["0", "-inf"]


def parsed(monkeypatch: pytest.MonkeyPatch, *flags: str) -> FillValueConfig:
    found: list[FillValueConfig] = []
    monkeypatch.setattr(fill_value, "run", lambda config, console: found.append(config) or 0)
    assert main(["experiment", "fill-value", *flags]) == 0
    return found[0]


def test_values_may_be_negative_and_other_flags_may_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parsed(monkeypatch, "--values", "-1e9", "-inf", "0", "-10", "--steps", "5")
    assert (config.values, config.steps) == ((-1e9, -math.inf, 0.0, -10.0), 5)
    config = parsed(monkeypatch, "--steps", "5", "--values", "-inf", "0")
    assert (config.values, config.steps) == ((-math.inf, 0.0), 5)
    assert parsed(monkeypatch, "--values=-Infinity", "--seed", "3").values == (-math.inf,)
    assert parsed(monkeypatch).values == (-1e9, -math.inf, 0.0, -10.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--values", "-1e9", "--stpes", "5"), "Unknown option: --stpes. Did you mean --steps?"),
        (("--values", "-1e9", "-x"), "Unknown option: -x."),
        (("--values", "--steps", "5"), "values is empty, at least one number is needed"),
        (("--values", "much"), 'unable to convert "much" into float'),
        (("--values", "nan"), "values has nan, numbers below infinity are needed"),
        (("--values", "-1e9", "inf"), "values has inf, numbers below infinity are needed"),
        (("--values", "0", "-0"), "values has [0.0, -0.0], each fill once is needed"),
        (("--steps", "0"), "steps is 0"),
        (("--backend", "jax"), "backend"),
        (("--plot", "a.pdf"), "plot is a.pdf, a file that ends in .png or .svg is needed"),
        (("--json", "no/a.json"), "json is no/a.json, a file in a folder that exists is needed"),
        (("--json", "a.svg", "--plot", "a.svg"), "json and plot are both a.svg"),
        (("--data", "one.txt"), "one.txt: has one distinct character, at least 2 are needed"),
        (("--data", "short.txt"), "short.txt: test split has"),
        (("--data", "none.txt"), "none.txt: cannot be read"),
    ],
)
def test_a_mistake_is_one_line(
    flags: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("one.txt").write_text("a" * 3000, encoding="utf-8")
    Path("short.txt").write_text("ab" * 50, encoding="utf-8")
    before = sorted(folder.iterdir())
    assert main(["experiment", "fill-value", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("gpt-parity: error: ") and message in captured.err
    assert sorted(folder.iterdir()) == before
