"""Rounds of peers in one process: what each worker receives, and that no worker waits for one that has died."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import zmq
from torch import nn
from torch.optim import SGD

from shoal.channel.rpc import RpcClient
from shoal.errors import WorkerDeparted
from shoal.libs.asynchronous.controller import ControllerSetting, make_controller
from shoal.libs.asynchronous.messages import LeaveRun
from shoal.libs.asynchronous.peers import PeerController, PeerSync
from shoal.parallel import World
from shoal.sync.config import SyncConfig
from shoal.sync.synchronizer import Connection, RankSignals, Replica, StateAccess, make_synchronizer

TIMEOUT_S = 30.0


class OwnConfig(SyncConfig):
    kind: str = "own"

    synchronizer: ClassVar[str] = f"{Path(__file__).name.removesuffix('.py')}:Mean"


class Mean(PeerSync):
    """The mean of all weights after every second step."""

    def after_step(self) -> None:
        if self.num_steps % 2 == 0 and (found := self.gather(self.weights)):
            self.load_weights([torch.stack(each).mean(0) for each in zip(*found.values(), strict=True)])


class Member:
    """A worker with one weight, in a thread of its own; its gradient in each step is `gradient`."""

    def __init__(self, folder: Path, worker: int, num_workers: int, weight: float) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._parameter, self.is_noticed = nn.Parameter(torch.tensor([weight])), False
        place = worker, num_workers, f"ipc://{folder}/controller", list[str](), TIMEOUT_S, None
        state = StateAccess(dict, lambda found: None, lambda: (1.0, 1.0))
        optimizer, connection = SGD([self._parameter], 1.0), Connection(*place, lambda: self.is_noticed)
        replica = Replica(OwnConfig(), Mock(), optimizer, World.single("cpu"), state, connection)
        sync = self.call(lambda: make_synchronizer(replica)).result(TIMEOUT_S)
        assert isinstance(sync, Mean)
        self.sync = sync

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._thread.submit(function, *arguments)

    def begin(self, step: int = 0) -> Any:
        return self.call(self.sync.begin, step)

    def step(self, gradient: float) -> Any:
        def take() -> tuple[int, float]:
            self.sync.before_step()
            self._parameter.grad = torch.tensor([gradient])
            return self.sync.apply_gradients(), self._parameter.item()

        return self.call(take)

    def close(self) -> None:
        self.call(self.sync.close).result(TIMEOUT_S)
        self._thread.shutdown()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[PeerController]:
    made = make_controller(OwnConfig(), ControllerSetting(f"ipc://{tmp_path}/controller", [], 2, None, TIMEOUT_S, None))
    assert isinstance(made, PeerController)
    made.start()
    yield made
    made.close()


@pytest.fixture
def pair(tmp_path: Path, controller: PeerController) -> Iterator[list[Member]]:
    """Both have begun with the weight of the chief, at step 7."""
    members = [Member(tmp_path, worker, 2, 10.0 * worker) for worker in range(2)]
    late = members[1].begin()  # waits for the chief's weights
    assert members[0].begin(7).result(TIMEOUT_S) == late.result(TIMEOUT_S) == 7
    yield members
    for each in members:
        each.close()


def leave(folder: Path, worker: int) -> None:
    """As the process that has started the run says of a worker that died."""
    client = RpcClient(f"ipc://{folder}/controller", TIMEOUT_S)
    client.call(LeaveRun(worker))
    client.close()


def test_workers_go_on_with_what_all_have_given(pair: list[Member], controller: PeerController) -> None:
    first, second = pair
    assert first.step(1.0).result(TIMEOUT_S) == (8, -1.0)
    waiting = first.step(1.0)
    assert second.step(2.0).result(TIMEOUT_S) == (8, -2.0)
    assert second.step(2.0).result(TIMEOUT_S) == waiting.result(TIMEOUT_S) == (9, -3.0)
    assert first.sync.round == second.sync.round == 1
    assert controller.describe() == {"peers": {"rounds": 1}}


def test_a_worker_that_dies_is_not_waited_for_and_its_replacement_begins_with_the_chief_s_weights(
    tmp_path: Path, pair: list[Member]
) -> None:
    first, second = pair
    first.step(1.0).result(TIMEOUT_S)
    waiting = first.step(1.0)
    leave(tmp_path, 1)
    assert waiting.result(TIMEOUT_S) == (9, -2.0), "the round of one"
    replacement = Member(tmp_path, 1, 2, 99.0)
    assert replacement.begin().result(TIMEOUT_S) == 9
    replacement.step(1.0).result(TIMEOUT_S)
    both = replacement.step(1.0), first.step(0.0), first.step(0.0)
    assert [each.result(TIMEOUT_S) for each in both] == [(11, -3.0), (10, -2.0), (11, -3.0)]
    replacement.step(1.0).result(TIMEOUT_S)
    waiting = replacement.step(1.0)
    second.step(1.0).result(TIMEOUT_S)
    with pytest.raises(WorkerDeparted, match="was taken for dead"):
        second.step(777.0).result(TIMEOUT_S)
    both = first.step(0.0), first.step(0.0), waiting
    assert both[1].result(TIMEOUT_S) == both[2].result(TIMEOUT_S) == (13, -4.0), "not what the dead one gave"
    replacement.close()


def test_a_worker_may_leave_after_the_end_has_released_those_that_wait(pair: list[Member]) -> None:
    first, second = pair
    second.call(second.sync.exchange, RankSignals(stop=True)).result(TIMEOUT_S)
    first.step(1.0).result(TIMEOUT_S)
    first.step(1.0).result(TIMEOUT_S)
    second.call(second.sync.end).result(TIMEOUT_S)


def test_what_is_no_call_ends_no_service(controller: PeerController, pair: list[Member]) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(controller.service.address)
        stranger.send_multipart([b"no", b"call"])
        test_workers_go_on_with_what_all_have_given(pair, controller)


def test_the_end_of_the_run_releases_those_that_wait(pair: list[Member]) -> None:
    first, second = pair
    second.step(1.0).result(TIMEOUT_S)
    waiting = second.step(1.0)
    first.call(first.sync.end).result(TIMEOUT_S)
    assert waiting.result(TIMEOUT_S) == (9, -2.0), "its own weights"
    assert second.sync.is_exchange_due()
    assert second.call(second.sync.exchange, RankSignals()).result(TIMEOUT_S).stop


def test_a_worker_that_is_asked_to_leaves_between_two_steps(pair: list[Member]) -> None:
    first, second = pair
    second.is_noticed = True
    with pytest.raises(WorkerDeparted, match="worker 1 left after 0 steps"):
        second.step(1.0).result(TIMEOUT_S)
    for _ in range(2):
        found = first.step(1.0).result(TIMEOUT_S)
    assert found == (9, -2.0)
