"""Names and layouts under which other projects hold the parameters of a GPT-2.

- `source`: the names of this project; linear weights are (out, in).
- `nanogpt`: `transformer.h.0.attn.c_attn.weight` and so on, in the same layout; `lm_head.weight`
  is the token embedding once more.
- `hf`: the same names, with or without `transformer.`; the four weights of a block that are no
  norm's are (in, out). Which ones is decided by their names, never by their shapes.
- `llm.c`: sixteen arrays; those of the blocks are stacked, and the token embedding is followed by
  rows of zeros up to a multiple of 128.

Gradients and moments have the layout of their parameters, so that everything here is for them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from gpt_parity.choices import STYLES
from gpt_parity.manifest import some
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.oracle.graph import GRAD
from gpt_parity.tensors import as_array

Layout = Literal["as is", "transposed", "tied", "row", "first rows"]
Arrays = dict[str, np.ndarray]

AS_IS, TRANSPOSED, TIED, ROW, FIRST_ROWS = get_args(Layout)
# Rows of a token embedding in llm.c, which this divides.
PADDING = 128

WTE, WPE, NORM = "embedding.embedding.weight", "embedding.positional_embedding.weight", "norm"
# Layers of a block.
DOTTED = {
    "attention_norm": "ln_1", "attention.input": "attn.c_attn", "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2", "feed_forward.input": "mlp.c_fc",
    "feed_forward.output": "mlp.c_proj",
}  # fmt: skip
STACKED = {
    "attention_norm": "ln1", "attention.input": "qkv", "attention.output": "attproj",
    "feed_forward_norm": "ln2", "feed_forward.input": "fc", "feed_forward.output": "fcproj",
}  # fmt: skip
TABLE, HEAD = "transformer.wte.weight", "lm_head.weight"
# Wrappers' prefixes, and masks that were saved as if they were parameters.
WRAPPERS = ("_orig_mod.", "module.")
BUFFER = re.compile(r"(?:transformer\.)?h\.[0-9]+\.attn\.(?:bias|masked_bias)")


@dataclass(frozen=True)
class Entry:
    """One of our parameters in a style: where it is, in which layout, and the shape of the whole.

    layout: "as is"; "transposed"; "tied": the same array under one more name; "row": `theirs[row]`
    is ours; "first rows": `theirs[:V]` is ours, and what follows is 0.
    """

    ours: str
    theirs: str
    layout: Layout
    shape: tuple[int, ...]
    row: int | None = None

    def describe(self) -> str:
        """The layout, in words."""
        return f"row {self.row} of {self.shape[0]}" if self.layout == ROW else self.layout


def padded(vocab_size: int) -> int:
    """V, rounded up to a multiple of 128."""
    return -(-vocab_size // PADDING) * PADDING


def names(config: GPTConfig, style: str) -> list[Entry]:
    """Every parameter of a model in a style, in our order, and last what is tied.

    Raises ValueError for an unknown style, and for any but "source" where the model is no GPT-2.
    """
    if style not in STYLES:
        raise ValueError(f"style is {style!r}, one of {STYLES} is needed")
    shapes = config.parameter_shapes()
    if style == "source":
        return [Entry(name, name, AS_IS, shape) for name, shape in shapes.items()]
    if not isinstance(config, GPT2Config):
        raise ValueError(f"style is {style!r}, but only a GPT-2 has another one than 'source'")
    if style == "llm.c":
        return [_stacked(name, shape, config) for name, shape in shapes.items()]
    entries = [_dotted(name, shape, style) for name, shape in shapes.items()]
    return [*entries, Entry(WTE, HEAD, TIED, shapes[WTE])]


def _dotted(name: str, shape: tuple[int, ...], style: str) -> Entry:
    if name == WTE:
        return Entry(name, TABLE, AS_IS, shape)
    if name == WPE:
        return Entry(name, "transformer.wpe.weight", AS_IS, shape)
    layer, _, kind = name.rpartition(".")
    if layer == NORM:
        return Entry(name, f"transformer.ln_f.{kind}", AS_IS, shape)
    _, block, layer = layer.split(".", 2)
    theirs = f"transformer.h.{block}.{DOTTED[layer]}.{kind}"
    if style == "hf" and kind == "weight" and not layer.endswith("norm"):
        return Entry(name, theirs, TRANSPOSED, shape[::-1])
    return Entry(name, theirs, AS_IS, shape)


def _stacked(name: str, shape: tuple[int, ...], config: GPT2Config) -> Entry:
    if name == WTE:
        return Entry(name, "wte", FIRST_ROWS, (padded(shape[0]), shape[1]))
    if name == WPE:
        return Entry(name, "wpe", AS_IS, shape)
    layer, _, kind = name.rpartition(".")
    if layer == NORM:
        return Entry(name, f"lnf{kind[0]}", AS_IS, shape)
    _, block, layer = layer.split(".", 2)
    return Entry(name, STACKED[layer] + kind[0], ROW, (config.blocks, *shape), int(block))


def stacked_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """The sixteen arrays of llm.c, in the order in which its files hold them."""
    return {entry.theirs: entry.shape for entry in names(config, "llm.c")}


def to_style(arrays: Mapping[str, Any], config: GPTConfig, style: str) -> Arrays:
    """Copies of all parameters, or their gradients, by our names -> in a style.

    What is tied is one array under two names. Raises ValueError for names and shapes that are not
    those of the model.
    """
    mine = _checked({n: as_array(a) for n, a in arrays.items()}, config, "source", "", False)
    found: Arrays = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for entry in names(config, style):
        array = mine[entry.ours]
        if entry.layout == TIED:
            found[entry.theirs] = found[TABLE]
        elif entry.layout == ROW:
            stacks.setdefault(entry.theirs, []).append(array)
            found[entry.theirs] = array  # keeps the place
        elif entry.layout == FIRST_ROWS:
            found[entry.theirs] = np.zeros(entry.shape, array.dtype)
            found[entry.theirs][: len(array)] = array
        else:
            found[entry.theirs] = np.array(_turned(array, entry), order="C")
    return {n: np.stack(stacks[n]) if n in stacks else a for n, a in found.items()}


def from_style(
    arrays: Mapping[str, Any], sizes: GPTConfig | int | None, style: str, *,
    label: str = "", partial: bool = False,
) -> Arrays:  # fmt: skip
    """Copies of parameters, or their gradients, in a style -> by our names, in our order.

    sizes: the model's, or V, or None where the style pads nothing; the others then follow from the
    shapes. partial: some of them will do. label: stands before names in messages. Values are
    copied whatever they are. Raises ValueError for what is missing, unexpected, of another shape,
    tied and yet different, and for padding that is not 0.
    """
    given = plain_names(arrays, style, label)
    if sizes is None or isinstance(sizes, int):
        sizes = sizes_of(given, style, vocab_size=sizes)
    given = _checked(given, sizes, style, label, partial)
    found: Arrays = {}
    for entry in names(sizes, style):
        array = given.get(entry.theirs)
        if array is None:
            continue
        if entry.layout == TIED:
            other = found.setdefault(entry.ours, np.array(array, order="C"))
            if not np.array_equal(array, other, equal_nan=True):
                advice = " (of two tables the sum of both)" if label == GRAD else ""
                raise ValueError(
                    f"{label}{HEAD} differs from {label}{TABLE}, the same array is needed, as they "
                    f"are tied{advice}"
                )
        elif entry.layout == ROW:
            found[entry.ours] = np.array(array[entry.row], order="C")
        elif entry.layout == FIRST_ROWS:
            found[entry.ours] = without_padding(array, sizes.vocab_size, 0, label + entry.theirs)
        else:
            found[entry.ours] = np.array(_turned(array, entry), order="C")
    return {name: found[name] for name in sizes.parameter_shapes() if name in found}


def _turned(array: np.ndarray, entry: Entry) -> np.ndarray:
    return array.T if entry.layout == TRANSPOSED else array


def without_padding(
    array: np.ndarray, vocab_size: int, axis: int, name: str, others: tuple[float, ...] = ()
) -> np.ndarray:
    """A copy of the first V along `axis`; ValueError where the rest is not 0 or of `others`."""
    rest = np.moveaxis(array, axis, 0)[vocab_size:]
    wrong = ~np.isin(rest, (0.0, *others))
    if wrong.any():
        raise ValueError(
            f"{name} has {shown_number(rest[wrong][0])} in its padding beyond V = {vocab_size}, "
            "0 is needed"
        )
    return np.array(np.moveaxis(np.moveaxis(array, axis, 0)[:vocab_size], 0, axis), order="C")


def shown_number(value: Any) -> str:
    return f"{float(value):.6g}"


def plain_name(name: str, style: str) -> str | None:
    """A name in a style without wrappers' prefixes, with `transformer.`; None for masks."""
    if style not in ("nanogpt", "hf"):
        return name
    while name.startswith(WRAPPERS):
        name = name.split(".", 1)[1]
    if BUFFER.fullmatch(name):
        return None
    short = re.match(r"(?:wte|wpe|ln_f|h\.[0-9]+)\.", name)
    return f"transformer.{name}" if short and style == "hf" else name


def plain_names(arrays: Mapping[str, Any], style: str, label: str = "") -> Arrays:
    """Arrays by `plain_name`; ValueError where two of them are one.

    A tied output stands for the table where a file holds one name of each array only.
    """
    found: Arrays = {}
    for name, array in arrays.items():
        plain = plain_name(name, style)
        if plain is None:
            continue
        if plain in found:
            raise ValueError(f"{label}{name} is there under another name too, one is needed")
        found[plain] = as_array(array)
    if style in ("nanogpt", "hf") and HEAD in found:
        found.setdefault(TABLE, found[HEAD])
    return found


def styles_with_table(arrays: Mapping[str, Any]) -> list[str]:
    """The styles of other projects in which `arrays` have a token embedding."""
    tables = {"nanogpt": TABLE, "hf": TABLE, "llm.c": "wte"}
    return [s for s, table in tables.items() if table in {plain_name(n, s) for n in arrays}]


def sizes_of(
    arrays: Mapping[str, np.ndarray], style: str, heads: int = 1, vocab_size: int | None = None
) -> GPT2Config:
    """The sizes that arrays in a style imply; heads are nowhere in them.

    vocab_size: V, which llm.c's padded rows do not tell. Raises ValueError where it is missing
    there, and where there are no embeddings.
    """
    wte, wpe = {
        "source": (WTE, WPE), "llm.c": ("wte", "wpe"),
    }.get(style, (TABLE, "transformer.wpe.weight"))  # fmt: skip
    try:
        rows, width = arrays[wte].shape
        context = len(arrays[wpe])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"holds {some(arrays) or 'nothing'}; {wte} (V, E) and {wpe} (C, E) are needed in "
            f"style {style}"
        ) from None
    if style == "llm.c":
        if vocab_size is None:
            raise ValueError(
                f"{wte} has {rows} rows, which may end with padding in style {style}: vocab_size "
                "is needed"
            )
        stack = arrays.get("ln1w")
        blocks = len(stack) if stack is not None and stack.ndim == 2 else 1
    else:
        part = "transformers." if style == "source" else "transformer.h."
        blocks = len({n.removeprefix(part).split(".")[0] for n in arrays if n.startswith(part)})
    return GPT2Config(
        rows if vocab_size is None else vocab_size, context, width, max(1, blocks), heads=heads
    )


def _checked(
    arrays: Mapping[str, np.ndarray], config: GPTConfig, style: str, label: str, partial: bool
) -> Arrays:
    """`arrays`, or ValueError unless their names and shapes are those of the model in the style."""
    entries = {entry.theirs: entry for entry in names(config, style)}
    missing = [e.theirs for e in entries.values() if e.layout != TIED and e.theirs not in arrays]
    extra = [name for name in arrays if name not in entries]
    if extra or (missing and not partial):
        found = [f"{_some(label, missing)} missing"] if missing and not partial else []
        found += [f"{_some(label, extra)} unexpected"] if extra else []
        raise ValueError(f"{', '.join(found)}; the {len(entries)} of style {style} are needed")
    for name, array in arrays.items():
        entry = entries[name]
        fits = array.shape == entry.shape
        if entry.layout == FIRST_ROWS:  # any padding that is one, or none
            least = (config.vocab_size, *entry.shape[1:])
            fits = array.ndim == 2 and array.shape[0] >= least[0] and array.shape[1:] == least[1:]
        if not fits:
            order = ", (in, out)," if entry.layout == TRANSPOSED else ""
            raise ValueError(
                f"{label}{name} has shape {array.shape}, {entry.shape}{order} is needed in style "
                f"{style}"
            )
    return dict(arrays)


def _some(label: str, listed: Iterable[str]) -> str:
    return some(label + name for name in listed)
