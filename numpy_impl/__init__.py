"""A GPT on a small reverse-mode autograd written in NumPy."""

from numpy_impl.gpt import GPT
from numpy_impl.gpt2 import GPT2
from numpy_impl.loss import GPTLoss
from numpy_impl.optim import AdamWOptimizer
from numpy_impl.tape import no_grad
from numpy_impl.tensor import Tensor

__all__ = ["GPT", "GPT2", "AdamWOptimizer", "GPTLoss", "Tensor", "no_grad"]
