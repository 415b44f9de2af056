"""Arguments of every kind: exit 0, 1 or 2, no traceback, and no file where none was asked for."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gpt_parity import cli
from gpt_parity.arrays import write_arrays
from gpt_parity.backends import build_model
from gpt_parity.bench.config import BenchConfig
from gpt_parity.checkpoint import save_checkpoint
from gpt_parity.config import GenerateConfig, TrainConfig
from gpt_parity.oracle.bundle_files import save_bundle
from gpt_parity.oracle_config import CheckConfig, ExportConfig, NamesConfig, VerifyConfig
from parity_tests.hostile.fuzz import WATCH
from parity_tests.hostile.seeds import CONFIG, VOCABULARY, packed, reference

pytestmark = pytest.mark.reference("exact property")

# Every command with its flags; a field that is added here or there is covered by itself.
COMMANDS: dict[tuple[str, ...], type] = {
    ("train",): TrainConfig,
    ("generate",): GenerateConfig,
    ("verify",): VerifyConfig,
    ("bench",): BenchConfig,
    ("oracle", "export"): ExportConfig,
    ("oracle", "check"): CheckConfig,
    ("oracle", "names"): NamesConfig,
}
# What keeps a run that does work short; a flag that is drawn takes its place.
SHORT: dict[tuple[str, ...], dict[str, str]] = {
    ("train",): {"data": "text.txt", "max_steps": "2", "context_size": "3", "embedding_size": "2",
                 "blocks": "1", "sample_tokens": "3"},
    ("generate",): {"checkpoint": "c.safetensors", "prompt": "a", "tokens": "3"},
    ("verify",): {"data": "text.txt", "steps": "0"},
    ("bench",): {},
    ("oracle", "export"): {"out": "new", "preset": "tiny", "vocab_size": "5", "context_size": "3",
                           "embedding_size": "2", "blocks": "1", "batch_size": "1", "length": "2"},
    ("oracle", "check"): {"ref": "ref.npz"},
    ("oracle", "names"): {"style": "hf"},
}  # fmt: skip
# Numbers that make a run longer and not larger are small, or refused: the run would be a right one.
LONG = {"max_steps", "epochs", "tokens", "sample_tokens", "steps", "warmup"}
WRITTEN = {"out", "json", "report"}

NUMBERS = ("0", "-1", "-0", "1", "2", "7", "2.5", "1e400", "-1e400", "1e-400", "nan", "inf",
           "-inf", "1e3", "0x10", "1_0", "٣", "+3", " 3", "3 ", "10000000", "4294967295",
           "4294967296", str(2**63 - 1), str(2**63), str(2**64), "9" * 30, "9" * 5000,
           "-" + "9" * 30)  # fmt: skip
TEXTS = ("", " ", "x", "a", "ü", "\U0001f600", "\udcfc", "\ud800", "a\nb", "\x1b[2J", "a\0b",
         "-", "--", "-x", "--prompt", "--help", "x" * 5000, "*", "[", "%s", "{}", "None",
         "true", "False", "a=b", "@text.txt", "'", '"', "$HOME", "~",
         "\u202e", "[bold]", "[/]")  # fmt: skip
PATHS = ("absent", "absent/deeper/x", "empty", "empty.txt", "text.txt", "text.txt/x", "broken.npz",
         "broken.safetensors", "run", "loop", "dangling", "c.safetensors", "run/x", "ref.npz",
         "mine", "mine.npz", "ids.npz", "one.npy", "names.toml", "latin1.txt", ".", "..",
         "x" * 300, "x/" * 3000, "new.npz", "new.safetensors", "new.npy", "new", "verify.json",
         "bundle.json")  # fmt: skip
SMALL = ("1", "2", "3", "4", "5")
REALS = ("0.5", "1e-3", "0", "1", "0.999", "inf")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def kinds_of(hint: Any) -> set[Any]:
    """The kinds that a hint is made of: int, Path, a Literal and so on, without None."""
    if get_origin(hint) is Literal:
        return {hint}
    parts = [part for part in get_args(hint) if part is not type(None) and part is not Ellipsis]
    return set().union(*map(kinds_of, parts)) if parts else {hint}


def good_values(name: str, hint: Any) -> tuple[str, ...]:
    kinds = kinds_of(hint)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return tuple(map(str, get_args(kind)))
    if Path in kinds:
        written = ("pipe", *(path for path in PATHS if path != ".."))
        return written if name in WRITTEN else ("/dev/null", *PATHS)
    if int in kinds:
        return ("0",) if name == "steps" else SMALL
    return REALS if float in kinds else TEXTS


def numbers_for(name: str) -> tuple[str, ...]:
    """Nonsense in place of a number; what is right and only long is left out."""
    if name not in LONG:
        return NUMBERS
    if name == "steps":  # of verify, seconds each
        return tuple(n for n in NUMBERS if not n.strip("+ ").isdecimal() or n == "0")
    return tuple(n for n in NUMBERS if len(n) < 5 or not n.isdecimal())


@st.composite
def one_flag(draw: st.DrawFn, name: str, hint: Any) -> list[str]:
    """A flag as it should be, or not quite: with another value, without one, with too many."""
    numeric = bool(kinds_of(hint) & {int, float})
    nonsense = numbers_for(name) if numeric else NUMBERS[:8] + TEXTS
    good = good_values(name, hint)
    count = 2 if get_origin(hint) is tuple and Ellipsis not in get_args(hint) else 1
    count = draw(st.sampled_from((count, count, count, count, 0, 1, 2, 3)))
    if kinds_of(hint) == {bool} and draw(st.integers(0, 3)):
        count = 0
    values = [
        draw(st.sampled_from(good if draw(st.integers(0, 2)) else nonsense)) for _ in range(count)
    ]
    spelled = flag(name)
    if draw(st.integers(0, 15)) == 0:
        others = (spelled.upper(), spelled[1:], spelled[:-1], f"--no-{name}", f"--{name}_")
        spelled = draw(st.sampled_from((*others, "-o", "-", "--")))
    if len(values) == 1 and draw(st.integers(0, 2)) == 0:
        return [f"{spelled}={values[0]}"]
    return [spelled, *values]


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with some of its flags, once or twice, before or after what it needs."""
    command = draw(st.sampled_from(tuple(COMMANDS)))
    hints = get_type_hints(COMMANDS[command])
    names = draw(st.lists(st.sampled_from(tuple(hints)), max_size=4, unique=True))
    groups = [draw(one_flag(name, hints[name])) for name in names]
    if groups and draw(st.integers(0, 9)) == 0:
        groups.append(draw(st.sampled_from(groups)))
    left_out = draw(st.sampled_from((None, None, None, *SHORT[command])))
    groups += [
        [flag(name), value] for name, value in SHORT[command].items()
        if name not in names and (name != left_out or name in ("max_steps", "data", "steps"))
    ]  # fmt: skip
    if command == ("oracle", "check"):
        groups.append([draw(st.sampled_from(("mine.npz", "mine.npz", *PATHS, *TEXTS)))])
    if draw(st.integers(0, 9)) == 0:
        groups.append([draw(st.sampled_from((*TEXTS, *NUMBERS, "--help", "--version", "-h")))])
    groups = draw(st.permutations(groups))
    words = [*command, *(word for group in groups for word in group)]
    if draw(st.integers(0, 19)) == 0:
        words.insert(0, words.pop(draw(st.integers(0, len(words) - 1))))
    return words


@st.composite
def loose_words(draw: st.DrawFn) -> list[str]:
    """Words of any kind: no command, an unknown one, half of one."""
    words = ("train", "generate", "verify", "bench", "oracle", "export", "check", "trian", "--help",
             "-h", "--version", "-o", *PATHS[:6], *TEXTS, *NUMBERS)  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(words) | st.text(max_size=5), max_size=4))
    # What would be a whole command runs in its full length.
    whole = ("train", "verify", "bench")
    return [word for word in chosen if word not in whole] if chosen[:1] != ["oracle"] else chosen


@dataclass
class Result:
    code: int
    out: str
    err: str
    outside: list[str]


class Sandbox:
    """A folder with files good and bad, which every command finds as they were."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bundle, model = reference(), build_model("numpy", CONFIG)
        (folder / "run").mkdir(parents=True)
        for name in ("c.safetensors", "run/checkpoint.safetensors"):
            save_checkpoint(folder / name, model, config=CONFIG, vocabulary=VOCABULARY)
        save_bundle(folder / "ref.npz", bundle)
        write_arrays(folder / "mine", {"loss": bundle.arrays["loss"]}, "{}")
        write_arrays(folder / "mine.npz", {"loss": bundle.arrays["loss"]}, "{}")
        np.savez(folder / "ids.npz", tokens=bundle.tokens, targets=bundle.targets)
        np.save(folder / "one.npy", bundle.tokens)
        for name, content in {
            "text.txt": b"abcde" * 200, "empty.txt": b"", "latin1.txt": b"\xfc" * 100,
            "names.toml": b'"mine" = "loss"\n', "broken.safetensors": b"\xff" * 100,
            "broken.npz": packed([("../x.npy", b"")], False, []), "bundle.json": b'{"a": 1}',
            "verify.json": b'{"schema": "gpt-parity/verify"}',
        }.items():  # fmt: skip
            (folder / name).write_bytes(content)
        (folder / "empty").mkdir()
        (folder / "loop").symlink_to("loop")
        (folder / "dangling").symlink_to("nowhere/x")
        os.mkfifo(folder / "pipe")
        self.state = self._state()

    def _state(self) -> dict[str, bytes | str]:
        found: dict[str, bytes | str] = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_symlink():
                found[str(path)] = f"link to {path.readlink()}"
            else:
                other = "folder" if path.is_dir() else "pipe"
                found[str(path)] = path.read_bytes() if path.is_file() else other
        return found

    def restore(self) -> None:
        """Take away what a command made, and put back what it replaced."""
        now = self._state()
        for name in sorted(now.keys() - self.state.keys(), reverse=True):
            path = Path(name)
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
        for name, content in self.state.items():
            if now.get(name) == content:
                continue
            if content == "folder":
                Path(name).mkdir()
                continue
            assert isinstance(content, bytes), f"{name} was replaced"
            Path(name).write_bytes(content)

    def run(self, words: list[str]) -> Result:
        out, err = io.StringIO(), io.StringIO()
        before = Path.cwd()
        os.chdir(self.folder)
        WATCH.install()
        WATCH.seen = seen = []
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.main(words)
        finally:
            WATCH.seen = None
            os.chdir(before)
            self.restore()
        return Result(code, out.getvalue(), err.getvalue(), list(self._outside(seen)))

    def _outside(self, seen: list[tuple[str, Any]]) -> Iterator[str]:
        """What was written, made, renamed or removed beyond the folder."""
        for kind, place in seen:
            if kind not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link",
                             "os.symlink", "os.truncate", "os.chmod"):  # fmt: skip
                continue
            if isinstance(place, int):  # a descriptor
                continue
            path = os.path.realpath(self.folder / os.fsdecode(place))
            caches = ("__pycache__", "torchinductor_")  # of Python and PyTorch
            if not path.startswith(f"{self.folder}/") and not any(c in path for c in caches):
                yield f"{kind} {path}"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Nothing is measured: what `bench` would do is replaced, and the disk is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr("gpt_parity.bench.run.run", lambda config, console: 0)
        sandbox = Sandbox(tmp_path_factory.mktemp("outer") / "given")
        yield sandbox


def require_conduct(result: Result, words: list[str]) -> None:
    """What every command owes to everybody, whatever the words."""
    shown = f"{words!r:.500}: {result.code}, {result.err!r:.500}"
    assert result.code in (0, 1, 2), shown
    assert "Traceback" not in result.err + result.out, shown
    assert not result.outside, f"{shown}, {result.outside!r:.500}"
    if result.code == 2:
        assert result.err.startswith("gpt-parity: error: "), shown
        assert result.err.count("\n") == 1 and result.err.endswith("\n"), shown
    else:
        assert result.err == "", shown


@given(words=command_lines())
def test_any_arguments_end_in_0_1_or_2_without_a_traceback(
    sandbox: Sandbox, words: list[str]
) -> None:
    result = sandbox.run(words)
    event(f"{words[0]} {result.code}")
    require_conduct(result, words)


@given(words=loose_words())
def test_any_words_end_in_0_1_or_2_without_a_traceback(sandbox: Sandbox, words: list[str]) -> None:
    require_conduct(sandbox.run(words), words)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_arguments_are_drawn_around_is_right(
    command: tuple[str, ...], sandbox: Sandbox
) -> None:
    """Else every drawn command would fail for the same reason."""
    words = [*command, *(w for name, value in SHORT[command].items() for w in (flag(name), value))]
    result = sandbox.run([*words, *(["mine.npz"] if command[-1] == "check" else [])])
    assert (result.code, result.err) == (0, "")
