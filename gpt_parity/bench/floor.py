"""The floor: one training step written out by hand, without a tape, in memory that is reused.

It is what the engine is held against: the same operations and AdamW in float32, but every array is
made once, every result is written in place, and what the tape keeps apart is fused where NumPy
allows it. It knows nothing of the engine, so that it does not follow it; the benchmark runs it only
if the hash of this file is the one on record, so that it does not drift.
"""

from __future__ import annotations

import math

import numpy as np

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
CUBIC = 0.044715
GELU_BLOCK = 2**15
ADAMW_BLOCK = 2**16


class FloorStep:
    """Forward, backward, clipping and AdamW for one GPT; `step` returns the loss and the norm."""

    def __init__(
        self, weights: dict[str, np.ndarray], batch_size: int, length: int, *,
        lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, max_norm: float = 1.0,
    ) -> None:  # fmt: skip
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay
        self.max_norm, self.steps = max_norm, 0
        self.w, self.g, self.m, self.v = (
            np.zeros(sum(a.size for a in weights.values()), np.float32) for _ in range(4)
        )
        self.weight, self.grad = {}, {}
        end = self.decayed = 0
        for name in sorted(weights, key=lambda name: weights[name].ndim < 2):
            start, end = end, end + weights[name].size
            self.weight[name] = self.w[start:end].reshape(weights[name].shape)
            self.grad[name] = self.g[start:end].reshape(weights[name].shape)
            self.weight[name][...] = weights[name]
            if weights[name].ndim >= 2:
                self.decayed = end

        def arrays(count: int, *shape: int) -> list[np.ndarray]:
            return [np.empty(shape, np.float32) for _ in range(count)]

        vocab, e = self.weight["output.output.weight"].shape
        self.blocks = sum(name.endswith("attention.output.bias") for name in weights)
        b, t = batch_size, length
        n = b * t
        self.shape = b, t, e, n
        # What lives from forward to backward.
        self.x = arrays(self.blocks + 1, b, t, e)
        self.p = arrays(self.blocks, b, t, t)
        self.c = arrays(self.blocks, b, t, e)
        self.a = arrays(self.blocks, n, e)
        self.h = arrays(self.blocks, n, 4 * e)  # then the derivative of GELU in its place
        self.f = arrays(self.blocks, n, 4 * e)
        (self.z,) = arrays(1, n, vocab)
        # What serves each block in turn.
        (self.dx,) = arrays(1, b, t, e)
        self.d1, self.d2 = arrays(2, n, e)
        (self.dh,) = arrays(1, n, 4 * e)
        self.dp, self.symmetric = arrays(2, b, t, t)
        (self.row,) = arrays(1, b, t, 1)
        (self.logit_row,) = arrays(1, n, 1)
        self.gelu = arrays(2, GELU_BLOCK)
        (self.update,) = arrays(1, ADAMW_BLOCK)
        (self.onehot,) = arrays(1, vocab, n)
        self.bias = np.where(np.tri(t, dtype=bool), 0.0, -np.inf).astype(np.float32)
        self.rows = np.arange(n)

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        """One update on tokens and targets (B, T); returns loss and gradient norm."""
        loss = self.forward(tokens, targets)
        self.backward(tokens, targets)
        return loss, self.adamw()

    def forward(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        _, t, e, n = self.shape
        w, row = self.weight, self.row
        x = self.x[0]
        np.take(w["embedding.embedding.weight"], tokens, axis=0, out=x, mode="clip")
        x += w["embedding.positional_embedding.weight"][:t]
        for i in range(self.blocks):
            name, x, p, c = f"transformers.{i}", self.x[i], self.p[i], self.c[i]
            np.matmul(x, x.swapaxes(1, 2), out=p)
            p *= 1.0 / math.sqrt(e)
            p += self.bias
            np.maximum.reduce(p, axis=-1, keepdims=True, out=row)
            p -= row
            np.exp(p, out=p)
            np.add.reduce(p, axis=-1, keepdims=True, out=row)
            p /= row
            np.matmul(p, x, out=c)
            a, h, f, y = self.a[i], self.h[i], self.f[i], self.x[i + 1].reshape(n, e)
            np.matmul(c.reshape(n, e), w[f"{name}.attention.output.weight"].T, out=a)
            a += w[f"{name}.attention.output.bias"]
            np.matmul(a, w[f"{name}.feed_forward.input.weight"].T, out=h)
            h += w[f"{name}.feed_forward.input.bias"]
            self.gelu_and_derivative(h.reshape(-1), f.reshape(-1))
            np.matmul(f, w[f"{name}.feed_forward.output.weight"].T, out=y)
            y += w[f"{name}.feed_forward.output.bias"]
        z, row = self.z, self.logit_row
        np.matmul(self.x[-1].reshape(n, e), w["output.output.weight"].T, out=z)
        z += w["output.output.bias"]
        np.maximum.reduce(z, axis=-1, keepdims=True, out=row)
        z -= row
        picked = z[self.rows, targets.reshape(-1)]
        np.exp(z, out=z)
        np.add.reduce(z, axis=-1, keepdims=True, out=row)
        return float((np.log(row[:, 0]) - picked).sum() / n)

    def gelu_and_derivative(self, h: np.ndarray, f: np.ndarray) -> None:
        """f = h phi, and the derivative in place of h."""
        for start in range(0, h.size, GELU_BLOCK):
            z, phi = h[start : start + GELU_BLOCK], f[start : start + GELU_BLOCK]
            u, s = self.gelu[0][: z.size], self.gelu[1][: z.size]
            np.multiply(z, z, out=u)
            u *= SQRT_2_OVER_PI * CUBIC
            np.add(u, SQRT_2_OVER_PI, out=phi)
            phi *= z
            np.tanh(phi, out=phi)
            phi += 1.0
            phi *= 0.5
            u *= 6.0
            u += 2.0 * SQRT_2_OVER_PI
            u *= z
            u *= phi
            np.subtract(1.0, phi, out=s)
            u *= s
            u += phi
            phi *= z
            z[...] = u

    def backward(self, tokens: np.ndarray, targets: np.ndarray) -> None:
        b, t, e, n = self.shape
        w, g, z = self.weight, self.grad, self.z
        self.logit_row *= n
        z /= self.logit_row
        z[self.rows, targets.reshape(-1)] -= np.float32(1.0 / n)
        np.matmul(z.T, self.x[-1].reshape(n, e), out=g["output.output.weight"])
        np.add.reduce(z, axis=0, out=g["output.output.bias"])
        dx, dh, d1, d2, dp, symmetric = self.dx, self.dh, self.d1, self.d2, self.dp, self.symmetric
        dy, dc = dx.reshape(n, e), d2.reshape(b, t, e)
        np.matmul(z, w["output.output.weight"], out=dy)
        for i in reversed(range(self.blocks)):
            name, x, p = f"transformers.{i}", self.x[i], self.p[i]
            np.matmul(dy.T, self.f[i], out=g[f"{name}.feed_forward.output.weight"])
            np.add.reduce(dy, axis=0, out=g[f"{name}.feed_forward.output.bias"])
            np.matmul(dy, w[f"{name}.feed_forward.output.weight"], out=dh)
            dh *= self.h[i]
            np.matmul(dh.T, self.a[i], out=g[f"{name}.feed_forward.input.weight"])
            np.add.reduce(dh, axis=0, out=g[f"{name}.feed_forward.input.bias"])
            np.matmul(dh, w[f"{name}.feed_forward.input.weight"], out=d1)
            np.matmul(d1.T, self.c[i].reshape(n, e), out=g[f"{name}.attention.output.weight"])
            np.add.reduce(d1, axis=0, out=g[f"{name}.attention.output.bias"])
            np.matmul(d1, w[f"{name}.attention.output.weight"], out=d2)
            np.matmul(dc, x.swapaxes(1, 2), out=dp)
            np.matmul(p.swapaxes(1, 2), dc, out=dx)
            np.multiply(dp, p, out=symmetric)
            np.add.reduce(symmetric, axis=-1, keepdims=True, out=self.row)
            dp -= self.row
            dp *= p
            dp *= 1.0 / math.sqrt(e)
            # Scores are x x^T, so both of its uses take one product.
            np.add(dp, dp.swapaxes(1, 2), out=symmetric)
            np.matmul(symmetric, x, out=dc)
            dx += dc
        positions = g["embedding.positional_embedding.weight"]
        positions[t:] = 0.0
        np.add.reduce(dx, axis=0, out=positions[:t])
        self.onehot[...] = 0.0
        self.onehot[tokens.reshape(-1), self.rows] = 1.0
        np.matmul(self.onehot, dy, out=g["embedding.embedding.weight"])

    def adamw(self) -> float:
        """Clip and update; the clipping is folded into the moments. Returns the norm before."""
        beta1, beta2 = self.betas
        norm = math.sqrt(np.dot(self.g, self.g))
        scale = min(1.0, self.max_norm / (norm + 1e-6))
        self.steps += 1
        correction1, correction2 = 1.0 - beta1**self.steps, 1.0 - beta2**self.steps
        for start, end, decay in (
            (0, self.decayed, self.decay), (self.decayed, self.w.size, 0.0),
        ):  # fmt: skip
            for k in range(start, end, ADAMW_BLOCK):
                part = slice(k, min(k + ADAMW_BLOCK, end))
                w, g, m, v = self.w[part], self.g[part], self.m[part], self.v[part]
                u = self.update[: w.size]
                if decay:
                    w *= 1.0 - self.lr * decay
                m *= beta1
                np.multiply(g, scale * (1.0 - beta1), out=u)
                m += u
                v *= beta2
                u *= u
                u *= (1.0 - beta2) / (1.0 - beta1) ** 2
                v += u
                np.sqrt(v, out=u)
                u *= 1.0 / math.sqrt(correction2)
                u += self.eps
                np.divide(m, u, out=u)
                u *= self.lr / correction1
                w -= u
        return norm
