"""For every explanation that the oracle may print of a GPT-2: that mistake, planted into one.

The mistakes of `hint_rows` in what both models share, and those of what GPT-2 adds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.gpt2_structures import STRUCTURES
from parity_tests.candidates import Part
from parity_tests.planted import hint_rows as shared
from parity_tests.planted.hint_rows import BLOCK, LAST, TOKENS, HintRow, backward, forward, plant
from parity_tests.planted.table import NUMPY, TENSOR, TORCH

TORCH_GPT2 = "torch_impl.gpt2"
TORCH_HEADS = f"{TORCH_GPT2}:GPT2Attention"
TORCH_BLOCK = f"{TORCH_GPT2}:GPT2Transformer.forward"


# --- Which models show a mistake


def _heads(config: GPTConfig) -> int:
    return getattr(config, "heads", 1)


def _several_heads(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """More heads than one, of more numbers than one."""
    return 1 < _heads(config) < config.embedding_size


def _several_wide(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """Splitting by reshaping alone is wrong from the second position on."""
    return _several_heads(config, tokens, targets) and tokens.shape[1] > 2


def _several_blocks(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """What is in all blocks is not in one place alone."""
    return config.blocks > 1


def _other_root(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """More heads than one, and not as many as each has numbers."""
    return 1 < _heads(config) != config.embedding_size // _heads(config)


def _other_scale(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """Nor the root of that number."""
    width = config.embedding_size // _heads(config)
    return _other_root(config, tokens, targets) and _heads(config) != math.sqrt(width)


# --- Which tensor is named first

SCORES = forward(BLOCK + "attention.mask.input")
PROJECTED = backward(LAST + "attention.input.output", LAST + "attention.input.bias")
PROJECTED_WEIGHT = backward(LAST + "attention.input.output", LAST + "attention.input.weight")
NORM = forward(BLOCK + "attention_norm.output")
NORM_INPUT = backward(LAST + "output", LAST + "feed_forward.output.bias")
MIDDLE = forward(BLOCK + "feed_forward_norm.input")
LOGITS = backward("output", "norm.bias")
LOSS: dict[Part, str] = {"all": "loss", "parameters": "loss"}


def own_parameter(name: str) -> dict[Part, str]:
    """The gradient of a parameter, the last block's where it has {last} in its name."""
    return {part: "grad/" + name.replace(".", r"\.") for part in ("all", "parameters")}


def _gpt2(row: HintRow, first: Mapping[Part, str] | None = None, **changes: Any) -> HintRow:
    """A row of the other model for GPT-2; what comes after the values is another parameter."""
    found = dict(first or row.first)
    for part, pattern in found.items():
        found[part] = pattern.replace(r"grad/output\.output\.(bias|weight)", r"grad/norm\.bias")
    bug = replace(row.bug, name=f"gpt2-{row.bug.name.removeprefix('hint-')}")
    return replace(row, **{"bug": bug, "first": found, "gpt2": True, **changes})


def gpt2_row(
    name: str, hint: str, first: Mapping[Part, str], place: str, old: str, new: str, **models: Any
) -> HintRow:
    """A mistake of a GPT-2 alone."""
    return _gpt2(plant(name, hint, first, place, old, new, **models))


# --- What both models share

BY_NAME = {row.name: row for row in shared.GPT_ROWS}
LINEAR_FIRST = {
    "linear-bias-mean": own_parameter(LAST + "feed_forward.output.bias"),
    "hint-bias-batch-mean": own_parameter(LAST + "feed_forward.output.bias"),
    "hint-bias-first": own_parameter(LAST + "feed_forward.output.bias"),
    "linear-bias-first-row": own_parameter(LAST + "feed_forward.output.bias"),
    "hint-weight-first": own_parameter(LAST + "feed_forward.output.weight"),
    "linear-bias-missing": forward(BLOCK + "attention.input.output"),
    "hint-weight-read-as-in-out": forward(BLOCK + "attention.input.output"),
    "linear-input-gradient-reshaped": backward("norm.output", "norm.bias"),
}
LOSS_FIRST = {"hint-loss-sum-backward": LOGITS, "loss-minus-one": LOGITS}
MASKED = backward(LAST + "attention.mask.output", LAST + "attention.input.bias")
STEP_FIRST = {
    "hint-adamw-decay-on-biases": shared.step(
        r"weight/transformers\.0\.attention_norm\.(weight|bias)"
    )
}


def _softmax_first(row: HintRow) -> Mapping[Part, str]:
    return MASKED if row.first == shared.MASKED else row.first


def _low_precision() -> Iterator[HintRow]:
    """A value is the transposition of its heads here, so products go by their first factor."""
    for row in shared.LOW_PRECISION_ROWS:
        new = row.bug.new.replace('b.op == "transpose"', 'a.op != "softmax"')
        first = forward(BLOCK + "attention.input.output") if "linear" in row.name else row.first
        yield _gpt2(replace(row, bug=replace(row.bug, new=new)), first)


SHARED_ROWS = (
    *(_gpt2(row) for row in (*shared.EMBEDDING_ROWS, *shared.MASK_ROWS, *shared.GELU_ROWS)),
    *(_gpt2(row, _softmax_first(row)) for row in shared.SOFTMAX_ROWS
      if row.name != "softmax-dim-one"),
    *(_gpt2(BY_NAME[name], first) for name, first in LINEAR_FIRST.items()),
    *(_gpt2(row, LOSS_FIRST.get(row.name)) for row in shared.LOSS_ROWS),
    *_low_precision(),
    *(_gpt2(row, STEP_FIRST.get(row.name)) for row in shared.STEP_ROWS),
)  # fmt: skip


def _at(row: HintRow, place: str) -> HintRow:
    """The hint must say where, too."""
    hint = f"{row.hint}, {re.escape(place)}(?= \\(|$)"
    return replace(row, mistake=f"{row.mistake}, {place}", hint=hint)


def _of_all_blocks(
    name: str, hint: str, kind: str, first: Mapping[Part, str], old: str, new: str
) -> HintRow:
    """A mistake in one kind of place of all blocks, in PyTorch."""
    row = gpt2_row(name, hint, first, TORCH_BLOCK, old, new, suitable=_several_blocks)
    return _at(row, f"at {kind} of all blocks")


# fmt: off
ATTENTION_ROWS = (
    gpt2_row("scale-forgotten", "attention: scores are not divided by sqrt(D)", SCORES,
             f"{TORCH_HEADS}.forward", " / math.sqrt(q.shape[-1])", "", suitable=_several_heads),
    _gpt2(BY_NAME["attention-scale-backward"], PROJECTED, suitable=_several_heads,
          mistake="attention: the vjp of the scores lacks 1/sqrt(D)",
          hint=re.escape("attention: the vjp of the scores lacks 1/sqrt(D)")),
    gpt2_row("scale-squared", "attention: scores are divided by D in place of sqrt(D)", SCORES,
             f"{TORCH_HEADS}.forward", "math.sqrt(q.shape[-1])", "q.shape[-1]",
             suitable=_several_heads),
    gpt2_row("scale-by-length", "attention: scores are divided by sqrt(T) in place of sqrt(D)",
             SCORES, f"{TORCH_HEADS}.forward", "math.sqrt(q.shape[-1])", "math.sqrt(q.shape[-2])",
             suitable=lambda c, t, y: t.shape[1] != c.embedding_size // _heads(c)),
    gpt2_row("scale-inverted", "attention: scores are multiplied by sqrt(D)", SCORES,
             f"{TORCH_HEADS}.forward", "/ math.sqrt(q.shape[-1])", "* math.sqrt(q.shape[-1])",
             suitable=_several_heads),
    gpt2_row("scale-twice-backward",
             "attention: the vjp of the scores divides by D in place of sqrt(D)", PROJECTED,
             f"{TENSOR}.__truediv__", "da = grad / b.data", "da = grad / b.data / b.data",
             suitable=_several_heads),
    gpt2_row("scale-by-width", "attention: scores are divided by sqrt(E) in place of sqrt(D)",
             SCORES, f"{TORCH_HEADS}.forward", "math.sqrt(q.shape[-1])", "math.sqrt(x.shape[-1])",
             suitable=_several_heads),
    gpt2_row("scale-by-root-of-heads",
             "attention: scores are divided by sqrt(H) in place of sqrt(D)", SCORES,
             f"{TORCH_HEADS}.forward", "math.sqrt(q.shape[-1])", "math.sqrt(self.heads)",
             suitable=_other_root),
    gpt2_row("scale-by-heads", "attention: scores are divided by H in place of sqrt(D)", SCORES,
             f"{TORCH_HEADS}.forward", "math.sqrt(q.shape[-1])", "self.heads",
             suitable=_other_scale),
    gpt2_row("key-reshaped", "attention: the key is reshaped, not transposed", SCORES,
             f"{TORCH_HEADS}.forward", "k.transpose(-2, -1)",
             "k.reshape(*k.shape[:2], k.shape[3], k.shape[2])", suitable=_several_heads),
    gpt2_row("key-reshaped-backward",
             "attention: the gradient of the key is reshaped, not transposed", PROJECTED,
             f"{TORCH_HEADS}.forward", "k.transpose(-2, -1)",
             "(k.transpose(-2, -1).detach() + (s := k.reshape(*k.shape[:2], k.shape[3], "
             "k.shape[2])) - s.detach())", suitable=_several_heads),
    gpt2_row("scores-untransposed",
             "attention: the gradient of the key uses the scores' gradient untransposed",
             PROJECTED, f"{TENSOR}.__matmul__", "product(grad.swapaxes(-1, -2), a.data)",
             'product(grad if a.op != "softmax" else grad.swapaxes(-1, -2), a.data)'),
    gpt2_row("context-untransposed",
             "attention: the gradient of the value uses the weights untransposed", PROJECTED,
             f"{TENSOR}.__matmul__", "product(grad.swapaxes(-1, -2), a.data)",
             'product(grad.swapaxes(-1, -2), '
             'a.data.swapaxes(-1, -2) if a.op == "softmax" else a.data)'),
    gpt2_row("query-detached", "attention: the path of x as query is missing in its gradient",
             PROJECTED, f"{TORCH_HEADS}.forward", "q @ k", "q.detach() @ k"),
    # A key's bias has no gradient, since softmax does not mind a shift.
    gpt2_row("key-detached", "attention: the path of x as key is missing in its gradient",
             PROJECTED_WEIGHT, f"{TORCH_HEADS}.forward", "q @ k", "q @ k.detach()"),
    gpt2_row("value-detached", "attention: the path of x as value is missing in its gradient",
             PROJECTED, f"{TORCH_HEADS}.forward", "weights @ v", "weights @ v.detach()"),
    # The gradients of the parts of one projection, each in place of those before.
    gpt2_row("query-alone",
             "attention: the gradient of x is that as query alone (overwritten, not accumulated)",
             PROJECTED, f"{TENSOR}.unbind", "[i] = grad", "[i] = grad * (i == 0)"),
    gpt2_row("key-alone",
             "attention: the gradient of x is that as key alone (overwritten, not accumulated)",
             PROJECTED, f"{TENSOR}.unbind", "[i] = grad", "[i] = grad * (i == 1)"),
    gpt2_row("value-alone",
             "attention: the gradient of x is that as value alone (overwritten, not accumulated)",
             PROJECTED, f"{TENSOR}.unbind", "[i] = grad", "[i] = grad * (i == 2)"),
    gpt2_row("mask-first-head", "mask: applied to the first head only",
             forward(BLOCK + "attention.mask.output"), f"{TORCH}:tril",
             "_select(x, _triangle(*x.shape[-2:]), value)",
             "torch.cat([_select(x[:, :1], _triangle(*x.shape[-2:]), value), x[:, 1:]], dim=1)",
             suitable=_several_heads),
    _gpt2(BY_NAME["softmax-dim-one"], suitable=_several_heads,
          mistake="softmax: taken over the heads", hint=re.escape("softmax: taken over the heads")),
    gpt2_row("softmax-queries", "softmax: taken over the wrong axis",
             forward(BLOCK + "attention.softmax.output"), "torch_impl.layers:Softmax.__init__",
             "dim=-1", "dim=-2"),
)
JOINED = "context.transpose(1, 2).reshape(batch, length, heads * width)"
OUTPUT = f"self.output({JOINED})"
PROJECTION_ROWS = (
    _at(gpt2_row("projection-left-out", "linear: there is none, x goes on as it is", MIDDLE,
                 f"{TORCH_HEADS}.merge", OUTPUT, JOINED, suitable=_several_blocks),
        "at attention.output of all blocks"),
    _at(gpt2_row("output-bias-left-out", "linear: the bias is not added", MIDDLE,
                 f"{TORCH_HEADS}.merge", OUTPUT, f"linear({JOINED}, self.output.weight)",
                 suitable=_several_blocks),
        "at attention.output of all blocks"),
)

VIEW = "reshape(batch, length, 3, self.heads, width // self.heads)"
HEADS_ROWS = (
    gpt2_row("split-inside-out", "heads: the projection is split as (D, H), not as (H, D)",
             SCORES, f"{TORCH_HEADS}.split", VIEW,
             "reshape(batch, length, 3, width // self.heads, self.heads).transpose(-1, -2)",
             suitable=_several_heads),
    gpt2_row("split-heads-first", "heads: the projection is split as (H, 3, D), not as (3, H, D)",
             SCORES, f"{TORCH_HEADS}.split", VIEW,
             "reshape(batch, length, self.heads, 3, width // self.heads).transpose(2, 3)",
             suitable=_several_heads),
    gpt2_row("split-reshaped",
             "heads: split by reshaping alone, positions and heads are not transposed", SCORES,
             f"{TORCH_HEADS}.split", "part.transpose(1, 2)",
             "part.reshape(batch, self.heads, length, -1)", suitable=_several_wide),
    gpt2_row("merge-reshaped", "heads: merged by reshaping alone, not transposed back first",
             forward(BLOCK + "attention.output.input"), f"{TORCH_HEADS}.merge",
             "context.transpose(1, 2).reshape(", "context.reshape(", suitable=_several_wide),
    gpt2_row("merge-reshaped-backward",
             "heads: the gradient of the merge is reshaped, not transposed",
             backward(LAST + "attention.softmax.output", LAST + "attention.input.bias"),
             f"{TORCH_HEADS}.merge", "context.transpose(1, 2)",
             "(context.transpose(1, 2).detach() + (s := context.reshape(batch, length, heads, "
             "width)) - s.detach())", suitable=_several_wide),
    *(gpt2_row(f"order-{'-'.join(order)}",
               f"heads: the projection is read as {', '.join(order)}, not query, key, value",
               SCORES, f"{TORCH_HEADS}.split", "for part in qkv.unbind(2)",
               f"for part in (qkv[:, :, i] for i in {tuple(map(order.index, PARTS))})")
      for PARTS in [("query", "key", "value")]
      for order in [("key", "query", "value"), ("query", "value", "key"), ("key", "value", "query"),
                    ("value", "query", "key"), ("value", "key", "query")]),
)

TORCH_NORM = "torch.nn.modules.normalization:LayerNorm.forward"
TORCH_CALL = "F.layer_norm(x, weight.shape, weight, bias, "


def _norm_row(name: str, hint: str, new: str, **models: Any) -> HintRow:
    """A layer norm in PyTorch with another function of x, weight and bias."""
    old = "return F.layer_norm("
    named = "x, weight, bias, eps = input, self.weight, self.bias, self.eps"
    return gpt2_row(f"norm-{name}", f"layer norm: {hint}", NORM, TORCH_NORM, old,
                    f"{named}\n    return {new}\n    {old}", **models)


def _norm_slope(name: str, hint: str, old: str, new: str, **models: Any) -> HintRow:
    """The input's gradient of a layer norm in NumPy."""
    return gpt2_row(f"norm-{name}", f"layer norm: {hint}", NORM_INPUT, f"{NUMPY}:layer_norm",
                    old, new, **models)


SHIFT, SLOPE = (
    "dx -= dx.mean(axis=-1, keepdims=True)\n", "dx -= z * gz.mean(axis=-1, keepdims=True)\n",
)
NORM_ROWS = (
    _norm_row("eps-outside", "eps is added outside the root",
              "(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + "
              "eps) * weight + bias"),
    _norm_row("eps-missing", "eps is missing", TORCH_CALL + "0.0)"),
    _norm_row("eps-smaller", "eps is 1e-6, not 1e-5", TORCH_CALL + "1e-6)"),
    _norm_row("eps-smallest", "eps is 1e-12, not 1e-5", TORCH_CALL + "1e-12)"),
    _norm_row("unbiased", "the variance is divided by E - 1, not by E (unbiased)",
              "(x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + "
              "eps) * weight + bias"),
    _norm_row("not-centred", "the mean is not subtracted (RMSNorm)",
              "x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight + bias"),
    _norm_row("positions", "normalised over the positions, not over E",
              "(x - x.mean(-2, keepdim=True)) / torch.sqrt(x.var(-2, keepdim=True, correction=0) + "
              "eps) * weight + bias"),
    _norm_row("batch", "normalised over the batch, not over E",
              "(x - x.mean(0, keepdim=True)) / torch.sqrt(x.var(0, keepdim=True, correction=0) + "
              "eps) * weight + bias"),
    _norm_row("both", "normalised over positions and E together",
              "F.layer_norm(x, x.shape[-2:]) * weight + bias"),
    _norm_row("weight-left-out", "the weight is not applied",
              "F.layer_norm(x, weight.shape, 1.0 + 0.0 * weight, bias, eps)"),
    _norm_row("bias-left-out", "the bias is not added",
              "F.layer_norm(x, weight.shape, weight, 0.0 * bias, eps)"),
    _norm_row("left-out", "there is none, x goes on as it is", "x + 0.0 * weight + 0.0 * bias"),
    _norm_slope("without-shift", "dx lacks the mean of g w", SHIFT, "\n"),
    _norm_slope("without-slope", "dx lacks the term with the mean of g w z", SLOPE, "\n"),
    _norm_slope("without-both", "dx lacks both means, as if mean and variance were fixed",
                f"{SHIFT}        {SLOPE}", "\n"),
    _norm_slope("without-weight", "dx lacks the weight", "gz *= w\n        dx = grad * w\n",
                "dx = grad.copy()\n"),
    gpt2_row("norm-weight-by-input",
             "layer norm: the weight's gradient takes x, not the normalised x",
             own_parameter("norm.weight"), f"{NUMPY}:layer_norm", "dw = rows.sum(axis=0)",
             "dw = (grad * x.data).reshape(-1, shape[-1]).sum(axis=0)"),
)
NO_NORM = "layer norm: there is none, x goes on as it is"
NO_NORM_ROWS = (
    _of_all_blocks("norm-left-out-before-attention", NO_NORM, "attention_norm",
                   forward(BLOCK + "attention.input.output"), "self.attention_norm(x)", "x"),
    _of_all_blocks("norm-left-out-before-feed-forward", NO_NORM, "feed_forward_norm",
                   forward(BLOCK + "feed_forward.input.output"), "self.feed_forward_norm(x)", "x"),
    _at(gpt2_row("norm-left-out-at-the-end", NO_NORM, forward("output"),
                 f"{TORCH_GPT2}:GPT2.logits", "self.norm(x)", "x"), "at norm"),
)
FIRST_ADD, SECOND_ADD = "x = x + self.attention(", "return x + self.feed_forward("
RESIDUAL_ROWS = (
    gpt2_row("skip-left-out", "residual: x is not added to the branch", MIDDLE, TORCH_BLOCK,
             FIRST_ADD, "x = 0.0 * x + self.attention("),
    gpt2_row("second-skip-left-out", "residual: x is not added to the branch",
             forward(BLOCK + "output"), TORCH_BLOCK, SECOND_ADD,
             "return 0.0 * x + self.feed_forward("),
    gpt2_row("branch-left-out", "residual: the branch is not added to x",
             forward(BLOCK + "output"), TORCH_BLOCK, SECOND_ADD,
             "return x + 0.0 * self.feed_forward("),
    gpt2_row("skip-detached", "residual: the gradient is that through the branch alone",
             backward(LAST + "feed_forward_norm.input", LAST + "attention.output.bias"),
             TORCH_BLOCK, SECOND_ADD, "return x.detach() + self.feed_forward("),
    gpt2_row("first-skip-detached", "residual: the gradient is that through the branch alone",
             shared.INPUT, TORCH_BLOCK, FIRST_ADD, "x = x.detach() + self.attention("),
    gpt2_row("branch-detached", "residual: the gradient is that past the branch alone",
             backward(LAST + "feed_forward.output.output", LAST + "feed_forward.output.bias"),
             f"{TENSOR}.__add__", "(grad, grad)", '(grad, grad * (b.op != "linear"))'),
)
POST_NORM, NORMED_SUM = STRUCTURES
FIRST_HALF = "x = x + self.attention(self.attention_norm(x))"
SECOND_HALF = "return x + self.feed_forward(self.feed_forward_norm(x))"
HALVES = f"{FIRST_HALF}\n    {SECOND_HALF}"
FIRST_AFTER = "x = self.attention_norm(x + self.attention(x))"
SECOND_AFTER = "return self.feed_forward_norm(x + self.feed_forward(x))"
FIRST_NORMED = "x = self.attention_norm(x)\n    x = x + self.attention(x)"
SECOND_NORMED = "x = self.feed_forward_norm(x)\n    return x + self.feed_forward(x)"
END = forward(BLOCK + "output")
STRUCTURE_ROWS = tuple(
    _at(gpt2_row(name, hint, first, TORCH_BLOCK, old, new), place)
    for name, hint, first, old, new, place in (
        ("post-norm", POST_NORM, NORM, HALVES, f"{FIRST_AFTER}\n    {SECOND_AFTER}",
         "in all blocks"),
        ("post-norm-attention", POST_NORM, NORM, FIRST_HALF, FIRST_AFTER,
         "at attention of all blocks"),
        # What the norm gets is another sum then.
        ("post-norm-feed-forward", POST_NORM, MIDDLE, SECOND_HALF, SECOND_AFTER,
         "at feed_forward of all blocks"),
        ("sum-with-norm", NORMED_SUM, MIDDLE, HALVES, f"{FIRST_NORMED}\n    {SECOND_NORMED}",
         "in all blocks"),
        ("sum-with-norm-attention", NORMED_SUM, MIDDLE, FIRST_HALF, FIRST_NORMED,
         "at attention of all blocks"),
        ("sum-with-norm-feed-forward", NORMED_SUM, END, SECOND_HALF, SECOND_NORMED,
         "at feed_forward of all blocks"),
    )
)
# What is missing at one of the two sums of every block, there where each is first seen.
SUMS = (
    ("first", FIRST_HALF, MIDDLE, shared.INPUT,
     backward(LAST + "attention.output.output", LAST + "attention.output.bias")),
    ("second", SECOND_HALF, END,
     backward(LAST + "feed_forward_norm.input", LAST + "attention.output.bias"),
     backward(LAST + "feed_forward.output.output", LAST + "feed_forward.output.bias")),
)
ALL_BLOCKS_ROWS = tuple(
    _of_all_blocks(f"{which}-{name}-of-all-blocks", f"residual: {hint}", f"the {which} sum", first,
                   half, half.replace(" x + ", f" {x} + ") + end)
    for which, half, value, past, branch in SUMS
    for name, hint, first, x, end in (
        ("skip-left-out", "x is not added to the branch", value, "0.0 * x", ""),
        ("branch-left-out", "the branch is not added to x", value, "x", " * 0.0"),
        ("skip-detached", "the gradient is that through the branch alone", past, "x.detach()", ""),
        ("branch-detached", "the gradient is that past the branch alone", branch, "x",
         ".detach()"),
    )
)
TIED_ROWS = (
    gpt2_row("output-detached", "tied weight: its gradient is that of the embedding alone",
             own_parameter(TOKENS), f"{TORCH_GPT2}:GPT2.logits", "self.embedding.embedding.weight",
             "self.embedding.embedding.weight.detach()"),
    gpt2_row("lookup-detached", "tied weight: its gradient is that of the output alone",
             own_parameter(TOKENS), f"{NUMPY}:embedding", shared.NUMPY_TABLE,
             f"{shared.NUMPY_TABLE}        if ids.ndim > 1:\n            return dtable, None\n"),
)


def _scores_factor(name: str, factor: str, new: str) -> HintRow:
    """Scores times a factor, in PyTorch."""
    row = gpt2_row(f"factor-{name}", f"a factor of {factor}", SCORES, f"{TORCH_HEADS}.forward",
                   "/ math.sqrt(q.shape[-1])", new, suitable=_several_heads)
    return shared.entries_only(replace(row, hint=shared.factor_hint(factor)))


FACTOR_ROWS = (
    _scores_factor("h", "H", "/ math.sqrt(q.shape[-1]) * self.heads"),
    _scores_factor("inverse-h", "1/H", "/ math.sqrt(q.shape[-1]) / self.heads"),
    _scores_factor("d", "D", "* math.sqrt(q.shape[-1])"),
    _scores_factor("inverse-d", "1/D", "/ q.shape[-1] ** 1.5"),
    _scores_factor("root-d", "sqrt(D)", ""),
    _scores_factor("inverse-root-d", "1/sqrt(D)", "/ q.shape[-1]"),
)
# fmt: on

GPT2_ROWS = (
    *SHARED_ROWS, *ATTENTION_ROWS, *PROJECTION_ROWS, *HEADS_ROWS, *NORM_ROWS, *NO_NORM_ROWS,
    *RESIDUAL_ROWS, *STRUCTURE_ROWS, *ALL_BLOCKS_ROWS, *TIED_ROWS, *FACTOR_ROWS,
)  # fmt: skip
HINT_ROWS: tuple[HintRow, ...] = (*shared.GPT_ROWS, *GPT2_ROWS)
