"""Measurements of GPT-2 alone: its key/value cache, and the size of 124 million parameters."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from gpt_parity.backends import build_model
from gpt_parity.bench.common import random_batches, resident
from gpt_parity.bench.config import BENCHMARKS
from gpt_parity.bench.contenders import contenders
from gpt_parity.bench.timing import interleaved
from gpt_parity.model_config import model_config


def measure_cache(
    model: dict[str, int], lengths: list[int], names: list[str], seconds: float
) -> Any:
    """Seconds for the logits after so many tokens, by contender, "cached" and "anew".

    model: the sizes of a `GPT2Config`. Raises RuntimeError where the two differ.
    """
    sizes = model_config(model)
    ids = np.random.default_rng(0).integers(0, sizes.vocab_size, (1, max(lengths)))
    models = {name: build_model(name, sizes) for name in names}
    found = []
    for length in lengths:
        functions, tokens = {}, ids[:, :length]
        for name, built in models.items():
            past = built.predict_next(tokens[:, :-1])[1]
            functions[f"{name} cached"] = lambda m=built, t=tokens, p=past: m.predict_next(t, p)
            functions[f"{name} anew"] = lambda m=built, t=tokens: m.predict_next(t)
        require_same_logits({what: function()[0] for what, function in functions.items()})
        times = interleaved(functions, seconds / len(lengths))
        found.append({"length": length, **{what: asdict(t) for what, t in times.items()}})
    return found


def require_same_logits(logits: dict[str, np.ndarray]) -> None:
    """Raise RuntimeError unless all are those of the first, but for rounding in float32."""
    (first, expected), *others = logits.items()
    for name, found in others:
        apart = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        if not apart < 1e-4:
            raise RuntimeError(f"logits differ: {name} is {apart:.3g} from {first}, relatively")


def measure_large(size: str, name: str, limit: int | None, steps: int) -> Any:
    """Peak resident bytes of this process after building a trainer, a forward pass, and steps.

    limit: of the bytes of address space, within which all of it has to work; None sets none.
    Raises MemoryError where they do not suffice.
    """
    limited = limit is not None and limit_address_space(limit)
    sizes = BENCHMARKS[size]
    batches = random_batches(sizes, steps)
    (contender,) = contenders([name], sizes, 1)
    found: dict[str, Any] = {"limited": limited, "built": resident("VmHWM")}
    contender.forward(*batches[0])
    found["forward"] = resident("VmHWM")
    found["losses"] = [contender.step(*batch)[0] for batch in batches]
    found["step"] = resident("VmHWM")
    return found


def limit_address_space(limit: int) -> bool:
    """Refuse this process more than `limit` bytes from here on; whether the system does so."""
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, AttributeError, ValueError, OSError):  # not a system of this kind
        return False
    return True
