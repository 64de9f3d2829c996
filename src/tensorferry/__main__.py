"""``python -m tensorferry`` and the command ``tensorferry``: the command line, also when it is interrupted early."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process, and exit with its status."""
    try:
        from tensorferry.cli.main import main as run  # here, so that Ctrl-C ends in words while it is imported
    except KeyboardInterrupt:
        sys.stderr.write("tensorferry: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
