"""What can be chosen, with its defaults: every flag of the commands is a field here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter

from gpt_parity.machine import MOST_THREADS, available_cores
from gpt_parity.model_config import GPT2Config, GPTConfig
from gpt_parity.schedule import WarmupCosineScheduler, require_integer, require_real

Backend = Literal["numpy", "torch"]
ModelName = Literal["gpt", "gpt2"]
Windows = Literal["ordered", "random"]
Dtype = Literal["float32", "float64"]
Style = Literal["source", "nanogpt", "hf", "llm.c"]
Precision = Literal["float64", "float32", "bf16", "tf32"]
Device = Literal["cpu", "cuda"]


# Operations of a step from which splitting it gains: threads wait for each other, and for the
# interpreter, some tenths of a millisecond.
WORTH_SEVERAL_CORES = 4 * 10**8

# Of a job that is started on one machine to be judged.
MOST_PROCESSES = 16
# Steps of which every batch, or every state, is kept.
MOST_LOCKSTEPS, MOST_BUNDLE_STEPS = 100_000, 1_000

BACKENDS: tuple[Backend, ...] = ("numpy", "torch")
MODELS: tuple[ModelName, ...] = ("gpt", "gpt2")
WINDOWS: tuple[Windows, ...] = ("ordered", "random")
DTYPES: tuple[Dtype, ...] = ("float32", "float64")
STYLES: tuple[Style, ...] = get_args(Style)
PRECISIONS: tuple[Precision, ...] = ("float64", "float32", "bf16", "tf32")
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


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
        "windows": "random", "max_steps": 2000, "learning_rate": 2e-3, "betas": (0.9, 0.99),
        "weight_decay": 0.1,
    },
    "gpt2": {
        "context_size": 1024, "embedding_size": 768, "blocks": 12, "heads": 12, "windows": "random",
        "learning_rate": 6e-4, "min_learning_rate": 6e-5, "betas": (0.9, 0.95),
        "weight_decay": 0.1,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that a training run depends on; the defaults are the recipe of the source text.

    `given` holds the names of the fields that were set and not left to their defaults. Raises
    ValueError for values out of range, TypeError for values of another type.
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

    given: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **given: Any) -> TrainConfig:
        config = super().__new__(cls)
        object.__setattr__(config, "given", frozenset(given))
        return config

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


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """What to compare; by default the source configuration at its initial weights.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    model: ModelName | None = None
    """The source text's model (gpt, by default) or a GPT-2 of its sizes; a checkpoint tells."""
    data: Path | None = None
    """UTF-8 text; without it data/tinyshakespeare.txt, or else a text that comes with Python."""
    checkpoint: Path | None = None
    """Folder of a run, or a checkpoint file, whose weights are compared instead."""
    steps: int = 200
    """Training steps in lockstep; 0 compares one pass only."""
    hops: int = 0
    """Also train with so many changes of the backend, each by a checkpoint after 10 steps."""
    seed: int = 42
    """Seed of the initial weights; without effect on those of a checkpoint."""
    json: Path | None = None
    """Also write every figure to this file."""
    html: Path | None = None
    """Also write a page with tables and pictures to this file."""
    processes: int = 1
    """Also train in so many processes, each way that torchrun can, and compare with one."""
    workers: int = 2
    """Processes that share the work of verifying; 1 does all in one."""
    precision: Precision | None = None
    """Also judge one pass of the torch twin in this arithmetic (float32 with compile or cuda)."""
    compile: bool = False
    """Also judge one pass of the torch twin as torch.compile makes it."""
    device: Device = "cpu"
    """Where that pass is computed."""

    def __post_init__(self) -> None:
        for name in ("steps", "hops"):
            if require_integer(name, getattr(self, name), 0) > MOST_LOCKSTEPS:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, at most {MOST_LOCKSTEPS} are needed"
                )
        if require_integer("processes", self.processes, 1) > MOST_PROCESSES:
            raise ValueError(f"processes is {self.processes}, at most {MOST_PROCESSES} are needed")
        require_integer("workers", self.workers, 1)
        require_choices(self)
        require_precision(self.precision, self.device)
        for name in ("json", "html"):
            require_place(name, getattr(self, name), (self.data, self.checkpoint))
        require_seed(self.seed)

    @property
    def arithmetic(self) -> Precision | None:
        """That of the pass which `precision`, `compile` or `device` asks for, None without them."""
        asked = self.compile or self.device != "cpu"
        return self.precision or ("float32" if asked else None)


BenchPart = Literal[
    "step", "forward", "generation", "cache", "oracle", "memory", "start", "profile", "recipe",
    "growth", "large", "suite",
]  # fmt: skip
BenchSize = Literal["source", "small", "medium", "baby", "gpt2"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to time, and for how long.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    parts: Annotated[tuple[BenchPart, ...], Parameter(consume_multiple=True)] = (
        "step", "forward", "generation", "cache", "oracle", "memory", "start",
    )  # fmt: skip
    """What to measure; recipe, growth, large and suite take minutes more."""
    sizes: Annotated[tuple[BenchSize, ...], Parameter(consume_multiple=True)] = (
        "source", "small", "medium", "baby",
    )  # fmt: skip
    """Models of step, forward, generation, memory and profile: the text's, larger ones, GPT-2."""
    profile: bool = False
    """Also say where the NumPy step spends its time, operation by operation."""
    seconds: float = 20.0
    """Time for each comparison of steps, forward passes and generation (at least 7 rounds)."""
    data: Path | None = None
    """Text of the part "recipe"; by default as in training."""
    recipe_steps: int | None = None
    """End the part "recipe" after so many steps."""
    json: Path | None = None
    """Also write every figure to this file."""
    report: Path | None = None
    """Also write the tables into this Markdown file, each in place of its last version."""

    def __post_init__(self) -> None:
        if not 0 < require_real("seconds", self.seconds) < math.inf:
            raise ValueError(f"seconds is {self.seconds}, a finite number above 0 is needed")
        if self.recipe_steps is not None:
            require_integer("recipe_steps", self.recipe_steps, 1)
        for name, known in (("parts", get_args(BenchPart)), ("sizes", get_args(BenchSize))):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f"{name} has {value!r}, of {known} is needed")
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, at least one of {known} is needed")
        if self.json is not None and self.json == self.report:
            raise ValueError(f"json and report are both {self.json}, two files are needed")
        for name in ("json", "report"):
            require_place(name, getattr(self, name), (self.data,))


PresetName = Literal["tiny", "source", "wide", "deep", "gpt2-tiny", "gpt2-baby"]


@dataclass(frozen=True)
class Preset:
    """Sizes of a reference model and of its one batch."""

    model: GPTConfig
    batch_size: int
    length: int


PRESETS: dict[str, Preset] = {
    # Sizes that all differ, so that no wrong axis fits; shorter than the context.
    "tiny": Preset(GPTConfig(11, 6, 7, 2), batch_size=3, length=5),
    "source": Preset(GPTConfig(65, 32, 64, 2), batch_size=4, length=32),
    "wide": Preset(GPTConfig(65, 32, 256, 1), batch_size=2, length=32),
    "deep": Preset(GPTConfig(65, 16, 32, 6), batch_size=4, length=16),
    # H = 3 and D = 4 differ from all others too.
    "gpt2-tiny": Preset(GPT2Config(13, 7, 12, 2, heads=3), batch_size=5, length=6),
    "gpt2-baby": Preset(GPT2Config(65, 64, 128, 4, heads=4), batch_size=4, length=64),
}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which reference to write: your own weights and batch, a preset, or sizes of your choice.

    `given` holds the names of the fields that were set and not left to their defaults. Raises
    ValueError for values out of range, TypeError for values of another type.
    """

    out: Annotated[Path, Parameter(name=["--out", "-o"])]
    """FILE.safetensors, FILE.npz, or else a new folder of npy files; of format llm.c a folder."""
    format: Literal["bundle", "llm.c"] = "bundle"
    """What to write: a bundle, or the checkpoint and the debug state that the C project reads."""
    prefix: str = "gpt2_124M"
    """How the two files of the format llm.c begin; its test opens those of the default."""
    weights: Path | None = None
    """Your weights by name: a checkpoint, safetensors, npz, a folder of npy files, llm.c's .bin."""
    style: Style = "source"
    """Whose names and layouts your weights have; a checkpoint has its own."""
    tokens: Path | None = None
    """Your token ids (B, T): an npy file, a file of an array "tokens", a debug state of llm.c."""
    targets: Path | None = None
    """Your target ids, likewise; "targets" of the tokens' file by default."""
    preset: PresetName = "source"
    """Sizes for weights that are drawn: tiny, source (the text's), wide, deep, or of a GPT-2."""
    vocab_size: int | None = None
    """V in place of the preset's."""
    context_size: int | None = None
    """C in place of the preset's."""
    embedding_size: int | None = None
    """E in place of the preset's."""
    blocks: int | None = None
    """Number of blocks in place of the preset's."""
    heads: int | None = None
    """Attention heads in place of those of a GPT-2's preset; those of your own GPT-2's weights."""
    batch_size: int | None = None
    """B in place of the preset's."""
    length: int | None = None
    """T in place of the preset's, at most C."""
    init: Literal["order-one", "training"] = "order-one"
    """Weights that are drawn: of order one (small ones hide mistakes), or as training starts."""
    seed: int = 0
    """Seed of weights and tokens that are drawn."""
    dtype: Dtype = "float64"
    """Precision of the arrays; float32 rounds your weights and judges float32 only."""
    steps: int = 0
    """Also this many AdamW steps on the batch."""
    learning_rate: float = 1e-3
    """Learning rate of these steps."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the denominator of AdamW."""
    weight_decay: float = 0.01
    """Decoupled weight decay of parameters with two or more axes."""
    max_norm: float = 1.0
    """Largest gradient norm, longer gradients are scaled down to it; inf never scales."""
    overwrite: bool = False
    """Replace the bundle that is there."""

    given: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **given: Any) -> ExportConfig:
        config = super().__new__(cls)
        object.__setattr__(config, "given", frozenset(given))
        return config

    def __post_init__(self) -> None:
        require_choices(self)
        if self.preset not in PRESETS:
            raise ValueError(f"preset is {self.preset!r}, one of {tuple(PRESETS)} is needed")
        if self.format not in ("bundle", "llm.c"):
            raise ValueError(f"format is {self.format!r}, bundle or llm.c is needed")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", self.prefix):
            raise ValueError(
                f"prefix is {self.prefix[:100]!r}, up to 100 letters, digits, _, - and . are needed"
            )
        if self.format == "llm.c" and self.steps:
            raise ValueError(f"steps is {self.steps}, but the format llm.c holds no steps")
        if self.style != "source" and self.weights is None:
            raise ValueError(f"style is {self.style!r}, but there are no weights that it is of")
        for name in ("preset", "init"):
            if name in self.given and self.weights is not None:
                raise ValueError(f"{name} is given, but the weights are those of a file")
        if "prefix" in self.given and self.format != "llm.c":
            raise ValueError("prefix is given, but only files of the format llm.c have one")
        if self.init not in ("order-one", "training"):
            raise ValueError(f"init is {self.init!r}, order-one or training is needed")
        for name in ("vocab_size", "context_size", "embedding_size", "blocks", "heads",
                     "batch_size", "length"):  # fmt: skip
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), 1)
        if require_integer("steps", self.steps, 0) > MOST_BUNDLE_STEPS:
            raise ValueError(f"steps is {self.steps}, at most {MOST_BUNDLE_STEPS} are needed")
        require_seed(self.seed)
        # The same ranges as in training.
        TrainConfig(min_learning_rate=self.learning_rate, **self.optimizer)

    @property
    def optimizer(self) -> dict[str, Any]:
        """The hyperparameters of the steps."""
        return {name: getattr(self, name) for name in HYPERPARAMETERS}


# Sizes of the benchmark's models: that of the text and larger ones, then those of GPT-2.
BENCHMARKS: dict[str, Preset] = {
    "source": Preset(GPTConfig(65, 32, 64, 2), batch_size=4, length=32),
    "small": Preset(GPTConfig(65, 64, 128, 4), batch_size=12, length=64),
    "medium": Preset(GPTConfig(65, 256, 384, 6), batch_size=8, length=256),
    "baby": Preset(GPT2Config(65, 64, 128, 4, heads=4), batch_size=12, length=64),
    "gpt2": Preset(GPT2Config(50257, 1024, 768, 12, heads=12), batch_size=1, length=64),
}

HYPERPARAMETERS = ("learning_rate", "betas", "eps", "weight_decay", "max_norm")


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to judge by which reference.

    Raises ValueError for values out of range, TypeError for values of another type.
    """

    ref: Path
    """Bundle that `oracle export` wrote."""
    dtype: Literal["float64", "float32", "tf32", "bfloat16", "float16"] | None = None
    """Arithmetic that your results come from; by default that of your arrays."""
    style: Style = "source"
    """Whose names and layouts your arrays have: `oracle names` shows them."""
    map: Path | None = None
    """TOML file of lines  "your name" = "name in the bundle", or in the style."""
    only: str | None = None
    """Judge only what matches this pattern, such as "grad/*bias"."""
    json: bool = False
    """Print the report as JSON."""
    html: Path | None = None
    """Also write a page with tables and pictures to this file."""

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"style is {self.style!r}, one of {STYLES} is needed")
        require_place("html", self.html, (self.ref, self.map))


@dataclass(frozen=True, kw_only=True)
class NamesConfig:
    """Which names to show.

    Raises ValueError for values out of range.
    """

    style: Style
    """Whose names and layouts: ours, nanoGPT's, those of Hugging Face transformers, or llm.c's."""
    preset: PresetName | None = None
    """Model whose parameters to name, by default gpt2-tiny."""
    ref: Path | None = None
    """Bundle of whose model to name them."""

    def __post_init__(self) -> None:
        require_choices(self)
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset is {self.preset!r}, one of {tuple(PRESETS)} is needed")
        if self.preset is not None and self.ref is not None:
            raise ValueError("preset and ref are both given, one of them is needed")


def require_threads(count: int) -> None:
    """Raise ValueError unless that many threads can be asked for."""
    if require_integer("threads", count, 1) > MOST_THREADS:
        raise ValueError(f"threads is {count}, at most {MOST_THREADS} are needed")


def require_seed(seed: int) -> None:
    """Raise ValueError unless a random generator can start from `seed`."""
    if require_integer("seed", seed, 0) >= 2**32:
        raise ValueError(f"seed is {seed}, less than 2**32 is needed")


def require_place(name: str, path: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Raise ValueError unless a file can be made at `path`, or replaced; None is no place.

    A file that is one of the `inputs`, or in one of their folders, is not to be replaced.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{name} is {path}, a file in a folder that exists is needed")
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} is {path}, which is no regular file; a file is needed")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{name} is {path}, in a folder that cannot be written")
    for source in inputs:
        if source is None or not source.exists() or not path.exists():
            continue
        inside = source.is_dir() and path.resolve().is_relative_to(source.resolve())
        if inside or source.samefile(path):
            raise ValueError(f"{name} is {path}, which belongs to the input {source}")


def require_precision(precision: Precision | None, device: Device) -> None:
    """Raise ValueError for an arithmetic that no such device has."""
    if precision == "tf32" and device != "cuda":
        raise ValueError("precision is tf32, which --device cuda alone has")


def require_choices(config: object) -> None:
    """Raise ValueError unless what `config` has of these choices is known, or None by default."""
    for name, known in (
        ("backend", BACKENDS), ("dtype", DTYPES), ("model", MODELS), ("windows", WINDOWS),
        ("style", STYLES), ("precision", PRECISIONS), ("device", DEVICES),
    ):  # fmt: skip
        default = getattr(type(config), name, known[0])
        value = getattr(config, name, default)
        if value not in known and not (value is None and default is None):
            raise ValueError(f"{name} is {value!r}, one of {known} is needed")
