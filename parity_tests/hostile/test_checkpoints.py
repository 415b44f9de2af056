"""Hostile checkpoints one by one: a line with file and reason, nothing loaded or filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model, load_backend
from gpt_parity.checkpoint import load_checkpoint
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPTConfig
from gpt_parity.weights import get_weights, set_weights
from parity_tests.comparers import assert_same_bits
from parity_tests.hostile.refusals import (
    BIAS,
    CHECKOUT,
    COMMANDS,
    TEXT,
    checkpoint,
    joined,
    refused,
)
from parity_tests.hostile.seeds import CONFIG, packed

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own(TEXT)]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_entry(name: str, **changes: Any) -> Callable[[bytes], bytes]:
    """A checkpoint with one entry of its header changed."""

    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        header[name] |= changes
        return joined(header, payload)

    return changed


def with_name(new: str) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        header[new] = header.pop(f"model/{BIAS}")
        return joined(header, payload)

    return changed


def with_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        manifest = json.loads(header["__metadata__"]["manifest"])
        change(manifest)
        header["__metadata__"]["manifest"] = json.dumps(manifest)
        return joined(header, payload)

    return changed


def with_number(name: str, value: float) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        header, payload = split(data)
        start = header[name]["data_offsets"][0]
        return joined(header, payload[:start] + np.float32(value).tobytes() + payload[start + 4 :])

    return changed


def twice(data: bytes) -> bytes:
    """The first name of the header once more, with the same entry."""
    header, payload = split(data)
    name = f"model/{BIAS}"
    return joined(json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}', payload)


WEIGHT = f"model/{BIAS}"
CHECKPOINTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "zero bytes": (lambda data: b"", "is not a whole safetensors file"),
    "cut in the length": (lambda data: data[:5], "is not a whole safetensors file"),
    "cut after the length": (lambda data: data[:8], "0 are there"),
    "cut in the header": (lambda data: data[:100], "92 are there"),
    "cut after the header": (lambda data: joined(split(data)[0], b""), "is not a whole"),
    "cut by one byte": (lambda data: data[:-1], "is not a whole safetensors file"),
    "one byte more": (lambda data: data + b"\0", "is not a whole safetensors file"),
    "wrong magic": (lambda data: b"\x89PNG\r\n\x1a\n" + data, "is not a whole safetensors file"),
    "zip magic": (lambda data: packed([("x.npy", data)], False, []), "is not a whole"),
    "header of 2**63 bytes": (
        lambda data: (2**63).to_bytes(8, "little") + data[8:], "header of 9223372036854775808"),
    "header of 2**64 - 1 bytes": (lambda data: b"\xff" * 8 + data[8:], "18446744073709551615"),
    "shape of 2**62": (with_entry(WEIGHT, shape=[2**62]), "is not a whole safetensors file"),
    "shape of 2**31 by 2**31": (with_entry(WEIGHT, shape=[2**31, 2**31]), "is not a whole"),
    "shape of 2**62 by 0": (
        with_entry(WEIGHT, shape=[2**62, 0], data_offsets=[0, 0]), "is not a whole"),
    "negative shape": (with_entry(WEIGHT, shape=[-5]), "is not a whole safetensors file"),
    "offsets beyond the file": (
        with_entry(WEIGHT, shape=[2**40], data_offsets=[0, 2**42]), "is not a whole"),
    "NaN in a weight": (with_number(WEIGHT, np.nan), "output.output.bias has 1 of 5 values"),
    "inf in a moment": (with_number(f"optimizer/exp_avg/{BIAS}", np.inf), "exp_avg: output"),
    "another vocabulary": (
        with_manifest(lambda m: m.update(vocabulary="abcdef")), "6 characters, 5 are needed"),
    "a vocabulary out of order": (with_manifest(lambda m: m.update(vocabulary="bacde")), "order"),
    "another context": (
        with_manifest(lambda m: m["config"].update(context_size=4)),
        "positional_embedding.weight has shape (3, 2), (4, 2) is needed"),
    "a width beyond all numbers": (
        with_manifest(lambda m: m["config"].update(embedding_size=2**63)), "has shape"),
    "a size that is a text": (
        with_manifest(lambda m: m["config"].update(blocks="1")), "blocks is '1', a number"),
    "an integer of 5000 digits": (
        lambda data: with_text(data, '\\"blocks\\": 1', '\\"blocks\\": ' + "9" * 5000),
        "an integer of 5000 digits"),
    "a key twice in the manifest": (
        lambda data: with_text(data, '\\"step\\": 0', '\\"step\\": 0, \\"step\\": 1'),
        "'step' stands twice"),
    "a name twice": (twice, "'model/output.output.bias' stands twice"),
    "a foreign name": (with_name("attacker"), "arrays: attacker unexpected"),
    "a name with ..": (with_name(f"model/../{BIAS}"), "is no name"),
    "a name from the root": (with_name("/etc/passwd"), "'/etc/passwd' is no name"),
    "a name of two lines": (with_name("model/a\nb"), r"'model/a\nb' is no name"),
    "a name of terminal codes": (with_name("model/\x1b[2J"), r"'model/\x1b[2J' is no name"),
    "a name of 5000 letters": (with_name("m" * 5000), "is no name"),
}  # fmt: skip


def with_text(data: bytes, old: str, new: str) -> bytes:
    header, payload = split(data)
    text = json.dumps(header)
    assert text.count(old) == 1
    return joined(text.replace(old, new), payload)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_one_line_that_names_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = CHECKPOINTS[name]
    whole = checkpoint()
    assert load_checkpoint(Path("c.safetensors")).config == CONFIG
    Path("c.safetensors").write_bytes(change(whole))
    with pytest.raises(ValueError, match=r"\Ac\.safetensors: ") as caught:
        load_checkpoint(Path("c.safetensors"))
    assert message in str(caught.value) and str(caught.value).isprintable()
    for arguments in COMMANDS.values():
        err = refused([*arguments, "c.safetensors"], capsys)
        assert "c.safetensors: " in err and message in err


# What a process may take for a file of some kilobytes: the libraries, and little more.
LIMITED = (
    "import resource, sys; from gpt_parity.cli import main; from gpt_parity import runs; "
    "own = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
    "resource.setrlimit(resource.RLIMIT_AS, (own + 2**28, own + 2**28)); sys.exit(main())"
)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to limit memory: run on Linux")
@pytest.mark.parametrize("size", ("blocks", "vocab_size", "context_size", "embedding_size"))
@pytest.mark.parametrize("value", (10**8, 2**62))
def test_a_huge_configuration_takes_neither_time_nor_memory(size: str, value: int) -> None:
    change = with_manifest(lambda manifest: manifest["config"].update({size: value}))
    Path("c.safetensors").write_bytes(change(checkpoint()))
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, *COMMANDS["generate"], "c.safetensors"], timeout=60,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("gpt-parity: error: c.safetensors: "), result.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_another_model_is_never_partly_loaded(backend: str) -> None:
    """Of two blocks into one and back, and of other sizes: neither weights nor moments change."""
    configs = (CONFIG, GPTConfig(5, 3, 2, 2), GPTConfig(5, 3, 4, 1), GPTConfig(4, 3, 2, 1))
    for i, config in enumerate(configs):
        checkpoint(f"{i}.safetensors", config)
    for i, config in enumerate(configs):
        model = build_model(backend, config, seed=7)
        optimizer = load_backend(backend).AdamWOptimizer(model.parameters())
        weights = get_weights(model)
        for j in range(len(configs)):
            if i == j:
                continue
            saved = load_checkpoint(Path(f"{j}.safetensors"))
            for moment in ("exp_avg", "exp_avg_sq"):
                for array in saved.optimizer[moment].values():
                    array[...] = 7.0
            with pytest.raises(ValueError, match="weights: "):
                set_weights(model, saved.weights)
            assert_same_bits(get_weights(model), weights)
            with pytest.raises(ValueError, match="exp_avg: "):
                saved.load_optimizer(model, optimizer)
            state = optimizer.state()
            assert not any(a.any() for m in ("exp_avg", "exp_avg_sq") for a in state[m])
            assert set(state["steps"]) == {0}
