"""A GPT-2 in torch functions, on parameters as nanoGPT, transformers and llm.c hold them.

It does not import the project: names, layouts and padding are written down here once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
# What llm.c calls a part of a block, without the w or b.
STACKS = {
    "ln1": "ln_1", "qkv": "attn.c_attn", "attproj": "attn.c_proj", "ln2": "ln_2", "fc": "mlp.c_fc",
    "fcproj": "mlp.c_proj",
}  # fmt: skip


def linear(x: torch.Tensor, p: Tensors, name: str, style: str) -> torch.Tensor:
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    return x @ weight + bias if style == "hf" else F.linear(x, weight, bias)


def logits(p: Tensors, tokens: torch.Tensor, heads: int, style: str) -> torch.Tensor:
    length = tokens.shape[1]
    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][:length]
    width = x.shape[-1]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (width,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    block = 0
    while f"transformer.h.{block}.ln_1.weight" in p:
        name = f"transformer.h.{block}"
        qkv = linear(norm(x, f"{name}.ln_1"), p, f"{name}.attn.c_attn", style)
        q, k, v = (
            part.unflatten(-1, (heads, width // heads)).transpose(1, 2)
            for part in qkv.split(width, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // heads)
        future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        context = torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v
        merged = context.transpose(1, 2).flatten(-2)
        x = x + linear(merged, p, f"{name}.attn.c_proj", style)
        hidden = linear(norm(x, f"{name}.ln_2"), p, f"{name}.mlp.c_fc", style)
        x = x + linear(F.gelu(hidden, approximate="tanh"), p, f"{name}.mlp.c_proj", style)
        block += 1
    return norm(x, "transformer.ln_f") @ p["transformer.wte.weight"].T


def from_stacks(stacks: Tensors) -> Tensors:
    """Of llm.c's sixteen arrays, rows of zeros included, what nanoGPT would hold."""
    p = {"transformer.wte.weight": stacks["wte"], "transformer.wpe.weight": stacks["wpe"]}
    for kind in ("weight", "bias"):
        p[f"transformer.ln_f.{kind}"] = stacks[f"lnf{kind[0]}"]
        for theirs, layer in STACKS.items():
            for block, array in enumerate(stacks[theirs + kind[0]]):
                p[f"transformer.h.{block}.{layer}.{kind}"] = array
    return p


def run(
    arrays: Mapping[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray, heads: int,
    style: str, vocab_size: int | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """`logits`, `loss` and the gradients of all arrays by their own names.

    vocab_size: V, where the embedding has more rows; the logits have as many columns then.
    """
    leaves = {
        name: torch.tensor(array, requires_grad=True)
        for name, array in arrays.items() if name != "lm_head.weight"
    }  # fmt: skip
    p = from_stacks(leaves) if style == "llm.c" else leaves
    out = logits(p, torch.tensor(tokens), heads, style)
    loss = F.cross_entropy(out[..., :vocab_size].flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    found = {"logits": out.detach().numpy(), "loss": loss.detach().numpy()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[name] = leaf.grad.numpy()
    return found
