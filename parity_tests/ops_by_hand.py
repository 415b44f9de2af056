"""Right operations in plain NumPy and through PyTorch's autograd, and with one result changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

FEW = 25

DTYPES = ("float64", "float32")

Array = np.ndarray
C = math.sqrt(2.0 / math.pi)


def matmul(a: Array, b: Array, g: Array) -> Any:
    return a @ b, (g @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ g)


def linear(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    rows, upstream = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return x @ weight.T + bias, (g @ weight, upstream.T @ rows, upstream.sum(axis=0))


def layer_norm(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    c = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((c * c).mean(axis=-1, keepdims=True) + x.dtype.type(1e-5))
    z, a, n = c / s, g * weight, x.shape[-1]
    dx = (a - a.mean(axis=-1, keepdims=True) - z * (a * z).sum(axis=-1, keepdims=True) / n) / s
    rows, upstream = z.reshape(-1, n), g.reshape(-1, n)
    return z * weight + bias, (dx, (rows * upstream).sum(axis=0), upstream.sum(axis=0))


def embedding(table: Array, ids: Array, g: Array) -> Any:
    dtable = np.zeros_like(table)
    np.add.at(dtable, ids, g)
    return table[ids], dtable


def softmax(x: Array, g: Array) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return p, p * (g - (g * p).sum(axis=-1, keepdims=True))


def tril(x: Array, value: float, g: Array) -> Any:
    keep = np.tri(*x.shape[-2:], dtype=bool)
    return np.where(keep, x, x.dtype.type(value)), np.where(keep, g, g.dtype.type(0))


def gelu(x: Array, g: Array) -> Any:
    t = np.tanh(C * (x + 0.044715 * x * x * x))
    du = C * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + t), g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du)


def cross_entropy(logits: Array, targets: Array, g: Array) -> Any:
    rows = logits.reshape(-1, logits.shape[-1])
    hit = np.arange(len(rows)), targets.reshape(-1)
    z = rows - rows.max(axis=-1, keepdims=True)
    e = np.exp(z)
    total = e.sum(axis=-1)
    d = e / total[:, None]
    d[hit] -= 1
    return (np.log(total) - z[hit]).mean(), (g * d / len(rows)).reshape(logits.shape)


def causal_attention(q: Array, k: Array, v: Array, g: Array) -> Any:
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(-1, -2) * scale
    scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) * scale
    return p @ v, (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g)


def adamw_step(
    weight: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, step: int, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float,
) -> Any:  # fmt: skip
    b1, b2 = betas
    m = b1 * exp_avg + (1 - b1) * grad
    v = b2 * exp_avg_sq + (1 - b2) * grad * grad
    update = (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
    return weight - lr * weight_decay * weight - lr * update, m, v


def clip_grad_norm(grads: list[Array], max_norm: float) -> Any:
    norm = np.sqrt(sum((g * g).sum() for g in grads))
    scale = min(1, max_norm / (float(norm) + 1e-6))
    return [g * scale for g in grads], norm


def with_autograd(forward: Callable[..., torch.Tensor], floating: int) -> Callable[..., Any]:
    """The first `floating` arguments are operands; results stay tensors."""

    def forward_and_vjp(*arguments: Any) -> Any:
        *inputs, g = (torch.tensor(x) if isinstance(x, np.ndarray) else x for x in arguments)
        operands = [x.requires_grad_() for x in inputs[:floating]]
        output = forward(*operands, *inputs[floating:])
        return output, torch.autograd.grad(output, operands, g)

    return forward_and_vjp


def torch_tril(x: torch.Tensor, value: float) -> torch.Tensor:
    keep = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    return x.masked_fill(~keep, value)


def torch_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    )


def torch_adamw_step(
    weight: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, step: int, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float,
) -> Any:  # fmt: skip
    parameter = torch.nn.Parameter(torch.tensor(weight))
    parameter.grad = torch.tensor(grad)
    optimizer = torch.optim.AdamW(
        [parameter], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(step - 1.0), "exp_avg": torch.tensor(exp_avg),
        "exp_avg_sq": torch.tensor(exp_avg_sq),
    }  # fmt: skip
    optimizer.step()
    state = optimizer.state[parameter]
    return parameter, state["exp_avg"], state["exp_avg_sq"]


def torch_clip_grad_norm(grads: list[Array], max_norm: float) -> Any:
    parameters = [torch.nn.Parameter(torch.tensor(g)) for g in grads]
    for parameter, g in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return [parameter.grad for parameter in parameters], norm


NUMPY = {
    f.__name__: f
    for f in (
        matmul, linear, layer_norm, embedding, softmax, tril, gelu, cross_entropy,
        causal_attention, adamw_step, clip_grad_norm,
    )
}  # fmt: skip
F = torch.nn.functional
TORCH = {
    "matmul": with_autograd(torch.matmul, 2),
    "linear": with_autograd(F.linear, 3),
    "layer_norm": with_autograd(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 3),
    "embedding": with_autograd(lambda table, ids: F.embedding(ids, table), 1),
    "softmax": with_autograd(lambda x: torch.softmax(x, dim=-1), 1),
    "tril": with_autograd(torch_tril, 1),
    "gelu": with_autograd(lambda x: F.gelu(x, approximate="tanh"), 1),
    "cross_entropy": with_autograd(torch_cross_entropy, 1),
    "causal_attention": with_autograd(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 3
    ),
    "adamw_step": torch_adamw_step,
    "clip_grad_norm": torch_clip_grad_norm,
}

both_dtypes = pytest.mark.parametrize("dtype", DTYPES)

# What each operation returns, in the order in which the functions above return it.
RESULTS = {
    "matmul": ("output", "da", "db"),
    "linear": ("output", "dx", "dweight", "dbias"),
    "layer_norm": ("output", "dx", "dweight", "dbias"),
    "embedding": ("output", "dtable"),
    "softmax": ("output", "dx"),
    "tril": ("output", "dx"),
    "gelu": ("output", "dx"),
    "cross_entropy": ("output", "dlogits"),
    "causal_attention": ("output", "dq", "dk", "dv"),
    "adamw_step": ("weight", "exp_avg", "exp_avg_sq"),
    "clip_grad_norm": ("clipped[0]", "norm"),
}


def results(name: str, returned: Any) -> list[Any]:
    """What a function above returned, one by one: the order of RESULTS."""
    if name == "adamw_step":
        return list(returned)
    first, second = returned
    if name == "clip_grad_norm":
        return [*first[:1], second]
    return [first, *(second if isinstance(second, tuple) else (second,))]


def with_results(name: str, returned: Any, changed: list[Any]) -> Any:
    if name == "adamw_step":
        return tuple(changed)
    if name == "clip_grad_norm":
        return [changed[0], *returned[0][1:]], changed[1]
    return changed[0], tuple(changed[1:])


def altered(name: str, i: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The right function with one result changed."""

    def function(*arguments: Any) -> Any:
        returned = NUMPY[name](*arguments)
        found = results(name, returned)
        found[i] = change(found[i])
        return with_results(name, returned, found)

    return function


def softmax_that(change: Callable[[Array, Array, Array, Array], Any]) -> Callable[..., Any]:
    """`change` gets both inputs and both right results of a softmax, and returns its own."""
    return lambda x, g: change(x, g, *softmax(x, g))
