"""Memory: nothing grows from step to step, and freed memory is kept where that was asked for."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.bench.worker import measure_leaks, resident
from gpt_parity.config import TrainConfig
from gpt_parity.training import new_trainer
from numpy_impl import Tensor, memory
from numpy_impl.memory import keep_freed_memory

pytestmark = pytest.mark.reference("exact property")

ROOT = Path(__file__).resolve().parents[1]

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="needs glibc: run on Debian or Fedora"
)


@glibc
def test_kept_memory_is_faulted_in_once() -> None:
    """Arrays of 40 MB, which glibc maps one by one: ten, in a process that keeps and one that
    does not. Faults are counted after the first array.
    """
    program = """
import resource, sys
import numpy as np
from numpy_impl.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
np.ones(5 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    np.ones(5 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

    def faults(how: str) -> int:
        result = subprocess.run(
            [sys.executable, "-c", program, how], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return int(result.stdout)

    assert faults("keep") * 10 < faults("return")


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """As on macOS: no mallopt."""

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library())
    assert not keep_freed_memory()


@contextmanager
def collected() -> Iterator[Callable[[], int]]:
    """Count live Tensors without the collector of cycles, which must not be needed."""
    gc.collect()
    gc.disable()
    try:
        yield lambda: sum(issubclass(type(found), Tensor) for found in gc.get_objects())
    finally:
        gc.enable()


def test_a_step_leaves_no_tensor_behind_and_needs_no_collector() -> None:
    config = TrainConfig(context_size=4, embedding_size=6)
    trainer = new_trainer(config, config.model_config(5))
    tokens = np.zeros((2, 4), int)
    with collected() as count:
        trainer.train_step(tokens, tokens)
        before = count()
        for _ in range(5):
            trainer.train_step(tokens, tokens)
        assert count() == before


@glibc
def test_resident_memory_does_not_grow_with_the_steps() -> None:
    """Between step 100 and step 400 at the source size, whose steps allocate 2 MB each."""
    early, late = measure_leaks(steps=[100, 400])
    assert early["tensors"] == late["tensors"]
    assert late["resident"] - early["resident"] < 2**20 and resident("VmRSS") > 0
