"""Same seed, same backend, same threads: same bits, in any process; global randomness untouched."""

from __future__ import annotations

import ast
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main

CHECKOUT = Path(__file__).resolve().parents[1]
TEXT = "Was du ererbt von deinen Vätern hast, erwirb es, um es zu besitzen.\n" * 12
pytestmark = [pytest.mark.reference("exact property"), pytest.mark.folder_of_its_own(TEXT)]
FLAGS = [
    "--data", "text.txt", "--context-size", "8", "--embedding-size", "16", "--blocks", "2",
    "--batch-size", "6", "--max-steps", "12", "--warmup", "3", "--eval-every", "5",
    "--sample-tokens", "60",
]  # fmt: skip


def digest(folder: str) -> str:
    """Of all numbers that a run leaves: weights, moments, metrics without times, sample."""
    saved = load_checkpoint(Path(folder))
    content = hashlib.sha256()
    for arrays in (saved.weights, saved.optimizer["exp_avg"], saved.optimizer["exp_avg_sq"]):
        for array in arrays.values():
            content.update(array.tobytes())
    for line in Path(folder, "metrics.jsonl").read_text().splitlines():
        content.update(line.partition(', "tokens_per_second"')[0].encode())
    content.update(Path(folder, "sample.txt").read_bytes())
    return content.hexdigest()


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_and_hash_seeds_change_no_bit(backend: str, threads: str) -> None:
    found = set()
    for hash_seed in ("0", "1"):
        out = f"run{hash_seed}"
        process = subprocess.run(
            [sys.executable, "-m", "gpt_parity", "train", "--backend", backend, "--threads",
             threads, "--out", out, *FLAGS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(CHECKOUT)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert (process.returncode, process.stderr) == (0, "")
        found.add(digest(out))
    assert len(found) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_global_random_states_are_neither_read_nor_set(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training, testing and sampling give the same from any global state, and leave it alone."""
    before = np.random.get_state(), random.getstate(), torch.get_rng_state()
    found = set()
    try:
        for seed in (1, 2):
            np.random.seed(seed)
            random.seed(seed)
            torch.manual_seed(seed)
            states = str(np.random.get_state()), random.getstate(), torch.get_rng_state().tolist()
            assert main(["train", "--backend", backend, "--out", f"run{seed}", *FLAGS]) == 0
            assert states == (
                str(np.random.get_state()), random.getstate(), torch.get_rng_state().tolist(),
            )  # fmt: skip
            found.add(digest(f"run{seed}"))
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])
        torch.set_rng_state(before[2])
    assert len(found) == 1


def global_draws(source: str) -> list[str]:
    """Calls in a source text that draw from, or seed, a global random state."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, function = name.rpartition(".")
        generators = {"RandomState", "default_rng", "Generator", "SeedSequence", "Random"}
        arguments = {keyword.arg for keyword in node.keywords}
        is_global = (
            (module in ("np.random", "numpy.random", "random") and function not in generators)
            or (function in generators and not node.args and not node.keywords)
            or (module == "torch" and function in ("manual_seed", "seed", "set_rng_state"))
            or (
                module == "torch"
                and function in ("rand", "randn", "randint", "randperm", "normal", "multinomial")
                and "generator" not in arguments
            )
        )
        if is_global:
            found.append(f"{name}, line {node.lineno}")
    return found


@pytest.mark.parametrize("package", ["numpy_impl", "torch_impl", "gpt_parity", "scripts"])
def test_no_source_draws_from_a_global_state(package: str) -> None:
    files = sorted((CHECKOUT / package).rglob("*.py"))
    assert files
    found = {file.name: global_draws(file.read_text(encoding="utf-8")) for file in files}
    assert not {name: draws for name, draws in found.items() if draws}


@pytest.mark.parametrize(
    "line",
    [
        "np.random.rand(3)", "np.random.seed(1)", "random.random()", "np.random.default_rng()",
        "torch.manual_seed(1)", "torch.randn(3)", "np.random.RandomState()",
    ],
)  # fmt: skip
def test_global_draws_are_recognised(line: str) -> None:
    assert global_draws(f"x = 1\ny = {line}\n")
