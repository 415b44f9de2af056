"""Byte-pair text (Sennrich et al. 2016; on bytes: Radford et al. 2019), of local files alone.

The library `tokenizers` does the merging; it is imported only where such a tokenizer is made. What
an id stands for is a sequence of bytes, so that one character may take several tokens.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt_parity.backends import MissingTokenizersError
from gpt_parity.bpe_folder import (
    END_OF_TEXT,
    FLAGS,
    TokensBeside,
    refuse_added_space,
    tokens_beside,
)
from gpt_parity.files import read_text
from gpt_parity.manifest import one_line, shown

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
BPE = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None,
       "end_of_word_suffix": None, "byte_fallback": False}  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


class BytePairTokenizer:
    """Text to ids and back by a byte-level tokenizer.json, whose text it is made from.

    Every text of Unicode characters can be encoded where all 256 bytes are in the vocabulary.
    Marked tokens such as <|endoftext|> are one token wherever they stand in the text. Raises
    ValueError of one line for anything else than byte-pair encoding on bytes with ids 0 to
    vocab_size - 1, MissingTokenizersError where the library cannot be imported.
    """

    def __init__(self, content: str) -> None:
        library = _tokenizers()
        checked = checked_tokenizer(content)
        try:
            self._tokenizer = library.Tokenizer.from_str(json.dumps(checked))
            ids = self._tokenizer.get_vocab(with_added_tokens=True)
        except Exception as error:  # the library has no class of its own
            raise ValueError(f"tokenizer is not whole ({one_line(error)})") from error
        by_id = {i: token for token, i in ids.items()}
        self.content = content
        self._tokens = [_bytes_of(by_id[i]) for i in range(len(by_id))]

    @classmethod
    def from_file(cls, path: Path) -> BytePairTokenizer:
        """Return the tokenizer of a tokenizer.json; ValueError that names the file."""
        content = read_text(path)
        try:
            return cls(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_vocabulary(
        cls, vocabulary: Path, merges: Path, added: TokensBeside | None = None
    ) -> BytePairTokenizer:
        """Return the tokenizer of GPT-2's older pair of files, vocab.json and merges.txt.

        `added` are the tokens of the files beside them, if any.
        """
        texts = [read_text(vocabulary), read_text(merges)]
        lines = [line.rstrip("\r") for line in texts[1].split("\n")]
        if lines[0].startswith("#version"):
            del lines[0]
        try:
            ids = _json(texts[0])
            beside = [] if added is None else added.tokens
            marked = {entry["content"] for entry in beside}
            absent = isinstance(ids, dict) and END_OF_TEXT in ids and END_OF_TEXT not in marked
            model = {**BPE, "vocab": ids, "merges": [line for line in lines if line]}
            own = []
            if absent:
                own = [{"id": ids[END_OF_TEXT], "content": END_OF_TEXT, "special": True}]
            content = {"version": "1.0", "added_tokens": [*own, *beside], "decoder": BYTE_LEVEL,
                       "pre_tokenizer": BYTE_LEVEL, "model": model}  # fmt: skip
            return cls(json.dumps(content))
        except ValueError as error:
            names = [str(vocabulary), merges.name, *([] if added is None else added.files)]
            raise ValueError(f"{', '.join(names)}: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path) -> BytePairTokenizer | None:
        """Return the tokenizer of a folder's files, tokenizer.json first; None without any.

        Raises ValueError also for what the files beside them say and is not done here.
        """
        if (folder / TOKENIZER).exists():
            refuse_added_space(folder)
            return cls.from_file(folder / TOKENIZER)
        pair = folder / VOCABULARY, folder / MERGES
        if any(path.exists() for path in pair):
            refuse_added_space(folder)
            return cls.from_vocabulary(*pair, tokens_beside(folder))
        return None

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the file, None where there is none."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`: (n,), int64.

        Raises ValueError for a text that its ids would not give back: with surrogates, with bytes
        outside the vocabulary, or changed by the tokenizer's own rules.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, a str is needed")
        surrogate = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        if surrogate is not None:
            raise ValueError(f"text holds {surrogate!r}, characters of UTF-8 are needed")
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        found, needed = b"".join(self._tokens[i] for i in ids), text.encode()
        if found != needed:
            place = next(
                (i for i, (a, b) in enumerate(zip(found, needed, strict=False)) if a != b),
                min(len(found), len(needed)),
            )
            raise ValueError(
                f"text is not what its tokens give back, from byte {place} on "
                f"({shown(needed[place:][:20])} became {shown(found[place:][:20])}); "
                "a tokenizer that keeps it is needed"
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` (n,), with U+FFFD for bytes that are no UTF-8.

        Raises ValueError that names the first id out of range: also one of a model whose
        vocabulary was padded.
        """
        array = np.asarray(ids)
        if array.ndim != 1:
            raise ValueError(f"ids have shape {array.shape}, (n,) is needed")
        return b"".join(map(self._token, array.tolist())).decode("utf-8", "replace")

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of each id as it comes, but no half of a character.

        All that is yielded is together what `decode` returns; an id that adds no whole character
        yields nothing, and what is left open at the end is yielded as U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            text = decoder.decode(self._token(i))
            if text:
                yield text
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest

    def check_model(self, vocab_size: int) -> None:
        """Raise ValueError for a model that lacks an id; more than there are is padding."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"tokenizer has {self.vocab_size} ids, at most the model's {vocab_size} are needed"
            )

    def _token(self, i: int) -> bytes:
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise TypeError(f"ids hold {shown(i)}, integers are needed")
        if not 0 <= i < self.vocab_size:
            raise ValueError(
                f"ids hold {i}, 0 to {self.vocab_size - 1} are needed (those of the tokenizer)"
            )
        return self._tokens[i]


def checked_tokenizer(text: str) -> dict[str, Any]:
    """The parts of a tokenizer.json that count here, checked, in the form the library takes.

    It ends the whole process over some files that are none. Truncation, padding and what is put
    around a text are left out. Raises ValueError of one line.
    """
    content = _json(text)
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer is {shown(content)}, an object is needed")
    for part, kind in (("model", "BPE"), ("pre_tokenizer", "ByteLevel"), ("decoder", "ByteLevel")):
        found = content.get(part)
        if not isinstance(found, dict) or found.get("type") != kind:
            name = found.get("type") if isinstance(found, dict) else found
            raise ValueError(f"tokenizer has the {part} {shown(name)}, {kind} is needed")
    if content.get("normalizer") is not None:
        raise ValueError("tokenizer has a normalizer, which changes the text; null is needed")
    model, before = content["model"], content["pre_tokenizer"]
    for key, needed in BPE.items():
        if model.get(key, needed) not in (needed, ""):  # "" is an older way to write null
            raise ValueError(
                f"tokenizer has {key} {shown(model[key])}, {json.dumps(needed)} is needed"
            )
    if before.get("add_prefix_space", True) is not False:
        raise ValueError(
            "tokenizer has add_prefix_space, which puts a space before the text; false is needed"
        )
    regex = before.get("use_regex", True) is not False
    vocabulary, added = _vocabulary(model.get("vocab"), content.get("added_tokens") or [])
    return {
        "version": "1.0", "added_tokens": added, "decoder": BYTE_LEVEL,
        "pre_tokenizer": {**BYTE_LEVEL, "use_regex": regex},
        "model": {**BPE, "ignore_merges": model.get("ignore_merges") is True, "vocab": vocabulary,
                  "merges": _merges(model.get("merges"), vocabulary)},
    }  # fmt: skip


def _vocabulary(ids: Any, added: Any) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Ids by token, and the marked tokens, of which some may have the ids that follow."""
    if not isinstance(ids, dict) or not isinstance(added, list):
        raise ValueError("tokenizer has no vocab, ids by token are needed")
    wrong = next((t for t, i in ids.items() if not t or type(i) is not int), None)
    if wrong is not None:
        raise ValueError(f"tokenizer has {shown(wrong)} with id {shown(ids[wrong])}")
    marked = {}
    for entry in added:
        token, i = (entry.get(k) if isinstance(entry, dict) else None for k in ("content", "id"))
        if not isinstance(token, str) or not token or type(i) is not int or token in marked:
            raise ValueError(
                f"tokenizer has the added token {shown(entry)}, a new text with its id is needed"
            )
        for key in ("lstrip", "rstrip"):
            if entry.get(key) is True:
                raise ValueError(
                    f"tokenizer has the added token {shown(token)} with {key}, which swallows "
                    "spaces beside it; false is needed"
                )
        if _bytes_of(token) != token.encode():
            raise ValueError(
                f"tokenizer has the added token {shown(token)}, which its decoder takes for bytes "
                "of another text; one that stands for itself is needed"
            )
        if ids.get(token, i) != i:
            raise ValueError(f"tokenizer has {shown(token)} with the ids {ids[token]} and {i}")
        flags = {key: entry.get(key) is True for key in (*FLAGS, "special")}
        marked[token] = {"id": i, "content": token, **flags}
    # The library numbers those outside the vocabulary itself, as they come.
    own = sorted(marked.values(), key=lambda token: token["id"])
    found = [*sorted(ids.values()), *(t["id"] for t in own if t["content"] not in ids)]
    absent = next((place for place, i in enumerate(found) if place != i), None)
    if not found or absent is not None:
        raise ValueError(
            f"tokenizer has {len(found)} ids without {absent or 0}, all from 0 on are needed"
        )
    return ids, own


def _merges(merges: Any, vocabulary: dict[str, int]) -> list[list[str]]:
    if not isinstance(merges, list):
        raise ValueError("tokenizer has no merges, a list is needed")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    for pair in pairs:
        if (
            not isinstance(pair, list) or len(pair) != 2
            or not all(isinstance(part, str) and part in vocabulary for part in pair)
            or "".join(pair) not in vocabulary
        ):  # fmt: skip
            raise ValueError(
                f"tokenizer has the merge {shown(pair)}, two tokens that make a third are needed"
            )
    return pairs


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer is no JSON ({one_line(error)})") from error


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except (ImportError, OSError) as error:
        raise MissingTokenizersError(
            f"byte-pair text needs tokenizers, which cannot be imported ({one_line(error)}); "
            'install it with: python -m pip install -c constraints.txt -e ".[bpe]" (in a '
            "checkout), or python -m pip install tokenizers"
        ) from error


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a token stands for: itself, or one that can be printed."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    own = {chr(byte): byte for byte in printed}
    return own | {chr(256 + place): byte for place, byte in enumerate(others)}


def _bytes_of(token: str) -> bytes:
    """What a token stands for; one with other characters is a text that was added as it is."""
    table = _byte_of()
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
