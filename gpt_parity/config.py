"""What can be chosen in training and generating, with its defaults: every flag is a field here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from gpt_parity.choices import (
    DTYPES,
    Backend,
    Device,
    Dtype,
    KnowsWhatWasGiven,
    ModelName,
    Precision,
    Windows,
    require_choices,
    require_precision,
    require_seed,
    require_threads,
)
from gpt_parity.machine import available_cores
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.schedule import WarmupCosineScheduler, require_integer, require_real

# Operations of a step from which splitting it gains: threads wait for each other, and for the
# interpreter, some tenths of a millisecond.
WORTH_SEVERAL_CORES = 4 * 10**8


# What follows a step.
VALIDATION, CHECKPOINT = "validation", "checkpoint"

# Fields of TrainConfig that say where a run is, not what it computes.
PLACES = frozenset({"data", "out", "overwrite", "resume", "anomaly", "shard"})
# Those that a run which goes on may change.
CHANGEABLE = frozenset(
    {
        "backend", "data", "threads", "save_every", "keep", "anomaly", "accumulate", "shard",
        "compile", "device",
    }
)  # fmt: skip


# Fields that came later: a recipe without one of them means the default.
LATER = frozenset(
    {"model", "preset", "heads", "windows", "accumulate", "precision", "compile", "device"}
)

# Sizes and recipes of GPT-2 by name; what is given explicitly goes before them.
GPT2_PRESETS: dict[str, dict[str, Any]] = {
    "baby": {
        "context_size": 64, "embedding_size": 128, "blocks": 4, "heads": 4, "batch_size": 12,
        "windows": "random", "max_steps": 2000, "learning_rate": 4e-3, "betas": (0.9, 0.99),
        "weight_decay": 0.1,
    },
    "gpt2": {
        "context_size": 1024, "embedding_size": 768, "blocks": 12, "heads": 12, "windows": "random",
        "learning_rate": 6e-4, "min_learning_rate": 6e-5, "betas": (0.9, 0.95),
        "weight_decay": 0.1,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig(KnowsWhatWasGiven):
    """Everything that a training run depends on; the defaults are the recipe of the source text.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    backend: Backend = "numpy"
    """Which implementation trains."""
    model: ModelName = "gpt"
    """The model of the source text, or GPT-2."""
    preset: Literal["baby", "gpt2"] | None = None
    """Sizes and recipe of a GPT-2, but for what is given: baby has 0.8 million parameters."""
    data: Path | None = None
    """UTF-8 text; without it data/tinyshakespeare.txt, or else a text that comes with Python."""
    out: Path | None = None
    """Folder of the run; without it runs/BACKEND-DTYPE-seedSEED, of a GPT-2 runs/gpt2-..."""
    overwrite: bool = False
    """Replace the run that the folder already holds."""
    resume: Path | None = None
    """Go on with the run of this folder (or checkpoint), which keeps what shapes it."""
    seed: int = 42
    """Seed of the initial weights and of the sample."""
    dtype: Dtype = "float32"
    """Precision of weights, gradients and moments."""
    precision: Precision | None = None
    """Arithmetic of a torch model: a dtype, which it sets, bf16 (autocast) or tf32 (of GPUs)."""
    compile: bool = False
    """Let torch.compile fuse the operations of a torch model; the first step takes long."""
    device: Device = "cpu"
    """Where a torch model computes."""
    epochs: int = 2
    """Passes over the training part of the text, or as many random windows."""
    max_steps: int | None = None
    """Steps after which run and schedule end; on random windows also more than the epochs have."""
    batch_size: int = 4
    """Windows per step, of all processes and parts together."""
    accumulate: int = 1
    """Parts in which a batch goes through the model, one after the other, to need less memory."""
    shard: bool = False
    """Divide weights, gradients and moments among the processes that torchrun started."""
    context_size: int = 32
    """Characters per window, the longest input of the model."""
    embedding_size: int = 64
    """Width of the model."""
    blocks: int = 2
    """Number of transformer blocks."""
    heads: int = 4
    """Attention heads of a GPT-2; the model of the source text has one."""
    windows: Windows = "ordered"
    """Which windows of the text make a batch: the next ones, or ones drawn from the seed."""
    learning_rate: float = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup: int = 100
    """Steps over which the learning rate rises linearly."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end, reached along half a cosine."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments of AdamW."""
    eps: float = 1e-8
    """Added to the denominator of AdamW."""
    weight_decay: float = 0.01
    """Decoupled weight decay of parameters with two or more axes."""
    max_norm: float = 1.0
    """Largest gradient norm, longer gradients are scaled down to it; inf never scales."""
    eval_every: int | None = None
    """Steps between validation losses (of the test part), else one at the end."""
    log_every: int = 100
    """Steps between two lines of metrics.jsonl; the loss in a line is the mean over its steps."""
    sample_tokens: int = 300
    """Characters of the sample that is generated at the end."""
    threads: int | None = None
    """Cores to train on; by default one, or all where the model is large enough to gain."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints to keep, the last one among them."""
    anomaly: bool = False
    """Look at every value and gradient, and name the operation where one is not finite; slow."""

    def __post_init__(self) -> None:
        require_choices(self)
        self._apply_preset()
        self._require_torch()
        self._apply_precision()
        if self.resume is not None and self.overwrite:
            raise ValueError("resume and overwrite are both set, one of them is needed")
        require_seed(self.seed)
        sizes = ("epochs", "batch_size", "accumulate", "context_size", "embedding_size", "blocks",
                 "heads", "log_every", "sample_tokens", "save_every", "keep")  # fmt: skip
        for name in sizes:
            require_integer(name, getattr(self, name), 1)
        for name in ("max_steps", "eval_every"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), 1)
        if self.threads is not None:
            require_threads(self.threads)
        self.model_config(1)  # the sizes are in range
        require_integer("warmup", self.warmup, 0)
        for name in ("learning_rate", "min_learning_rate"):
            if not 0 < require_real(name, getattr(self, name)) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, a finite rate above 0 is needed"
                )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate is {self.min_learning_rate}, at most learning_rate = "
                f"{self.learning_rate} is needed"
            )
        if len(self.betas) != 2 or not all(0 <= require_real("betas", b) < 1 for b in self.betas):
            raise ValueError(f"betas are {self.betas}, two numbers in [0, 1) are needed")
        for name in ("eps", "weight_decay"):
            if not 0 <= require_real(name, getattr(self, name)) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, a finite number of at least 0 is needed"
                )
        if not require_real("max_norm", self.max_norm) > 0:
            raise ValueError(f"max_norm is {self.max_norm}, a number above 0 is needed")

    def _require_torch(self) -> None:
        if self.backend == "torch" or self._still_to_come("backend"):
            return
        for name in ("shard", "precision", "compile", "device"):
            value = getattr(self, name)
            if value != getattr(TrainConfig, name):
                raise ValueError(
                    f"{name} is {'set' if value is True else value}, which only --backend torch can"
                )

    def _still_to_come(self, name: str) -> bool:
        """Whether the run that is gone on with says it."""
        return self.resume is not None and name not in self.given

    def _apply_precision(self) -> None:
        """The dtype that `precision` asks for; ValueError where the two contradict each other."""
        if not self._still_to_come("device"):
            require_precision(self.precision, self.device)
        if self.compile and self.anomaly:
            raise ValueError("compile and anomaly are both set, one of them is needed")
        if self.precision is None:
            return
        needed = self.precision if self.precision in DTYPES else "float32"
        if "dtype" in self.given and self.dtype != needed:
            raise ValueError(
                f"dtype is {self.dtype}, precision is {self.precision} and needs {needed}"
            )
        object.__setattr__(self, "dtype", needed)

    @property
    def arithmetic(self) -> Precision:
        """`precision`, or else that of the dtype."""
        return self.precision or self.dtype

    def require_shards(self) -> None:
        """Raise ValueError for shards in a backend that has none."""
        if self.shard and self.backend != "torch":
            raise ValueError("shard is set, which only --backend torch can")

    def _apply_preset(self) -> None:
        known = tuple(GPT2_PRESETS)
        if self.preset not in (None, *known):
            raise ValueError(f"preset is {self.preset!r}, one of {known} is needed")
        if self.model != "gpt2":
            # A recipe or a copy gives every field, also those that the model does not have.
            all_given = {f.name for f in fields(self)} - PLACES - LATER <= self.given
            for name in ("preset", "heads"):
                value = getattr(self, name)
                own = name in self.given and value is not None and not all_given
                # A run that goes on has its model already, with which flags are compared.
                if (own or value != getattr(TrainConfig, name)) and self.resume is None:
                    raise ValueError(f"{name} is {value}, which only --model gpt2 has")
            return
        for name, value in GPT2_PRESETS.get(self.preset or "", {}).items():
            if name not in self.given:
                object.__setattr__(self, name, value)

    @property
    def run_folder(self) -> Path:
        """`out`, or the folder named after model (if GPT-2), backend, arithmetic and seed."""
        model = "" if self.model == "gpt" else f"{self.model}-"
        return self.out or Path("runs") / f"{model}{self.backend}-{self.arithmetic}-seed{self.seed}"

    @property
    def recipe(self) -> dict[str, Any]:
        """What a run depends on, by field, as JSON holds it; `from_recipe` is the way back."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in PLACES}
        # JSON has no infinity.
        max_norm = None if math.isinf(self.max_norm) else self.max_norm
        return {**values, "betas": list(self.betas), "max_norm": max_norm}

    @classmethod
    def from_recipe(cls, recipe: dict[str, Any], **places: Any) -> TrainConfig:
        """The configuration with these fields; ValueError for any other set of names.

        Those of LATER may be absent.
        """
        needed = {f.name for f in fields(cls)} - PLACES
        if set(recipe) | LATER != needed:
            raise ValueError(f"recipe has {sorted(recipe)}, {sorted(needed)} is needed")
        if not isinstance(recipe["betas"], list):
            raise ValueError(f"betas is {recipe['betas']!r}, two numbers are needed")
        max_norm = math.inf if recipe["max_norm"] is None else recipe["max_norm"]
        values = {**recipe, "betas": tuple(recipe["betas"]), "max_norm": max_norm}
        return cls(**values, **places)

    @property
    def cores(self) -> int:
        """`threads`, or as many as are fastest for a step of this size."""
        if self.threads is not None:
            return self.threads
        # Of the vocabulary nothing is known here, and its part is small.
        work = self.model_config(1).operations(self.batch_size, self.context_size)
        if work < WORTH_SEVERAL_CORES:
            return 1
        # NumPy splits the batch.
        cores = available_cores()
        return min(cores, self.batch_size) if self.backend == "numpy" else cores

    def total_steps(self, batches: int) -> int:
        """The steps of the whole run, with so many batches an epoch."""
        epochs = self.epochs * batches
        if self.max_steps is None:
            return epochs
        return self.max_steps if self.windows == "random" else min(epochs, self.max_steps)

    def point(self, step: int, total: int) -> str:
        """What follows this step: a validation (which saves too), a checkpoint, or nothing ("").

        The validation after the last step is not among them.
        """
        if not 0 < step < total:
            return ""
        if self.eval_every is not None and step % self.eval_every == 0:
            return VALIDATION
        return CHECKPOINT if step % self.save_every == 0 else ""

    def scheduler(self, total: int) -> WarmupCosineScheduler:
        """The learning rates of a run of so many steps."""
        return WarmupCosineScheduler(self.learning_rate, total, self.warmup, self.min_learning_rate)

    @property
    def windows_seed(self) -> int | None:
        """The seed of random windows, None where they come in order."""
        return self.seed if self.windows == "random" else None

    def model_config(self, vocab_size: int) -> GPTConfig:
        """Return the model's part of this configuration."""
        sizes = (vocab_size, self.context_size, self.embedding_size, self.blocks)
        return GPT2Config(*sizes, heads=self.heads) if self.model == "gpt2" else GPTConfig(*sizes)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to generate from which checkpoint; sizes, vocabulary and dtype come from its manifest.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    checkpoint: Path
    """Folder of a run, or a checkpoint file."""
    prompt: str
    """Text to continue; the model sees its end. One with a dash first: --prompt=-TEXT."""
    backend: Backend = "numpy"
    """Which implementation computes the logits."""
    tokens: int = 200
    """Tokens to generate: characters, or pieces of text where the model has those."""
    temperature: float = 1.0
    """Below 1 is bolder, above 1 is wilder; 0 always takes the likeliest character."""
    top_k: int | None = None
    """Choose among this many of the likeliest characters only."""
    seed: int = 0
    """Seed of the random numbers, one per character."""
    threads: int = 1
    """Threads of the matrix products."""

    def __post_init__(self) -> None:
        require_choices(self)
        if not self.prompt:
            raise ValueError("prompt is empty, at least one character is needed")
        require_integer("tokens", self.tokens, 1)
        if not require_real("temperature", self.temperature) >= 0:
            raise ValueError(f"temperature is {self.temperature}, 0 or more is needed")
        if self.top_k is not None:
            require_integer("top_k", self.top_k, 1)
        require_seed(self.seed)
        require_threads(self.threads)
