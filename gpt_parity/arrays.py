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
import re
import shutil
import stat
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
from gpt_parity.manifest import LONGEST_INTEGER, LONGEST_NAME, one_line, shown, strict_json

MANIFEST = "manifest.json"
SAFETENSORS, NPZ = ".safetensors", ".npz"
Arrays = dict[str, np.ndarray]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], manifest: str) -> None:
    """Write whole or not at all, in the form that the ending says: a folder for any other ending.

    What was there is replaced, folders too. Raises OSError that names `path`, ValueError for .npy.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        raise ValueError(
            f"{path}: one npy file holds no names, a folder, .npz or .safetensors does"
        )
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    if suffix == SAFETENSORS:
        write_atomically(path, save(contiguous, metadata={"manifest": manifest}))
    elif suffix == NPZ:
        write_atomically(path, _npz(contiguous, manifest))
    else:
        _write_folder(path, contiguous, manifest)


def require_names(path: Path) -> None:
    """Raise ValueError for a path to a single npy file, which holds one array without a name."""
    if path.suffix.lower() == ".npy":
        raise ValueError(f"{path}: an npy file holds no names, a folder, .npz or .safetensors does")


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
    that names the file and the reason for whatever is not whole, for names that are no plain
    paths (`..`, control characters) or stand twice, and for symbolic links in a folder. Takes
    memory in proportion to the file, which is up to 1032 times its size where it is deflated.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            return _read_folder(path)
        _require_regular(path)
        if suffix == SAFETENSORS:
            return _read_safetensors(path, bfloat16)
        with path.open("rb") as file:
            if suffix == ".npy":
                return {"": _read_npy(file, path.stat().st_size)}, None
            if suffix == NPZ:
                return _read_npz(file, path.stat().st_size)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{path}: cannot be read, {reason}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from error
    raise ValueError(f"{path}: has another ending, needed .safetensors, .npz, .npy or a folder")


def _require_regular(path: Path) -> None:
    """A pipe or a device would be read without end; raises OSError where there is nothing."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is no regular file")


def _check_name(name: str) -> None:
    """Raise ValueError unless a name could be a path below some folder, of printable parts."""
    parts = name.split("/")
    plain = not {"", ".", ".."} & set(parts) and "\\" not in name
    if not plain or not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{shown(name)} is no name, printable parts with slashes between them are needed"
        )


def read_safetensors(path: Path) -> tuple[Arrays, str | None]:
    """`read_arrays` for safetensors alone, whatever the ending."""
    try:
        return _read_safetensors(Path(path), bfloat16=False)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def _read_safetensors(path: Path, bfloat16: bool) -> tuple[Arrays, str | None]:
    _require_regular(path)  # first: opening a pipe would wait
    with path.open("rb"):  # an error of the system is told as one
        pass
    try:
        _check_header(path)
        with safe_open(path, framework="numpy") as file:
            manifest = (file.metadata() or {}).get("manifest")
            names = file.keys()
            kinds = {name: file.get_slice(name).get_dtype() for name in names}
            strange = [name for name, kind in kinds.items() if kind not in RAW_DTYPES]
            if strange:
                raise ValueError(f"{strange[0]} is {kinds[strange[0]]}, which NumPy does not have")
            if "BF16" not in kinds.values():
                return {name: file.get_tensor(name) for name in kinds}, manifest
        if not bfloat16:
            name = next(name for name, kind in kinds.items() if kind == "BF16")
            raise ValueError(f"{name} is bfloat16, which --dtype bfloat16 alone can judge")
        return {name: _from_raw(raw) for name, raw in deserialize(path.read_bytes())}, manifest
    except (SafetensorError, TypeError, KeyError) as error:  # a dtype that NumPy has not
        raise ValueError(f"is not a whole safetensors file ({one_line(error)})") from error


def _check_header(path: Path) -> None:
    """Refuse names that are none or stand twice, of which safetensors takes the last."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        held = max(0, path.stat().st_size - 8)
        if length > held:
            raise ValueError(
                f"is not a whole safetensors file (header of {length} bytes, {held} are there)"
            )
        text = file.read(length)
    try:
        header = strict_json(text.decode())
    except ValueError as error:
        raise ValueError(f"is not a whole safetensors file ({error})") from error
    for name in header if isinstance(header, dict) else ():
        _check_name(name)


RAW_DTYPES = {
    "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "?", "U8": "u1", "I8": "i1",
    "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip


def _from_raw(raw: dict[str, Any]) -> np.ndarray:
    array = np.frombuffer(raw["data"], RAW_DTYPES[raw["dtype"]]).reshape(raw["shape"])
    if raw["dtype"] == "BF16":  # the upper half of a float32
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.copy()


# Deflate makes at most 258 bytes out of 2 bits.
DEFLATED_AT_MOST = 1032
METHODS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: DEFLATED_AT_MOST}


def _read_npz(file: BinaryIO, size: int) -> tuple[Arrays, str | None]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = [info for info in archive.infolist() if not info.filename.endswith("/")]
            _check_members(members, size)
            arrays, manifest = {}, None
            for info in members:
                with archive.open(info) as member:
                    if info.filename == MANIFEST:
                        manifest = member.read().decode()
                    else:
                        name = info.filename.removesuffix(".npy")
                        arrays[name] = _named_npy(name, member, info.file_size)
            return arrays, manifest
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ValueError(f"is not a whole npz file ({one_line(error)})") from error


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse members that are none of an npz, or claim to hold more than a zip of `size` can.

    Members may lie over one another, so that their sum is what counts.
    """
    names = set()
    for info in members:
        name = info.filename
        _check_name(name)
        if name != MANIFEST and not name.endswith(".npy"):
            raise ValueError(f"{name} is no npy file, those and {MANIFEST} alone are needed")
        _check_name(name.removesuffix(".npy"))
        if name in names:
            raise ValueError(f"{name} stands twice, each name is needed once")
        names.add(name)
        if stat.S_ISLNK(info.external_attr >> 16):
            raise ValueError(f"{name} is a symbolic link, a file is needed")
        if info.flag_bits & 0x1:
            raise ValueError(f"{name} is encrypted, a plain file is needed")
        if info.compress_type not in METHODS:
            kind = zipfile.compressor_names.get(info.compress_type, info.compress_type)
            raise ValueError(f"{name} is compressed by {kind}, deflate or nothing is needed")
        # JSON becomes objects larger than its text, so that a manifest may not be deflated on top.
        factor = 1 if name == MANIFEST else METHODS[info.compress_type]
        room = size if name == MANIFEST else info.compress_size
        if info.file_size > factor * room:
            raise ValueError(
                f"is not a whole npz file ({name} has {info.file_size} bytes, "
                f"{factor * room} are possible)"
            )
    held = sum(info.compress_size for info in members)
    if held > size:
        raise ValueError(f"is not a whole npz file (members of {held} bytes in {size})")


def _read_folder(path: Path) -> tuple[Arrays, str | None]:
    def refuse(error: OSError) -> None:
        raise error

    arrays = {}
    for folder, folders, names in os.walk(path, onerror=refuse):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise ValueError(f"{shown(name)} is a symbolic link, a folder is needed")
        for file in (Path(folder) / name for name in names if name.endswith(".npy")):
            key = file.relative_to(path).as_posix().removesuffix(".npy")
            _check_name(key)
            _require_own(file)
            with file.open("rb") as stream:
                arrays[key] = _named_npy(key, stream, file.stat().st_size)
    manifest = path / MANIFEST
    if not manifest.is_symlink() and not manifest.exists():
        return dict(sorted(arrays.items())), None
    _require_own(manifest)
    return dict(sorted(arrays.items())), manifest.read_text(encoding="utf-8")


def _require_own(file: Path) -> None:
    """A symbolic link could show what is no part of the folder."""
    if file.is_symlink():
        raise ValueError(f"{file.name} is a symbolic link, a file is needed")
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file.name} is no regular file")


def _named_npy(name: str, stream: Any, size: int) -> np.ndarray:
    try:
        return _read_npy(stream, size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# The header of an npy file is a Python dictionary; it is read here without evaluating anything.
NPY_HEADER = {
    "descr": re.compile(r"""['"]descr['"] *: *['"]([<>|=]?[fiub][0-9]{1,2})['"]"""),
    "fortran_order": re.compile(r"""['"]fortran_order['"] *: *(True|False)"""),
    "shape": re.compile(r"""['"]shape['"] *: *\(([0-9L, ]*)\)"""),
}
# As in NumPy. Arrays of numbers need a hundred bytes.
LONGEST_NPY_HEADER = 10_000
MOST_AXES = 32


def _read_npy(stream: Any, size: int) -> np.ndarray:
    """One array from a stream of `size` bytes, which its header must account for exactly.

    The format is that of NumPy's NEP 1, versions 1 and 2.
    """
    content = stream.read(size + 1)
    width = {b"\x93NUMPY\x01": 2, b"\x93NUMPY\x02": 4}.get(content[:7])
    if width is None:
        raise ValueError("is not a whole npy array (no npy file of version 1 or 2)")
    length = int.from_bytes(content[8 : 8 + width], "little")
    if length > LONGEST_NPY_HEADER:
        raise ValueError(f"is not a whole npy array (header of {length} bytes)")
    start = 8 + width + length
    header = content[8 + width : start].decode("latin-1")
    found = {key: pattern.search(header) for key, pattern in NPY_HEADER.items()}
    absent = [key for key, match in found.items() if match is None]
    if absent:
        raise ValueError(f"is not a whole npy array (no {absent[0]} of numbers in its header)")
    descr, fortran_order, text = (match[1] for match in found.values() if match)
    extents = [n.rstrip("L") for n in text.replace(" ", "").split(",") if n]
    if len(extents) > MOST_AXES or any(not 0 < len(n) <= LONGEST_INTEGER for n in extents):
        raise ValueError(f"is not a whole npy array (shape ({shown(text)[1:-1]}))")
    try:
        dtype, shape = np.dtype(descr), tuple(map(int, extents))
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not a whole npy array ({error})") from error
    if len(content) - start != math.prod(shape) * dtype.itemsize:
        held = max(0, len(content) - start)
        raise ValueError(f"is not a whole npy array ({held} bytes for {shape} of {dtype})")
    order = "F" if fortran_order == "True" else "C"
    array = np.frombuffer(content, dtype, offset=start).reshape(shape, order=order)
    return array.astype(dtype.newbyteorder("="), copy=False)
