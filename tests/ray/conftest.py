"""Ray's own warnings, which are not ours to mend: `filterwarnings = error` stays for everything else."""

from __future__ import annotations

import pytest

RAYS_OWN = (
    "ignore:Tip. In future versions of Ray, Ray will no longer override accelerator:FutureWarning",
    # Ray leaves its pipes and sockets to the garbage collector at shutdown.
    "ignore:unclosed.*:ResourceWarning:ray",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the filters to the tests of this folder."""
    for item in items:
        if "ray" in item.path.parts:
            for rule in RAYS_OWN:
                item.add_marker(pytest.mark.filterwarnings(rule))
