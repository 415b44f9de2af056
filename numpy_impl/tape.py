"""The tape: the backward pass, the switch that stops recording, and the one observer.

The backward pass follows HIPS autograd (Maclaurin 2016, chapter 4): gradients live in a dictionary
of one backward call, and only this file undoes broadcasting and accumulates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy_impl.tensor import Tensor


class Observer:
    """Sees every result of a block of code, and may replace it; subclasses override what they need.

    The tape's own arithmetic is reported too: `op` is "unbroadcast" where it sums a gradient back
    to its parent's shape, and "accumulate" where it adds the gradients of two uses of one tensor.
    """

    def forward(self, op: str, out: Tensor, parents: tuple[Tensor, ...]) -> np.ndarray | None:
        """After each operation; an array of the same shape and dtype replaces its result."""

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Tensor, ...]
    ) -> np.ndarray | None:
        """After each gradient of `parents[i]`; an array of the same shape and dtype replaces it.

        `upstream` is what the gradient was computed from: the cotangent of the result; for
        "unbroadcast" the larger gradient; for "accumulate" the pair of summands.
        """

    def layer(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """After each call of a layer, innermost first."""


_grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Let `observer` see the block; the previous observer, if any, returns afterwards."""
    token = _observer.set(observer)
    try:
        yield observer
    finally:
        _observer.reset(token)


def current_observer() -> Observer | None:
    """The observer of the running block."""
    return _observer.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Record no graph in the block; the previous state returns, whatever happens inside."""
    token = _grad_enabled.set(False)
    try:
        yield
    finally:
        _grad_enabled.reset(token)


def is_grad_enabled() -> bool:
    """True where operations record the graph."""
    return _grad_enabled.get()


def backward_pass(root: Tensor, cotangent: np.ndarray, retain_graph: bool) -> None:
    """Propagate `cotangent` from `root`, then add to the leaves, in the order of the graph."""
    order = topological_order(root)
    gradients = {root: cotangent}
    finished: list[tuple[Tensor, np.ndarray]] = []
    for node in reversed(order):
        grad = gradients.pop(node, None)
        if grad is None:
            continue
        if node.gradient_fn is None or node.retains_grad:
            finished.append((node, grad))
        if node.gradient_fn is not None:
            _propagate(node, grad, gradients)
    for node, grad in finished:
        node.accumulate_grad(grad)
    if not retain_graph:
        for node in order:
            if node.gradient_fn is not None:
                node.gradient_fn, node.parents = _freed, ()


def _freed(grad: np.ndarray) -> tuple[()]:
    raise RuntimeError("backward: this graph was freed by an earlier backward (use retain_graph)")


def topological_order(root: Tensor) -> list[Tensor]:
    """All tensors that need a gradient, parents before children, without recursion."""
    order: list[Tensor] = []
    seen = {root}
    stack = [(root, iter(root.parents))]
    while stack:
        node, parents = stack[-1]
        for parent in parents:
            if parent.requires_grad and parent not in seen:
                seen.add(parent)
                stack.append((parent, iter(parent.parents)))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _propagate(node: Tensor, upstream: np.ndarray, gradients: dict[Tensor, np.ndarray]) -> None:
    """Call `gradient_fn` once and accumulate what it returns, by parent."""
    observer = _observer.get()

    def seen(op: str, i: int, grad: np.ndarray, source: Any) -> np.ndarray:
        if observer is None:
            return grad
        replacement = observer.backward(op, i, np.asarray(grad), source, node.parents)
        return grad if replacement is None else replacement

    assert node.gradient_fn is not None
    for i, grad in enumerate(node.gradient_fn(upstream)):
        if grad is None or not node.parents[i].requires_grad:
            continue
        parent = node.parents[i]
        if grad.dtype != parent.data.dtype:
            raise TypeError(f"{node.op}: gradient {i} is {grad.dtype}, needed {parent.data.dtype}")
        grad = seen(node.op, i, grad, upstream)
        if grad.shape != parent.data.shape:
            grad = seen("unbroadcast", i, unbroadcast(grad, parent.data.shape), grad)
        earlier = gradients.get(parent)
        if earlier is not None:
            grad = seen("accumulate", i, earlier + grad, (earlier, grad))
        gradients[parent] = grad


def unbroadcast(grad: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum `grad` over the axes that broadcasting added or stretched, down to `shape`.

    Raises ValueError where `shape` does not broadcast to the gradient's.
    """
    extra = grad.ndim - len(shape)
    stretched = [extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1]
    summed = grad.sum(axis=(*range(extra), *stretched), keepdims=True)
    if extra < 0 or summed.shape[extra:] != shape:
        raise ValueError(f"gradient of shape {grad.shape} does not reduce to {shape}")
    return summed.reshape(shape)
