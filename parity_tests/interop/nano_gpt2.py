"""A GPT-2 as a module of PyTorch with nanoGPT's names, which does not import the project."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, True
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.c_proj(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.attn, self.mlp = Attention(width, heads, bias), FeedForward(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """(logits, loss) of tokens and targets (B, T), with one table at both ends."""

    def __init__(self, vocab: int, context: int, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        layers = {
            "wte": nn.Embedding(vocab, width),
            "wpe": nn.Embedding(context, width),
            "h": nn.ModuleList(Block(width, heads, bias) for _ in range(2)),
            "ln_f": nn.LayerNorm(width, bias=bias),
        }
        self.transformer = nn.ModuleDict(layers)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        layers = self.transformer
        x = layers["wte"](tokens) + layers["wpe"](torch.arange(tokens.shape[1]))
        for block in layers["h"]:
            x = block(x)
        logits = self.lm_head(layers["ln_f"](x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
