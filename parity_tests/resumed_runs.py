"""Small runs that stop and go on: what they leave behind, and their files changed by hand."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from gpt_parity.checkpoint import Checkpoint, load_checkpoint
from gpt_parity.cli import main
from gpt_parity.training import GPTTrainer

TEXT = "Früh übt sich, was ein Meister werden will.\r\n" * 12
FLAGS = [
    "--context-size", "8", "--embedding-size", "8", "--blocks", "1", "--sample-tokens", "20",
    "--max-steps", "6", "--warmup", "2", "--log-every", "4", "--eval-every", "3",
    "--save-every", "2",
]  # fmt: skip
VARIANTS = [
    ("numpy", "float32", "1"), ("numpy", "float64", "2"), ("torch", "float32", "1"),
    ("torch", "float64", "1"),
]  # fmt: skip


def train(out: str, *flags: str) -> int:
    return main(["train", "--data", "text.txt", "--out", out, *FLAGS, *flags])


def resume(folder: str, *flags: str) -> int:
    return main(["train", "--resume", folder, *flags])


def kill_at(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process the signal while training takes its `step`-th step."""
    original = GPTTrainer.train_step

    def train_step(trainer: GPTTrainer, tokens: np.ndarray, targets: np.ndarray) -> Any:
        if trainer.steps + 1 == step:
            os.kill(os.getpid(), number)
        return original(trainer, tokens, targets)

    monkeypatch.setattr(GPTTrainer, "train_step", train_step)


def results(folder: str) -> dict[str, Any]:
    """All that a run leaves behind and that the clock does not touch."""
    checkpoint = load_checkpoint(Path(folder))
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return {
        "arrays": arrays(checkpoint),
        "step": checkpoint.step,
        "run": replace(checkpoint.run, history=[], metrics_size=0),
        "metrics": [{k: v for k, v in m.items() if k != "tokens_per_second"} for m in lines],
        "sample": Path(folder, "sample.txt").read_bytes(),
    }


def arrays(checkpoint: Checkpoint) -> dict[str, bytes]:
    found = {f"weights {name}": array.tobytes() for name, array in checkpoint.weights.items()}
    for kind, values in checkpoint.optimizer.items():
        found |= {f"{kind} {name}": np.asarray(value).tobytes() for name, value in values.items()}
    return found | {"sample": str(checkpoint.run.sample.get_state()).encode()}


def refused(capsys: pytest.CaptureFixture[str], folder: str, *flags: str) -> str:
    """The one line of a refusal that leaves the run's folder as it is."""
    before = {path: path.read_bytes() for path in Path("run").iterdir()}
    capsys.readouterr()
    assert resume(folder, *flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and before == {p: p.read_bytes() for p in Path("run").iterdir()}
    return lines[0].removeprefix("gpt-parity: error: ")


def rewrite(arrays: Callable[[dict[str, Any]], Any], run: Callable[[dict[str, Any]], Any]) -> None:
    """Change the checkpoint of the folder "run" by hand."""
    path = Path("run/checkpoint.safetensors")
    data = path.read_bytes()
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    manifest = json.loads(header["__metadata__"]["manifest"])
    arrays(tensors)
    run(manifest["run"])
    path.write_bytes(save(tensors, metadata={"manifest": json.dumps(manifest)}))


def nothing(_: dict[str, Any]) -> None:
    pass
