"""Generic mutants that no test kills, and why: equal results for every input that can occur."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Survivor:
    """In `function` (module.qualified.name, "" for any), `old` within one place becomes `new`."""

    function: str
    old: str
    new: str
    reason: str

    def explains(self, function: str, before: str, after: str) -> bool:
        """Whether `after` is `before` with exactly this replacement, made once."""
        if self.function not in ("", function):
            return False
        parts = before.split(self.old)
        return any(
            self.old.join(parts[:i]) + self.new + self.old.join(parts[i:]) == after
            for i in range(1, len(parts))
        )


FUNCTIONAL, OPTIM = "numpy_impl.functional", "numpy_impl.optim.AdamWOptimizer"
EQUAL_LENGTHS = "the lengths are equal by construction, which `strict` asserts"
ANY_NEGATIVE = "NumPy infers the length for any negative number"
SAME_SUMS = "another sort may only sum equal ids in another order, within the bound of a sum"

SURVIVORS = (
    *(Survivor("", ", strict=True", new, EQUAL_LENGTHS)
      for new in (", strict=False", ", strict=None", ", ")),
    Survivor("", ".reshape(-1", ".reshape(-2", ANY_NEGATIVE),
    Survivor(f"{FUNCTIONAL}.cross_entropy", "axis=-1", "axis=+1", "x has two axes there"),
    Survivor(f"{FUNCTIONAL}.linear", "w.shape[-1]", "w.shape[+1]", "a weight has two axes"),
    Survivor("numpy_impl.gpt.GPTEmbedding.forward", "tokens.shape[-1]", "tokens.shape[+1]",
             "tokens have two axes, as checked before"),
    *(Survivor(f"{FUNCTIONAL}.embedding", 'kind="stable"', new, SAME_SUMS)
      for new in ("kind=None", 'kind="STABLE"', "")),
    *(Survivor("numpy_impl.tensor.Tensor.__init__", f'"{kinds}"', f'"XX{kinds}XX"',
               "no dtype is of kind X")
      for kinds in ("fiub", "fciub", "fc")),
    Survivor(f"{OPTIM}.clip_grad_norm", "scale >= 1.0", "scale > 1.0",
             "a scale of exactly 1 and the number 1 multiply alike"),
    *(Survivor(f"{OPTIM}._runs", "key=lambda i: self.buffer.slices[i].start", new,
               "without the order there are more runs, each with the same arithmetic")
      for new in ("key=None", "")),
)  # fmt: skip


def reason_for(function: str, before: str, after: str) -> str:
    """Why the mutant of `function` that turns `before` into `after` survives; "" if unknown."""
    for survivor in SURVIVORS:
        if survivor.explains(function, before, after):
            return survivor.reason
    return ""
