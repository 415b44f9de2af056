"""A step on several threads: the same gradients as on one, whichever thread is first."""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_parity.bench.config import BENCHMARKS
from gpt_parity.config import TrainConfig
from gpt_parity.machine import available_cores
from gpt_parity.oracle.compare import LOSS, PARAMETER, compare
from gpt_parity.training import GPTTrainer, new_trainer
from gpt_parity.weights import get_weights
from numpy_impl import Tensor, tape
from numpy_impl.layers import Parameter
from numpy_impl.parallel import BatchParts
from numpy_impl.tape import Observer, no_grad, observe
from parity_tests.comparers import assert_same_bits
from parity_tests.models import SIZES, ModelCase, build, fill, model_cases, reference

pytestmark = pytest.mark.reference("other backend")


def in_parts(case: ModelCase, dtype: str, threads: int) -> tuple[float, dict[str, np.ndarray]]:
    weights, tokens, targets = fill(case)
    model, loss_fn = build("numpy", dtype, case, weights)
    loss = BatchParts(threads).backward(lambda x, y: loss_fn(model(x), y), tokens, targets)
    return loss, {name: p.grad.copy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(max_examples=30)
@given(case=model_cases(), threads=st.integers(2, 5))
def test_the_parts_add_up_to_the_whole(dtype: str, case: ModelCase, threads: int) -> None:
    clean, tolerances = reference(case, dtype)
    loss, gradients = in_parts(case, dtype, threads)
    judgements = [
        compare(LOSS, LOSS, np.asarray(loss, dtype), clean.loss, tolerances.loss, dtype),
        *(compare(name, PARAMETER, gradients[name], clean.parameters[name],
                  tolerances.parameters[name], dtype) for name in gradients),
    ]  # fmt: skip
    assert all(j.ok for j in judgements), (case, threads, [j for j in judgements if not j.ok])
    assert any(j.judged for j in judgements) or case.scale > 0.1


@pytest.mark.reference("exact property")
@pytest.mark.parametrize("slow", range(3))
def test_the_result_does_not_depend_on_who_is_first(slow: int) -> None:
    """Each of three parts is made to wait in turn; the bits stay."""
    case = ModelCase(SIZES["general"], "normal", 1.0, 7)
    weights, tokens, targets = fill(case)
    model, loss_fn = build("numpy", "float32", case, weights)

    def loss_of(x: np.ndarray, y: np.ndarray) -> Tensor:
        loss = loss_fn(model(x), y)
        if np.array_equal(x, tokens[slow : slow + 1]):
            time.sleep(0.05)
        return loss

    loss = BatchParts(3).backward(loss_of, tokens, targets)
    expected_loss, expected = in_parts(case, "float32", 3)
    assert loss == expected_loss
    assert_same_bits({n: p.grad for n, p in model.named_parameters()}, expected)


@pytest.mark.reference("by hand")
def test_a_part_counts_by_its_share_of_the_rows() -> None:
    """Three rows among two threads: (a + b) / 2 for two thirds, c for one."""
    w = Tensor(np.array(2.0))
    rows = np.array([[1.0], [2.0], [6.0]])
    loss = BatchParts(2).backward(lambda x, y: (w * x).mean(), rows, rows)
    assert math.isclose(loss, 2.0 * 3.0, rel_tol=1e-15)
    assert math.isclose(float(w.grad), 3.0, rel_tol=1e-15)


@pytest.mark.reference("exact property")
def test_threads_work_side_by_side_with_the_settings_of_the_caller() -> None:
    w = Tensor(np.ones(2))
    meeting = threading.Barrier(2, timeout=10)
    found = []

    def loss_of(x: np.ndarray, y: np.ndarray) -> Tensor:
        meeting.wait()  # would time out if one part waited for the other
        found.append((np.geterr()["over"], tape.is_grad_enabled(), threading.get_ident()))
        return (w * x).mean()

    with np.errstate(over="raise"):
        BatchParts(2).backward(loss_of, np.ones((2, 2)), np.ones((2, 2)))
    assert {f[:2] for f in found} == {("raise", True)} and len({f[2] for f in found}) == 2


@pytest.mark.reference("exact property")
def test_a_failing_part_changes_no_leaf_and_leaves_no_thread_at_work() -> None:
    w, finished = Tensor(np.ones(2)), []

    def loss_of(x: np.ndarray, y: np.ndarray) -> Tensor:
        if x[0, 0] == 0.0:
            raise FloatingPointError("part 0")
        time.sleep(0.05)
        finished.append(x)
        return (w * x).mean()

    rows = np.arange(4.0).reshape(2, 2)
    with pytest.raises(FloatingPointError, match="part 0"):
        BatchParts(2).backward(loss_of, rows, rows)
    assert w.grad is None and len(finished) == 1
    with pytest.raises(FloatingPointError, match="part 0"):
        BatchParts(2).backward(loss_of, rows[::-1], rows)  # now it is the other thread's
    assert w.grad is None


@pytest.mark.reference("exact property")
def test_an_observer_sees_the_parts_one_after_the_other() -> None:
    class Count(Observer):
        rows = 0

        def forward(self, op: str, out: Tensor, parents: tuple[Tensor, ...]) -> None:
            self.rows += len(out.data) if op == "mul" else 0

    w, seen = Tensor(np.ones(2)), []
    with observe(Count()) as count:
        BatchParts(2).backward(
            lambda x, y: seen.append(len(x)) or (w * x).mean(), np.ones((4, 2)), np.ones((4, 2))
        )
    assert seen == [2, 2] and count.rows == 4


@pytest.mark.reference("by hand")
@pytest.mark.parametrize("threads", [0, -1])
def test_refuses_less_than_one_thread(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads: got {threads}, needed at least 1"):
        BatchParts(threads)


@pytest.mark.reference("exact property")
def test_a_gradient_that_is_there_is_added_to() -> None:
    """Parameters, which have memory of their own: 2 before, then (3 + 5) / 2."""
    p = Parameter(np.zeros(1))
    (p * 2.0).sum().backward()
    rows = np.array([[3.0], [5.0]])
    for threads in (1, 2):
        BatchParts(threads).backward(lambda x, y: (p * x).mean(), rows, rows)
    assert p.grad.tolist() == [2.0 + 4.0 + 4.0]


@pytest.mark.reference("by hand")
@pytest.mark.parametrize("threads", [1, 2])
def test_refuses_what_backward_refuses(threads: int) -> None:
    w, parts, rows = Tensor(np.ones(1)), BatchParts(threads), np.ones((2, 1))
    with no_grad(), pytest.raises(RuntimeError, match="no history that needs a gradient"):
        parts.backward(lambda x, y: (w * x).mean(), rows, rows)
    with pytest.raises(ValueError, match="is no scalar, needed a gradient"):
        parts.backward(lambda x, y: w * np.ones((3, 1)), rows, rows)
    with pytest.raises(TypeError, match="got dtype complex128, needed a real one"):
        c = Tensor(np.ones(1, np.complex128))
        parts.backward(lambda x, y: c.mean(), rows, rows)
    with pytest.raises(ValueError, match="batch: got 0 and 0 rows, needed as many, at least one"):
        parts.backward(lambda x, y: (w * x).mean(), rows[:0], rows[:0])
    with pytest.raises(ValueError, match="batch: got 2 and 1 rows"):
        parts.backward(lambda x, y: (w * x).mean(), rows, rows[:1])
    assert w.grad is None
    with pytest.raises(TypeError, match=r"threads: got 1.5, needed an integer"):
        BatchParts(1.5)


@pytest.mark.reference("exact property")
def test_the_first_part_needs_no_second_copy_of_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staged = []
    right = Parameter.stage
    monkeypatch.setattr(Parameter, "stage", lambda p, g: staged.append(p) or right(p, g))
    p = Parameter(np.ones(1))
    rows = np.ones((2, 1))
    BatchParts(2).backward(lambda x, y: (p * x).mean(), rows, rows)
    assert staged == [p] and p.grad.tolist() == [1.0]


@pytest.mark.reference("exact property")
def test_a_copy_has_threads_of_its_own() -> None:
    two = trainer(2)
    tokens = np.zeros((4, 8), int)
    two.train_step(tokens, tokens)
    other = pickle.loads(pickle.dumps(two.parts))
    assert other.threads == 2 and other._threads() is not two.parts._threads()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork: run on a Unix")
@pytest.mark.reference("exact property")
def test_a_forked_process_starts_threads_anew() -> None:
    w, rows = Tensor(np.ones(1)), np.ones((2, 1))
    parts = BatchParts(2)
    parts.backward(lambda x, y: (w * x).mean(), rows, rows)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a thread that is not there would never answer
        parts.backward(lambda x, y: (w * x).mean(), rows, rows)
        os._exit(0 if w.grad.tolist() == [2.0] else 1)
    assert os.waitpid(child, 0)[1] == 0


def trainer(threads: int | None, backend: str = "numpy") -> GPTTrainer:
    config = TrainConfig(backend=backend, dtype="float64", threads=threads, embedding_size=16,
                         context_size=8)  # fmt: skip
    return new_trainer(config, config.model_config(11))


def test_training_on_two_threads_stays_beside_training_on_one() -> None:
    """Ten steps in float64: rounding apart, which the norm of the weights bounds generously."""
    one, two = trainer(1), trainer(2)
    assert (one.parts.threads, two.parts.threads) == (1, 2)
    batches = np.random.default_rng(0).integers(0, 11, (10, 2, 4, 8))
    for tokens, targets in batches:
        a, b = one.train_step(tokens, targets), two.train_step(tokens, targets)
        assert math.isclose(a.loss, b.loss, rel_tol=1e-13)
        assert math.isclose(a.grad_norm, b.grad_norm, rel_tol=1e-12)
    weights = get_weights(two.model)
    for name, w in get_weights(one.model).items():
        assert np.linalg.norm(w - weights[name]) <= 1e-11 * np.linalg.norm(w), name
    assert any((w != weights[n]).any() for n, w in get_weights(one.model).items()), "one path twice"


@pytest.mark.reference("exact property")
def test_a_loss_that_is_not_finite_is_named_and_changes_nothing() -> None:
    two = trainer(2)
    two.model.output.output.bias.data[0] = np.nan
    before = get_weights(two.model)
    tokens = np.zeros((4, 8), int)
    with pytest.raises(FloatingPointError, match="training step 1: loss: got nan"):
        two.train_step(tokens, tokens)
    assert_same_bits(get_weights(two.model), before)
    assert all(p.grad is None for p in two.model.parameters())


@pytest.mark.reference("by hand")
def test_threads_are_chosen_by_the_size_of_a_step() -> None:
    """One for the text's model, all for those where each thread has work for milliseconds."""
    config = TrainConfig()
    assert config.cores == 1 and replace(config, threads=3).cores == 3
    small, medium = BENCHMARKS["small"], BENCHMARKS["medium"]
    for size in (small, medium):
        larger = replace(
            config, batch_size=size.batch_size, context_size=size.length,
            embedding_size=size.model.embedding_size, blocks=size.model.blocks,
        )  # fmt: skip
        assert larger.cores == min(available_cores(), size.batch_size)
        assert replace(larger, batch_size=1, blocks=100).cores == 1  # nothing to split
    assert trainer(2, "torch").parts is None  # PyTorch has threads of its own


@pytest.mark.reference("by hand")
def test_the_environment_may_ask_for_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where torchrun set it; what is no count says nothing."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    for said, cores in (("1", 1), ("3", 3), ("9", 4), ("", 4), ("0", 4), ("1,1", 4), ("²", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert available_cores() == cores, said
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RANK", "0")
    assert available_cores() == 4


@pytest.mark.reference("by hand")
def test_operations_of_a_step() -> None:
    """E = 1, one block, V = 2, B = T = 1: 9 + 2 weights and two products of one element.

    Each takes a multiplication and an addition, forward and for each of two gradients.
    """
    model = TrainConfig(context_size=1, embedding_size=1, blocks=1).model_config(2)
    assert model.operations(1, 1) == 6 * (9 + 2) + 6 * 2
    assert model.operations(3, 1) == 3 * model.operations(1, 1)
    assert model.operations(1, 5) == 5 * 6 * (9 + 2) + 6 * 2 * 5 * 5
