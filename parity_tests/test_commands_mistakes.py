"""The commands: one line for every mistake."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from gpt_parity.cli import main
from parity_tests.command_line import (
    SMALL,
    TEXT,
    checkpoint,
    command,
    one_error,
)

pytestmark = [pytest.mark.reference("by hand"), pytest.mark.folder_of_its_own(TEXT)]


BAD_TRAINING: list[tuple[list[str], str]] = [
    (["--data", "absent.txt"], "absent.txt: cannot be read, No such file or directory"),
    (["--data", "."], ".: cannot be read, Is a directory"),
    (["--data", "latin1.txt"], "latin1.txt: byte 0xfc at offset 2 is not UTF-8"),
    (["--data", "empty.txt"], "empty.txt: holds no text"),
    (
        ["--data", "short.txt", "--batch-size", "1"],
        "short.txt: test split has 2 characters of the 20 of the text, at least 9",
    ),
    (["--batch-size", "1000"], "text.txt: train split has"),
    (["--batch-size", "0"], "batch_size is 0, at least 1 is needed"),
    (["--context-size", "-3"], "context_size is -3, at least 1 is needed"),
    (["--embedding-size", "0"], "embedding_size is 0"),
    (["--blocks", "0"], "blocks is 0"),
    (["--epochs", "0"], "epochs is 0"),
    (["--max-steps", "0"], "max_steps is 0"),
    (["--eval-every", "0"], "eval_every is 0"),
    (["--log-every", "0"], "log_every is 0"),
    (["--sample-tokens", "0"], "sample_tokens is 0"),
    (["--threads", "0"], "threads is 0"),
    (["--threads", "257"], "threads is 257, at most 256 are needed"),
    (["--threads", "2.5"], 'Invalid value for --threads: unable to convert "2.5" into int'),
    (["--keep", "0"], "keep is 0"),
    (["--save-every", "0"], "save_every is 0"),
    (["--blocks", "100000000"], "blocks is 100000000, at most 10000 are needed"),
    (["--embedding-size", "10000000"], "a model of "),
    (["--resume", "absent", "--overwrite"], "resume and overwrite are both set"),
    (["--warmup", "-1"], "warmup is -1"),
    (["--seed", "-1"], "seed is -1"),
    (["--seed", "4294967296"], "seed is 4294967296, less than 2**32"),
    (["--learning-rate", "0"], "learning_rate is 0.0"),
    (["--learning-rate", "nan"], "learning_rate is nan"),
    (["--min-learning-rate", "1"], "min_learning_rate is 1.0, at most learning_rate"),
    (["--betas", "0.9", "1"], "betas are (0.9, 1.0)"),
    (["--eps", "-1"], "eps is -1.0"),
    (["--weight-decay", "inf"], "weight_decay is inf"),
    (["--max-norm", "0"], "max_norm is 0.0"),
    (["--out", "text.txt/run"], "text.txt/run: cannot be written, Not a directory"),
    (["--backend", "jax"], 'Invalid value "jax" for --backend.'),
    (["--dtype", "float16"], 'Invalid value "float16" for --dtype.'),
    (["--seed", "many"], 'Invalid value for --seed: unable to convert "many" into int.'),
    (["--lerning-rate", "1"], "Unknown option: --lerning-rate. Did you mean --learning-rate?"),
    (["stray"], "Unused"),
    (["--seed", "a\nb"], 'Invalid value for --seed: unable to convert "a'),
]


@pytest.mark.parametrize(("flags", "message"), BAD_TRAINING)
def test_a_mistake_in_training_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("latin1.txt").write_bytes("für".replace("f", "ab").encode("latin-1"))
    Path("empty.txt").write_bytes(b"")
    Path("short.txt").write_text("twenty characters!!\n")
    before = signal.getsignal(signal.SIGTERM), sys.stdout.encoding
    arguments = ["train", "--data", "text.txt", *SMALL]
    for flag in flags:  # a flag that stands twice would be a mistake of its own
        if flag in arguments:
            del arguments[arguments.index(flag) : arguments.index(flag) + 2]
    code = main([*arguments, *flags])
    found = one_error(capsys, code)
    assert found.startswith(message), found
    assert not Path("runs").exists() and not Path("run").exists()
    assert (signal.getsignal(signal.SIGTERM), sys.stdout.encoding) == before


BAD_GENERATION: list[tuple[list[str], str]] = [
    (["--prompt", ""], "prompt is empty, at least one character is needed"),
    (["--prompt", "F#Ω"], "prompt: text holds '#', 'Ω', only the 20 characters"),
    (["--tokens", "0"], "tokens is 0, at least 1 is needed"),
    (["--temperature", "-1"], "temperature is -1.0, 0 or more is needed"),
    (["--temperature", "nan"], "temperature is nan"),
    (["--top-k", "0"], "top_k is 0"),
    (["--seed", "-1"], "seed is -1"),
    (["--checkpoint", "absent"], "absent: cannot be read, No such file or directory"),
    (["--checkpoint", "."], "checkpoint.safetensors: cannot be read, No such file or directory"),
    (["--checkpoint", "text.txt"], "text.txt: is not a whole safetensors file"),
    (["--checkpoint", "half"], "half: is not a whole safetensors file"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_GENERATION)
def test_a_mistake_in_generation_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(capsys)
    whole = Path("run/checkpoint.safetensors").read_bytes()
    Path("half").write_bytes(whole[: len(whole) // 2])
    arguments = {"--checkpoint": "run", "--prompt": "Meister", flags[0]: flags[1]}
    code = main(["generate", *(part for pair in arguments.items() for part in pair)])
    found = one_error(capsys, code)
    assert found.startswith(message), found


def test_missing_arguments_and_commands_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--checkpoint requires an argument" in one_error(capsys, main(["generate"]))
    assert 'Unknown command "trian"' in one_error(capsys, main(["trian"]))


def test_missing_torch_says_how_to_install_it() -> None:
    for arguments in (
        ["train", "--data", "text.txt"],
        ["generate", "--checkpoint", "absent", "--prompt", "F"],
    ):
        process = command(*arguments, "--backend", "torch")
        out, err = process.communicate()
        assert (process.returncode, out) == (2, b"")
        lines = err.decode().splitlines()
        assert len(lines) == 1 and lines[0].startswith("gpt-parity: error: backend 'torch' needs ")
        assert 'python -m pip install -c constraints.txt -e ".[torch]" (in a checkout)' in lines[0]
    assert not Path("runs").exists()
