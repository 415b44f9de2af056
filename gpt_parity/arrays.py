"""Named arrays in files: safetensors, npz, or a folder of npy files, each with one manifest.

The three forms hold the same: arrays by names with slashes, and a manifest, which is JSON text. In
a folder the array `value/x` is the file `value/x.npy`, and the manifest is `manifest.json`; an npz
is a zip of such a folder; in safetensors the manifest is the one entry of the metadata. The same
content gives the same bytes. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from gpt_parity.files import write_atomically

MANIFEST = "manifest.json"
SAFETENSORS, NPZ = ".safetensors", ".npz"
Arrays = dict[str, np.ndarray]


def require_free(path: Path, overwrite: bool = False) -> None:
    """Raise OSError unless `write_arrays` may write to `path`: nothing of another kind is lost.

    A file is replaced; a folder only with `overwrite`, and only if it holds a manifest.
    """
    if path.suffix in (SAFETENSORS, NPZ):
        if path.is_dir():
            raise IsADirectoryError(f"{path}: is a folder, the name of a file is needed")
    elif path.exists():
        if not (path / MANIFEST).is_file():
            raise FileExistsError(f"{path}: exists and is no folder of arrays, a new one is needed")
        if not overwrite:
            raise FileExistsError(f"{path}: exists already; --overwrite replaces it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: its folder does not exist")


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], manifest: str, *, overwrite: bool = False
) -> None:
    """Write whole or not at all, in the form that the ending says: a folder for any other ending.

    Raises OSError that names `path`, also where `require_free` does.
    """
    path = Path(path)
    require_free(path, overwrite)
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    if path.suffix == SAFETENSORS:
        write_atomically(path, save(contiguous, metadata={"manifest": manifest}))
    elif path.suffix == NPZ:
        write_atomically(path, _npz(contiguous, manifest))
    else:
        _write_folder(path, contiguous, manifest)


def _npz(arrays: Arrays, manifest: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        # A ZipInfo of its own, since a name alone would get the time of day.
        file.writestr(zipfile.ZipInfo(MANIFEST), manifest)
        for name, array in arrays.items():
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), _npy(array))
    return content.getvalue()


def _npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
    return content.getvalue()


def _write_folder(path: Path, arrays: Arrays, manifest: str) -> None:
    partial, old = (path.with_name(f".{path.name}.{uuid.uuid4().hex}.{k}") for k in ("part", "old"))
    try:
        try:
            partial.mkdir()
            write_atomically(partial / MANIFEST, manifest.encode())
            for name, array in arrays.items():
                file = partial / f"{name}.npy"
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, _npy(array))
            if path.exists():
                os.replace(path, old)
            os.replace(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if error.strerror is None:
            raise
        raise type(error)(f"{path}: cannot be written, {error.strerror}") from error


def read_arrays(path: Path, *, bfloat16: bool = False) -> tuple[Arrays, str | None]:
    """Return the arrays of any of the three forms, or of one npy file (named ""), and the manifest.

    bfloat16: read the bfloat16 tensors of safetensors, as float32. Raises ValueError of one line
    that names the file and the reason for whatever is not whole.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _read_folder(path)
        if path.suffix == SAFETENSORS:
            return _read_safetensors(path, bfloat16)
        with path.open("rb") as file:
            if path.suffix == ".npy":
                return {"": _read_npy(file, path.stat().st_size)}, None
            if path.suffix == NPZ:
                return _read_npz(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read, {reason}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    raise ValueError(f"{path}: has another ending, needed .safetensors, .npz, .npy or a folder")


def read_safetensors(path: Path) -> tuple[Arrays, str | None]:
    """`read_arrays` for safetensors alone, whatever the ending."""
    try:
        return _read_safetensors(Path(path), bfloat16=False)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_safetensors(path: Path, bfloat16: bool) -> tuple[Arrays, str | None]:
    with path.open("rb"):  # an error of the system is told as one
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            manifest = (file.metadata() or {}).get("manifest")
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
            if "BF16" not in kinds.values():
                return {name: file.get_tensor(name) for name in kinds}, manifest
        if not bfloat16:
            name = next(name for name, kind in kinds.items() if kind == "BF16")
            raise ValueError(f"{name} is bfloat16, which --dtype bfloat16 alone can judge")
        return {name: _from_raw(raw) for name, raw in deserialize(path.read_bytes())}, manifest
    except (SafetensorError, TypeError, KeyError) as error:  # a dtype that NumPy has not
        reason = " ".join(str(error).split())
        raise ValueError(f"is not a whole safetensors file ({reason})") from error


RAW_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4"}


def _from_raw(raw: dict[str, Any]) -> np.ndarray:
    array = np.frombuffer(raw["data"], RAW_DTYPES[raw["dtype"]]).reshape(raw["shape"])
    if raw["dtype"] == "BF16":  # the upper half of a float32
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.copy()


def _read_npz(file: BinaryIO) -> tuple[Arrays, str | None]:
    try:
        with zipfile.ZipFile(file) as archive:
            arrays, manifest = {}, None
            for info in archive.infolist():
                with archive.open(info) as member:
                    if info.filename == MANIFEST:
                        manifest = member.read().decode()
                    elif info.filename.endswith(".npy"):
                        name = info.filename.removesuffix(".npy")
                        if name in arrays:
                            raise ValueError(f"{name} stands twice, each name is needed once")
                        arrays[name] = _named_npy(name, member, info.file_size)
            return arrays, manifest
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"is not a whole npz file ({error})") from error


def _read_folder(path: Path) -> tuple[Arrays, str | None]:
    arrays = {}
    for file in sorted(path.rglob("*.npy")):
        name = file.relative_to(path).with_suffix("").as_posix()
        with file.open("rb") as stream:
            arrays[name] = _named_npy(name, stream, file.stat().st_size)
    manifest = path / MANIFEST
    return arrays, manifest.read_text(encoding="utf-8") if manifest.is_file() else None


def _named_npy(name: str, stream: Any, size: int) -> np.ndarray:
    try:
        return _read_npy(stream, size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _read_npy(stream: Any, size: int) -> np.ndarray:
    """One array from a stream of `size` bytes, which its header must account for exactly."""
    try:
        content = io.BytesIO(stream.read(size + 1))
        version = np.lib.format.read_magic(content)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise ValueError(f"npy version {version}, needed (1, 0) or (2, 0)")
        shape, fortran_order, dtype = read_header(content)
        if dtype.hasobject or dtype.fields or dtype.kind not in "fiub":
            raise ValueError(f"dtype {dtype}, needed numbers")
        data = content.read()
        if min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes of data for shape {shape} and dtype {dtype}")
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")
        return array.astype(dtype.newbyteorder("="))
    except (ValueError, SyntaxError, TypeError, OverflowError, MemoryError, EOFError) as error:
        raise ValueError(f"is not a whole npy array ({' '.join(str(error).split())})") from error
