"""`python -m gpt_parity`, and the command itself: Ctrl-C is no traceback while it still loads."""

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, see `gpt_parity.cli.main`.

    One of the processes that torchrun started is ended with that code instead.
    """
    try:
        from gpt_parity.cli import main as run
    except KeyboardInterrupt:
        return 130
    code = run(argv)
    if "RANK" in os.environ:
        from gpt_parity.distributed import leave

        leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
