"""Download tinyshakespeare.txt into data/ (or another folder), verified by its SHA-256."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing is installed

from cyclopts import App

from gpt_parity.cli import run_app
from gpt_parity.corpus import fetch_tinyshakespeare

DATA = Path(__file__).resolve().parents[1] / "data"


def main(folder: Path = DATA, /) -> int:
    """Download tinyshakespeare.txt, verified by its SHA-256; one that is there already stays.

    Example: python scripts/fetch_data.py

    Parameters
    ----------
    folder
        Where to.
    """
    print(fetch_tinyshakespeare(folder))
    return 0


app = App(help_format="plaintext", version_flags=[])
app.default(main)

if __name__ == "__main__":
    sys.exit(run_app(app))
