"""Where texts come from, and how they become batches of token ids.

A character is a Unicode code point, whichever: nothing is normalised, folded or translated. So a
letter and its combining accent are two characters and the precomposed letter a third, CR, LF, NUL,
U+2028 and a byte-order mark inside the text are characters like any other, and a line has no
meaning and no greatest length. The file is UTF-8, and what is not UTF-8 is an error, never guessed.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt_parity.files import write_atomically
from gpt_parity.schedule import require_integer, require_real

CHECKOUT = Path(__file__).resolve().parents[1]
TINYSHAKESPEARE_NAME = "tinyshakespeare.txt"
TINYSHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINYSHAKESPEARE_BYTES = 1_115_394
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, init=False)
class CharTokenizer:
    """Characters to ids and back; the id is the place in the sorted vocabulary.

    vocabulary: distinct single characters in code point order, so that ids depend on the text
    alone and never on hashing. Any code point will do, lone surrogates included. Raises ValueError
    if it is empty, unsorted, has duplicates or entries of another length than one; TypeError if it
    is no sequence of strings.
    """

    vocabulary: str

    def __init__(self, vocabulary: str | Sequence[str]) -> None:
        if not isinstance(vocabulary, Sequence) or not all(isinstance(c, str) for c in vocabulary):
            raise TypeError(f"vocabulary is a {type(vocabulary).__name__}, characters are needed")
        if not vocabulary:
            raise ValueError("vocabulary is empty, at least one character is needed")
        for index, character in enumerate(vocabulary):
            if len(character) != 1:
                raise ValueError(f"vocabulary[{index}] is {character!r}, one character is needed")
            if index and not vocabulary[index - 1] < character:
                raise ValueError(
                    f"vocabulary[{index}] is {character!r} after {vocabulary[index - 1]!r}, "
                    "distinct characters in code point order are needed"
                )
        object.__setattr__(self, "vocabulary", "".join(vocabulary))
        object.__setattr__(self, "_codes", _code_points(self.vocabulary))  # (V,)

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        """Return the tokenizer of the distinct characters of `text`; ValueError if it is empty."""
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the characters of `text`: (len(text),), int64.

        Raises ValueError that names up to ten characters outside the vocabulary.
        """
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes).astype(np.int64, copy=False)
        known = self._codes[np.minimum(ids, self.vocab_size - 1)] == codes
        if not known.all():
            unknown = np.unique(codes[~known])
            shown = ", ".join(repr(chr(code)) for code in unknown[:10])
            more = f" and {unknown.size - 10} more" if unknown.size > 10 else ""
            raise ValueError(
                f"text holds {shown}{more}, only the {self.vocab_size} characters of the "
                "vocabulary can be encoded"
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the characters of `ids` (n,); ValueError that names the first id out of range."""
        array = np.asarray(ids)
        if array.ndim != 1:
            raise ValueError(f"ids have shape {array.shape}, (n,) is needed")
        if array.size == 0:
            return ""
        if array.dtype.kind not in ("i", "u"):
            # Integers too large for NumPy's arrive as floats or objects: out of range, no less.
            exact = np.asarray(ids, dtype=object)
            if not all(type(i) is int for i in exact):
                raise TypeError(f"ids have dtype {array.dtype}, integers are needed")
            array = exact
        outside = (array < 0) | (array >= self.vocab_size)
        if outside.any():
            raise ValueError(
                f"ids hold {array[outside][0]}, 0 to {self.vocab_size - 1} are needed "
                f"(vocabulary of {self.vocab_size} characters)"
            )
        codes = self._codes[array.astype(np.int64)]
        return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the character of each id as it comes."""
        return (self.decode([i]) for i in ids)

    def check_model(self, vocab_size: int) -> None:
        """Raise ValueError for a model of another vocabulary."""
        if self.vocab_size != vocab_size:
            raise ValueError(
                f"vocabulary has {self.vocab_size} characters, {vocab_size} are needed by the model"
            )


def _code_points(text: str) -> np.ndarray:
    if not isinstance(text, str):
        raise TypeError(f"text is a {type(text).__name__}, a str is needed")
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


@dataclass(frozen=True)
class Corpus:
    """A text with its origin: `sha256` is that of the UTF-8 bytes as read.

    is_fallback: no text was asked for and the data set is absent, so this is the built-in one.
    """

    text: str = field(repr=False)
    name: str
    sha256: str
    is_fallback: bool = False

    @property
    def size(self) -> str:
        return f"{len(self.text):,} characters" if self.text else "no text"


def read_corpus(path: Path | None = None) -> Corpus:
    """Return the text of the file `path`, or the default text.

    The file is UTF-8 whatever the locale says. A byte-order mark at its start is dropped, one of
    them; everything else is data and stays: CR and CRLF are not translated, NUL is a character.
    Surrogates (U+D800 to U+DFFF) are not UTF-8, nor is a file of UTF-16 that begins with its mark;
    one of ASCII characters without a mark is UTF-8, with a NUL after each of them.

    Without a path: data/tinyshakespeare.txt below the current directory, then below the
    checkout; then the documentation topics that come with Python, one after the other in the
    order of their keys, with a line feed between them.

    Raises ValueError that names the file if it is missing, unreadable, empty or not UTF-8 (with
    the offset of the first such byte).
    """
    if path is None:
        candidates = (folder / "data" / TINYSHAKESPEARE_NAME for folder in (Path(), CHECKOUT))
        path = next((file for file in candidates if file.is_file()), None)
        if path is None:
            return _pydoc_topics()
    path = Path(path)
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise ValueError("is a device")  # which may have no end
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        hint = "; scripts/fetch_data.py downloads it" if path.name == TINYSHAKESPEARE_NAME else ""
        raise ValueError(f"{path}: cannot be read, {reason}{hint}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8 "
            f"({error.reason}), UTF-8 text is needed"
        ) from None
    text = text.removeprefix("\ufeff")
    if not text:
        raise ValueError(f"{path}: holds no text, at least one character is needed")
    return Corpus(text, path.name, hashlib.sha256(data).hexdigest())


def _pydoc_topics() -> Corpus:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            f"no text: data/{TINYSHAKESPEARE_NAME} is absent and this Python has no "
            "pydoc_data.topics, a text file of your own is needed (--data)"
        ) from error
    text = "\n".join(topics[key] for key in sorted(topics))
    version = ".".join(map(str, sys.version_info[:3]))
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Corpus(text, f"pydoc topics of Python {version}", digest, is_fallback=True)


class CharDataset:
    """Batches of next-character windows over the two parts of one text.

    The first int(train_fraction * len(text)) characters are "train", the rest "test". A window
    starts at every multiple i of max(1, context_size // 2) with i + context_size + 1 <= n in a
    part of n characters: tokens [i, i + T), targets [i + 1, i + T + 1). Batches come in the order
    of the text; `drop_last` leaves out a last batch of fewer than batch_size windows, but with
    `keep_only` not where it is the only one. There is no other state: the same call gives the same
    arrays.

    tokenizer: by default the one of the whole text.

    Raises ValueError for sizes below 1, a fraction outside (0, 1), a part shorter than
    context_size + 1, a part without one batch, and characters the tokenizer does not know;
    TypeError for sizes that are no integers.
    """

    def __init__(
        self,
        text: str,
        *,
        context_size: int,
        batch_size: int,
        train_fraction: float = 0.9,
        drop_last: bool = True,
        keep_only: bool = False,
        tokenizer: CharTokenizer | None = None,
    ) -> None:
        self.context_size = require_integer("context_size", context_size, 1)
        self.batch_size = require_integer("batch_size", batch_size, 1)
        self._stride = max(1, self.context_size // 2)
        fraction = require_real("train_fraction", train_fraction)
        if not 0 < fraction < 1:
            raise ValueError(f"train_fraction is {fraction}, a number between 0 and 1 is needed")
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, a str is needed")

        boundary = self._split(len(text), fraction, drop_last, "characters", keep_only)
        self.tokenizer = CharTokenizer.from_text(text) if tokenizer is None else tokenizer
        ids = self.tokenizer.encode(text)
        self._ids = {"train": ids[:boundary], "test": ids[boundary:]}

    def _split(
        self, size: int, fraction: float, drop_last: bool, unit: str, keep_only: bool = False
    ) -> int:
        """Count windows and batches of both parts; returns where the second begins."""
        boundary = int(fraction * size)
        self._windows: dict[str, int] = {}
        self._batch_counts: dict[str, int] = {}
        for split, length in (("train", boundary), ("test", size - boundary)):
            if length <= self.context_size:
                raise ValueError(
                    f"{split} split has {length} {unit} of the {size} of the text, at "
                    f"least {self.context_size + 1} are needed (context_size + 1)"
                )
            windows = (length - self.context_size - 1) // self._stride + 1
            short = windows < self.batch_size
            dropped = drop_last and not (short and keep_only)
            if dropped and short:
                raise ValueError(
                    f"{split} split has {windows} windows of {self.context_size} {unit}, at "
                    f"least batch_size = {self.batch_size} are needed"
                )
            batches = windows // self.batch_size
            if not dropped:
                batches = -(-windows // self.batch_size)
            self._windows[split], self._batch_counts[split] = windows, batches
        return boundary

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def batch_count(self, split: str) -> int:
        """Return the number of batches of "train" or "test"; ValueError for another name."""
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}, 'train' or 'test' is needed")
        return self._batch_counts[split]

    def batch(self, split: str, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, targets) of batch `index`: new int64 arrays (B, T), the caller's own.

        Raises ValueError for another split than "train" or "test" and for an index outside
        0..batch_count(split) - 1.
        """
        count = self.batch_count(split)
        index = require_integer("batch index", index, 0)
        if index >= count:
            raise ValueError(f"batch index is {index}, less than {count} is needed for {split!r}")
        first = index * self.batch_size
        rows = np.arange(first, min(first + self.batch_size, self._windows[split]))
        places = self._stride * rows[:, None] + np.arange(self.context_size)  # (B, T)
        ids = self._ids[split]
        return ids[places], ids[places + 1]

    def random_batch(self, split: str, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, targets) of `batch_size` windows that start anywhere in the part.

        Drawn from default_rng([seed, step]), so that a batch does not depend on those before it.
        New int64 arrays (B, T); raises ValueError as `batch`, and for negative numbers.
        """
        self.batch_count(split)
        ids = self._ids[split]
        rng = np.random.default_rng([require_integer("seed", seed, 0),
                                     require_integer("step", step, 0)])  # fmt: skip
        starts = rng.integers(len(ids) - self.context_size, size=self.batch_size)
        places = starts[:, None] + np.arange(self.context_size)  # (B, T)
        return ids[places], ids[places + 1]

    def batches(self, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Return an iterator over all batches of `split` in order; ValueError as `batch`."""
        return (self.batch(split, index) for index in range(self.batch_count(split)))


def fetch_tinyshakespeare(folder: Path) -> Path:
    """Put tinyshakespeare.txt into `folder` and return its path; a right one is left as it is.

    Nothing appears under that name before its SHA-256 is verified. Raises ConnectionError when
    it cannot be downloaded, ValueError when the file there or the download is another text,
    OSError when the file cannot be written.
    """
    path = Path(folder) / TINYSHAKESPEARE_NAME
    if os.path.lexists(path):
        found = read_corpus(path).sha256
        if found != TINYSHAKESPEARE_SHA256:
            raise ValueError(
                f"{path}: SHA-256 is {found}, {TINYSHAKESPEARE_SHA256} is needed; the file is "
                "left alone, move it away to download"
            )
        print(f"{path} is already there, with the right SHA-256", file=sys.stderr)
        return path
    try:
        data = _download()
    except (OSError, http.client.HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        raise ConnectionError(
            f"{TINYSHAKESPEARE_URL}: cannot be downloaded ({reason}); put the file at {path} "
            f"yourself (SHA-256 {TINYSHAKESPEARE_SHA256}), or pass a text of your own with "
            "--data, or run without: the built-in text is used"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != TINYSHAKESPEARE_SHA256:
        raise ValueError(
            f"{TINYSHAKESPEARE_URL}: SHA-256 of the first {len(data)} bytes is {found}, "
            f"{TINYSHAKESPEARE_SHA256} is needed; nothing was written"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def _download() -> bytes:
    from rich.console import Console
    from rich.progress import Progress

    try:
        response = urllib.request.urlopen(TINYSHAKESPEARE_URL, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    data = bytearray()
    with response, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(TINYSHAKESPEARE_NAME, total=TINYSHAKESPEARE_BYTES)
        # One byte too many is enough to know that it is another file, however long it goes on.
        while chunk := response.read(min(65536, TINYSHAKESPEARE_BYTES + 1 - len(data))):
            data += chunk
            progress.update(task, completed=len(data))
    return bytes(data)
