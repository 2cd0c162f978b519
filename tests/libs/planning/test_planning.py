"""`shoal plan`: what is enumerated, how times are composed, how plans are ranked, what a user types and reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.libs.planning import planner, step_time
from shoal.libs.planning.calibration import Calibration, LinkCost, StepTimes, calibrate
from shoal.libs.planning.candidates import enumerate_candidates, require_open_choices
from shoal.libs.planning.estimate import PlanEstimate, sort_estimates
from shoal.libs.planning.hardware import HardwareSpec
from shoal.libs.planning.planner import Planner
from shoal.libs.planning.predict import predict
from shoal.libs.planning.predict.rank_step import CollectiveTraffic, RankStep, StageTimes
from shoal.libs.planning.predict.simulate_pipeline import TransferTime
from shoal.libs.planning.step_time import Machine, StepTime
from shoal.sync.costs import ServerCosts
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task
from typed import said, typed

TASK = """
import torch
from torch import nn
from shoal.data import Data
from shoal.train import Task, TrainSpec

class Layers(Task):
    def __init__(self, *, width: int = 32, depth: int = 4):
        self.width, self.depth = width, depth
    def model(self):
        inner = [each for _ in range(self.depth) for each in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(self.width, 2))
    def data(self):
        print("opening the data")
        return Data(torch.utils.data.TensorDataset(torch.randn(256, self.width), torch.randint(0, 2, (256,))))
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

class Recurrent(Layers):
    def model(self):
        return Network(self.width)

class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 2))
    def forward(self, x):
        return x @ self.weight

def spec():
    return TrainSpec(batch_size=64)
"""
CALIBRATION = Calibration(
    num_processes=2,
    samples=32,
    alone=StepTimes(0.01, 0.001, 0.0),
    together=StepTimes(0.012, 0.001, 0.0),
    slowest=StepTimes(0.015, 0.001, 0.0),
    shared=LinkCost(1e-5, 1e-9),
    sockets=LinkCost(1e-3, 2e-9),
    call_s=1e-4,
)
NETWORK = 1.25e9  # bytes a second: 10Gbit
COSTS = ServerCosts(weight_bytes=10**9, copy_s=0.1, update_s=0.5, add_s=0.1, state_bytes=5 * 10**9)
SLOW_HOSTS = Machine(hosts=4, devices=1, cores=None, network_s=1 / NETWORK, latency_s=1e-4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layers_task.py"
    path.write_text(TASK)
    return path


def make_planner(
    file: Path, machine: Machine, device_memory: float = 1e12, name: str = "Layers", **args: int
) -> Planner:
    spec = spec_from_overrides([f"task={file}:{name}", "batch_size=64"]).update({"args": args})
    return Planner(make_task(spec.task, spec.args), spec, machine, CALIBRATION, device_memory, sample_s=1e-6)


# -- the words of the hardware


def test_units_of_the_hardware() -> None:
    hardware = HardwareSpec().override(
        ["hosts=4", "devices=8", "network=10Gbit", "latency=50us", "device_memory=16GB", "device_flops=20TFLOP"]
    )
    assert (hardware.hosts, hardware.devices, hardware.network, hardware.latency) == (
        4,
        8,
        1.25e9,
        pytest.approx(50e-6),
    )
    assert (hardware.device_memory, hardware.device_flops) == (16 << 30, 20e12)
    assert HardwareSpec().override(["network=1.2GB/s"]).network == 1.2e9
    assert HardwareSpec().override(["device_bandwidth=100Gb"]).device_bandwidth == 12.5e9
    assert HardwareSpec() == HardwareSpec().override(["network=null"])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("network=10 foo", "10Gbit"),
        ("network=10", "10Gbit"),
        ("network=0Gbit", "10Gbit"),
        ("latency=5", "50us"),
        ("device_memory=lots", "16GB"),
        ("device_flops=3GHz", "20TFLOP"),
        ("device_bandwidth=-1GB", "1.2GB"),
        ("hosts=0", "greater than or equal to 1"),
        ("devices=two", "integer"),
    ],
)
def test_hardware_that_is_none_names_field_value_and_what_fits(override: str, remedy: str) -> None:
    name, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=remedy) as error:
        HardwareSpec().override([override])
    assert error.value.field == name
    assert value in str(error.value)


def test_several_hosts_need_a_network(file: Path) -> None:
    spec = spec_from_overrides([f"task={file}:Layers"])
    with pytest.raises(ConfigError, match="network=10Gbit"):
        planner.rank_plans(make_task(spec.task, {}), spec, HardwareSpec(hosts=2))


@pytest.mark.parametrize(
    "override", ["workers=4", "parallel=ddp", "parallel.tensor=2", "sync.kind=diloco", "sync=diloco"]
)
def test_what_the_plan_chooses_is_not_said(override: str) -> None:
    with pytest.raises(ConfigError, match="is what `shoal plan` chooses"):
        require_open_choices(["batch_size=8", override])
    require_open_choices(["batch_size=8", "parallel.precision=bf16", "sync.every=20"])


# -- what is enumerated


def test_every_division_of_the_devices_is_enumerated_once() -> None:
    found = enumerate_candidates(hosts=2, devices=4, every=50)
    names = [each.name for each in found]
    assert len(set(names)) == len(names)
    assert {
        "one device",
        "ddp=8",
        "fsdp=8",
        "hybrid=8",
        "ddp=2 x tensor=4",
        "fsdp=2 x tensor=2 x pipeline=2, 4 micro-batches",
    } <= {*names}
    assert not any("tensor=8" in name for name in names)  # tensor parallel ranks stay within a host
    assert {each.workers for each in found} == {1, 8}
    specs = {each.name: spec_from_overrides([*each.overrides, "batch_size=64"]) for each in found}
    assert all(
        specs[each.name].resolve_dims().workers == each.workers for each in found if "sync" not in str(each.overrides)
    )
    assert specs["hybrid=8"].resolve_dims().replicate == 2
    assert specs["pipeline=8, 32 micro-batches"].parallel.micro_batches == 32
    assert specs["DiLoCo, every 50 steps"].sync.servers == 2
    assert specs["parameter server, free-running"].sync.staleness is None


def test_a_field_of_local_steps_is_in_the_plans_that_have_it() -> None:
    found = enumerate_candidates(1, 2, every=20, sync=["sync.every=20", "sync.outer_momentum=0.5"])
    having = {each.name for each in found if "sync.outer_momentum=0.5" in each.overrides}
    assert having == {"DiLoCo, every 20 steps"}
    assert {each.name for each in found if "sync.every=20" in each.overrides} == having | {"local SGD, every 20 steps"}
    for each in found:
        TrainSpec().override(each.overrides)


def test_one_device_has_one_plan() -> None:
    assert [each.name for each in enumerate_candidates(1, 1, every=50)] == ["one device"]


# -- how the times are composed


def test_a_slow_network_ranks_diloco_above_ddp_and_the_server_for_a_big_model() -> None:
    compute_s = 0.1
    ring = CollectiveTraffic((0, 1, 2, 3), num_calls=1, sent_bytes=2 * 3 / 4 * COSTS.weight_bytes, is_shared=True)
    ddp = step_time.time_synchronous(compute_s, [ring], CALIBRATION, SLOW_HOSTS)
    shared = COSTS, CALIBRATION, SLOW_HOSTS, 4, 4
    bsp = step_time.time_bsp(compute_s, *shared)
    diloco = step_time.time_local_steps(compute_s, *shared, every=100)
    assert diloco.step_s < ddp.step_s
    assert diloco.step_s < bsp.step_s
    assert ddp.exposed_s == pytest.approx(1.5e9 / NETWORK + 2 * 3 * 1e-4, rel=0.1)  # a part hides behind backward
    assert (bsp.step_s - compute_s) / (diloco.step_s - compute_s) == pytest.approx(100, rel=0.1)


def test_a_fast_network_hides_all_but_the_last_collective_behind_the_backward_pass() -> None:
    machine = replace(SLOW_HOSTS, latency_s=0.0)
    ring = CollectiveTraffic((0, 1, 2, 3), num_calls=10, sent_bytes=1.25e6, is_shared=False)  # a millisecond
    assert step_time.time_synchronous(1.0, [ring], CALIBRATION, machine).exposed_s == pytest.approx(1e-4)


def test_groups_of_one_host_share_its_network() -> None:
    """Eight copies of each device's part: as many rings leave a host as it has devices."""
    machine = Machine(hosts=2, devices=4, cores=None, network_s=1e-9)
    one_ring = CollectiveTraffic(tuple(range(8)), 1, 1e9, is_shared=False)
    four_rings = CollectiveTraffic((0, 4), 1, 1e9, is_shared=False)
    seconds = [step_time.time_collectives([each], CALIBRATION, machine, 0.0) for each in (one_ring, four_rings)]
    assert seconds == pytest.approx([1.0, 4.0])


def test_sums_within_a_host_are_those_of_its_memory_or_sockets() -> None:
    machine = Machine(hosts=1, devices=2, cores=2)
    traffic = CollectiveTraffic((0, 1), 10, 1e6, is_shared=True)
    assert step_time.time_collectives([traffic], CALIBRATION, machine, 1.0) == pytest.approx(10 * 1e-5 + 1e-3)
    sockets = replace(traffic, is_shared=False)
    assert step_time.time_collectives([sockets], CALIBRATION, machine, 1.0) == pytest.approx(10 * 1e-3 + 2e-3)
    fast = replace(machine, device_s=1e-12)
    assert step_time.time_collectives([sockets], CALIBRATION, fast, 1.0) == pytest.approx(10 * 1e-3 + 1e-6)


def test_workers_that_share_cores_slow_each_other_down() -> None:
    machine = Machine(hosts=1, devices=2, cores=2)
    slowdown = step_time.compute_slowdown
    assert slowdown(CALIBRATION, machine, 1) == 1.0
    assert slowdown(CALIBRATION, machine, 2) == pytest.approx(1.5)  # of the slowest
    assert slowdown(CALIBRATION, machine, 2, is_waiting=False) == pytest.approx(1.2)
    assert slowdown(CALIBRATION, replace(machine, cores=None, speed=10.0), 2) == pytest.approx(0.1)


def test_a_server_with_many_free_workers_is_what_limits_them() -> None:
    machine = Machine(hosts=1, devices=16, cores=None)
    few = step_time.time_free(10.0, 1.0, COSTS, CALIBRATION, machine, 4, 1)
    many = step_time.time_free(1.0, 1.0, COSTS, CALIBRATION, machine, 16, 1)
    assert few.limit == ""
    assert (many.limit, many.step_s) == ("the server's updates", pytest.approx(16 * COSTS.update_s))


def test_the_host_s_cores_do_the_work_of_workers_and_server() -> None:
    machine = Machine(hosts=1, devices=2, cores=2)
    found = step_time.time_free(1.0, 2.0, COSTS, CALIBRATION, machine, 2, 1)
    work_s = 2 * (1.0 + 2 * 0.1 + 2e-4) + 2 * 0.5 * 2.0
    assert (found.limit, found.step_s) == ("the host's cores", pytest.approx(work_s / 2))


def test_a_measured_exchange_lengthens_its_parts() -> None:
    machine = Machine(hosts=1, devices=2, cores=2)
    parts_s = 2 * 0.1 + 2e-4 + 0.6
    slow = replace(CALIBRATION, exchange_s=2 * parts_s)
    exchanges = [step_time.time_exchange(COSTS, each, machine, 2, 1, 2) for each in (CALIBRATION, slow)]
    assert exchanges == pytest.approx([parts_s, 2 * parts_s])


# -- plans of a Task


def estimate_all(planner: Planner, *names: str) -> dict[str, PlanEstimate]:
    """Of these plans, or all, the best first."""
    machine = planner.machine
    candidates = enumerate_candidates(machine.hosts, machine.devices, every=50)
    candidates = [each for each in candidates if not names or each.name in names]
    return {each.candidate.name: each for each in sort_estimates([planner.estimate(each) for each in candidates])}


@pytest.mark.soak
def test_with_little_memory_sharding_and_tensor_rank_above_ddp(file: Path) -> None:
    machine = Machine(hosts=1, devices=2, cores=2)
    names = ("ddp=2", "fsdp=2", "tensor=2")
    estimates = estimate_all(make_planner(file, machine, width=256), *names)
    memory = {name: each.memory_bytes for name, each in estimates.items()}
    assert max(memory["fsdp=2"], memory["tensor=2"]) < memory["ddp=2"]
    limit = (max(memory["fsdp=2"], memory["tensor=2"]) + memory["ddp=2"]) / 2
    found = estimate_all(make_planner(file, machine, limit, width=256), *names)
    assert list(found)[-1] == "ddp=2"
    assert found["ddp=2"].reason.startswith("does not fit: needs ")
    assert not found["ddp=2"].is_possible
    assert found["ddp=2"].is_applicable


def test_more_micro_batches_have_a_smaller_bubble(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal stages and free messages: a share (p - 1) / (m + p - 1) of the schedule has no work."""
    monkeypatch.setattr(predict, "measure_transfer", lambda _: TransferTime())
    devices = make_planner(file, Machine(hosts=1, devices=2, cores=None))
    times = {}
    for micro_batches in (4, 8):
        spec = devices.spec.override(["parallel=pipeline", f"parallel.micro_batches={micro_batches}", "workers=2"])
        busy_s = {(stage, way): 1.0 for stage in (0, 1) for way in ("forward", "backward")}
        runs = {0: RankStep({}, handed_bytes={0: 1.0}, times=StageTimes(busy_s=busy_s))}
        times[micro_batches] = devices._time_pipeline(spec, runs, 1.0, 0.0)
    for micro_batches, found in times.items():
        assert found.compute_s == pytest.approx(2.0)
        assert found.bubble_s / found.step_s == pytest.approx(1 / (micro_batches + 1))


def test_a_plan_that_does_not_apply_says_why_and_comes_last(file: Path) -> None:
    planner = make_planner(file, Machine(hosts=1, devices=2, cores=2), name="Recurrent")
    found = estimate_all(planner, "one device", "ddp=2", "tensor=2")
    last = list(found.values())[-1]
    assert not last.is_applicable
    assert found["tensor=2"].reason.startswith("not applicable: ")
    assert found["ddp=2"].is_possible


def test_a_batch_that_does_not_divide_is_not_applicable(file: Path) -> None:
    planner = make_planner(file, Machine(hosts=1, devices=3, cores=3))
    found = estimate_all(planner, "one device", "ddp=3", "parameter server, BSP")
    assert "batch_size" in found["ddp=3"].reason
    assert "batch_size" in found["parameter server, BSP"].reason
    assert found["one device"].is_possible


def test_estimates_are_sorted_by_time_then_memory_then_whether_they_apply() -> None:
    one, two, three, four = enumerate_candidates(1, 2, every=50)[:4]
    fast, slow = PlanEstimate(one, StepTime(1.0)), PlanEstimate(two, StepTime(2.0))
    large = PlanEstimate(three, StepTime(0.5), memory_bytes=9.0, problem="does not fit")
    never = PlanEstimate(four, problem="not applicable: x", is_applicable=False)
    assert sort_estimates([never, large, slow, fast]) == [fast, slow, large, never]


# -- what is measured


def test_this_machine_is_measured_with_the_task_s_own_steps(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_overrides([f"task={file}:Layers"])
    found = calibrate(spec, 2, samples=16, threads=1, has_server=True)
    assert (found.num_processes, found.samples) == (2, 16)
    assert min(found.alone.compute_s, found.together.compute_s, found.slowest.compute_s) > 0
    assert found.alone.optimizer_s < found.alone.compute_s
    assert found.slowest.compute_s > 0
    assert min(found.shared.latency_s, found.sockets.latency_s, found.call_s) > 0
    assert found.exchange_s is not None
    assert found.exchange_s > 0
    assert capfd.readouterr().out == ""  # what a Task prints is not part of a result


# -- what a user types


def test_the_command_ranks_and_says_what_to_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "calibrate", lambda *_, **__: CALIBRATION)
    monkeypatch.setattr(
        planner, "enumerate_candidates", lambda *given, **named: enumerate_candidates(*given, **named)[:3]
    )
    found, rank = list[list[PlanEstimate]](), planner.rank_plans
    monkeypatch.setattr(planner, "rank_plans", lambda *given: found.append(rank(*given)) or found[0])
    words = [f"{file}:Layers", "hosts=1", "devices=2", "batch_size=32", "device_memory=1GB"]
    printed = said("plan", *words)
    title, headings, *lines = printed.splitlines()
    assert title.endswith("batch of 32, 1 host(s)")
    assert headings.split() == ["plan", "workers", "step", "samples/s", "memory", "why"]
    assert any(line.startswith("ddp=2 ") and "communication" in line for line in lines)
    [best] = [line for line in lines if line.startswith("the fastest: shoal run train task=")]
    assert all(word in best for word in ("batch_size=32", "parallel=", "workers="))
    assert "opening the data" not in printed
    [estimates] = found
    monkeypatch.setattr(planner, "rank_plans", lambda *_: estimates)
    answer = json.loads(said("plan", *words, "--json"))
    assert answer["batch_size"] == 32
    steps = [each["step_s"] for each in answer["plans"] if each["is_possible"]]
    assert steps == sorted(steps)
    first = answer["plans"][0]
    assert first["samples_per_s"] == pytest.approx(32 / first["step_s"])


def test_nothing_fits_into_no_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "calibrate", lambda *_, **__: CALIBRATION)
    words = [f"{file}:Layers", "devices=1", "device_memory=1kB"]
    result = typed("plan", *words, is_caught=False)
    assert "does not fit: needs " in result.stdout
    assert "no plan fits" in result.stdout


def test_a_mistyped_override_is_a_config_error(file: Path) -> None:
    with pytest.raises(ConfigError, match="host") as error:
        said("plan", f"{file}:Layers", "host=4")
    assert error.value.field == "host"
