"""What can be chosen in verifying, and in exporting and checking references."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpt_parity.choices import (
    STYLES,
    Device,
    Dtype,
    KnowsWhatWasGiven,
    ModelName,
    Precision,
    Style,
    require_choices,
    require_place,
    require_precision,
    require_seed,
)
from gpt_parity.config import TrainConfig
from gpt_parity.model_config import GPT2Config, GPTConfig, Preset
from gpt_parity.schedule import require_integer

# Of a job that is started on one machine to be judged.
MOST_PROCESSES = 16
# Steps of which every batch, or every state, is kept.
MOST_LOCKSTEPS, MOST_BUNDLE_STEPS = 100_000, 1_000


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


PresetName = Literal["tiny", "source", "wide", "deep", "gpt2-tiny", "gpt2-baby"]


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
class ExportConfig(KnowsWhatWasGiven):
    """Which reference to write: your own weights and batch, a preset, or sizes of your choice.

    Raises ValueError for values out of range, TypeError for values of another type.
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
