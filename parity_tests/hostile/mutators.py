"""Damage that knows the formats: trees of JSON, headers of npy, records of zip, and plain bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

from gpt_parity.arrays import MANIFEST
from parity_tests.hostile.seeds import FOLDER, SAFETENSORS, Draft, Link, Pipe


class Object(list):
    """A JSON object as a list of [key, value], so that a key may stand twice."""


class Raw(str):
    """Text that stands in JSON as it is."""


NUMBERS = (
    0, -1, 1, 2, 3, 2**31, 2**31 - 1, 2**32, 2**53, 2**63, 2**63 - 1, -(2**63), 2**64, 10**30,
    10**9, 10**7, Raw("1e400"), Raw("-1e400"), Raw("1e308"), Raw("5e-324"), Raw("NaN"),
    Raw("Infinity"), Raw("-Infinity"), Raw("-0"), Raw("-0.0"), Raw("1.0"), 2.5, Raw("9" * 4000),
    Raw("9" * 5000), Raw("1" + "0" * 400),
)  # fmt: skip
NAMES = (
    "", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a\\b", "C:\\x", "a\nb", "\x1b[2J",
    "\u0000", "x\u0000.npy", "\u202ex", "\ud800", "ü", "x" * 300, "x" * 5000, "__metadata__",
    "manifest", "model/", "weight/", "value/", "grad/", "tolerance/float64/loss", "loss", "tokens",
    "targets", "step/1/loss", "optimizer/exp_avg/", "state/steps/", "{}", "%s", "model/x.y",
    "transformers.99999999.x", "__class__", "self", "format", "config", "blocks",
)  # fmt: skip
WORDS = (
    "F32", "F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E5M2", "C64", "float32", "float64",
    "int8", "object", "numpy", "torch", "jax", "edcba", "aabcd", "abcd", "abcdef", "nan", "inf",
    "1e400", "1", "gpt-parity bundle", "gpt-parity checkpoint", "\u2028", "a\r\nb",
)  # fmt: skip
SHAPES = ([], [0], [1], [-1], [2**63], [2**31, 2**31], [0, 2**62], [1] * 33, [1] * 70, [2.5],
          ["2"], [[2]], [None], [True])  # fmt: skip
ODDITIES = (
    None, True, False, [], Object(), [[]], [None], ["a"], ["a", "a"], Object([["a", Object()]]),
    Object([["a", 1], ["a", 2]]), Raw("[" * 3000 + "]" * 3000), Raw("[" * 200_000),
    Raw('{"a":' * 3000 + "1" + "}" * 3000), Raw("[" + "0," * 2000 + "0]"), Raw(""), Raw(","),
    Raw("'a'"), Raw('"\\'), Raw("tru"),
)  # fmt: skip


def parsed(text: str) -> Any:
    return json.loads(text, object_pairs_hook=lambda pairs: Object(map(list, pairs)))


def written(tree: Any) -> str:
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, Object):
        return "{" + ",".join(f"{json.dumps(str(k))}:{written(v)}" for k, v in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(written, tree)) + "]"
    return json.dumps(tree)


def _slot(rng: Random, tree: Any) -> tuple[list, int] | None:
    """Some place in the tree: (container, index); of an object, that of the pair."""
    container, index = None, 0
    while isinstance(tree, list) and tree and (container is None or rng.random() < 0.75):
        container, index = tree, rng.randrange(len(tree))
        tree = tree[index][1] if isinstance(tree, Object) else tree[index]
    return None if container is None else (container, index)


def _value(rng: Random) -> Any:
    """A copy, since what is put into a tree may be changed there."""
    return _copied(rng.choice(rng.choice((NUMBERS, NUMBERS, NAMES, WORDS, SHAPES, ODDITIES))))


def change_tree(rng: Random, tree: Any) -> None:
    """Change one place of a JSON tree."""
    found, other = _slot(rng, tree), _slot(rng, tree)
    if found is None or other is None:
        return
    container, index = found
    holder, key = (container[index], 1) if isinstance(container, Object) else (container, index)
    action = rng.randrange(10)
    if action < 4:
        holder[key] = _value(rng)
    elif action == 4:
        del container[index]
    elif action == 5:
        container.insert(rng.randrange(len(container) + 1), _copied(container[index]))
    elif action == 6 and isinstance(container, Object):
        holder[0] = rng.choice(NAMES) if rng.random() < 0.7 else rng.choice(container)[0]
    elif action == 7:
        wrapped = [[holder[key]], Object([["a", holder[key]]])]
        holder[key] = rng.choice(wrapped)
    elif action == 8:
        source = other[0][other[1]]
        holder[key] = _copied(source[1] if isinstance(other[0], Object) else source)
    elif isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
        holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 2,
                                  float(holder[key]), str(holder[key])))  # fmt: skip
    else:
        container.reverse()


def _copied(tree: Any) -> Any:
    return type(tree)(map(_copied, tree)) if isinstance(tree, list) else tree


def change_json(rng: Random, text: bytes) -> bytes:
    """Change a JSON text in one to three places."""
    try:
        tree = parsed(text.decode())
    except (ValueError, RecursionError):
        return change_bytes(rng, text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change_tree(rng, tree)
    return written(tree).encode("utf-8", "surrogatepass")


# Values that a number may take over: NaN, infinities, the largest, -0, a subnormal one.
PAYLOADS = tuple(
    bytes.fromhex(text)
    for text in (
        "0000c07f", "0000807f", "000080ff", "ffff7f7f", "00000080", "01000000",
        "000000000000f87f", "000000000000f07f", "ffffffffffffef7f", "ffffffffffffffff",
    )
)  # fmt: skip


def change_payload(rng: Random, data: bytes) -> bytes:
    """Put a number that is not finite, or an extreme one, where numbers stand."""
    value = rng.choice(PAYLOADS)
    if len(data) < len(value):
        return data
    places = len(data) // len(value)
    start = rng.randrange(places) * len(value)
    count = rng.choice((1, 1, 1, 2, places))
    changed = data[:start] + value * min(count, places - start // len(value))
    return changed + data[len(changed) :]


DESCRS = ("<f4", "<f8", ">f4", ">f8", "<f2", "<f16", "|O", "O", "<i8", "<i4", "|b1", "|u1", "<c8",
          "|S4", "<U4", "<M8[s]", "f", "<f3", "<b8", "=f4", "", "<f99999999999", "|V8",
          "<f4,<f4", "<f" + "9" * 5000)  # fmt: skip
EXTENTS = ("()", "(1,)", "(0,)", "(-1,)", "(2, 2)", "(2,2", "(99999999999999999999,)", "(2L,)",
           "(True,)", "[2]", "2", "(4294967296, 4294967296)", "(0, 99999999999999)", "(,)", "( )",
           "(1,,1)", "(1 1,)", "(" + "1," * 40 + ")", "(" + "9" * 5000 + ",)",
           "(" + ("9" * 4000 + ",") * 20 + ")", "(" + "0, " * 30 + "9" * 4000 + ")",
           "__import__('os').system('x')")  # fmt: skip


def change_npy(rng: Random, data: bytes) -> bytes:
    """Change one field of an npy file, in a header of the right length, or the numbers."""
    action = rng.randrange(9)
    end = data.find(b"\n") + 1
    header = data[10:end].decode("latin-1")
    if action == 0 or end == 0:
        return data[:end] + change_payload(rng, data[end:])
    if action == 1:
        length = rng.choice((0, 1, len(header) - 1, len(header) + 1, 65535, 10, len(data)))
        return data[:8] + (length % 65536).to_bytes(2, "little") + data[10:]
    if action == 2:
        return data[:6] + rng.choice((b"\1\0", b"\2\0", b"\3\0", b"\0\0", b"\xff\xff")) + data[8:]
    if action == 3:
        return data[: rng.choice((6, 8, 10, end, len(data) - 1))]
    if action == 4:
        header = re.sub(r"'descr': '[^']*'", lambda _: f"'descr': '{rng.choice(DESCRS)}'", header)
    elif action in (5, 6):
        header = re.sub(r"\([^)]*\)", lambda _: rng.choice(EXTENTS), header)
    elif action == 7:
        key = rng.choice(("descr", "fortran_order", "shape", "False"))
        header = header.replace(key, rng.choice(("True", "None", "x", "", "descr", "shape")))
    else:
        header = rng.choice((header * 2, header + " " * 60000, "(" * 4000, "", "{}" + header))
    raw = header.encode("latin-1")
    if rng.random() < 0.2 or len(raw) > 65535:
        return b"\x93NUMPY\2\0" + len(raw).to_bytes(4, "little") + raw + data[end:]
    return b"\x93NUMPY\1\0" + len(raw).to_bytes(2, "little") + raw + data[end:]


def change_bytes(rng: Random, data: bytes, other: bytes = b"") -> bytes:
    """Flip, overwrite, delete, insert, duplicate or cut bytes, or go on as another file does."""
    if not data:
        return rng.randbytes(rng.choice((0, 1, 8, 100)))
    start = rng.randrange(len(data)) if rng.random() < 0.6 else rng.randrange(min(64, len(data)))
    if rng.random() < 0.2:
        start = len(data) - 1 - rng.randrange(min(64, len(data)))
    length = min(rng.choice((1, 1, 2, 4, 8, 64, 1000)), len(data) - start)
    end = start + length
    action = rng.randrange(10)
    if action < 3:
        return data[:start] + bytes((data[start] ^ 1 << rng.randrange(8),)) + data[start + 1 :]
    if action == 3:
        filled = rng.choice((rng.randbytes(length), bytes(length), b"\xff" * length))
        return data[:start] + filled + data[end:]
    if action == 4:
        return data[:start] + data[end:]
    if action == 5:
        return data[:start] + rng.randbytes(length) + data[start:]
    if action == 6:
        return data[:end] + data[start:end] + data[end:]
    if action == 7:
        return data[: rng.choice((0, 1, 7, 8, 9, 22, start, len(data) - 1, len(data) - 22))]
    if action == 8:
        return data + rng.choice((b"\0", rng.randbytes(length), data))
    return data[:start] + other[rng.randrange(len(other) + 1) if rng.random() < 0.5 else start :]


def _header(rng: Random, draft: Draft) -> None:
    draft.header = change_json(rng, draft.header)


def _manifest_in_header(rng: Random, draft: Draft) -> None:
    try:
        tree = parsed(draft.header.decode())
        metadata = next(v for k, v in tree if k == "__metadata__")
        pair = next(pair for pair in metadata if pair[0] == "manifest")
        text = pair[1].encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, AttributeError, StopIteration, RecursionError, IndexError):
        return
    pair[1] = change_json(rng, text).decode("utf-8", "replace")
    draft.header = written(tree).encode("utf-8", "surrogatepass")


def _length(rng: Random, draft: Draft) -> None:
    own = len(draft.header)
    draft.length = rng.choice((0, 1, own - 1, own + 1, own + len(draft.payload), 2**31, 2**63, -1,
                               100_000_001, 2, own // 2))  # fmt: skip


def _payload(rng: Random, draft: Draft) -> None:
    draft.payload = change_payload(rng, draft.payload)


def _member(rng: Random, draft: Draft) -> None:
    """Change the content of one member as its kind has it."""
    index = rng.randrange(len(draft.members))
    name, content = draft.members[index]
    if not isinstance(content, bytes):
        return
    if rng.random() < 0.15:
        content = change_bytes(rng, content)
    elif name == MANIFEST:
        content = change_json(rng, content)
    else:
        content = change_npy(rng, content)
    draft.members[index] = name, content


def _manifest(rng: Random, draft: Draft) -> None:
    for index, (name, content) in enumerate(draft.members):
        if name == MANIFEST and isinstance(content, bytes):
            draft.members[index] = name, change_json(rng, content)


def _names(rng: Random, draft: Draft) -> None:
    """Drop, rename, duplicate, exchange or invent a member."""
    index = rng.randrange(len(draft.members))
    name, content = draft.members[index]
    action = rng.randrange(6)
    renamed = rng.choice(NAMES) + rng.choice((".npy", ".npy", "", "/x.npy"))
    if action == 0 and len(draft.members) > 1:
        del draft.members[index]
    elif action == 1:
        draft.members[index] = renamed, content
    elif action == 2:
        draft.members.insert(rng.randrange(len(draft.members)), (renamed, content))
    elif action == 3:
        draft.members.append((name, rng.choice(draft.members)[1]))
    elif action == 4:
        draft.members[index] = name, rng.choice(draft.members)[1]
    else:
        draft.members[index] = "../" + name[rng.choice((0, 3)) :], content


# Offset and width of the fields of a zip's records.
FIELDS = {
    "local": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2), (30, 3)),
    "central": ((4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2),
                (32, 2), (34, 2), (38, 4), (42, 4), (46, 3)),
    "end": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}  # fmt: skip
FLAGS_AND_METHODS = (1, 0x8, 0x20, 0x40, 0x41, 0x800, 0, 8, 9, 12, 14, 93, 95, 99)
DOTS = int.from_bytes(b"../", "little")


def _zip_fields(rng: Random, draft: Draft) -> None:
    index = rng.randrange(len(draft.members))
    record = rng.choice(("local", "central", "central", "end"))
    offset, width = rng.choice(FIELDS[record])
    values = (0, 1, 2, 127, 1000, 2**16 - 1, 2**31, 2**32 - 1, DOTS, rng.randrange(2**16),
              *FLAGS_AND_METHODS, 0xA1FF << 16)  # fmt: skip
    value = rng.choice(values)
    draft.patches.append((record, index, offset, width, value))
    if record == "central" and 6 <= offset <= 28 and rng.random() < 0.7:
        draft.patches.append(("local", index, offset - 2, width, value))


def _links(rng: Random, draft: Draft) -> None:
    index = rng.randrange(len(draft.members))
    name, _ = draft.members[index]
    other = draft.members[rng.randrange(len(draft.members))][0]
    targets = ("/dev/zero", "/", "absent", name.rpartition("/")[2], "/etc/hostname", other, "..")
    content = Link(rng.choice(targets)) if rng.random() < 0.85 else Pipe()
    draft.members[index] = name, content


Mutator = Callable[[Random, Draft], None]
OF_SAFETENSORS: tuple[Mutator, ...] = (_header, _manifest_in_header, _length, _payload)
OF_SAFETENSORS = (*OF_SAFETENSORS, _header, _manifest_in_header, _manifest_in_header, _payload)
OF_NPZ: tuple[Mutator, ...] = (_member, _member, _manifest, _manifest, _names, _zip_fields)
OF_FOLDERS: tuple[Mutator, ...] = (_member, _member, _manifest, _manifest, _names, _links)


def writable(name: str) -> bool:
    """Whether a file of this name stays inside the folder, and can be written."""
    parts = name.split("/")
    plain = all(0 < len(p.encode("utf-8", "replace")) < 200 and p.strip(".") for p in parts)
    return plain and name.isprintable() and len(name) < 1000


def mutated(rng: Random, draft: Draft, other: Draft) -> tuple[Draft, bytes | None]:
    """A damaged copy, and the bytes of its one file; `other` is what it may be spliced with."""
    draft = draft.copy()
    own = {SAFETENSORS: OF_SAFETENSORS, FOLDER: OF_FOLDERS}.get(draft.form, OF_NPZ)
    structured = draft.form == FOLDER or rng.random() < 0.8
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4)) if structured else 0):
        rng.choice(own)(rng, draft)
    if draft.form == FOLDER:
        draft.members = _consistent(draft.members)
        return draft, None
    data = draft.data()
    for _ in range(rng.choice((1, 1, 2, 5)) if not structured or rng.random() < 0.1 else 0):
        data = change_bytes(rng, data, other.data() if other.form != FOLDER else b"")
    return draft, data


def _consistent(members: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Members that one folder can hold: no file where another has a folder."""
    kept = {name: content for name, content in members if writable(name)}
    folders = {"/".join(n.split("/")[:i]) for n in kept for i in range(1, n.count("/") + 1)}
    return [(name, content) for name, content in kept.items() if name not in folders]
