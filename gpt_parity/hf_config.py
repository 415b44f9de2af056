"""The config.json of a GPT-2 of the library transformers: what is read, refused and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt_parity.files import read_text
from gpt_parity.manifest import one_line, shown, strict_json
from gpt_parity.model_config import MOST_BLOCKS, GPT2Config
from gpt_parity.schedule import require_integer

SIZES = {
    "vocab_size": "vocab_size", "n_positions": "context_size", "n_embd": "embedding_size",
    "n_layer": "blocks", "n_head": "heads",
}  # fmt: skip
# Second names that the library takes, and prefers where both stand.
ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "n_ctx": "n_positions",
    "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
}  # fmt: skip
# Values under which the function is the one computed here; the first is what a missing key means.
NEEDED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "layer_norm_epsilon": (1e-5,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file; ValueError of one line that names it."""
    text = read_text(path)
    try:
        content = strict_json(text)
        if not isinstance(content, dict):
            raise ValueError(f"is {shown(content)}, an object is needed")
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from error
    return content


def read_sizes(path: Path) -> GPT2Config:
    """The sizes in a config.json.

    Raises ValueError of one line that names the key, what was found and what is needed, for a
    model that would compute another function than GPT2.
    """
    content = read_json(path)
    try:
        return _sizes(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def _sizes(content: dict[str, Any]) -> GPT2Config:
    if "model_type" not in content:
        raise ValueError("model_type is missing, 'gpt2' is needed")
    for key, allowed in NEEDED.items():
        found = content.get(key, allowed[0])
        if not any(type(found) is type(value) and found == value for value in allowed):
            needed = " or ".join(repr(value) for value in allowed)
            raise ValueError(f"{key} is {shown(found)}, {needed} is needed")
    sizes: dict[str, Any] = {key: content[key] for key in SIZES if key in content}
    for alias, key in ALIASES.items():
        if alias in content and sizes.setdefault(key, content[alias]) != content[alias]:
            raise ValueError(
                f"{alias} is {shown(content[alias])}, {key} = {shown(sizes[key])} is needed"
            )
    missing = [key for key in SIZES if key not in sizes]
    if missing:
        raise ValueError(f"{missing[0]} is missing, a size is needed")
    for key in SIZES:
        require_integer(key, sizes[key], 1)
    if sizes["n_layer"] > MOST_BLOCKS:
        raise ValueError(f"n_layer is {sizes['n_layer']}, at most {MOST_BLOCKS} are needed")
    if sizes["n_embd"] % sizes["n_head"]:
        raise ValueError(
            f"n_embd is {sizes['n_embd']}, a multiple of n_head = {sizes['n_head']} is needed"
        )
    inner, width = content.get("n_inner"), 4 * sizes["n_embd"]
    if inner is not None and (type(inner) is not int or inner != width):
        raise ValueError(f"n_inner is {shown(inner)}, null or 4 n_embd = {width} is needed")
    return GPT2Config(**{ours: sizes[key] for key, ours in SIZES.items()})


def written_config(config: GPT2Config, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of such a model; `dtype` stands under its new and its old key."""
    sizes = {key: getattr(config, ours) for key, ours in SIZES.items()}
    fixed = {key: allowed[0] for key, allowed in NEEDED.items() if allowed[0] is not None}
    return {
        **fixed, **sizes, "architectures": ["GPT2LMHeadModel"], "n_ctx": config.context_size,
        "n_inner": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": end_of_text, "eos_token_id": end_of_text, "dtype": dtype,
        "torch_dtype": dtype,
    }  # fmt: skip
