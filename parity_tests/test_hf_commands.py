"""The commands import-hf and export-hf, and what others do with a checkpoint they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gpt_parity.backends import build_model
from gpt_parity.bpe import BytePairTokenizer
from gpt_parity.checkpoint import load_checkpoint, save_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.cli import main
from gpt_parity.files import write_folder
from gpt_parity.hf import hf_files, import_hf
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle_config import VerifyConfig
from gpt_parity.training import stream
from gpt_parity.verify import subject_of
from gpt_parity.weights import get_weights, set_weights
from parity_tests.byte_pairs import TEXT, needs_tokenizers, trained
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
    library,
    needs_transformers,
)

pytestmark = pytest.mark.reference("another library")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a random GPT-2."""
    write_folder(tmp_path / "gpt2", hf_files(random_checkpoint()))
    return tmp_path / "gpt2"


TEXT_CONFIG = GPT2Config(307, 24, 16, 2, heads=4)  # 7 ids more than the tokenizer has


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    checkpoint = random_checkpoint(config=TEXT_CONFIG, tokenizer_json=trained())
    write_folder(tmp_path / "text", hf_files(checkpoint))
    return tmp_path / "text"


@needs_tokenizers
@needs_transformers
@pytest.mark.parametrize("backend", BACKENDS)
def test_text_of_an_imported_model_is_that_of_the_library(
    text_folder: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    """The likeliest token at each place, with prompts and windows within the context."""
    prompt = "Früh \u4f60"
    library_of = library()
    tokenizer = library_of.AutoTokenizer.from_pretrained(text_folder)
    model = library_of.GPT2LMHeadModel.from_pretrained(text_folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    steps = 24 - ids.shape[1]
    with torch.no_grad():
        for _ in range(steps):  # ids of the padding are never drawn
            best = model(ids).logits[0, -1, :300].argmax()
            ids = torch.cat([ids, best.view(1, 1)], dim=1)
    expected = tokenizer.decode(ids[0], clean_up_tokenization_spaces=False)
    out = text_folder.with_name("checkpoint")
    assert main(["import-hf", str(text_folder), "--out", str(out)]) == 0
    capsys.readouterr()
    command = ["generate", "--checkpoint", str(out), "--prompt", prompt, "--tokens", str(steps)]
    assert main([*command, "--temperature", "0", "--backend", backend]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert len(expected) > len(prompt) + 5


@needs_tokenizers
def test_ids_of_the_padding_are_never_drawn(text_folder: Path, tmp_path: Path) -> None:
    imported = import_hf(text_folder)
    model = imported.build_model()
    weights = get_weights(model)
    table = weights["embedding.embedding.weight"]
    table[300:] = 40 * weights["norm.bias"]  # they would win everywhere
    weights["norm.weight"][...] = 0.0
    set_weights(model, weights)
    logits = model.predict(np.zeros((1, 3), int))
    assert (logits.argmax(-1) >= 300).all()
    for temperature, top_k in ((0.0, None), (1.0, None), (1.0, 3), (float("inf"), None)):
        text = "".join(stream(model, imported.tokenizer, "a", 40, temperature, top_k))
        assert text


@needs_tokenizers
@pytest.mark.parametrize("form", ("folder", "file.safetensors"))
def test_import_and_export_by_command_are_the_same_to_the_bit(
    text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    out, back = tmp_path / form, tmp_path / "back"
    assert main(["import-hf", str(text_folder), "--out", str(out)]) == 0
    assert "byte pairs" in capsys.readouterr().out
    checkpoint = load_checkpoint(out)
    assert checkpoint.tokenizer.encode(TEXT).size and checkpoint.run is None
    assert main(["export-hf", str(out), "--out", str(back)]) == 0
    files = {p.name: p.read_bytes() for p in text_folder.iterdir()}
    assert files == {p.name: p.read_bytes() for p in back.iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json",
                          "tokenizer_config.json"}  # fmt: skip


@needs_tokenizers
def test_the_text_can_be_left_out(text_folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert main(["import-hf", str(text_folder), "--without-text", "--out", out]) == 0
    assert not load_checkpoint(tmp_path / "out").has_text


@needs_tokenizers
def test_a_tokenizer_that_does_not_fit_is_refused_with_the_way_out(text_folder: Path) -> None:
    (text_folder / "tokenizer.json").write_text(trained(310))
    refused(
        text_folder, "tokenizer has 310 ids, at most the model's 307 are needed; --without-text"
    )
    (text_folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    refused(text_folder, "tokenizer.json: tokenizer has the model 'Unigram', BPE is needed; --with")


def one_error(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert main(list(command)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1, err
    return err


def test_a_model_without_text_generates_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(folder.with_name("out"))
    assert main(["import-hf", str(folder), "--out", out]) == 0
    error = one_error(capsys, "generate", "--checkpoint", out, "--prompt", "x")
    assert "a model without text, one with text is needed" in error


@needs_tokenizers
def test_verify_and_oracle_take_what_was_imported(
    text_folder: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT * 4, encoding="utf-8")
    for source in (text_folder, folder):
        out = str(tmp_path / f"{source.name}.safetensors")
        assert main(["import-hf", str(source), "--out", out]) == 0
        bundle = str(tmp_path / f"{source.name}.npz")
        assert main(["oracle", "export", "--weights", out, "-o", bundle]) == 0
    text = subject_of(VerifyConfig(checkpoint=tmp_path / "text.safetensors", data=corpus))
    ids = BytePairTokenizer(trained()).encode(TEXT * 4)
    tokens, targets = text.dataset.batch("train", 0)
    np.testing.assert_array_equal(tokens[1], ids[12:36])  # every half context
    np.testing.assert_array_equal(targets[1], ids[13:37])
    capsys.readouterr()
    assert main(["verify", "--checkpoint", out, "--steps", "0"]) == 0
    assert "ids drawn with seed 42: no text" in capsys.readouterr().out
    error = one_error(capsys, "verify", "--checkpoint", out, "--data", str(corpus))
    assert "data is given, but the model of the checkpoint has no text" in error


def test_nothing_but_a_checkpoint_alone_is_overwritten_by_an_import(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["import-hf", str(folder), "--out", str(out)]
    assert main(command) == 0
    first = (out / "checkpoint.safetensors").read_bytes()
    assert "exists already; --overwrite" in one_error(capsys, *command)
    change_weights(folder, lambda a: a[SQUARE].__setitem__((0, 0), 9.0))
    assert main([*command, "--overwrite"]) == 0
    assert (out / "checkpoint.safetensors").read_bytes() != first
    (out / "metrics.jsonl").write_text("")
    assert "holds metrics.jsonl too" in one_error(capsys, *command, "--overwrite")
    weights = (folder / "model.safetensors").read_bytes()
    over = ["import-hf", str(folder), "--out", str(folder / "model.safetensors"), "--overwrite"]
    assert "is no checkpoint, which alone is overwritten" in one_error(capsys, *over)
    assert (folder / "model.safetensors").read_bytes() == weights
    nowhere = ["import-hf", str(folder), "--out", str(tmp_path / "no" / "such")]
    assert "its folder does not exist" in one_error(capsys, *nowhere)


def test_a_refused_import_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, n_head=5)
    before = sorted(tmp_path.iterdir())
    one_error(capsys, "import-hf", str(folder), "--out", str(tmp_path / "out"))
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_but_a_folder_of_a_gpt2_is_overwritten_by_an_export(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "mine.safetensors"
    assert main(["import-hf", str(folder), "--out", str(checkpoint)]) == 0
    command = ["export-hf", str(checkpoint), "--out", str(folder)]
    assert "exists already; --overwrite" in one_error(capsys, *command)
    change_config(folder, n_head=4)
    (folder / "generation_config.json").write_text("{}")
    assert main([*command, "--overwrite"]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert import_hf(folder).config == CONFIG
    (folder / "thesis.txt").write_text("years")
    assert "holds thesis.txt too" in one_error(capsys, *command, "--overwrite")
    (folder / "thesis.txt").rename(folder / "vocab.json")
    change_config(folder, model_type="bert")
    assert "is of a 'bert', a GPT-2 alone" in one_error(capsys, *command, "--overwrite")
    over = ["export-hf", str(checkpoint), "--out", str(checkpoint), "--overwrite"]
    assert "is no folder" in one_error(capsys, *over)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2", "mine.safetensors"]


def test_characters_have_no_place_in_such_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.safetensors"
    config = GPT2Config(5, 4, 6, 2, heads=2)
    model = build_model("torch", config, seed=3)
    save_checkpoint(path, model, config=config, vocabulary="abcde")
    assert main(["export-hf", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "5 characters" in (said := capsys.readouterr().out) and "left out" in said
    assert_same_bits(import_hf(tmp_path / "out").weights, get_weights(model))


def test_a_checkpoint_of_characters_has_the_bytes_it_had_and_others_a_newer_version(
    tmp_path: Path,
) -> None:
    """A reader of the older version must not take byte pairs, or no text, for characters."""
    config = GPT2Config(5, 4, 6, 1, heads=2)
    model = build_model("numpy", config, seed=3)
    for vocabulary, version in (("abcde", 2), (None, 3)):
        path = tmp_path / f"{version}.safetensors"
        save_checkpoint(path, model, config=config, vocabulary=vocabulary)
        header = path.read_bytes()
        length = int.from_bytes(header[:8], "little")
        manifest = json.loads(json.loads(header[8 : 8 + length])["__metadata__"]["manifest"])
        assert manifest["version"] == version
        assert ("tokenizer" in manifest) == (version == 3)


@pytest.mark.parametrize(
    ("content", "vocabulary", "message"),
    (
        ({"kind": "byte-pair"}, "", "tokenizer is {'kind': 'byte-pair'}"),
        ({"kind": "byte-pair", "json": 3}, "", "tokenizer is"),
        ({"kind": "none", "json": "{}"}, "", "tokenizer is"),
        ({"kind": "words"}, "", "tokenizer is"),
        (None, "", "tokenizer is None"),
        ([], "", "tokenizer is []"),
        ({"kind": ["none"]}, "", "tokenizer is"),
        ({"kind": "none"}, "abcde", "has a vocabulary and a tokenizer"),
    ),
)
def test_a_manifest_with_a_tokenizer_that_is_none_is_refused(
    tmp_path: Path, content: Any, vocabulary: str, message: str
) -> None:
    config, path = GPT2Config(5, 4, 6, 1, heads=2), tmp_path / "a.safetensors"
    save_checkpoint(path, build_model("numpy", config), config=config, vocabulary=None)
    arrays = load_file(path)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    manifest = json.loads(header["__metadata__"]["manifest"])
    manifest |= {"tokenizer": content, "vocabulary": vocabulary}
    save_file(arrays, path, metadata={"manifest": json.dumps(manifest)})
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path)
    assert message in str(caught.value), str(caught.value)
