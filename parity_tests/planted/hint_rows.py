"""For every explanation that the oracle may print: that mistake, planted into a running twin.

The proof of a hint must not come from the function that makes its prediction, so the mistakes are
changes of the twins' own source: of the forward pass in PyTorch, where autograd makes the
consistent backward pass, of a closure in NumPy where the backward pass alone is wrong.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.verdict import check_arrays
from parity_tests.candidates import Part, Suitable, random_bundle, submission
from parity_tests.planted import PlantedBug, planted
from parity_tests.planted.table import (
    BUGS,
    LAYERS,
    NUMPY,
    NUMPY_ADAMW,
    TENSOR,
    TORCH,
    TORCH_ADAMW,
    TORCH_GPT,
    TRAINING,
)  # fmt: skip

TORCH_LINEAR = "torch.nn.modules.linear:Linear.forward"
TABLE = {bug.name: bug for bug in BUGS}
STEPS = 2


@dataclass(frozen=True)
class Models:
    """Which random models are drawn, see `random_bundle`."""

    suitable: Suitable | None
    steps: int
    confident: bool
    optimizer: tuple[tuple[str, Any], ...]
    gpt2: bool = False


@dataclass(frozen=True)
class HintRow:
    """One planted mistake and what the oracle must say of it.

    `first` is, by part of a submission, a regular expression for the whole key that must be named
    first; {last} in it is the last block, {input} the layer before that block (of a GPT-2 the
    whole block), {bias} and {weight} those of that layer. `hint` must be found in a printed hint,
    which `mistake` tells for readers. The rest says which models can show the mistake.
    """

    bug: PlantedBug
    backend: str
    mistake: str
    hint: str
    first: Mapping[Part, str]
    suitable: Suitable | None = None
    steps: int = 0
    confident: bool = False
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float64", "float32")
    gpt2: bool = False

    @property
    def name(self) -> str:
        return self.bug.name

    @property
    def models(self) -> Models:
        optimizer = tuple(self.optimizer.items())
        return Models(self.suitable, self.steps, self.confident, optimizer, self.gpt2)

    def names(self, part: Part, key: str, blocks: int) -> bool:
        """Whether `key` is what must be named first, in a model of so many blocks."""
        last = blocks - 1
        before = f"transformers.{last - 1}.feed_forward.output" if last else "embedding"
        names = {"last": str(last), "input": before}
        for kind in ("bias", "weight"):
            own = f"{before}.{kind}" if last else "embedding.positional_embedding.weight"
            names[kind] = own
        if self.gpt2 and last:
            names["input"] = f"transformers.{last - 1}"
        pattern = self.first[part]
        for name, text in names.items():
            pattern = pattern.replace(f"{{{name}}}", re.escape(text))
        return re.fullmatch(pattern, key) is not None

    def is_given(self, hint: str) -> bool:
        return re.search(self.hint, hint) is not None


@functools.cache
def model(models: Models, seed: int) -> Bundle:
    """The reference of one random model."""
    return random_bundle(
        np.random.default_rng(seed), models.steps, suitable=models.suitable,
        confident=models.confident, optimizer=dict(models.optimizer), gpt2=models.gpt2,
    )  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """What the oracle said of one planted mistake: "" as `first` where all agreed.

    `seen`: the tensor that should be named is out of tolerance.
    """

    first: str
    seen: bool
    first_right: bool
    hint_right: bool
    others: tuple[str, ...]


def diagnose(row: HintRow, part: Part, seed: int, dtype: str) -> Diagnosis:
    """Plant the mistake, run the twin, take it out again and ask the oracle."""
    bundle = model(row.models, seed)
    with planted(row.bug):
        mine = submission(row.backend, bundle, dtype, part)
    # A layer that is not called, or elsewhere, gives tensors names that nobody was asked for.
    mine = {key: array for key, array in mine.items() if key in bundle.arrays}
    report = check_arrays(mine, bundle)
    if report.first is None:
        return Diagnosis("", False, False, False, report.hints)
    blocks = bundle.config.blocks
    return Diagnosis(
        report.first.name,
        any(not j.ok and row.names(part, j.name, blocks) for j in report.judgements),
        row.names(part, report.first.name, blocks),
        any(row.is_given(hint) for hint in report.hints),
        tuple(hint for hint in report.hints if not row.is_given(hint)),
    )


def low(x: np.ndarray, name: str) -> np.ndarray:
    """x to the nearest number of a shorter format, in x's own dtype (Veltkamp's splitting)."""
    if name == "float16":
        return x.astype(np.float16).astype(x.dtype)
    digits = {"tf32": 11, "bfloat16": 8}[name]
    c = x * x.dtype.type(2.0 ** (np.finfo(x.dtype).nmant + 1 - digits) + 1.0)
    return c - (c - x)


# --- Which models show a mistake


def _repeated(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """Some token stands in several places, not at the last alone."""
    counts = np.unique(tokens, return_counts=True)[1]
    return bool(counts.max() > 1)


def _length_differs(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    return tokens.shape[1] != config.embedding_size


def _square_output(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    return config.vocab_size == config.embedding_size


def _oblong_output(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    return config.vocab_size != config.embedding_size


def _square_batch(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    square = tokens.shape[0] == tokens.shape[1] != config.embedding_size
    return square and bool((tokens != tokens.T).any())


def _four_tokens(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    """A bias of three elements is too short for a factor without a name."""
    return config.vocab_size >= 4


def _targets_move(config: GPTConfig, tokens: np.ndarray, targets: np.ndarray) -> bool:
    return bool((targets != np.roll(targets, 1, axis=1)).any())


# --- Which tensor is named first

VALUE = "value/"
BLOCK = "transformers.0."
LAST = "transformers.{last}."
OUTPUT_BIAS = "grad/output.output.bias"


def forward(entry: str) -> dict[Part, str]:
    """A value; of the rest the loss, or what comes next where the loss is the same to rounding."""
    next_after = r"loss|grad/output\.output\.(bias|weight)"
    return {"all": re.escape(VALUE + entry), "parameters": next_after}


def backward(entry: str, parameter: str) -> dict[Part, str]:
    """The gradient of an entry, and the first gradient of a parameter that comes after it."""
    return {
        "all": "grad/" + entry.replace(".", r"\."),
        "parameters": "grad/" + parameter.replace(".", r"\."),
    }


def parameter(name: str) -> dict[Part, str]:
    return {part: re.escape(f"grad/{name}") for part in ("all", "parameters")}


def step(quantity: str, number: int = 1) -> dict[Part, str]:
    key = f"step/{number}/{quantity}"
    return {"all": key, "steps": key}


INPUT = backward("{input}.output", "{bias}")
SCORES = backward(LAST + "attention.mask.input", "{bias}")
MASKED = backward(LAST + "attention.mask.output", "{bias}")
GELU = backward(LAST + "feed_forward.input.output", LAST + "feed_forward.input.bias")
LINEAR_INPUT = backward(LAST + "feed_forward.output.output", LAST + "feed_forward.output.bias")
TOKENS, POSITIONS = (
    "embedding.embedding.weight", "embedding.positional_embedding.weight",
)  # fmt: skip


def plant(
    name: str, hint: str, first: Mapping[Part, str], place: str = "", old: str = "", new: str = "",
    backend: str = "", **models: Any,
) -> HintRow:  # fmt: skip
    """A row for the mistake `hint`; without a place it is the bug of the table of that name."""
    bug = PlantedBug(name, place, old, new, hint, frozenset()) if place else TABLE[name]
    backend = backend or ("torch" if bug.place.startswith("torch") else "numpy")
    return HintRow(bug, backend, hint, re.escape(hint), first, **models)


# --- The tables. Sources that are changed in more than one place stand here in full.

TORCH_ATTENTION = """\
    scores = x @ x.transpose(-2, -1) / math.sqrt(x.shape[-1])  # (B, T, T)
    weights = self.softmax(self.mask(scores))  # (B, T, T)
    return self.output(weights @ x)"""
NUMPY_LINEAR = """\
    y = product(x2, w.T)  # (N, out)
    if bias is not None:
        y += bias.data

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, ...]:
        g2 = grad.reshape(-1, grad.shape[-1])
        dx, dw = product(g2, w).reshape(shape), product(g2.T, x2)
"""
NUMPY_TABLE = "        dtable = np.zeros_like(table.data)\n"
NUMPY_MATMUL = """\
    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        da = product(grad, b.data.swapaxes(-1, -2))
        # As (G^T A)^T: after a transpose, the way back leaves it in the order of memory.
        return da, product(grad.swapaxes(-1, -2), a.data).swapaxes(-1, -2)

    return Tensor.from_op("matmul", product(a.data, b.data), (a, b), gradient_fn)"""
LOW = '__import__("parity_tests.planted.hint_rows", fromlist=["low"]).low'
LOW_LINEAR = """\
    def short(x: np.ndarray) -> np.ndarray:
        return SHORT

    w2 = short(w)
    y = product(short(x2), w2.T)  # (N, out)
    if bias is not None:
        y += bias.data

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, ...]:
        g2 = grad.reshape(-1, grad.shape[-1])
        dx, dw = product(short(g2), w2).reshape(shape), product(short(g2).T, short(x2))
"""
LOW_MATMUL = """\
    def short(x: np.ndarray) -> np.ndarray:
        return SHORT

    a2, b2 = short(a.data), short(b.data)

    def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        da = product(short(grad), b2.swapaxes(-1, -2))
        return da, product(short(grad).swapaxes(-1, -2), a2).swapaxes(-1, -2)

    return Tensor.from_op("matmul", product(a2, b2), (a, b), gradient_fn)"""

# fmt: off
EMBEDDING_ROWS = (
    plant("embedding-last-only",
          "embedding: of each token only the last occurrence counts (= in place of +=)",
          parameter(TOKENS), suitable=_repeated),
    plant("embedding-first-only", "embedding: of each token only the first occurrence counts",
          parameter(TOKENS), suitable=_repeated),
    plant("embedding-mean",
          "embedding: the mean over a token's occurrences in place of their sum",
          parameter(TOKENS), suitable=_repeated),
    plant("hint-rows-before",
          "embedding: ids are counted from 1, so each token takes the row before",
          forward("embedding.embedding.output"), f"{TORCH_GPT}:GPTEmbedding.forward",
          "self.embedding(tokens)", "self.embedding((tokens - 1) % len(self.embedding.weight))"),
    plant("hint-rows-after", "embedding: each token takes the row after its own",
          forward("embedding.embedding.output"), f"{TORCH_GPT}:GPTEmbedding.forward",
          "self.embedding(tokens)", "self.embedding((tokens + 1) % len(self.embedding.weight))"),
    plant("embedding-positions-zero", "positions: every position is the first",
          forward("embedding.positional_embedding.output")),
    plant("hint-positions-late",
          "positions: counted from 1, not from 0 (shifted by one along T)",
          forward("embedding.positional_embedding.output"), f"{TORCH_GPT}:GPTEmbedding.forward",
          "np.arange(tokens.shape[-1])",
          "np.arange(1, tokens.shape[-1] + 1) % len(self.positional_embedding.weight)"),
    plant("hint-positions-early",
          "positions: shifted by one along T, the first takes the last row",
          forward("embedding.positional_embedding.output"), f"{TORCH_GPT}:GPTEmbedding.forward",
          "np.arange(tokens.shape[-1])",
          "(np.arange(tokens.shape[-1]) - 1) % len(self.positional_embedding.weight)"),
    plant("engine-unbroadcast-missing",
          "embedding: the gradient of positions is that of the first batch element",
          backward("embedding.positional_embedding.output", POSITIONS)),
    plant("engine-unbroadcast-mean",
          "embedding: the gradient of positions is the mean over the batch, not the sum",
          backward("embedding.positional_embedding.output", POSITIONS)),
    plant("hint-positions-left-out", "embedding: positions are not added",
          forward("embedding.output"), f"{TORCH_GPT}:GPTEmbedding.forward",
          "+ self.positional_embedding(positions)", "+ 0.0 * self.positional_embedding(positions)"),
    plant("hint-tokens-scaled",
          "embedding: tokens are multiplied by sqrt(E), before positions are added",
          forward("embedding.output"), f"{TORCH_GPT}:GPTEmbedding.forward",
          "self.embedding(tokens)", "self.embedding.weight.shape[1] ** 0.5 * "
          "self.embedding(tokens)"),
)
ATTENTION_ROWS = (
    plant("hint-scale-forgotten", "attention: scores are not divided by sqrt(E)",
          forward(BLOCK + "attention.mask.input"), f"{TORCH_GPT}:GPTAttention.forward",
          " / math.sqrt(x.shape[-1])", ""),
    plant("attention-scale-backward", "attention: the vjp of the scores lacks 1/sqrt(E)", INPUT),
    plant("attention-scale-root", "attention: scores are divided by E in place of sqrt(E)",
          forward(BLOCK + "attention.mask.input")),
    plant("hint-scale-by-length", "attention: scores are divided by sqrt(T) in place of sqrt(E)",
          forward(BLOCK + "attention.mask.input"), f"{TORCH_GPT}:GPTAttention.forward",
          "math.sqrt(x.shape[-1])", "math.sqrt(x.shape[-2])", suitable=_length_differs),
    plant("hint-scale-inverted", "attention: scores are multiplied by sqrt(E)",
          forward(BLOCK + "attention.mask.input"), f"{TORCH_GPT}:GPTAttention.forward",
          "/ math.sqrt(x.shape[-1])", "* math.sqrt(x.shape[-1])"),
    plant("hint-scale-twice-backward",
          "attention: the vjp of the scores divides by E in place of sqrt(E)", INPUT,
          f"{TENSOR}.__truediv__", "da = grad / b.data", "da = grad / b.data / b.data"),
    plant("hint-key-reshaped", "attention: the key is reshaped, not transposed",
          forward(BLOCK + "attention.mask.input"), f"{TORCH_GPT}:GPTAttention.forward",
          "x.transpose(-2, -1)", "x.reshape(len(x), x.shape[2], x.shape[1])"),
    plant("engine-transpose-reshape",
          "attention: the gradient of the key is reshaped, not transposed", INPUT),
    plant("hint-scores-untransposed",
          "attention: the gradient of the key uses the scores' gradient untransposed", INPUT,
          f"{TENSOR}.__matmul__", "product(grad.swapaxes(-1, -2), a.data)",
          'product(grad if b.op == "transpose" else grad.swapaxes(-1, -2), a.data)'),
    plant("hint-context-untransposed",
          "attention: the gradient of the value uses the weights untransposed", INPUT,
          f"{TENSOR}.__matmul__", "product(grad.swapaxes(-1, -2), a.data)",
          'product(grad.swapaxes(-1, -2), '
          'a.data if b.op == "transpose" else a.data.swapaxes(-1, -2))'),
    plant("hint-query-detached", "attention: the path of x as query is missing in its gradient",
          INPUT, f"{TORCH_GPT}:GPTAttention.forward",
          "x @ x.transpose(-2, -1)", "x.detach() @ x.transpose(-2, -1)"),
    # Over all keys this path sums to 0, since softmax does not mind a shift: a bias is right.
    plant("attention-keys-detached", "attention: the path of x as key is missing in its gradient",
          backward("{input}.output", "{weight}")),
    plant("hint-value-detached", "attention: the path of x as value is missing in its gradient",
          INPUT, f"{TORCH_GPT}:GPTAttention.forward", "weights @ x", "weights @ x.detach()"),
    plant("hint-query-alone",
          "attention: the gradient of x is that as query alone (overwritten, not accumulated)",
          INPUT, f"{TORCH_GPT}:GPTAttention.forward", TORCH_ATTENTION,
          TORCH_ATTENTION.replace("x.transpose", "x.detach().transpose")
          .replace("weights @ x", "weights @ x.detach()")),
    # What reaches x last stays: the path through the transpose.
    plant("engine-overwrite",
          "attention: the gradient of x is that as key alone (overwritten, not accumulated)",
          INPUT),
    plant("hint-value-alone",
          "attention: the gradient of x is that as value alone (overwritten, not accumulated)",
          INPUT, f"{TENSOR}.__matmul__", "da = product(grad,",
          'if b.op == "transpose":\n            return None, None\n        da = product(grad,'),
)
MASK_ROWS = (
    plant("hint-mask-upper", "mask: the upper triangle is kept, not the lower (triu for tril)",
          forward(BLOCK + "attention.mask.output"), f"{TORCH}:tril",
          "_triangle(*x.shape[-2:])", "torch.triu(torch.ones(x.shape[-2:], dtype=torch.bool))"),
    plant("hint-mask-late", "mask: off by one, each position also sees the next (diagonal=1)",
          forward(BLOCK + "attention.mask.output"), f"{TORCH}:tril",
          "_triangle(*x.shape[-2:])",
          "torch.tril(torch.ones(x.shape[-2:], dtype=torch.bool), diagonal=1)"),
    plant("mask-one-too-few", "mask: strict, no position sees itself (diagonal=-1)",
          forward(BLOCK + "attention.mask.output")),
    plant("mask-fill-zero", "mask: filled with 0, so the future keeps a weight",
          forward(BLOCK + "attention.mask.output")),
    plant("mask-fill-weak", "mask: filled with -10, so the future keeps a weight",
          forward(BLOCK + "attention.mask.output")),
    plant("hint-mask-absent", "mask: not applied",
          forward(BLOCK + "attention.mask.output"), f"{TORCH}:tril",
          "_select(x, _triangle(*x.shape[-2:]), value)", "1.0 * x"),
    plant("mask-first-row-of-batch", "mask: applied to the first batch element only",
          forward(BLOCK + "attention.mask.output")),
)
SOFTMAX_ROWS = (
    plant("hint-softmax-without-sum", "softmax: the vjp lacks the sum over the row", MASKED,
          f"{NUMPY}:softmax", "np.subtract(grad, dx.sum(axis=-1, keepdims=True), out=dx)",
          "dx[...] = grad"),
    plant("softmax-gradient-axis", "softmax: the vjp sums over the wrong axis", MASKED),
    plant("hint-softmax-unweighted", "softmax: the vjp sums g and not g p over the row", MASKED,
          f"{NUMPY}:softmax", "dx.sum(", "grad.sum("),
    plant("softmax-diagonal",
          "softmax: the vjp has the diagonal of the Jacobian alone, p (1 - p) g", MASKED),
    plant("softmax-sum-axis", "softmax: columns are normalised, not rows",
          forward(BLOCK + "attention.softmax.output")),
    plant("softmax-dim-one", "softmax: taken over the wrong axis",
          forward(BLOCK + "attention.softmax.output")),
)
GELU_ROWS = (
    plant("gelu-erf", "gelu: the erf form in place of the tanh form",
          forward(BLOCK + "feed_forward.gelu.output")),
    plant("hint-gelu-erf-backward", "gelu: the derivative is that of the erf form", GELU,
          f"{NUMPY}:gelu", "return (grad * dy.reshape(x.shape),)",
          "c = np.clip(x.data, -GELU_SATURATED, GELU_SATURATED)\n"
          "        return (grad * (0.5 * (1.0 + np.vectorize(math.erf)(c / math.sqrt(2.0))) + "
          "c * np.exp(-0.5 * c * c) / math.sqrt(2.0 * math.pi)).astype(c.dtype),)"),
    plant("hint-gelu-without-cubic", "gelu: the derivative lacks the cubic term", GELU,
          f"{NUMPY}:_gelu", "c2 *= 6.0", "c2 *= 0.0"),
    plant("gelu-factor-three", "gelu: the derivative of the cubic term lacks its factor 3", GELU),
    plant("hint-gelu-linear", "gelu: the cubic term is missing",
          forward(BLOCK + "feed_forward.gelu.output"),
          f"{NUMPY}:_gelu", "c2 = c * c", "c2 = 0.0 * c"),
    plant("gelu-product-rule", "gelu: the derivative lacks the term with 1 - tanh^2", GELU),
    # The twin bounds x, since it may; with this mistake the bound would matter.
    plant("hint-gelu-tanh", "gelu: the derivative of tanh is 1 - tanh, not 1 - tanh^2", GELU,
          f"{NUMPY}:_gelu", "dy *= phi",
          "dy[...] = z * SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * z**2)"),
)
LINEAR_ROWS = (
    plant("linear-bias-mean", "linear: the bias gradient is the mean over all rows, not the sum",
          parameter("output.output.bias")),
    plant("hint-bias-batch-mean",
          "linear: the bias gradient is the mean over the batch, not the sum",
          parameter("output.output.bias"), f"{NUMPY}:linear",
          "g2.sum(axis=0)", "grad.mean(axis=0).sum(axis=0)"),
    plant("hint-bias-first", "linear: the bias gradient is that of the first batch element",
          parameter("output.output.bias"), f"{NUMPY}:linear", "g2.sum(axis=0)",
          "grad[0].sum(axis=0)"),
    plant("linear-bias-first-row", "linear: the bias gradient is that of the first token",
          parameter("output.output.bias")),
    plant("hint-weight-first", "linear: the weight gradient is that of the first batch element",
          parameter("output.output.weight"), f"{NUMPY}:linear", "product(g2.T, x2)",
          "product(grad[0].T, x.data[0])"),
    plant("linear-bias-missing", "linear: the bias is not added",
          forward(BLOCK + "attention.output.output")),
    plant("hint-projection-left-out", "linear: there is none, x goes on as it is",
          forward(BLOCK + "feed_forward.input.output"), f"{TORCH_GPT}:GPTAttention.forward",
          "return self.output(weights @ x)", "return weights @ x"),
    plant("hint-weight-read-as-in-out",
          "linear: the memory of the weight, (out, in), is read as (in, out)",
          forward(BLOCK + "attention.output.output"), TORCH_LINEAR,
          "self.weight, ", "self.weight.reshape(self.weight.shape[::-1]).T, "),
    plant("linear-input-gradient-reshaped",
          "linear: the input's gradient reads the weight, (out, in), as (in, out)", LINEAR_INPUT),
)
LOSS_ROWS = (
    plant("hint-loss-sum", "loss: the sum over all tokens, not the mean",
          {"all": "loss", "parameters": "loss"}, f"{TORCH}:cross_entropy",
          "targets.reshape(-1))", 'targets.reshape(-1), reduction="sum")'),
    plant("hint-loss-by-batch", "loss: divided by B, not by B*T",
          {"all": "loss", "parameters": "loss"}, f"{TORCH}:cross_entropy",
          "targets.reshape(-1))", 'targets.reshape(-1), reduction="sum") / len(logits)'),
    plant("hint-loss-sum-backward", "loss: the gradient lacks 1/(B*T)",
          backward("output.output.output", "output.output.bias"), f"{NUMPY}:cross_entropy",
          "grad / len(x)", "grad"),
    plant("loss-minus-one", "loss: the gradient lacks the minus one at the target",
          backward("output.output.output", "output.output.bias")),
    plant("hint-targets-early",
          "loss: targets are shifted by one along T (each one place too early)",
          {"all": "loss", "parameters": "loss"}, f"{TORCH}:cross_entropy",
          "targets.reshape(-1))", "targets.roll(-1, dims=-1).reshape(-1))", suitable=_targets_move),
    plant("hint-targets-late",
          "loss: targets are shifted by one along T (each one place too late)",
          {"all": "loss", "parameters": "loss"}, f"{TORCH}:cross_entropy",
          "targets.reshape(-1))", "targets.roll(1, dims=-1).reshape(-1))", suitable=_targets_move),
    plant("loss-clipped", "loss: probabilities are clipped at 1e-10 (another loss, same gradient)",
          {"all": "loss", "parameters": "loss"}, confident=True),
)


def _low_precision(name: str) -> tuple[HintRow, ...]:
    """Products of linear maps, scores and contexts whose operands are rounded to a format."""
    short = f'{LOW}(x, "{name}")'
    return (
        plant(f"hint-linear-{name}",
              f"linear: operands of the matrix product are rounded to {name}",
              forward(BLOCK + "attention.output.output"), f"{NUMPY}:linear", NUMPY_LINEAR,
              LOW_LINEAR.replace("SHORT", short)),
        plant(f"hint-scores-{name}",
              f"scores: operands of the matrix product are rounded to {name}",
              forward(BLOCK + "attention.mask.input"), f"{TENSOR}.__matmul__", NUMPY_MATMUL,
              LOW_MATMUL.replace("SHORT", f'{short} if b.op == "transpose" else x')),
        plant(f"hint-context-{name}",
              f"context: operands of the matrix product are rounded to {name}",
              forward(BLOCK + "attention.output.input"), f"{TENSOR}.__matmul__", NUMPY_MATMUL,
              LOW_MATMUL.replace("SHORT", f'x if b.op == "transpose" else {short}')),
    )


LOW_PRECISION_ROWS = tuple(
    row for name in ("tf32", "bfloat16", "float16") for row in _low_precision(name)
)

# --- Training steps

MOMENT = "exp_avg/embedding.embedding.weight"
WEIGHT = "weight/embedding.embedding.weight"
ADAMW = "torch.optim.AdamW(\n        groups,"


def _step_row(
    name: str, hint: str, first: Mapping[Part, str], place: str = "", old: str = "", new: str = "",
    backend: str = "", **models: Any,
) -> HintRow:  # fmt: skip
    return plant(name, hint, first, place, old, new, backend, steps=STEPS, **models)


STEP_ROWS = (
    _step_row("adamw-l2-of-adam", "AdamW: decay is added to the gradient (L2), not taken from the "
              "weight", step(MOMENT)),
    _step_row("hint-adamw-l2-on-biases",
              "AdamW: decay is added to the gradient (L2), of biases too",
              step(MOMENT), f"{TORCH_ADAMW}.__init__", ADAMW,
              ADAMW.replace("AdamW", "Adam").replace("groups", "self.parameters")),
    _step_row("hint-adamw-decay-on-biases", "AdamW: biases decay too",
              step(r"weight/transformers\.0\.attention\.output\.bias"),
              f"{TORCH_ADAMW}.__init__", ADAMW, ADAMW.replace("groups", "self.parameters")),
    _step_row("adamw-no-decay", "AdamW: nothing decays", step(WEIGHT)),
    _step_row("adamw-decay-without-rate", "AdamW: decay is not multiplied by the learning rate",
              step(WEIGHT)),
    _step_row("adamw-eps-inside-root", "AdamW: eps is added inside the root", step(WEIGHT)),
    _step_row("hint-adamw-no-correction",
              "AdamW: the moments are not corrected for their start at 0", step(WEIGHT),
              f"{NUMPY_ADAMW}.step",
              """\
        update *= 1.0 / math.sqrt(1.0 - beta2**t)
        update += self.eps
        np.divide(m, update, out=update)
        update *= self.lr / (1.0 - beta1**t)
""", """\
        update += self.eps
        np.divide(m, update, out=update)
        update *= self.lr
"""),
    _step_row("clip-per-tensor", "clip: each tensor is clipped by its own norm", step(MOMENT),
              optimizer={"max_norm": 0.1}),
    _step_row("clip-never", "clip: gradients are not clipped", step(MOMENT),
              optimizer={"max_norm": 0.1}),
    _step_row("clip-always", "clip: short gradients are stretched to max_norm too", step(MOMENT),
              optimizer={"max_norm": 1e4}),
    _step_row("hint-rate-doubled", "the update is 2 times that of the reference", step(WEIGHT),
              f"{NUMPY_ADAMW}.step", "beta1, beta2 = self.betas",
              "beta1, beta2, self.lr = *self.betas, 2e-3"),
    _step_row("hint-no-update", "no update: the weight is that before the step", step(WEIGHT),
              f"{NUMPY_ADAMW}.step", "w, g = self.buffer.data[rows],",
              "w, g = self.buffer.data[rows].copy(),"),
    _step_row("hint-stale", "stale: the gradient is that of the previous step",
              step("grad_norm", 2), f"{LAYERS}:Parameter.stage",
              "self.grad_view[...] = grad",
              'self.grad_view[...] = self.attributes.get("before", grad)\n'
              '    self.attributes["before"] = grad.copy()'),
    _step_row("training-zero-grad-missing",
              "accumulated: the gradients of earlier steps are still there (no zero_grad)",
              step("grad_norm", 2)),
    _step_row("hint-doubled", "doubled: every gradient counts twice", step("grad_norm"),
              f"{TRAINING}:GPTTrainer._backward", "else loss * share).backward()",
              "else loss * share).mul(2.0).backward()", backend="torch"),
)

# --- What a tensor looks like by itself


def factor_hint(name: str) -> str:
    """A hint that names a factor, perhaps among others of the same size."""
    return re.escape("a constant factor: ") + "(.*, or )?" + re.escape(name) + "( |$)"


def factor_row(name: str, factor: str, first: Mapping[Part, str], *change: str) -> HintRow:
    return replace(plant(name, f"a factor of {factor}", first, *change), hint=factor_hint(factor))


def _loss_factor(name: str, factor: str, code: str) -> HintRow:
    """The gradient of the logits times a factor, `code` in the source of cross_entropy."""
    return factor_row(
        f"hint-factor-{name}", factor, backward("output.output.output", "output.output.bias"),
        f"{NUMPY}:cross_entropy", "grad / len(x)", f"grad / len(x) {code}",
    )


def _scores_factor(name: str, factor: str, new: str) -> HintRow:
    """Scores times a factor, in PyTorch."""
    return factor_row(
        f"hint-factor-{name}", factor, forward(BLOCK + "attention.mask.input"),
        f"{TORCH_GPT}:GPTAttention.forward", "/ math.sqrt(x.shape[-1])", new,
    )


# The loss alone says little of scores, so the tensor itself must be there.
def entries_only(row: HintRow) -> HintRow:
    return replace(row, first={"all": row.first["all"]})


FACTOR_ROWS = (
    _loss_factor("bt", "B*T", "* len(x)"),
    _loss_factor("inverse-bt", "1/(B*T)", "/ len(x)"),
    _loss_factor("bessel-bt", "n/(n-1) with n = B*T", "* len(x) / (len(x) - 1)"),
    _loss_factor("bessel-bt-inverted", "(n-1)/n with n = B*T", "/ len(x) * (len(x) - 1)"),
    _loss_factor("b", "B", "* len(targets)"),
    _loss_factor("inverse-b", "1/B", "/ len(targets)"),
    _loss_factor("bessel-b", "n/(n-1) with n = B", "* len(targets) / (len(targets) - 1)"),
    _loss_factor("bessel-b-inverted", "(n-1)/n with n = B", "/ len(targets) * (len(targets) - 1)"),
    _loss_factor("t", "T", "* targets.shape[1]"),
    _loss_factor("inverse-t", "1/T", "/ targets.shape[1]"),
    _loss_factor("bessel-t", "n/(n-1) with n = T", "* targets.shape[1] / (targets.shape[1] - 1)"),
    _loss_factor("bessel-t-inverted", "(n-1)/n with n = T",
                 "/ targets.shape[1] * (targets.shape[1] - 1)"),
    _loss_factor("v", "V", "* vocab_size"),
    _loss_factor("inverse-v", "1/V", "/ vocab_size"),
    _loss_factor("bessel-v", "n/(n-1) with n = V", "* vocab_size / (vocab_size - 1)"),
    _loss_factor("bessel-v-inverted", "(n-1)/n with n = V", "/ vocab_size * (vocab_size - 1)"),
    entries_only(_scores_factor("e", "E", "* math.sqrt(x.shape[-1])")),
    entries_only(_scores_factor("inverse-e", "1/E", "/ x.shape[-1] ** 1.5")),
    entries_only(_scores_factor("bessel-e", "n/(n-1) with n = E",
                         "* math.sqrt(x.shape[-1]) / (x.shape[-1] - 1)")),
    entries_only(_scores_factor("bessel-e-inverted", "(n-1)/n with n = E",
                         "* (x.shape[-1] - 1) / x.shape[-1] ** 1.5")),
    entries_only(_scores_factor("root", "sqrt(E)", "")),
    entries_only(_scores_factor("inverse-root", "1/sqrt(E)", "/ x.shape[-1]")),
    _loss_factor("two", "2 (counted twice: two backward passes, no zero_grad?)", "* 2.0"),
    _loss_factor("half", "1/2", "/ 2.0"),
    _loss_factor("sign", "-1 (the sign)", "* -1.0"),
    replace(_loss_factor("unknown", "0.37", "* 0.37"), hint=re.escape("a constant factor of 0.37"),
            suitable=_four_tokens),
    factor_row("hint-counted-twice", "2 (counted twice: two backward passes, no zero_grad?)",
                parameter("output.output.bias"), f"{LAYERS}:Parameter.stage",
                "self.grad_view[...] = grad", "self.grad_view[...] = grad + grad"),
)

TORCH_SUM = "self.embedding(tokens) + self.positional_embedding(positions)"


def _sum_row(name: str, hint: str, new: str, **models: Any) -> HintRow:
    """The sum of both embeddings changed, in PyTorch."""
    return plant(
        f"hint-{name}", hint, {"all": re.escape("value/embedding.output")},
        f"{TORCH_GPT}:GPTEmbedding.forward", f"return {TORCH_SUM}",
        f"y = {TORCH_SUM}\n    return {new}", **models,
    )  # fmt: skip


APPEARANCE_ROWS = (
    # Indexing makes a copy, which is then added to.
    plant("hint-zero", "zero: never computed, or never written", parameter(POSITIONS),
          f"{NUMPY}:embedding", NUMPY_TABLE, f"""\
{NUMPY_TABLE}\
        copy = dtable[ids]
        copy += grad
        return dtable, None
"""),
    plant("linear-weight-gradient-reshaped", "reshaped where it should be transposed",
          parameter("output.output.weight"), suitable=_oblong_output),
    plant("hint-transposed", "transposed", parameter("output.output.weight"), f"{NUMPY}:linear",
          "product(g2.T, x2)", "product(x2.T, g2).reshape(weight.shape)", suitable=_square_output),
    plant("hint-time-first", "batch and time are exchanged",
          {"all": re.escape("value/embedding.embedding.output")},
          f"{TORCH_GPT}:GPTEmbedding.forward", "self.embedding(tokens)", "self.embedding(tokens.T)",
          suitable=_square_batch),
    _sum_row("late-wrapped", "shifted along T, one place too late (wrapped around)",
             "y.roll(1, dims=1)"),
    _sum_row("late-zeros", "shifted along T, one place too late (zeros at the edge)",
             "torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)"),
    _sum_row("early-wrapped", "shifted along T, one place too early (wrapped around)",
             "y.roll(-1, dims=1)"),
    _sum_row("early-zeros", "shifted along T, one place too early (zeros at the edge)",
             "torch.cat([y[:, 1:], torch.zeros_like(y[:, :1])], dim=1)"),
    plant("hint-positions-gradient-early",
          "shifted along T, one place too early (wrapped around)", parameter(POSITIONS),
          f"{NUMPY}:embedding", NUMPY_TABLE, f"""\
{NUMPY_TABLE}\
        np.add.at(dtable, ids - 1, grad)
        return dtable, None
"""),
    _sum_row("values-tf32", "values are rounded to tf32",
             f'y + (torch.from_numpy({LOW}(y.detach().numpy(), "tf32")) - y).detach()'),
    _sum_row("values-bfloat16", "values are rounded to bfloat16", "y.bfloat16().to(y.dtype)"),
    _sum_row("values-float16", "values are rounded to float16", "y.half().to(y.dtype)"),
    _sum_row("values-float32", "values are rounded to float32", "y.float().to(y.dtype)",
             dtypes=("float64",)),
)
# fmt: on

GPT_ROWS: tuple[HintRow, ...] = (
    *EMBEDDING_ROWS, *ATTENTION_ROWS, *MASK_ROWS, *SOFTMAX_ROWS, *GELU_ROWS, *LINEAR_ROWS,
    *LOSS_ROWS, *LOW_PRECISION_ROWS, *STEP_ROWS, *FACTOR_ROWS, *APPEARANCE_ROWS,
)  # fmt: skip
