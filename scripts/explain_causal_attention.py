"""Walk through causal attention step by step: the command `gpt-parity explain`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing is installed

from gpt_parity.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["explain", *sys.argv[1:]]))
