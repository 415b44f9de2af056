"""Memory: nothing grows from step to step, and freed memory is kept where that was asked for."""

from __future__ import annotations

import gc
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from gpt_parity.bench.worker import measure_leaks, resident
from gpt_parity.config import TrainConfig
from gpt_parity.training import new_trainer
from numpy_impl import Tensor, memory
from numpy_impl.memory import keep_freed_memory

pytestmark = pytest.mark.reference("exact property")

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="needs glibc: run on a Linux that is not musl's"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The calls of mallopt and malloc_trim, which do nothing."""
    found: list[tuple[int, ...]] = []

    def mallopt(parameter: int, value: int) -> int:
        found.append((parameter, value))
        return 1

    def malloc_trim(pad: int) -> int:
        found.append((pad,))
        return 1

    monkeypatch.setattr(memory, "_glibc", lambda: (mallopt, malloc_trim))
    return found


# The parameters of mallopt(3), by their numbers: trim threshold, mapped blocks, arenas.
KEPT = [(-1, 2**31 - 1), (-4, 0), (-8, 1)]
RETURNED = [(-1, 128 * 1024), (-4, 65536), (-8, 0), (0,)]


def test_the_outermost_block_decides(calls: list[tuple[int, ...]]) -> None:
    with keep_freed_memory():
        with keep_freed_memory():
            assert calls == KEPT
        assert calls == KEPT
    assert calls == KEPT + RETURNED


def test_an_error_inside_gives_the_memory_back(calls: list[tuple[int, ...]]) -> None:
    with pytest.raises(KeyError), keep_freed_memory():
        raise KeyError
    assert calls == KEPT + RETURNED


def test_the_last_of_several_threads_gives_it_back(calls: list[tuple[int, ...]]) -> None:
    leave = threading.Event()

    def hold() -> None:
        with keep_freed_memory():
            leave.wait(10)

    thread = threading.Thread(target=hold)
    with keep_freed_memory():
        thread.start()
        while memory._blocks < 2:
            pass
    assert calls == KEPT
    leave.set()
    thread.join()
    assert calls == KEPT + RETURNED


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """As on macOS: no mallopt."""

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library())
    with keep_freed_memory():
        pass
    assert memory._blocks == 0


@glibc
def test_pages_are_faulted_in_once() -> None:
    """Arrays of 3 MB: by default each is mapped anew, 730 pages; kept, none after the first."""
    resource = pytest.importorskip("resource", reason="needs a Unix")

    def faults(count: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            np.ones(3 * 2**17)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with keep_freed_memory():
        faults(2)
        assert faults(20) < 730


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
    trainer = new_trainer(config, config.model(5))
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
    with keep_freed_memory():
        early, late = measure_leaks(steps=[100, 400])
    assert early["tensors"] <= late["tensors"] <= early["tensors"]
    assert late["resident"] - early["resident"] < 2**20 and resident("VmRSS") > 0
