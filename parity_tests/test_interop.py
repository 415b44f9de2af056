"""Independent implementations, judged by the oracle: C, JAX, HIPS autograd, torch functions.

None of them imports the project. The C and JAX programs read a bundle's folder in a process of
their own and write their results back, as anybody's would.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.cli import main
from gpt_parity.oracle.bundle_files import load_bundle
from gpt_parity.oracle.functions import check
from gpt_parity.oracle.verdict import check_file
from gpt_parity.oracle_config import CheckConfig
from parity_tests.interop import autograd_gpt, torch_function_gpt

HERE = Path(__file__).resolve().parent / "interop"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
PRESETS = ("tiny", "source")
DTYPES = ("float64", "float32")
C_FLAGS = {"float64": [], "float32": ["-DSINGLE"]}

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler: install one, or name it in the variable CC"
)

# Not pytest.importorskip: importing JAX draws from NumPy's global random state.
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None,
    reason="JAX is not installed: pip install 'gpt-parity[interop]'",
)


@pytest.fixture(scope="module", params=PRESETS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "reference"
    assert main(["oracle", "export", "--preset", request.param, "-o", str(folder)]) == 0
    return folder


def compiled(folder: Path, dtype: str, source: str) -> Path:
    path, program = folder / "gpt.c", folder / "gpt"
    path.write_text(source, encoding="utf-8")
    assert COMPILER is not None
    flags = ["-O2", "-std=c99", "-Wall", "-Wextra", "-Werror", *C_FLAGS[dtype]]
    subprocess.run([COMPILER, *flags, str(path), "-o", str(program), "-lm"], check=True)
    return program


def source_of_c() -> str:
    return (HERE / "gpt.c").read_text(encoding="utf-8")


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_c_program(bundle: Path, tmp_path: Path, dtype: str) -> None:
    """It computes everything itself, and every tensor of the pass is judged."""
    program = compiled(tmp_path, dtype, source_of_c())
    subprocess.run([program, bundle, tmp_path / "mine"], check=True)
    report = check_file(tmp_path / "mine", CheckConfig(ref=bundle))
    assert report.ok, str(report)
    assert report.title == dtype
    assert report.complete
    assert [j.name for j in report.judgements] == list(load_bundle(bundle).arrays)


# One line of its backward pass: what it becomes, which tensor is wrong first, and the hint.
C_MISTAKES = {
    "softmax": (
        "real mean = dot(dp, p, n);", "real mean = 0 * dot(dp, p, n);",
        "grad/transformers.1.attention.mask.output", "lacks the sum over the row",
    ),
    "key": (
        "add_scaled(dsequence + j * E, g, query, E);",
        "add_scaled(dsequence + j * E, 0 * g, query, E);",
        "grad/transformers.0.feed_forward.output.output", "the path of x as key is missing",
    ),
    "gelu": (
        "(1 + 3 * GELU_CUBIC * v * v)", "(1 + GELU_CUBIC * v * v)",
        "grad/transformers.1.feed_forward.input.output", "lacks its factor 3",
    ),
    "loss": (
        "grad[targets[n]] -= 1;", "grad[targets[n]] -= 0;",
        "grad/output.output.output", "lacks the minus one",
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("bundle", ["source"], indirect=True)
@pytest.mark.parametrize("name", C_MISTAKES)
def test_one_changed_line_of_a_c_program(bundle: Path, tmp_path: Path, name: str) -> None:
    old, new, first, hint = C_MISTAKES[name]
    source = source_of_c()
    assert source.count(old) == 1
    program = compiled(tmp_path, "float32", source.replace(old, new))
    subprocess.run([program, bundle, tmp_path / "mine"], check=True)
    report = check_file(tmp_path / "mine", CheckConfig(ref=bundle))
    assert not report.ok
    assert report.first is not None and report.first.name == first
    assert any(hint in text for text in report.hints), str(report)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_weight_of_a_c_program(bundle: Path, tmp_path: Path, dtype: str) -> None:
    program = compiled(tmp_path, dtype, source_of_c())
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    path = other / "weight" / "transformers.0.feed_forward.input.weight.npy"
    weight = np.load(path)
    weight[3, 2] += 0.01
    np.save(path, weight)
    subprocess.run([program, other, tmp_path / "mine"], check=True)
    report = check_file(tmp_path / "mine", CheckConfig(ref=bundle))
    assert not report.ok
    assert report.first is not None
    assert report.first.name == "value/transformers.0.feed_forward.input.output"


@needs_jax
@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(bundle: Path, tmp_path: Path, dtype: str) -> None:
    """In a process of its own: JAX starts threads, and has one precision for a whole process."""
    command = [sys.executable, HERE / "jax_gpt.py", bundle, tmp_path / "mine", dtype]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    report = check_file(tmp_path / "mine", CheckConfig(ref=bundle))
    assert report.ok, str(report)
    assert report.title == dtype
    assert len(report.judgements) == 1 + len(load_bundle(bundle).weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "implementation", (autograd_gpt, torch_function_gpt), ids=("autograd", "torch function")
)
def test_functions_of_loss_and_gradients(
    bundle: Path, implementation: Callable, dtype: str
) -> None:
    report = check(implementation.loss_and_gradients, bundle, dtype)
    assert report.ok, str(report)
    assert len(report.judgements) == 1 + len(load_bundle(bundle).weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "implementation", (autograd_gpt, torch_function_gpt), ids=("autograd", "torch function")
)
def test_a_changed_weight_changes_the_verdict(
    bundle: Path, implementation: Callable, dtype: str
) -> None:
    def changed(weights: dict[str, np.ndarray], *batch: np.ndarray):
        weights["embedding.positional_embedding.weight"][0, 0] += 0.01
        return implementation.loss_and_gradients(weights, *batch)

    assert not check(changed, bundle, dtype).ok
