"""GPT-2 token by token: what its cache spares changes nothing but rounding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from gpt_parity.backends import build_model
from gpt_parity.choices import BACKENDS
from gpt_parity.corpus import CharTokenizer
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.sampling import sample
from gpt_parity.training import stream
from gpt_parity.weights import get_weights, set_weights
from parity_tests.gpt2_by_hand import SIZES, Sizes, draw
from parity_tests.test_gpt2_model import built, in_float32, oracle

pytestmark = pytest.mark.reference("exact property")

both_backends = pytest.mark.parametrize("backend", BACKENDS)

VOCABULARY = "abcdefghijklm"
SEEDS = (0, 1, 42, 2**32 - 1)


def model_of(backend: str, sizes: Sizes, dtype: str = "float64", scale: float = 0.5) -> Any:
    return built(backend, sizes, draw(sizes, scale)[0], dtype)


@functools.cache
def whole_pass(sizes: Sizes, scale: float, dtype: str) -> tuple[Any, ...]:
    """Weights, tokens of the whole context, the clean pass, and the tolerances of its rows."""
    weights, *_ = draw(sizes, scale)
    weights, shape = in_float32(weights), (sizes.batch, sizes.context_size)
    tokens = np.random.default_rng(1).integers(0, sizes.vocab_size, shape)
    return weights, tokens, *oracle(sizes, weights, tokens, tokens, dtype)


@pytest.mark.reference("a priori bound")
@both_backends
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [0.1, 0.5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_next_logits_are_those_of_the_last_position_at_every_length(
    sizes: Sizes, scale: float, dtype: str, backend: str
) -> None:
    """With the cache and without, each against the whole pass by the tolerance of its rows."""
    weights, tokens, clean, tolerances = whole_pass(sizes, scale, dtype)
    model = built(backend, sizes, weights, dtype)
    size, past = sizes.embedding_size // sizes.heads, None
    for length in range(1, sizes.context_size + 1):
        prefix = tokens[:, :length]
        logits, past = model.predict_next(prefix, past)
        assert [tuple(x.shape) for x in past] == [
            (2, sizes.batch, sizes.heads, length, size)
        ] * sizes.blocks
        for found in (logits, model.predict_next(prefix)[0], model.predict(prefix)[:, -1]):
            assert found.shape == (sizes.batch, sizes.vocab_size) and found.dtype == dtype
            errors = np.linalg.norm(found - clean.values["output"][:, length - 1], axis=-1)
            assert (errors <= tolerances.values["output"].rows[:, length - 1]).all(), length


@both_backends
def test_with_a_past_only_the_last_token_is_looked_at(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(backend, SIZES[0])
    tokens = np.random.default_rng(0).integers(0, 13, (2, 6))
    rows: list[int] = []
    layer = model.transformers[0].feed_forward
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: rows.append(x.shape[1]) or forward(x))
    _, past = model.predict_next(tokens[:, :5])
    model.predict_next(tokens, past)
    assert rows == [5, 1]


@both_backends
def test_the_past_is_read_and_never_written_to(backend: str) -> None:
    """One past serves several continuations, and no call changes an array of another."""
    model = model_of(backend, SIZES[0])
    tokens = np.random.default_rng(0).integers(0, 13, (2, 5))
    _, past = model.predict_next(tokens[:, :4])
    kept = [np.asarray(x).copy() for x in past]
    first, after = model.predict_next(tokens, past)
    other = tokens.copy()
    other[:, -1] = (other[:, -1] + 1) % 13
    model.predict_next(other, past)
    again, _ = model.predict_next(tokens, past)
    assert first.tobytes() == again.tobytes()
    for before, now, later in zip(kept, past, after, strict=True):
        np.testing.assert_array_equal(before, np.asarray(now))
        np.testing.assert_array_equal(before, np.asarray(later)[..., :4, :])
        assert not np.shares_memory(np.asarray(now), np.asarray(later))


@both_backends
def test_a_past_of_other_shapes_is_refused(backend: str) -> None:
    model = model_of(backend, SIZES[0])  # 2 blocks, H = 3, D = 4
    _, past = model.predict_next(np.zeros((2, 3), int))
    for shape in ((2, 3), (2, 5), (1, 4), (3, 4)):
        with pytest.raises(ValueError, match=r"past: got shapes \[\(2, 2, 3, 3, 4\), .* of 2 blo"):
            model.predict_next(np.zeros(shape, int), past)
    tokens = np.zeros((2, 4), int)
    for wrong in ([], past[:1], [*past, past[0]], [x[0] for x in past],
                  [x.swapaxes(2, 4) for x in past]):  # fmt: skip
        with pytest.raises(ValueError, match=r"needed \(2, 2, 3, 3, 4\) for each of 2 blocks"):
            model.predict_next(tokens, wrong)
    with pytest.raises(ValueError, match="tokens: got 8 positions, needed at most 7"):
        model.predict_next(np.zeros((1, 8), int))
    with pytest.raises(TypeError, match="tokens: got dtype float64, needed integers"):
        model.predict_next(np.zeros((1, 3)))


@both_backends
@pytest.mark.parametrize("config", [GPTConfig(7, 6, 8, 2), GPT2Config(7, 6, 8, 2, heads=2)])
def test_a_past_without_arrays_of_the_models_dtype_is_refused(
    backend: str, config: GPTConfig
) -> None:
    def past_of(backend: str, dtype: str) -> tuple[Any, list[Any]]:
        model = build_model(backend, config, dtype=dtype)
        return model, model.predict_next(np.zeros((2, 3), int))[1]

    model, past = past_of(backend, "float64")
    tokens = np.zeros((2, 4), int)
    model.predict_next(tokens, past)
    (other,) = set(BACKENDS) - {backend}
    foreign, narrow = past_of(other, "float64")[1][0], past_of(backend, "float32")[1][0]
    for wrong in ("x", 3, past[0].tolist(), foreign, narrow):
        for whole in ([past[0], wrong], wrong):
            with pytest.raises(ValueError, match=r"^past: got \S+, needed a list of .*float64$"):
                model.predict_next(tokens, whole)
    with pytest.raises(ValueError, match=r"^past: got NoneType, needed"):
        model.predict_next(tokens, [past[0], None])


@both_backends
def test_a_model_that_may_leak_computes_its_past_anew(backend: str) -> None:
    """Its earlier rows attend to the last token, so their keys and values change with it."""
    config = GPT2Config(7, 6, 8, 3, mask_value=-1.0, heads=2)
    model = build_model(backend, config, dtype="float64", allow_leak=True)
    set_weights(model, {n: 9.0 * w for n, w in get_weights(model).items()})
    tokens = np.array([[1, 4, 2, 6]])
    _, past = model.predict_next(tokens[:, :3])
    anew, present = model.predict_next(tokens)
    found, after = model.predict_next(tokens, past)
    np.testing.assert_array_equal(found, anew)
    for x, y, before in zip(after[1:], present[1:], past[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert (np.asarray(x)[..., :3, :] != np.asarray(before)).any()


@both_backends
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_of_a_batch_is_generated_as_if_alone(backend: str, dtype: str) -> None:
    """Greedily, where rounding that differs by the size of a product decides nothing."""
    sizes = SIZES[0]
    model = model_of(backend, sizes, dtype)
    start = np.random.default_rng(5).integers(0, 13, (4, 2))

    def continued(tokens: np.ndarray) -> np.ndarray:
        past = None
        while tokens.shape[1] < sizes.context_size:
            logits, past = model.predict_next(tokens, past)
            tokens = np.concatenate((tokens, logits.argmax(-1)[:, None]), axis=1)
        return tokens

    together = continued(start)
    assert together.shape == (4, 7)
    for i in range(4):
        np.testing.assert_array_equal(together[i], continued(start[i : i + 1])[0])


@pytest.mark.reference("other backend")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_text_three_times_as_long_as_the_context_is_that_of_whole_windows(
    seed: int, temperature: float
) -> None:
    """`stream` keeps a past until the window is full and slides; here every step is a new pass."""
    sizes, tokenizer = SIZES[0], CharTokenizer(VOCABULARY)
    texts = []
    for backend in BACKENDS:
        model = model_of(backend, sizes)
        found = "".join(stream(model, tokenizer, "bad", 21, temperature, None, seed))
        uniforms, ids = np.random.RandomState(seed), list(tokenizer.encode("bad"))
        for _ in range(21):
            logits = model.predict(np.array([ids[-7:]]))[0, -1]
            ids.append(sample(logits, temperature, None, uniforms.random_sample()))
        assert found == tokenizer.decode(ids[3:])
        texts.append(found)
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


@pytest.mark.parametrize("length", [6, 7, 8, 30])
@both_backends
def test_prompts_as_long_as_the_context_and_longer(backend: str, length: int) -> None:
    tokenizer, prompt = CharTokenizer(VOCABULARY), (VOCABULARY * 3)[:length]
    model = model_of(backend, SIZES[0])
    text = prompt + "".join(stream(model, tokenizer, prompt, 9, 0.0))
    for place in range(length, length + 9):
        window = tokenizer.encode(text[max(0, place - 7) : place])
        assert text[place] == VOCABULARY[model.predict(window[None])[0, -1].argmax()]
