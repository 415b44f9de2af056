"""In which arithmetic a torch model computes, on which device, compiled or not.

Weights, gradients and moments have the model's own dtype in any case. bf16 and tf32 are about
operations: in bf16 PyTorch's autocast computes the forward pass, and with it the backward one, in
bfloat16 where that is safe; in tf32 a GPU rounds the operands of float32 matrix products.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpt_parity.backends import load_backend
from gpt_parity.choices import Device, Precision

# Without one of them torch.compile has nothing to compile with on a CPU.
COMPILERS = ("g++", "clang++", "c++", "cl")
# The first GPUs whose matrix products know tf32, and bfloat16.
AMPERE = (8, 0)


@dataclass(frozen=True)
class Engine:
    """A model as training calls it:  tokens (B, T) integers -> logits (B, T, V).

    `module` is what is called: the model, or what wraps it. The logits have the model's dtype.
    Names, files and samples are matters of the plain `model`, never of what wraps it.
    """

    model: Any
    precision: Precision | None = None
    compile: bool = False
    module: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.module is None:
            object.__setattr__(self, "module", self._compiled() if self.compile else self.model)

    def _compiled(self) -> Any:
        import torch

        return torch.compile(self.model)

    def __call__(self, tokens: np.ndarray) -> Any:
        if self.compile:
            tokens = self._checked(tokens)
        if self.precision != "bf16":
            return self.module(tokens)
        import torch

        with torch.autocast(self._device().type, torch.bfloat16):
            logits = self.module(tokens)
        # The loss is not computed in bfloat16: its sums are long.
        return logits.float()

    def wrapped(self, module: Any) -> Engine:
        """The same arithmetic with something else to call."""
        return replace(self, module=module)

    def _checked(self, tokens: np.ndarray) -> Any:
        """The tokens as a tensor, judged before: a compiled graph cannot depend on values."""
        import torch

        check = load_backend("torch").gpt.check_tokens
        tokens = check(tokens, self.model.vocab_size, self.model.context_size)
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device())

    def _device(self) -> Any:
        return next(iter(self.model.parameters())).device

    def switched(self) -> Any:
        """A block in which PyTorch's switch for matrix products is as `precision` needs it.

        It is one for the whole process, and the backward pass and the optimizer need it too.
        """
        if self.precision is None or self._device().type != "cuda":
            return nullcontext()
        return _products("tf32" if self.precision == "tf32" else "ieee")


@contextmanager
def _products(kind: str) -> Iterator[None]:
    """How a GPU computes float32 matrix products in the block; what was set before returns."""
    import torch

    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = kind
    try:
        yield
    finally:
        switch.fp32_precision = before


def require_machine(precision: Precision | None, device: Device, compile: bool) -> None:
    """Raise ValueError where this machine cannot compute so."""
    if device == "cpu":
        if compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), *COMPILERS))):
            raise ValueError(
                "compile is set, which needs a C++ compiler; none of "
                f"{', '.join(COMPILERS)} is found here"
            )
        return
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "device is cuda, which PyTorch does not find here; a GPU and a PyTorch built for it "
            "are needed, or --device cpu"
        )
    number, count = local_rank(), torch.cuda.device_count()
    if number >= count:
        raise ValueError(f"device is cuda, this machine has {count} for process {number} of it")
    found = torch.cuda.get_device_capability(number)
    if precision in ("bf16", "tf32") and found < AMPERE:
        raise ValueError(
            f"precision is {precision}, which needs a GPU of compute capability "
            f"{'.'.join(map(str, AMPERE))}; this one has {'.'.join(map(str, found))}"
        )


def local_rank() -> int:
    """Which of this machine's processes this one is, 0 where torchrun did not start it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def placed(model: Any, device: Device) -> Any:
    """A torch model on its device: of several GPUs, the one of this process."""
    if device == "cpu":
        return model
    import torch

    torch.cuda.set_device(local_rank())
    return model.to(torch.device("cuda", local_rank()))
