"""What float32 makes of AdamW, part by part; first of its constants, apart from all results.

Both backends multiply float32 moments by b2 = 0.999 and squared gradients by 1 - b2 = 0.001, each
rounded to float32 by itself. 0.999 becomes 0.99900001287, 0.001 stays within 5e-11, and the sum is
1 + 1.3e-8: the second moment of a steady gradient settles 1.3e-5 too high. Such an error always
has the same sign, so that no random noise stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gpt_parity.backends import build_model, load_backend
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.lockstep import Runner
from numpy_impl.optim import AdamWOptimizer

PARTS = ("constants", "weights", "exp_avg", "exp_avg_sq", "gradients")


class Rounded(AdamWOptimizer):
    """AdamW of float64 parameters with some of its parts as float32 would hold them.

    `parts` of PARTS: arrays are rounded to nearest, gradients before each step, the others after
    it. With none of them it is its parent to rounding. Raises what the parent raises.
    """

    parts: frozenset[str] = frozenset(PARTS)

    def step(self) -> None:
        self._gather()
        beta1, beta2 = self.betas
        constant = _rounded if "constants" in self.parts else float
        if "gradients" in self.parts:
            _round(self.buffer.grad)
        for rows, t, decays in self._runs():
            w, g = self.buffer.data[rows], self.buffer.grad[rows]
            m, v = self.exp_avg[rows], self.exp_avg_sq[rows]
            if decays:
                w *= constant(1.0 - self.lr * self.weight_decay)
            m *= constant(beta1)
            m += constant(1.0 - beta1) * g
            v *= constant(beta2)
            v += constant(1.0 - beta2) * (g * g)
            root = np.sqrt(v) * constant(1.0 / math.sqrt(1.0 - beta2**t)) + constant(self.eps)
            w -= constant(self.lr / (1.0 - beta1**t)) * (m / root)
        for part, array in (
            ("weights", self.buffer.data), ("exp_avg", self.exp_avg),
            ("exp_avg_sq", self.exp_avg_sq),
        ):  # fmt: skip
            if part in self.parts:
                _round(array)


def _rounded(x: float) -> float:
    return float(np.float32(x))


def _round(array: np.ndarray) -> None:
    array[...] = array.astype(np.float32)


def with_float32(runner: Runner, parts: Iterable[str]) -> None:
    """Let a float64 NumPy runner that has not begun go on with these parts in float32."""
    old = runner.optimizer
    runner.optimizer = runner.trainer.optimizer = Rounded(
        old.parameters, old.lr, old.betas, old.eps, old.weight_decay
    )
    runner.optimizer.parts = frozenset(parts)


def expected_excess(steps: int, beta2: float = 0.999) -> float:
    """Relative error of the second moment after `steps` steps, from the rounded constants alone.

    v_t = c (1 - b^t) / (1 - b) E[g^2] with b and c as float32 holds them, over 1 - beta2^t.
    """
    b, c = _rounded(beta2), _rounded(1.0 - beta2)
    return c * (1.0 - b**steps) / (1.0 - b) / (1.0 - beta2**steps) - 1.0


SMALL = GPTConfig(vocab_size=16, context_size=16, embedding_size=16, blocks=1)


def measured_excess(backend: str, steps: int, seed: int = 0) -> tuple[float, float]:
    """Mean of v in float32 over v in float64, minus 1, and its standard error over the elements.

    Each gets the same normal gradients, which float32 represents, for `steps` steps.
    """
    package = load_backend(backend)
    moments = {}
    for dtype in ("float32", "float64"):
        rng = np.random.default_rng(seed)
        model = build_model(backend, SMALL, dtype=dtype)
        optimizer = package.AdamWOptimizer(model.parameters(), lr=0.0)
        for _ in range(steps):
            for parameter in optimizer.parameters:
                g = rng.standard_normal(tuple(parameter.shape), dtype=np.float32).astype(dtype)
                parameter.grad = parameter.new_tensor(g) if backend == "torch" else g
            optimizer.step()
        state = optimizer.state()["exp_avg_sq"]
        moments[dtype] = np.concatenate([v.reshape(-1).astype(np.float64) for v in state])
    ratio = moments["float32"] / moments["float64"]
    return float(ratio.mean() - 1.0), float(ratio.std(ddof=1) / math.sqrt(ratio.size))
