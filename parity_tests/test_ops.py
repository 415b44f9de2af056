"""The oracle of single operations: right ones pass, wrong ones are named with a small example.

The right implementations are written out here, once in plain NumPy and once through PyTorch's
autograd; the wrong ones differ from them in one place.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torch_impl
from gpt_parity.backends import build_model
from gpt_parity.config import GPTConfig
from gpt_parity.oracle import ops
from gpt_parity.oracle.compare_one import cmp
from gpt_parity.oracle.judge import Expected, judge
from gpt_parity.oracle.model_ops import IN_MODELS, check_ops
from gpt_parity.oracle.ops_examples import INPUTS
from gpt_parity.oracle.tolerance import Tolerance
from gpt_parity.oracle.trace import trace
from gpt_parity.weights import set_weights

FEW = 25
ROOT = Path(__file__).resolve().parent.parent
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

every_op = pytest.mark.parametrize("name", ops.OPS)
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


@pytest.mark.reference("by hand")
@every_op
@both_dtypes
def test_right_in_numpy(name: str, dtype: str) -> None:
    report = ops.OPS[name].check(NUMPY[name], dtype, FEW)
    assert report.ok and report.complete, report


@pytest.mark.reference("other backend")
@every_op
@both_dtypes
def test_right_in_torch(name: str, dtype: str) -> None:
    report = ops.OPS[name].check(TORCH[name], dtype, FEW)
    assert report.ok and report.complete, report


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


def test_every_operation_is_tried_here() -> None:
    assert set(ops.OPS) == set(INPUTS) == set(NUMPY) == set(TORCH) == set(RESULTS)
    assert all(getattr(ops, name) is op for name, op in ops.OPS.items())
    assert {name for name, *_ in WRONG} == set(ops.OPS)
    assert all(sum(name == wrong for wrong, *_ in WRONG) >= 2 for name in ops.OPS)


@pytest.mark.parametrize(
    ("name", "i"), [(name, i) for name, names in RESULTS.items() for i in range(len(names))]
)
def test_every_result_is_judged_by_itself(name: str, i: int) -> None:
    report = ops.OPS[name].check(altered(name, i, lambda x: x * (1.0 + 1e-12)), examples=FEW)
    assert [j.name for j in report.judgements if not j.ok] == [f"{name} {RESULTS[name][i]}"]


def no_row_sum(x: Array, g: Array) -> Any:
    return np.exp(x - x.max(axis=-1, keepdims=True)), softmax(x, g)[1]


@np.errstate(all="ignore")
def no_shift(x: Array, g: Array) -> Any:
    e = np.exp(x)
    return e / e.sum(axis=-1, keepdims=True), None


def first_row_only(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    y, (dx, _, dbias) = linear(x, weight, bias, g)
    return y, (dx, np.outer(g.reshape(-1, len(bias))[0], x.reshape(-1, x.shape[-1])[0]), dbias)


def eps_outside(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    c = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((c * c).mean(axis=-1, keepdims=True)) + x.dtype.type(1e-5)
    return c / s * weight + bias, None


def statistics_fixed(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    y, (_, dweight, dbias) = layer_norm(x, weight, bias, g)
    s = np.sqrt(x.var(axis=-1, keepdims=True) + x.dtype.type(1e-5))
    return y, (g * weight / s, dweight, dbias)


def unbiased(x: Array, weight: Array, bias: Array, g: Array) -> Any:
    n = x.shape[-1]
    c = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((c * c).sum(axis=-1, keepdims=True) / max(n - 1, 1) + x.dtype.type(1e-5))
    return c / s * weight + bias, None


def no_repeats(table: Array, ids: Array, g: Array) -> Any:
    dtable = np.zeros_like(table)
    dtable[ids] += g
    return table[ids], dtable


def erf_gelu(x: Array, g: Array) -> Any:
    erf = np.array([math.erf(v / math.sqrt(2)) for v in x.flat]).reshape(x.shape)
    return 0.5 * x * (1 + erf), gelu(x, g)[1]


def no_three(x: Array, g: Array) -> Any:
    t = np.tanh(C * (x + 0.044715 * x**3))
    du = C * (1 + 0.044715 * x * x)
    return gelu(x, g)[0], g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du)


def no_one_hot(logits: Array, targets: Array, g: Array) -> Any:
    rows = logits.size // logits.shape[-1]
    return cross_entropy(logits, targets, g)[0], g * softmax(logits, logits)[0] / rows


def no_mask(q: Array, k: Array, v: Array, g: Array) -> Any:
    p = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), 0 * q @ k.swapaxes(-1, -2))[0]
    return p @ v, causal_attention(q, k, v, g)[1]


def untransposed_key(q: Array, k: Array, v: Array, g: Array) -> Any:
    output, (dq, _, dv) = causal_attention(q, k, v, g)
    p = causal_attention(q, k, np.broadcast_to(np.eye(q.shape[-2]), (*q.shape[:-1], q.shape[-2])),
                         np.zeros((*q.shape[:-1], q.shape[-2])))[0]  # fmt: skip
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return output, (dq, ds @ q, dv)


def uncorrected(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    _, m, v = adamw_step(w, g, m, v, t, lr, betas, eps, decay)
    return w - lr * decay * w - lr * m / (np.sqrt(v) + eps), m, v


def eps_inside(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    _, m, v = adamw_step(w, g, m, v, t, lr, betas, eps, decay)
    denominator = np.sqrt(v / (1 - betas[1] ** t) + eps)
    return w - lr * decay * w - lr * m / (1 - betas[0] ** t) / denominator, m, v


def coupled(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    return adamw_step(w, g + decay * w, m, v, t, lr, betas, eps, 0.0)


def stale(
    w: Array, g: Array, m: Array, v: Array, t: int, lr: float, betas: Any, eps: float, decay: float
) -> Any:
    """The first moment replaced, not averaged: the same at the first step."""
    return adamw_step(w, g, 0.0 * m, v, t, lr, betas, eps, decay)


def each_by_its_own(grads: list[Array], max_norm: float) -> Any:
    norm = clip_grad_norm(grads, max_norm)[1]
    return [clip_grad_norm([g], max_norm)[0][0] for g in grads], norm


def no_min(grads: list[Array], max_norm: float) -> Any:
    norm = clip_grad_norm(grads, max_norm)[1]
    return [g * (max_norm / (norm + 1e-6)) for g in grads], norm


# Operation, wrong function, the result that is named, and how the smallest example begins.
WRONG = (
    ("matmul", lambda a, b, g: (a @ b, (g @ b[..., ::-1, :].swapaxes(-1, -2), None)), "da",
     "a (1, 2) normal, b (2, 1) normal;"),
    ("matmul", lambda a, b, g: (a @ np.abs(b), None), "output", "a (1, 1) normal, b (1, 1) "),
    ("linear", lambda x, w, b, g: (x @ w.T, None), "output", "x (1, 1) normal, weight (1, 1) "),
    ("linear", first_row_only, "dweight", "x (2, 1) normal, weight (1, 1) normal, bias (1,) "),
    ("layer_norm", eps_outside, "output", "x (2,) normal, weight (2,) normal, bias (2,) normal;"),
    ("layer_norm", unbiased, "output", "x (2,) normal, weight (2,) normal, bias (2,) normal;"),
    ("layer_norm", statistics_fixed, "dx", "x (1,) normal, weight (1,) normal, bias (1,) normal;"),
    ("embedding", no_repeats, "dtable", "table (1, 1) normal, ids (2,) random below 1;"),
    ("embedding", lambda table, ids, g: (table[ids - 1], None), "output", "table (2, 1) normal, "),
    ("softmax", no_row_sum, "output", "x (2,) normal;"),
    ("softmax", no_shift, "output", "x (1,) normal * 2^"),
    ("tril", lambda x, value, g: (tril(x, value, g)[0], g), "dx", "x (1, 2) normal, value 0.0;"),
    ("tril", lambda x, value, g: (np.where(np.tri(*x.shape[-2:], -1), x, value), None), "output",
     "x (1, 1) normal, value 0.0;"),
    ("gelu", erf_gelu, "output", "x (1,) normal;"),
    ("gelu", no_three, "dx", "x (1,) normal;"),
    ("cross_entropy", altered("cross_entropy", 1, lambda d: d * (d.size // d.shape[-1])),
     "dlogits", "logits (2, 2) normal, targets (2,) "),
    ("cross_entropy", no_one_hot, "dlogits", "logits (1, 1) normal, targets (1,) "),
    ("causal_attention", no_mask, "output", "q (2, 1) normal, k (2, 1) normal, v (2, 1) normal;"),
    ("causal_attention", untransposed_key, "dk", "q (2, 1) normal, k (2, 1) normal, v (2, 1) "),
    ("adamw_step", uncorrected, "weight", "weight (1,) normal, grad (1,) normal, exp_avg (1,) z"),
    ("adamw_step", eps_inside, "weight", "weight (1,) normal, grad (1,) normal, exp_avg (1,) z"),
    ("adamw_step", coupled, "exp_avg", "weight (1,) normal, grad (1,) normal, exp_avg (1,) z"),
    ("adamw_step", stale, "exp_avg", "weight (1,) normal, grad (1,) normal, exp_avg (1,) normal, "
     "exp_avg_sq (1,) squares, step 2, "),
    ("clip_grad_norm", each_by_its_own, "clipped[0]", "grads[0] (1,) normal, grads[1] (1,) "),
    ("clip_grad_norm", no_min, "clipped[0]", "grads[0] (1,) normal, max_norm 1.0;"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "function", "result", "example"), WRONG)
def test_wrong_is_named_with_a_small_example(
    name: str, function: Callable[..., Any], result: str, example: str
) -> None:
    report = ops.OPS[name].check(function, examples=100)
    assert not report.ok and report.first is not None
    assert report.first.name == f"{name} {result}"
    (note,) = report.notes
    assert note.startswith(f"smallest example found: {example}"), note
    assert f"first: {name} {result}" in str(report) and note in str(report)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda g: 0.0 * g + 1.0, "the cotangent is ignored, as if it were 1"),
        (lambda g: -g, "the gradient has the wrong sign"),
        (lambda g: g + g, "the gradient is twice too large"),
        (lambda g: g / 2.0, "the gradient is half as large as it should be"),
        (lambda g: g - g, "the gradient is zero: never computed, or never written"),
        (lambda g: 1.1 * g, None),
    ],
)
@pytest.mark.parametrize("name", ("matmul", "cross_entropy", "causal_attention"))
def test_a_wrong_cotangent_is_told(
    name: str, change: Callable[[Array], Array], hint: str | None
) -> None:
    def function(*inputs: Any) -> Any:
        *rest, g = inputs
        return NUMPY[name](*rest, np.asarray(change(g)))

    report = ops.OPS[name].check(function, examples=25)
    assert not report.ok
    assert report.hints == ((hint,) if hint else ())


def softmax_that(change: Callable[[Array, Array, Array, Array], Any]) -> Callable[..., Any]:
    """`change` gets both inputs and both right results of a softmax, and returns its own."""
    return lambda x, g: change(x, g, *softmax(x, g))


def writes(x: Array, g: Array) -> Any:
    result = softmax(x, g)
    x -= x.max(axis=-1, keepdims=True)
    return result


def writes_cotangent(x: Array, g: Array) -> Any:
    result = softmax(x, g)
    g *= 2
    return result


# Function, dtype, the judgement that fails first, its reason.
MISFITS = {
    "input": (writes, "float64", "softmax", r"writes into input 0 \(x\)"),
    "cotangent": (writes_cotangent, "float64", "softmax", r"writes into input 1 \(cotangent\)"),
    "double": (
        softmax_that(lambda x, g, p, d: (p.astype(np.float64), d)), "float32", "softmax output",
        "dtype float64, needed float32",
    ),
    "single": (
        softmax_that(lambda x, g, p, d: (p, d.astype(np.float32))), "float64", "softmax dx",
        "dtype float32, needed float64",
    ),
    "axis": (
        softmax_that(lambda x, g, p, d: (p, d[None])), "float64", "softmax dx",
        r"shape \(1, 1\), needed \(1,\)",
    ),
    "sum": (
        softmax_that(lambda x, g, p, d: (p.sum(), d)), "float64", "softmax output",
        r"shape \(\), needed \(1,\)",
    ),
    "nan": (
        softmax_that(lambda x, g, p, d: (p, d * math.nan)), "float32", "softmax dx",
        r"nan at \(0,\), needed 0",
    ),
    "inf": (
        softmax_that(lambda x, g, p, d: (p - math.inf, d)), "float64", "softmax output",
        r"-inf at \(0,\), needed 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_results_that_are_no_results(case: str) -> None:
    function, dtype, name, reason = MISFITS[case]
    report = ops.softmax.check(function, dtype, FEW)
    first = report.first
    assert first is not None and first.name == name and re.fullmatch(reason, first.reason)
    assert f"first: {name}, {first.reason}" in str(report)
    assert report.notes == ("smallest example found: x (1,) normal; seed 0",)
    assert math.isinf(first.ratio) and sum(not j.ok for j in report.judgements) == 1


@pytest.mark.parametrize("name", ("adamw_step", "clip_grad_norm"))
def test_optimizers_that_write_into_their_inputs(name: str) -> None:
    def in_place(first: Any, *rest: Any) -> Any:
        returned = NUMPY[name](first, *rest)
        (first[0] if name == "clip_grad_norm" else first)[...] = 7.0
        return returned

    report = ops.OPS[name].check(in_place, examples=FEW)
    assert report.first is not None and report.first.name == name
    assert report.first.reason.startswith("writes into input 0 (")


@pytest.mark.parametrize("name", [name for name in RESULTS if len(RESULTS[name]) > 1])
def test_none_is_not_judged(name: str) -> None:
    report = ops.OPS[name].check(altered(name, 1, lambda x: None), examples=FEW)
    assert report.ok and not report.complete
    unjudged = [j.name for j in report.judgements if not j.judged]
    assert unjudged == [f"{name} {RESULTS[name][1]}"]


def test_gradients_that_are_left_out_altogether() -> None:
    report = ops.linear.check(lambda x, w, b, g: (x @ w.T + b, None), examples=FEW)
    assert [j.judged for j in report.judgements] == [True, False, False, False] and report.ok
    report = ops.linear.check(
        lambda *inputs: (None, (linear(*inputs)[1][0] * 2, None, None)), examples=FEW
    )
    assert report.first is not None and report.first.name == "linear dx"


RAISES = {
    "nothing": (lambda x, g: (None, None), ValueError,
                "softmax: got None for every result, needed one to judge"),
    "array": (lambda x, g: x, TypeError, "softmax: got ndarray, needed (output, gradients)"),
    "three": (lambda x, g: (x, g, g), TypeError,
              "softmax: got tuple of 3, needed (output, gradients)"),
    "two gradients": (lambda x, g: (x, (g, g)), TypeError,
                      "softmax: got tuple of 2 of gradients, needed a tuple of 1 (dx)"),
    "own": (lambda x, g: {}["key"], KeyError, "'key'"),
}  # fmt: skip


@pytest.mark.parametrize("case", RAISES)
def test_what_is_raised_says_for_which_example(case: str) -> None:
    function, kind, message = RAISES[case]
    with pytest.raises(kind) as caught:
        ops.softmax.check(function, "float32")
    assert str(caught.value) == message
    assert caught.value.__notes__ == [
        "softmax in float32, smallest example found: x (1,) normal; seed 0"
    ]


def test_other_operations_say_what_they_need() -> None:
    with pytest.raises(TypeError, match=r"linear: got ndarray of gradients, needed a tuple of 3"):
        ops.linear.check(lambda x, w, b, g: (x, g))
    with pytest.raises(TypeError, match=r"got tuple of 2, needed \(weight, exp_avg, exp_avg_sq\)"):
        ops.adamw_step.check(lambda *arguments: arguments[:2])
    for returned in (1.0, ([], 1.0), (None, None)):
        with pytest.raises(TypeError, match=r"clip_grad_norm: got .*, needed \(list of 1 arrays"):
            ops.clip_grad_norm.check(lambda *arguments, returned=returned: returned)
    with pytest.raises(ValueError, match="dtype: got float16, needed one of float32, float64"):
        ops.softmax.check(softmax, "float16")


def test_a_function_that_does_not_repeat_itself() -> None:
    calls = []

    def fails_once(x: Array, g: Array) -> Any:
        calls.append(x)
        p, d = softmax(x, g)
        return p, d + 1.0 if len(calls) == 5 else d

    report = ops.softmax.check(fails_once)
    assert report.first is not None and report.first.name == "softmax dx"
    assert report.notes[1] == (
        "not repeatable: called again on the same example, the function did not fail"
    )


def test_examples_are_the_same_every_time_and_held_by_float32() -> None:
    def seen(dtype: str) -> list[list[Array]]:
        calls: list[list[Array]] = []

        def function(q: Array, k: Array, v: Array, g: Array) -> Any:
            assert {x.dtype.name for x in (q, k, v, g)} == {dtype}
            calls.append([x.astype(np.float64) for x in (q, k, v, g)])
            return causal_attention(q, k, v, g)

        assert ops.causal_attention.check(function, dtype, FEW).ok
        return calls

    first, again, single = seen("float64"), seen("float64"), seen("float32")
    assert len(first) >= FEW
    for a, b, c in zip(first, again, single, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(x, z)


def test_examples_reach_large_scales_and_every_structure() -> None:
    largest, masked, shapes = [], [], set()

    def function(x: Array, g: Array) -> Any:
        largest.append(np.abs(x[np.isfinite(x)]).max(initial=0.0))
        masked.append(np.isinf(x).any())
        shapes.add(x.ndim)
        return softmax(x, g)

    ops.softmax.check(function)
    assert max(largest) > 1e4 and min(largest) < 1e-2
    assert sum(masked) > 5 and shapes == {1, 2, 3}


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gpt_parity.oracle.ops_examples", "gpt_parity.oracle.examples"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    needed = "oracle.ops needs Hypothesis; install it with: python -m pip install hypothesis"
    with pytest.raises(ImportError, match=f"^{re.escape(needed)}$"):
        ops.softmax.check(softmax)


def test_importing_the_oracle_imports_neither_hypothesis_nor_torch() -> None:
    code = """
import sys
from gpt_parity.oracle import compare_one, model_ops, ops
assert not {"torch", "hypothesis"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- every use in one pass of a model


@pytest.fixture(scope="module")
def bundle() -> SimpleNamespace:
    config, rng = GPTConfig(11, 5, 7, 2), np.random.default_rng(0)
    weights = build_model("numpy", config, dtype="float64").state_dict()
    return SimpleNamespace(
        config=config,
        weights={name: 3.0 * weight for name, weight in weights.items()},
        tokens=rng.integers(0, 11, (3, 5)),
        targets=rng.integers(0, 11, (3, 5)),
    )


def block(i: int) -> list[str]:
    attention, feed_forward = f"transformers.{i}.attention", f"transformers.{i}.feed_forward"
    return [
        f"{attention} scores", f"{attention}.mask", f"{attention}.softmax", f"{attention} context",
        f"{attention}.output", f"{feed_forward}.input", f"{feed_forward}.gelu",
        f"{feed_forward}.output",
    ]  # fmt: skip


USES = [
    "embedding.embedding", "embedding.positional_embedding", *block(0), *block(1),
    "output.output", "loss",
]  # fmt: skip


@both_dtypes
@pytest.mark.parametrize("functions", (NUMPY, TORCH), ids=("numpy", "torch"))
def test_all_uses_in_a_model(
    bundle: SimpleNamespace, functions: dict[str, Any], dtype: str
) -> None:
    report = check_ops({name: functions[name] for name in IN_MODELS}, bundle, dtype)
    assert report.ok and report.complete and not report.notes, report
    assert [j.name for j in report.judgements if j.kind == "forward"] == [
        f"{use} output" for use in USES
    ]
    gradients = [j.name.rsplit(" ", 1) for j in report.judgements if j.kind == "gradient"]
    assert list(dict.fromkeys(use for use, _ in gradients)) == USES
    assert all(j.ratio < 1.0 for j in report.judgements)
    exact_zeros = {j.name.rsplit(" ", 1)[0] for j in report.judgements if j.exact_zero}
    assert not exact_zeros


@both_dtypes
def test_two_broken_operations_are_listed_wherever_they_are_used(
    bundle: SimpleNamespace, dtype: str
) -> None:
    functions = {name: NUMPY[name] for name in IN_MODELS}
    functions["softmax"] = softmax_that(lambda x, g, p, d: (p, p * g))
    functions["gelu"] = erf_gelu
    functions["matmul"] = altered("matmul", 2, lambda d: d * 1.001)
    report = check_ops(functions, bundle, dtype)
    expected = [f"transformers.{i}.feed_forward.gelu output" for i in range(2)]
    for i in range(2):
        attention = f"transformers.{i}.attention"
        expected += [f"{attention} scores db", f"{attention}.softmax dx", f"{attention} context db"]
    assert [j.name for j in report.judgements if not j.ok] == expected
    assert report.notes == tuple(f"out of tolerance: {name}" for name in expected)
    assert report.first is not None and report.first.name == expected[0]


def test_one_operation_of_a_model_alone(bundle: SimpleNamespace) -> None:
    report = check_ops({"tril": NUMPY["tril"]}, bundle, "float32")
    names = [f"transformers.{i}.attention.mask {result}" for result in ("output", "dx")
             for i in range(2)]  # fmt: skip
    assert [j.name for j in report.judgements] == names


def test_what_an_operation_of_a_model_raises(bundle: SimpleNamespace) -> None:
    with pytest.raises(KeyError) as caught:
        check_ops({"gelu": lambda x, g: {}["key"]}, bundle)
    assert caught.value.__notes__ == [
        "gelu in float64 as transformers.0.feed_forward.gelu, with the reference's operands"
    ]
    needed = f"needed some of {', '.join(IN_MODELS)}"
    with pytest.raises(ValueError, match=f"^check_ops: got 'causal_attention', {needed}$"):
        check_ops({"softmax": softmax, "causal_attention": softmax}, bundle)
    with pytest.raises(ValueError, match=f"^check_ops: got no function, {needed}$"):
        check_ops({}, bundle)
    with pytest.raises(ValueError, match=r"^check_ops: the model uses no layer_norm$"):
        check_ops({"layer_norm": layer_norm}, bundle)


# --- one line


class StubBundle:
    """What `cmp` needs of a bundle: one matrix, of which one element may be off by 1e-3."""

    array = np.array([[3.0, 4.0], [-1e9, 12.0]])

    def reference(self, key: str, dtype: str = "float64") -> tuple[Array, Tolerance]:
        assert key == "value/x"
        return self.array, Tolerance(1e-3 if dtype == "float64" else 1e-2, np.full(2, 1e-1))

    def kind(self, key: str) -> str:
        return "forward"

    def kept(self, key: str) -> Array:
        return np.array([[True, True], [False, True]])


LINES = {
    "same": (lambda x: x.copy(), "x: exact (tolerance of rounding the result alone, float64)"),
    "single": (lambda x: x.astype(np.float32),
               "x: exact (tolerance of rounding the result alone, float32)"),
    "torch": (lambda x: torch.tensor(x, requires_grad=True),
              "x: exact (tolerance of rounding the result alone, float64)"),
    # 12 u ||x|| = 12 * 2^-53 * 5 = 6.66e-15, of the row: 4 ulp of 4 are 3.55e-15.
    "near": (lambda x: x + np.array([[0.0, 2.0**-48], [0.0, 0.0]]),
             "x: not exact, agrees, 0.533 of tolerance, worst at (0, 1): off by 3.6e-15 "
             "(tolerance of rounding the result alone, float64)"),
    "far": (lambda x: x + np.array([[0.0, 0.0], [0.0, 0.5]]),
            "x: not exact, differs, 2.89e+13 of tolerance, worst at (1, 1): off by 0.5 "
            "(tolerance of rounding the result alone, float64)"),
    "shape": (lambda x: x[0].copy(),
              "x: not exact, shape (2,), needed (2, 2) "
              "(tolerance of rounding the result alone, float64)"),
    "nan": (lambda x: np.where(x == 4.0, math.nan, x),
            "x: not exact, differs, not finite, worst at (0, 1): off by inf "
            "(tolerance of rounding the result alone, float64)"),
}  # fmt: skip


@pytest.mark.reference("by hand")
@pytest.mark.parametrize("case", LINES)
def test_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, line = LINES[case]
    x = np.array([[3.0, 4.0], [5.0, 12.0]])
    (judgement,) = cmp("x", change(x), x).judgements
    assert capsys.readouterr().out == line + "\n"
    assert judgement.name == "x" and judgement.ok == ("differs" not in line and "shape" not in line)


@pytest.mark.reference("by hand")
def test_one_line_with_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = StubBundle()
    mine = bundle.array.copy()
    mine[0, 1] += 2.0**-9
    for x, dtype, line in (
        (mine, None, "not exact, differs, 1.95 of tolerance, worst at (0, 1): off by 0.002 "
         "(tolerance of the bundle, float64)"),
        (mine.astype(np.float32), None, "not exact, agrees, 0.195 of tolerance, worst at (0, 1): "
         "off by 0.002 (tolerance of the bundle, float32)"),
        (mine.astype(np.float32), "float64", "not exact, dtype float32, needed float64 "
         "(tolerance of the bundle, float64)"),
        (np.zeros((2, 2)), None, "not exact, differs, masked positions differ, worst at (1, 0): "
         "off by 1e+09 (tolerance of the bundle, float64)"),
    ):  # fmt: skip
        report = cmp("value/x", x, bundle, dtype)
        assert capsys.readouterr().out == f"value/x: {line}\n"
        assert report.ok == ("agrees" in line)


def test_one_line_needs_two_arrays_of_a_known_dtype() -> None:
    x = np.ones(3)
    with pytest.raises(ValueError, match="x: candidate and reference are one array, needed two"):
        cmp("x", x, x)
    with pytest.raises(ValueError, match="x: dtype: got int64, needed one of float32, float64"):
        cmp("x", np.arange(3), x)
    with pytest.raises(ValueError, match="needed one that is not"):
        cmp("x", np.zeros(3), np.zeros(3))


# --- judgements


@pytest.mark.reference("by hand")
def test_a_judgement_is_of_the_element_furthest_out_in_units_of_its_bound() -> None:
    expected = Expected(
        np.array([[1.0, 1000.0], [0.0, -math.inf]]), np.array([[0.125, 8.0], [0, 0]])
    )
    mine = np.array([[1.5, 1004.0], [0.0, -math.inf]])
    found = judge("x", "forward", mine, expected, "float64")
    assert (found.ratio, found.row, found.exact_zero, found.ok) == (4.0, (0, 0), False, False)
    np.testing.assert_allclose(
        found.error, math.sqrt(0.25 + 16.0) / math.sqrt(1.0 + 1e6), rtol=1e-14
    )
    mine[0] = 1.0625, 1000.0
    assert judge("x", "forward", mine, expected, "float64").ratio == 0.5
    mine[1, 0] = 1e-300
    assert judge("x", "forward", mine, expected, "float64").ratio == math.inf
    for wrong in (math.inf, 0.0, math.nan):
        mine[1] = 0.0, wrong
        found = judge("x", "forward", mine, expected, "float64")
        assert found.row == (1, 1) and found.reason == f"{wrong} at (1, 1), needed -inf"


@pytest.mark.reference("by hand")
def test_zeros_that_are_exact() -> None:
    for bound, allowed in ((0.0, True), (1e-3, False)):
        found = judge("x", "gradient", np.zeros(2), Expected(np.zeros(2), bound), "float64")
        assert found.ok and found.exact_zero is allowed


def test_a_summary_prefers_what_was_judged_and_then_the_largest_error() -> None:
    calls = []

    def once(x: Array, value: float, g: Array) -> Any:
        calls.append(x)
        output, dx = tril(x, value, g)
        return output, dx if len(calls) == 2 else None

    report = ops.tril.check(once, examples=FEW)
    assert len(calls) > 2 and report.ok and report.complete
    assert not any(j.exact_zero for j in report.judgements)

    def once_off(x: Array, g: Array) -> Any:
        calls.append(x)
        return x * 0.0 + gelu(x, g)[0] * (1.0 + (len(calls) == 5) * 2.0**-51), None

    calls.clear()
    alone = ops.gelu.check(lambda x, g: (gelu(x, g)[0], None), examples=FEW).worst.ratio
    assert ops.gelu.check(once_off, examples=FEW).worst.ratio > alone


@pytest.mark.reference("other backend")
def test_uses_in_a_model_are_fed_what_the_trace_holds(bundle: SimpleNamespace) -> None:
    """Operands and cotangents against values and total derivatives of PyTorch's own pass."""
    config = bundle.config
    model = build_model("torch", config, dtype="float64")
    set_weights(model, bundle.weights)
    found = trace(model, torch_impl.GPTLoss(), bundle.tokens, bundle.targets)
    seen: dict[str, list[tuple[Any, ...]]] = {name: [] for name in IN_MODELS}

    def noting(name: str) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            seen[name].append(arguments)
            return NUMPY[name](*arguments)

        return function

    assert check_ops({name: noting(name) for name in IN_MODELS}, bundle).ok

    def near(mine: Array, name: str, part: dict[str, Array]) -> None:
        np.testing.assert_allclose(mine, part[name], rtol=1e-9)

    for i in range(config.blocks):
        attention = f"transformers.{i}.attention"
        x, g = seen["softmax"][i]
        near(x, f"{attention}.mask.output", found.values)
        near(g, f"{attention}.softmax.output", found.gradients)
        x, value, g = seen["tril"][i]
        assert value == config.mask_value
        near(x, f"{attention}.mask.input", found.values)
        near(g, f"{attention}.mask.output", found.gradients)
        weights, x, g = seen["matmul"][2 * i + 1]
        near(weights, f"{attention}.softmax.output", found.values)
        near(g, f"{attention}.output.input", found.gradients)
        a, b, g = seen["matmul"][2 * i]
        np.testing.assert_array_equal(a, x)
        np.testing.assert_array_equal(b, x.swapaxes(-1, -2))
        scale = math.sqrt(config.embedding_size)
        np.testing.assert_allclose(g * scale, found.gradients[f"{attention}.mask.input"], rtol=1e-9)
    logits, targets, g = seen["cross_entropy"][0]
    near(logits, "output.output.output", found.values)
    np.testing.assert_array_equal(targets, bundle.targets)
    assert g == 1.0 and g.shape == ()
    assert all(x.flags.c_contiguous for calls in seen.values() for inputs in calls
               for x in inputs if isinstance(x, np.ndarray))  # fmt: skip


def test_one_line_is_exact_where_rounding_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.array([0.1, 0.2])
    cmp("x", x.astype(np.float32), x)
    assert capsys.readouterr().out.startswith("x: exact (")
