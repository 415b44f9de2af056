"""Judge a hand-written operation: its forward and backward on random examples, in one call.

    from gpt_parity.oracle import ops
    print(ops.softmax.check(my_softmax, dtype="float32"))

A function under test gets NumPy arrays of its own, and returns `(output, gradients)`: one gradient
for each operand, as NumPy, PyTorch or JAX arrays of the dtype asked for; None is not judged.

    matmul(a, b, cotangent)              a (..., m, k), b (..., k, n), the same leading axes
    linear(x, weight, bias, cotangent)   x (..., in), weight (out, in), bias (out,): x W^T + b
    layer_norm(x, weight, bias, cotangent)   x (..., E), weight and bias (E,), eps 1e-5 in the root
    embedding(table, ids, cotangent)     table (V, E), integer ids (...); gradient of the table
    softmax(x, cotangent)                x (..., V), over the last axis; may hold -inf
    tril(x, value, cotangent)            x (..., m, n), the number `value` where j > i
    gelu(x, cotangent)                   x (...), tanh form
    cross_entropy(logits, targets, cotangent)   logits (..., V), targets (...): the mean, ()
    causal_attention(q, k, v, cotangent) q, k (..., T, d), v (..., T, e): softmax(qk^T/sqrt(d)) v

Two more return no gradients: `adamw_step(weight, grad, exp_avg, exp_avg_sq, step, lr, betas, eps,
weight_decay)` gives the new weight and moments of one array after step 1, 2, ..., decayed whatever
its shape; `clip_grad_norm(grads, max_norm)` gives the list of clipped gradients and the norm.

The reference is the NumPy twin in float64 on the same numbers; the bounds are those of
`rounding.py`, and Monte Carlo tolerances for attention. All numbers are such that float32 holds
them. Trying examples needs Hypothesis.
"""

from __future__ import annotations

import operator

from gpt_parity.oracle.op_checks import AdamWStep, Attention, Checked, ClipGradNorm, Op
from numpy_impl import functional

matmul = Op("matmul", operator.matmul, ("a", "b"))
linear = Op("linear", functional.linear, ("x", "weight", "bias"))
layer_norm = Op("layer_norm", functional.layer_norm, ("x", "weight", "bias"))
embedding = Op("embedding", functional.embedding, ("table",), ("ids",))
softmax = Op("softmax", functional.softmax, ("x",))
tril = Op("tril", functional.tril, ("x",), ("value",))
gelu = Op("gelu", functional.gelu, ("x",))
cross_entropy = Op("cross_entropy", functional.cross_entropy, ("logits",), ("targets",))
causal_attention = Attention(
    "causal_attention", lambda q, k, v: functional.causal_attention(q, k, v)[0], ("q", "k", "v")
)
adamw_step = AdamWStep()
clip_grad_norm = ClipGradNorm()

OPS: dict[str, Checked] = {
    op.name: op
    for op in (
        matmul, linear, layer_norm, embedding, softmax, tril, gelu, cross_entropy,
        causal_attention, adamw_step, clip_grad_norm,
    )
}  # fmt: skip
