"""Tensor: a NumPy array that remembers how it was computed, and the elementary operations.

An operation computes its result and hands the tape a `gradient_fn`, which maps the cotangent
(upstream gradient) of the result to one gradient per parent. `gradient_fn` is pure: it writes
nothing, so that it can be tested without a graph, run twice, and run on several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numpy_impl import tape

GradientFn = Callable[[np.ndarray], Sequence["np.ndarray | None"]]
Axis = int | tuple[int, ...] | None


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The matrix product a @ b of plain arrays, silent about invalid values.

    A BLAS may set the processor's flag for numbers that are no part of the result: OpenBLAS's
    float32 product of a matrix of five columns and a vector computes, on AVX-512, with what the
    stack holds in unused lanes. So the flag tells nothing, and 0 * inf is NaN, as in PyTorch.
    """
    with np.errstate(invalid="ignore"):
        return np.matmul(a, b, out=out)


class Tensor:
    """An array in a graph of operations.

    Arrays keep their floating or complex dtype, and are copied; Python numbers, and sequences of
    them, become float32. Integer and boolean arrays carry indices and never have a gradient.
    Operands must have one dtype (TypeError); plain numbers take the other operand's.

    The backward pass reads the arrays themselves, or what an operation kept beside them: whoever
    writes into `x.data` between forward and backward gets a gradient that belongs to neither,
    without a word, as with `.data` in PyTorch. What optimizers and `load_state_dict` write is
    noticed, and the backward pass raises.
    """

    __slots__ = (
        "__weakref__", "attributes", "born", "data", "grad", "gradient_fn", "op", "parents",
        "requires_grad", "retains_grad",
    )  # fmt: skip

    written = 0  # when a parameter was last changed in place, by the count of `tape.writes`

    __array_ufunc__ = None  # so that NumPy leaves `array @ tensor` to __rmatmul__

    def __init__(self, data: Any, requires_grad: bool = True) -> None:
        array = np.array(data)
        if not isinstance(data, np.ndarray | np.generic) and array.dtype.kind in "fiub":
            array = array.astype(np.float32)
        if array.dtype.kind not in "fciub":
            raise TypeError(f"Tensor: got {type(data).__name__}, needed an array or numbers")
        self._set(array, requires_grad and array.dtype.kind in "fc")

    def _set(self, data: np.ndarray, requires_grad: bool) -> None:
        self.data = data
        self.grad: np.ndarray | None = None
        self.requires_grad = requires_grad
        self.retains_grad = False
        self.op = "leaf"
        self.parents: tuple[Tensor, ...] = ()
        self.gradient_fn: GradientFn | None = None
        self.attributes: dict[str, Any] = {}

    @staticmethod
    def from_op(
        op: str, data: Any, parents: tuple[Tensor, ...], gradient_fn: GradientFn, **attributes: Any
    ) -> Tensor:
        """The result of the operation `op`, recorded unless under `no_grad`.

        `gradient_fn(grad)` returns one gradient per parent, or None, and may leave broadcasting
        to the tape. `attributes` are the operation's other arguments, for observers.
        """
        out = Tensor.__new__(Tensor)
        requires_grad = tape.records(*parents)
        out._set(np.asarray(data), requires_grad)
        out.op, out.attributes = op, attributes
        if requires_grad:
            out.parents, out.gradient_fn, out.born = parents, gradient_fn, tape.writes
        observer = tape.current_observer()
        if observer is not None:
            replacement = observer.forward(op, out, parents)
            if replacement is not None:
                out.data = replacement
        return out

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}, op={self.op!r})"

    def __len__(self) -> int:
        return len(self.data)

    def item(self) -> Any:
        """The value of a one-element tensor as a Python number."""
        return self.data.item()

    def numpy(self) -> np.ndarray:
        """A copy of the values."""
        return self.data.copy()

    def detach(self) -> Tensor:
        """A copy without history that never has a gradient."""
        return Tensor(self.data, requires_grad=False)

    def retain_grad(self) -> None:
        """Keep this tensor's gradient in `grad` although it is not a leaf."""
        self.retains_grad = True

    def stage(self, grad: np.ndarray) -> np.ndarray:
        """Where `grad`, complete, waits for the backward pass to end."""
        return grad

    def accumulate_grad(self, grad: np.ndarray) -> None:
        """Add to `grad`, which never shares memory with another gradient."""
        self.grad = np.array(grad if self.grad is None else self.grad + grad)

    def backward(self, gradient: Any = None, *, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to every leaf that it depends on.

        `gradient` is the cotangent, of this tensor's shape and dtype; a scalar may leave it out.
        The graph is freed unless `retain_graph`. Leaves change only after the whole pass has
        succeeded. Raises TypeError for complex data (the complex step needs no backward pass) and
        for a cotangent of another dtype, ValueError for a missing or misshapen one, RuntimeError
        for a tensor without history, for a graph that was freed, and for one whose parameters an
        optimizer or `load_state_dict` has changed since.
        """
        tape.backward_pass(self, self.cotangent(gradient), retain_graph)

    def cotangent(self, gradient: Any = None) -> np.ndarray:
        """What a backward pass from here begins with; raises what `backward` does."""
        if self.dtype.kind == "c":
            raise TypeError(f"backward: got dtype {self.dtype}, needed a real one")
        if not self.requires_grad:
            raise RuntimeError("backward: this tensor has no history that needs a gradient")
        if gradient is None:
            if self.data.size != 1:
                raise ValueError(f"backward: shape {self.shape} is no scalar, needed a gradient")
            return np.ones_like(self.data)
        if isinstance(gradient, Tensor):
            gradient = gradient.data
        known = isinstance(gradient, np.ndarray | np.generic)
        array = np.array(gradient, dtype=None if known else self.dtype)
        if array.dtype != self.dtype:
            raise TypeError(f"backward: got a {array.dtype} gradient, needed {self.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"backward: got a gradient of {array.shape}, needed {self.shape}")
        return array

    def _operand(self, other: Any) -> Tensor:
        """`other` as a Tensor of this dtype; a plain number or 0-d array takes it."""
        if not isinstance(other, Tensor):
            array = np.asarray(other)
            if array.ndim == 0 and not np.can_cast(array.dtype, self.dtype, "same_kind"):
                raise TypeError(f"operand is a {array.dtype} number, needed one for {self.dtype}")
            other = Tensor(array.astype(self.dtype) if array.ndim == 0 else array, False)
        if other.data.dtype != self.data.dtype:
            raise TypeError(f"operands are {self.dtype} and {other.dtype}, needed the same dtype")
        return other

    def __add__(self, other: Any) -> Tensor:
        """a + b with broadcasting."""
        a, b = self, self._operand(other)
        return Tensor.from_op("add", a.data + b.data, (a, b), lambda grad: (grad, grad))

    def __sub__(self, other: Any) -> Tensor:
        """a - b with broadcasting."""
        a, b = self, self._operand(other)
        return Tensor.from_op("sub", a.data - b.data, (a, b), lambda grad: (grad, -grad))

    def __neg__(self) -> Tensor:
        """-a."""
        return Tensor.from_op("neg", -self.data, (self,), lambda grad: (-grad,))

    def __mul__(self, other: Any) -> Tensor:
        """a b, elementwise, with broadcasting;  da = g b,  db = g a."""
        a, b = self, self._operand(other)
        return Tensor.from_op(
            "mul", a.data * b.data, (a, b), lambda grad: (grad * b.data, grad * a.data)
        )

    def __truediv__(self, other: Any) -> Tensor:
        """a / b, elementwise, with broadcasting;  da = g / b,  db = -(g / b) (a / b)."""
        a, b = self, self._operand(other)

        def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
            da = grad / b.data
            return da, -da * (a.data / b.data) if b.requires_grad else None

        return Tensor.from_op("div", a.data / b.data, (a, b), gradient_fn)

    def __matmul__(self, other: Any) -> Tensor:
        """Matrix product (..., M, K) @ (..., K, N) -> (..., M, N), leading axes broadcast.

        dA = G B^T,  dB = A^T G. Raises ValueError for fewer than two axes or unequal K.
        """
        a, b = self, self._operand(other)
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise ValueError(f"matmul: got {a.shape} @ {b.shape}, needed (..., M, K) @ (..., K, N)")

        def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            da = product(grad, b.data.swapaxes(-1, -2))
            # As (G^T A)^T: after a transpose, the way back leaves it in the order of memory.
            return da, product(grad.swapaxes(-1, -2), a.data).swapaxes(-1, -2)

        return Tensor.from_op("matmul", product(a.data, b.data), (a, b), gradient_fn)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Any) -> Tensor:
        return self._operand(other) - self

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._operand(other) / self

    def __rmatmul__(self, other: Any) -> Tensor:
        return self._operand(other) @ self

    def transpose(self, axis1: int, axis2: int) -> Tensor:
        """Swap two axes; its own inverse, so the gradient is swapped back."""
        return Tensor.from_op(
            "transpose",
            self.data.swapaxes(axis1, axis2),
            (self,),
            lambda grad: (grad.swapaxes(axis1, axis2),),
        )

    def reshape(self, *shape: int) -> Tensor:
        """The same elements in another shape."""
        return Tensor.from_op(
            "reshape", self.data.reshape(shape), (self,), lambda grad: (grad.reshape(self.shape),)
        )

    def unbind(self, axis: int = 0) -> tuple[Tensor, ...]:
        """The parts along `axis`, without it; the gradient of each is 0 in all the others."""
        parts = np.moveaxis(self.data, axis, 0)

        def part(i: int) -> Tensor:
            def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
                dx = np.zeros_like(self.data)
                np.moveaxis(dx, axis, 0)[i] = grad
                return (dx,)

            return Tensor.from_op("unbind", parts[i], (self,), gradient_fn)

        return tuple(part(i) for i in range(len(parts)))

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Sum over `axis` (None: all axes); the gradient is spread back over them."""
        kept = self.data.sum(axis=axis, keepdims=True)

        def gradient_fn(grad: np.ndarray) -> tuple[np.ndarray]:
            return (np.broadcast_to(grad.reshape(kept.shape), self.shape),)

        data = kept if keepdims else kept.squeeze(axis)
        return Tensor.from_op("sum", data, (self,), gradient_fn, axis=axis)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Mean over `axis` (None: all axes)."""
        total = self.sum(axis, keepdims)
        return total / (self.data.size / total.data.size)
