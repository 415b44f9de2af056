"""Layers: named parameters and sub-layers, found by attribute as in `torch.nn.Module`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from numpy_impl import functional, tape
from numpy_impl.tensor import Tensor


class Parameter(Tensor):
    """A leaf that a layer owns. In a model, data and gradient are views into flat buffers."""

    __slots__ = ("buffer", "grad_view", "written")

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.written = 0
        ParameterBuffer([self])

    def stage(self, grad: np.ndarray) -> np.ndarray:
        """Copied into the flat gradient at once, if there is none yet, so that `grad` may go."""
        if self.grad is not None:
            return grad
        self.grad_view[...] = grad
        return self.grad_view

    def accumulate_grad(self, grad: np.ndarray) -> None:
        """Add to `grad`, a view into the flat gradient (the first gradient overwrites it)."""
        if self.grad is None:
            self.grad = self.stage(grad) if grad is not self.grad_view else grad
        else:
            self.grad += grad


class ParameterBuffer:
    """One flat array for the values of all parameters, and one for their gradients.

    Parameters of two or more axes come first, so that those which weight decay leaves alone
    stand together. `slices[i]` is the place of `parameters[i]`. Raises ValueError where a
    parameter stands twice, TypeError for mixed dtypes.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        if len({id(p) for p in parameters}) != len(parameters):
            raise ValueError("parameters: one of them stands twice, needed each once")
        if len({p.dtype for p in parameters}) != 1:
            raise TypeError("parameters: got none or mixed dtypes, needed one dtype")
        self.parameters = parameters
        self.data = np.empty(sum(p.data.size for p in parameters), parameters[0].dtype)
        self.grad = np.zeros_like(self.data)
        rows: dict[int, slice] = {}
        end = 0
        for i, p in sorted(enumerate(parameters), key=lambda pair: pair[1].ndim < 2):
            start, end = end, end + p.data.size
            rows[i] = slice(start, end)
            view = self.data[start:end].reshape(p.shape)
            view[...] = p.data
            p.data, p.grad_view, p.buffer = view, self.grad[start:end].reshape(p.shape), self
            if p.grad is not None:
                p.grad_view[...] = p.grad
                p.grad = p.grad_view
        self.slices = [rows[i] for i in range(len(parameters))]


class Layer:
    """Base of all layers: `forward` computes, attributes hold parameters and sub-layers."""

    training = True

    def forward(self, *inputs: Any) -> Any:
        """The layer's result."""
        raise TypeError(f"{type(self).__name__} has no forward")

    def __call__(self, *inputs: Any) -> Any:
        output = self.forward(*inputs)
        observer = tape.current_observer()
        if observer is not None:
            observer.layer(self, inputs, output)
        return output

    def _children(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self).items():
            if isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value))
            else:
                yield name, value

    def named_modules(self) -> Iterator[tuple[str, Layer]]:
        """Every distinct layer with its dotted name, this one first (named "")."""
        return self._named_modules("", set())

    def _named_modules(self, prefix: str, seen: set[int]) -> Iterator[tuple[str, Layer]]:
        seen.add(id(self))
        yield prefix, self
        for name, child in self._children():
            if isinstance(child, Layer) and id(child) not in seen:
                yield from child._named_modules(f"{prefix}.{name}" if prefix else name, seen)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every distinct parameter with its dotted name, in the order of construction."""
        seen: set[int] = set()
        for prefix, layer in self.named_modules():
            for name, child in layer._children():
                if isinstance(child, Parameter) and id(child) not in seen:
                    seen.add(id(child))
                    yield f"{prefix}.{name}" if prefix else name, child

    def parameters(self) -> Iterator[Parameter]:
        """Every distinct parameter, in the order of construction."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of every parameter, by name."""
        return {name: parameter.data.copy() for name, parameter in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy arrays into the parameters in place, rounding to their dtype.

        Raises ValueError, before anything changed, for missing, extra or misshapen arrays.
        """
        own = dict(self.named_parameters())
        missing, extra = [n for n in own if n not in state], [n for n in state if n not in own]
        if missing or extra:
            raise ValueError(f"load_state_dict: missing {missing}, unexpected {extra}")
        arrays = {name: np.array(state[name]) for name in own}  # copies: they may be views of it
        for name, array in arrays.items():
            if array.shape != own[name].shape or not np.can_cast(
                array.dtype, own[name].dtype, "same_kind"
            ):
                raise ValueError(
                    f"load_state_dict: {name} is {array.dtype} {array.shape}, "
                    f"needed {own[name].dtype} {own[name].shape}"
                )
        for name, array in arrays.items():
            own[name].data[...] = array
            own[name].written = tape.count_write()

    def train(self, mode: bool = True) -> Layer:
        """Set training mode on every layer."""
        for _, layer in self.named_modules():
            layer.training = mode
        return self

    def eval(self) -> Layer:
        """Set evaluation mode on every layer."""
        return self.train(False)


class Linear(Layer):
    """y = x W^T + b:  (..., in) -> (..., out), weight (out, in), bias (out,).

    Weights are drawn as randn * `std`, by default sqrt(2 / in) (He et al. 2015), biases are 0.
    """

    def __init__(
        self, in_features: int, out_features: int, rng: np.random.RandomState, dtype: Any,
        std: float | None = None,
    ) -> None:  # fmt: skip
        std = math.sqrt(2.0 / in_features) if std is None else std
        weight = rng.randn(out_features, in_features) * std
        self.weight = Parameter(weight.astype(dtype))
        self.bias = Parameter(np.zeros(out_features, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class LayerNorm(Layer):
    """Normalise the last axis, biased variance, eps inside the root; weight 1 and bias 0 (E,)."""

    def __init__(self, features: int, dtype: Any) -> None:
        self.weight = Parameter(np.ones(features, dtype))
        self.bias = Parameter(np.zeros(features, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight, self.bias)


class Embedding(Layer):
    """Rows of a table by integer ids:  (...) -> (..., E), weight (V, E) drawn as randn * 0.02."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, rng: np.random.RandomState, dtype: Any
    ) -> None:
        self.weight = Parameter((rng.randn(num_embeddings, embedding_dim) * 0.02).astype(dtype))

    def forward(self, ids: Any) -> Tensor:
        return functional.embedding(self.weight, ids)


class Softmax(Layer):
    """Softmax over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.softmax(x)


class Tril(Layer):
    """Keep the lower triangle of the last two axes, fill the rest with `value`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return functional.tril(x, self.value)


class GELU(Layer):
    """Gaussian error linear unit, tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x)
