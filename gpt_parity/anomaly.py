"""Where numbers stop being finite: the first tensor of a pass, or the operation that made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from gpt_parity.backends import backend_of
from gpt_parity.tensors import as_array
from numpy_impl.tape import Observer, observe

# Their fill may be -inf, which softmax turns into a weight of 0.
MASKS = frozenset({"tril", "aten.masked_fill", "aten.masked_fill_", "aten.where"})


class AnomalyError(FloatingPointError):
    """An operation gave a value or a gradient that is not finite."""


def first_non_finite(
    model: Any, loss_fn: Any, tokens: np.ndarray, targets: np.ndarray
) -> str | None:
    """Name the first tensor of a training pass that is not finite; None where all are.

    Weights come first, then the values of the forward pass, the loss, and the gradients from the
    loss back, each by its name in the trace. Gradients of the model end as None.
    """
    # Imported by the few that need it: the oracle trains too, and so knows the trainer.
    from gpt_parity.oracle.trace import trace

    for name, parameter in model.named_parameters():
        found = _count(as_array(parameter))
        if found:
            return f"weight {name} ({found})"
    seen = trace(model, loss_fn, tokens, targets)
    for name, value in seen.values.items():
        found = _count(value[seen.kept[name]] if name in seen.kept else value)
        if found:
            return f"{name} ({found})"
    if _count(seen.loss):
        return "loss"
    left = dict(seen.parameters)
    for name, gradient in reversed(seen.gradients.items()):
        found = _count(gradient)
        if found:
            return f"gradient of {name} ({found})"
        # From here the backward pass goes on to the layer's own parameters.
        layer = name.removesuffix("output")
        for parameter in [p for p in left if p.removeprefix(layer) in ("weight", "bias")]:
            found = _count(left.pop(parameter))
            if found:
                return f"gradient of {parameter} ({found})"
    return None


def _count(array: np.ndarray) -> str:
    bad = array.size - int(np.isfinite(array).sum())
    return f"{bad} of {array.size} values" if bad else ""


@contextmanager
def watch(model: Any) -> Iterator[None]:
    """Raise AnomalyError in the block at the first operation whose result is not finite.

    Every value and every gradient of a model of either backend is looked at, which takes time, and
    a NumPy model computes the parts of its batch one after the other. -inf may be the fill of a
    mask.
    """
    watcher = _watch_numpy if backend_of(model) == "numpy" else _watch_torch
    with watcher(model):
        yield


class _NumpyWatcher(Observer):
    """Knows tensors by the layers that returned them, so that operands have names."""

    def __init__(self, model: Any) -> None:
        self.layers = {id(layer): name for name, layer in model.named_modules()}
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        # Of the pass that runs and of the last one, whose backward pass is still to come. The
        # tensors are held, so that no id is used twice.
        self.outputs: dict[int, tuple[Any, str]] = {}
        self.finished: dict[int, tuple[Any, str]] = {}

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> None:
        if not _finite(op, out.data):
            raise AnomalyError(
                f"{self._call(op, parents)} gives {_count(out.data)} that are not finite"
            )

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Any, ...]
    ) -> None:
        if not _finite("", grad):
            operand = f" by operand {i}" if len(parents) > 1 else ""
            raise AnomalyError(
                f"the gradient of {self._call(op, parents)}{operand} has {_count(grad)} that are "
                "not finite"
            )

    def layer(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        name = self.layers.get(id(layer))
        if name == "":
            self.finished, self.outputs = self.outputs, {}
        elif name is not None:
            self.outputs.setdefault(id(output), (output, f"{name}.output"))

    def _call(self, op: str, parents: tuple[Any, ...]) -> str:
        known = self.finished | self.outputs
        names = [self.parameters.get(id(p)) or known.get(id(p), (p, "..."))[1] for p in parents]
        return f"{op}({', '.join(names)})"


@contextmanager
def _watch_numpy(model: Any) -> Iterator[None]:
    with observe(_NumpyWatcher(model)):
        yield


@contextmanager
def _watch_torch(model: Any) -> Iterator[None]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    running: list[str] = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = str(func.overloadpacket)
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                    continue
                array = as_array(tensor)
                if not _finite(name, array):
                    place = (
                        f"in {running[-1]}" if running
                        else "outside of the layers (loss, backward pass or update)"
                    )  # fmt: skip
                    raise AnomalyError(f"{name} {place} gives {_count(array)} that are not finite")
            return out

    with ExitStack() as stack:
        for name, layer in model.named_modules():
            label = name or type(layer).__name__
            before = layer.register_forward_pre_hook(lambda *_, n=label: running.append(n))
            after = layer.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(Watcher())
        yield


def _finite(op: str, array: np.ndarray) -> bool:
    if op in MASKS:
        return not (np.isnan(array) | (array == np.inf)).any()
    return bool(np.isfinite(array).all())
