"""AdamW on the flat buffers of a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from numpy_impl import tape
from numpy_impl.layers import Parameter, ParameterBuffer

# Elements that are updated at a time: five arrays of them stay in a processor's cache.
BLOCK = 2**17


class AdamWOptimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,
    w <- (1 - lr decay) w - lr / (1 - b1^t)  m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    Only parameters of two or more axes decay. A parameter without a gradient is left alone, and
    its step count too, as in PyTorch. Raises ValueError for hyperparameters out of range.
    """

    def __init__(
        self, parameters: Iterable[Parameter], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        check_hyperparameters(lr, betas, eps, weight_decay)
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("parameters: got none, needed at least one")
        # A NumPy number would take float32 through the arithmetic of its own dtype.
        self.betas = float(betas[0]), float(betas[1])
        self.lr, self.eps, self.weight_decay = float(lr), float(eps), float(weight_decay)
        buffer = self.parameters[0].buffer
        same = [id(p) for p in buffer.parameters] == [id(p) for p in self.parameters]
        self.buffer = buffer if same else ParameterBuffer(self.parameters)
        self.exp_avg = np.zeros_like(self.buffer.data)
        self.exp_avg_sq = np.zeros_like(self.buffer.data)
        self.steps = [0] * len(self.parameters)

    def zero_grad(self) -> None:
        """Forget all gradients; the next backward pass overwrites the flat gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = True) -> float:
        """Scale all gradients by min(1, max_norm / (norm + 1e-6)); returns the norm before.

        `norm` is the L2 norm of all gradients together. A norm that is not finite raises
        FloatingPointError and leaves the gradients alone, unless `error_if_nonfinite` is False.
        """
        if not max_norm > 0.0:
            raise ValueError(f"max_norm: got {max_norm}, needed a positive number")
        self._gather()
        grad = self.buffer.grad
        # In one float32 sum over millions, small squares would be lost beside the total.
        blocks = (grad[start : start + BLOCK] for start in range(0, grad.size, BLOCK))
        with np.errstate(over="ignore"):  # judged in the next line
            norm = math.sqrt(sum(float(np.dot(block, block)) for block in blocks))
        if error_if_nonfinite and not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm: got {norm}, needed a finite number")
        max_norm = float(max_norm)  # as in `__init__`
        scale = max_norm / (norm + 1e-6)
        if not scale >= 1.0:  # NaN too
            with np.errstate(invalid="ignore"):  # 0 * inf is NaN, as in PyTorch
                self.buffer.grad *= scale
        return norm

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        self._gather()
        written = tape.count_write()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.written = written
        self.lr = float(self.lr)  # as in `__init__`
        beta1, beta2 = self.betas
        for rows, t, decays in self._runs():
            w, g = self.buffer.data[rows], self.buffer.grad[rows]
            m, v = self.exp_avg[rows], self.exp_avg_sq[rows]
            if decays:
                w *= 1.0 - self.lr * self.weight_decay
            m *= beta1
            update = np.multiply(g, 1.0 - beta1)
            m += update
            v *= beta2
            np.multiply(g, g, out=update)
            update *= 1.0 - beta2
            v += update
            np.sqrt(v, out=update)
            update *= 1.0 / math.sqrt(1.0 - beta2**t)
            update += self.eps
            np.divide(m, update, out=update)
            update *= self.lr / (1.0 - beta1**t)
            w -= update

    def _gather(self) -> None:
        """Bring gradients that were assigned from outside into the flat buffer."""
        for parameter, rows in zip(self.parameters, self.buffer.slices, strict=True):
            if parameter.buffer is not self.buffer or parameter.data.base is not self.buffer.data:
                raise RuntimeError(
                    "optimizer: a parameter's memory was replaced since (assign with data[...] =)"
                )
            if parameter.grad is None:
                self.buffer.grad[rows] = 0.0
            elif parameter.grad is not parameter.grad_view:
                parameter.grad_view[...] = parameter.grad
                parameter.grad = parameter.grad_view

    def _runs(self) -> Iterable[tuple[slice, int, bool]]:
        """Neighbours in the buffer that are updated alike: rows, step count, whether they decay.

        In blocks of at most BLOCK elements.
        """
        order = sorted(range(len(self.parameters)), key=lambda i: self.buffer.slices[i].start)

        def alike(i: int) -> tuple[bool, int, bool]:
            parameter = self.parameters[i]
            return parameter.grad is not None, self.steps[i], parameter.ndim >= 2

        for (has_grad, steps, decays), group in itertools.groupby(order, key=alike):
            if has_grad:
                run = list(group)
                for i in run:
                    self.steps[i] = steps + 1
                end = self.buffer.slices[run[-1]].stop
                for start in range(self.buffer.slices[run[0]].start, end, BLOCK):
                    yield slice(start, min(start + BLOCK, end)), steps + 1, decays

    def state(self) -> dict[str, list[Any]]:
        """Copies of both moments, and the step counts, in the order of the parameters."""

        def parts(flat: np.ndarray) -> list[np.ndarray]:
            return [
                flat[rows].reshape(p.shape).copy()
                for p, rows in zip(self.parameters, self.buffer.slices, strict=True)
            ]

        return {
            "exp_avg": parts(self.exp_avg),
            "exp_avg_sq": parts(self.exp_avg_sq),
            "steps": list(self.steps),
        }

    def load_state(self, state: dict[str, list[Any]]) -> None:
        """Copy in what `state` of either backend returned.

        Raises ValueError, before anything changed, where it does not fit these parameters.
        """
        check_state(state, [p.shape for p in self.parameters])
        for name, flat in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            for rows, array in zip(self.buffer.slices, state[name], strict=True):
                flat[rows] = np.asarray(array).reshape(-1)
        self.steps = [int(t) for t in state["steps"]]


def check_hyperparameters(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Raise ValueError for a hyperparameter outside its range."""
    if not (math.isfinite(lr) and lr >= 0.0):
        raise ValueError(f"lr: got {lr}, needed a finite number of at least 0")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas: got {betas}, needed numbers in [0, 1)")
    if not (math.isfinite(eps) and eps >= 0.0):
        raise ValueError(f"eps: got {eps}, needed a finite number of at least 0")
    if not (math.isfinite(weight_decay) and weight_decay >= 0.0):
        raise ValueError(f"weight_decay: got {weight_decay}, needed a finite number of at least 0")


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
