"""Arithmetics of the torch twin: their flags, bf16 and tf32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gpt_parity import precision
from gpt_parity.backends import load_backend
from gpt_parity.cli import main
from gpt_parity.config import LATER, TrainConfig
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.precision import Engine, require_machine
from gpt_parity.training import new_trainer
from parity_tests.tiny_twins import (
    MODELS,
    SIZES,
    TEXT,
    batch,
    content,
    one_line,
    tiny,
    train,
)

# Importing torch's compiler warns about torch's own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.folder_of_its_own(TEXT),
]


def losses(folder: str) -> list[float]:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "train"]


# --- Flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "bf16", "--dtype", "float64"],
         "dtype is float64, precision is bf16 and needs float32"),
        (["--precision", "float64", "--dtype", "float32"],
         "dtype is float32, precision is float64 and needs float64"),
        (["--precision", "tf32"], "precision is tf32, which --device cuda alone has"),
        (["--compile", "--anomaly"], "compile and anomaly are both set, one of them is needed"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_leaves_no_folder(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", *flags) == 2
    assert one_line(capsys) == message and not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--precision", "bf16"], "precision is bf16"),
        (["--precision", "float32"], "precision is float32"),
        (["--compile"], "compile is set"),
        (["--device", "cuda"], "device is cuda"),
    ],
)
def test_only_the_torch_twin_has_them(
    flags: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", *flags, backend="numpy") == 2
    assert one_line(capsys) == f"{what}, which only --backend torch can"
    assert not Path("run").exists()
    assert train("run", backend="numpy") == 0
    capsys.readouterr()
    if "float32" in flags:  # which the run has
        assert main(["train", "--resume", "run", *flags]) == 0
        return
    assert main(["train", "--resume", "run", *flags]) == 2
    expected = "precision is bf16, the run" if "bf16" in flags else f"{what}, which only"
    assert one_line(capsys).startswith(expected)


def test_unknown_choices_name_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"precision is 'half', one of \('float64', "):
        TrainConfig(backend="torch", precision="half")
    with pytest.raises(ValueError, match=r"device is 'tpu', one of \('cpu', 'cuda'\) is needed"):
        VerifyConfig(device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_device_that_is_absent_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = ["--backend", "torch", "--out", "run"] if command == "train" else []
    assert main([command, "--data", "text.txt", "--device", "cuda", *backend]) == 2
    assert one_line(capsys) == (
        "device is cuda, which PyTorch does not find here; a GPU and a PyTorch built for it are "
        "needed, or --device cpu"
    )
    assert not Path("run").exists()


def test_a_gpu_that_knows_no_such_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (7, 5))
    require_machine("float32", "cuda", True)
    for name in ("bf16", "tf32"):
        with pytest.raises(ValueError, match=f"precision is {name}, .* 8.0; this one has 7.5"):
            require_machine(name, "cuda", False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="this machine has 1 for process 1 of it"):
        require_machine(None, "cuda", False)


def test_without_a_c_compiler_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision.shutil, "which", lambda name: None)
    assert train("run", "--compile") == 2
    assert one_line(capsys).startswith("compile is set, which needs a C++ compiler; none of g++, ")


def test_a_dtype_said_as_a_precision_is_that_dtype() -> None:
    config = TrainConfig(backend="torch", precision="float64")
    assert config.dtype == "float64" and config.run_folder == Path("runs/torch-float64-seed42")
    config = TrainConfig(backend="torch", precision="bf16")
    assert config.dtype == "float32" and config.run_folder == Path("runs/torch-bf16-seed42")
    again = TrainConfig.from_recipe(json.loads(json.dumps(config.recipe)))
    assert again == config


def test_a_recipe_of_before_means_the_default() -> None:
    recipe = TrainConfig(backend="torch", dtype="float64").recipe
    fresh = {"precision", "compile", "device"}
    assert fresh <= LATER
    old = TrainConfig.from_recipe({k: v for k, v in recipe.items() if k not in fresh})
    assert (old.precision, old.compile, old.device) == (None, False, "cpu")
    assert old.arithmetic == "float64" and old.recipe == recipe


# --- bf16


@pytest.mark.parametrize("model", MODELS)
def test_autocast_computes_products_in_bfloat16_and_the_loss_in_float32(model: str) -> None:
    plain, tokens = tiny(model), batch(model)
    seen = []
    layer = plain.transformers[0].feed_forward.input
    with layer.register_forward_hook(lambda *call: seen.append(call[-1].dtype)):
        logits = Engine(plain, "bf16")(tokens[0])
        Engine(plain)(tokens[0])
    assert seen == [torch.bfloat16, torch.float32] and logits.dtype == torch.float32
    load_backend("torch").GPTLoss()(logits, tokens[1]).backward()
    assert {p.grad.dtype for p in plain.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("model", MODELS)
def test_bf16_training_is_finite_and_keeps_float32(model: str) -> None:
    sizes = ("--model", model)
    assert train("bf16", *sizes, "--precision", "bf16") == 0
    assert train("float32", *sizes) == 0
    coarse, fine = losses("bf16"), losses("float32")
    assert len(coarse) == 6 and all(map(math.isfinite, coarse)) and coarse != fine
    # A loss near ln V is off by less than the roundoff of bfloat16, 2^-8, times itself.
    assert max(abs(a - b) / b for a, b in zip(coarse, fine, strict=True)) < 2.0**-8
    arrays = {f: load_file(Path(f, "checkpoint.safetensors")) for f in ("bf16", "float32")}
    kinds = [{name: (a.dtype, a.shape) for name, a in found.items()} for found in arrays.values()]
    assert kinds[0] == kinds[1]  # names, dtypes and shapes of weights and moments
    assert json.loads(Path("bf16/config.json").read_text())["train"]["precision"] == "bf16"


def test_training_and_testing_use_the_same_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call in training and in the validation, none for the sample."""
    calls = []
    right = Engine.__call__

    def counted(engine: Engine, tokens: np.ndarray) -> Any:
        assert engine.precision == "bf16"
        calls.append(engine.module.training)
        return right(engine, tokens)

    monkeypatch.setattr(Engine, "__call__", counted)
    assert train("run", "--precision", "bf16") == 0
    assert calls.count(True) == 6 and calls.count(False) > 0


def test_a_bf16_run_goes_on_to_the_bit_and_keeps_its_precision(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("whole", "--precision", "bf16") == 0
    expected = content("whole")
    (half,) = Path("whole").glob("checkpoint-*3.safetensors")
    assert main(["train", "--resume", str(half), "--precision", "float32"]) == 2
    assert "precision is float32, the run in whole has bf16 and keeps it" in one_line(capsys)
    assert main(["train", "--resume", str(half)]) == 0
    assert content("whole") == expected


def test_a_dtype_and_the_precision_of_its_name_are_one_when_a_run_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("run") == 0
    assert main(["train", "--resume", "run", "--precision", "float32"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--precision", "float64"]) == 2
    assert "precision is float64, the run in run has float32" in one_line(capsys)


# --- tf32


def switch() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def test_the_switch_for_products_is_set_for_whole_steps_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine without a GPU the switch changes nothing, but can be seen."""
    before = switch()
    size = SIZES["gpt"].model
    trainer = new_trainer(TrainConfig(backend="torch", batch_size=3), size)
    trainer.engine = Engine(trainer.model, "tf32")
    seen = []
    weight = trainer.model.output.output.weight
    weight.register_hook(lambda gradient: seen.append(switch()))
    trainer.train_step(*batch("gpt"))
    monkeypatch.setattr(Engine, "_device", lambda engine: torch.device("cuda"))
    trainer.train_step(*batch("gpt"))
    trainer.engine = Engine(trainer.model, "float32")
    trainer.train_step(*batch("gpt"))
    trainer.engine = Engine(trainer.model)
    trainer.train_step(*batch("gpt"))
    assert seen == [before, "tf32", "ieee", before] and switch() == before
    with pytest.raises(KeyError), Engine(trainer.model, "tf32").switched():
        assert switch() == "tf32"
        raise KeyError
    assert switch() == before
