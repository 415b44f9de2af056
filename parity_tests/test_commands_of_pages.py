"""The commands of the pages as a reader types them, in order, in a copy of the project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.oracle import load_bundle
from parity_tests.markdown import ROOT, blocks, read

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.slow]

TEXT = "data/tinyshakespeare.txt"
# Which `.ci/run` installs and runs in an environment of its own.
COMMANDS = [b for b in blocks(read("README.md"), "sh") if not b.startswith("python -m pip")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in git, the text, and `gpt-parity` on the path."""
    folder = tmp_path_factory.mktemp("checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / TEXT, folder / TEXT)
    programs = folder / "programs"
    programs.mkdir()
    for name, line in (("gpt-parity", '-m gpt_parity "$@"'), ("python", '"$@"')):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {line}\n')
        (programs / name).chmod(0o755)
    return folder


def typed(block: str, checkout: Path) -> str:
    """What the lines print; each of them has to succeed."""
    environment = {
        **os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1",
        "PATH": f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["sh", "-ec", block], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (block, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.skipif(not (ROOT / TEXT).exists(), reason=f"needs {TEXT}: run scripts/fetch_data.py")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: install gcc or clang")
def test_every_command_of_the_readme_runs_as_it_stands(checkout: Path) -> None:
    verified, trained, resumed, judged, explained = (
        typed(block, checkout) for block in ["gpt-parity verify\n", *COMMANDS]
    )
    assert "PASS: numpy_impl and torch_impl agree in 57 tensors" in " ".join(verified.split())
    assert "test loss 2.04" in trained and "ROMEO:" in trained
    assert "torch float32, 31368 steps, all taken" in resumed
    assert "float64: PASS: 57 tensors agree" in judged
    assert "4. The weights: softmax of each row" in explained


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: install gcc or clang")
def test_the_commands_of_the_oracles_page_run(checkout: Path) -> None:
    """`your_program` is the C program of the suite, and the weights are those of a reference."""
    first, second, *_ = blocks(read("docs/oracle.md"), "sh")
    for name in ("reference", "mine"):
        shutil.rmtree(checkout / name, ignore_errors=True)
    typed("cc -O2 -std=c99 parity_tests/interop/gpt.c -o your_program -lm", checkout)
    assert "PASS: 57 tensors agree" in typed(first, checkout)
    bundle = load_bundle(checkout / "reference")
    np.savez(checkout / "weights.npz", **bundle.weights)
    np.savez(checkout / "batch.npz", tokens=bundle.tokens, targets=bundle.targets)
    shutil.rmtree(checkout / "reference")
    typed(second, checkout)
    again = load_bundle(checkout / "reference")
    assert all((again.weights[name] == array).all() for name, array in bundle.weights.items())


def test_the_command_of_the_page_on_drift_runs(checkout: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plots")
    (block,) = blocks(read("docs/drift.md"), "sh")
    assert "They stay within the rounding envelope" in " ".join(typed(block, checkout).split())
    assert (checkout / "drift.svg").read_text().startswith("<?xml")
