"""The state of an endpoint on disk: what a full disk does to it, and that it goes when the endpoint does."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.rollout import Phase
from shoal.serve.controller.state import ControllerState, StateFile
from shoal.serve.messages.desired_state import NEWEST, TrafficShares
from shoal.serve.messages.replica_report import RejectedVersion
from shoal.weights import WeightSnapshot


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


def test_what_a_full_disk_refuses_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    weights = WeightSnapshot.of(7, {"w": np.zeros(1, np.float32)})
    file = StateFile(tmp_path / "endpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for generation in (3, 4):
            file.save(ControllerState(deployment="a", generation=generation))
        file.store_weights("m", weights)
        file.retry_writes()
        assert file.load_weights("m", 7) == weights
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [
        str(tmp_path / "endpoint.json"),
        str(tmp_path / "endpoint.weights" / "m"),
    ]
    assert StateFile(tmp_path / "endpoint.json").load("a") is None
    file.retry_writes()
    written = StateFile(tmp_path / "endpoint.json")
    found = written.load("a")
    assert found is not None
    assert found.generation == 4
    assert written.load_weights("m", 7) == weights


def test_what_a_full_disk_refused_is_forgotten_with_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = StateFile(tmp_path / "endpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        file.save(ControllerState(deployment="a"))
        file.remove()
    file.retry_writes()
    assert [*tmp_path.iterdir()] == []


# As it was written when a model that follows a run had a state of its own, `live`, beside a rollout that was not used.
UNUSED = (
    '"rollout": {"phase": "vacant", "stable": 0, "candidate": 0, "goal": "flip", "percent": 0.0, "shadow_percent": 0.0,'
    ' "previous": 0, "attempt": 0, "generation": 0, "since_s": 0.0, "kind": "", "by": "", "why": "", "refused": 0,'
    ' "reason": "", "lost_replicas": 0}, "metrics": {}, "meant": 0, "refused": 0, "is_added": false, "before": null'
)
BEFORE = f"""{{"deployment": "d", "generation": 7, "started_at": 1.0, "models": {{
 "shared": {{"deployment": {{"name": "shared", "registry": "", "version": "", "options": {{}}}}, {UNUSED},
   "live": {{"era": 2, "pinned": 5, "left": [3, 6], "kept": 5,
             "last": {{"version": 6, "reason": "bad", "instead": 5, "has_answered": true}},
             "unrecorded": 2, "recorded_at": 9.0, "newest": {{"percent": 10.0, "shadow_percent": 0.0}},
             "lost_replicas": 1}}}},
 "pinned": {{"deployment": {{"name": "pinned", "registry": "", "version": "", "options": {{}}}}, {UNUSED},
   "live": {{"era": 1, "pinned": 4, "left": [], "kept": 4, "last": null, "unrecorded": 0, "recorded_at": 0.0,
             "newest": null, "lost_replicas": 0}}}},
 "following": {{"deployment": {{"name": "following", "registry": "", "version": "", "options": {{}}}}, {UNUSED},
   "live": {{"era": 0, "pinned": 0, "left": [8], "kept": 7, "last": null, "unrecorded": 0, "recorded_at": 0.0,
             "newest": null, "lost_replicas": 0}}}},
 "registered": {{"deployment": {{"name": "registered", "registry": "/r", "version": "champion", "options": {{}}}},
   "rollout": {{"phase": "canary", "stable": 1, "candidate": 2, "goal": "canary", "percent": 5.0,
                "shadow_percent": 20.0, "previous": 0, "attempt": 3, "generation": 6, "since_s": 2.0,
                "kind": "canary", "by": "me", "why": "why", "refused": 0, "reason": "", "lost_replicas": 0}},
   "metrics": {{}}, "meant": 1, "refused": 4, "is_added": false, "before": null,
   "live": {{"era": 0, "pinned": 0, "left": [], "kept": 0, "last": null, "unrecorded": 0, "recorded_at": 0.0,
             "newest": null, "lost_replicas": 0}}}}
 }}, "replicas": [], "events": [], "num_events": 0, "num_attempts": 0}}"""


def test_a_file_of_before_live_models_had_rollouts_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    path.write_text(BEFORE)
    for _ in range(2):  # as it was, and as it is written now
        state = StateFile(path).load("d")
        assert state is not None
        StateFile(path).save(state)
        shared, pinned, following, registered = state.models.values()
        rollout = shared.rollout
        assert (rollout.phase, rollout.stable, rollout.candidate) == (Phase.CANARY, 5, NEWEST)
        assert (rollout.shares, rollout.attempt, rollout.lost_replicas) == (TrafficShares(10.0), 2, 1)
        assert (shared.rejected, shared.retained, shared.unrecorded, shared.recorded_at) == ([3, 6], 5, 2, 9.0)
        assert shared.last_rejected == RejectedVersion(6, "bad", instead=5, has_answered=True)
        assert (pinned.rollout.phase, pinned.rollout.stable, pinned.rollout.attempt) == (Phase.STEADY, 4, 1)
        assert (following.rollout.phase, following.rollout.stable) == (Phase.STEADY, NEWEST)
        assert (following.rejected, following.retained, following.rollout.attempt) == ([8], 7, 0)
        rollout = registered.rollout
        assert (rollout.phase, rollout.stable, rollout.candidate) == (Phase.CANARY, 1, 2)
        assert (rollout.shares, registered.rejected, registered.meant) == (TrafficShares(5.0, 20.0), [4], 1)


def test_a_controller_goes_on_from_a_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    path.write_text(BEFORE)
    controller = EndpointController("e", [], deployment_id="d", state_file=StateFile(path))
    plans = {plan.name: plan for plan in controller.plan.models}
    assert (plans["shared"].pinned, plans["shared"].candidate, plans["shared"].rejected) == (5, NEWEST, (3, 6))
    assert (plans["pinned"].pinned, plans["following"].pinned, plans["following"].retained) == (4, 0, 7)
    assert (plans["registered"].candidate, plans["registered"].shares) == (2, TrafficShares(5.0, 20.0))


@pytest.mark.parametrize(
    "content", ["", "[]", "7", "{}", '{"models": []}', '{"models": {"m": {"live": {}}}}', "\udce9"]
)
def test_what_is_no_state_is_refused_and_the_endpoint_starts_from_what_it_was_deployed_with(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoint.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert StateFile(path).load("d") is None
    [record] = caplog.records
    assert record.getMessage().startswith(f"{path} cannot be read, the endpoint starts from its deployment")
