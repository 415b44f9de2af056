"""The two files of llm.c: what is in them, read by a reader of its own, and what they judge."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt_parity.arrays import write_arrays
from gpt_parity.cli import main
from gpt_parity.model_config import GPT2Config
from gpt_parity.oracle.bundle import Bundle, make_bundle
from gpt_parity.oracle.bundle_files import load_bundle, save_bundle
from gpt_parity.oracle.llmc import pair, read_ids, read_llmc, read_state, write_pair
from gpt_parity.oracle.subject import order_one, read_weights
from gpt_parity.oracle.verdict import check_file
from gpt_parity.oracle_config import CheckConfig
from parity_tests.comparers import assert_same_bits
from parity_tests.interop import styled_gpt2

PREFIX = "gpt2_124M"
CONFIG = GPT2Config(13, 7, 12, 2, heads=3)
# Small, and quick to export.
SIZES = ["--preset", "gpt2-tiny", "--vocab-size", "5", "--context-size", "3", "--embedding-size",
         "4", "--blocks", "1", "--heads", "2", "--batch-size", "2", "--length", "3"]  # fmt: skip


def made(config: GPT2Config, batch: int, length: int) -> Bundle:
    tokens, targets = np.random.default_rng(5).integers(0, config.vocab_size, (2, batch, length))
    return make_bundle(config, order_one(config, 0), tokens, targets, votes=False)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return made(CONFIG, 5, 6)


@pytest.fixture(scope="module")
def folder(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference and the pair, which nobody changes."""
    folder = tmp_path_factory.mktemp("llmc")
    save_bundle(folder / "ref.npz", bundle)
    write_pair(folder, bundle, PREFIX)
    return folder


def independent_reader(folder: Path) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Both files by the C project's documentation of its own structures, nothing of ours."""
    checkpoint = (folder / f"{PREFIX}.bin").read_bytes()
    state = (folder / f"{PREFIX}_debug_state.bin").read_bytes()
    assert struct.unpack_from("<2i", checkpoint) == (20240326, 3)
    context, vocab, layers, heads, width, rows = struct.unpack_from("<6i", checkpoint, 8)
    assert not any(checkpoint[32:1024])
    order = [
        ("wte", (rows, width)), ("wpe", (context, width)),
        ("ln1w", (layers, width)), ("ln1b", (layers, width)),
        ("qkvw", (layers, 3 * width, width)), ("qkvb", (layers, 3 * width)),
        ("attprojw", (layers, width, width)), ("attprojb", (layers, width)),
        ("ln2w", (layers, width)), ("ln2b", (layers, width)),
        ("fcw", (layers, 4 * width, width)), ("fcb", (layers, 4 * width)),
        ("fcprojw", (layers, width, 4 * width)), ("fcprojb", (layers, width)),
        ("lnfw", (width,)), ("lnfb", (width,)),
    ]  # fmt: skip

    def parameters(content: bytes, place: int, prefix: str) -> dict[str, np.ndarray]:
        found = {}
        for name, shape in order:
            count = int(np.prod(shape))
            found[prefix + name] = np.frombuffer(content, "<f4", count, place).reshape(shape)
            place += 4 * count
        assert place == len(content)
        return found

    arrays = parameters(checkpoint, 1024, "")
    magic, version, batch, length = struct.unpack_from("<4i", state)
    assert (magic, version) == (20240327, 2)
    assert not any(state[16:1024])
    count, place = batch * length, 1024
    for name in ("x", "y"):
        arrays[name] = np.frombuffer(state, "<i4", count, place).reshape(batch, length)
        place += 4 * count
    logits = np.frombuffer(state, "<f4", count * vocab, place)
    arrays["logits"] = logits.reshape(batch, length, vocab)
    place += 4 * count * vocab
    arrays["loss"] = np.frombuffer(state, "<f4", 1, place)
    arrays |= parameters(state, place + 4, "d")
    sizes = {"V": vocab, "C": context, "E": width, "layers": layers, "heads": heads, "rows": rows}
    return sizes, arrays


@pytest.mark.parametrize(
    ("config", "batch", "length"),
    [
        (CONFIG, 5, 6),
        (GPT2Config(1, 1, 1, 1, heads=1), 2, 1),
        (GPT2Config(128, 3, 4, 1, heads=4), 1, 2),
        (GPT2Config(130, 4, 6, 3, heads=2), 2, 4),
    ],
    ids=str,
)
def test_an_independent_reader_and_autograd_find_what_the_pair_says(
    config: GPT2Config, batch: int, length: int, tmp_path: Path
) -> None:
    """Torch's autograd on the arrays as they lie in the checkpoint, in float64."""
    bundle = made(config, batch, length)
    write_pair(tmp_path, bundle, PREFIX)
    sizes, found = independent_reader(tmp_path)
    rows = -(-config.vocab_size // 128) * 128
    assert sizes == {
        "V": config.vocab_size, "C": config.context_size, "E": config.embedding_size,
        "layers": config.blocks, "heads": config.heads, "rows": rows,
    }  # fmt: skip
    assert np.array_equal(found["x"], bundle.tokens)
    assert np.array_equal(found["y"], bundle.targets)
    assert not found["wte"][config.vocab_size :].any()
    assert not found["dwte"][config.vocab_size :].any()
    names = [n for n in found if f"d{n}" in found]
    assert len(names) == 16
    arrays = {n: found[n].astype(np.float64) for n in names}
    own = styled_gpt2.run(
        arrays, found["x"], found["y"].astype(np.int64), config.heads, "llm.c", config.vocab_size
    )
    eps = float(np.finfo(np.float32).eps)
    for name, array in own.items():
        theirs = found[f"d{name}" if name in names else name]
        if name == "logits":
            array = array[..., : config.vocab_size]
        size = float(np.linalg.norm(array))
        # Half an ulp for each element, and what float64 sums differ by.
        assert np.linalg.norm(theirs - array) <= eps * size + 1e-13, name


def test_every_value_is_the_float64_reference_rounded_once(bundle: Bundle, folder: Path) -> None:
    _, found = independent_reader(folder)
    for block in range(2):
        name = f"transformers.{block}.attention.input"
        gradient = bundle.parameters[f"{name}.weight"].astype(np.float32)
        assert np.array_equal(found["dqkvw"][block], gradient)
        assert np.array_equal(found["qkvb"][block], bundle.weights[f"{name}.bias"])
    assert np.array_equal(found["dwte"][:13], bundle.parameters[
        "embedding.embedding.weight"].astype(np.float32))  # fmt: skip
    assert np.array_equal(found["logits"], bundle.values["output"].astype(np.float32))
    assert found["loss"] == bundle.arrays["loss"].astype(np.float32)


def test_the_readers_give_back_what_was_written(bundle: Bundle, folder: Path) -> None:
    checkpoint, state = pair(folder, PREFIX)
    config, weights = read_llmc(checkpoint)
    assert config == CONFIG
    assert_same_bits(weights, {n: w.astype(np.float32) for n, w in bundle.weights.items()})
    assert read_weights(checkpoint)[0] == read_weights(checkpoint, 3, "llm.c")[0] == CONFIG
    ids = read_ids(state)
    assert_same_bits(ids, {"tokens": bundle.tokens, "targets": bundle.targets})
    results = read_state(state, CONFIG)
    assert results["logits"].shape == (5, 6, 13) and results["wte"].shape == (128, 12)


def test_somebodys_debug_state_is_judged(folder: Path, tmp_path: Path) -> None:
    """One wrong row of one stack is found; so is a logit."""
    _, state = pair(folder, PREFIX)
    config = CheckConfig(ref=folder / "ref.npz", style="llm.c")
    report = check_file(state, config)
    assert report.ok and report.title == "float32"
    assert len(report.judgements) == 30
    content = bytearray(state.read_bytes())
    # The gradient of fcw, block 1: behind the state's own, then eleven arrays less one.
    before = 128 * 12 + 7 * 12 + 2 * (12 + 12 + 36 * 12 + 36 + 12 * 12 + 12 + 12 + 12)
    start = 1024 + 8 * 30 + 4 * 30 * 13 + 4 + 4 * (before + 48 * 12)
    rows = np.frombuffer(content, "<f4", 48 * 12, start)
    content[start : start + 4 * 48 * 12] = (rows * np.float32(1.01)).tobytes()
    mine = tmp_path / "mine_debug_state.bin"
    mine.write_bytes(content)
    report = check_file(mine, config)
    assert [j.name for j in report.judgements if not j.ok] == [
        "grad/transformers.1.feed_forward.input.weight"
    ]
    assert (
        "in style llm.c: grad/transformers.1.feed_forward.input.weight is grad/fcw, row 1 of 2"
        in report.notes
    )
    content = bytearray(state.read_bytes())
    content[1024 + 8 * 30 : 1024 + 8 * 30 + 4] = struct.pack("<f", 9.0)
    mine.write_bytes(content)
    first = check_file(mine, config).first
    assert first is not None and first.name == "value/output"


def test_a_debug_state_without_padding_is_read_too(folder: Path, tmp_path: Path) -> None:
    _, state = pair(folder, PREFIX)
    content = state.read_bytes()
    wte = 1024 + 8 * 30 + 4 * 30 * 13 + 4
    short = content[: wte + 4 * 13 * 12] + content[wte + 4 * 128 * 12 :]
    (tmp_path / "short.bin").write_bytes(short)
    config = CheckConfig(ref=folder / "ref.npz", style="llm.c")
    assert check_file(tmp_path / "short.bin", config).ok


# --- commands -------------------------------------------------------------------------------------


def export(*flags: str) -> int:
    return main(["oracle", "export", *flags])


def test_from_a_pair_to_a_reference_to_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export(*SIZES, "--format", "llm.c", "-o", "pair") == 0
    assert sorted(p.name for p in Path("pair").iterdir()) == [
        "gpt2_124M.bin", "gpt2_124M_debug_state.bin",
    ]  # fmt: skip
    mine = Path("pair/gpt2_124M_debug_state.bin")
    assert export("--weights", "pair/gpt2_124M.bin", "--tokens", str(mine), "-o", "ref") == 0
    assert load_bundle(Path("ref")).config == GPT2Config(5, 3, 4, 1, heads=2)
    capsys.readouterr()
    assert main(["oracle", "check", str(mine), "--ref", "ref", "--style", "llm.c"]) == 0
    assert "float32: PASS: 18 tensors agree" in capsys.readouterr().out
    assert main(["oracle", "check", str(mine), "--ref", "ref"]) == 2
    assert "another ending" in capsys.readouterr().err
    # The same as a preset's bundle, whose weights float32 holds.
    assert export(*SIZES, "-o", "drawn.npz") == 0
    assert main(["oracle", "check", str(mine), "--ref", "drawn.npz", "--style", "llm.c"]) == 0


def test_only_a_pair_is_replaced_and_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*SIZES, "--format", "llm.c", "-o", "pair", "--prefix", "small"]
    assert export(*flags) == 0
    before = {p: p.read_bytes() for p in Path("pair").iterdir()}
    assert sorted(p.name for p in before) == ["small.bin", "small_debug_state.bin"]
    assert export(*flags, "--seed", "1") == 2
    assert "exists already" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in Path("pair").iterdir()} == before
    assert export(*flags, "--overwrite") == 0  # the same sizes and seed: the same bytes
    assert {p: p.read_bytes() for p in Path("pair").iterdir()} == before
    assert export(*flags, "--seed", "1", "--overwrite") == 0
    assert {p: p.read_bytes() for p in Path("pair").iterdir()} != before
    capsys.readouterr()
    Path("pair/small.bin").write_bytes(b"x" * 2000)
    assert export(*flags, "--overwrite") == 2
    assert "none of llm.c" in capsys.readouterr().err
    assert Path("pair/small.bin").read_bytes() == b"x" * 2000


EXPORT_FAULTS = {
    "steps": ([*SIZES, "--steps", "1"], "the format llm.c holds no steps"),
    "the text's model": (["--preset", "tiny"], "only a GPT-2 can be written so"),
    "a prefix that is a path": ([*SIZES, "--prefix", "../x"], "prefix is '../x'"),
    "a prefix that is empty": ([*SIZES, "--prefix", ""], "prefix is ''"),
    "a prefix of dots": ([*SIZES, "--prefix", ".."], "prefix is '..'"),
    "another format": ([*SIZES, "--format", "gguf"], "gguf"),
    "a file": ([*SIZES, "-o", "file"], "is no folder"),
    "no parent": ([*SIZES, "-o", "absent/pair"], "its folder does not exist"),
}


def test_a_pair_that_was_begun_is_never_half_old(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the second file: the first is whole, and no state of another one beside it."""
    checkpoint, state = write_pair(tmp_path, bundle, "a")
    written: list[Path] = []

    def once(path: Path, data: bytes) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        path.write_bytes(data)

    monkeypatch.setattr("gpt_parity.oracle.llmc.write_atomically", once)
    with pytest.raises(OSError, match="No space left"):
        write_pair(tmp_path, bundle, "a")
    assert written == [checkpoint] and not state.exists()


@pytest.mark.parametrize("fault", EXPORT_FAULTS)
def test_what_cannot_be_exported_is_one_line(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    flags, message = EXPORT_FAULTS[fault]
    flags = flags if "--format" in flags else [*flags, "--format", "llm.c"]
    assert export(*flags, *([] if "-o" in flags else ["-o", "pair"])) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert [p.name for p in Path().iterdir()] == ["file"]


def test_numbers_beyond_float32_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = GPT2Config(5, 3, 4, 1, heads=2)
    bundle = made(config, 2, 3)
    bundle.arrays["grad/norm.bias"][0] = 1e39
    with pytest.raises(ValueError, match="lnfb has values that float32 does not hold"):
        write_pair(tmp_path / "pair", bundle, PREFIX)
    assert not (tmp_path / "pair").exists()


def _at(place: int, value: int) -> Callable[[bytearray], bytes]:
    def change(content: bytearray) -> bytes:
        struct.pack_into("<i", content, 4 * place, value)
        return bytes(content)

    return change


# In the checkpoint.
DAMAGE: dict[str, tuple[Callable[[bytearray], bytes], str]] = {
    "empty": (lambda c: b"", "is no checkpoint of llm.c (0 bytes)"),
    "a zip": (lambda c: b"PK\x03\x04" * 1000, "is no checkpoint of llm.c (begins with"),
    "a debug state": (_at(0, 20240327), "begins with 20240327, 20240326 is needed"),
    "bfloat16": (_at(1, 5), "of version 5, 3 (float32) is needed"),
    "an old version": (_at(1, 1), "of version 1, 3 (float32) is needed"),
    "no context": (_at(2, 0), "context_size"),
    "a negative vocabulary": (_at(3, -1), "vocab_size"),
    "more layers": (_at(4, 3), "is not whole"),
    "a billion layers": (_at(4, 2**30), "blocks is"),
    "heads that do not fit": (_at(5, 5), "a multiple of heads = 5"),
    "another width": (_at(6, 24), "is not whole"),
    "a huge width": (_at(6, 3 * 2**29), "is not whole"),
    "fewer rows": (_at(7, 12), "has 12 rows of tokens, at least V = 13"),
    "more rows": (_at(7, 256), "is not whole"),
    "cut": (lambda c: bytes(c[:-1]), "is not whole"),
    "longer": (lambda c: bytes(c) + b"\0\0\0\0", "is not whole"),
    "padding": (_at(256 + 13 * 12, 1), "wte has 1.4013e-45 in its padding beyond V = 13"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_one_line(damage: str, folder: Path, tmp_path: Path) -> None:
    change, message = DAMAGE[damage]
    path = tmp_path / "w.bin"
    path.write_bytes(change(bytearray((folder / f"{PREFIX}.bin").read_bytes())))
    with pytest.raises(ValueError) as caught:
        read_llmc(path)
    said = str(caught.value)
    assert said.startswith(str(path)) and message in said and "\n" not in said


STATE_DAMAGE: dict[str, tuple[Callable[[bytearray], bytes], str]] = {
    "a checkpoint": (_at(0, 20240326), "begins with 20240326, 20240327 is needed"),
    "a version": (_at(1, 1), "debug state of llm.c of version 1, 2 (float32) is needed"),
    "no batch": (_at(2, 0), "is of 0 x 6 tokens"),
    "beyond the context": (_at(3, 8), "is of 5 x 8 tokens, up to C = 7"),
    "a huge batch": (_at(2, 2**31 - 1), "is not whole"),
    "cut": (lambda c: bytes(c[:-4]), "is not whole"),
    "cut in the header": (lambda c: bytes(c[:100]), "is no debug state of llm.c (100 bytes)"),
    "longer": (lambda c: bytes(c) + b"\0", "is not whole"),
    "other tokens": (_at(256, 12), "tokens differs from the bundle's"),
    "padding": (
        _at(256 + 60 + 30 * 13 + 1 + 14 * 12, 1), "grad/wte has 1.4013e-45 in its padding"),
}  # fmt: skip


@pytest.mark.parametrize("damage", STATE_DAMAGE)
def test_damaged_debug_states_are_one_line(damage: str, folder: Path, tmp_path: Path) -> None:
    change, message = STATE_DAMAGE[damage]
    content = bytearray((folder / f"{PREFIX}_debug_state.bin").read_bytes())
    assert content[1024:1028] != struct.pack("<i", 12)
    path = tmp_path / "mine.bin"
    path.write_bytes(change(content))
    with pytest.raises(ValueError) as caught:
        check_file(path, CheckConfig(ref=folder / "ref.npz", style="llm.c"))
    said = str(caught.value)
    assert said.startswith(str(path)) and message in said and "\n" not in said


def test_what_a_checkpoint_says_is_not_contradicted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = folder / f"{PREFIX}.bin"
    with pytest.raises(ValueError, match="heads is 2"):
        read_weights(checkpoint, 2)
    with pytest.raises(ValueError, match="a checkpoint with names of its own"):
        read_weights(checkpoint, None, "hf")
    with pytest.raises(ValueError, match="there is no such file"):
        read_llmc(folder / "absent.bin")
    with pytest.raises(ValueError, match="there is no such file"):
        read_llmc(folder)


def test_a_debug_state_needs_a_gpt2_as_its_reference(folder: Path, tmp_path: Path) -> None:
    assert main(["oracle", "export", "--preset", "tiny", "-o", str(tmp_path / "r.npz")]) == 0
    with pytest.raises(ValueError, match="only a GPT-2"):
        check_file(
            folder / f"{PREFIX}_debug_state.bin",
            CheckConfig(ref=tmp_path / "r.npz", style="llm.c"),
        )


def test_sixteen_named_arrays_are_judged_as_the_file_is(folder: Path, tmp_path: Path) -> None:
    results = read_state(folder / f"{PREFIX}_debug_state.bin", CONFIG)
    write_arrays(tmp_path / "mine.npz", results, "{}")
    config = CheckConfig(ref=folder / "ref.npz", style="llm.c")
    one, other = (check_file(path, config) for path in (
        tmp_path / "mine.npz", folder / f"{PREFIX}_debug_state.bin"))  # fmt: skip
    assert one.judgements == other.judgements
