"""The NumPy engine without gradients, on several threads, and under an observer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numpy_impl import tape
from numpy_impl.layers import GELU, Layer
from numpy_impl.tape import Observer, no_grad, observe
from numpy_impl.tensor import Tensor
from parity_tests.tensors import tensor

pytestmark = pytest.mark.reference("by hand")


# --- modes


@pytest.mark.reference("exact property")
def test_no_grad_nests_and_returns_after_errors() -> None:
    with no_grad():
        with no_grad():
            assert not tape.is_grad_enabled()
        assert not tape.is_grad_enabled()
        assert not (tensor(1.0) * 2.0).requires_grad
    assert tape.is_grad_enabled()
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert tape.is_grad_enabled()
    out = tensor(1.0) * 2.0
    assert out.requires_grad and out.parents
    with no_grad():
        out = tensor(1.0) * 2.0
    assert out.parents == () and out.gradient_fn is None
    with pytest.raises(RuntimeError, match="has no history"):
        out.backward()


def test_no_grad_as_a_decorator() -> None:
    @no_grad()
    def product(fail: bool = False) -> Tensor:
        if fail:
            raise KeyError
        return tensor(1.0) * 2.0

    for _ in range(2):
        assert not product().requires_grad
        assert tape.is_grad_enabled()
    with pytest.raises(KeyError):
        product(fail=True)
    assert tape.is_grad_enabled()


def test_no_grad_inside_a_generator() -> None:
    def generator() -> Iterator[bool]:
        with no_grad():
            for _ in range(3):
                yield (tensor(1.0) * 2.0).requires_grad

    assert list(generator()) == [False] * 3
    assert tape.is_grad_enabled()
    unfinished = generator()
    next(unfinished)
    unfinished.close()
    assert tape.is_grad_enabled()


def test_threads_have_their_own_mode_and_graph() -> None:
    found: dict[int, Any] = {}
    both = threading.Barrier(2, timeout=30)

    def work(k: int) -> None:
        x = Tensor(np.full(50, float(k + 1)))
        both.wait()
        total = x
        for _ in range(200):
            total = total + x * x
        total.backward(np.ones(50))
        found[k] = (tape.is_grad_enabled(), x.grad)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    with no_grad():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not tape.is_grad_enabled()
    for k in range(2):
        enabled, grad = found[k]
        assert enabled
        np.testing.assert_array_equal(grad, np.full(50, 1.0 + 400.0 * (k + 1)))


# --- the observer


class Recorder(Observer):
    def __init__(self, replace: bool = False) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.replace = replace

    def forward(self, op: str, out: Tensor, parents: tuple[Tensor, ...]) -> np.ndarray | None:
        self.events.append(("forward", op, len(parents)))
        return out.data + 100.0 if self.replace and op == "add" else None

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Tensor, ...]
    ) -> np.ndarray | None:
        self.events.append(("backward", op, i))
        if op == "accumulate":
            np.testing.assert_array_equal(grad, upstream[0] + upstream[1])
        return grad * 10.0 if self.replace and op == "add" and i == 1 else None

    def layer(self, layer: Layer, inputs: tuple[Any, ...], output: Any) -> None:
        self.events.append(("layer", type(layer).__name__, len(inputs)))


def test_the_observer_sees_everything_in_order() -> None:
    x, b = Tensor(np.ones((2, 3))), Tensor(np.ones(3))
    with observe(Recorder()) as seen:
        (GELU()(x) + b + x).backward(np.ones((2, 3)))
    assert seen.events == [
        ("forward", "gelu", 1), ("layer", "GELU", 1), ("forward", "add", 2), ("forward", "add", 2),
        ("backward", "add", 0), ("backward", "add", 1),
        ("backward", "add", 0), ("backward", "add", 1), ("backward", "unbroadcast", 1),
        ("backward", "gelu", 0), ("backward", "accumulate", 0),
    ]  # fmt: skip
    before = len(seen.events)
    (x + b).backward(np.ones((2, 3)))
    assert len(seen.events) == before


def test_the_observer_may_replace_results_and_gradients() -> None:
    x, y = tensor(1.0), tensor(2.0)
    with observe(Recorder(replace=True)):
        out = x + y
        out.backward()
    assert out.item() == 103.0
    assert (x.grad, y.grad) == (1.0, 10.0)


def test_observers_nest_and_end_after_errors() -> None:
    with observe(Recorder()) as outer:
        with pytest.raises(KeyError), observe(Recorder()) as inner:
            tensor(1.0) + 1.0
            raise KeyError
        assert tape.current_observer() is outer
        -tensor(1.0)
    assert tape.current_observer() is None
    assert inner.events == [("forward", "add", 2)]
    assert outer.events == [("forward", "neg", 1)]
