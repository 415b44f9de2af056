"""The same GPT from stock PyTorch parts."""

from torch import no_grad

from torch_impl.gpt import GPT
from torch_impl.gpt2 import GPT2
from torch_impl.loss import GPTLoss
from torch_impl.optim import AdamWOptimizer

__all__ = ["GPT", "GPT2", "AdamWOptimizer", "GPTLoss", "no_grad"]
