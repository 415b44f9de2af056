"""One row per operation and per layer: both twins' callables and what to call them with.

A new operation is one function in each twin, one row in `gpt_parity/oracle/rounding.py` and one
row here; a test asserts that the two tables name the same operations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.func import functional_call

from gpt_parity.oracle.examples import (
    STRUCTURES,
    Example,
    Plan,
    examples,
    ids,
    shapes,
    sizes,
)
from numpy_impl import functional as F
from numpy_impl import gpt as numpy_gpt
from numpy_impl import layers, loss
from numpy_impl import optim as numpy_optim
from numpy_impl.tensor import Tensor
from parity_tests.strategies import Keep, broadcast_shapes
from torch_impl import functional as tF
from torch_impl import gpt as torch_gpt
from torch_impl import layers as torch_layers
from torch_impl import loss as torch_loss
from torch_impl import optim as torch_optim


@dataclass(frozen=True)
class Row:
    """An operation in both twins; `name` is its row in the table of rounding.

    The callables take the floating operands, in the order of the operation's parents and all of
    them differentiable, then the rest of the example.
    """

    name: str
    numpy: Callable[..., Tensor]
    torch: Callable[..., torch.Tensor]
    inputs: st.SearchStrategy[Example]
    layer: str = ""

    @property
    def id(self) -> str:
        return self.layer or self.name


def elementwise(smallest_ndim: int = 0) -> st.SearchStrategy[Plan]:
    return shapes(smallest_ndim).map(lambda shape: ((shape,), ()))


@st.composite
def broadcast_pairs(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(0))
    pair = [shape, draw(broadcast_shapes(shape))]
    return tuple(draw(st.permutations(pair))), ()


@st.composite
def stretched_pairs(draw: st.DrawFn) -> Plan:
    """Two shapes of which each may stretch the other."""
    shape = draw(shapes(0))
    return (draw(broadcast_shapes(shape)), draw(broadcast_shapes(shape))), ()


pairs = st.one_of(broadcast_pairs(), stretched_pairs())


@st.composite
def matrix_pairs(draw: st.DrawFn) -> Plan:
    m, k, n = draw(sizes(3))
    leading = draw(st.integers(0, 2).flatmap(lambda count: sizes(count, 3)))
    a, b = draw(broadcast_shapes(leading)), draw(broadcast_shapes(leading))
    return ((*a, m, k), (*b, k, n)), ()


@st.composite
def transposed(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(1, 4))
    axis = st.integers(-len(shape), len(shape) - 1)
    return (shape,), (draw(axis), draw(axis))


@st.composite
def reshaped(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(0))
    axes = list(shape)
    for _ in range(draw(st.integers(0, 2))):
        if len(axes) > 1 and draw(st.booleans()):
            at = draw(st.integers(0, len(axes) - 2))
            axes[at : at + 2] = [axes[at] * axes[at + 1]]
        else:
            axes.insert(draw(st.integers(0, len(axes))), 1)
    if axes and draw(st.booleans()):
        axes[draw(st.integers(0, len(axes) - 1))] = -1
    return (shape,), tuple(axes)


@st.composite
def reduced(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(0))
    ndim = len(shape)
    axis = st.integers(-ndim, ndim - 1)
    axes = st.integers(1, max(1, ndim)).flatmap(
        lambda count: st.permutations(range(ndim)).map(lambda order: tuple(order[:count]))
    )
    chosen = draw(st.one_of(axis, axes, st.none())) if ndim else None
    return (shape,), (chosen, draw(st.booleans()))


FILLS = st.sampled_from((-1e9, -np.inf, 0.0, 1.5))


@st.composite
def filled(draw: st.DrawFn) -> Plan:
    return (draw(shapes(2, 4)),), (draw(FILLS),)


@st.composite
def masked(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(1))
    return (shape,), (Keep(shape), draw(FILLS))


@st.composite
def linear_maps(draw: st.DrawFn) -> Plan:
    inputs, outputs = draw(sizes(2))
    leading = draw(st.integers(0, 3).flatmap(lambda count: sizes(count, 3)))
    return ((*leading, inputs), (outputs, inputs), (outputs,)), ()


@st.composite
def unbound(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(1, 4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return (shape,), (axis, draw(st.integers(0, shape[axis] - 1)))


@st.composite
def normalised(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(1))
    return (shape, shape[-1:], shape[-1:]), ()


@st.composite
def lookups(draw: st.DrawFn) -> Plan:
    table = draw(sizes(2))
    return (table,), (draw(ids(draw(shapes(0, 2)), table[0])),)


@st.composite
def classified(draw: st.DrawFn) -> Plan:
    shape = draw(shapes(1))
    return (shape,), (draw(ids(shape[:-1], shape[-1])),)


def torch_sum(x: torch.Tensor, axis: Any, keepdims: bool) -> torch.Tensor:
    return torch.sum(x, dim=tuple(range(x.ndim)) if axis is None else axis, keepdim=keepdims)


def numpy_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    layer = layers.Linear(inputs, outputs, np.random.RandomState(0), x.dtype)
    layer.weight, layer.bias = weight, bias
    return layer(x)


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    layer = torch_layers.Linear(inputs, outputs, np.random.RandomState(0), x.dtype)
    return functional_call(layer, {"weight": weight, "bias": bias}, (x,))


def numpy_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    layer = layers.LayerNorm(len(weight.data), x.dtype)
    layer.weight, layer.bias = weight, bias
    return layer(x)


def torch_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    layer = torch_layers.LayerNorm(len(weight), x.dtype)
    return functional_call(layer, {"weight": weight, "bias": bias}, (x,))


def numpy_embedding(table: Tensor, tokens: np.ndarray) -> Tensor:
    layer = layers.Embedding(*table.shape, np.random.RandomState(0), table.dtype)
    layer.weight = table
    return layer(tokens)


def torch_embedding(table: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
    layer = torch_layers.Embedding(*table.shape, np.random.RandomState(0), table.dtype)
    return functional_call(layer, {"weight": table}, (tokens,))


# 2^60 stays below 1.8e19, where the square overflows in float32 and PyTorch's gradient is NaN.
gelu_inputs = examples(elementwise(), limit=60)
softmax_inputs = examples(elementwise(1), limit=14, structures=(*STRUCTURES, "masked"))
cross_entropy_inputs = examples(classified(), limit=14)
tril_inputs = examples(filled())
linear_inputs = examples(linear_maps())
layer_norm_inputs = examples(normalised())
embedding_inputs = examples(lookups())

ROWS = (
    Row("add", operator.add, operator.add, examples(pairs)),
    Row("sub", operator.sub, operator.sub, examples(pairs)),
    Row("neg", operator.neg, operator.neg, examples(elementwise())),
    Row("mul", operator.mul, operator.mul, examples(pairs)),
    Row("div", operator.truediv, operator.truediv, examples(pairs, limit=15, nonzero=(1,))),
    Row("matmul", operator.matmul, operator.matmul, examples(matrix_pairs())),
    Row("transpose", Tensor.transpose, torch.transpose, examples(transposed())),
    Row("reshape", Tensor.reshape, lambda x, *shape: x.reshape(shape), examples(reshaped())),
    Row(
        "unbind", lambda x, axis, i: x.unbind(axis)[i], lambda x, axis, i: x.unbind(axis)[i],
        examples(unbound()),
    ),
    Row("sum", Tensor.sum, torch_sum, examples(reduced())),
    Row("tril", F.tril, tF.tril, tril_inputs),
    Row(
        "mask",
        lambda x, keep, value: F._select("mask", x, keep, value),
        lambda x, keep, value: tF._select(x, torch.from_numpy(keep), value),
        examples(masked()),
    ),
    Row("linear", F.linear, tF.linear, linear_inputs),
    Row(
        "linear", F.linear, tF.linear, examples(linear_maps().map(lambda p: (p[0][:2], p[1]))),
        layer="linear without a bias",
    ),
    Row("layer_norm", F.layer_norm, tF.layer_norm, layer_norm_inputs),
    Row("embedding", F.embedding, tF.embedding, embedding_inputs),
    Row("softmax", F.softmax, tF.softmax, softmax_inputs),
    Row("gelu", F.gelu, tF.gelu, gelu_inputs),
    Row("cross_entropy", F.cross_entropy, tF.cross_entropy, cross_entropy_inputs),
    Row("linear", numpy_linear, torch_linear, linear_inputs, layer="Linear"),
    Row("embedding", numpy_embedding, torch_embedding, embedding_inputs, layer="Embedding"),
    Row("layer_norm", numpy_layer_norm, torch_layer_norm, layer_norm_inputs, layer="LayerNorm"),
    Row(
        "softmax", lambda x: layers.Softmax()(x), lambda x: torch_layers.Softmax()(x),
        softmax_inputs, layer="Softmax",
    ),
    Row(
        "tril",
        lambda x, value: layers.Tril(value)(x),
        lambda x, value: torch_layers.Tril(value)(x),
        tril_inputs, layer="Tril",
    ),
    Row(
        "gelu", lambda x: layers.GELU()(x), lambda x: torch_layers.GELU()(x),
        gelu_inputs, layer="GELU",
    ),
    Row(
        "cross_entropy",
        lambda logits, targets: loss.GPTLoss()(logits, targets),
        lambda logits, targets: torch_loss.GPTLoss()(logits, targets),
        cross_entropy_inputs, layer="GPTLoss",
    ),
)  # fmt: skip

BY_ID = {row.id: row for row in ROWS}


@dataclass(frozen=True)
class Twin:
    """One backend for tests that run on both: its modules, and how arrays go in and out."""

    name: str
    functional: Any
    layers: Any
    gpt: Any
    loss: Any
    optim: Any
    dtypes: dict[str, Any]
    tensor: Callable[[np.ndarray], Any]
    array: Callable[[Any], np.ndarray]

    def parameter(self, array: np.ndarray) -> Any:
        if self.name == "numpy":
            return layers.Parameter(array)
        return torch.nn.Parameter(torch.tensor(array))


NUMPY = Twin(
    "numpy", F, layers, numpy_gpt, loss, numpy_optim,
    {"float32": np.float32, "float64": np.float64},
    Tensor,
    lambda x: np.array(x.data if isinstance(x, Tensor) else x),
)  # fmt: skip
TORCH = Twin(
    "torch", tF, torch_layers, torch_gpt, torch_loss, torch_optim,
    {"float32": torch.float32, "float64": torch.float64},
    lambda a: torch.tensor(np.array(a), requires_grad=np.asarray(a).dtype.kind == "f"),
    lambda x: np.array(x.detach().numpy()),
)  # fmt: skip
TWINS = (NUMPY, TORCH)
