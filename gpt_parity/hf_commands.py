"""The commands `import-hf` and `export-hf`: a GPT-2 from and to the library transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from gpt_parity.checkpoint import Checkpoint

# What the library writes into the folder of a GPT-2; nothing else is ever replaced.
THEIRS = re.compile(
    r"(generation_|tokenizer_)?config\.json|tokenizer\.json|vocab\.json|merges\.txt"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template\.jinja"
    r"|model(-[0-9]+-of-[0-9]+)?\.safetensors|model\.safetensors\.index\.json"
)


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Where to write what is imported."""

    out: Annotated[Path, Parameter(name=["--out", "-o"])]
    """Checkpoint to write: FILE.safetensors, or else a folder for one."""
    overwrite: bool = False
    """Replace the checkpoint that is there."""
    without_text: bool = False
    """Leave the tokenizer out, and with it the library it needs; nothing can be generated then."""


@dataclass(frozen=True, kw_only=True)
class ExportHfConfig:
    """Where to write what is exported."""

    out: Annotated[Path, Parameter(name=["--out", "-o"])]
    """Folder to write, for GPT2LMHeadModel.from_pretrained and AutoTokenizer."""
    overwrite: bool = False
    """Replace the folder of a GPT-2 that is there."""


def import_hf(folder: Path, /, *, config: Annotated[ImportConfig, Parameter(name="*")]) -> int:
    """Make a checkpoint of a GPT-2 from a folder of the library transformers.

    For verify, generate and oracle export. Nothing is downloaded, and no pickle is read.

    Example: gpt-parity import-hf gpt2 --out gpt2-checkpoint

    Parameters
    ----------
    folder
        Local folder with config.json, model.safetensors or its shards, and tokenizer files if any.
    """
    from gpt_parity import hf
    from gpt_parity.backends import thread_limit

    with thread_limit(1, "numpy"):
        require_free_checkpoint(config.out, config.overwrite)
        checkpoint = hf.import_hf(folder, with_text=not config.without_text)
        path = save_imported(checkpoint, config.out)
    print(f"{path}: {described(checkpoint)}")
    return 0


def export_hf(
    checkpoint: Path, /, *, config: Annotated[ExportHfConfig, Parameter(name="*")]
) -> int:
    """Make a folder for the library transformers of a GPT-2's checkpoint.

    Weights, sizes and a byte-pair tokenizer; the vocabulary of characters, the optimizer and the
    run have no place there.

    Example: gpt-parity export-hf runs/gpt2-numpy-float32-seed42 --out gpt2-folder

    Parameters
    ----------
    checkpoint
        Folder of a run, or a checkpoint file, of a GPT-2.
    """
    from gpt_parity.checkpoint import load_checkpoint
    from gpt_parity.files import write_folder
    from gpt_parity.hf import hf_files

    require_free_folder(config.out, config.overwrite)
    content = load_checkpoint(checkpoint)
    try:
        files = hf_files(content)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    write_folder(config.out, files)
    left_out = "; its characters are left out" if content.vocabulary else ""
    print(f"{config.out}: {described(content)}, {', '.join(files)}{left_out}")
    return 0


def described(checkpoint: Checkpoint) -> str:
    """Sizes, dtype and text, on one line."""
    config = checkpoint.config
    text = "byte pairs" if checkpoint.tokenizer_json is not None else "no text"
    if checkpoint.vocabulary:
        text = f"{len(checkpoint.vocabulary)} characters"
    return (
        f"GPT-2 of {config.parameter_count():,} parameters in {checkpoint.dtype} (vocabulary "
        f"{config.vocab_size}, context {config.context_size}, embedding {config.embedding_size}, "
        f"{config.blocks} blocks, {getattr(config, 'heads', 1)} heads), {text}"
    )


def checkpoint_file(out: Path) -> Path:
    """The file that `--out` means."""
    from gpt_parity.checkpoint import CHECKPOINT_NAME

    return out if out.suffix.lower() == ".safetensors" else out / CHECKPOINT_NAME


def require_free_checkpoint(out: Path, overwrite: bool) -> None:
    """Raise OSError unless a checkpoint may be written to `out`.

    With `overwrite` it may replace a checkpoint of a model alone: no training run, and no folder
    with other files in it.
    """
    from gpt_parity.checkpoint import load_checkpoint

    path = checkpoint_file(out)
    if not _exists(out, overwrite, "a checkpoint"):
        return
    if out != path:
        foreign = _foreign(out, lambda name: name == path.name)
        if foreign is not None:
            raise FileExistsError(f"{out}: holds {foreign} too, a checkpoint alone is overwritten")
        if not path.exists():
            return
    try:
        run = load_checkpoint(path).run
    except ValueError as error:
        raise FileExistsError(f"{path}: is no checkpoint, which alone is overwritten") from error
    if run is not None:
        raise FileExistsError(f"{path}: is of a training run, which is not overwritten")


def require_free_folder(out: Path, overwrite: bool) -> None:
    """Raise OSError unless a folder of the library may be written to `out`.

    With `overwrite` it may replace the folder of a GPT-2, or an empty one, and nothing else.
    """
    from gpt_parity.hf_config import read_json
    from gpt_parity.manifest import shown

    if not _exists(out, overwrite, "the folder of a GPT-2"):
        return
    foreign = _foreign(out, lambda name: THEIRS.fullmatch(name) is not None)
    if foreign is not None:
        raise FileExistsError(f"{out}: holds {foreign} too, which is no part of a GPT-2's folder")
    if not any(out.iterdir()):
        return
    try:
        kind = read_json(out / "config.json").get("model_type")
    except ValueError as error:
        raise FileExistsError(f"{out}: is no GPT-2's, which alone is overwritten") from error
    if kind != "gpt2":
        raise FileExistsError(f"{out}: is of a {shown(kind)}, a GPT-2 alone is overwritten")


def _exists(out: Path, overwrite: bool, what: str) -> bool:
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out}: its folder does not exist")
    if not out.exists() and not out.is_symlink():
        return False
    if not overwrite:
        raise FileExistsError(f"{out}: exists already; --overwrite replaces {what}")
    if out.is_symlink():
        raise FileExistsError(f"{out}: is a symbolic link, which is not overwritten")
    return True


def _foreign(folder: Path, known: Callable[[str], bool]) -> str | None:
    """The first name in a folder that is not known, or no file."""
    if not folder.is_dir():
        raise FileExistsError(f"{folder}: is no folder, which alone is overwritten")
    return next(
        (p.name for p in sorted(folder.iterdir()) if not (known(p.name) and p.is_file())), None
    )


def save_imported(checkpoint: Checkpoint, out: Path) -> Path:
    """Write a checkpoint of a model alone; returns the path of the file."""
    from gpt_parity.checkpoint import save_checkpoint
    from gpt_parity.provenance import provenance

    path = checkpoint_file(out)
    model = checkpoint.build_model()
    new = out != path and not out.exists()
    try:
        if new:
            out.mkdir()
        save_checkpoint(
            path, model, config=checkpoint.config, vocabulary=checkpoint.vocabulary or None,
            tokenizer_json=checkpoint.tokenizer_json, provenance=provenance(),
        )  # fmt: skip
    except BaseException:
        if new and out.is_dir():
            out.rmdir()
        raise
    return path
