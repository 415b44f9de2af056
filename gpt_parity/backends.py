"""The two implementations by name: "numpy" and "torch". PyTorch is imported only when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from threadpoolctl import threadpool_limits

from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.schedule import require_integer


class MissingBackendError(ImportError):
    """A backend was asked for whose library cannot be imported."""


class MissingTokenizersError(MissingBackendError):
    """A byte-pair tokenizer was asked for, whose library cannot be imported."""


def load_backend(name: str) -> ModuleType:
    """Return the package with GPT, GPT2, GPTLoss, AdamWOptimizer and no_grad of a backend.

    Raises ValueError for another name, MissingBackendError where PyTorch cannot be imported.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}, one of {BACKENDS} is needed")
    if name == "torch":
        try:
            importlib.import_module("torch")
        except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
            reason = " ".join(str(error).split())
            raise MissingBackendError(
                f"backend 'torch' needs PyTorch, which cannot be imported ({reason}); install it "
                'with: python -m pip install -c constraints.txt -e ".[torch]" (in a checkout), or '
                "python -m pip install torch"
            ) from error
    return importlib.import_module(f"{name}_impl")


def backend_of(model: Any) -> str:
    """Return "numpy" or "torch" for a model of either; TypeError for anything else."""
    from numpy_impl.layers import Layer

    if isinstance(model, Layer):
        return "numpy"
    torch = sys.modules.get("torch")  # where it is not imported, nothing is a module of its own
    if torch is not None and isinstance(model, torch.nn.Module):
        return "torch"
    raise TypeError(f"model is a {type(model).__name__}, a model of numpy_impl or torch is needed")


def build_model(
    backend: str, config: GPTConfig, seed: int = 0, dtype: Any = "float32", *,
    allow_leak: bool = False,
) -> Any:  # fmt: skip
    """Return the model of `config` with the weights of `seed`, the same numbers in both backends.

    dtype: its name or NumPy dtype. Raises what `load_backend` and the model raise, and ValueError
    for a model that does not fit into the machine.
    """
    import numpy as np

    name = np.dtype(dtype).name
    config.require_memory(name)
    package = load_backend(backend)
    sizes = (config.vocab_size, config.context_size, config.embedding_size, config.blocks)
    options = {"seed": seed, "dtype": name, "mask_value": config.mask_value,
               "allow_leak": allow_leak}  # fmt: skip
    if isinstance(config, GPT2Config):
        return package.GPT2(*sizes, config.heads, **options)
    return package.GPT(*sizes, **options)


@contextmanager
def thread_limit(count: int, backend: str) -> Iterator[None]:
    """Let each matrix product of the block use `count` threads; what was set before returns.

    In NumPy's BLAS and, for the backend "torch", in PyTorch.
    """
    require_integer("threads", count, 1)
    load_backend(backend)
    with ExitStack() as restore:
        restore.enter_context(threadpool_limits(count, user_api="blas"))
        if backend == "torch":
            torch = sys.modules["torch"]
            restore.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
        yield
