"""Reported faults of losses: clipping, labels out of range or of another dtype, unequal parts.

The name of each test begins with the id of its row in `docs/reports.md`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gpt_parity.backends import build_model
from gpt_parity.choices import BACKENDS
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.rounding import FLOAT64, TABLE, Call, bound
from gpt_parity.tensors import as_array
from gpt_parity.weights import get_weights
from numpy_impl.parallel import BatchParts
from parity_tests.registry import NUMPY, TORCH, Twin
from parity_tests.reports.common import both_twins, f32, f64, gradients, trainer_of, values

pytestmark = pytest.mark.reference("by hand")

INF = math.inf
P = np.log([0.2, 0.3, 0.5])
LOSSES = {
    22.0: 22.00000000027895, 23.0: 23.00000000010262, 23.1: 23.100000000092855,
    24.0: 24.00000000003775, 50.0: 50.0, 800.0: 800.0,
}  # fmt: skip


def loss_of(twin: Twin, labels: Any) -> Any:
    layer = twin.loss.GPTLoss()
    return lambda logits: layer(logits, labels)


@both_twins
@pytest.mark.parametrize("gap", LOSSES)
def test_B25_a_confident_wrong_answer_costs_its_gap(twin: Twin, gap: float) -> None:
    """The clipped loss would stay at 23.025850929940457, with a numeric gradient of 0."""
    of_first = loss_of(twin, np.array([0]))
    loss = values(twin, of_first, f64([[0, gap]]))
    np.testing.assert_allclose(loss, LOSSES[gap], rtol=1e-15)
    single = values(twin, of_first, f32([[0, gap]]))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, LOSSES[gap], rtol=2.0**-23)


@both_twins
def test_B25_the_gradient_is_that_of_the_loss(twin: Twin) -> None:
    of_first = loss_of(twin, np.array([0]))
    (found,) = gradients(twin, of_first, f64([[0, 50]]))
    np.testing.assert_allclose(found, [[-1, 1]], rtol=1e-15)
    ahead, behind = (float(values(twin, of_first, f64([[0, 50 + h]]))) for h in (1e-4, -1e-4))
    # Two losses of about 50, each rounded once (2^-47 / 2), and 50 +- 1e-4 as well.
    assert abs((ahead - behind) / 2e-4 - 1.0) <= 4 * 2.0**-48 / 2e-4
    (far,) = gradients(twin, of_first, f32([[0, 1000]]))
    np.testing.assert_array_equal(far, [[-1, 1]])


@both_twins
def test_B25_an_impossible_answer_costs_infinity_and_stops_training(twin: Twin) -> None:
    assert values(twin, loss_of(twin, np.array([0])), f64([[-INF, 0]])) == INF
    trainer, dataset = trainer_of(twin.name)
    bias = trainer.model.output.output.bias
    bias.data[...] = -np.inf if twin is NUMPY else torch.tensor(-INF)
    bias.data[0] = 0.0
    before = get_weights(trainer.model)
    with pytest.raises(FloatingPointError, match="training step 1: loss: got inf"):
        trainer.train_step(*dataset.batch("train", 0))
    for name, array in get_weights(trainer.model).items():
        np.testing.assert_array_equal(array, before[name])


BAD_LABELS: dict[str, Any] = {
    "-1": np.array([-1]), "3": np.array([3]), "-100": np.array([-100]),
    "0 and -100": np.array([0, -100]), "uint8 255": np.array([255], np.uint8),
    "uint64": np.array([2**63], np.uint64), "int8 -128": np.array([-128], np.int8),
    "a list": [-1],
}  # fmt: skip


@both_twins
@pytest.mark.parametrize("case", BAD_LABELS)
def test_B27_a_label_out_of_range_is_an_error_in_both(twin: Twin, case: str) -> None:
    labels = BAD_LABELS[case]
    with pytest.raises(ValueError, match=r"targets: got -?\d+, needed 0 to 2"):
        loss_of(twin, labels)(twin.tensor(np.tile(P, (len(labels), 1))))


@both_twins
@pytest.mark.parametrize("case", BAD_LABELS)
def test_B27_an_id_out_of_range_is_an_error_in_both(twin: Twin, case: str) -> None:
    with pytest.raises(ValueError, match=r"ids: got -?\d+, needed 0 to 2"):
        twin.functional.embedding(twin.tensor(np.ones((3, 2))), BAD_LABELS[case])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [-1, 3, -100])
def test_B27_a_model_refuses_them_by_every_way_in(backend: str, bad: int) -> None:
    model = build_model(backend, GPTConfig(3, 2, 4, 1))
    trainer, _ = trainer_of(backend)
    tokens = np.array([[0, bad]])
    for call in (model, model.predict, model.predict_next):
        with pytest.raises(ValueError, match=f"tokens: got id {bad}, needed 0 to 2"):
            call(tokens)
    good = np.zeros((1, 2), int)
    many = np.array([[0, trainer.model.vocab_size if bad > 0 else bad]])
    with pytest.raises(ValueError, match="targets: got"):
        trainer.train_step(good, many)
    with pytest.raises(ValueError, match="tokens: got id"):
        trainer.train_step(many, good)


@both_twins
@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", ">i4"]
)
def test_B28_labels_of_every_integer_dtype(twin: Twin, dtype: str) -> None:
    loss = values(twin, loss_of(twin, np.array([0, 2], dtype)), np.tile(P, (2, 1)))
    np.testing.assert_allclose(loss, 1.1512925464970227, rtol=4e-16)


@both_twins
@pytest.mark.parametrize(
    "labels",
    [f64([0, 2]), f64([0, 1.9999999]), f32([0, 2]), np.array([False, True]),
     np.array([0, 2 + 0j]), np.array(["0", "2"]), np.array([0, 2], object)],
    ids=lambda labels: str(labels.dtype),
)  # fmt: skip
def test_B28_labels_that_are_no_integers_are_refused(twin: Twin, labels: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"targets: got dtype .*, needed integers"):
        loss_of(twin, labels)(twin.tensor(np.tile(P, (2, 1))))
    with pytest.raises(TypeError, match=r"ids: got dtype .*, needed integers"):
        twin.functional.embedding(twin.tensor(np.ones((3, 2))), labels)


@both_twins
def test_B28_classes_are_on_the_last_axis_when_sizes_are_equal(twin: Twin) -> None:
    logits = np.log([[[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]])
    for labels, expected, unflattened in (
        ([[0, 1, 2]], 0.4987030757, 0.4476526825), ([[1, 0, 2]], 1.6094379124, 1.5583875193),
    ):  # fmt: skip
        loss = values(twin, loss_of(twin, np.array(labels)), logits)
        np.testing.assert_allclose(loss, expected, rtol=1e-9)
        other = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(labels))
        np.testing.assert_allclose(other.item(), unflattened, rtol=1e-9)
    for shape in ((3, 1), (3,), (1, 3, 3), ()):  # labels of as many elements, or one for all
        with pytest.raises(ValueError, match="needed one target per row"):
            loss_of(twin, np.zeros(shape, int))(twin.tensor(logits))


PARTS = [f64([[0, 1.854586542131141]]), f64([[0, 0.541324854612918]] * 3)]


@both_twins
def test_B29_parts_count_by_their_tokens(twin: Twin) -> None:
    """Losses 2 (one row) and 1 (three rows): together 1.25, and not the 1.5 of equal weights."""

    def loss(rows: np.ndarray, share: float) -> Any:
        labels = np.zeros(len(rows), int)
        return lambda b: loss_of(twin, labels)(twin.tensor(rows) + b) * share

    bias, whole = np.zeros(2), np.concatenate(PARTS)
    np.testing.assert_allclose(values(twin, loss(whole, 1.0), bias), 1.25, rtol=1e-14)
    (db,) = gradients(twin, loss(whole, 1.0), bias)
    np.testing.assert_allclose(db, [-0.690256598312265, 0.690256598312265], rtol=1e-14)
    for shares, total, gradient in (
        ((0.25, 0.75), 1.25, 0.690256598312265), ((0.5, 0.5), 1.5, 0.748392637795972),
    ):  # fmt: skip
        parts = [loss(rows, share) for rows, share in zip(PARTS, shares, strict=True)]
        losses = [float(values(twin, part, bias)) for part in parts]
        np.testing.assert_allclose(sum(losses), total, rtol=1e-14)
        summed = sum(gradients(twin, part, bias)[0] for part in parts)
        np.testing.assert_allclose(summed[1], gradient, rtol=1e-14)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_B29_a_batch_split_over_threads_weighs_its_parts(threads: int) -> None:
    """Four rows on three threads are parts of 1, 1 and 2 rows; on two, of 2 and 2."""
    bias = NUMPY.parameter(np.zeros(2))
    rows = np.concatenate(PARTS)

    def part_loss(tokens: np.ndarray, targets: np.ndarray) -> Any:
        return loss_of(NUMPY, targets)(NUMPY.tensor(rows[tokens]) + bias)

    found = BatchParts(threads).backward(part_loss, np.arange(4), np.zeros(4, int))
    np.testing.assert_allclose(found, 1.25, rtol=1e-14)
    np.testing.assert_allclose(bias.grad[1], 0.690256598312265, rtol=1e-14)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_B29_uneven_parts_of_a_model_give_the_whole_gradient(threads: int) -> None:
    """Five rows: parts of 2 and 3, of 1, 2 and 2, and of one each."""
    found = {}
    for count in (1, threads):
        trainer, dataset = trainer_of("numpy", batch=5, threads=count)
        trainer._backward(*dataset.batch("train", 0))
        found[count] = {n: p.grad.copy() for n, p in trainer.model.named_parameters()}
    for name, whole in found[1].items():
        size = np.linalg.norm(whole)
        assert size > 0.0
        assert np.linalg.norm(found[threads][name] - whole) <= 1e-12 * size, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_B29_a_shorter_last_batch_counts_less_in_the_test_loss(backend: str) -> None:
    trainer, dataset = trainer_of(backend, drop_last=False)
    batches = list(dataset.batches("test"))
    sizes = [len(tokens) for tokens, _ in batches]
    assert sizes[-1] < sizes[0]
    tokens, targets = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    logits = trainer.model.predict(tokens)
    z = logits - logits.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(z, targets[..., None], axis=-1)[..., 0]
    whole = math.fsum((np.log(np.exp(z).sum(axis=-1)) - picked).ravel()) / targets.size
    found = trainer.test(dataset)[1]
    m = TABLE["cross_entropy"].forward(Call((logits, targets), np.array(whole), FLOAT64, {}))
    assert abs(found - whole) <= 2.0 * bound(m, FLOAT64)
    parts = [float(as_array(trainer.loss_fn(trainer.model(x), y))) for x, y in batches]
    assert abs(np.mean(parts) - whole) > 100.0 * bound(m, FLOAT64)  # what equal weights would give


def test_B29_the_backends_agree_on_the_test_loss() -> None:
    """Of one text in full, with a last batch of another size."""
    losses = []
    for twin in (NUMPY, TORCH):
        trainer, dataset = trainer_of(twin.name, drop_last=False)
        losses.append(trainer.test(dataset)[1])
    assert abs(losses[0] - losses[1]) <= 1e-13 * losses[0]
