"""Judge hand-written operations at every place where a model uses them.

Every use is fed what the reference gives it, operands and cotangent, so that an operation that is
wrong spoils no other, and all that are wrong are listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpt_parity.backends import build_model
from gpt_parity.oracle.bundle_files import as_bundle
from gpt_parity.oracle.compare import FORWARD, Report
from gpt_parity.oracle.judge import unit_of
from gpt_parity.oracle.op_checks import Op
from gpt_parity.oracle.ops import OPS
from numpy_impl.gpt import GPTAttention
from numpy_impl.gpt2 import GPT2, GPT2Attention
from numpy_impl.layers import Tril
from numpy_impl.loss import GPTLoss
from numpy_impl.tape import Observer, observe

IN_MODELS = (
    "matmul", "linear", "layer_norm", "embedding", "softmax", "tril", "gelu", "cross_entropy",
)  # fmt: skip


@dataclass
class Use:
    """One use of an operation in one pass: its parents, other arguments, and the cotangent."""

    op: str
    parents: tuple[Any, ...]
    name: str = ""
    rest: list[Any] = field(default_factory=list)
    cotangent: np.ndarray | None = None


class _Recorder(Observer):
    """Notes operands and cotangents, and names each use after the layer that it is the result of.

    The two matrix products of attention have no layer of their own: they are its scores and its
    context, in this order. Nor have the logits of GPT-2: they are the output.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        self.uses: dict[int, Use] = {}  # by the identity of the parents
        self.results: dict[int, Use] = {}  # by the identity of the result, until it has a name
        self.held: list[Any] = []  # so that no id is used twice

    def forward(self, op: str, out: Any, parents: tuple[Any, ...]) -> None:
        self.held.append(out)
        if op in IN_MODELS:
            self.uses[id(parents)] = self.results[id(out)] = Use(op, parents)

    def backward(
        self, op: str, i: int, grad: np.ndarray, upstream: Any, parents: tuple[Any, ...]
    ) -> None:
        if op in IN_MODELS:
            self.uses[id(parents)].cotangent = np.array(upstream)

    def layer(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        name = "output" if isinstance(layer, GPT2) else self.names.get(id(layer), "loss")
        if isinstance(layer, GPTAttention | GPT2Attention):
            products = [u for u in self.uses.values() if u.op == "matmul" and not u.name]
            for use, role in zip(products, ("scores", "context"), strict=True):
                use.name = f"{name} {role}"
        use = self.results.pop(id(output), None)
        if use is not None:
            use.name = name
            if isinstance(layer, Tril):
                use.rest = [layer.value]


def uses(bundle: Any) -> list[Use]:
    """The uses of all operations in one pass of the NumPy twin in float64, in their order."""
    model = build_model("numpy", bundle.config, dtype="float64", allow_leak=True)
    model.load_state_dict(bundle.weights)
    recorder = _Recorder({id(layer): name for name, layer in model.named_modules()})
    with observe(recorder):
        GPTLoss()(model(bundle.tokens), bundle.targets).backward()
    return list(recorder.uses.values())


def check_ops(
    functions: Mapping[str, Callable[..., Any]], bundle: Any, dtype: str = "float64"
) -> Report:
    """Judge functions of the convention of `oracle.ops` at all of their uses in one pass.

    `functions` maps names of operations (matmul, linear, layer_norm, embedding, softmax, tril,
    gelu, cross_entropy) to them; `bundle`, or the one at that path, has the `config`, `weights`,
    `tokens` and `targets` of the pass. Operands and cotangents are those of the float64 reference
    rounded to `dtype`, and the reference of each use is computed from the rounded ones. Where a
    linear map has no bias, as the tied output of GPT-2, it gets one of zeros. The upstream gradient
    of the loss is 1, and that of saturated places is tiny or 0: trying `ops.<name>.check` first
    finds more. layer_norm is in no model but GPT-2.
    Raises ValueError for another name or dtype, and for functions of which the model uses none;
    what a function raises goes through, with a note.
    """
    unit = unit_of(dtype)
    unknown = [name for name in functions if name not in IN_MODELS]
    if unknown or not functions:
        found = repr(unknown[0]) if unknown else "no function"
        raise ValueError(f"check_ops: got {found}, needed some of {', '.join(IN_MODELS)}")
    judgements = []
    for use in uses(bundle if hasattr(bundle, "config") else as_bundle(bundle)):
        if use.op not in functions:
            continue
        op = OPS[use.op]
        assert isinstance(op, Op) and use.cotangent is not None
        count = len(op.operands)
        operands = [_rounded(p.data, dtype) for p in use.parents[:count]]
        if op.name == "linear" and len(operands) < count:
            operands.append(np.zeros(len(operands[1])))
        rest = [p.data for p in use.parents[count:]] + [_fill(x, dtype) for x in use.rest]
        try:
            judgements += op.judge(
                functions[use.op], operands, rest, _rounded(use.cotangent, dtype), unit, use.name
            )
        except Exception as error:
            error.add_note(f"{use.op} in {dtype} as {use.name}, with the reference's operands")
            raise
    if not judgements:
        raise ValueError(f"check_ops: the model uses no {' and no '.join(functions)}")
    ordered = sorted(judgements, key=lambda j: j.kind != FORWARD)
    wrong = dict.fromkeys(j.name for j in ordered if not j.ok)
    notes = tuple(f"out of tolerance: {name}" for name in wrong)
    return Report(ordered, notes=notes, title=f"operations in {dtype}")


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(dtype, order="C").astype(np.float64)


def _fill(value: float, dtype: str) -> float:
    """A mask's fill as `dtype` holds it: its minimum where it would overflow."""
    least = float(np.finfo(dtype).min)
    return float(np.asarray(max(value, least) if np.isfinite(value) else value).astype(dtype))
