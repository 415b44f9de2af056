"""The planted mistakes themselves: each can be planted, runs while it is, and leaves no trace."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import numpy_impl
import torch_impl.layers
from gpt_parity import training
from gpt_parity.backends import build_model
from gpt_parity.corpus import CharDataset, CharTokenizer
from gpt_parity.model_config import GPTConfig
from gpt_parity.oracle.trace import Trace, trace
from gpt_parity.schedule import WarmupCosineScheduler
from gpt_parity.weights import get_weights
from numpy_impl import functional as F
from numpy_impl import tape
from numpy_impl.layers import Parameter, Softmax, Tril
from numpy_impl.tensor import Tensor
from parity_tests.planted import PlantedBug, function_at, planted, power, watched
from parity_tests.planted.blind import BLIND_BUGS
from parity_tests.planted.power import ALL_BUGS
from parity_tests.planted.survivors import reason_for
from parity_tests.planted.table import BOUND, BUGS, EXACT, HAND, STEP, TWIN

BY_NAME = {bug.name: bug for bug in ALL_BUGS}
PARTS = {
    "engine", "matmul", "linear", "attention", "mask", "softmax", "gelu", "embedding", "loss",
    "adamw", "clip", "schedule", "weights", "windows", "tokenizer", "sampler", "training", "dtype",
}  # fmt: skip
EQUIVALENT = {"engine-transpose-forward", "dtype-scale-in-float64"}


def test_names_are_unique_and_every_part_is_covered() -> None:
    assert len(BY_NAME) == len(ALL_BUGS)
    assert len(BUGS) >= 64 and len(BLIND_BUGS) >= 10
    parts = Counter(bug.name.partition("-")[0] for bug in BUGS)
    assert set(parts) == PARTS
    assert min(parts.values()) >= 2
    packages = Counter(bug.place.partition(".")[0] for bug in BUGS)
    assert set(packages) == {"numpy_impl", "torch_impl", "gpt_parity"}
    assert packages["numpy_impl"] >= 45
    assert packages["torch_impl"] >= 12


@pytest.mark.parametrize("bug", ALL_BUGS, ids=lambda bug: bug.name)
def test_rows_are_complete(bug: PlantedBug) -> None:
    assert bug.old != bug.new
    assert bug.description and "\n" not in bug.description
    assert bug.checks <= {TWIN, STEP, EXACT, BOUND, HAND}
    if bug.name in EQUIVALENT:
        assert bug.equivalent.endswith(".") and not bug.checks and not bug.tensor
    else:
        assert not bug.equivalent
        assert len(bug.checks) >= (1 if bug in BLIND_BUGS else 2)  # as their author expected


@pytest.mark.parametrize("bug", ALL_BUGS, ids=lambda bug: bug.name)
def test_planting_is_undone_exactly(bug: PlantedBug) -> None:
    function = function_at(bug.place)
    right, arguments = function.__code__, list(inspect.signature(function).parameters)
    with planted(bug):
        assert function_at(bug.place) is function
        assert function.__code__ != right
        assert list(inspect.signature(function).parameters) == arguments
    assert function.__code__ is right
    with pytest.raises(KeyError), planted(bug):
        raise KeyError
    assert function.__code__ is right


def square_gradient() -> float:
    x = Tensor(np.array([3.0]))
    (x * x).backward(np.ones(1))
    return float(x.grad[0])


def softmax_gradient() -> list[float]:
    x = Tensor(np.zeros(2))
    F.softmax(x).backward(np.array([1.0, 0.0]))
    return x.grad.tolist()


# A layer and a scheduler that exist before anything is planted.
MASK = Tril(-1e9)
RATES = WarmupCosineScheduler(0.5, 8, 4, 0.1)


def masked() -> list[list[float]]:
    return MASK(Tensor(np.array([[1.0, 2.0], [3.0, 4.0]]))).data.tolist()


def erf_form() -> float:
    return round(torch_impl.layers.GELU()(torch.tensor(2.0, dtype=torch.float64)).item(), 6)


def decayed() -> float:
    parameter = Parameter(np.array([[2.0]]))
    optimizer = numpy_impl.AdamWOptimizer([parameter], lr=0.1, weight_decay=0.1)
    parameter.grad = np.zeros((1, 1))
    optimizer.step()
    return round(parameter.data.item(), 6)


def recording_after_an_inner_block() -> bool:
    with tape.no_grad():
        with tape.no_grad():
            pass
        enabled = tape.is_grad_enabled()
    return enabled


def targets() -> list[int]:
    dataset = CharDataset("abcd" * 10, context_size=3, batch_size=1)
    return dataset.batch("train", 0)[1][0].tolist()


def memory_of_torch_weights() -> bool:
    model = build_model("torch", GPTConfig(3, 2, 2, 1))
    array = get_weights(model)["output.output.bias"]
    array += 1.0
    return bool(model.output.output.bias.detach().numpy().any())


LIVE: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "engine-overwrite": (square_gradient, 6.0, 3.0),
    "engine-no-grad-nested": (recording_after_an_inner_block, False, True),
    "softmax-diagonal": (softmax_gradient, [0.25, -0.25], [0.25, 0.0]),
    "mask-fill-zero": (masked, [[1.0, -1e9], [3.0, 4.0]], [[1.0, 0.0], [3.0, 4.0]]),
    # x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) and x/2 (1 + erf(x / sqrt(2))) at x = 2
    "gelu-erf": (erf_form, 1.954598, 1.9545),
    "adamw-l2": (decayed, 1.98, 1.9),
    "schedule-warmup-from-zero": (lambda: RATES(0), 0.125, 0.0),
    "windows-targets-not-shifted": (targets, [1, 2, 3], [0, 1, 2]),
    "tokenizer-decode-shifted": (lambda: CharTokenizer("abc").decode([1, 2]), "bc", "ab"),
    "sampler-top-k-off-by-one": (
        lambda: training.sample(np.array([3.0, 2.0, 1.0]), 1.0, 1, 0.99), 0, 1,
    ),
    "weights-alias": (memory_of_torch_weights, False, True),
}  # fmt: skip


@pytest.mark.parametrize("name", LIVE)
def test_the_running_code_makes_the_mistake(name: str) -> None:
    run, right, wrong = LIVE[name]
    assert run() == right
    with planted(BY_NAME[name]):
        assert run() == wrong
    assert run() == right


def test_a_constant_is_changed_forward_and_backward() -> None:
    """Value and derivative at x = 2 with 0.0447 for 0.044715, by the formula."""

    def run() -> tuple[float, float]:
        x = Tensor(np.array(2.0))
        y = F.gelu(x)
        y.backward()
        return y.item(), float(x.grad)

    def formula(cubic: float) -> tuple[float, float]:
        root = np.sqrt(2.0 / np.pi)
        t = np.tanh(root * (2.0 + 8.0 * cubic))
        return 1.0 + t, 0.5 * (1.0 + t) + (1.0 - t * t) * root * (1.0 + 12.0 * cubic)

    np.testing.assert_allclose(run(), formula(0.044715), rtol=1e-14)
    with planted(BY_NAME["gelu-cubic-rounded"]):
        np.testing.assert_allclose(run(), formula(0.0447), rtol=1e-14)


def one_pass(dtype: str) -> Trace:
    config = GPTConfig(vocab_size=5, context_size=4, embedding_size=6, blocks=2)
    tokens = np.array([[0, 1, 2, 3], [4, 4, 1, 0]])
    model = build_model("numpy", config, dtype=dtype)
    return trace(model, numpy_impl.GPTLoss(), tokens, tokens[::-1])


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("name", sorted(EQUIVALENT))
def test_equivalent_mistakes_change_no_bit(name: str, dtype: str) -> None:
    clean = one_pass(dtype)
    with planted(BY_NAME[name]):
        changed = one_pass(dtype)
    for part in ("values", "gradients", "parameters"):
        for key, array in getattr(clean, part).items():
            assert getattr(changed, part)[key].dtype == array.dtype
            assert getattr(changed, part)[key].tobytes() == array.tobytes()


@pytest.mark.parametrize("old", ("no such text", "grad"), ids=("missing", "ambiguous"))
def test_a_mistake_that_does_not_fit_the_code_is_an_error(old: str) -> None:
    bug = replace(BY_NAME["softmax-diagonal"], old=old)
    right = function_at(bug.place).__code__
    message = r"softmax-diagonal: .* stands \d+ times, needed 1"
    with pytest.raises(ValueError, match=message), planted(bug):
        pytest.fail("the block ran")
    assert function_at(bug.place).__code__ is right


def test_a_mistake_in_the_outer_variables_is_an_error() -> None:
    bug = replace(BY_NAME["softmax-dim-one"], old="super().__init__(dim=-1)", new="pass")
    message = "softmax-dim-one: uses other outer variables"
    with pytest.raises(ValueError, match=message), planted(bug):
        pytest.fail("the block ran")


def test_a_place_without_a_function_is_an_error() -> None:
    with pytest.raises(TypeError, match="GELU_CUBIC: is a float, needed a function"):
        function_at("numpy_impl.functional:GELU_CUBIC")
    with pytest.raises(AttributeError):
        function_at("numpy_impl.functional:relu")


def test_two_mistakes_in_different_functions() -> None:
    """Softmax over columns of what a mask filled with 0 left: both at once, each alone, none."""

    def run() -> list[list[float]]:
        x = Tensor(np.array([[0.0, 5.0], [0.0, 0.0]]))
        return Softmax()(MASK(x)).data.tolist()

    right = run()
    assert right == [[1.0, 0.0], [0.5, 0.5]]
    with planted(BY_NAME["softmax-sum-axis"]):
        assert run() == [[0.5, 0.0], [0.5, 1.0]]
        with planted(BY_NAME["mask-fill-zero"]):
            assert run() == [[0.5, 0.5], [0.5, 0.5]]
        assert run() == [[0.5, 0.0], [0.5, 1.0]]
    assert run() == right
    with planted(BY_NAME["mask-fill-zero"]), planted(BY_NAME["softmax-sum-axis"]):
        assert run() == [[0.5, 0.5], [0.5, 0.5]]
    assert run() == right


def test_a_watched_function_is_noted_when_it_is_called_and_runs_as_before() -> None:
    places = {
        "numpy_impl.functional:softmax", "numpy_impl.functional:gelu", "numpy_impl.tape:no_grad",
        "numpy_impl.layers:Parameter.accumulate_grad", "torch_impl.layers:Softmax.__init__",
    }  # fmt: skip
    codes = {place: function_at(place).__code__ for place in places}
    with watched(places) as seen:
        assert softmax_gradient() == [0.25, -0.25]
        assert seen == {"numpy_impl.functional:softmax"}
        seen.clear()
        assert not recording_after_an_inner_block() and decayed() == 1.98
        torch_impl.layers.Softmax()
        assert seen == {"numpy_impl.tape:no_grad", "torch_impl.layers:Softmax.__init__"}
    for place, code in codes.items():
        assert function_at(place).__code__ is code
    assert softmax_gradient() == [0.25, -0.25]
    with pytest.raises(AttributeError), watched(["numpy_impl.functional:softmax", "numpy_impl:x"]):
        pytest.fail("the block ran")
    assert function_at("numpy_impl.functional:softmax").__code__ in codes.values()


def test_reasons_for_survivors_are_for_one_replacement_in_one_function() -> None:
    linear = "numpy_impl.functional.linear"
    line = "if x.shape[-1] != w.shape[-1] or f(x, strict=True) or x.reshape(-1, 2):"
    for function, before, after in (
        (linear, "w.shape[-1]", "w.shape[+1]"),
        (linear, ", strict=True", ", "),
        ("a.b", ".reshape(-1, 2)", ".reshape(-2, 2)"),
    ):
        assert reason_for(function, line, line.replace(before, after))
    for function, before, after in (
        (linear, "x.shape[-1]", "x.shape[+1]"),
        (linear, "shape[-1]", "shape[+1]"),  # both of them
        ("a.b", "w.shape[-1]", "w.shape[+1]"),
        (linear, ":", ": return"),
    ):
        assert not reason_for(function, line, line.replace(before, after))
    assert not reason_for(linear, line, line)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # one thread computes here
def test_a_process_that_dies_or_hangs_is_told_from_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(power, "SECONDS_PER_TASK", 1.0)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    tasks = [lambda: 1, die, lambda: time.sleep(60), lambda: 4, lambda: 1 / 0]
    answers = list(power.Examination([], power.Plan())._in_forks(tasks, 2))
    assert answers[:2] == [1, f"died with exit code {-signal.SIGKILL}"]
    assert answers[2:] == ["did not end within 1.0 s", 4, "died with exit code 1"]


def finding(caught: dict[str, int], located: dict[str, int]) -> power.Finding:
    tests = {kind: {f"test {i}": 1 for i in range(count)} for kind, count in caught.items()}
    return power.Finding(BY_NAME["gelu-erf"], caught=tests, located=located)


def test_caught_and_localised_by_the_numbers() -> None:
    assert BY_NAME["gelu-erf"].tensor == "feed_forward.gelu.output"
    right, wrong = "transformers.1.feed_forward.gelu.output", "transformers.1.output"
    assert not finding({"by hand": 9}, {}).is_caught
    assert finding({"by hand": 1, "exact property": 1}, {}).is_caught
    assert not finding({power.ERROR: 9}, {}).is_caught
    assert finding({power.ERROR: 10}, {}).is_loud
    for located, localised in (
        ({right: 2, wrong: 1}, True), ({right: 1, wrong: 1}, False), ({}, False),
    ):  # fmt: skip
        assert finding({}, located).is_localised is localised
