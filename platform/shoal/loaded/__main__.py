"""Open a registered version in this process, as a replica does, and let it answer an example.

    python -m shoal.loaded NAME@VERSION [REGISTRY]

Exits with 1, and the reason in the last line, for a version that an endpoint would refuse.
"""

from __future__ import annotations

import sys

from shoal.errors import ShoalError
from shoal.loaded.model import LocalModel
from shoal.registry import Registry


def main(ref: str, registry: str | None = None) -> int:
    """Returns the exit status. registry: its folder or URL; None: that of this process"""
    try:
        LocalModel(Registry(registry).get(ref)).open(warm_up=True)
    except ShoalError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
