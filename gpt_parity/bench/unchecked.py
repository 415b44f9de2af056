"""The loss of a PyTorch twin without the twin's checks of its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gpt_parity.backends import load_backend
from gpt_parity.bench.common import is_gpt2
from gpt_parity.model_config import Preset

Loss = Callable[[Any, Any], Any]


def unchecked_loss(model: Any, size: Preset, fused_attention: bool) -> Loss:
    """The loss of a PyTorch twin as a function of two tensors of ids, (B, T) each.

    fused_attention: by `scaled_dot_product_attention` in place of the twin's operations.
    """
    load_backend("torch")
    import torch
    import torch.nn.functional as F

    future = ~torch.ones(size.length, size.length, dtype=torch.bool).tril()

    def attend(q: Any, k: Any, v: Any) -> Any:
        if fused_attention:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(future, size.model.mask_value).softmax(-1) @ v

    def one_head(x: Any) -> Any:
        head = x.unsqueeze(1) if fused_attention else x  # it wants an axis of heads
        return attend(head, head, head).reshape(x.shape)

    def several_heads(x: Any, attention: Any) -> Any:
        batch, length, width = x.shape
        qkv = affine(x, attention.input).view(batch, length, 3, attention.heads, -1)
        context = attend(*(part.transpose(1, 2) for part in qkv.unbind(2)))
        return context.transpose(1, 2).reshape(batch, length, width)

    def affine(x: Any, layer: Any) -> Any:
        return F.linear(x, layer.weight, layer.bias)

    def norm(x: Any, layer: Any) -> Any:
        return F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)

    def feed_forward(x: Any, layers: Any) -> Any:
        return affine(F.gelu(affine(x, layers.input), approximate="tanh"), layers.output)

    def embed(tokens: Any) -> Any:
        x = F.embedding(tokens, model.embedding.embedding.weight)
        return x + model.embedding.positional_embedding.weight[: tokens.shape[1]]

    def of_text_model(tokens: Any, targets: Any) -> Any:
        x = embed(tokens)
        for block in model.transformers:
            x = feed_forward(affine(one_head(x), block.attention.output), block.feed_forward)
        return cross_entropy(affine(x, model.output.output), targets)

    def of_gpt2(tokens: Any, targets: Any) -> Any:
        x = embed(tokens)
        for block in model.transformers:
            context = several_heads(norm(x, block.attention_norm), block.attention)
            x = x + affine(context, block.attention.output)
            x = x + feed_forward(norm(x, block.feed_forward_norm), block.feed_forward)
        logits = F.linear(norm(x, model.norm), model.embedding.embedding.weight)
        return cross_entropy(logits, targets)

    def cross_entropy(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return of_gpt2 if is_gpt2(size) else of_text_model
