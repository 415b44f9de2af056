"""What people get wrong in a GPT-2 written by hand: the numbers of one pass over a model.

As in `table.py`; `tensor` ends the name of the first divergence in a GPT-2 of two blocks. It is
empty where the mistake adds or drops a tensor, so that no tensor stands beside that of the twin.
"""

from __future__ import annotations

from parity_tests.planted import PlantedBug
from parity_tests.planted.table import EXACT, HAND, NUMPY, STEP, TENSOR, TORCH_LAYERS, TWIN

NUMPY_GPT2, TORCH_GPT2 = "numpy_impl.gpt2", "torch_impl.gpt2"
NORM, SPLIT = f"{NUMPY}:layer_norm", ".reshape(batch, length, 3, self.heads, width // self.heads)"
PARTS = "tuple(part.transpose(1, 2) for part in qkv.unbind(2))"
NORM_OUTPUT, STREAM_END = "attention_norm.output", "transformers.1.output"

SCALED = "    y = z * w\n"  # once the rows are normalised
ROW_MEAN = "x.data.mean(axis=-1, keepdims=True)"


def normalised(mean: str, deviation: str) -> str:
    """The source that normalises anew, by another mean and another deviation of z."""
    return f"    z = x.data - {mean}\n    s = {deviation}\n    z /= s\n{SCALED}"


# fmt: off
GPT2_NUMBERS: tuple[PlantedBug, ...] = (
    # --- Layer normalisation, forward
    PlantedBug(
        "gpt2-norm-eps-outside-root", NORM, SCALED,
        normalised(ROW_MEAN, "np.sqrt((z * z).mean(axis=-1, keepdims=True)) + LAYER_NORM_EPS"),
        "eps is added to the deviation, not to the variance",
        frozenset({TWIN, STEP, HAND}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-eps-smaller", NORM, SCALED,
        normalised(ROW_MEAN, "np.sqrt((z * z).mean(axis=-1, keepdims=True) + 1e-6)"),
        "1e-6 for 1e-5, forward and backward",
        frozenset({TWIN, HAND}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-eps-of-bert", f"{TORCH_LAYERS}:LayerNorm.__init__",
        "functional.LAYER_NORM_EPS", "1e-12",
        "1e-12 for 1e-5, as another model has it",
        frozenset({TWIN, STEP, HAND}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-variance-unbiased", NORM, SCALED,
        normalised(
            ROW_MEAN,
            "np.sqrt((z * z).sum(axis=-1, keepdims=True) / max(1, z.shape[-1] - 1) "
            "+ LAYER_NORM_EPS)",
        ),
        "the variance is divided by E - 1",
        frozenset({TWIN, STEP, HAND}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-mean-kept", NORM, SCALED,
        normalised("0.0", "np.sqrt((z * z).mean(axis=-1, keepdims=True) + LAYER_NORM_EPS)"),
        "the mean is not subtracted, as in RMSNorm",
        frozenset({TWIN, STEP, HAND}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-over-positions", NORM, SCALED,
        normalised(
            "x.data.mean(axis=max(-2, -x.ndim), keepdims=True)",
            "np.sqrt((z * z).mean(axis=max(-2, -x.ndim), keepdims=True) + LAYER_NORM_EPS)",
        ),
        "mean and variance are those of a feature over the positions",
        frozenset({TWIN, STEP, EXACT, HAND}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-over-sequence", NORM, SCALED,
        normalised(
            "x.data.mean(axis=(-2, -1)[-x.ndim :], keepdims=True)",
            "np.sqrt((z * z).mean(axis=(-2, -1)[-x.ndim :], keepdims=True) + LAYER_NORM_EPS)",
        ),
        "mean and variance are those of all positions together",
        frozenset({TWIN, STEP, EXACT, HAND}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-in-place", NORM, SCALED,
        f"    if x.data.flags.writeable:\n        x.data[...] = z\n{SCALED}",
        "the residual stream itself is normalised, though the next sum needs it as it was",
        frozenset({TWIN, HAND}), "embedding.output",
    ),
    PlantedBug(
        "gpt2-norm-variance-through-float32", NORM, SCALED,
        normalised(
            ROW_MEAN,
            "np.sqrt((z * z).mean(axis=-1, keepdims=True).astype("
            'np.complex64 if z.dtype.kind == "c" else np.float32) + LAYER_NORM_EPS)',
        ),
        "the variance is rounded to float32 within a float64 pass",
        frozenset({TWIN, STEP}), NORM_OUTPUT,
    ),
    PlantedBug(
        "gpt2-norm-final-missing", f"{TORCH_GPT2}:GPT2.logits",
        "linear(self.norm(x),", "linear(x,",
        "the last normalisation, before the logits, is left out",
        frozenset({TWIN, HAND}),
    ),
    # --- Layer normalisation, backward
    PlantedBug(
        "gpt2-norm-mean-term-missing", NORM,
        "        dx -= dx.mean(axis=-1, keepdims=True)\n", "",
        "dx lacks the term of the mean",
        frozenset({TWIN, STEP}), STREAM_END,
    ),
    PlantedBug(
        "gpt2-norm-variance-term-missing", NORM,
        "        dx -= z * gz.mean(axis=-1, keepdims=True)\n", "",
        "dx lacks the term of the variance, z mean(a z)",
        frozenset({TWIN, STEP}), STREAM_END,
    ),
    PlantedBug(
        "gpt2-norm-deviation-missing", NORM, "        dx /= s\n", "",
        "dx is not divided by the deviation",
        frozenset({TWIN, STEP}), STREAM_END,
    ),
    PlantedBug(
        "gpt2-norm-weight-forgotten", NORM,
        "        gz *= w\n        dx = grad * w\n", "        dx = grad.copy()\n",
        "dx takes the cotangent of y for that of z",
        frozenset({TWIN, STEP}), STREAM_END,
    ),
    PlantedBug(
        "gpt2-norm-weight-gradient-without-z", NORM,
        "dw = rows.sum(axis=0)", "dw = db.copy()",
        "the gradient of the weight lacks its factor z",
        frozenset({TWIN, STEP}), "norm.weight",
    ),
    PlantedBug(
        "gpt2-norm-bias-gradient-mean", NORM,
        "db = grad.reshape(-1, shape[-1]).sum(axis=0)",
        "db = grad.reshape(-1, shape[-1]).mean(axis=0)",
        "the gradient of the bias is the mean over rows, not the sum",
        frozenset({TWIN, STEP}), "norm.bias",
    ),
    # --- Queries, keys and values; heads
    PlantedBug(
        "gpt2-heads-queries-for-keys", f"{TORCH_GPT2}:GPT2Attention.split",
        "qkv.unbind(2)", "(qkv[:, :, 1], qkv[:, :, 0], qkv[:, :, 2])",
        "the projection is read as keys, queries, values",
        frozenset({TWIN, STEP, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "gpt2-heads-values-for-keys", f"{NUMPY_GPT2}:GPT2Attention.split",
        "for part in qkv.unbind(2)", "for part in (qkv.unbind(2)[i] for i in (0, 2, 1))",
        "the projection is read as queries, values, keys",
        frozenset({TWIN, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "gpt2-heads-scale-of-width", f"{NUMPY_GPT2}:GPT2Attention.forward",
        "math.sqrt(q.shape[-1])", "math.sqrt(x.shape[-1])",
        "scores are divided by sqrt(E) in place of sqrt(D)",
        frozenset({TWIN, EXACT, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "gpt2-heads-scale-missing", f"{TORCH_GPT2}:GPT2Attention.forward",
        " / math.sqrt(q.shape[-1])", "",
        "scores are not divided by sqrt(D)",
        frozenset({TWIN, STEP, EXACT, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "gpt2-heads-first-axis-of-projection", f"{NUMPY_GPT2}:GPT2Attention.split",
        f"{SPLIT}\n    return {PARTS}",
        f"{SPLIT.replace('3, self.heads', 'self.heads, 3')}\n"
        f"    return {PARTS.replace('unbind(2)', 'unbind(3)')}",
        "each head has its queries, keys and values together, as other models store them",
        frozenset({TWIN, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "gpt2-heads-last-axis-of-projection", f"{TORCH_GPT2}:GPT2Attention.split",
        f"{SPLIT}\n    return {PARTS}",
        ".reshape(batch, length, 3, width // self.heads, self.heads)\n"
        f"    return {PARTS.replace('transpose(1, 2)', 'permute(0, 3, 1, 2)')}",
        "a projection is split as (D, H) in place of (H, D)",
        frozenset({TWIN, STEP, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "gpt2-heads-split-by-reshape", f"{NUMPY_GPT2}:GPT2Attention.split",
        "part.transpose(1, 2)", "part.reshape(batch, self.heads, length, width // self.heads)",
        "positions and heads are exchanged by a reshape in place of a transpose",
        frozenset({TWIN, EXACT, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "gpt2-heads-merged-without-transpose", f"{NUMPY_GPT2}:GPT2Attention.merge",
        "context.transpose(1, 2).reshape(", "context.reshape(",
        "heads are merged by a reshape alone, which mixes positions",
        frozenset({TWIN, EXACT, HAND}), "attention.output.input",
    ),
    PlantedBug(
        "gpt2-heads-merged-interleaved", f"{TORCH_GPT2}:GPT2Attention.merge",
        "context.transpose(1, 2).reshape(", "context.permute(0, 2, 3, 1).reshape(",
        "heads are merged as (D, H) in place of (H, D)",
        frozenset({TWIN, STEP, HAND}), "attention.output.input",
    ),
    PlantedBug(
        "gpt2-heads-keys-detached", f"{TORCH_GPT2}:GPT2Attention.forward",
        "k.transpose(-2, -1)", "k.detach().transpose(-2, -1)",
        "keys have no part in the gradient",
        frozenset({TWIN, STEP}), "attention.input.output",
    ),
    # --- The gradient of the three parts
    PlantedBug(
        "gpt2-unbind-first-place", f"{TENSOR}.unbind", "[i] = grad", "[0] = grad",
        "the gradient of each part goes to the first",
        frozenset({TWIN, STEP}), "attention.input.output",
    ),
    PlantedBug(
        "gpt2-unbind-last-only", f"{TENSOR}.unbind",
        "[i] = grad", "[i] = grad if i == len(parts) - 1 else 0.0",
        "only the last part has a gradient",
        frozenset({TWIN, STEP}), "attention.input.output",
    ),
    PlantedBug(
        "gpt2-unbind-everywhere", f"{TENSOR}.unbind", "[i] = grad", "[...] = grad",
        "the gradient of each part goes to all of them",
        frozenset({TWIN, STEP}), "attention.input.output",
    ),
    PlantedBug(
        "gpt2-unbind-shared-array", f"{TENSOR}.unbind",
        """\
    def part(i: int) -> Tensor:
        def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
            dx = np.zeros_like(self.data)
""", """\
    def part(i: int, dx=np.zeros_like(self.data)) -> Tensor:
        def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
""",
        "a part's gradient is written into the array that the one before returned",
        frozenset({TWIN, STEP}), "attention.input.output",
    ),
    # --- Residuals
    PlantedBug(
        "gpt2-residual-missing", f"{NUMPY_GPT2}:GPT2Transformer.forward",
        "x = x + self.attention(", "x = self.attention(",
        "nothing leads around the attention",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-residual-from-norm", f"{NUMPY_GPT2}:GPT2Transformer.forward",
        "x = x + self.attention(self.attention_norm(x))",
        "x = self.attention_norm(x)\n    x = x + self.attention(x)",
        "the normalised input leads around the attention",
        frozenset({TWIN, EXACT, HAND}), "feed_forward_norm.input",
    ),
    PlantedBug(
        "gpt2-residual-from-block-input", f"{NUMPY_GPT2}:GPT2Transformer.forward",
        """\
    x = x + self.attention(self.attention_norm(x))
    return x + self.feed_forward(self.feed_forward_norm(x))
""", """\
    middle = x + self.attention(self.attention_norm(x))
    return x + self.feed_forward(self.feed_forward_norm(middle))
""",
        "the block's input leads around the feed-forward part too",
        frozenset({TWIN, EXACT, HAND}), "transformers.0.output",
    ),
    PlantedBug(
        "gpt2-residual-norm-after", f"{TORCH_GPT2}:GPT2Transformer.forward",
        """\
    x = x + self.attention(self.attention_norm(x))
    return x + self.feed_forward(self.feed_forward_norm(x))
""", """\
    x = self.attention_norm(x + self.attention(x))
    return self.feed_forward_norm(x + self.feed_forward(x))
""",
        "normalises after the sum, as the transformer before GPT-2 did",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-residual-skip-detached", f"{TORCH_GPT2}:GPT2Transformer.forward",
        "return x + self.feed_forward(", "return x.detach() + self.feed_forward(",
        "only the branch has a gradient, not the way around it",
        frozenset({TWIN, STEP}), "feed_forward_norm.input",
    ),
    # --- One table in two roles; a linear map without a bias
    PlantedBug(
        "gpt2-tying-output-detached", f"{TORCH_GPT2}:GPT2.logits",
        "self.embedding.embedding.weight)", "self.embedding.embedding.weight.detach())",
        "the table has the gradient of its role as embedding alone",
        frozenset({TWIN, STEP}), "embedding.embedding.weight",
    ),
    PlantedBug(
        "gpt2-tying-output-copied", f"{NUMPY_GPT2}:GPT2.logits",
        "self.embedding.embedding.weight)", "Tensor(self.embedding.embedding.weight.data))",
        "the output's weight is a copy, whose gradient nobody collects",
        frozenset({TWIN, STEP}), "embedding.embedding.weight",
    ),
    PlantedBug(
        "gpt2-tying-embedding-detached", f"{TORCH_LAYERS}:Embedding.forward",
        "functional.embedding(self.weight, ids)",
        "functional.embedding(self.weight.detach() if ids.ndim == 2 else self.weight, ids)"
        ".requires_grad_()",
        "the table has the gradient of its role as output alone",
        frozenset({TWIN, STEP}), "embedding.embedding.weight",
    ),
    PlantedBug(
        "gpt2-tying-weight-reshaped", f"{NUMPY}:linear",
        "(dx, dw) if bias is None", "(dx, product(x2.T, g2).reshape(w.shape)) if bias is None",
        "without a bias, dW is computed as (in, out) and reshaped in place of transposed",
        frozenset({TWIN, STEP}), "embedding.embedding.weight",
    ),
    PlantedBug(
        "gpt2-tying-weight-last-row", f"{NUMPY}:linear",
        "(dx, dw) if bias is None", "(dx, product(g2[-1:].T, x2[-1:])) if bias is None",
        "without a bias, dW is that of the last row, not the sum over all leading axes",
        frozenset({TWIN, STEP}), "embedding.embedding.weight",
    ),
)
# fmt: on
