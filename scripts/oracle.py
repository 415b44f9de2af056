"""Export a reference, or judge results by one: the command `gpt-parity oracle`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing is installed

from gpt_parity.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["oracle", *sys.argv[1:]]))
