"""The flow of a loop's run without a cluster: its policies' workers say what a test says."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_setting import EXPERIENCE
from shoal.flows import actor_learner
from shoal.flows.actor_learner import LoopRun
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.weights import WeightSnapshot

SNAPSHOT = WeightSnapshot.of(7, {"w": np.zeros(1, np.float32)})


def make_flow(spec: ActorLearnerSpec, recorder: object) -> Any:
    checked = dict.fromkeys(spec.split_by_policy(), (EXPERIENCE, np.zeros(4, np.float32)))
    return LoopRun(spec, recorder, checked)  # type: ignore[arg-type]


def make_stats(**changes: Any) -> dict[str, Any]:
    """Of a gateway whose actor sends what is dropped."""
    return {
        "mean_return": float("nan"), "steps": 0, "episodes": 0, "episodes_in_window": 0, "settings": {},
        "weights_version": 1, "queue_depth": 0, "pid": 7,
        "counted_at": 1.0, "first_segment_at": None, "solved_s": None, "address": "tcp://h:1",
        "actors": [{"actor_id": "a", "connected": True, "lag": 0, "steps": 0, "invalid": {"non_finite": 7682}}],
        "segments": {"received": 7682, "consumed": 0, "queued": 0, "dropped": {"non_finite": 7682}},
        **changes,
    }  # fmt: skip


def attach_workers(flow: Any, stats: Mapping[str, dict[str, Any]]) -> None:
    """Workers with these counts of gateways, by policy, and an endpoint."""
    for each in flow.policies:
        found = stats[each.name]
        each._workers = SimpleNamespace(
            stats=lambda found=found: (found, {}), take_events=list, take_published=list, pause_learner=lambda: SNAPSHOT
        )
    flow._endpoint = SimpleNamespace(stats=lambda: [{"requests": 5}])
    flow._addresses = {"gateway": ("gateway", ",".join(each["address"] for each in stats.values()))}


def sent_nothing_valid(monkeypatch: pytest.MonkeyPatch, record: Callable[..., None]) -> Any:
    """The flow of a run whose actors send what is dropped; `record` stands for each word to the record."""
    monkeypatch.setattr(actor_learner, "record_changes", lambda *_: None)
    recorder = SimpleNamespace(id="one", log=record, log_group=record, record_event=record, record_endpoint=record)
    flow = make_flow(ActorLearnerSpec(max_wall_s=1e-9), recorder)
    attach_workers(flow, {"": make_stats()})
    return flow


def attach_republishing(flow: LoopRun, source: object = None) -> list[int]:
    """Workers that publish earlier weights again; returns the versions that they were given."""
    published: list[int] = []

    def republish(snapshot: WeightSnapshot) -> WeightSnapshot:
        published.append(snapshot.version)
        return snapshot

    workers = SimpleNamespace(republish=republish, make_weight_source=lambda: source)
    flow.policies[0]._workers = workers  # type: ignore[assignment]
    return published
