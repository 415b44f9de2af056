"""What the command `lockstep` prints, draws and writes, and how it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt_parity.cli import main
from gpt_parity.lessons import drift as command
from gpt_parity.lessons import drift_plot
from gpt_parity.lessons.config import LockstepConfig, Side
from gpt_parity.lessons.drift_runs import KINDS, Distance, Drift, Look, SideRunner, drift, looks
from gpt_parity.oracle.rounding import FLOAT32
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.plots import draw, has_matplotlib
from gpt_parity.verify import lockstep_setting
from parity_tests.drifting import (
    CHECKOUT,
    TEXT,
    figures,
    lockstep,
    names,
    pair,
    small,
    small_drift,
)

__all__ = ["small_drift"]

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.usefixtures("small_drift")]


def test_the_json_holds_every_step_and_every_array() -> None:
    content = figures("--seed", "3", "--envelope-steps", "2", steps=20)
    assert content["schema"] == "gpt-parity/lockstep" and content["version"] == 1
    assert content["a"] == {"backend": "numpy", "dtype": "float32", "threads": 1}
    assert content["b"] == {"backend": "torch", "dtype": "float64", "threads": 1}
    assert (content["steps"], content["seed"], content["envelope_steps"]) == (20, 3, 2)
    assert [len(content["losses"][side]) for side in "ab"] == [20, 20]
    for look in content["looks"]:
        kinds = {kind: [r["name"] for r in look["distances"] if r["kind"] == kind]
                 for kind in KINDS}  # fmt: skip
        assert kinds == {**dict.fromkeys(KINDS, names()), "loss": ["loss"]}
    assert [look["step"] for look in content["looks"]] == looks(20)
    assert content["corpus"]["characters"] == len(TEXT)
    assert {"numpy", "torch", "command", "commit"} <= set(content["provenance"])


def test_no_line_is_longer_than_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (pair("numpy:float32", "torch:float32"), pair("numpy:float64:2", "torch:float32")):
        assert lockstep(*flags, "--envelope-steps", "3", steps=120) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_long_names_and_numbers_fit_into_80_columns() -> None:
    """As wide as a run of 99,999 steps of the source configuration makes them."""
    name = "transformers.1.feed_forward.output.bias"
    distance = Distance("exp_avg_sq", name, 1.3e-10, 1.0, 1e-10, 1e-10, 99.0)
    result = Drift(FLOAT32, 99_999, [(4.0, 4.1)] * 99_999)
    result.looks.append(Look(99_999, (4.1234, 4.2345), [distance]))
    output = StringIO()
    console = Console(file=output, width=80)
    command.show(LockstepConfig(steps=99_999), result, console, "tinyshakespeare.txt")
    lines = output.getvalue().splitlines()
    assert any("v 1.feed_forward.output.bias" in line for line in lines)
    assert max(map(len, lines)) <= 80 and "…" not in output.getvalue()


@pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib: the extra plots")
@pytest.mark.parametrize(("b", "curves"), [("torch:float64", True), ("numpy:float32", False)])
def test_the_drawing_has_its_curves_and_a_band_for_each_kind(
    b: str, curves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every distance is 0, which no logarithmic axis shows."""
    figures = []

    def kept(path: Path, plot: Any, size: tuple[float, float]) -> None:
        draw(path, lambda figure: (plot(figure), figures.append(figure)), size)

    monkeypatch.setattr(drift_plot, "draw", kept)
    assert lockstep("--plot", "drift.png", "--b", b, steps=3) == 0
    assert Path("drift.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == list(KINDS)
    for axes in figure.axes:
        assert len(axes.lines) == (1 if axes.get_title() == "loss" else 1 + len(names()))
        assert all((len(line.get_xdata()) > 0) == curves for line in axes.lines[-1:])
        assert len(axes.collections) == 1
        assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--a", "numpy"], "a is 'numpy', BACKEND:DTYPE"),
        (["--a", "jax:float32"], "a is 'jax:float32', BACKEND:DTYPE"),
        (["--b", "torch:float16"], "b is 'torch:float16', BACKEND:DTYPE"),
        (["--b", "torch:float32:0"], "b is 'torch:float32:0': threads is 0"),
        (["--b", "torch:float32:two"], "b is 'torch:float32:two', a whole number of threads"),
        (["--b", "torch:float32:"], "b is 'torch:float32:', a whole number of threads"),
        (["--steps", "0"], "steps is 0"),
        (["--steps", "100001"], "steps is 100001, at most 100000"),
        (["--envelope-steps=-1"], "envelope_steps is -1"),
        (["--json", "missing/drift.json"], "json is missing/drift.json"),
        (["--plot", "drift.pdf"], "plot is drift.pdf"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lockstep", "--data", "text.txt", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0], lines


def test_a_text_that_is_absent_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lockstep", "--data", "missing.txt"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "missing.txt: cannot be read" in lines[0]


def test_threads_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's switch before each of its steps, and the parts of NumPy's batch."""
    import torch

    seen: dict[Side, set[int]] = {}
    step = SideRunner.step

    def recorded(self: SideRunner, *arguments: Any) -> Any:
        result = step(self, *arguments)
        parts = self.trainer.parts
        count = torch.get_num_threads() if parts is None else parts.threads
        seen.setdefault(self.side, set()).add(count)
        return result

    monkeypatch.setattr(SideRunner, "step", recorded)
    before = torch.get_num_threads()
    assert (
        lockstep(*pair("torch:float32:2", "torch:float32:1"), "--envelope-steps", "0", steps=3) == 0
    )
    assert (
        lockstep(*pair("numpy:float32:3", "torch:float64:2"), "--envelope-steps", "0", steps=3) == 0
    )
    assert {(s.backend, s.threads): counts for s, counts in seen.items()} == {
        ("torch", 2): {2}, ("torch", 1): {1}, ("numpy", 3): {3},
    }  # fmt: skip
    assert torch.get_num_threads() == before


def test_a_numpy_pair_needs_no_pytorch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from gpt_parity.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, "lockstep", "--data", "text.txt",
         "--steps", "2", "--b", "numpy:float64"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"^ +2 +\d\.\d{4} +\d\.\d{4} ", done.stdout, re.MULTILINE)


def test_batches_are_made_one_by_one_and_states_are_not_kept() -> None:
    """31,368 steps of them would take a gigabyte."""
    subject = small(VerifyConfig(data=Path("text.txt")))
    alive, most = [], 0
    batch = subject.dataset.batch

    class Watched:
        batch_count = staticmethod(subject.dataset.batch_count)

        def batch(self, part: str, index: int) -> Any:
            nonlocal most
            tokens, targets = (x.view(Array) for x in batch(part, index))
            alive.append(weakref.ref(tokens))
            most = max(most, sum(reference() is not None for reference in alive))
            return tokens, targets

    class Array(np.ndarray):
        """One that can be watched."""

    setting = lockstep_setting(0, subject)
    assert setting.batches == [] and setting.rates == []
    sides = (Side("numpy", "float32"), Side("numpy", "float64"))
    result = drift(sides, setting, Watched(), lambda t: 1e-3, 20, 2)
    assert len(alive) == 20 and most <= 3
    held = (x for look in result.looks for x in vars(look).values())
    assert not any(isinstance(x, np.ndarray) for x in held)
