"""A run on a cluster that takes its spaces from the first game that joins."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

import shoal.runs
from rl_setting import TOKEN
from shoal.errors import ClusterError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.wire import MessageLimits, decode, encode
from shoal.wire.messages import Bye, Hello

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

OFFERS = {"name": "catch", "observation": [4], "action": 3}


def test_the_first_game_brings_the_spaces_which_the_record_keeps(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoal.flows import actor_learner
    from shoal.flows.rl_policy import keep_spaces
    from shoal.rl.ray_first_game import wait_for_first_game

    monkeypatch.setattr(actor_learner, "load_access_token", lambda: TOKEN)
    answers: list[Any] = []

    def join(addresses: Sequence[str]) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as game:
            game.connect(addresses[0])
            game.send(encode(Hello(1, TOKEN, "catch-1", 1, offers=OFFERS)))
            answers.append(decode(game.recv_multipart(), MessageLimits()))

    def wait_and_join(*arguments: Any) -> str:
        *others, note, say = arguments

        def note_and_join(kind: str, **details: Any) -> None:
            note(kind, **details)
            if kind == "spaces_asked":
                threading.Thread(target=join, args=(details["addresses"],), daemon=True).start()

        return wait_for_first_game(*others, note_and_join, say)

    monkeypatch.setattr(actor_learner, "wait_for_first_game", wait_and_join)
    spec = ActorLearnerSpec(env="ask")
    with shoal.runs.create("actor_learner", spec.to_record(), "asks") as recorder:
        taken = actor_learner.take_spaces(spec, recorder)
        with socket.create_server(("127.0.0.1", 0)) as other:
            busy = spec.update({"gateway": {"port": other.getsockname()[1]}})
            with pytest.raises(ClusterError, match=r"wait for its first game: gateway.port = \d+: cannot be bound"):
                wait_for_first_game(busy, tmp_path, TOKEN, None, lambda *_, **__: None, pytest.fail)
    assert (taken.given, taken.model_name) == (OFFERS, "catch")
    assert isinstance(answers[0], Bye)
    run = shoal.runs.load("asks")
    assert run.last_events()["spaces_taken"] == {"actor_id": "catch-1", "spaces": json.dumps(OFFERS)}
    assert keep_spaces(ActorLearnerSpec(env="ask", resume="asks")).given == OFFERS
    assert "waiting for a game that brings its spaces" in capsys.readouterr().out
