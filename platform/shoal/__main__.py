"""The program `shoal`, also as `python -m shoal`: names the missing extra in one line if a verb cannot load."""

from __future__ import annotations

import sys

from shoal.errors import MissingExtra, needs_extra


def main() -> None:
    """Run the command line."""
    try:
        with needs_extra("cluster"):
            from shoal.cli import main as run

            run()
    except MissingExtra as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
