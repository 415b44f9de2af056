"""A training step on several cores: the batch in parts, one thread and one tape for each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context

import numpy as np

from numpy_impl import tape
from numpy_impl.tensor import Tensor


class BatchParts:
    """Computes losses and gradients with `threads` threads, each on its own part of the batch.

    NumPy lets other threads run while it computes, but works on one core itself, except in matrix
    products (limit their threads to one meanwhile). Losses and gradients are added up in the order
    of the parts, and so do not depend on which thread is first. They do depend, by rounding, on the
    number of parts. Raises ValueError for less than one thread.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads: got {threads}, needed at least 1")
        self.threads = threads
        self.pool = ThreadPoolExecutor(max(1, threads - 1))  # starts a thread when it needs one

    def backward(
        self, loss_of: Callable[[np.ndarray, np.ndarray], Tensor],
        tokens: np.ndarray, targets: np.ndarray,
    ) -> float:  # fmt: skip
        """Add the gradient of the mean loss over the batch to every leaf; returns the loss.

        tokens, targets: (B, T). `loss_of(tokens, targets)` is the mean over the rows it is given.
        Leaves change only after all parts have succeeded. An observer would be called by several
        threads at once, so with one there is one part.
        """
        count = 1 if tape.current_observer() is not None else min(self.threads, len(tokens))
        shares = np.array_split(np.arange(len(tokens)), count)

        def compute(
            rows: np.ndarray, store: tape.Store = tape.leave
        ) -> tuple[float, list[tuple[Tensor, np.ndarray]]]:
            part, share = slice(rows[0], rows[-1] + 1), len(rows) / len(tokens)
            loss = loss_of(tokens[part], targets[part])
            gradients = tape.gradients_of(loss, np.full_like(loss.data, share), store=store)
            return loss.item() * share, gradients

        # A thread starts without the settings of this one, such as np.errstate.
        futures = [self.pool.submit(copy_context().run, compute, rows) for rows in shares[1:]]
        try:
            results = [compute(shares[0], tape.stage)]
        finally:
            wait(futures)
        results += [future.result() for future in futures]
        for _, gradients in results:
            for leaf, grad in gradients:
                leaf.accumulate_grad(grad)
        return sum(loss for loss, _ in results)
