"""What a run notices of the gateway of a policy: that it has moved, and that no actor has come back to it."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_setting import EXPERIENCE
from shoal.errors import RunError
from shoal.flows import loop_policy
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.loop_policy import LoopPolicy
from shoal.store import open_store
from shoal.weights import WeightSnapshot

SPEC = ActorLearnerSpec(env="CartPole-v1").override(["gateway.host=0.0.0.0", "gateway.curve=true"])


def begin(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[LoopPolicy, dict[str, Any]]:
    """A policy, and its gateway's counts, which tests change."""
    monkeypatch.setenv("SHOAL_STORE", str(folder))
    gateway = {"pid": 1, "address": "tcp://a:5555", "steps": 10, "actors": [{"steps": 10, "invalid": {}}]}
    gateway |= {"mean_return": math.nan, "episodes_in_window": 0, "settings": {}}
    policy = LoopPolicy("", SPEC, EXPERIENCE, np.zeros(4, np.float32))
    policy._folder_name = "run-1"
    policy._workers = SimpleNamespace(stats=lambda: ({**gateway}, {"pid": 2}), take_events=list)  # type: ignore[assignment]
    assert policy.poll() == []
    return policy, gateway


def test_an_address_is_stored_again_when_the_gateway_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, gateway = begin(monkeypatch, tmp_path)
    assert policy.store_address() == f"tcp://a:5555|{tmp_path}/runs/run-1/gateway.address"
    gateway.update(pid=3, address="tcp://b:5555", websocket_address="wss://b:8765")
    happened = dict(policy.poll())
    assert open_store(tmp_path).read("runs/run-1/websocket.address") == b"wss://b:8765"
    assert happened["gateway_moved"] == {"before": "tcp://a:5555", "address": "tcp://b:5555"}
    assert open_store(tmp_path).read("runs/run-1/gateway.address") == b"tcp://b:5555"
    assert policy.poll() == []


def test_a_run_fails_if_no_actor_comes_back_to_its_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_policy, "ACTORS_BACK_S", 0.0)
    policy, gateway = begin(monkeypatch, tmp_path)
    gateway.update(pid=3, actors=[])
    assert [kind for kind, _ in policy.poll()] == ["gateway_restarted", "actors_missing"]
    assert policy.poll() == []
    with pytest.raises(RunError, match=r"no actor has come back: connect the actors to tcp://a:5555.*resume=run-1"):
        policy.require_actors("run-1")
    gateway.update(actors=[{"steps": 1, "invalid": {}}])
    assert policy.poll() == []
    policy.require_actors("run-1")


def test_a_policy_is_registered_with_the_code_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("sizes.py").write_text("WIDTH = 8\n")
    Path("my_net.py").write_text("from sizes import WIDTH\n")
    workers = SimpleNamespace(make_weight_source=lambda follows_hold: None)
    monkeypatch.setattr(loop_policy, "ActorLearnerWorkers", lambda *_: workers)
    policy = LoopPolicy("", SPEC.override(["model=my_net.py:Net"]), EXPERIENCE, np.zeros(4, np.float32))
    served = policy.start("run-1", tmp_path, "token", (b"public", b"secret")).source
    Path("sizes.py").write_text("WIDTH = 9\n")
    policy.gateway = {"mean_return": 1.0, "steps": 2}
    recorder: Any = SimpleNamespace(id="run-1", record_model=lambda *_: None)
    registered = policy.register(WeightSnapshot.of(1, {}), recorder, "best").manifest.model
    for model in (registered, served.factory):  # type: ignore[union-attr]
        assert model.code is not None
        assert model.code.files["sizes.py"] == "WIDTH = 8\n"
