"""A training step on several cores: the batch in parts, one thread and one tape for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

import numpy as np

from numpy_impl import tape
from numpy_impl.tensor import Tensor

Result = tuple[float, list[tuple[Tensor, np.ndarray]]]


class BatchParts:
    """Computes losses and gradients with `threads` threads, each on its own part of the batch.

    NumPy lets other threads run while it computes, but works on one core itself, except in matrix
    products (limit their threads to one meanwhile). Losses and gradients are added up in the order
    of the parts, and so do not depend on which thread is first. They do depend, by rounding, on the
    number of parts. Raises ValueError for less than one thread, TypeError for no integer.
    """

    def __init__(self, threads: int) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int | np.integer):
            raise TypeError(f"threads: got {threads!r}, needed an integer")
        if threads < 1:
            raise ValueError(f"threads: got {threads}, needed at least 1")
        self.threads = int(threads)
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"threads": self.threads, "_pool": None, "_process": 0}  # a copy starts its own

    def backward(
        self, loss_of: Callable[[np.ndarray, np.ndarray], Tensor],
        tokens: np.ndarray, targets: np.ndarray, weight: float = 1.0,
    ) -> float:  # fmt: skip
        """Add the gradient of `weight` times the mean loss over the batch to every leaf.

        Returns `weight` times the loss.
        tokens, targets: (B, T). `loss_of(tokens, targets)` is the mean over the rows it is given.
        Leaves change only after all parts have succeeded. Where a parameter has no gradient, its
        flat buffer serves as memory before that: one call at a time for the same parameters. An
        observer sees the parts one after the other, in this thread. Raises ValueError for an empty
        batch, and what `Tensor.backward` raises.
        """
        if len(tokens) == 0 or len(tokens) != len(targets):
            raise ValueError(
                f"batch: got {len(tokens)} and {len(targets)} rows, needed as many, at least one"
            )
        count = min(self.threads, len(tokens))
        bounds = [len(tokens) * k // count for k in range(count + 1)]

        def compute(k: int) -> Result:
            part = slice(bounds[k], bounds[k + 1])
            share = weight * ((part.stop - part.start) / len(tokens))
            loss = loss_of(tokens[part], targets[part])
            cotangent = np.asarray(loss.cotangent() * share)
            store = tape.stage if k == 0 else tape.leave
            return loss.item() * share, tape.gradients_of(loss, cotangent, store=store)

        if tape.current_observer() is not None:
            return self._add([compute(k) for k in range(count)])
        futures: list[Future[Result]] = []
        try:
            # A thread starts without the settings of this one, such as np.errstate.
            for k in range(1, count):
                futures.append(self._threads().submit(copy_context().run, compute, k))
            results = [compute(0)]
        finally:
            wait(futures)
        return self._add(results + [future.result() for future in futures])

    def _add(self, results: list[Result]) -> float:
        """Add the gradients of the parts to the leaves, in their order; returns the whole loss."""
        for _, gradients in results:
            for leaf, grad in gradients:
                leaf.accumulate_grad(grad)
        return sum(loss for loss, _ in results)

    def _threads(self) -> ThreadPoolExecutor:
        """The threads, started when first needed; those of a parent process are not here."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self.threads - 1), os.getpid()
        return self._pool
