"""The operations of a GPT, as PyTorch has them, under the names and checks of the NumPy twin."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_NORM_EPS = 1e-5  # as GPT-2 has it


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh form (Hendrycks & Gimpel 2016, eq. 2).

    y = x/2 (1 + tanh(u)),  u = sqrt(2/pi) (x + 0.044715 x^3);  any shape, dtype kept.
    The gradient is NaN from |x| about 1.9e19 in float32, where x^2 overflows.
    """
    return F.gelu(x, approximate="tanh")


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis."""
    return torch.softmax(x, dim=-1)


def tril(x: Tensor, value: float) -> Tensor:
    """Keep x where j <= i on the last two axes (top-left aligned), else `value`.

    A finite `value` outside the dtype's range becomes its nearest end (float16: -65504). Raises
    ValueError for fewer than two axes.
    """
    if x.ndim < 2:
        raise ValueError(f"tril: got shape {tuple(x.shape)}, needed at least two axes")
    return _select(x, _triangle(*x.shape[-2:]), value)


def _triangle(rows: int, columns: int) -> Tensor:
    # A compiled graph has constants of its own, and does not look into a cache.
    triangle = _new_triangle if torch.compiler.is_compiling() else _kept_triangle
    return triangle(rows, columns)


def _new_triangle(rows: int, columns: int) -> Tensor:
    return torch.tril(torch.ones(rows, columns, dtype=torch.bool, device="cpu"))


_kept_triangle = functools.lru_cache(maxsize=8)(_new_triangle)


def _select(x: Tensor, keep: Tensor, value: float) -> Tensor:
    """x where `keep`, else `value`."""
    if math.isfinite(value):
        value = max(value, torch.finfo(x.dtype).min)
        value = min(value, torch.finfo(x.dtype).max)
    return x.masked_fill(~keep.to(x.device), value)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b:  (..., in), (out, in), (out,) -> (..., out); without a bias b = 0."""
    if x.ndim < 1 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear: got input {tuple(x.shape)}, needed (..., {weight.shape[-1]})")
    return F.linear(x, weight, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise each row of the last axis, then scale and shift (Ba, Kiros & Hinton 2016).

    y = w z + b,  z = (x - m) / s,  m = mean(x),  s = sqrt(mean((x - m)^2) + 1e-5):
    (..., E), (E,), (E,) -> (..., E).  From |x - m| about 1.8e19 in float32, where squares
    overflow, z is 0, and further on NaN. Raises ValueError for other shapes.
    """
    if x.ndim < 1 or weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        raise ValueError(
            f"layer_norm: got input {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
            f"{tuple(bias.shape)}, needed (..., E), (E,), (E,)"
        )
    return F.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPS)


def embedding(table: Tensor, ids: Any) -> Tensor:
    """Rows of `table` (V, E) by integer `ids` (...) -> (..., E).

    Raises TypeError for ids that are not integers, ValueError for ids outside 0..V-1.
    """
    return F.embedding(_row_ids(ids, table.device, table.shape[0]), table)


def _row_ids(ids: Any, device: torch.device, size: int) -> Tensor:
    if torch.compiler.is_compiling():  # a graph cannot depend on values: whoever runs it checks
        return torch.as_tensor(ids, dtype=torch.int64, device=device)
    return check_ids("ids", ids, size).to(device)


def cross_entropy(logits: Tensor, targets: Any) -> Tensor:
    """Mean over all n rows of  log(sum_j exp(x_j)) - x_target:  (..., V), (...) -> ().

    Raises TypeError for targets that are not integers, ValueError for targets outside 0..V-1 (-1
    and -100 included), for a shape that does not match, and for no rows.
    """
    vocab_size = logits.shape[-1]
    targets = check_ids("targets", targets, vocab_size).to(logits.device)
    if targets.shape != logits.shape[:-1] or targets.numel() == 0:
        raise ValueError(
            f"cross_entropy: got targets {tuple(targets.shape)} for logits {tuple(logits.shape)}, "
            "needed one target per row and at least one row"
        )
    # Flattened, or PyTorch takes axis 1 for the classes.
    return F.cross_entropy(logits.reshape(-1, vocab_size), targets.reshape(-1))


def self_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1); returns output and weights.

    softmax(q k^T / sqrt(d_k)) v:  q (..., T, d_k), k (..., S, d_k), v (..., S, d_v) ->
    (..., T, d_v) and (..., T, S). `mask` is boolean (or 0 and 1), broadcasts to (..., T, S), and
    is true where position i may attend to position j; elsewhere the score is -inf. Raises
    ValueError for shapes that do not fit and for a row that may attend to nothing.
    """
    _check_attention_shapes(q, k, v)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])  # (..., T, S)
    if mask is not None:
        scores = _select(scores, _check_mask(mask, scores.shape), -math.inf)
    weights = softmax(scores)
    return weights @ v, weights


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Self-attention in which position i attends to positions j <= i only; see `self_attention`."""
    return self_attention(q, k, v, np.tri(q.shape[-2], k.shape[-2], dtype=bool))


def _on_host(x: Any) -> np.ndarray:
    """An array, or a tensor of whatever device, as an array."""
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)


def check_ids(name: str, ids: Any, size: int) -> Tensor:
    """`ids` as a private int64 tensor, after checking on the array that all lie in 0..size-1."""
    ids = _on_host(ids)
    if ids.dtype.kind not in ("i", "u"):
        raise TypeError(f"{name}: got dtype {ids.dtype}, needed integers")
    bad = ids[(ids < 0) | (ids >= size)]
    if bad.size:
        raise ValueError(f"{name}: got {bad[0]}, needed 0 to {size - 1}")
    return torch.from_numpy(ids.astype(np.int64))


def _check_attention_shapes(q: Any, k: Any, v: Any) -> None:
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"attention: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            "needed (..., T, d_k), (..., S, d_k), (..., S, d_v)"
        )


def _check_mask(mask: Any, shape: tuple[int, ...]) -> Tensor:
    mask = _on_host(mask)
    integers = mask.dtype.kind in ("i", "u")
    if mask.dtype != bool and not (integers and np.isin(mask, (0, 1)).all()):
        raise TypeError(f"mask: got dtype {mask.dtype}, needed booleans (true: may attend)")
    try:
        keep = np.broadcast_to(mask.astype(bool), shape)
    except ValueError:
        raise ValueError(f"mask: got {mask.shape}, needed to broadcast to {tuple(shape)}") from None
    if not keep.any(axis=-1).all():
        raise ValueError("mask: a position may attend to nothing, needed at least one")
    return torch.from_numpy(keep.copy())
