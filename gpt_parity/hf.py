"""Folders of the library transformers that hold a GPT-2: read and written, never with pickle.

Names and layouts of the weights are those of style "hf" in `oracle.styles`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from gpt_parity.arrays import read_arrays
from gpt_parity.bpe import END_OF_TEXT, TOKENIZER, BytePairTokenizer
from gpt_parity.checkpoint import Checkpoint
from gpt_parity.hf_config import read_json, read_sizes, written_config
from gpt_parity.manifest import one_line, shown, some
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.styles import HEAD, from_style, names, plain_names, to_style
from gpt_parity.weights import check_arrays

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
Arrays = dict[str, np.ndarray]


def import_hf(folder: Path, *, with_text: bool = True) -> Checkpoint:
    """Return the GPT-2 of a local folder as a checkpoint of step 0 for the NumPy backend.

    Read are config.json, model.safetensors (or the shards of model.safetensors.index.json), and
    tokenizer.json, or else vocab.json with merges.txt, where they are there and `with_text`.
    float32 and float64 weights are kept, float16 and bfloat16 become float32, exactly; mixed ones
    become the widest. Dropout is left out, as in evaluation. Raises ValueError of one line for
    all that is not whole or would be another function, MissingTokenizersError where the folder has
    a tokenizer whose library cannot be imported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: is no folder, one with config.json and weights is needed")
    config = read_sizes(folder / CONFIG)
    weights = _weights(folder, config)
    dtype = next(iter(weights.values())).dtype.name
    try:
        tokenizer = BytePairTokenizer.from_folder(folder) if with_text else None
        if tokenizer is not None:
            tokenizer.check_model(config.vocab_size)
    except ValueError as error:
        where = "" if str(error).startswith(str(folder)) else f"{folder}: "
        raise ValueError(f"{where}{error}; --without-text leaves it out") from error
    content = None if tokenizer is None else tokenizer.content
    return Checkpoint(config, "", "numpy", dtype, 0, weights, tokenizer_json=content)


def _weights(folder: Path, config: GPT2Config) -> Arrays:
    """The weights by our names, all of one dtype."""
    path, arrays = _stored(folder)
    try:
        named = plain_names(arrays, "hf")
        # Before any work that grows with what the configuration claims.
        if config.blocks > len(named):
            raise ValueError(f"n_layer is {config.blocks}, more than there are arrays")
        shapes = {e.theirs: e.shape for e in names(config, "hf")}
        if HEAD not in named:  # it is the table once more
            del shapes[HEAD]
        kinds = {array.dtype for array in check_arrays("weights", named, shapes).values()}
        if any(kind.kind != "f" for kind in kinds):
            raise ValueError(f"weights are {some(map(str, kinds))}, real ones are needed")
        dtype = np.result_type(np.float32, *kinds)
        return {n: a.astype(dtype) for n, a in from_style(named, config, "hf").items()}
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def _stored(folder: Path) -> tuple[Path, Arrays]:
    """The file to name in messages, and what it holds, or what its shards do."""
    if (folder / WEIGHTS).exists():
        return folder / WEIGHTS, _read(folder / WEIGHTS)
    index = folder / INDEX
    if index.exists():
        return index, _from_shards(index)
    pickled = next((p.name for p in sorted(folder.glob("pytorch_model*.bin*"))), None)
    if pickled is not None:
        raise ValueError(
            f"{folder}: holds its weights in {pickled} alone, a pickle, which can run any program "
            f"and is not read; {WEIGHTS} is needed"
        )
    raise ValueError(f"{folder}: holds no {WEIGHTS} and no {INDEX}, one of them is needed")


def _read(path: Path) -> Arrays:
    return read_arrays(path, bfloat16=True)[0]


def _from_shards(index: Path) -> Arrays:
    content = read_json(index)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map is {shown(places)}, files by name are needed")
    shards: dict[str, set[str]] = {}
    for name, file in places.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and file.isprintable()
        if not plain or "/" in file or "\\" in file:
            raise ValueError(
                f"{index}: {shown(name)} is in {shown(file)}, a safetensors file of the same "
                "folder is needed"
            )
        shards.setdefault(file, set()).add(name)
    arrays: Arrays = {}
    for file, own in shards.items():
        held = _read(index.with_name(file))
        if set(held) != own:
            differing = sorted(set(held) ^ own)
            raise ValueError(f"{index}: {some(differing)} stands in one of it and {file} alone")
        arrays |= held
    return arrays


def hf_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files by name that GPT2LMHeadModel.from_pretrained reads: the same gives the same bytes.

    A byte-pair tokenizer is among them; characters have no counterpart there. Optimizer and run
    are left out. Raises ValueError for another model than a GPT-2, and for a fill of its mask
    that such a folder cannot hold.
    """
    config = checkpoint.config
    if not isinstance(config, GPT2Config):
        raise ValueError("checkpoint is of the model of the source text, a GPT-2 is needed")
    if not config.mask_value <= -1e9:
        raise ValueError(
            f"mask_value is {config.mask_value}, -1e9 or less is needed: the folder has no place "
            "for it"
        )
    arrays = to_style(checkpoint.weights, config, "hf")
    del arrays[HEAD]  # as the library leaves it out
    files = {WEIGHTS: save(arrays, metadata={"format": "pt"})}
    end = None
    if checkpoint.tokenizer_json is not None:
        end = BytePairTokenizer(checkpoint.tokenizer_json).token_id(END_OF_TEXT)
        special = {} if end is None else dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
        files[TOKENIZER] = checkpoint.tokenizer_json.encode()
        files[TOKENIZER_CONFIG] = _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "model_max_length": config.context_size, **special,
            }
        )  # fmt: skip
    return {CONFIG: _json(written_config(config, checkpoint.dtype, end)), **files}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
