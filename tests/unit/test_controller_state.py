"""The state of an endpoint on disk goes when the endpoint does, whatever is still reported to its controller."""

from __future__ import annotations

from pathlib import Path

from shoal.serve.controller_state import ControllerState, StateFile


def test_what_was_removed_is_not_kept_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "endpoint.json")
    file.save(ControllerState(deployment="a", generation=3))
    found = file.load("a")
    assert found is not None
    assert found.generation == 3
    file.remove()
    file.save(ControllerState(deployment="a", generation=4))  # the last report of a replica that is on its way out
    file.remove()
    assert [*tmp_path.iterdir()] == []
    assert StateFile(tmp_path / "endpoint.json").load("a") is None
