"""``python -m kvd`` and the ``kvd`` script."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the return value is the process's exit status."""
    from kvd.cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
