"""Hypothesis profiles, one thread, and a guard on global state around every test."""

from __future__ import annotations

import importlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Small products are fastest on one thread, and one order of summation makes a run repeatable;
# OMP_NUM_THREADS=2 runs both libraries on two.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

from numpy_impl import tape
from parity_tests.comparers import accepted_mistakes

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Its first import draws from Python's random state, which the guard below would notice.
importlib.import_module("rich.progress")

# `--hypothesis-profile=NAME` chooses another; a name of our own would lose to Hypothesis's `ci`.
register = hypothesis.settings.register_profile
PHASES = tuple(hypothesis.Phase)
register(
    "default", max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=(),  # none is left out, though Hypothesis's own profile for CI would
    phases=[phase for phase in PHASES if phase is not hypothesis.Phase.target],
)  # fmt: skip
register("quick", hypothesis.settings.get_profile("default"), max_examples=25)
# What is left open would come from the profile above, which is Hypothesis's own default now.
# Here examples also climb towards the worst ratio of a clean model.
register(
    "nightly", max_examples=5000, deadline=None, print_blob=True, derandomize=False, phases=PHASES,
    suppress_health_check=(),  # as above
)  # fmt: skip
register("seeded", hypothesis.settings.get_profile("default"), derandomize=False)
# For planted bugs: a failure is enough, its smallest example is not needed.
register(
    "power", hypothesis.settings.get_profile("default"), report_multiple_bugs=False,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)  # fmt: skip
register("power-short", hypothesis.settings.get_profile("power"), max_examples=10)
hypothesis.settings.load_profile("default")


def pytest_sessionstart() -> None:
    """No test counts before every comparer has rejected what is wrong."""
    # A shell starts what it runs in the background with SIGINT ignored; tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    accepted = accepted_mistakes()
    if accepted:
        pytest.exit(f"self-test of the comparers: {'; '.join(accepted)}", returncode=3)


def _global_state() -> dict[str, Any]:
    """Everything that a test could leave changed for the next one, in comparable form."""
    return {
        "numpy_impl gradients enabled": tape.is_grad_enabled(),
        "numpy_impl observer": tape.current_observer(),
        "torch gradients enabled": torch.is_grad_enabled(),
        "torch default dtype": torch.get_default_dtype(),
        "torch threads": torch.get_num_threads(),
        "torch random state": torch.get_rng_state().numpy().tobytes(),
        "NumPy random state": str(np.random.get_state()),
        "NumPy error handling": np.geterr(),
        "Python random state": random.getstate(),
    }


@pytest.fixture(autouse=True)
def runs_without_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of tests train, and a drawing takes longer than their runs; some ask for it."""
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr("gpt_parity.training_run.has_matplotlib", lambda: False)


@pytest.fixture(autouse=True)
def folder_of_its_own(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are tested where nothing lies but the text that the mark names."""
    mark = request.node.get_closest_marker("folder_of_its_own")
    if mark is not None:
        monkeypatch.chdir(tmp_path)
        for text in mark.args:
            Path("text.txt").write_bytes(text.encode())


@pytest.fixture(autouse=True)
def unchanged_global_state() -> Iterator[None]:
    """Fails a test that leaves a mode, dtype, thread count or random state changed."""
    before = _global_state()
    yield
    after = _global_state()
    # What leaked from this test is not the next one's fault.
    tape._grad_enabled.set(before["numpy_impl gradients enabled"])
    torch.set_grad_enabled(before["torch gradients enabled"])
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"the test left changed: {', '.join(changed)}"
