"""The commands: generating, pipes and locales, help, scripts, imports, provenance, threads."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info

from gpt_parity import cli
from gpt_parity.backends import thread_limit
from gpt_parity.bench.config import BenchConfig
from gpt_parity.cli import main
from gpt_parity.config import GenerateConfig, TrainConfig
from gpt_parity.lessons.config import ExplainConfig, FillValueConfig, LockstepConfig
from gpt_parity.oracle_config import CheckConfig, ExportConfig, NamesConfig, VerifyConfig
from gpt_parity.provenance import command_line, provenance
from parity_tests.command_line import (
    CHECKOUT,
    TEXT,
    checkpoint,
    command,
    train,
)

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own(TEXT)]


# --- generate -------------------------------------------------------------------------------------


def test_characters_are_utf_8_without_a_locale(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(capsys)
    process = command("generate", "--checkpoint", "run", "--prompt", "hübü", "--tokens", "60",
                      "--temperature", "inf")  # fmt: skip
    out, err = process.communicate()
    assert err == b"" and process.returncode == 0
    text = out.decode("utf-8")
    assert text.startswith("hübü") and len(text) == 4 + 60 + 1
    assert "ü" in text[4:]  # an even draw from 20 characters, always the same


class Pipe(io.RawIOBase):
    """The other end of the output: every write of the system, as a reader without delay sees it."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.blocks.append(bytes(data))
        return len(self.blocks[-1])


def test_characters_come_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(capsys)
    pipe = Pipe()
    stdout = io.TextIOWrapper(io.BufferedWriter(pipe), encoding="ascii")
    flags = ["--prompt", "hübü", "--tokens", "60", "--temperature", "inf"]
    with monkeypatch.context() as patch:  # undone before `capsys` puts back its own
        patch.setattr(sys, "stdout", stdout)
        assert main(["generate", "--checkpoint", "run", *flags]) == 0
    first, *others, end = [block.decode("utf-8") for block in pipe.blocks]
    assert first[:4] == "hübü" and len(first) == 5  # with the first character
    assert [len(block) for block in others] == [1] * 59 and end == "\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_generate_ends_quietly_on_a_signal(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(capsys)
    process = command("generate", "--checkpoint", "run", "--prompt", "F", "--tokens", "9999999")
    process.stdout.read(20)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (128 + number, b"")


def test_a_reader_that_goes_away_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(capsys)
    process = command("generate", "--checkpoint", "run", "--prompt", "F", "--tokens", "9999999")
    process.stdout.read(20)
    process.stdout.close()
    with process:
        assert (process.stderr.read(), process.wait(timeout=20)) == (b"", 141)


# --- help, scripts, imports -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("train", TrainConfig),
        ("generate", GenerateConfig),
        ("verify", VerifyConfig),
        ("explain", ExplainConfig),
        ("lockstep", LockstepConfig),
        ("bench", BenchConfig),
        ("experiment fill-value", FillValueConfig),
        ("oracle export", ExportConfig),
        ("oracle check", CheckConfig),
        ("oracle names", NamesConfig),
    ],
)
def test_help_explains_every_flag(
    name: str, config: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by COLUMNS, which counts only if it stood there when the console was made.
    monkeypatch.setattr(cli.app, "console", cli.PipeConsole(width=200))
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Example: gpt-parity {name} " in shown
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        line = next(line for line in shown.splitlines() if re.match(rf"│ [ *]*{flag} ", line))
        assert re.search(r"[A-Z].+ [a-z]+.*\.", line.split(flag)[1]), f"{flag} is bare"
        if isinstance(field.default, int | float | str) and field.default is not None:
            assert f"[default: {field.default}]" in line


def test_version_and_help_come_without_heavy_imports() -> None:
    program = (
        "import sys, gpt_parity, numpy_impl; "
        "assert not {'torch', 'cyclopts', 'rich', 'safetensors'} & set(sys.modules); "
        "from gpt_parity.cli import main; code = main(['--version']) or main(['--help']); "
        "assert not {'torch', 'safetensors'} & set(sys.modules); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert re.match(r"gpt-parity \d+\.\d+", result.stdout) and "verify" in result.stdout


SCRIPTS = sorted(path.name for path in (CHECKOUT / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run_from_anywhere_and_show_an_example(script: str) -> None:
    """And what they do not know ends in one line."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(flag: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(CHECKOUT / "scripts" / script), flag],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip

    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "") and "Example: " in shown.stdout
    if script in ("train.py", "generate.py"):
        assert shown.stdout.startswith(f"Usage: gpt-parity {Path(script).stem} ")
    wrong = run("--nonsense")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("gpt-parity: error: ") and wrong.stderr.count("\n") == 1


# --- provenance and threads -----------------------------------------------------------------------


def test_provenance_names_no_place_of_this_machine(tmp_path: Path) -> None:
    here = Path.cwd()
    argv = ["/opt/bin/gpt-parity", "train", "--data", str(here / "a b.txt"), "--out=/srv/x/run"]
    assert command_line(argv) == "gpt-parity train --data 'a b.txt' --out=run"
    argv = ["/somewhere/gpt_parity/__main__.py", "train"]
    assert command_line(argv) == "python -m gpt_parity train"
    facts = provenance(argv)
    assert str(here) not in json.dumps(facts) and str(CHECKOUT) not in json.dumps(facts)
    assert facts == json.loads(json.dumps(facts)) == provenance(argv)
    assert {"gpt_parity", "python", "numpy", "torch", "blas", "threads", "machine"} <= set(facts)


def test_provenance_needs_neither_git_nor_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None
    monkeypatch.setattr("gpt_parity.provenance.CHECKOUT", tmp_path)
    assert provenance()["commit"] is None


def test_threads_are_given_back() -> None:
    import torch

    def threads() -> tuple[list[int], int]:
        blas = [b["num_threads"] for b in threadpool_info() if b["user_api"] == "blas"]
        return blas, torch.get_num_threads()

    with thread_limit(1, "torch"):
        before = threads()
        with pytest.raises(KeyError), thread_limit(2, "torch"):
            assert threads() == ([2] * len(before[0]), 2)
            raise KeyError
        assert threads() == before == ([1] * len(before[0]), 1) and before[0]


@pytest.mark.parametrize(("flags", "threads"), [((), 1), (("--threads", "2"), 2)])
def test_the_threads_of_a_run_stand_in_its_folder(flags: tuple[str, ...], threads: int) -> None:
    assert train("--max-steps", "2", *flags) == 0
    assert json.loads(Path("run/config.json").read_text())["train"]["threads"] == threads
