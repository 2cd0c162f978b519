"""The whole loop in one process, with external actors as threads: it learns, and the books balance to the end."""

import os
import socket as network
import threading
from pathlib import Path

import msgspec
import pytest

from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import TOKEN
from shoal.actor import ActorClient, play
from shoal.errors import Closed, ConfigError, RunError
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, policy_spec
from sign_game import SignGame
from waiting import start_thread, wait_for

SPEC = RLSpec(hidden=(16,)).override(
    [
        "learner.batch_steps=64",
        "learner.max_batch_steps=64",
        "learner.take_timeout_s=0.1",
        "algorithm.learning_rate=0.02",
        "algorithm.entropy_cost=0.001",
    ]
)
EXPERIENCE = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec(SPEC.hidden))


def actor(loop: LocalLoop, index: int) -> threading.Thread:
    def run() -> None:
        with ActorClient(loop.address, TOKEN, f"actor-{index}", timeout_s=60) as client:
            play(SignGame(), client, seed=index)

    thread = start_thread(run)
    return thread


def test_the_books_balance_while_the_run_goes_on_and_after_it(tmp_path: Path) -> None:
    with LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN) as loop:
        thread = actor(loop, 0)
        for _ in range(20):
            assert loop.gateway.stats()["segments"]["balanced"]
        wait_for(lambda: loop.learner.stats()["updates"] > 3)
        loop.close()
        totals = loop.ledger.get_totals()
        assert totals.is_balanced
        assert totals.queued == 0
        assert totals.consumed == loop.learner.counts["consumed"]
    thread.join(60)


def test_a_loop_that_is_not_solved_in_time_says_how_far_it_came(tmp_path: Path) -> None:
    with (
        LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN, target_return=7.0) as loop,
        pytest.raises(RunError, match="mean return"),
    ):
        loop.wait_until_solved(timeout_s=0.2)


def test_a_loop_that_cannot_start_leaves_nothing_open(tmp_path: Path) -> None:
    with network.create_server(("127.0.0.1", 0)) as server:
        loop = LocalLoop(SPEC.override([f"gateway.port={server.getsockname()[1]}"]), EXPERIENCE, tmp_path, TOKEN)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="another port"), loop:
            pass
        assert len(os.listdir("/proc/self/fd")) < before  # the ledger's file is closed, and the gateway's sockets
        with pytest.raises(Closed):
            loop.store.publish(loop.learner.snapshot())
