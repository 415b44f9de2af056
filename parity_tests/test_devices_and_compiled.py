"""The torch twin on another device, and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import load_backend
from gpt_parity.cli import main
from gpt_parity.config import TrainConfig
from gpt_parity.precision import Engine
from gpt_parity.tensors import as_array
from gpt_parity.training import new_trainer
from gpt_parity.weights import get_weights
from parity_tests.tiny_twins import (
    MODELS,
    SIZES,
    TEXT,
    batch,
    content,
    tiny,
    train,
)
from torch_impl import functional

# Importing torch's compiler warns about torch's own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.folder_of_its_own(TEXT),
]

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs CUDA: run on a machine with a GPU and a PyTorch built for it",
)


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes one graph of a call, without C++, which would take most of the time."""
    whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)


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
    assert main(["verify", "--data", "text.txt", "--steps", "0", "--workers", "1", *flags]) == 0
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
    assert "torch float32 compiled on 1 thread, 6 steps" in capsys.readouterr().out
    assert content("run").keys() == expected.keys()
    (half,) = Path("whole").glob("checkpoint-*3.safetensors")
    assert main(["train", "--resume", str(half), "--compile", "--device", "cpu"]) == 0
    assert content("whole").keys() == expected.keys()
    assert not [name for name in content("whole") if "_orig_mod" in name]
    assert main(["train", "--resume", "whole", "--compile=false"]) == 0
    out = capsys.readouterr().out
    assert "torch float32 on 1 thread, 6 steps, all taken" in out


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


@pytest.mark.usefixtures("without_code")
def test_verify_judges_the_compiled_twin(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["verify", "--data", "text.txt", "--steps", "0", "--workers", "1", "--model", "gpt2"]
    assert main([*flags, "--compile"]) == 0
    assert "torch float32 compiled on cpu: PASS: 30 tensors agree" in capsys.readouterr().out
