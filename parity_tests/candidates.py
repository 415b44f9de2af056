"""Submissions to the oracle: what a twin computes, by a bundle's keys, and random bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from gpt_parity.backends import build_model, load_backend
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.bundle import STEP, Bundle, make_bundle, pass_arrays, step_key
from gpt_parity.oracle.graph import GRAD, LOSS_KEY
from gpt_parity.oracle.lockstep import Runner
from gpt_parity.oracle.subject import order_one
from gpt_parity.oracle.trace import trace
from gpt_parity.weights import set_weights

Part = Literal["all", "parameters", "steps"]
Suitable = Callable[[GPTConfig, np.ndarray, np.ndarray], bool]
DRAWS = 1000


def submission(
    backend: str, bundle: Bundle, dtype: str, part: Part = "all"
) -> dict[str, np.ndarray]:
    """What a twin computes for the inputs of a bundle, by the bundle's keys.

    "all" is the whole pass, and the steps if the bundle has some; "parameters" the loss and the
    gradients of the parameters, which is what most implementations can show; "steps" the steps.
    """
    found: dict[str, np.ndarray] = {}
    if part != "steps":
        model = build_model(backend, bundle.config, dtype=dtype)
        set_weights(model, {n: w.astype(dtype) for n, w in bundle.weights.items()})
        loss_fn = load_backend(backend).GPTLoss()
        found |= pass_arrays(trace(model, loss_fn, bundle.tokens, bundle.targets))
    if part == "parameters":
        kept = {LOSS_KEY, *(GRAD + name for name in bundle.weights)}
        return {key: array for key, array in found.items() if key in kept}
    if bundle.steps:
        setting = bundle.setting(bundle.steps)
        runner = Runner(backend, dtype, setting)
        for k, (batch, rate) in enumerate(zip(setting.batches, setting.rates, strict=True), 1):
            state = runner.state(runner.step(batch, rate))
            found |= {
                f"{STEP}/{k}/{step_key(name)}": array
                for name, array in state.items() if name != "learning rate"
            }  # fmt: skip
    return found


def random_bundle(
    rng: np.random.Generator, steps: int = 0, *, suitable: Suitable | None = None,
    confident: bool = False, optimizer: Mapping[str, Any] | None = None, gpt2: bool = False,
) -> Bundle:  # fmt: skip
    """The reference of a random small model, or GPT-2, with weights of about order one.

    `suitable` says of sizes, tokens and targets (B, T) whether they will do. `confident` adds an
    output bias of +-40, or makes the last norm of a GPT-2 larger, so that tokens have a probability
    of about 1 or of nothing. Raises ValueError where nothing suitable is drawn.
    """
    for _ in range(DRAWS):
        length = int(rng.integers(2, 10))
        config = GPTConfig(
            vocab_size=int(rng.integers(3, 21)), context_size=length + int(rng.integers(0, 4)),
            embedding_size=int(rng.integers(2, 11)), blocks=int(rng.integers(1, 4)),
        )  # fmt: skip
        if gpt2:
            config = _with_heads(rng, config)
        batch = int(rng.integers(2, 6))
        tokens, targets = rng.integers(0, config.vocab_size, (2, batch, length))
        if suitable is None or suitable(config, tokens, targets):
            break
    else:
        raise ValueError(f"random_bundle: none of {DRAWS} draws is suitable")
    scale = rng.uniform(0.7, 1.3)
    weights = {
        name: (w * scale).astype(np.float32)
        for name, w in order_one(config, int(rng.integers(2**31))).items()
    }
    if confident and gpt2:
        weights["norm.weight"] *= 20.0
    elif confident:
        # The first target is improbable, some other token is not.
        sides = rng.permutation(np.resize([-1.0, 1.0], config.vocab_size))
        target = targets[0, 0]
        sides[target], sides[(target + 1) % config.vocab_size] = -1.0, 1.0
        weights["output.output.bias"] += (40.0 * sides).astype(np.float32)
    return make_bundle(
        config, weights, tokens, targets, steps=steps, optimizer=optimizer, votes=False
    )


def _with_heads(rng: np.random.Generator, config: GPTConfig) -> GPT2Config:
    """As large a GPT-2. Of two numbers layer norm leaves the signs, without a gradient."""
    heads = int(rng.integers(1, 5))
    sizes = asdict(config) | {"embedding_size": heads * int(rng.integers(1 + 2 // heads, 6))}
    return GPT2Config(**sizes, heads=heads)
