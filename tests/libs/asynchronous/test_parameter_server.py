"""Servers, controller and workers in one process: the updates are those of the equations, whatever is divided how."""

import copy
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from shoal.errors import ConfigError, SpecMismatch, TrainError
from shoal.extend.sync import Traffic
from shoal.libs.asynchronous.clock import Push, Update
from shoal.libs.asynchronous.config import (
    DiLoCoConfig,
    LocalSGDConfig,
    LocalStepsConfig,
    ParameterServerConfig,
    ServersConfig,
)
from shoal.libs.asynchronous.controller import ControllerSetting
from shoal.libs.asynchronous.parameter_server.controller import ServerController, make_clock
from shoal.libs.asynchronous.parameter_server.local_steps import LocalStepsSync
from shoal.libs.asynchronous.parameter_server.partition import divide, divide_fragments
from shoal.libs.asynchronous.parameter_server.server import ParameterServer
from shoal.libs.asynchronous.parameter_server.server_service import ServerService
from shoal.libs.asynchronous.parameter_server.worker import ParameterServerSync
from shoal.sync.costs import load_probe
from shoal.sync.synchronizer import Connection

TIMEOUT_S = 120.0
Weigh = Callable[[int, int], float]  # of the gradients of (step, worker), as `ParallelModel.step_weight`


def weigh_alike(step: int, worker: int) -> float:
    return 1.0


def weigh_differently(step: int, worker: int) -> float:
    """As a loss that divides by a count of its own: some micro-batches count nothing."""
    return [2.5, 0.0, 1.5][(step + worker) % 3]


MakeOptimizer = Callable[[nn.Module], Optimizer]


class Network(nn.Module):
    """With a parameter that gets a gradient only in even steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.rare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, is_even: bool) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs * self.rare if is_even else outputs


def make_network() -> Network:
    torch.manual_seed(0)
    return Network()


def batch_of(step: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def compute_gradients(network: nn.Module, step: int, worker: int) -> None:
    network.zero_grad()
    x, y = batch_of(step, worker)
    loss = (network(x, step % 2 == 0) - y).square().mean()
    loss.backward()


def make_service(
    folder: Path,
    index: int,
    spec: ServersConfig,
    num_workers: int,
    make_optimizer: MakeOptimizer,
    file: Path | None = None,
    every_s: float = 0.0,
) -> ServerService:
    server = ParameterServer(index, make_optimizer(make_network()), spec, num_workers)
    address = f"ipc://{folder}/server-{index}"
    return ServerService(address, server, f"ipc://{folder}/controller", TIMEOUT_S, file, every_s)


def list_addresses(folder: Path, spec: ServersConfig) -> list[str]:
    return [f"ipc://{folder}/server-{index}" for index in range(spec.servers)]


def make_controller(folder: Path, spec: ServersConfig, num_workers: int) -> ServerController:
    run = ControllerSetting(f"ipc://{folder}/controller", list_addresses(folder, spec), num_workers, None, TIMEOUT_S)
    return ServerController(run, make_clock(spec, num_workers), spec)


def connect(folder: Path, spec: ServersConfig, worker: int) -> Connection:
    return Connection(worker, 0, f"ipc://{folder}/controller", list_addresses(folder, spec), TIMEOUT_S)


@contextmanager
def running(
    folder: Path, spec: ServersConfig, num_workers: int, make_optimizer: MakeOptimizer
) -> Iterator[tuple[ServerController, Callable[[int, Optimizer], ParameterServerSync]]]:
    """The controller, and how to make a worker's synchronizer."""
    services = [make_service(folder, index, spec, num_workers, make_optimizer) for index in range(spec.servers)]
    controller = make_controller(folder, spec, num_workers)
    controller.start()
    for each in services:
        each.start()

    def make_sync(worker: int, optimizer: Optimizer) -> ParameterServerSync:
        return ParameterServerSync(optimizer, spec, connect(folder, spec, worker))

    try:
        yield controller, make_sync
    finally:
        controller.close()
        for each in services:
            each.close()


class Outcome(NamedTuple):
    """Of the chief, at the end: `weights` as an evaluation has them. staleness: how often each τ was seen."""

    weights: list[Tensor]
    staleness: dict[int, int]
    optimizer: Optimizer
    traffic: Traffic


def train(
    folder: Path,
    spec: ServersConfig,
    num_workers: int,
    make_optimizer: MakeOptimizer,
    num_steps: int,
    weigh: Weigh = weigh_alike,
) -> Outcome:
    """Every worker in a thread; with local steps, `make_optimizer` makes the workers' own."""
    found: dict[int, Any] = {}

    def work(worker: int) -> None:
        network = networks[worker]
        optimizer = make_optimizer(network)
        make: Any = LocalStepsSync if is_local else ParameterServerSync
        sync = make(optimizer, spec, connect(folder, spec, worker))
        try:
            sync.begin(0)
            for step in range(num_steps):
                sync.before_step()
                compute_gradients(network, step, worker)
                sync.get_step_weight = partial(weigh, step, worker)
                finished = sync.apply_gradients()
                if isinstance(spec, LocalStepsConfig) and spec.fragments == 1:
                    assert finished == (step + 1) // spec.every * spec.every
            together.wait(TIMEOUT_S)
            if is_local:
                sync.before_evaluation()
            elif worker == 0:
                sync.collect_state()
            weights = [each.detach().clone() for each in network.parameters()]
            found[worker] = weights, optimizer, sync.measure_traffic()
            sync.end()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            found[worker] = error
            together.abort()
        finally:
            sync.close()

    is_local = isinstance(spec, LocalStepsConfig)
    together = threading.Barrier(num_workers)
    networks = [make_network() for _ in range(num_workers)]
    make_applied = (lambda network: spec.make_server_optimizer(make_optimizer(network))) if is_local else make_optimizer
    with running(folder, spec, num_workers, make_applied) as (controller, _):
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        errors = [outcome for outcome in found.values() if isinstance(outcome, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        weights, optimizer, traffic = found[0]
        return Outcome(weights, dict(controller.staleness), optimizer, traffic)


def train_alone(
    num_workers: int, make_optimizer: MakeOptimizer, num_steps: int, accumulate: int = 1, weigh: Weigh = weigh_alike
) -> tuple[list[Tensor], Optimizer]:
    """The same steps over the mean of the workers' gradients, in this thread."""
    network = make_network()
    optimizer = make_optimizer(network)
    for begin in range(0, num_steps, accumulate):
        sums: list[Tensor | None] = [None] * len(list(network.parameters()))
        pairs = list(itertools.product(range(begin, begin + accumulate), range(num_workers)))
        for step, worker in pairs:
            compute_gradients(network, step, worker)
            for index, each in enumerate(network.parameters()):
                if each.grad is not None:
                    weighted = each.grad * weigh(step, worker)
                    sums[index] = weighted if sums[index] is None else sums[index] + weighted
        for each, total in zip(network.parameters(), sums, strict=True):
            each.grad = None if total is None else total / sum(itertools.starmap(weigh, pairs))
        optimizer.step()
    return [each.detach() for each in network.parameters()], optimizer


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda network: SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda network: Adam(network.parameters(), 0.05),
    "rmsprop": lambda network: RMSprop(network.parameters(), 0.01),
    "groups": lambda network: AdamW(
        [
            {"params": [*network.parameters()][:2], "lr": 0.1},
            {"params": [*network.parameters()][2:], "weight_decay": 0.3},
        ]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_with_staleness_0_it_is_synchronous_training_step_by_step(tmp_path: Path, name: str, num_servers: int) -> None:
    trained = train(tmp_path, ParameterServerConfig(servers=num_servers), 3, OPTIMIZERS[name], 6)
    expected, alone = train_alone(3, OPTIMIZERS[name], 6)
    torch.testing.assert_close(trained.weights, expected, rtol=1e-5, atol=1e-6)
    assert trained.staleness == {0: 18}
    optimizer = trained.optimizer
    for mine, other in zip(optimizer.param_groups, alone.param_groups, strict=True):
        for one, two in zip(mine["params"], other["params"], strict=True):
            torch.testing.assert_close(dict(optimizer.state[one]), dict(alone.state[two]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("staleness", [None, 3])
def test_one_worker_that_does_not_wait_is_sequential_training(tmp_path: Path, staleness: int | None) -> None:
    spec = ParameterServerConfig(servers=2, staleness=staleness, rate="per_staleness", compensation=0.5)
    trained = train(tmp_path, spec, 1, OPTIMIZERS["adam"], 6)
    expected, _ = train_alone(1, OPTIMIZERS["adam"], 6)
    torch.testing.assert_close(trained.weights, expected, rtol=1e-5, atol=1e-6)
    assert trained.staleness == {0: 6}


@pytest.mark.parametrize("staleness", [0, None])
def test_weights_and_gradients_in_messages_give_the_same_bits_as_in_shared_memory(
    tmp_path: Path, staleness: int | None
) -> None:
    """Also if compressed, where top-k of all elements loses nothing."""
    found = []
    for index, (transport, compression) in enumerate(itertools.product(("shared_memory", "frames"), ("none", "top_k"))):
        folder = tmp_path / str(index)
        folder.mkdir()
        spec = ParameterServerConfig(
            servers=3, staleness=staleness, transport=transport, compression=compression, top_k=1.0
        )
        weights, _, optimizer, _ = train(folder, spec, 3 if staleness == 0 else 1, OPTIMIZERS["adam"], 6)
        trained = optimizer.param_groups[0]["params"]
        found.append([*weights, *(optimizer.state[each][name] for each in trained for name in ("exp_avg_sq", "step"))])
    assert all(torch.equal(mine, other) for each in found[1:] for mine, other in zip(found[0], each, strict=True))


@pytest.mark.parametrize(("transport", "compensation"), [("shared_memory", 0.0), ("frames", 0.1)])
def test_every_push_of_free_workers_becomes_one_update(tmp_path: Path, transport: str, compensation: float) -> None:
    spec = ParameterServerConfig(servers=2, staleness=None, transport=transport, compensation=compensation)
    trained = train(tmp_path, spec, 4, OPTIMIZERS["sgd"], 10)
    assert sum(trained.staleness.values()) == 40
    assert all(each.isfinite().all() for each in trained.weights)


def test_a_partition_is_balanced_and_complete() -> None:
    for whole in (False, True):
        partition = divide([1000, 10, 500, 490, 7], 3, by_parameter=whole)
        sizes = [partition.get_size(server) for server in range(3)]
        assert sum(sizes) == 2007
        assert max(sizes) <= (1000 if whole else 669)
        parameters = [torch.arange(float(size)) for size in (1000, 10, 500, 490, 7)]
        copies = [torch.zeros_like(each) for each in parameters]
        for server in range(3):
            vector = torch.empty(sizes[server])
            partition.write(server, parameters, vector)
            partition.read(server, vector, copies)
        torch.testing.assert_close(copies, parameters)


def test_more_servers_than_there_is_to_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync\.servers"):
        divide([2, 1], 4, by_parameter=False)
    with pytest.raises(ConfigError, match="needs each whole"):
        divide([2, 1], 3, by_parameter=True)


def test_a_worker_with_another_model_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, ParameterServerConfig(), 1, OPTIMIZERS["sgd"]) as (_, make_sync):
        other = nn.Linear(2, 2)
        sync = make_sync(0, SGD(other.parameters(), 0.1))
        with pytest.raises(SpecMismatch, match="worker 0"):
            sync.begin(0)
        sync.close()


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    with running(tmp_path, ParameterServerConfig(), 1, lambda _: SGD(nn.Embedding(4, 2).parameters(), 0.1)) as (
        _,
        make_sync,
    ):
        sync = make_sync(0, SGD(embedding.parameters(), 0.1))
        sync.begin(0)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(TrainError, match="sparse"):
            sync.apply_gradients()
        sync.close()


class Replica:
    """One worker, step by step, in this thread or another."""

    def __init__(self, worker: int, make_sync: Callable[[int, Optimizer], ParameterServerSync]) -> None:
        self.worker, self.network = worker, make_network()
        self.optimizer = OPTIMIZERS["adam"](self.network)
        self.sync = make_sync(worker, self.optimizer)
        self.num_steps = 0

    def step(self) -> None:
        self.sync.before_step()
        compute_gradients(self.network, self.num_steps, self.worker)
        self.sync.apply_gradients()
        self.num_steps += 1


@pytest.mark.parametrize("is_old", [False, True])
def test_a_server_that_died_comes_back_with_its_state_and_says_what_is_lost(tmp_path: Path, is_old: bool) -> None:
    """Its last state on disk may be that of its death, or an older one."""
    spec = ParameterServerConfig(servers=2, staleness=None)
    files = [tmp_path / f"server-{index}.safetensors" for index in range(2)]
    controller = make_controller(tmp_path, spec, 1)
    controller.start()
    every_s = 1e9 if is_old else 0.0  # then the file has the weights of the beginning
    servers = [make_service(tmp_path, index, spec, 1, OPTIMIZERS["adam"], files[index], every_s) for index in range(2)]
    for server in servers:
        server.start()
    replica = Replica(
        0, lambda worker, optimizer: ParameterServerSync(optimizer, spec, connect(tmp_path, spec, worker))
    )
    older = tmp_path / "older.safetensors"
    try:
        replica.sync.begin(0)
        for step in range(8):
            if step == 5:
                replica.sync.before_step()  # its answer comes after the update of the step before
                servers[1].close()  # which waits for the state to be written
                servers[1] = make_service(tmp_path, 1, spec, 1, OPTIMIZERS["adam"], files[1])
                if is_old:
                    older.replace(files[1])
                version = int(safetensors.torch.load_file(files[1])["version"])
                servers[1].start()
            replica.step()
            if step == 2:
                replica.sync.before_step()
                servers[1].wait_until_written()
                older.write_bytes(files[1].read_bytes())
        replica.sync.before_step()
        assert controller.num_lost == [0, 5 - version]
        assert (version < 5) == is_old
        expected, _ = train_alone(1, OPTIMIZERS["adam"], 8)
        found = [each.detach() for each in replica.network.parameters()]
        is_equal = all(
            torch.allclose(mine, other, rtol=1e-5, atol=1e-6) for mine, other in zip(found, expected, strict=True)
        )
        assert is_equal == (not is_old)
    finally:
        replica.sync.close()
        controller.close()
        for server in servers:
            server.close()


def make_inner(network: nn.Module) -> Optimizer:
    """A worker's own, with local steps."""
    return SGD(network.parameters(), 0.1)


def test_gradients_count_by_the_weights_of_their_losses(tmp_path: Path) -> None:
    spec = ParameterServerConfig(servers=2)
    for accumulate in (1, 2):
        folder = tmp_path / str(accumulate)
        folder.mkdir()
        accumulating = spec.model_copy(update={"accumulate": accumulate})
        found = train(folder, accumulating, 3, OPTIMIZERS["sgd"], 6, weigh_differently)
        expected, _ = train_alone(3, OPTIMIZERS["sgd"], 6, accumulate, weigh_differently)
        torch.testing.assert_close(found.weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "outer"),
    [
        (LocalSGDConfig(every=1), {"lr": 1.0}),
        (LocalSGDConfig(every=4, servers=2), {"lr": 1.0}),
        (
            DiLoCoConfig(every=3, outer_learning_rate=0.5, outer_momentum=0.8),
            {"lr": 0.5, "momentum": 0.8, "nesterov": True},
        ),
    ],
)
def test_local_steps_are_those_of_the_equations(tmp_path: Path, spec: LocalStepsConfig, outer: dict[str, Any]) -> None:
    """And changes count by the weights of their steps."""
    found = train(tmp_path, spec, 3, make_inner, 4 * spec.every, weigh_differently)
    expected = train_local_steps_alone(spec, 3, 4 * spec.every, outer, weigh_differently)
    torch.testing.assert_close(found.weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transport", ["shared_memory", "frames"])
@pytest.mark.parametrize(("kind", "tolerance"), [("none", 1e-5), ("top_k", 1e-5), ("fp16", 1e-2)])
def test_fragments_are_merged_at_staggered_steps(
    tmp_path: Path,
    transport: Literal["shared_memory", "frames"],
    kind: Literal["none", "fp16", "top_k"],
    tolerance: float,
) -> None:
    """Streaming DiLoCo, 2501.18512, without a delay: fragment p has its own outer step, at step (p + 1) * every / K.
    Each has an error feedback of its own; top-k of all elements loses nothing."""
    spec = DiLoCoConfig(every=4, fragments=2, servers=2, transport=transport, compression=kind, top_k=1.0)
    found = train(tmp_path, spec, 2, make_inner, 8)
    expected = train_local_steps_alone(spec, 2, 8, OUTER)
    torch.testing.assert_close(found.weights, expected, rtol=tolerance, atol=tolerance / 10)
    if transport == "frames" or kind == "none":
        assert found.traffic.pushed_bytes / found.traffic.num_steps == found.traffic.predicted[0]


def test_a_merged_fragment_is_blended_with_what_a_worker_has_done_meanwhile(tmp_path: Path) -> None:
    spec = DiLoCoConfig(every=4, fragments=2, delay=1, blend=0.25, servers=2)
    found = train(tmp_path, spec, 2, make_inner, 9).weights
    torch.testing.assert_close(found, train_local_steps_alone(spec, 2, 9, OUTER), rtol=1e-5, atol=1e-6)


OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # of DiLoCo, by default


def train_local_steps_alone(
    spec: LocalStepsConfig, num_workers: int, num_steps: int, outer: dict[str, Any], weigh: Weigh = weigh_alike
) -> list[Tensor]:
    """The same by the equations (2311.08105 and 2501.18512, algorithms 1 and 2): the merged weights in the end."""
    merged = make_network()
    parameters = list(merged.parameters())
    fragments = divide_fragments([each.numel() for each in parameters], spec.fragments)
    optimizer = SGD(parameters, **outer)
    networks = [copy.deepcopy(merged) for _ in range(num_workers)]
    inner = [make_inner(network) for network in networks]
    due = [spec.every * (index + 1) // len(fragments) for index in range(len(fragments))]
    begun = [0] * len(fragments)  # the step after the last exchange of each
    arriving: dict[int, range] = {}
    blend = spec.blend if spec.delay else 0.0
    for step in range(num_steps):
        for worker, (network, own) in enumerate(zip(networks, inner, strict=True)):
            compute_gradients(network, step, worker)
            own.step()
        for number, (fragment, at) in enumerate(zip(fragments, due, strict=True)):
            if (step + 1) % spec.every == at % spec.every:
                ages = [
                    sum(weigh(each, worker) for each in range(begun[number], step + 1)) for worker in range(num_workers)
                ]
                optimizer.zero_grad()
                for index in fragment:
                    changes = [
                        parameters[index].detach() - list(each.parameters())[index].detach() for each in networks
                    ]
                    weighted = [age * change for age, change in zip(ages, changes, strict=True)]
                    parameters[index].grad = torch.stack(weighted).sum(0) / sum(ages)
                optimizer.step()
                arriving[step + spec.delay], begun[number] = fragment, step + 1
        for index in arriving.pop(step, range(0)):
            for network in networks:
                with torch.no_grad():
                    list(network.parameters())[index].lerp_(parameters[index], 1 - blend)
    return [each.detach() for each in parameters]


def test_more_fragments_than_parameters_are_refused() -> None:
    assert divide_fragments([10, 10, 100, 10], 3) == [range(2), range(2, 3), range(3, 4)]
    with pytest.raises(ConfigError, match=r"sync\.fragments"):
        divide_fragments([1, 2], 3)


def test_late_changes_are_in_the_next_mean_with_their_weight_also_after_a_servers_death() -> None:
    spec = LocalSGDConfig()

    def make_server() -> ParameterServer:
        return ParameterServer(0, spec.make_server_optimizer(SGD(make_network().parameters(), 0.1)), spec, 3)

    server, other = make_server(), make_server()
    size = len(server.weights)
    changes = [torch.full((size,), value) for value in (1.0, 2.0, 4.0)]
    for each in (server, other):
        for worker, change in enumerate(changes):
            each.memory.gradients[worker].copy_(change)
    server.load({"version": torch.tensor(0), "weights": torch.zeros(size)})
    server.commit(Update(1, [Push(2, 1, 0, 0, weight=2)], is_late=True))
    assert torch.equal(server.weights, torch.zeros(size))
    other.load(server.dump())  # as a server that begins again does
    for each in (server, other):
        each.commit(Update(2, [Push(0, 1, 1, 1, weight=4), Push(1, 1, 1, 1, weight=4)]))
        torch.testing.assert_close(each.weights, torch.full((size,), -(4 * 1.0 + 4 * 2.0 + 2 * 4.0) / 10))
        each.commit(Update(3, [Push(0, 1, 2, 2, weight=4)]))  # it is in one mean only
        torch.testing.assert_close(each.weights, torch.full((size,), -2.0 - 1.0))
        each.close()


def test_an_update_without_weight_leaves_what_no_late_change_has() -> None:
    spec = LocalSGDConfig()
    server = ParameterServer(0, spec.make_server_optimizer(SGD(make_network().parameters(), 0.1)), spec, 2)
    server.load({"version": torch.tensor(0), "weights": torch.zeros(len(server.weights))})
    for worker in range(2):
        server.memory.gradients[worker].fill_(float(worker))
    server.commit(Update(1, [Push(1, 1, 0, 0, absent=[0], weight=2)], is_late=True))
    server.commit(Update(2, [Push(0, 1, 1, 1, weight=0)]))
    num_absent = math.prod(server.parameters[0])
    values, counts = server.weights.unique(return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([-1.0, 0.0], [len(server.weights) - num_absent, num_absent])
    server.close()


def test_servers_are_measured_with_their_own_optimizer() -> None:
    network = nn.Linear(300, 40)
    num_bytes = 4 * sum(each.numel() for each in network.parameters())
    optimizer = torch.optim.Adam(network.parameters())
    own = load_probe(ParameterServerConfig()).measure(optimizer, ParameterServerConfig())
    assert own.weight_bytes == num_bytes
    assert 5 * num_bytes <= own.state_bytes < 6 * num_bytes  # weights, two buffers, two moments; counts of steps
    outer = load_probe(LocalSGDConfig()).measure(optimizer, LocalSGDConfig(servers=2))
    assert outer.state_bytes == pytest.approx(3 * num_bytes / 2, abs=8)  # without momentum
    assert outer.memory_bytes(4, 2) == pytest.approx((3 + 5) * num_bytes / 2, abs=8)
