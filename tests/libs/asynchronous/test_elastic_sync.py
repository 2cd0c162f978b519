"""Elastic synchronous training in one process: the steps are those of the living, whoever dies when, and on whatever
hosts they are: as on others, a worker cannot open the run's memory."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from shoal.channel.rpc import RpcClient
from shoal.errors import TrainError, WorkerDeparted
from shoal.libs.asynchronous.clock import Clock
from shoal.libs.asynchronous.controller import ControllerSetting
from shoal.libs.asynchronous.elastic_controller import ElasticController
from shoal.libs.asynchronous.elastic_worker import ElasticSync
from shoal.libs.asynchronous.messages import GetWorkers, LeaveRun
from shoal.libs.asynchronous.shared_memory import RunAddress
from shoal.sync.synchronizer import Connection, StateAccess

TIMEOUT_S = 120.0
NUM_SAMPLES = 4
MakeOptimizer = Callable[[nn.Module], Optimizer]


def make_sgd(network: nn.Module) -> Optimizer:
    return SGD(network.parameters(), 0.1, momentum=0.9)


def make_adam(network: nn.Module) -> Optimizer:
    return Adam(network.parameters(), 0.01)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def compute_gradients(network: nn.Module, step: int, worker: int, num_samples: int = NUM_SAMPLES) -> None:
    """Of the mean loss of a worker's samples, times their number relative to an equal division, as a Loader has it."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    x, y = torch.randn(num_samples, 5, generator=generator), torch.randn(num_samples, 3, generator=generator)
    network.zero_grad()
    loss = (network(x) - y).square().mean() * num_samples / NUM_SAMPLES
    loss.backward()


class Member:
    """A worker in a thread of its own."""

    def __init__(
        self, address: str, worker: int, num_workers: int, make_optimizer: MakeOptimizer, is_elsewhere: bool = False
    ) -> None:
        self.worker, self.network = worker, make_network()
        self.optimizer = make_optimizer(self.network)
        self.is_noticed = self.dies_giving = False
        self.num_samples, self.factor = NUM_SAMPLES, 1.0
        self._thread = ThreadPoolExecutor(1)
        state = StateAccess(self._get_state, self._load_state, self._get_weights)
        connection = Connection(worker, num_workers, address, [], TIMEOUT_S, is_noticed=lambda: self.is_noticed)
        self.sync = ElasticSync(self.optimizer, state, connection)
        if is_elsewhere:
            self._open_memory, self.sync._open_memory = self.sync._open_memory, self._find_no_memory  # type: ignore[method-assign]

    def _find_no_memory(self, address: RunAddress) -> None:
        memory = address.gradients.memory._replace(boot="another host's")
        self._open_memory(address._replace(gradients=address.gradients._replace(memory=memory)))
        assert self.sync._memory is None

    def _get_weights(self) -> tuple[float, float]:
        return self.factor, self.factor * self.num_samples / NUM_SAMPLES

    def _get_state(self) -> dict[str, Any]:
        if self.dies_giving:
            raise SystemExit
        return {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])

    def begin(self, step: int = 0) -> Future[int]:
        return self._thread.submit(self.sync.begin, step)

    def step(self, number: int) -> Future[int]:
        return self._thread.submit(self._step, number)

    def _step(self, number: int) -> int:
        self.sync.before_step()
        compute_gradients(self.network, number, self.worker, self.num_samples)
        self.sync.combine_gradients()
        return self.sync.apply_gradients()

    def close(self) -> None:
        self._thread.submit(self.sync.close).result(TIMEOUT_S)
        self._thread.shutdown()

    @property
    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.network.parameters()]


class Group:
    """A controller, and the members of one run."""

    def __init__(
        self, folder: Path, num_workers: int, make_optimizer: MakeOptimizer = make_adam, elsewhere: tuple[int, ...] = ()
    ) -> None:
        self.address = f"ipc://{folder}/controller"
        self._num_workers = num_workers
        self._make = make_optimizer
        self._elsewhere = elsewhere
        run = ControllerSetting(self.address, [], num_workers, 1, TIMEOUT_S)
        self.controller = ElasticController(run, Clock(num_workers, 0, min_workers=1))
        self.controller.start()
        self._calls = RpcClient(self.address, TIMEOUT_S)
        self._members: list[Member] = []

    def make(self, worker: int) -> Member:
        where = worker in self._elsewhere
        self._members.append(Member(self.address, worker, self._num_workers, self._make, where))
        return self._members[-1]

    def begin(self, *workers: int) -> list[Member]:
        """New members, the chief first; they are ready after their next step, which a member without a state needs."""
        members = [self.make(worker) for worker in workers]
        begun = [members[0].begin()]
        begun[0].result(TIMEOUT_S)
        begun += [each.begin() for each in members[1:]]
        self.wait_for(len(members))
        return members

    def wait_for(self, num_members: int) -> None:
        """Until so many have joined."""
        while len(self._calls.call(GetWorkers()).workers) < num_members:
            pass

    def bury(self, member: Member) -> None:
        """It has died, which the process that started it has noticed."""
        self._calls.call(LeaveRun(member.worker))

    def close(self) -> None:
        for each in self._members:
            each.close()
        self.controller.close()
        self._calls.close()


@pytest.fixture(params=[(), (0, 2)], ids=lambda elsewhere: f"elsewhere: {elsewhere}")
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(tmp_path, 3, elsewhere=request.param)
    yield made
    made.close()


def take_steps(members: list[Member], steps: range) -> None:
    for number in steps:
        futures = [each.step(number) for each in members]
        assert [each.result(TIMEOUT_S) for each in futures] == [number + 1] * len(members)


def train_alone(steps: list[dict[int, int]], make_optimizer: MakeOptimizer) -> list[Tensor]:
    """The steps over the samples of these workers: worker and number of samples, for each step."""
    network = make_network()
    optimizer = make_optimizer(network)
    for number, workers in enumerate(steps):
        total = [torch.zeros_like(each) for each in network.parameters()]
        for worker, num_samples in workers.items():
            compute_gradients(network, number, worker, num_samples)
            for each, parameter in zip(total, network.parameters(), strict=True):
                assert parameter.grad is not None
                each += parameter.grad * NUM_SAMPLES  # of the sum over the worker's samples
        for each, parameter in zip(total, network.parameters(), strict=True):
            parameter.grad = each / sum(workers.values())
        optimizer.step()
    return [each.detach() for each in network.parameters()]


def replace(group: Group, members: list[Member], step: int) -> tuple[Member, list[Future[int]]]:
    """Worker 1 anew, which begins within this step of the others; and what they come to."""
    new = group.make(1)
    begun = new.begin()
    group.wait_for(3)
    futures = [members[0].step(step), members[2].step(step)]
    assert begun.result(TIMEOUT_S) == step
    return new, futures


def assert_equal(members: list[Member]) -> None:
    for each in members[1:]:
        assert all(torch.equal(*pair) for pair in zip(members[0].weights, each.weights, strict=True))


@pytest.mark.parametrize("elsewhere", [(1,), (0, 1, 2)])
def test_the_steps_are_those_of_synchronous_training(tmp_path: Path, elsewhere: tuple[int, ...]) -> None:
    for index, make in enumerate((make_sgd, make_adam)):
        (tmp_path / str(index)).mkdir()
        group = Group(tmp_path / str(index), 3, make, elsewhere)
        members = group.begin(0, 1, 2)
        for number in range(6):
            take_steps(members, range(number, number + 1))
            assert_equal(members)
            alone = train_alone((number + 1) * [dict.fromkeys(range(3), NUM_SAMPLES)], make)
            torch.testing.assert_close(members[0].weights, alone, rtol=1e-5, atol=1e-7)
        group.close()


def test_a_gradient_counts_by_its_samples_and_by_what_its_loss_divides_by(group: Group) -> None:
    members = group.begin(0, 1, 2)
    members[1].num_samples, members[2].num_samples = 5, 3  # 12 together
    take_steps(members, range(3))
    for member, factor in zip(members, (2.5, 0.0, 2.5), strict=True):  # no sample of worker 1 counts
        member.factor, member.num_samples = factor, NUM_SAMPLES
    take_steps(members, range(3, 5))
    expected = train_alone([*3 * [{0: 4, 1: 5, 2: 3}], *2 * [{0: 4, 2: 4}]], make_adam)
    torch.testing.assert_close(members[0].weights, expected)
    for member in members:
        member.factor = 0.0
    take_steps(members, range(5, 6))
    assert all(each.isfinite().all() for each in members[0].weights)


@pytest.mark.parametrize("has_pushed", [False, True])
def test_who_dies_has_a_part_in_the_step_if_it_has_pushed_and_none_otherwise(group: Group, has_pushed: bool) -> None:
    """Its gradient counts for all, though it reads none."""
    members = group.begin(0, 1, 2)
    take_steps(members, range(2))
    dying, others = members[2], members[:2]
    dying.sync._take_mean = _die  # type: ignore[method-assign]
    futures = [each.step(2) for each in (members if has_pushed else others)]
    if not has_pushed:
        group.bury(dying)
    assert [each.result(TIMEOUT_S) for each in futures[:2]] == [3, 3]
    if has_pushed:
        with pytest.raises(SystemExit):
            futures[2].result(TIMEOUT_S)
        group.bury(dying)
    take_steps(others, range(3, 5))
    assert_equal(others)
    every, living = dict.fromkeys(range(3), NUM_SAMPLES), dict.fromkeys(range(2), NUM_SAMPLES)
    steps = [every, every, every if has_pushed else living, living, living]
    torch.testing.assert_close(others[0].weights, train_alone(steps, make_adam))


def _die(*arguments: Any) -> None:
    raise SystemExit


def test_a_replacement_has_the_weights_and_the_optimiser_of_the_others(group: Group) -> None:
    members = group.begin(0, 1, 2)
    take_steps(members, range(3))
    group.bury(members[1])
    take_steps([members[0], members[2]], range(3, 5))
    new, futures = replace(group, members, 5)
    futures.append(new.step(5))
    assert [each.result(TIMEOUT_S) for each in futures] == [6, 6, 6]
    members[1] = new
    take_steps(members, range(6, 9))
    assert_equal(members)
    every, living = dict.fromkeys(range(3), NUM_SAMPLES), {0: NUM_SAMPLES, 2: NUM_SAMPLES}
    expected = train_alone([*3 * [every], *2 * [living], *4 * [every]], make_adam)
    torch.testing.assert_close(new.weights, expected, rtol=1e-5, atol=1e-7)
    assert group.controller.num_healed == 2 + 1


def test_who_was_taken_for_dead_ends_and_changes_nothing(group: Group) -> None:
    """Its host could not be reached for a while: what it sends then is of an earlier life."""
    members = group.begin(0, 1, 2)
    take_steps(members, range(3))
    group.bury(members[1])
    new, futures = replace(group, members, 3)
    with pytest.raises(WorkerDeparted, match="taken for dead") as found:
        members[1].step(777).result(TIMEOUT_S)
    assert found.value.is_over, "the run goes on"
    futures.append(new.step(3))
    assert [each.result(TIMEOUT_S) for each in futures] == [4, 4, 4]
    every = dict.fromkeys(range(3), NUM_SAMPLES)
    torch.testing.assert_close(new.weights, train_alone(4 * [every], make_adam), rtol=1e-5, atol=1e-7)


def test_another_gives_its_state_when_the_one_that_gives_dies(group: Group) -> None:
    members = group.begin(0, 1)
    take_steps(members, range(2))
    members[0].dies_giving = True
    new = group.make(2)
    begun = new.begin()
    group.wait_for(3)
    with pytest.raises(SystemExit):
        members[0].step(2).result(TIMEOUT_S)
    group.bury(members[0])
    step = members[1].step(2)
    assert begun.result(TIMEOUT_S) == 2
    assert [each.result(TIMEOUT_S) for each in (step, new.step(2))] == [3, 3]
    assert_equal([members[1], new])


def test_a_newcomer_that_dies_while_its_state_is_written_holds_up_nobody(group: Group) -> None:
    members = group.begin(0, 1)
    take_steps(members, range(2))
    new = group.make(2)
    is_giving = threading.Event()
    goes_on = threading.Event()
    give = members[0]._get_state

    def give_slowly() -> dict[str, Any]:
        is_giving.set()
        assert goes_on.wait(TIMEOUT_S)
        return give()

    object.__setattr__(members[0].sync._state, "get", give_slowly)
    begun = new.begin()
    group.wait_for(3)
    futures = [members[0].step(2)]
    assert is_giving.wait(TIMEOUT_S)
    futures.append(members[1].step(2))
    group.bury(new)
    with pytest.raises(WorkerDeparted):
        begun.result(TIMEOUT_S)
    assert futures[1].result(TIMEOUT_S) == 3
    goes_on.set()
    assert futures[0].result(TIMEOUT_S) == 3
    assert_equal(members)


def test_the_last_that_leaves_in_order_hands_its_state_to_the_next(group: Group) -> None:
    members = group.begin(0, 1)
    take_steps(members, range(3))
    for each in members:
        each.is_noticed = True
        with pytest.raises(WorkerDeparted):
            each.step(3).result(TIMEOUT_S)
    new = group.make(1)  # not even the chief
    assert new.begin().result(TIMEOUT_S) == 3
    assert_equal([members[1], new])
    assert group.controller.num_restarts == 1  # the beginning


def test_when_all_have_died_the_chief_begins_with_its_checkpoint_and_the_others_follow(group: Group) -> None:
    members = group.begin(0, 1)
    take_steps(members, range(5))
    for each in members:
        group.bury(each)
    other, chief = group.make(1), group.make(0)
    waiting = other.begin()
    assert chief.begin(2).result(TIMEOUT_S) == 2  # the steps in the checkpoint
    step = chief.step(2)
    assert waiting.result(TIMEOUT_S) == 2
    assert [each.result(TIMEOUT_S) for each in (step, other.step(2))] == [3, 3]
    assert_equal([chief, other])
    assert group.controller.num_restarts == 2


def test_a_worker_with_another_model_is_refused(group: Group) -> None:
    group.begin(0)
    other = group.make(1)
    other.sync._parameters = other.sync._optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(TrainError, match="other shapes"):
        other.begin().result(TIMEOUT_S)


def test_who_comes_when_the_run_ends_is_sent_away(group: Group) -> None:
    members = group.begin(0, 1)
    take_steps(members, range(2))
    members[0]._thread.submit(members[0].sync.end).result(TIMEOUT_S)
    with pytest.raises(WorkerDeparted):
        group.make(2).begin().result(TIMEOUT_S)
    assert members[1].step(2).result(TIMEOUT_S) == 2  # no step without the chief
