"""Byte-pair tokenizers trained on a short text, for tests."""

from __future__ import annotations

import functools
import importlib.util
import json

import pytest

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason='tokenizers is not installed: pip install -e ".[bpe]"',
)

TEXT = (
    "Früh übt sich, was ein Meister werden will.\n"
    "Wer A sagt, muss auch B sagen; übrigens: naïve façade, \u4f60\u597d\u4e16\u754c, "
    "\U0001f600\U0001f600 \U0001f468\u200d\U0001f469!\n"
    "The cat sat on the mat, the cat's hat sat on the cat.  Two  spaces, 1234 numbers.\n"
) * 3


@functools.cache
def trained(vocab_size: int = 300) -> str:
    """The tokenizer.json of a byte-level tokenizer with all 256 bytes and <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


def changed(**parts: object) -> str:
    """The same with other values at the top level, or below "model" by "model.KEY"."""
    content = json.loads(trained())
    for key, value in parts.items():
        if key.startswith("model_"):
            content["model"][key.removeprefix("model_")] = value
        else:
            content[key] = value
    return json.dumps(content)
