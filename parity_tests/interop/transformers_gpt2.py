"""GPT-2 of the library transformers with random weights, and its weights by the project's names.

The names are translated here by hand, and not by the code that imports such folders.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as tF

from gpt_parity.model_config import GPT2Config

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason='transformers is not installed: pip install -e ".[interop]"',
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and of the batch it is given."""

    vocab_size: int
    context_size: int
    embedding_size: int
    blocks: int
    heads: int
    batch_size: int
    length: int

    @property
    def config(self) -> GPT2Config:
        sizes = (self.vocab_size, self.context_size, self.embedding_size, self.blocks)
        return GPT2Config(*sizes, heads=self.heads)

    def batch(self) -> np.ndarray:
        """Tokens and targets, (2, B, T) int64."""
        rng = np.random.default_rng(7)
        return rng.integers(0, self.vocab_size, (2, self.batch_size, self.length))


SHAPES = {
    "tiny": Shape(5, 4, 4, 1, 2, 2, 4),
    "distinct sizes": Shape(13, 7, 12, 2, 3, 5, 6),
    "one head": Shape(11, 6, 10, 2, 1, 3, 6),
    "a head for each dimension": Shape(11, 6, 8, 2, 8, 3, 6),
    "shorter than the context": Shape(17, 32, 12, 2, 4, 2, 3),
    "one position": Shape(9, 5, 6, 2, 2, 3, 1),
    "wide": Shape(65, 16, 192, 1, 6, 2, 16),
    "baby": Shape(65, 64, 128, 4, 4, 2, 64),
}


def library() -> Any:
    """The library, offline and silent; importing it takes seconds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def hf_model(shape: Shape, dtype: str, attention: str = "eager", seed: int = 3, **options: Any):
    """A GPT2LMHeadModel without dropout, every weight random and exact in float32.

    Biases are not zero and norms around one, so that each of them matters.
    """
    transformers = library()
    config = transformers.GPT2Config(
        **{
            "vocab_size": shape.vocab_size, "n_positions": shape.context_size,
            "n_embd": shape.embedding_size, "n_layer": shape.blocks, "n_head": shape.heads,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None,
            "eos_token_id": None, "attn_implementation": attention, **options,
        }
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # what it draws is written over
        model = transformers.GPT2LMHeadModel(config)
    rng = np.random.default_rng(seed)
    model = model.to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = tuple(parameter.shape)
            scale = size[0] ** -0.5 if ".c_" in name and len(size) == 2 else 0.3
            values = scale * rng.standard_normal(size) + (".ln_" in name and name[-6:] == "weight")
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return model.eval()


LAYERS = {
    "ln_1": "attention_norm", "attn.c_attn": "attention.input", "attn.c_proj": "attention.output",
    "ln_2": "feed_forward_norm", "mlp.c_fc": "feed_forward.input",
    "mlp.c_proj": "feed_forward.output",
}  # fmt: skip
ENDS = {
    "wte.weight": "embedding.embedding.weight",
    "wpe.weight": "embedding.positional_embedding.weight",
    "ln_f.weight": "norm.weight", "ln_f.bias": "norm.bias",
}  # fmt: skip


def our_name(theirs: str) -> tuple[str, bool]:
    """The project's name of a weight, and whether it is transposed there."""
    name = theirs.removeprefix("transformer.")
    if name in ENDS:
        return ENDS[name], False
    _, block, rest = name.split(".", 2)
    layer, kind = rest.rsplit(".", 1)
    return f"transformers.{block}.{LAYERS[layer]}.{kind}", kind == "weight" and ".c_" in rest


def ours(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights or gradients by their names there, by the project's names and in its shapes."""
    named = {}
    for theirs, tensor in arrays.items():
        name, transposed = our_name(theirs)
        array = tensor.detach().numpy()
        named[name] = np.array(array.T if transposed else array, order="C")
    return named


@dataclass(frozen=True)
class Pass:
    """One pass there: the loss, values by the names of a trace, gradients of the weights."""

    loss: np.ndarray
    values: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


def run(model: Any, shape: Shape) -> Pass:
    """Forward and backward of the library, with its own loss where that keeps the dtype."""
    tokens, targets = map(torch.from_numpy, shape.batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model(tokens, labels=targets, shift_labels=targets, output_hidden_states=True)
    loss = out.loss
    if out.logits.dtype == torch.float64:  # the library's loss is of float32 then
        loss = tF.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    loss.backward()
    hidden = [tensor.detach().numpy() for tensor in out.hidden_states]
    values = {"embedding.output": hidden[0]}
    values |= {f"transformers.{i}.output": x for i, x in enumerate(hidden[1:-1])}
    values |= {"norm.output": hidden[-1], "output": out.logits.detach().numpy()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Pass(loss.detach().numpy(), values, ours(gradients))
