"""The pages that people read: their commands parse, their Python runs, their links lead somewhere.

The README's own examples run in `test_package.py`; `derivations.md` and `add-an-operation.md` have
files of their own.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cyclopts import App, CycloptsError

from gpt_parity import cli
from parity_tests.markdown import BLOCK, ROOT, blocks

pytestmark = pytest.mark.reference("by hand")

FILES = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
LANGUAGES = {"README.md": {"sh", "python", "text"}, "data/README.md": {""}}
SHELL = ("sh", "")
# Their Python prints reports, whose figures vary; that of others prints what the page says.
REPORTS = ("docs/oracle.md",)
RUN_ELSEWHERE = ("README.md", "docs/derivations.md", "docs/add-an-operation.md")
# Runs in `test_nanogpt_models.py`, with a model.
OF_A_MODEL = "model(tokens, targets)"
INLINE = re.compile(r"`((?:gpt-parity|python scripts/|python -m|pytest)\b[^`]*)`")
# Programs that are not ours; what they are given is not looked at.
FOREIGN = ("cc", "./gpt", "./your_program", "pip", "python3")


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every command of every page, from blocks and from sentences, each once."""
    for page, text in PAGES.items():
        lines = [line for language, block in BLOCK.findall(text) if language in SHELL
                 for line in block.splitlines()]  # fmt: skip
        lines += [" ".join(line.split()) for line in INLINE.findall(BLOCK.sub("", text))]
        for line in dict.fromkeys(lines):
            for part in line.split("&&"):
                words = tuple(shlex.split(part, comments=True))
                if words:
                    yield page, words


COMMANDS = sorted(set(commands()))


def str_of(x: str | tuple[str, ...]) -> str:
    return x if isinstance(x, str) else " ".join(x)


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes look themselves up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def parse(words: tuple[str, ...]) -> None:
    """Raise unless the program that `words` call takes them; nothing is run."""
    if words[0] == "torchrun":
        words = ("python", *words[words.index("scripts/train.py") :])
    program, *arguments = words
    app: App = cli.app
    if program == "python" and arguments[0].startswith("scripts/"):
        script = ROOT / arguments.pop(0)
        source = script.read_text(encoding="utf-8")
        command = re.search(r'main\(\["(\w+)", \*sys\.argv', source)
        function = re.search(r"app\.default\((\w+)\)", source)
        if command is not None:  # a command of ours under another name
            arguments.insert(0, command[1])
        elif function is not None:
            app = App(help_format="plaintext", version_flags=[])
            app.default(getattr(load_script(script), function[1]))
        else:
            assert not arguments, f"{script.name} has no flags"
            return
    elif program == "pytest" or (program, *arguments[:2]) == ("python", "-m", "pytest"):
        for word in arguments:
            assert not word.startswith("parity_tests") or (ROOT / word).exists(), word
        return
    elif program in FOREIGN or (program, *arguments[:2]) == ("python", "-m", "pip"):
        return
    else:
        assert program == "gpt-parity", f"{program}: whose command is it?"
        if not arguments:  # its name in a sentence
            return
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_pages_have_commands_and_blocks_in_known_languages() -> None:
    assert len(COMMANDS) >= 30
    assert {page for page, _ in COMMANDS} >= {"README.md", "data/README.md", "docs/oracle.md"}
    for page, text in PAGES.items():
        known = LANGUAGES.get(page, {"sh", "python", "text", "math"})
        assert {language for language, _ in BLOCK.findall(text)} <= known, page
        assert text.count("```") == 2 * len(BLOCK.findall(text)), page


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=str_of)
def test_every_command_of_a_page_parses(
    page: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))  # scripts add the checkout
    parse(words)


@pytest.mark.parametrize(
    "words",
    [
        "gpt-parity verify --bogus", "gpt-parity frobnicate", "gpt-parity oracle check mine",
        "gpt-parity oracle export --preset huge -o x", "python scripts/train.py --backend jax",
        "python scripts/power.py --model 3", "python scripts/fetch_data.py --quick",
        "pytest parity_tests/test_nothing.py", "make all",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_noticed(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises((CycloptsError, AssertionError)):
        parse(tuple(words.split()))


def flags(app: App) -> set[str]:
    """Every flag of an app and of its commands."""
    names: set[str] = set()
    if app.default_command is not None:
        names |= {name for x in app.assemble_argument_collection() for name in x.names}
    for name in app:
        if not name.startswith("-"):
            names |= flags(app[name])
    return names


def test_every_flag_that_a_sentence_names_exists() -> None:
    known = flags(cli.app) | {"--hypothesis-profile"}
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.py")]
    known |= {f"--{name.replace('_', '-')}" for source in scripts
              for name in re.findall(r"^ {4}(\w+)$", source, re.MULTILINE)}  # fmt: skip
    for page, text in PAGES.items():
        named = set(re.findall(r"`(--[a-z][\w-]*)[^`]*`", BLOCK.sub("", text)))
        assert named <= known, f"{page}: {sorted(named - known)}"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_into_the_repository_leads_to_a_file(page: str) -> None:
    text = BLOCK.sub("", PAGES[page])
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / page).parent.joinpath(target.split("#")[0]).exists(), target


# --- Python of pages without a test of their own

CODE = [
    (page, code)
    for page, text in PAGES.items()
    if page not in RUN_ELSEWHERE
    for code in blocks(text, "python")
    if OF_A_MODEL not in code
]


def readme_function() -> ast.FunctionDef:
    """The README's `loss_and_gradients`, which the sketches of other pages leave out."""
    for code in blocks(PAGES["README.md"], "python"):
        for node in ast.parse(code).body:
            if isinstance(node, ast.FunctionDef) and node.name == "loss_and_gradients":
                return node
    raise AssertionError("README.md has no loss_and_gradients")


@pytest.mark.parametrize(("page", "code"), CODE, ids=[page for page, _ in CODE])
def test_python_of_a_page_runs(page: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    tree = ast.parse(code)
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef) and "..." in ast.unparse(node):
            assert node.name == "loss_and_gradients", f"{page}: a sketch without a whole one"
            whole = readme_function()
            assert [a.arg for a in node.args.args] == [a.arg for a in whole.args.args]
            tree.body[at] = whole
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.fix_missing_locations(tree), page, "exec"), namespace)
    printed = capsys.readouterr().out
    if page in REPORTS:
        assert ("print(" in ast.unparse(tree)) == ("PASS" in printed), printed
    else:
        assert printed and printed in PAGES[page], printed


def test_every_page_with_python_is_run() -> None:
    assert {page for page, _ in CODE} == {*REPORTS, "docs/gpt2.md", "docs/scale.md"}


def test_flags_are_explained_in_one_line_each() -> None:
    """The help keeps the indentation of a second line, which stands out there."""
    explained = 0
    for path in sorted((ROOT / "gpt_parity").rglob("*config*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
                continue
            for field, after in pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    explained += 1
                    text = ast.literal_eval(after.value)
                    assert "\n" not in text, f"{path.name}: {node.name}: {text}"
    assert explained > 100
