"""The main job: its verdicts, its JSON, its exit codes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt_parity import cli
from gpt_parity.backends import build_model
from gpt_parity.checkpoint import Checkpoint, save_checkpoint
from gpt_parity.choices import MODELS, ModelName
from gpt_parity.config import TrainConfig
from gpt_parity.corpus import CharTokenizer
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle import slips
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.verify import verify
from numpy_impl import functional
from numpy_impl.tensor import Tensor

TEXT = "the cat sat on the mat, the mat sat on the cat; " * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(text: Path, *flags: str) -> int:
    steps = [] if "--steps" in flags else ["--steps", "0"]
    return cli.main(["verify", "--data", str(text), "--workers", "1", *steps, *flags])


@pytest.mark.parametrize(("model", "entries", "parameters"), [("gpt", 20, 16), ("gpt2", 31, 28)])
def test_everything_is_compared_and_agrees(
    model: ModelName, entries: int, parameters: int, text: Path, tmp_path: Path, capsys
) -> None:
    flags = ["--steps", "2", "--json", str(tmp_path / "v.json"), "--model", model]
    assert run(text, *flags) == 0
    out = capsys.readouterr().out
    assert "PASS: numpy_impl and torch_impl agree" in out and out.count("slip seen") == 6
    content = json.loads((tmp_path / "v.json").read_text())
    assert (content["schema"], content["version"], content["ok"]) == (
        "gpt-parity/verification", 1, True,
    )  # fmt: skip
    tensors = content["tensors"]
    for backend, dtype in (("torch", "float64"), ("numpy", "float32"), ("torch", "float32")):
        kinds = [t["kind"] for t in tensors if (t["backend"], t["dtype"]) == (backend, dtype)]
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        assert counts == {
            "loss": 1, "forward": entries, "gradient": entries, "parameter gradient": parameters,
        }  # fmt: skip
    assert len(content["complex_step"]) == entries + parameters
    assert {(r["backend"], r["dtype"]) for r in content["lockstep"]} == {
        ("torch", "float64"), ("numpy", "float32"), ("torch", "float32"),
    }  # fmt: skip
    assert max(t["ratio"] for t in tensors) > 0.0  # something was not bitwise equal
    assert content["provenance"]["torch"] == torch.__version__


def test_changes_of_the_backend_are_part_of_the_verdict(
    text: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(text, "--hops", "1", "--json", str(tmp_path / "v.json")) == 0
    out = capsys.readouterr().out
    assert "and in 20 float64 steps with 1 changes of the backend; worst" in out
    rows = json.loads((tmp_path / "v.json").read_text())["lockstep"]
    assert {(r["backend"], r["dtype"], r["steps"]) for r in rows} == {("1 hops", "float64", 20)}
    monkeypatch.setattr(Checkpoint, "load_optimizer", lambda *_: None)
    assert run(text, "--hops", "1") == 1
    assert "FAIL: training leaves the tolerance in " in capsys.readouterr().out


def test_the_table_fits_a_terminal(text: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(text, "--steps", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith(" ")]
    assert len(table) > 50 and max(map(len, table)) <= 80
    for name in (
        "transformers.0.feed_forward.output.output",
        "embedding.positional_embedding.weight",
    ):
        assert any(name in line for line in table), name


@pytest.mark.parametrize("model", MODELS)
def test_a_difference_in_meaning_is_laid_at_the_right_door(
    model: ModelName, text: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The erf form of GELU in one twin: complex step sides with the other."""
    monkeypatch.setattr(torch.nn.GELU, "forward", lambda self, x: torch.nn.functional.gelu(x))
    assert run(text, "--model", model) == 1
    out = capsys.readouterr().out
    assert "FAIL: torch float64 first leaves the tolerance at forward transformers.0." in out
    assert "feed_forward.gelu.output" in out and "autograd stands alone" in out


def test_a_wrong_closure_is_laid_at_the_right_door(
    text: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GELU's derivative without the factor 3 of the cubic term."""
    right = functional.gelu

    def wrong(x: Tensor) -> Tensor:
        out = right(x)
        c = x.data
        t = np.tanh(functional.SQRT_2_OVER_PI * c * (1.0 + 0.044715 * c * c))
        du = functional.SQRT_2_OVER_PI * (1.0 + 0.044715 * c * c)

        def gradient_fn(grad):
            return (grad * 0.5 * (1.0 + t + c * (1.0 - t * t) * du),)

        return Tensor.from_op("gelu", out.data, (x,), gradient_fn)

    monkeypatch.setattr(functional, "gelu", wrong)
    assert run(text) == 1
    out = capsys.readouterr().out
    assert "first leaves the tolerance at gradient transformers.1.feed_forward.input.output" in out
    assert "the closure stands alone" in out


def test_a_norm_that_divides_by_one_less_is_laid_at_the_right_door(
    text: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbiased variance in one twin's norms: complex step sides with the other."""

    def unbiased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias

    monkeypatch.setattr(
        "torch_impl.layers.LayerNorm.forward",
        lambda self, x: unbiased(x, self.weight, self.bias),
    )
    assert run(text, "--model", "gpt2") == 1
    out = capsys.readouterr().out
    assert (
        "FAIL: torch float64 first leaves the tolerance at forward "
        "transformers.0.attention_norm.output" in out
    )
    assert "autograd stands alone" in out


def test_heads_that_are_read_in_another_order_are_found_at_the_first_score(
    text: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(B, T, H, 3, D) in place of (B, T, 3, H, D): all shapes agree, and so do all sizes."""

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = self.input(x).reshape(*x.shape[:2], self.heads, 3, x.shape[2] // self.heads)
        return tuple(part.transpose(1, 2) for part in qkv.unbind(3))

    monkeypatch.setattr("torch_impl.gpt2.GPT2Attention.split", split)
    assert run(text, "--model", "gpt2") == 1
    out = capsys.readouterr().out
    assert "first leaves the tolerance at forward transformers.0.attention.mask.input" in out


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_twin_that_gives_nan_differs_and_is_not_unusable(
    processes: str, text: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training would stop at once; the pass has said which tensor is wrong first."""
    monkeypatch.setattr(torch.nn.GELU, "forward", lambda self, x: x * float("nan"))
    flags = ["--data", str(text), "--steps", "2", "--workers", processes]
    assert cli.main(["verify", *flags]) == 1
    assert "feed_forward.gelu.output, not finite" in capsys.readouterr().out


def test_a_blind_comparer_ends_the_run(text: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slips, "VISIBLE", 1e30)
    assert run(text) == 1
    out = capsys.readouterr().out
    assert "slip MISSED" in out and "FAIL: the comparer missed a planted slip" in out


@pytest.mark.parametrize(("kind", "entries"), [
    (GPTConfig, 12), (functools.partial(GPT2Config, heads=3), 18),
], ids=MODELS)  # fmt: skip
def test_a_checkpoint_is_verified_with_its_own_sizes(
    kind: Callable[..., GPTConfig], entries: int, text: Path, tmp_path: Path
) -> None:
    tokenizer = CharTokenizer.from_text(TEXT)
    config = kind(tokenizer.vocab_size, context_size=8, embedding_size=12, blocks=1)
    model = build_model("numpy", config, seed=3, dtype="float64")
    for parameter in model.parameters():
        parameter.data *= 3.0
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, model, config=config, vocabulary=tokenizer.vocabulary)
    result = verify(VerifyConfig(data=text, checkpoint=path, steps=2, workers=1))
    assert result.ok and result.model == config
    shared = build_model("torch", config)
    assert len(result.reports["torch", "float64"].judgements) == 1 + 2 * entries + len(
        list(shared.parameters())
    )


def test_two_processes_give_what_one_gives(text: Path) -> None:
    one, two = (verify(VerifyConfig(data=text, steps=2, workers=processes)) for processes in (1, 2))
    assert one.lockstep == two.lockstep and one.reports == two.reports


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "missing.txt"], "missing.txt"),
        (["--steps", "-1"], "steps"),
        (["--steps", "many"], "many"),
        (["--workers", "0"], "workers"),
        (["--checkpoint", "nowhere"], "nowhere"),
        (["--json", "nowhere/v.json"], "nowhere/v.json"),
        (["--json", "."], "json is ., which is no regular file; a file is needed"),
        (["--json", "/dev/null"], "json is /dev/null, which is no regular file; a file is needed"),
        (["--data", "text.txt", "--json", "text.txt"], "json is text.txt, which belongs to the"),
        (["--data", "text.txt", "--html", "./text.txt"], "html is text.txt, which belongs to the"),
        (["--checkpoint", "run", "--html", "run/c.html"], "which belongs to the input run"),
        (["--data", "/dev/zero"], "/dev/zero: cannot be read, is a device"),
        (["--checkpoint", "/dev/zero"], "/dev/zero: is no regular file"),
        (["--json", ""], "a path is needed"),
        (["--sted", "1"], "--sted"),
    ],
)
def test_a_mistake_of_the_user_is_one_line(
    flags: list[str], message: str, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("kept as it is")
    Path("run").mkdir()
    Path("run/c.html").touch()
    assert cli.main(["verify", *flags]) == 2
    assert Path("text.txt").read_text() == "kept as it is"
    error = capsys.readouterr().err
    assert error.startswith("gpt-parity: error:") and error.count("\n") == 1 and message in error


def test_a_folder_that_cannot_be_written_is_known_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt_parity.choices.os.access", lambda path, mode: mode != os.W_OK)
    assert cli.main(["verify", "--json", str(tmp_path / "v.json")]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"gpt-parity: error: json is {tmp_path / 'v.json'}, in a folder that cannot be written\n"
    )


def test_an_invalid_text_and_a_foreign_checkpoint(text: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    assert cli.main(["verify", "--data", str(tmp_path / "bad.txt")]) == 2
    assert "bad.txt" in (error := capsys.readouterr().err) and "2" in error
    config = GPTConfig(3, context_size=8, embedding_size=12, blocks=1)
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, build_model("numpy", config), config=config, vocabulary="abc")
    assert cli.main(["verify", "--data", str(text), "--checkpoint", str(path)]) == 2
    assert "vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(("own", "other"), [("gpt", "gpt2"), ("gpt2", "gpt")])
def test_a_checkpoint_is_of_one_model(
    own: ModelName, other: ModelName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(model=own).model_config(3)
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, build_model("numpy", config), config=config, vocabulary="abc")
    arguments = ["verify", "--steps", "0", "--checkpoint", str(path), "--model"]
    assert cli.main([*arguments, other]) == 2
    assert f"model is {other}, {path} is of a {own}" in capsys.readouterr().err
    assert cli.main([*arguments, own]) == 2  # the text is no part of its vocabulary
    assert "vocabulary" in capsys.readouterr().err


def test_a_text_of_one_character_cannot_be_verified(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("a" * 4000)
    assert cli.main(["verify", "--data", str(tmp_path / "a.txt")]) == 2
    assert "a.txt: has one distinct character" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_run_quietly(text: Path) -> None:
    """The exit code of a broken pipe is not that of a difference."""
    code = "import sys; from gpt_parity.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "verify", "--data", str(text), "--steps", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_without_torch_one_line_says_how_to_install_it(text: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gpt_parity.cli import main; "
        "sys.exit(main(['verify', '--data', sys.argv[2]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(text)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.count("\n") == 1
        and 'pip install -c constraints.txt -e ".[torch]"' in done.stderr
    )
