"""Arithmetics of the torch twin: bf16, tf32, compiled, on another device; and their verdicts."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gpt_parity import precision
from gpt_parity.backends import build_model, load_backend
from gpt_parity.cli import main
from gpt_parity.config import (
    LATER,
    PRESETS,
    GPT2Config,
    GPTConfig,
    TrainConfig,
    VerifyConfig,
)
from gpt_parity.oracle import slips
from gpt_parity.oracle.arithmetic import Arithmetic, one_pass, show_slips_in
from gpt_parity.oracle.rounding import UNITS
from gpt_parity.precision import Engine, require_machine
from gpt_parity.tensors import as_array
from gpt_parity.training import new_trainer
from gpt_parity.verify import verify
from gpt_parity.weights import get_weights
from torch_impl import functional

# Importing torch's compiler warns about torch's own code.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")

TEXT = "the cat sat on the mat, the mat sat on the cat; " * 20
MODELS = ("gpt", "gpt2")
SIZES = {"gpt": PRESETS["tiny"], "gpt2": PRESETS["gpt2-tiny"]}
FLAGS = ("--data", "t.txt", "--max-steps", "6", "--context-size", "8",
         "--embedding-size", "8", "--blocks", "1", "--sample-tokens", "5", "--save-every", "3",
         "--log-every", "1", "--seed", "7")  # fmt: skip
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs CUDA: run on a machine with a GPU and a PyTorch built for it",
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text(TEXT)


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes one graph of a call, without C++, which would take most of the time."""
    whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)


def train(out: str, *flags: str, backend: str = "torch") -> int:
    return main(["train", "--backend", backend, *FLAGS, "--out", out, *flags])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("gpt-parity: error: ") and error.count("\n") == 1
    return error.removeprefix("gpt-parity: error: ").rstrip()


def batch(model: str) -> tuple[np.ndarray, np.ndarray]:
    size = SIZES[model]
    rng = np.random.RandomState(3)
    return tuple(rng.randint(0, size.model.vocab_size, (2, size.batch_size, size.length)))


def tiny(model: str, dtype: str = "float32") -> Any:
    return build_model("torch", SIZES[model].model, seed=1, dtype=dtype)


def losses(folder: str) -> list[float]:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "train"]


def content(folder: str) -> dict[str, bytes]:
    arrays = load_file(Path(folder, "checkpoint.safetensors"))
    return {name: array.tobytes() for name, array in arrays.items()}


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
    with pytest.raises(ValueError, match=r"precision is 'half', one of \(None, 'float64', "):
        TrainConfig(backend="torch", precision="half")
    with pytest.raises(ValueError, match=r"device is 'tpu', one of \('cpu', 'cuda'\) is needed"):
        VerifyConfig(device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_device_that_is_absent_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = ["--backend", "torch", "--out", "run"] if command == "train" else []
    assert main([command, "--data", "t.txt", "--device", "cuda", *backend]) == 2
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


# --- Devices: the meta device holds shapes alone, and refuses what is on another


@pytest.mark.parametrize("model", MODELS)
def test_a_twin_makes_its_tensors_where_its_weights_are(model: str) -> None:
    meta, (tokens, targets) = tiny(model).to("meta"), batch(model)
    made = []
    right = torch.from_numpy

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in (torch.nn.functional.embedding, torch.Tensor.masked_fill):
                made.extend((function.__name__, a.device.type) for a in args
                            if isinstance(a, torch.Tensor))  # fmt: skip
            return function(*args, **(kwargs or {}))

    with Watch():
        logits = meta(tokens)
        loss = load_backend("torch").GPTLoss()(logits, targets)
    loss.backward()
    assert torch.from_numpy is right
    assert {name for name, _ in made} == {"embedding", "masked_fill"}
    assert {device for _, device in made} == {"meta"}
    assert logits.device.type == loss.device.type == "meta"
    assert {p.grad.device.type for p in meta.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "call",
    [
        lambda model, tokens: model.predict(tokens),
        lambda model, tokens: model.predict_next(tokens),
        lambda model, tokens: as_array(model(tokens)),
        lambda model, tokens: load_backend("torch").AdamWOptimizer(model.parameters()).state(),
    ],
    ids=["predict", "predict_next", "as_array", "state"],
)
@pytest.mark.parametrize("model", MODELS)
def test_results_are_fetched_from_another_device(
    model: str, call: Callable[[Any, np.ndarray], Any]
) -> None:
    """A meta tensor has no values to fetch, and says so; `numpy()` alone would fail otherwise."""
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        call(tiny(model).to("meta"), batch(model)[0])


def test_masks_ids_and_moments_go_to_the_other_operand() -> None:
    table = torch.zeros(5, 3, device="meta")
    assert functional.embedding(table, torch.tensor([1, 4])).device.type == "meta"
    q = torch.zeros(2, 4, 3, device="meta")
    output, weights = functional.self_attention(q, q, q, np.tri(4, dtype=bool))
    assert output.device.type == weights.device.type == "meta"
    model = tiny("gpt")
    state = load_backend("torch").AdamWOptimizer(model.parameters()).state()
    optimizer = load_backend("torch").AdamWOptimizer(model.to("meta").parameters())
    optimizer.load_state(state)
    kept = [x for s in optimizer.optimizer.state.values() for x in s.values()]
    assert len(kept) == 3 * len(optimizer.parameters)
    assert {x.device.type for x in kept} == {"meta"}


@needs_gpu
@pytest.mark.parametrize("name", ["float64", "float32", "bf16", "tf32"])
@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_is_judged_and_trains(model: str, name: str) -> None:
    flags = ["--model", model, "--precision", name, "--device", "cuda"]
    assert main(["verify", "--data", "t.txt", "--steps", "0", "--workers", "1", *flags]) == 0
    assert train("run", *flags) == 0
    assert main(["train", "--resume", "run", "--device", "cpu"]) == (2 if name == "tf32" else 0)


# --- Compiled


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("model", MODELS)
def test_a_call_is_one_graph_with_the_checks_outside_of_it(model: str) -> None:
    plain, (tokens, targets) = tiny(model, "float64"), batch(model)
    names = [name for name, _ in plain.named_parameters()]
    engine, loss_fn = Engine(plain, compile=True), load_backend("torch").GPTLoss()
    expected = plain(tokens)
    logits = engine(tokens.astype(np.int32))
    # Summed in another order: u times the length of the longest sum, and a little.
    np.testing.assert_allclose(as_array(logits), as_array(expected), rtol=1e-13)
    loss_fn(logits, targets).backward()
    assert all(p.grad is not None for p in plain.parameters())
    assert [name for name, _ in engine.model.named_parameters()] == names
    for wrong, error in ((tokens - 5, ValueError), (tokens * 1.0, TypeError)):
        with pytest.raises(error) as eager:
            plain(wrong)
        with pytest.raises(error) as compiled:
            engine(wrong)
        assert str(compiled.value) == str(eager.value)


@pytest.mark.usefixtures("without_code")
def test_compile_may_change_on_the_way_and_leaves_plain_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("whole") == 0
    expected = content("whole")
    assert train("run", "--compile") == 0
    assert "torch float32 compiled, 6 steps" in capsys.readouterr().out
    assert content("run").keys() == expected.keys()
    (half,) = Path("whole").glob("checkpoint-*3.safetensors")
    assert main(["train", "--resume", str(half), "--compile", "--device", "cpu"]) == 0
    assert content("whole").keys() == expected.keys()
    assert not [name for name in content("whole") if "_orig_mod" in name]
    assert main(["train", "--resume", "whole", "--compile=false"]) == 0
    out = capsys.readouterr().out
    assert "torch float32, 6 steps, all taken" in out


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_training_has_the_losses_of_eager_training(model: str) -> None:
    config = TrainConfig(backend="torch", model=model, precision="float64", batch_size=3)
    trainers = [new_trainer(config, SIZES[model].model) for _ in range(2)]
    trainers[1].engine = Engine(trainers[1].model, "float64", compile=True)
    tokens, targets = batch(model)
    found = [[t.train_step(tokens, targets).loss for _ in range(5)] for t in trainers]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
    assert found[0][-1] < found[0][0]
    weights = [get_weights(t.model) for t in trainers]
    assert weights[0].keys() == weights[1].keys()


# --- Verdicts


def judged(model: str, arithmetic: Arithmetic) -> Any:
    size = SIZES[model]
    weights = get_weights(build_model("numpy", size.model, seed=1, dtype="float32"))
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    return one_pass(arithmetic, size.model, weights, *batch(model))


@pytest.mark.parametrize("name", ["float64", "float32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_pass_is_judged_in_its_own_arithmetic(model: str, name: str) -> None:
    report = judged(model, Arithmetic(name))
    assert report.ok and report.complete
    names = [j.name for j in report.judgements]
    assert len(names) == 2 + len(list(tiny(model).parameters()))
    unit = {"bf16": "bfloat16"}.get(name, name)
    assert any(f"would have been noticed in {unit}" in note for note in report.notes)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_does_not_pass_for_float32(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bfloat16, judged as float32: what the tolerances are there for."""
    right = Engine.__call__
    monkeypatch.setattr(
        Engine, "__call__", lambda e, tokens: right(Engine(e.model, "bf16"), tokens)
    )
    assert not judged(model, Arithmetic("float32")).ok


MISTAKES = {
    "gelu left out": ("GELU", lambda self, x: x),
    "the gradient of gelu has the wrong sign": (
        "GELU", lambda self, x: 2 * functional.gelu(x).detach() - functional.gelu(x)
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ["gelu left out", "the gradient of gelu has the wrong sign"])
@pytest.mark.parametrize("model", MODELS)
def test_a_mistake_above_the_floor_is_found_in_bf16(
    model: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, forward = MISTAKES[mistake]
    monkeypatch.setattr(getattr(torch.nn, layer), "forward", forward)
    report = judged(model, Arithmetic("bf16"))
    assert not report.ok


def test_verify_says_what_bf16_can_show(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["verify", "--data", "t.txt", "--steps", "0", "--workers", "1", "--precision", "bf16"]
    assert main([*flags, "--json", "v.json", "--html", "v.html"]) == 0
    out = capsys.readouterr().out
    assert "torch bfloat16 on cpu: PASS: 18 tensors agree" in out
    assert "floor: a relative error of " in out and "would have been noticed in bfloat16" in out
    assert out.count("torch bfloat16 on cpu slip seen: ") == 2
    assert "of its size on), " in out and ", and one pass in torch bfloat16 on cpu; worst" in out
    (part,) = json.loads(Path("v.json").read_text())["arithmetic"]
    assert part["engine"] == "torch bfloat16 on cpu" and len(part["tensors"]) == 18
    assert "torch bfloat16 on cpu: PASS" in Path("v.html").read_text()

    class Doubled(Engine):
        """The loss of everything twice: a slip that is only in the engine."""

        def __call__(self, tokens: np.ndarray) -> Any:
            return -super().__call__(tokens)

    monkeypatch.setattr("gpt_parity.oracle.arithmetic.Engine", Doubled)
    assert main(flags) == 1
    out = capsys.readouterr().out
    assert "torch bfloat16 on cpu: FAIL: " in out
    assert "FAIL: torch bfloat16 on cpu first leaves the tolerance at value/output" in out


def test_a_comparer_that_misses_the_slip_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = _plain("bfloat16", GPTConfig)
    assert all(s.ok for s in show_slips_in(*clean, UNITS["bfloat16"]))
    monkeypatch.setattr(slips, "VISIBLE", 1e30)
    assert not any(s.ok for s in show_slips_in(*clean, UNITS["bfloat16"]))
    monkeypatch.undo()
    # Tolerances of a coarser format than the one at hand hide what they would show.
    assert not any(s.ok for s in show_slips_in(*clean, UNITS["float32"]))


def _plain(unit: str, kind: type[GPTConfig]) -> Any:
    from gpt_parity.verify import _plain_case

    return _plain_case(kind, UNITS[unit])


@pytest.mark.parametrize("kind", [GPTConfig, GPT2Config])
@pytest.mark.parametrize("unit", ["float64", "float32", "tf32", "bfloat16"])
def test_a_slip_says_how_large_it_has_to_be(kind: type[GPTConfig], unit: str) -> None:
    """By that size itself: a little more is seen, half of it is not."""
    clean, tolerances = _plain(unit, kind)
    for sighting in show_slips_in(clean, tolerances, UNITS[unit]):
        assert sighting.ok
        size = float(sighting.description.split("seen from ")[1].split()[0])
        gradient = clean.parameters[sighting.name]
        allowed = tolerances.parameters[sighting.name].whole
        ratio = size * np.linalg.norm(gradient) / allowed
        assert 0.9 * slips.VISIBLE < ratio < 1.1 * slips.VISIBLE


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_float32_is_judged_as_float32(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(model, Arithmetic("float32", compile=True)).ok
    layer, forward = MISTAKES["gelu left out"]
    monkeypatch.setattr(getattr(torch.nn, layer), "forward", forward)
    torch.compiler.reset()
    assert not judged(model, Arithmetic("float32", compile=True)).ok


@pytest.mark.usefixtures("without_code")
def test_verify_judges_the_compiled_twin(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["verify", "--data", "t.txt", "--steps", "0", "--workers", "1", "--model", "gpt2"]
    assert main([*flags, "--compile"]) == 0
    assert "torch float32 compiled on cpu: PASS: 30 tensors agree" in capsys.readouterr().out


def test_an_arithmetic_is_asked_for_by_any_of_its_flags() -> None:
    assert VerifyConfig().arithmetic is None
    assert VerifyConfig(compile=True).arithmetic == "float32"
    assert VerifyConfig(device="cuda").arithmetic == "float32"
    assert VerifyConfig(precision="float64").arithmetic == "float64"
    assert verify(VerifyConfig(data=Path("t.txt"), steps=0, workers=1)).arithmetic == {}
