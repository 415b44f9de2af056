"""What `gpt-parity oracle export` writes."""

from __future__ import annotations

from pathlib import Path

from gpt_parity.oracle.bundle import Bundle
from gpt_parity.oracle.bundle_files import require_free, save_bundle
from gpt_parity.oracle.llmc import require_free_pair, write_pair
from gpt_parity.oracle.subject import export
from gpt_parity.oracle_config import ExportConfig


def write_reference(config: ExportConfig) -> str:
    """Write a bundle, or the pair of llm.c, and return what there is to say of it.

    Raises OSError, before anything is computed, where it may not be written, and ValueError for
    files that do not fit together.
    """
    if config.format == "llm.c":
        require_free_pair(config.out, config.prefix, config.overwrite)
        bundle = export(config)
        files = write_pair(config.out, bundle, config.prefix)
        return _said(config, bundle, " and ".join(map(str, files)))
    require_free(config.out, config.overwrite)
    bundle = export(config)
    save_bundle(config.out, bundle)
    return _said(config, bundle, config.out)


def _said(config: ExportConfig, bundle: Bundle, path: Path | str) -> str:
    if config.weights is None or config.tokens is not None:
        return bundle.summary(path)
    return f"{bundle.summary(path)}\ntokens and targets: drawn with seed {config.seed}"
