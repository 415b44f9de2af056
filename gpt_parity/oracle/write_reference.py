"""What `gpt-parity oracle export` writes."""

from __future__ import annotations

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
        return bundle.summary(" and ".join(map(str, files)))
    require_free(config.out, config.overwrite)
    bundle = export(config)
    save_bundle(config.out, bundle)
    return bundle.summary(config.out)
