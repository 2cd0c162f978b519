"""Checkpoints: whole or not at all, and the last good one when the newest is damaged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import checkpoint
from shoal.errors import CheckpointError, ConfigError


def state(number: float) -> dict[str, object]:
    return {"model": {"w": torch.full((3,), number)}, "version": int(number), "nested": {"a": [1, 2.5, "x"]}}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "none") is None
    checkpoint.save(tmp_path, 3, state(3))
    checkpoint.save(tmp_path, 12, state(12))
    loaded = checkpoint.load_latest(tmp_path)
    assert (loaded.step, loaded.state["version"], loaded.damaged) == (12, 12, [])
    assert torch.equal(loaded.state["model"]["w"], torch.full((3,), 12.0))
    assert loaded.state["nested"] == {"a": [1, 2.5, "x"]}


@pytest.mark.parametrize("value", [np.float64(0.5), np.zeros(2), Path("x")])
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path, value: object) -> None:
    checkpoint.save(tmp_path, 1, state(1))
    with pytest.raises(ConfigError, match=r"state = '[\w.]+': would have to be run to be read again\. give tensors"):
        checkpoint.save(tmp_path, 2, {"best": value})
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded.step == 1


def test_only_the_newest_are_kept_and_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000002", "step-000000003"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no manifest", "no state"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    checkpoint.save(tmp_path, 1, state(1))
    newest = checkpoint.save(tmp_path, 2, state(2))
    payload = bytearray((newest / "state.pt").read_bytes())
    if damage == "truncated":
        (newest / "state.pt").write_bytes(payload[:-10])
    elif damage == "flipped":
        payload[len(payload) // 2] ^= 1
        (newest / "state.pt").write_bytes(payload)
    else:
        (newest / ("manifest.json" if damage == "no manifest" else "state.pt")).unlink()
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded.step == 1
    assert len(loaded.damaged) == 1
    assert loaded.damaged[0].startswith("step-000000002: ")


@pytest.mark.parametrize("changed", [{"step": 9}, {"step": "2"}, {"step": 2.0}, {}, None, []])
def test_a_manifest_that_does_not_name_its_folders_step_is_damage(tmp_path: Path, changed: object) -> None:
    checkpoint.save(tmp_path, 1, state(1))
    newest = checkpoint.save(tmp_path, 2, state(2)) / "manifest.json"
    manifest = json.loads(newest.read_text())
    del manifest["step"]
    newest.write_text(json.dumps({**manifest, **changed} if isinstance(changed, dict) else changed))
    loaded = checkpoint.load_latest(tmp_path)
    assert (loaded.step, loaded.state["version"]) == (1, 1)
    assert loaded.damaged == ["step-000000002: manifest.json does not name this step"]


def test_nothing_but_damage_is_an_error(tmp_path: Path) -> None:
    (checkpoint.save(tmp_path, 1, state(1)) / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="step-000000001"):
        checkpoint.load_latest(tmp_path)


def test_a_disk_that_does_not_take_it_is_said_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Path) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("shoal.checkpoint.files.publish", refuse)
    with pytest.raises(CheckpointError, match="step 1"):
        checkpoint.save(tmp_path, 1, state(1))
    assert list(tmp_path.iterdir()) == []


def test_after_going_back_past_a_damaged_checkpoint_the_good_ones_are_kept(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 90, state(90))
    (checkpoint.save(tmp_path, 100, state(100)) / "state.pt").write_bytes(b"")
    dead = tmp_path / ".draft-000000101-1"
    dead.mkdir()
    checkpoint.save(tmp_path, 95, state(95), keep=1)
    loaded = checkpoint.load_latest(tmp_path)
    assert (loaded.step, loaded.damaged) == (95, [])
    assert not dead.exists()
