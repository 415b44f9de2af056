"""AdamW of `torch.optim` under the interface of the NumPy twin."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class AdamWOptimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,
    w <- (1 - lr decay) w - lr / (1 - b1^t)  m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    Only parameters of two or more axes decay. A parameter without a gradient is left alone, and
    its step count too. Raises ValueError for hyperparameters out of range.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        betas = float(betas[0]), float(betas[1])  # PyTorch refuses numbers of NumPy here
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("parameters: got none, needed at least one")
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @lr.setter
    def lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad()

    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = True) -> float:
        """Scale all gradients by min(1, max_norm / (norm + 1e-6)); returns the norm before.

        `norm` is the L2 norm of all gradients together. A norm that is not finite raises
        FloatingPointError and leaves the gradients alone, unless `error_if_nonfinite` is False.
        """
        if not max_norm > 0.0:
            raise ValueError(f"max_norm: got {max_norm}, needed a positive number")
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # Not left to PyTorch, whose RuntimeError may also be that of a lost connection.
        norm = nn.utils.get_total_norm(gradients)
        total = _whole(norm).item()
        if error_if_nonfinite and not math.isfinite(total):
            raise FloatingPointError("gradient norm: got nan or inf, needed a finite number")
        if max_norm < math.inf:  # else the factor would be inf before it is cut to 1
            nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return total

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        self.optimizer.step()
        # A fused step leaves the version counters alone, and autograd would not notice that a
        # graph built before it holds other weights now.
        changed = [p for p in self.parameters if p.grad is not None]
        torch.autograd.graph.increment_version(changed)

    def state(self) -> dict[str, list[Any]]:
        """Copies of both moments, and the step counts, in the order of the parameters."""
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]

        def parts(name: str) -> list[Any]:
            return [
                _whole(s.get(name, torch.zeros_like(p)).detach()).cpu().numpy().copy()
                for p, s in zip(self.parameters, states, strict=True)
            ]

        return {
            "exp_avg": parts("exp_avg"),
            "exp_avg_sq": parts("exp_avg_sq"),
            "steps": [int(s.get("step", 0)) for s in states],
        }

    def load_state(self, state: dict[str, list[Any]]) -> None:
        """Copy in what `state` of either backend returned.

        Raises ValueError, before anything changed, where it does not fit these parameters.
        """
        check_state(state, [tuple(p.shape) for p in self.parameters])
        for i, p in enumerate(self.parameters):
            self.optimizer.state[p] = {
                "step": torch.tensor(float(state["steps"][i]), device=p.device),
                "exp_avg": _like(p, torch.tensor(state["exp_avg"][i], dtype=p.dtype)),
                "exp_avg_sq": _like(p, torch.tensor(state["exp_avg_sq"][i], dtype=p.dtype)),
            }


def _whole(x: Tensor) -> Tensor:
    """A tensor that is divided among processes as one; they all have to ask."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _like(p: Tensor, x: Tensor) -> Tensor:
    """x where the parameter is: on its device, and divided among processes as it is."""
    x = x.to(p.device)
    if not hasattr(p, "full_tensor"):
        return x
    from torch.distributed.tensor import distribute_tensor  # takes a second to import

    return distribute_tensor(x, p.device_mesh, p.placements)


def check_state(state: dict[str, list[Any]], shapes: list[tuple[int, ...]]) -> None:
    """Raise ValueError unless `state` has moments of these shapes and as many step counts."""
    for name in ("exp_avg", "exp_avg_sq", "steps"):
        if len(state[name]) != len(shapes):
            raise ValueError(f"{name}: got {len(state[name])}, needed {len(shapes)}")
    for name in ("exp_avg", "exp_avg_sq"):
        for i, (array, shape) in enumerate(zip(state[name], shapes, strict=True)):
            if np.shape(array) != shape:
                raise ValueError(f"{name} {i}: got shape {np.shape(array)}, needed {shape}")
    for i, count in enumerate(state["steps"]):
        if int(count) != count or count < 0:
            raise ValueError(f"steps {i}: got {count}, needed an integer of at least 0")
