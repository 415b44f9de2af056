"""The tape: the backward pass, the switch that stops recording, and the one observer.

The backward pass follows HIPS autograd (Maclaurin 2016, chapter 4): gradients live in a dictionary
of one backward call, and only this file undoes broadcasting and accumulates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def records(*parents: Tensor) -> bool:
    """Whether an operation on these tensors enters the graph."""
    if _grad_enabled.get():
        for parent in parents:
            if parent.requires_grad:
                return True
    return False


# How often parameters were changed in place; each result remembers the count of its time.
writes = 0


def count_write() -> int:
    """A count above that of every result so far, for parameters that are changed in place."""
    global writes
    writes += 1
    return writes


def backward_pass(root: Tensor, cotangent: np.ndarray, retain_graph: bool) -> None:
    """Propagate `cotangent` from `root`, then add to the leaves, in a fixed order."""
    for node, grad in gradients_of(root, cotangent, retain_graph):
        node.accumulate_grad(grad)


Store = Callable[["Tensor", np.ndarray], np.ndarray]


def leave(node: Tensor, grad: np.ndarray) -> np.ndarray:
    """A gradient stays where it is until the pass has ended."""
    return grad


def stage(node: Tensor, grad: np.ndarray) -> np.ndarray:
    """A gradient waits where its tensor wants it, which no other pass may use meanwhile."""
    return node.stage(grad)


def gradients_of(
    root: Tensor, cotangent: np.ndarray, retain_graph: bool = False, store: Store = leave
) -> list[tuple[Tensor, np.ndarray]]:
    """The gradient of every leaf, and of every tensor that retains its own; changes none of them.

    `store` is called as soon as a gradient is complete, and says where it is from then on. The
    graph is freed, unless `retain_graph`, only after the whole pass has succeeded. Raises
    RuntimeError where another pass freed it meanwhile, and where an optimizer or `load_state_dict`
    has changed a parameter since the forward pass.
    """
    uses = count_uses(root)
    gradients = {root: cotangent}
    finished: list[tuple[Tensor, np.ndarray]] = []
    ready, done = [root], []
    while ready:
        node = ready.pop()
        done.append(node)
        grad = gradients.pop(node, None)
        if grad is not None:
            if node.gradient_fn is not None:
                _propagate(node, grad, gradients)
            if node.gradient_fn is None or node.retains_grad:
                finished.append((node, store(node, grad)))
        for parent in node.parents:
            if parent.requires_grad:
                uses[parent] -= 1
                if not uses[parent]:
                    ready.append(parent)
    if len(done) != len(uses):
        raise RuntimeError("backward: this graph was freed by another backward meanwhile")
    if not retain_graph:
        for node in done:
            if node.gradient_fn is not None:
                node.gradient_fn, node.parents = _freed, ()
    return finished


def _freed(grad: np.ndarray) -> tuple[()]:
    raise RuntimeError("backward: this graph was freed by an earlier backward (use retain_graph)")


def count_uses(root: Tensor) -> dict[Tensor, int]:
    """How often each tensor that needs a gradient is used on the way to `root`."""
    uses, stack = {root: 0}, [root]
    while stack:
        for parent in stack.pop().parents:
            if parent.requires_grad:
                if parent not in uses:
                    uses[parent] = 0
                    stack.append(parent)
                uses[parent] += 1
    return uses


def _propagate(node: Tensor, upstream: np.ndarray, gradients: dict[Tensor, np.ndarray]) -> None:
    """Call `gradient_fn` once and accumulate what it returns, by parent."""
    parents = node.parents
    assert node.gradient_fn is not None
    for i, grad in enumerate(node.gradient_fn(upstream)):
        parent = parents[i]
        if parent.written > node.born:
            raise RuntimeError(
                f"backward: a parameter that {node.op} used was changed in place since (by the "
                "optimizer or load_state_dict), needed the one of the forward pass"
            )
        if grad is None or not parent.requires_grad:
            continue
        data = parent.data
        if grad.dtype != data.dtype:
            raise TypeError(f"{node.op}: gradient {i} is {grad.dtype}, needed {data.dtype}")
        grad = _seen(node.op, i, grad, upstream, parents)
        if grad.shape != data.shape:
            grad = _seen("unbroadcast", i, unbroadcast(grad, data.shape), grad, parents)
        earlier = gradients.get(parent)
        if earlier is not None:
            grad = _seen("accumulate", i, earlier + grad, (earlier, grad), parents)
        gradients[parent] = grad


def _seen(
    op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Tensor, ...]
) -> np.ndarray:
    """The gradient, or what the observer puts in its place."""
    observer = _observer.get()
    if observer is None:
        return grad
    replacement = observer.backward(op, i, np.asarray(grad), upstream, parents)
    return grad if replacement is None else replacement


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
