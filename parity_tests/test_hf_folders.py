"""Folders of the library transformers: to the bit there and back, and one line for what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gpt_parity.backends import build_model
from gpt_parity.choices import DTYPES
from gpt_parity.files import write_folder
from gpt_parity.hf import hf_files, import_hf
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.compare import FORWARD, compare
from gpt_parity.oracle.rounding import UNITS
from gpt_parity.oracle.tolerance import model_tolerances
from gpt_parity.weights import set_weights
from numpy_impl import GPTLoss
from parity_tests.comparers import assert_same_bits
from parity_tests.hf_folders import (
    CONFIG,
    SQUARE,
    change_config,
    change_weights,
    random_checkpoint,
    refused,
)
from parity_tests.interop.transformers_gpt2 import (
    SHAPES,
    hf_model,
    library,
    needs_transformers,
    ours,
)

pytestmark = pytest.mark.reference("another library")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a random GPT-2."""
    write_folder(tmp_path / "gpt2", hf_files(random_checkpoint()))
    return tmp_path / "gpt2"


@needs_transformers
@pytest.mark.parametrize("shards", (None, "2KB"), ids=("one file", "shards"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_model_of_the_library_is_imported_to_the_bit(
    tmp_path: Path, dtype: str, shards: str | None
) -> None:
    shape = SHAPES["distinct sizes"]
    model = hf_model(shape, dtype)
    options = {} if shards is None else {"max_shard_size": shards}
    model.save_pretrained(tmp_path, **options)
    assert (tmp_path / "model.safetensors").exists() == (shards is None)
    imported = import_hf(tmp_path)
    assert (imported.config, imported.dtype, imported.has_text) == (shape.config, dtype, False)
    expected = ours(dict(model.named_parameters()))
    assert_same_bits({n: imported.weights[n] for n in expected}, expected)
    assert list(imported.weights) == list(shape.config.parameter_shapes())


@needs_transformers
@pytest.mark.parametrize("kind", ("GPT2Model", "half", "bfloat16", "untied file", "head alone"))
def test_other_forms_that_the_library_saves_are_imported(tmp_path: Path, kind: str) -> None:
    """The body alone has no prefix, half types are widened, and a tied head may stand there.

    Also in place of the table, as safetensors saves one name of each array.
    """
    model = hf_model(SHAPES["distinct sizes"], "float32")
    if kind in ("half", "bfloat16"):
        model = getattr(model, kind)()
    (model.transformer if kind == "GPT2Model" else model).save_pretrained(tmp_path)
    table = "transformer.wte.weight"
    if kind == "untied file":
        change_weights(tmp_path, lambda a: a.update({"lm_head.weight": a[table].copy()}))
    elif kind == "head alone":
        change_weights(tmp_path, lambda a: a.update({"lm_head.weight": a.pop(table)}))
    else:
        names = load_file(tmp_path / "model.safetensors") if kind != "bfloat16" else {}
        assert any(n.startswith("transformer.") for n in names) == (kind in ("half",))
    imported = import_hf(tmp_path)
    assert imported.dtype == "float32"
    expected = ours(dict(model.float().named_parameters()))
    assert_same_bits({n: imported.weights[n] for n in expected}, expected)


@needs_transformers
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exported_folder_loads_into_the_library_with_the_same_logits(
    tmp_path: Path, dtype: str
) -> None:
    """The weights are a trained model's scale or larger; the tolerance is that of the model."""
    weights = {
        name: (0.4 * array + name.endswith("norm.weight")).astype(np.float32).astype(dtype)
        for name, array in random_checkpoint().weights.items()
    }
    write_folder(tmp_path / "out", hf_files(replace(random_checkpoint(dtype), weights=weights)))
    model = library().GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert str(model.dtype) == f"torch.{dtype}"
    assert not model.training
    tokens, targets = np.random.default_rng(1).integers(0, 13, (2, 3, 7))
    mine = build_model("numpy", CONFIG, dtype="float64")
    set_weights(mine, weights)
    clean, tolerances = model_tolerances(mine, GPTLoss(), tokens, targets, UNITS[dtype])
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    judgement = compare(
        "logits", FORWARD, logits, clean.values["output"], tolerances.values["output"], dtype
    )
    assert judgement.ok, judgement.describe()
    with torch.no_grad():
        square = model.transformer.h[1].attn.c_proj.weight
        square.copy_(square.T.clone())
        wrong = model(torch.from_numpy(tokens)).logits.numpy()
    assert not compare(
        "logits", FORWARD, wrong, clean.values["output"], tolerances.values["output"], dtype
    ).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_folder_there_and_back_is_the_same_to_the_bit(tmp_path: Path, dtype: str) -> None:
    before = random_checkpoint(dtype)
    write_folder(tmp_path / "a", hf_files(before))
    after = import_hf(tmp_path / "a")
    assert after.config == before.config
    assert_same_bits(after.weights, before.weights)
    assert hf_files(after) == hf_files(before)
    square = load_file(tmp_path / "a" / "model.safetensors")[SQUARE]
    np.testing.assert_array_equal(
        square, before.weights["transformers.1.attention.output.weight"].T
    )


def test_buffers_of_older_versions_are_no_weights(folder: Path) -> None:
    before = import_hf(folder)
    buffers = {"attn.bias": np.ones((1, 1, 7, 7), bool), "attn.masked_bias": np.float32(-1e4)}

    def add(arrays: dict[str, np.ndarray]) -> None:
        arrays |= {
            f"transformer.h.{i}.{n}": np.array(b) for i in (0, 1) for n, b in buffers.items()
        }

    change_weights(folder, add)
    assert_same_bits(import_hf(folder).weights, before.weights)


def test_mixed_dtypes_become_the_widest(folder: Path) -> None:
    before = import_hf(folder)
    name = "transformer.ln_f.bias"
    change_weights(folder, lambda a: a.update({name: a[name].astype(np.float64)}))
    after = import_hf(folder)
    assert after.dtype == "float64"
    for key, array in after.weights.items():
        np.testing.assert_array_equal(array, before.weights[key].astype(np.float64))


def test_second_names_of_the_sizes_are_read(folder: Path) -> None:
    change_config(folder, n_embd="ABSENT", n_head="ABSENT", hidden_size=12, num_attention_heads=3)
    assert import_hf(folder).config == CONFIG


REFUSED_CONFIGS = {
    "another model": ({"model_type": "llama"}, "model_type is 'llama', 'gpt2' is needed"),
    "no model": ({"model_type": "ABSENT"}, "model_type is missing, 'gpt2' is needed"),
    "epsilon": ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, 1e-05 is needed"),
    "erf": ({"activation_function": "gelu"},
            "activation_function is 'gelu', 'gelu_new' or 'gelu_pytorch_tanh' is needed"),
    "no scale": ({"scale_attn_weights": False}, "scale_attn_weights is False, True is needed"),
    "scale by layer": ({"scale_attn_by_inverse_layer_idx": True},
                       "scale_attn_by_inverse_layer_idx is True, False is needed"),
    "untied": ({"tie_word_embeddings": False}, "tie_word_embeddings is False, True is needed"),
    "cross-attention": ({"add_cross_attention": True}, "add_cross_attention is True, False is"),
    "encoder": ({"is_encoder_decoder": True}, "is_encoder_decoder is True, False is needed"),
    "pruned": ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "inner": ({"n_inner": 24}, "n_inner is 24, null or 4 n_embd = 48 is needed"),
    "heads": ({"n_head": 5}, "n_embd is 12, a multiple of n_head = 5 is needed"),
    "no heads": ({"n_head": "ABSENT"}, "n_head is missing, a size is needed"),
    "zero": ({"n_layer": 0}, "n_layer is 0, at least 1 is needed"),
    "a text": ({"n_embd": "12"}, "n_embd"),
    "two contexts": ({"n_ctx": 9}, "n_ctx is 9, n_positions = 7 is needed"),
    "two widths": ({"hidden_size": 24}, "hidden_size is 24, n_embd = 12 is needed"),
    "too many blocks": ({"n_layer": 10**9}, "n_layer is 1000000000, at most 10000 are"),
    "more blocks": ({"n_layer": 5000}, "n_layer is 5000, more than there are arrays"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_configuration_of_another_function_is_refused(folder: Path, name: str) -> None:
    change, message = REFUSED_CONFIGS[name]
    change_config(folder, **change)
    refused(folder, message)


def test_sizes_other_than_those_of_the_weights_are_refused(folder: Path) -> None:
    change_config(folder, vocab_size=14)
    refused(folder, "wte.weight has shape (13, 12), (14, 12) is needed")


Weights = dict[str, np.ndarray]
REFUSED_WEIGHTS: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "missing": (lambda a: a.pop(SQUARE), "h.1.attn.c_proj.weight missing"),
    "one more": (lambda a: a.update({"transformer.h.2.ln_1.bias": a["transformer.ln_f.bias"]}),
                 "h.2.ln_1.bias unexpected"),
    "of a classifier": (lambda a: a.update({"transformer.score": a[SQUARE]}), "score unexpected"),
    "two prefixes": (lambda a: a.update({"ln_f.bias": a["transformer.ln_f.bias"]}),
                     "ln_f.bias is there under another name too"),
    "out, in": (lambda a: a.update({k: np.ascontiguousarray(v.T) for k, v in a.items()
                                    if k.endswith("c_fc.weight")}),
                "h.0.mlp.c_fc.weight has shape (48, 12), (12, 48) is needed"),
    "untied": (lambda a: a.update({"lm_head.weight": a["transformer.wte.weight"] + 1}),
               "lm_head.weight differs from transformer.wte.weight, the same array is needed"),
    "untied in one row more": (lambda a: a.update({"lm_head.weight": np.ones((14, 12), "f4")}),
                               "lm_head.weight has shape (14, 12), (13, 12) is needed"),
    "integers": (lambda a: a.update({SQUARE: np.ones((12, 12), np.int32)}), "is int32"),
    "not finite": (lambda a: a[SQUARE].__setitem__((0, 0), np.nan), "nan or inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_WEIGHTS)
def test_weights_that_do_not_fit_are_refused(folder: Path, name: str) -> None:
    change, message = REFUSED_WEIGHTS[name]
    change_weights(folder, change)
    refused(folder, message)


@pytest.mark.parametrize("size", (0, 7, 100, 5000))
def test_a_cut_file_of_weights_is_refused(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(folder, "model.safetensors: is not a whole safetensors file")


@pytest.mark.parametrize(
    "text", ("", "[]", "{", '{"model_type": "gpt2", "model_type": "gpt2"}', "[" * 100_000),
    ids=("empty", "list", "cut", "twice", "deep"),
)  # fmt: skip
def test_a_config_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, "config.json: ")


def test_a_folder_that_is_none_and_files_that_are_missing_are_named(folder: Path) -> None:
    refused(folder / "absent", "is no folder")
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no model.safetensors and no model.safetensors.index.json")
    (folder / "config.json").unlink()
    refused(folder, "config.json: cannot be read, No such file")
    os.mkfifo(folder / "config.json")
    refused(folder, "config.json: is no regular file")


def test_a_pickle_alone_is_refused_and_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "pytorch_model.bin")  # opening it would wait for ever
    refused(folder, "pytorch_model.bin alone, a pickle")


def sharded(folder: Path, weight_map: Any = None, split: int = 9) -> None:
    """The same weights in two shards with an index."""
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(arrays)
    places = {n: f"model-0000{1 + (i >= split)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(places.values()):
        save_file({n: arrays[n] for n in names if places[n] == file}, folder / file)
    content = {"metadata": {}, "weight_map": places if weight_map is None else weight_map(places)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_shards_are_read_as_one_file(folder: Path) -> None:
    before = import_hf(folder)
    sharded(folder)
    assert_same_bits(import_hf(folder).weights, before.weights)


SECOND = "model-00002-of-00002.safetensors"
REFUSED_INDICES: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "a path": (lambda m: {n: f"../{f}" for n, f in m.items()}, "a safetensors file of the same"),
    "a pickle": (lambda m: dict.fromkeys(m, "pytorch_model.bin"), "a safetensors file of the same"),
    "a number": (lambda m: dict.fromkeys(m, 1), "a safetensors file of the same"),
    "absent": (lambda m: dict.fromkeys(m, "other.safetensors"), "cannot be read, No such file"),
    "empty": (lambda m: {}, "weight_map is {}, files by name are needed"),
    "a list": (lambda m: list(m), "files by name are needed"),
    "one name less": (lambda m: dict(list(m.items())[:-1]), "stands in one of it and"),
    "one name moved": (lambda m: {**m, sorted(m)[0]: SECOND}, "stands in one of it and"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_INDICES)
def test_an_index_that_is_not_that_of_its_shards_is_refused(folder: Path, name: str) -> None:
    change, message = REFUSED_INDICES[name]
    sharded(folder, change)
    refused(folder, message)


def test_a_model_that_the_folder_cannot_hold_is_not_exported() -> None:
    with pytest.raises(ValueError, match="model of the source text, a GPT-2 is needed"):
        hf_files(random_checkpoint(config=GPTConfig(5, 4, 6)))
    with pytest.raises(ValueError, match=r"mask_value is -800\.0, -1e9 or less is needed"):
        hf_files(random_checkpoint(config=replace(CONFIG, mask_value=-800.0)))
