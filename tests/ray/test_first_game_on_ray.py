"""A run on a cluster that takes its spaces from the first game that joins."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import zmq

import shoal.runs
from rl_setting import TOKEN
from shoal.errors import ClusterError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.wire import MessageLimits, decode, encode
from shoal.wire.messages import Bye, Hello
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

OFFERS = {"name": "catch", "observation": [4], "action": 3}


def test_the_first_game_brings_the_spaces_which_the_record_keeps(cluster: EmbeddedCluster) -> None:
    from shoal.flows.rl_policy import keep_spaces
    from shoal.rl.ray_workers import _release_ports, take_spaces

    answers: list[Any] = []
    said: list[str] = []

    def find_address() -> str:
        return next(word for word in said[0].split() if "://" in word)

    def join() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as game:
            game.connect(find_address())
            game.send(encode(Hello(1, TOKEN, "catch-1", 1, offers=OFFERS)))
            answers.append(decode(game.recv_multipart(), MessageLimits()))

    def say(text: str) -> None:
        said.append(text)
        if "waiting for a game" in text:
            threading.Thread(target=join, daemon=True).start()

    spec = ActorLearnerSpec(env="ask")
    with (
        shoal.runs.create("actor_learner", spec.to_record(), "asks") as recorder,
        shoal.runs.create("actor_learner", spec.to_record(), "other") as other,
        ExitStack() as staying,
    ):
        taken = take_spaces(spec, recorder, TOKEN, staying, say)
        wait_for(lambda: answers)
        join()  # until a gateway comes, games are told to connect again
        assert take_spaces(taken, recorder, TOKEN, staying, pytest.fail) is taken
        _release_ports("asks")
        host, _, port = find_address().removeprefix("tcp://").rpartition(":")
        busy, problem = (
            spec.update({"gateway": {"port": int(port)}}),
            r"first game: gateway.port = \d+: cannot be bound",
        )
        with socket.create_server((host, int(port))), pytest.raises(ClusterError, match=problem):
            take_spaces(busy, other, TOKEN, staying, pytest.fail)
    assert (taken.given, taken.model_name) == (OFFERS, "catch")
    assert [type(each) for each in answers] == [Bye, Bye]
    events = shoal.runs.load("asks").last_events()
    assert events["spaces_asked"]["addresses"][0] in said[0]
    assert events["spaces_taken"] == {"actor_id": "catch-1", "spaces": json.dumps(OFFERS)}
    assert said[1:] == [f"run asks: catch-1 brings the spaces {taken.env}"]
    assert keep_spaces(ActorLearnerSpec(env="ask", resume="asks")).given == OFFERS
