"""Traces: every distinct tensor between the layers of a model, with its total derivative.

A tensor is named `<deepest layer>.output`, or `<layer>.input` where no layer produced it (the
scores before `mask`, the context before `output`); its other names are aliases. Both twins give
the same entries in the same topological order. The gradient of an entry is the derivative of the
loss by that tensor over all of its uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpt_parity.tensors import as_array
from numpy_impl.tape import Observer, observe


@dataclass
class Trace:
    """What one forward and backward pass of a model computed, in its own dtype.

    `values` and `gradients` hold the trace entries in topological order, `parameters` the
    gradient of every parameter. `kept` is where a masked entry holds scores and not the fill.
    `ordinals` counts the operations before an entry (NumPy twin only).
    """

    loss: np.ndarray
    values: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    aliases: dict[str, str] = field(default_factory=dict)
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    ordinals: dict[str, int] = field(default_factory=dict)


class _Recorder(Observer):
    """Names tensors as layers return them. Arithmetic is left to another observer, if any."""

    def __init__(self, names: dict[int, str], arithmetic: Observer | None) -> None:
        self.names, self.arithmetic = names, arithmetic
        self.tensors: dict[str, Any] = {}
        self.values: dict[str, np.ndarray] = {}
        self.known: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.kept: dict[str, np.ndarray] = {}
        self.order: dict[int, int] = {}
        self.operations: list[Any] = []

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> np.ndarray | None:
        self.order[id(out)] = len(self.operations)
        self.operations.append(out)  # held, so that no id is used twice
        return self.arithmetic.forward(op, out, parents) if self.arithmetic else None

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Any, ...]
    ) -> np.ndarray | None:
        if self.arithmetic is None:
            return None
        return self.arithmetic.backward(op, i, grad, upstream, parents)

    def layer(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if self.arithmetic is not None:
            self.arithmetic.layer(layer, inputs, output)
        name = self.names.get(id(layer))
        if name is None:
            return
        for tensor in inputs:
            if hasattr(tensor, "retain_grad"):
                self._name(tensor, f"{name}.input")
        self._name(output, f"{name}.output" if name else "output")
        if type(layer).__name__ == "Tril":
            self.kept[self.known[id(output)]] = np.broadcast_to(
                np.tri(*output.shape[-2:], dtype=bool), tuple(output.shape)
            )

    def _name(self, tensor: Any, name: str) -> None:
        known = self.known.get(id(tensor))
        if known is None:
            tensor.retain_grad()
            self.known[id(tensor)] = name
            self.tensors[name] = tensor
            self.values[name] = _array(tensor)
        elif known != name:
            self.aliases[name] = known


def trace(
    model: Any, loss_fn: Any, tokens: np.ndarray, targets: np.ndarray,
    arithmetic: Observer | None = None,
) -> Trace:  # fmt: skip
    """Run forward and backward once, recording every entry; parameters end without gradients.

    `arithmetic` is one more observer for the NumPy twin, such as Monte Carlo arithmetic. Raises
    RuntimeError where a value changed between forward and backward.
    """
    recorder = _Recorder({id(m): name for name, m in model.named_modules()}, arithmetic)
    for parameter in model.parameters():
        parameter.grad = None
    if hasattr(model, "register_forward_hook"):
        handles = [m.register_forward_hook(recorder.layer) for _, m in model.named_modules()]
        try:
            loss = loss_fn(model(tokens), targets)
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
    else:
        with observe(recorder):
            loss = loss_fn(model(tokens), targets)
            loss.backward()
    for name, value in recorder.values.items():
        if not np.array_equal(value, _array(recorder.tensors[name]), equal_nan=True):
            raise RuntimeError(f"trace: {name} was written to after it was computed")
    parameters = {name: _gradient(p) for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return Trace(
        loss=_array(loss),
        values=recorder.values,
        gradients={name: _gradient(t) for name, t in recorder.tensors.items()},
        parameters=parameters,
        aliases=recorder.aliases,
        kept=recorder.kept,
        ordinals={n: recorder.order.get(id(t), -1) for n, t in recorder.tensors.items()},
    )


def _gradient(tensor: Any) -> np.ndarray:
    """The derivative of the loss, which is 0 where it does not depend on the tensor."""
    if tensor.grad is None:
        return np.zeros_like(_array(tensor))
    return _array(tensor.grad)


def _array(tensor: Any) -> np.ndarray:
    """A private copy of an array or of either backend's tensor."""
    return np.array(as_array(tensor))
