"""What imports what, and that importing costs and changes nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpt_parity import record
from parity_tests.planted.power import ALL_BUGS

ROOT = Path(__file__).resolve().parent.parent
OURS = {"numpy_impl", "torch_impl", "gpt_parity", "parity_tests", "scripts"}
ALLOWED = {
    "numpy_impl": {"numpy_impl", "numpy"},
    "torch_impl": {"torch_impl", "numpy", "torch"},
    # PyTorch and matplotlib inside functions only, as the tests below show; Hypothesis in
    # `oracle/*examples.py`.
    "gpt_parity": {
        "gpt_parity", "numpy_impl", "numpy", "safetensors", "rich", "cyclopts", "torch",
        "hypothesis", "pytest", "threadpoolctl", "matplotlib",
    },
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_dependency_rule(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) >= 6
    for path in files:
        foreign = imports(path) - set(sys.stdlib_module_names) - ALLOWED[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_imports_leave_torch_alone_and_have_no_side_effects() -> None:
    code = """
import random, sys, warnings
import numpy as np
before = (random.getstate(), str(np.random.get_state()), np.geterr(), warnings.filters[:])
import gpt_parity, numpy_impl
import importlib, pkgutil
for module in pkgutil.walk_packages(gpt_parity.__path__, "gpt_parity."):
    importlib.import_module(module.name)
after = (random.getstate(), str(np.random.get_state()), np.geterr(), warnings.filters[:])
assert "torch" not in sys.modules and "torch_impl" not in sys.modules
assert before[1:] == after[1:]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_two_packages_import_nothing_heavy() -> None:
    """Import time itself is measured elsewhere; this is what it would be spent on."""
    code = """
import sys
import numpy
before = set(sys.modules)
import gpt_parity, numpy_impl
heavy = {"torch", "rich", "cyclopts", "safetensors", "multiprocessing", "hypothesis", "matplotlib"}
assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", ["functional", "layers", "loss", "gpt", "gpt2", "optim"])
def test_the_twins_have_the_same_public_names(module: str) -> None:
    def public(package: str) -> dict[str, list[str]]:
        tree = ast.parse((ROOT / package / f"{module}.py").read_text(encoding="utf-8"))
        functions = [("", f) for f in tree.body]
        functions += [(f"{c.name}.", f) for c in tree.body if isinstance(c, ast.ClassDef)
                      for f in c.body]  # fmt: skip
        return {
            prefix + f.name: [a.arg for a in f.args.args + f.args.kwonlyargs]
            for prefix, f in functions
            if isinstance(f, ast.FunctionDef) and (f.name[0] != "_" or f.name == "__init__")
        }

    mine, theirs = public("numpy_impl"), public("torch_impl")
    # What PyTorch's own classes bring along or need no more, and what they would draw at random.
    inherited = re.compile(
        r"(Parameter|ParameterBuffer|Layer)\..*|(Linear|LayerNorm|Softmax|GELU)\.forward"
    )
    assert all(
        inherited.fullmatch(n) or n == "check_hyperparameters" for n in set(mine) - set(theirs)
    )
    assert set(theirs) - set(mine) <= {
        "Softmax.__init__", "GELU.__init__", "AdamWOptimizer.lr",
        "Linear.reset_parameters", "Embedding.reset_parameters",
    }  # fmt: skip
    for name in set(mine) & set(theirs):
        assert mine[name] == theirs[name], name


def test_readme_commands_and_pins() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in readme.splitlines() if line.startswith("python -m pip install")]
    assert lines == [
        'python -m pip install -c constraints.txt -e ".[torch]" && gpt-parity verify',
        'python -m pip install -c constraints.txt -e ".[test]" && pytest',
    ]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins if not pin.startswith("#"))
    assert "torch==2.13.0" in pins


README_EXAMPLES = re.findall(
    r"```python\n(.*?)```\n\n```text\n(.*?)```",
    (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL,
)  # fmt: skip


@pytest.mark.parametrize(("code", "output"), README_EXAMPLES)
def test_readme_examples_print_what_they_say(code: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (output, "")


def test_readme_has_examples() -> None:
    assert len(README_EXAMPLES) == 2


def test_readme_counts_the_planted_bugs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"plants each of {len(ALL_BUGS)} mistakes" in text


def test_a_section_is_replaced_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "docs" / "power.md"
    monkeypatch.setattr(record, "PAGE", page)
    record.record("One", ["| a |", "## no heading of ours"[3:]])
    record.record("Two", ["two"])
    first = page.read_text(encoding="utf-8")
    assert first.startswith("# ") and first.endswith("two\n")
    assert re.findall("^## .*", first, re.MULTILINE) == ["## One", "## Two"]
    record.record("One", [r"new \1"])
    second = page.read_text(encoding="utf-8")
    assert second == first.replace("| a |\nno heading of ours", r"new \1")
