"""`docs/add-an-operation.md`, followed on a copy of the project."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.oracle import rounding
from gpt_parity.oracle.rounding import FLOAT32, Call, bound
from numpy_impl import functional
from numpy_impl.tensor import Tensor
from parity_tests import markdown

pytestmark = pytest.mark.reference("by hand")

PAGE = markdown.read("docs/add-an-operation.md")
STEP = re.compile(
    r"^In `([\w/]+\.py)`, (before|after|in place of) `([^`]+)`:\n\n```python\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
STEPS = STEP.findall(PAGE)
COPIED = ("numpy_impl", "torch_impl", "gpt_parity", "parity_tests")


def apply(folder: Path, path: str, where: str, line: str, code: str) -> None:
    """One step of the page: the line must be there, once."""
    file = folder / path
    text = file.read_text(encoding="utf-8")
    assert text.count(f"\n{line}\n") == 1, f"{path}: not one line {line!r}"
    # Functions of a module stand two lines apart, rows of a table do not.
    new = {"before": f"{code}\n\n{line}\n", "after": f"{line}\n{code}", "in place of": code}[where]
    file.write_text(text.replace(f"{line}\n", new), encoding="utf-8")


def run(folder: Path, command: str) -> tuple[int, str]:
    """Exit code of the page's pytest command, and its tests and their outcomes by line."""
    python, *arguments = shlex.split(command)
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *arguments, "--tb=no", "-p", "no:cacheprovider",
         "--hypothesis-profile=quick"],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    outcome = re.findall(r"^\S+\.py::(\S+ (?:PASSED|FAILED|ERROR))", done.stdout, re.MULTILINE)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, "".join(f"{line}\n" for line in outcome)


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    for package in COPIED:
        shutil.copytree(
            markdown.ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(markdown.ROOT / "pyproject.toml", tmp_path)
    (command,), (judged, red) = markdown.blocks(PAGE, "sh"), markdown.blocks(PAGE, "text")
    *steps, mistake = STEPS
    for step in steps:
        apply(tmp_path, *step)
    assert run(tmp_path, command) == (0, judged)
    apply(tmp_path, *mistake)
    assert run(tmp_path, command) == (1, red)
    assert "FAILED" in red and "FAILED" not in judged


def test_no_block_of_the_page_is_left_out() -> None:
    assert len(markdown.blocks(PAGE, "python")) == len(STEPS) == 6
    used = {"python": 6, "sh": 1, "text": 2, "math": 1}
    assert Counter(language for language, _ in markdown.BLOCK.findall(PAGE)) == used
    assert PAGE.count("```") == 2 * sum(used.values())
    assert [where for _, where, _, _ in STEPS].count("in place of") == 1


def silu_of_torch(x: float) -> tuple[float, float, float, float]:
    """Errors of value and gradient in float32, then both in float64."""
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = torch.tensor([x], dtype=dtype, requires_grad=True)
        out = torch.nn.functional.silu(leaf)
        out.backward(torch.ones(1, dtype=dtype))
        results.append((out.item(), leaf.grad.item()))
    (y, dy), (exact_y, exact_dy) = results
    return abs(y - exact_y), abs(dy - exact_dy), exact_y, exact_dy


def defined_by_the_page(module: ModuleType, name: str) -> dict[str, Any]:
    """The names of a module with those that the step defining `name` adds; the module stays."""
    path = f"{module.__name__.replace('.', '/')}.py"
    (code,) = (code for file, *_, code in STEPS if file == path and f"def {name}(" in code)
    namespace = dict(vars(module))
    exec(code, namespace)
    return namespace


@pytest.mark.parametrize("dtype", (np.float16, np.float32, np.float64))
def test_the_function_of_the_page_keeps_the_dtype_and_never_overflows(dtype: Any) -> None:
    silu = defined_by_the_page(functional, "silu")["silu"]
    most, tiny = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    x = np.array([-most, -1e4, -90.0, -1.0, -tiny, 0.0, tiny, 1.0, 90.0, 1e4, most], dtype)
    leaf = Tensor(x)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        out = silu(leaf)
        out.backward(np.ones_like(x))
    assert out.dtype == leaf.grad.dtype == dtype
    assert (out.data[[0, 1, -2, -1]] == [0.0, 0.0, 1e4, most]).all()
    assert (leaf.grad[[0, 1, 5, -2, -1]] == [0.0, 0.0, 0.5, 1.0, 1.0]).all()


def magnitudes(x: float) -> tuple[np.ndarray, np.ndarray]:
    """Those of the page's rows, value and gradient, for float32."""
    namespace = defined_by_the_page(rounding, "_silu_parts")
    call = Call((np.array([x]),), np.zeros(1), FLOAT32, {}, np.ones(1), 0)
    return namespace["_silu_forward"](call), namespace["_silu_backward"](call)


def test_both_terms_that_are_not_the_size_of_the_result_are_needed() -> None:
    """The figures of the page, and that its rows allow them."""
    error, _, exact, _ = silu_of_torch(-89.0)
    assert f"{exact:.1e}" == "-2.0e-37" and error == abs(exact)
    assert 8.0 * (FLOAT32.u * abs(exact) + FLOAT32.eta) < error
    assert error < bound(magnitudes(-89.0)[0], FLOAT32)
    _, error, _, exact = silu_of_torch(16.5)
    assert f"{error:.1e}" == "7.3e-07" and f"{8.0 * FLOAT32.u:.1e}" == "4.8e-07"
    assert 8.0 * FLOAT32.u * exact < error < bound(magnitudes(16.5)[1], FLOAT32)
