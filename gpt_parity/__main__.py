"""`python -m gpt_parity`, and the command itself: Ctrl-C is no traceback while it still loads."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, see `gpt_parity.cli.main`."""
    try:
        from gpt_parity.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
