"""The mistakes that the suite is held against: what people get wrong in a GPT written by hand.

Names begin with the part that holds the mistake. `tensor` ends the name of the first divergence
in a model of at least two blocks: with one block, or where softmax is saturated in all others,
`embedding.output` stands for the output of the block before. It is empty where the mistake lies
outside the numbers of one pass over a model, or can only stop the pass with an error.
"""

from __future__ import annotations

from parity_tests.planted import PlantedBug

TWIN, STEP, EXACT = "other backend", "complex step", "exact property"
BOUND, HAND = "a priori bound", "by hand"

TAPE, TENSOR, LAYERS = "numpy_impl.tape", "numpy_impl.tensor:Tensor", "numpy_impl.layers"
NUMPY, NUMPY_GPT = "numpy_impl.functional", "numpy_impl.gpt"
NUMPY_ADAMW = "numpy_impl.optim:AdamWOptimizer"
TORCH, TORCH_LAYERS, TORCH_GPT = "torch_impl.functional", "torch_impl.layers", "torch_impl.gpt"
TORCH_ADAMW = "torch_impl.optim:AdamWOptimizer"
CORPUS, WEIGHTS, TRAINING = "gpt_parity.corpus", "gpt_parity.weights", "gpt_parity.training"
SCHEDULE = "gpt_parity.schedule:WarmupCosineScheduler.__call__"
SAMPLE = "gpt_parity.sampling:sample"

# fmt: off
BUGS: tuple[PlantedBug, ...] = (
    # --- Engine: accumulation, order, broadcasting, memory, modes
    PlantedBug(
        "engine-overwrite", f"{TAPE}:_propagate",
        '_seen("accumulate", i, earlier + grad, (earlier, grad), parents)',
        '_seen("accumulate", i, grad, (earlier, grad), parents)',
        "a tensor used several times keeps the gradient of one use",
        frozenset({TWIN, STEP, HAND}), "feed_forward.output.output",
    ),
    PlantedBug(
        "engine-breadth-first", f"{TAPE}:gradients_of",
        """\
                uses[parent] -= 1
                if not uses[parent]:
                    ready.append(parent)
""", """\
                if uses[parent] > 0:
                    uses[parent] = 0
                    ready.insert(0, parent)
""",
        "a tensor on paths of unequal length is propagated before all of its uses are",
        frozenset({TWIN, STEP, HAND}), "feed_forward.output.output",
    ),
    PlantedBug(
        "engine-unbroadcast-missing", f"{TAPE}:unbroadcast",
        "summed = grad.sum(axis=(*range(extra), *stretched), keepdims=True)",
        "summed = grad[tuple(slice(0, 1) if i < extra or i in stretched else slice(None) "
        "for i in range(grad.ndim))]",
        "of a broadcast operand only the first copy gets a gradient",
        frozenset({TWIN, STEP, HAND}), "embedding.positional_embedding.output",
    ),
    PlantedBug(
        "engine-unbroadcast-axis", f"{TAPE}:unbroadcast",
        """\
    summed = grad.sum(axis=(*range(extra), *stretched), keepdims=True)
    if extra < 0 or summed.shape[extra:] != shape:
""", """\
    summed = grad.sum(axis=(*range(1, 1 + extra), *stretched), keepdims=False)
    if extra < 0 or summed.size != np.prod(shape):
""",
        "sums over the axes after the first, not the leading ones (an error if sizes differ)",
        frozenset({TWIN, STEP, HAND}), "embedding.positional_embedding.output",
    ),
    PlantedBug(
        "engine-unbroadcast-mean", f"{TAPE}:unbroadcast", "grad.sum(", "grad.mean(",
        "averages over the broadcast axes in place of summing",
        frozenset({TWIN, STEP, HAND}), "embedding.positional_embedding.output",
    ),
    PlantedBug(
        "engine-accumulate-in-place", f"{TAPE}:_propagate",
        "earlier + grad, (earlier", "np.add(earlier, grad, out=earlier), (earlier",
        "adds into an array that another tensor's gradient may share",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "engine-gradients-alias", f"{TENSOR}.accumulate_grad",
        "np.array(grad if self.grad is None else self.grad + grad)",
        "grad if self.grad is None else self.grad + grad",
        "the gradients of two leaves may be one array",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "engine-stale-gradient", f"{LAYERS}:Parameter.stage",
        "self.grad_view[...] = grad", "self.grad_view += grad",
        "the first gradient after zero_grad is added to the one of the step before",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "engine-no-grad-nested", f"{TAPE}:no_grad",
        "_grad_enabled.reset(token)", "_grad_enabled.set(True)",
        "the end of an inner no_grad turns recording on within the outer one",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "engine-no-grad-leaks", f"{TAPE}:no_grad",
        "    try:\n        yield\n    finally:\n        _grad_enabled.reset(token)\n",
        "    yield\n    _grad_enabled.reset(token)\n",
        "an error inside no_grad leaves recording off for good",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "engine-no-grad-ignored", f"{TAPE}:records",
        "if _grad_enabled.get():", "if True:",
        "the graph is recorded under no_grad too",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "engine-sub-sign", f"{TENSOR}.__sub__", "(grad, -grad)", "(grad, grad)",
        "the gradient of the subtrahend lacks its sign",
        frozenset({TWIN, STEP}),
    ),
    PlantedBug(
        "engine-mul-swapped", f"{TENSOR}.__mul__",
        "(grad * b.data, grad * a.data)", "(grad * a.data, grad * b.data)",
        "each factor gets the gradient of the other",
        frozenset({TWIN, STEP}),
    ),
    PlantedBug(
        "engine-div-divisor", f"{TENSOR}.__truediv__",
        "-da * (a.data / b.data)", "-da * a.data",
        "the gradient of the divisor lacks one division",
        frozenset({TWIN, STEP}),
    ),
    PlantedBug(
        "engine-transpose-missing", f"{TENSOR}.transpose",
        "(grad.swapaxes(axis1, axis2),)", "(grad,)",
        "the gradient is not transposed back (an error unless the sizes are equal)",
        frozenset({TWIN, STEP}), "feed_forward.output.output",
    ),
    PlantedBug(
        "engine-transpose-reshape", f"{TENSOR}.transpose",
        "(grad.swapaxes(axis1, axis2),)", "(grad.reshape(self.shape),)",
        "the gradient is reshaped in place of transposed",
        frozenset({TWIN, STEP}), "feed_forward.output.output",
    ),
    PlantedBug(
        "engine-transpose-forward", f"{TENSOR}.transpose",
        "grad.swapaxes(axis1, axis2)", "grad.swapaxes(axis2, axis1)",
        "the gradient is permuted as the data was, not by the inverse",
        frozenset(),
        equivalent="A swap of two axes is its own inverse, and the order of the two is no matter.",
    ),
    PlantedBug(
        "engine-mean-count", f"{TENSOR}.mean",
        "self.data.size / total.data.size", "self.data.size / self.shape[0]",
        "divides by the elements behind the first axis, not by those summed",
        frozenset({TWIN, HAND}),
    ),
    # --- Matrix product: each operand
    PlantedBug(
        "matmul-first-operand", f"{TENSOR}.__matmul__",
        "product(grad, b.data.swapaxes(-1, -2))", "product(grad, b.data)",
        "dA = G B in place of G B^T (an error unless the sizes are equal)",
        frozenset({TWIN, STEP}), "attention.softmax.output",
    ),
    PlantedBug(
        "matmul-second-operand", f"{TENSOR}.__matmul__",
        "product(grad.swapaxes(-1, -2), a.data)",
        "product(grad.swapaxes(-1, -2), a.data.swapaxes(-1, -2))",
        "dB = A G in place of A^T G (an error unless A is square)",
        frozenset({TWIN, STEP}), "feed_forward.output.output",
    ),
    PlantedBug(
        "matmul-second-forgotten", f"{TENSOR}.__matmul__",
        "product(grad.swapaxes(-1, -2), a.data).swapaxes(-1, -2)", "None",
        "the second operand gets no gradient",
        frozenset({TWIN, STEP}), "feed_forward.output.output",
    ),
    # --- Linear map and bias
    PlantedBug(
        "linear-bias-missing", f"{NUMPY}:linear",
        "    if bias is not None:\n        y += bias.data\n", "",
        "the bias is not added",
        frozenset({TWIN, STEP}), "attention.output.output",
    ),
    PlantedBug(
        "linear-bias-first-row", f"{NUMPY}:linear", "g2.sum(axis=0)", "g2[0]",
        "db is the cotangent of the first row, not the sum over all",
        frozenset({TWIN, STEP}), "output.output.bias",
    ),
    PlantedBug(
        "linear-bias-mean", f"{NUMPY}:linear", "g2.sum(axis=0)", "g2.mean(axis=0)",
        "db is the mean over rows, not the sum",
        frozenset({TWIN, STEP}), "output.output.bias",
    ),
    PlantedBug(
        "linear-weight-read-as-in-out", f"{NUMPY}:linear",
        "product(x2, w.T)", "product(x2, w.reshape(shape[-1], -1))",
        "the forward pass takes (out, in) memory for (in, out)",
        frozenset({TWIN, STEP}), "attention.output.output",
    ),
    PlantedBug(
        "linear-weight-gradient-reshaped", f"{NUMPY}:linear",
        "product(g2.T, x2)", "product(x2.T, g2).reshape(w.shape)",
        "dW is computed as (in, out) and reshaped in place of transposed",
        frozenset({TWIN, STEP}), "output.output.weight",
    ),
    PlantedBug(
        "linear-input-gradient-reshaped", f"{NUMPY}:linear",
        "product(g2, w)", "product(g2, w.reshape(w.shape[::-1]).T)",
        "dx takes (out, in) memory for (in, out)",
        frozenset({TWIN, STEP}), "feed_forward.output.output",
    ),
    # --- Attention
    PlantedBug(
        "attention-scale-position", f"{NUMPY_GPT}:GPTAttention.forward",
        "math.sqrt(x.shape[-1])", "math.sqrt(x.shape[-2])",
        "scores are divided by sqrt(T) in place of sqrt(E)",
        frozenset({TWIN, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "attention-scale-values", f"{NUMPY}:self_attention",
        "math.sqrt(q.shape[-1])", "math.sqrt(v.shape[-1])",
        "scores are divided by sqrt(d_v) in place of sqrt(d_k)",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "attention-scale-backward", f"{TENSOR}.__truediv__",
        "da = grad / b.data", "da = grad if b.ndim == 0 else grad / b.data",
        "division by a number is forgotten in the backward pass",
        frozenset({TWIN, STEP}), "feed_forward.output.output",
    ),
    PlantedBug(
        "attention-scale-root", f"{TORCH_GPT}:GPTAttention.forward",
        "/ math.sqrt(x.shape[-1])", "/ x.shape[-1]",
        "scores are divided by E in place of sqrt(E)",
        frozenset({TWIN, STEP, HAND}), "attention.mask.input",
    ),
    PlantedBug(
        "attention-keys-detached", f"{TORCH_GPT}:GPTAttention.forward",
        "x @ x.transpose(-2, -1)", "x @ x.detach().transpose(-2, -1)",
        "the use as key has no part in the gradient",
        frozenset({TWIN, STEP}), "feed_forward.output.output",
    ),
    # --- Mask
    PlantedBug(
        "mask-upper", f"{NUMPY}:tril",
        "_triangle(*x.shape[-2:])", "~np.tri(*x.shape[-2:], -1, dtype=bool)",
        "keeps the upper triangle, so that positions attend to the future",
        frozenset({TWIN, EXACT, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "mask-one-too-many", f"{NUMPY}:tril",
        "_triangle(*x.shape[-2:])", "np.tri(*x.shape[-2:], 1, dtype=bool)",
        "each position also attends to the one after it",
        frozenset({TWIN, EXACT, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "mask-one-too-few", f"{TORCH}:tril",
        "_triangle(*x.shape[-2:])", "torch.tril(_triangle(*x.shape[-2:]), diagonal=-1)",
        "no position attends to itself",
        frozenset({TWIN, STEP, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "mask-fill-zero", f"{NUMPY}:_select",
        "np.copyto(y, value, where=drop)", "np.copyto(y, 0.0, where=drop)",
        "masked scores are 0, so that they keep a weight",
        frozenset({TWIN, EXACT, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "mask-fill-weak", f"{TORCH}:_select",
        "value = max(value, torch.finfo(x.dtype).min)", "value = max(value, -10.0)",
        "a fill of -10 leaves the future a small weight",
        frozenset({TWIN, STEP, EXACT, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "mask-first-row-of-batch", f"{NUMPY}:tril",
        "_triangle(*x.shape[-2:])",
        "np.tri(*x.shape[-2:], dtype=bool)"
        " | (np.arange(len(x)) > 0).reshape(-1, *[1] * (x.ndim - 1))",
        "only the first sequence of a batch is masked",
        frozenset({TWIN, EXACT, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "mask-gradient-passes", f"{NUMPY}:_select",
        "np.copyto(dx, 0.0, where=drop)", "pass",
        "masked scores get a gradient (hidden in a model, where softmax gives them 0)",
        frozenset({TWIN, STEP}),
    ),
    # --- Softmax
    PlantedBug(
        "softmax-diagonal", f"{NUMPY}:softmax",
        "np.subtract(grad, dx.sum(axis=-1, keepdims=True), out=dx)", "dx = (1.0 - p) * grad",
        "only the diagonal of the Jacobian, as for a sigmoid",
        frozenset({TWIN, STEP, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "softmax-gradient-axis", f"{NUMPY}:softmax",
        "dx.sum(axis=-1, keepdims=True)", "dx.sum(axis=-2, keepdims=True)",
        "the sum of the gradient runs over queries in place of keys",
        frozenset({TWIN, STEP, HAND}), "attention.mask.output",
    ),
    PlantedBug(
        "softmax-sum-axis", f"{NUMPY}:softmax",
        "p.sum(axis=-1, keepdims=True)", "p.sum(axis=-2, keepdims=True)",
        "the forward pass normalises columns",
        frozenset({TWIN, STEP, EXACT, HAND}), "attention.softmax.output",
    ),
    PlantedBug(
        "softmax-no-shift", f"{NUMPY}:softmax",
        "x.data - x.data.real.max(axis=-1, keepdims=True)", "x.data.copy()",
        "large inputs overflow without the shift by the maximum",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "softmax-saved-in-place", f"{NUMPY}:softmax",
        "dx *= p\n        return (dx,)", "np.multiply(dx, p, out=p)\n        return (p,)",
        "the gradient is written into the probabilities that were saved",
        frozenset({TWIN, EXACT}), "attention.softmax.output",
    ),
    PlantedBug(
        "softmax-dim-one", f"{TORCH_LAYERS}:Softmax.__init__", "dim=-1", "dim=1",
        "normalises over queries, the axis that dim=1 is for (B, T, T)",
        frozenset({TWIN, STEP, EXACT}), "attention.softmax.output",
    ),
    # --- GELU
    PlantedBug(
        "gelu-cubic-rounded", f"{NUMPY}:_gelu",
        "c2 = c * c  #", "GELU_CUBIC = 0.0447\n    c2 = c * c  #",
        "0.0447 for 0.044715, forward and backward",
        frozenset({TWIN, HAND}), "feed_forward.gelu.output",
    ),
    PlantedBug(
        "gelu-root-rounded", f"{NUMPY}:_gelu",
        "c2 = c * c  #", "SQRT_2_OVER_PI = 0.7978845608\n    c2 = c * c  #",
        "ten digits of sqrt(2 / pi), forward and backward",
        frozenset({TWIN, HAND}), "feed_forward.gelu.output",
    ),
    PlantedBug(
        "gelu-root-missing", f"{NUMPY}:_gelu",
        "np.tanh(phi,", "np.tanh(SQRT_2_OVER_PI * phi,",
        "2 / pi for its root, in the forward pass",
        frozenset({TWIN, STEP}), "feed_forward.gelu.output",
    ),
    PlantedBug(
        "gelu-factor-three", f"{NUMPY}:_gelu", "c2 *= 6.0", "c2 *= 2.0",
        "the derivative of the cube lacks its factor 3",
        frozenset({TWIN, STEP}), "feed_forward.input.output",
    ),
    PlantedBug(
        "gelu-product-rule", f"{NUMPY}:_gelu", "dy += phi", "dy[...] = phi",
        "the derivative lacks the term of the product rule",
        frozenset({TWIN, STEP}), "feed_forward.input.output",
    ),
    PlantedBug(
        "gelu-tanh-derivative", f"{NUMPY}:_gelu", "dy *= phi", "dy *= 0.5",
        "1 - t for the derivative 1 - t^2 of tanh",
        frozenset({TWIN, STEP}), "feed_forward.input.output",
    ),
    PlantedBug(
        "gelu-erf", f"{TORCH_LAYERS}:GELU.__init__", 'approximate="tanh"', 'approximate="none"',
        "the exact form with erf, PyTorch's default",
        frozenset({TWIN, STEP, HAND}), "feed_forward.gelu.output",
    ),
    # --- Embeddings
    PlantedBug(
        "embedding-last-only", f"{NUMPY}:embedding",
        "        dtable = np.zeros_like(table.data)\n", """\
        dtable = np.zeros_like(table.data)
        dtable[ids] += grad
        return dtable, None
""",
        "of a repeated id only the last occurrence counts",
        frozenset({TWIN, STEP, HAND}), "embedding.embedding.weight",
    ),
    PlantedBug(
        "embedding-first-only", f"{NUMPY}:embedding",
        "        dtable = np.zeros_like(table.data)\n", """\
        dtable = np.zeros_like(table.data)
        dtable[ids.reshape(-1)[::-1]] = grad.reshape(-1, grad.shape[-1])[::-1]
        return dtable, None
""",
        "of a repeated id only the first occurrence counts",
        frozenset({TWIN, STEP, HAND}), "embedding.embedding.weight",
    ),
    PlantedBug(
        "embedding-rows-shifted", f"{NUMPY}:embedding",
        "take(ids, axis=0)", "take(ids - 1, axis=0)",
        "looks up the row before, as if ids counted from 1",
        frozenset({TWIN, STEP, HAND}), "embedding.embedding.output",
    ),
    PlantedBug(
        "embedding-positions-aligned-right", f"{NUMPY_GPT}:GPTEmbedding.forward",
        "start + np.arange(tokens.shape[-1])",
        "np.arange(len(self.positional_embedding.weight))[-tokens.shape[-1] :]",
        "fewer tokens than the context get the last positions, not the first",
        frozenset({TWIN, HAND}), "embedding.positional_embedding.output",
    ),
    PlantedBug(
        "embedding-positions-zero", f"{TORCH_GPT}:GPTEmbedding.forward",
        "start + np.arange(tokens.shape[-1])", "np.zeros(tokens.shape[-1], np.int64)",
        "every position is the first",
        frozenset({TWIN, STEP, HAND}), "embedding.positional_embedding.output",
    ),
    PlantedBug(
        "embedding-padding-row", f"{TORCH}:embedding", "table.shape[0]), table)",
        "table.shape[0]), table, padding_idx=0)",
        "the first row counts as padding and gets no gradient",
        frozenset({TWIN, STEP}), "embedding.positional_embedding.weight",
    ),
    PlantedBug(
        "embedding-mean", f"{TORCH}:embedding", "table.shape[0]), table)",
        "table.shape[0]), table, scale_grad_by_freq=True)",
        "repeated ids get the mean over their occurrences, not the sum",
        frozenset({TWIN, STEP, HAND}), "embedding.embedding.weight",
    ),
    # --- Loss
    PlantedBug(
        "loss-sum-forward", f"{NUMPY}:cross_entropy", ".sum() / len(x)", ".sum()",
        "the loss is the sum over rows, its gradient that of the mean",
        frozenset({TWIN, STEP}), "loss",
    ),
    PlantedBug(
        "loss-mean-of-batch", f"{NUMPY}:cross_entropy",
        "grad / len(x)", "grad / len(logits.data)",
        "the gradient is divided by B, not by B T",
        frozenset({TWIN, STEP}), "output.output.output",
    ),
    PlantedBug(
        "loss-labels-transposed", f"{NUMPY}:cross_entropy",
        "targets.reshape(-1)", "targets.T.reshape(-1)",
        "labels are read time first, logits batch first",
        frozenset({TWIN, HAND}), "loss",
    ),
    PlantedBug(
        "loss-upstream-ignored", f"{NUMPY}:cross_entropy", "dx *= grad / len(x)", "dx /= len(x)",
        "the cotangent is taken for 1",
        frozenset({TWIN, STEP, EXACT}),
    ),
    PlantedBug(
        "loss-clipped", f"{NUMPY}:cross_entropy",
        "(np.log(total[:, 0]) - picked).sum()",
        "-np.log(np.clip((e / total)[rows, columns], 1e-10, 1.0)).sum()",
        "probabilities are clipped at 1e-10 in the forward pass",
        frozenset({TWIN, STEP, HAND}), "loss",
    ),
    PlantedBug(
        "loss-minus-one", f"{NUMPY}:cross_entropy", "dx[rows, columns] -= 1.0", "pass",
        "the gradient is the softmax without the label",
        frozenset({TWIN, STEP, EXACT}), "output.output.output",
    ),
    PlantedBug(
        "loss-operand-shifted-in-place", f"{NUMPY}:cross_entropy",
        "z = x - x.real.max(axis=-1, keepdims=True)",
        "z = np.subtract(x, x.real.max(axis=-1, keepdims=True), out=x).copy()",
        "the shift by the maximum is written into the logits",
        frozenset({TWIN, EXACT}), "output.output.output",
    ),
    PlantedBug(
        "loss-saved-in-place", f"{NUMPY}:cross_entropy",
        """\
        dx = e / total
        dx[rows, columns] -= 1.0
        dx *= grad / len(x)
""", """\
        dx = np.divide(e, total, out=e)
        dx[rows, columns] -= 1.0
        dx = dx * (grad / len(x))
""",
        "the gradient overwrites what a second backward pass needs",
        frozenset({TWIN, EXACT}),
    ),
    PlantedBug(
        "loss-smoothing", f"{TORCH}:cross_entropy",
        "targets.reshape(-1))", "targets.reshape(-1), label_smoothing=0.1)",
        "labels are smoothed",
        frozenset({TWIN, STEP, HAND}), "loss",
    ),
    PlantedBug(
        "loss-ignored-label", f"{TORCH}:cross_entropy",
        "targets.reshape(-1))", "targets.reshape(-1), ignore_index=0)",
        "label 0 counts as padding and is left out of the mean",
        frozenset({TWIN, STEP, HAND}), "loss",
    ),
    # --- AdamW
    PlantedBug(
        "adamw-eps-before-correction", f"{NUMPY_ADAMW}.step",
        """\
        update *= 1.0 / math.sqrt(1.0 - beta2**t)
        update += self.eps
""", """\
        update += self.eps
        update *= 1.0 / math.sqrt(1.0 - beta2**t)
""",
        "eps is added before the bias correction",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-eps-inside-root", f"{NUMPY_ADAMW}.step",
        """\
        np.sqrt(v, out=update)
        update *= 1.0 / math.sqrt(1.0 - beta2**t)
        update += self.eps
""",
        "        np.sqrt(v / (1.0 - beta2**t) + self.eps, out=update)\n",
        "eps is added inside the root",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-no-correction", f"{NUMPY_ADAMW}.step",
        "        update *= 1.0 / math.sqrt(1.0 - beta2**t)\n", "",
        "the second moment is not corrected for its start at 0",
        frozenset({TWIN, BOUND}),
    ),
    PlantedBug(
        "adamw-l2", f"{NUMPY_ADAMW}.step",
        "w *= 1.0 - self.lr * self.weight_decay", "g = g + self.weight_decay * w",
        "decay goes through the gradient, as in Adam with L2",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-decay-without-rate", f"{NUMPY_ADAMW}.step",
        "1.0 - self.lr * self.weight_decay", "1.0 - self.weight_decay",
        "decay is not multiplied by the learning rate",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-decay-on-biases", f"{NUMPY_ADAMW}._runs",
        "steps[i], parameter.ndim >= 2", "steps[i], parameter.ndim >= 1",
        "biases decay too",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-betas-swapped", f"{NUMPY_ADAMW}.step",
        "beta1, beta2 = self.betas", "beta2, beta1 = self.betas",
        "each moment decays at the rate of the other",
        frozenset({TWIN, BOUND}),
    ),
    PlantedBug(
        "adamw-step-ahead", f"{NUMPY_ADAMW}._runs",
        "min(start + BLOCK, end)), steps + 1, decays",
        "min(start + BLOCK, end)), self.steps[run[0]] + 1, decays",
        "the count has gone up before it is used, and goes up again",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-idle-parameters", f"{NUMPY_ADAMW}._runs", "if has_grad:", "if has_grad or steps:",
        "parameters without a gradient decay, and their moments too",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "adamw-state-alias", f"{NUMPY_ADAMW}.state",
        "flat[rows].reshape(p.shape).copy()", "flat[rows].reshape(p.shape)",
        "the state that was handed out changes with the next step",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "adamw-l2-of-adam", f"{TORCH_ADAMW}.__init__", "torch.optim.AdamW(", "torch.optim.Adam(",
        "Adam, whose decay is an L2 term in the gradient",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-no-decay", f"{TORCH_ADAMW}.__init__",
        'if p.ndim >= 2], "weight_decay": weight_decay}', 'if p.ndim >= 2], "weight_decay": 0.0}',
        "nothing decays",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "adamw-betas-dropped", f"{TORCH_ADAMW}.__init__", "betas=betas, ", "",
        "betas are not passed on, and only the default ones work",
        frozenset({TWIN, BOUND}),
    ),
    PlantedBug(
        "adamw-count-not-loaded", f"{TORCH_ADAMW}.load_state",
        'float(state["steps"][i])', "0.0",
        "the bias correction starts anew from a checkpoint",
        frozenset({TWIN, EXACT, BOUND}),
    ),
    # --- Clipping
    PlantedBug(
        "clip-per-tensor", f"{NUMPY_ADAMW}.clip_grad_norm",
        "            self.buffer.grad *= scale\n",
        "            for p in self.buffer.slices:\n"
        "                own = math.sqrt(np.dot(self.buffer.grad[p], self.buffer.grad[p]))\n"
        "                self.buffer.grad[p] *= min(1.0, max_norm / (own + 1e-6))\n",
        "each gradient is clipped by its own norm",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "clip-without-1e-6", f"{NUMPY_ADAMW}.clip_grad_norm",
        "scale = max_norm / (norm + 1e-6)", "scale = max_norm / max(norm, 1e-6)",
        "the 1e-6 that PyTorch adds to the norm is left out",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "clip-always", f"{NUMPY_ADAMW}.clip_grad_norm", "if not scale >= 1.0:", "if True:",
        "short gradients are stretched to max_norm",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "clip-largest", f"{NUMPY_ADAMW}.clip_grad_norm",
        "math.sqrt(sum(float(np.dot(block, block)) for block in blocks))",
        "float(np.abs(self.buffer.grad).max())",
        "the largest element for the L2 norm",
        frozenset({TWIN, BOUND, HAND}),
    ),
    PlantedBug(
        "clip-never", f"{TORCH_ADAMW}.clip_grad_norm",
        "if max_norm < math.inf:", "if max_norm < 0.0:",
        "the norm is computed and nothing is scaled",
        frozenset({TWIN, BOUND, HAND}),
    ),
    # --- Schedule
    PlantedBug(
        "schedule-warmup-from-zero", SCHEDULE, "(step + 1) / self.warmup_steps",
        "step / self.warmup_steps",
        "the first step has rate 0, and warm-up ends below max_lr",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "schedule-warmup-too-long", SCHEDULE, "/ self.warmup_steps)", "/ (self.warmup_steps + 1))",
        "warm-up ends one step below max_lr",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "schedule-span", SCHEDULE,
        "max(1, self.total_steps - self.warmup_steps)", "max(1, self.total_steps)",
        "the cosine takes total_steps after warm-up and ends too late",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "schedule-rises-again", SCHEDULE,
        "min(span, step - self.warmup_steps)", "(step - self.warmup_steps)",
        "after total_steps the cosine goes up again",
        frozenset({TWIN, EXACT, HAND}),
    ),
    # --- Weight exchange
    PlantedBug(
        "weights-square-transposed", f"{WEIGHTS}:set_weights",
        "torch.from_numpy(array)",
        'torch.from_numpy(array.T if "embedding" not in name and len(set(array.shape)) == 1 '
        "else array)",
        "square matrices are transposed on their way to torch, where shapes do not object",
        frozenset({TWIN, EXACT}), "attention.output.output",
    ),
    PlantedBug(
        "weights-alias", f"{WEIGHTS}:get_weights",
        'np.array(as_array(parameter), order="C")', 'np.asarray(as_array(parameter), order="C")',
        "the weights handed out by torch are the model's own memory",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "weights-one-skipped", f"{WEIGHTS}:set_weights",
        "for name, array in copies.items():\n            own[name].data[...] = array",
        "for name, array in list(copies.items())[:-1]:\n            own[name].data[...] = array",
        "the last tensor is not copied",
        frozenset({TWIN, EXACT}), "output.output.output",
    ),
    PlantedBug(
        "weights-through-float32", f"{WEIGHTS}:set_weights",
        "torch.from_numpy(array)", "torch.from_numpy(array).float()",
        "float64 weights are rounded to float32 on their way to torch",
        frozenset({TWIN, EXACT}),
    ),
    # --- Windows of the data set
    PlantedBug(
        "windows-last-lost", f"{CORPUS}:CharDataset._split",
        "(length - self.context_size - 1) // self._stride + 1",
        "(length - self.context_size - 1) // self._stride",
        "the last window that fits is lost",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "windows-targets-not-shifted", f"{CORPUS}:CharDataset.batch",
        "ids[places + 1]", "ids[places]",
        "the targets are the tokens themselves",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "windows-targets-two-ahead", f"{CORPUS}:CharDataset.batch",
        "ids[places + 1]", "ids[(places + 2) % len(ids)]",
        "the targets are the tokens two places on",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "windows-stride", f"{CORPUS}:CharDataset.__init__",
        "max(1, self.context_size // 2)", "self.context_size",
        "windows do not overlap",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "windows-test-seen-in-training", f"{CORPUS}:CharDataset.__init__",
        '"test": ids[boundary:]', '"test": ids',
        "the test part starts where the text does, within the training part",
        frozenset({EXACT, HAND}),
    ),
    # --- Tokenizer
    PlantedBug(
        "tokenizer-decode-shifted", f"{CORPUS}:CharTokenizer.decode",
        "self._codes[array.astype(np.int64)]", "self._codes[array.astype(np.int64) - 1]",
        "ids are decoded as if they counted from 1",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "tokenizer-unknown-accepted", f"{CORPUS}:CharTokenizer.encode",
        "if not known.all():", "if not known.any() and known.size:",
        "unknown characters become ids of others as long as one is known",
        frozenset({EXACT, HAND}),
    ),
    # --- Sampler
    PlantedBug(
        "sampler-side", SAMPLE, 'side="right"', 'side="left"',
        "a number that meets a cumulative sum gives the id before, of probability 0 perhaps",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "sampler-top-k-off-by-one", SAMPLE, "[:top_k]", "[: top_k + 1]",
        "keeps one id more than asked for",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "sampler-float32", "gpt_parity.sampling:_checked_logits",
        "array.astype(np.float64)", "array.astype(np.float32)",
        "probabilities are computed and summed in float32",
        frozenset({BOUND, HAND}),
    ),
    PlantedBug(
        "sampler-temperature-late", SAMPLE,
        "np.exp((scores[ids] - scores[ids].max()) / temperature)",
        "np.exp(scores[ids] - scores[ids].max()) / temperature",
        "temperature divides the probabilities, where normalising undoes it",
        frozenset({EXACT, HAND}),
    ),
    # --- Training
    PlantedBug(
        "training-zero-grad-missing", f"{TRAINING}:GPTTrainer.train_step",
        "self.optimizer.zero_grad()\n        try:", "try:",
        "gradients of all steps add up",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "training-evaluation-mode", f"{TRAINING}:GPTTrainer.train",
        "layers_of(self.model), training=True", "layers_of(self.model), training=False",
        "layers train in evaluation mode",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "training-rate-late", f"{TRAINING}:GPTTrainer.train",
        "scheduler(step)", "scheduler(step + 1)",
        "each step has the rate of the next",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "training-mean-of-batch-means", f"{TRAINING}:GPTTrainer.test",
        "losses.append(loss * targets.size)\n        count += targets.size",
        "losses.append(loss)\n        count += 1",
        "a shorter last batch counts as much as a full one",
        frozenset({EXACT, HAND}),
    ),
    # --- Dtype
    PlantedBug(
        "dtype-gelu-through-float32", f"{NUMPY}:_gelu",
        "np.tanh(phi, out=phi)",
        "phi[...] = np.tanh(phi).astype("
        'np.complex64 if phi.dtype.kind == "c" else np.float32)',
        "tanh is rounded to float32 within a float64 pass",
        frozenset({TWIN, STEP, BOUND}), "feed_forward.gelu.output",
    ),
    PlantedBug(
        "dtype-scores-through-float32", f"{TORCH}:tril",
        "_select(x, _triangle(*x.shape[-2:]), value)",
        "_select(x.float(), _triangle(*x.shape[-2:]), value).to(x.dtype)",
        "scores are masked in float32 within a float64 pass",
        frozenset({TWIN, STEP, BOUND}), "attention.mask.output",
    ),
    PlantedBug(
        "dtype-loss-in-float32", f"{TORCH}:cross_entropy",
        "logits.reshape(-1, vocab_size)", "logits.float().reshape(-1, vocab_size)",
        "the loss of float64 logits is float32",
        frozenset({TWIN, STEP, EXACT}), "loss",
    ),
    PlantedBug(
        "dtype-softmax-sum-in-float64", f"{NUMPY}:softmax",
        "p /= p.sum(axis=-1, keepdims=True)",
        "p = p / p.sum(axis=-1, keepdims=True, dtype=np.result_type(p.dtype, np.float64))",
        "the sum makes float32 weights float64, and the next product an error",
        frozenset({TWIN, EXACT}),
    ),
    PlantedBug(
        "dtype-fill-in-float64", f"{NUMPY}:_select",
        """\
    y = x.data.copy()
    np.copyto(y, value, where=drop)
""",
        "    y = np.where(keep, x.data, np.float64(value))\n",
        "the fill makes float32 scores float64, and a later product an error",
        frozenset({TWIN, EXACT}),
    ),
    PlantedBug(
        "dtype-scale-in-float64", f"{NUMPY_GPT}:GPTAttention.forward",
        "math.sqrt(x.shape[-1])", "np.sqrt(x.shape[-1])",
        "the scale is a float64 scalar in a float32 pass",
        frozenset(),
        equivalent="An operand without axes takes the tensor's dtype, and both roots round alike.",
    ),
)
# fmt: on
