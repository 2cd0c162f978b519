"""The controller's part in live models: whom it believes, what it writes down, which weights it keeps."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import InferenceError
from shoal.serve.controller import live_control
from shoal.serve.controller.admin_api import AdminApi
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.state import Deployment, StateFile
from shoal.serve.messages.desired_state import NEWEST, ModelPlan
from shoal.serve.messages.replica_report import MAX_REJECTED, ModelReport, RejectedVersion, ReplicaReport
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

OPTIONS = ModelOptions().model_dump(mode="json")


class Endpoint:
    """A controller of one live model, `m`, whose replicas are made up."""

    def __init__(self, folder: Path, deployment: str = "1", **guard: Any) -> None:
        self.file = StateFile(folder / "e.json")
        options = ModelOptions.parse({"guard": guard}).model_dump(mode="json")
        self.controller = EndpointController(
            "e", [Deployment("m", "", "", options)], deployment_id=deployment, state_file=self.file
        )
        self.live = self.controller.live

    @property
    def plan(self) -> ModelPlan:
        return self.controller.plan.models[0]

    def hear(
        self, replica: str, version: int, held: tuple[int, ...], *rejected: RejectedVersion, candidate: int = 0
    ) -> None:
        model = ModelReport(version, candidate, held, rejected)
        self.controller.report(ReplicaReport(replica, models={"m": model}))

    def entries(self) -> list[tuple[str, int | None, int | None, str]]:
        return [(each.kind, each.version, each.previous, each.reason) for each in self.controller.state.events]


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(tmp_path)


def weights(version: int) -> WeightSnapshot:
    return WeightSnapshot.of(version, {"bias": np.full(2, version, np.float32)})


def rejected(version: int, attempt: int = 0, instead: int = 1, has_answered: bool = True) -> RejectedVersion:
    return RejectedVersion(version, f"bad {version}", attempt, instead, has_answered)


def plan(stable: int = NEWEST, **fields: Any) -> ModelPlan:
    return ModelPlan("m", "", OPTIONS, stable, **fields)


def test_what_one_replica_left_is_left_by_all_and_written_down_once(endpoint: Endpoint) -> None:
    endpoint.hear("a", 1, (1,), rejected(2))
    endpoint.hear("b", 2, (1, 2))
    endpoint.hear("b", 1, (1,), rejected(2))
    assert endpoint.plan == plan(rejected=(2,), retained=1)
    assert endpoint.entries() == [("rollback", 1, 2, "bad 2")]
    assert endpoint.live.available("m") == [1]


def test_what_one_who_asks_still_needs_frozen_another_does_not_thaw(endpoint: Endpoint) -> None:
    """Two administrators at once, of whom one is refused: what the other has been told is held must be held still."""
    with endpoint.live.freeze("m"):
        with endpoint.live.freeze("m"):
            assert endpoint.plan.is_frozen
        assert endpoint.plan.is_frozen
    assert not endpoint.plan.is_frozen


def test_a_version_that_was_never_taken_is_abandoned(endpoint: Endpoint) -> None:
    endpoint.hear("a", 1, (1,), rejected(2, has_answered=False))
    assert endpoint.entries() == [("abandon", 2, 1, "bad 2")]
    assert endpoint.plan.rejected == (2,)


def test_old_reports_of_what_was_left_are_not_believed_after_it_was_promoted(endpoint: Endpoint) -> None:
    endpoint.hear("a", 1, (1,), rejected(2))
    endpoint.live.follow("m", "me", "again")
    endpoint.hear("a", 1, (1,), rejected(2))  # it has not heard of it yet
    assert endpoint.plan == plan(attempt=1, retained=1)
    endpoint.hear("a", 1, (1,), rejected(2, attempt=1))  # it has tried it again
    assert endpoint.plan.rejected == (2,)
    assert [entry[0] for entry in endpoint.entries()] == ["rollback", "follow"]


def test_entries_are_few_and_say_how_many_they_stand_for_also_after_a_restart(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.hear("a", 1, (1,), rejected(2))
    endpoint.hear("a", 1, (1,), rejected(2), rejected(3), rejected(4), rejected(5))
    endpoint.controller.tick()
    assert endpoint.entries() == [("rollback", 1, 2, "bad 2")]
    again = Endpoint(tmp_path)
    assert again.plan.rejected == (2, 3, 4, 5)
    monkeypatch.setattr(live_control, "RECORD_S", 0.0)
    for _ in range(3):
        again.controller.tick()
    assert again.entries()[1:] == [("rollback", 1, 5, "bad 5 (and 2 versions before it, since the last entry)")]


def test_weights_of_a_datatype_that_numpy_has_not_survive_the_controller_too(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    half = WeightSnapshot.from_payload(1, len(header).to_bytes(8, "little") + header + bytes(4))
    StateFile(tmp_path / "e.json").store_weights("m", half)
    assert StateFile(tmp_path / "e.json").load_weights("m", 1) == half


def test_weights_are_kept_when_they_are_wanted_and_survive_the_controller_but_not_the_endpoint(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.hear("a", 3, (1, 3))
    endpoint.live.store_weights("m", weights(1))  # nobody has asked for them
    assert endpoint.live.fetch_weights("m", 1) is None
    endpoint.live.pin("m", 1, "me", "")
    assert not endpoint.plan.is_retained
    endpoint.live.store_weights("m", weights(3))
    endpoint.live.store_weights("x", weights(1))
    assert not endpoint.plan.is_retained
    endpoint.live.store_weights("m", weights(1))
    endpoint.live.store_weights("m", weights(1))
    assert endpoint.plan == plan(1, retained=1, is_retained=True)
    again = Endpoint(tmp_path)
    assert again.plan == endpoint.plan
    assert again.live.fetch_weights("m", 1) == endpoint.live.fetch_weights("m", 1)
    assert again.live.fetch_weights("m", 3) is None
    other = Endpoint(tmp_path, deployment="2")
    assert (other.plan, other.live.fetch_weights("m", 1)) == (plan(), None)
    other.hear("a", 3, (1, 3))
    other.live.pin("m", 3, "me", "")
    other.controller.close(forget=True)
    other.live.store_weights("m", weights(3))  # a last word
    assert list(tmp_path.iterdir()) == []


def test_weights_that_were_damaged_on_disk_are_asked_for_again(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.live.pin("m", 1, "me", "")
    endpoint.live.store_weights("m", weights(1))
    [file] = (tmp_path / "e.weights").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = Endpoint(tmp_path)
    assert (again.plan.pinned, again.plan.is_retained) == (1, False)
    again.live.store_weights("m", weights(1))
    assert again.plan.is_retained


def test_what_is_pinned_stays_kept_whatever_is_left(endpoint: Endpoint) -> None:
    endpoint.hear("a", 3, (1, 3))
    endpoint.live.pin("m", 3, "me", "")
    endpoint.hear("a", 3, (3,), rejected(4, instead=2, has_answered=False))
    assert (endpoint.plan.pinned, endpoint.plan.retained, endpoint.plan.rejected) == (3, 3, (4,))


def test_a_version_that_does_not_answer_is_left_without_a_word_about_those_that_do(endpoint: Endpoint) -> None:
    endpoint.hear("a", 10, (5, 8, 9, 10))
    endpoint.live.reject("m", 8, "its return is low")
    assert endpoint.entries() == [("abandon", 8, 10, "its return is low")]
    assert (endpoint.plan.rejected, endpoint.plan.retained, endpoint.live.available("m")) == ((8,), 10, [5, 9, 10])


def test_a_model_that_is_deleted_leaves_no_weights(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.hear("a", 3, (1, 3))
    endpoint.live.pin("m", 1, "me", "")
    endpoint.live.store_weights("m", weights(1))
    assert (tmp_path / "e.weights" / "m").exists()
    endpoint.controller.remove_model("m", "me", "")
    assert not (tmp_path / "e.weights" / "m").exists()
    assert endpoint.live.fetch_weights("m", 1) is None


def test_the_weights_that_are_kept_can_be_gone_back_to(endpoint: Endpoint) -> None:
    endpoint.hear("a", 1, (1,), rejected(2))
    endpoint.live.store_weights("m", weights(1))
    endpoint.hear("a", 4, (3, 4), rejected(2))
    assert endpoint.live.available("m") == [1, 3, 4]
    assert (endpoint.live.before("m", 4), endpoint.live.before("m", 3), endpoint.live.before("m", 1)) == (3, 1, 0)


def test_only_the_newest_of_what_was_left_is_listed(endpoint: Endpoint) -> None:
    for version in range(2, 40):
        endpoint.hear("a", 1, (1,), rejected(version))
    assert endpoint.plan.rejected == tuple(range(40 - MAX_REJECTED, 40))
    state = endpoint.controller.state.models["m"]
    num_unrecorded = state.unrecorded
    endpoint.hear("b", 1, (1,), rejected(2), rejected(3))  # it remembers for longer
    assert (state.unrecorded, state.last_rejected) == (num_unrecorded, rejected(39))


def administer(endpoint: Endpoint, **change: Any) -> None:
    asked = {"model": "m", "timeout_s": 0.01, **change}
    asyncio.run(AdminApi(endpoint.controller, "", lambda name: ModelOptions()).administer(asked, "me"))


def measure(endpoint: Endpoint, value: float, metric: str = "return") -> None:
    administer(endpoint, action="metric", metric=metric, value=value)


def test_a_version_goes_by_what_a_user_measures(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path, metric="return", min_value=100.0)
    endpoint.hear("a", 2, (1, 2))
    measure(endpoint, 120.0)
    with pytest.raises(InferenceError, match="uses 'return', not 'other'"):
        measure(endpoint, 1.0, "other")
    assert endpoint.plan.rejected == ()
    measure(endpoint, 80.0)
    assert endpoint.plan.rejected == (2,)
    assert endpoint.entries() == [("rollback", 1, 2, "return = 80 is below min_value = 100")]
    endpoint.hear("a", 1, (1,))
    with pytest.raises(InferenceError, match="no version of 'm' before 1 is available"):
        measure(endpoint, 80.0)


def test_the_newest_that_has_a_share_is_measured_and_not_what_is_pinned(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path, metric="return", min_value=100.0)
    endpoint.hear("a", 1, (1,))
    endpoint.live.pin("m", 1, "me", "")
    measure(endpoint, 80.0)
    assert endpoint.plan.rejected == ()
    administer(endpoint, action="canary", percent=50.0)
    endpoint.hear("a", 1, (1, 2), candidate=2)
    measure(endpoint, 80.0)
    assert (endpoint.plan.rejected, endpoint.plan.pinned) == ((2,), 1)
