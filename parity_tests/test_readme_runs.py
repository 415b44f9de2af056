"""The commands of the README as a reader types them, in order, in a copy of the project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.skipif(not (ROOT / TEXT).exists(), reason=f"needs {TEXT}: scripts/fetch_data.py")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: install gcc or clang")
def test_every_command_of_the_readme_runs_as_it_stands(checkout: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1",
        "PATH": f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    outputs = []
    for block in ["gpt-parity verify\n", *COMMANDS]:
        done = subprocess.run(
            ["sh", "-ec", block], cwd=checkout, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        outputs.append(done.stdout)
    verified, trained, resumed, judged, explained = outputs
    assert "PASS: numpy_impl and torch_impl agree in 57 tensors" in " ".join(verified.split())
    assert "test loss 2.04" in trained and "ROMEO:" in trained
    assert "torch float32, 31368 steps, all taken" in resumed
    assert "float64: PASS: 57 tensors agree" in judged
    assert "4. The weights: softmax of each row" in explained
