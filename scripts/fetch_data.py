"""Download tinyshakespeare.txt into data/ (or another folder), verified by its SHA-256."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpt_parity.corpus import fetch_tinyshakespeare


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    data = Path(__file__).resolve().parents[1] / "data"
    parser.add_argument("folder", nargs="?", type=Path, default=data, help="default: %(default)s")
    try:
        print(fetch_tinyshakespeare(parser.parse_args(arguments).folder))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
