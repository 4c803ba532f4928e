"""``python -m kvd`` and the ``kvd`` script."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the return value is the process's exit status."""
    try:
        from kvd.cli.interrupts import end_at_once

        end_at_once()
        from kvd.cli.app import main as run

        code = run()
        end_at_once()
    except KeyboardInterrupt:  # before and after the command line's own handling
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
