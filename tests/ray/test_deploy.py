"""What is left of an endpoint that did not come to be, or whose driver is gone; Serve is a fake, but in one test."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any, Self

import grpc
import numpy as np
import pytest

from shoal.client import Client
from shoal.client.discovery import FoundEndpoint, list_endpoints
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.cluster.growth import Growth, NodeType
from shoal.errors import ClusterError, ConfigError, ConnectionLost, InferenceError, RunError
from shoal.home import home
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.serve.controller.config import ControllerConfig, parse_actor_name
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
from shoal.weights import WeightSnapshot, WeightStore
from shoal_program import Program
from waiting import wait_for

STATE_TIMEOUT_S = 400.0
SERVER_METADATA = "/inference.GRPCInferenceService/ServerMetadata"
LIVING, GONE = "01000000", "02000000"
TENSOR = TensorSignature(name="x", datatype="FP32", shape=[-1, 1])
SIGNATURE = Signature(inputs=[TENSOR], outputs=[TENSOR])
MODEL = EndpointModel("m", LiveModel(ModelFactory(factory="torch.nn:Identity"), SIGNATURE, WeightStore()))


class FakeServe:
    """Ray Serve as `deploy` uses it. `fails` says which call raises what; `done` is what was asked, of others too."""

    def __init__(self, *applications: str, message: str = "the disk burns", **fails: BaseException) -> None:
        self.applications = {name: SimpleNamespace(deployments={}, status="RUNNING") for name in applications}
        self.fails = fails
        self.message = message
        self.done = list[str]()
        self.is_there = bool(applications)
        self.looks_until_gone: int | None = None

    http_config = SimpleNamespace(port=8000)

    def get_serve_details(self) -> dict[str, Any]:
        return {"grpc_options": {"port": 9000}}

    def has_serve(self) -> bool:
        if self.looks_until_gone is not None:
            self.looks_until_gone -= 1
            self.is_there = self.looks_until_gone > 0
        return self.is_there

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=self.applications)

    def start(self, **options: object) -> None:
        assert not self.is_there, "it would join one that is ending"
        self._call("start")

    def RunTarget(self, application: object, name: str, route_prefix: str) -> str:  # noqa: N802 - as Serve has it
        return name

    def run_many(self, targets: list[str], wait_for_applications_running: bool) -> list[object]:
        deployments = {"ReplicaWorker": SimpleNamespace(message=self.message, replica_states={})}
        self.applications[targets[0]] = SimpleNamespace(deployments=deployments, status="RUNNING")
        self.is_there = True
        self._call("run")
        return [object()]

    def delete(self, name: str) -> None:
        self._call("delete")
        self.applications.pop(name, None)

    def shutdown(self) -> None:
        self._call("shutdown")
        self.applications = {}
        self.looks_until_gone = 3

    def _call(self, name: str) -> None:
        self.done.append(name)
        if name in self.fails:
            raise self.fails[name]


@contextmanager
def faked(serve: FakeServe, actors: tuple[str, ...] = ()) -> Iterator[None]:
    """`shoal.serve.on_ray.deployment` on a cluster with these named actors, on which one driver lives."""
    from shoal.serve.on_ray import deployment, ownership, shared_cluster

    known = list(actors)

    class Controller:
        def __init__(self, setting: ControllerConfig) -> None:
            assert parse_actor_name(setting.actor_name) == (setting.name, LIVING)

            self._name = setting.actor_name

        def start(self) -> None:
            serve.done.append("make")
            known.append(self._name)

        def stop(self) -> None:
            serve.done.append("end")
            known.remove(self._name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (deployment, shared_cluster):
            patch.setattr(module, "serve", serve)
        patch.setattr(shared_cluster, "lock_serve", nullcontext)
        patch.setattr(deployment, "lock_serve", nullcontext)
        patch.setattr(shared_cluster, "shut_down_serve", serve.shutdown)
        patch.setattr(shared_cluster, "is_serve_running", serve.has_serve)
        patch.setattr(deployment, "RayControllerClient", Controller)
        patch.setattr(deployment, "build_application", lambda *arguments: None)
        patch.setattr(deployment, "find_growth", lambda: None)
        patch.setattr(deployment, "wait_until_routed", lambda spec: None)
        patch.setattr(deployment, "get_driver_id", lambda: LIVING)
        patch.setattr(ownership, "living_drivers", lambda: {LIVING})
        patch.setattr(ownership, "list_our_actors", lambda: known)
        patch.setattr(shared_cluster, "_get_global_client", lambda: serve)
        patch.setattr(ownership, "read_owner", lambda actor: "ada@head")
        patch.setattr(shared_cluster, "stop_controller", lambda actor: serve.done.append(f"end {actor}"))
        yield


def deploy(serve: FakeServe, *actors: str) -> Any:
    from shoal.serve.on_ray import deployment

    with faked(serve, actors):
        return deployment.deploy(EndpointSpec(name="shop", num_cpus=0.1), [MODEL])


@pytest.mark.parametrize(
    ("fails", "raised", "words"),
    [
        ({"run": KeyboardInterrupt()}, KeyboardInterrupt, ""),
        ({"start": KeyboardInterrupt()}, KeyboardInterrupt, ""),
        ({"run": RuntimeError("it failed")}, ClusterError, "'shop' did not start: the disk burns"),
        ({"start": TimeoutError("no proxies after 60 s")}, ClusterError, "'shop' did not start: no proxies after 60 s"),
    ],
)
def test_what_did_not_come_to_be_leaves_nothing(
    fails: dict[str, BaseException], raised: type[BaseException], words: str
) -> None:
    serve = FakeServe(**fails)
    with pytest.raises(raised, match=words or None):
        deploy(serve)
    assert serve.done[0] == "make"
    assert serve.done[-2:] == ["shutdown", "end"]  # a replica that asks for its controller makes one


def test_of_an_error_of_ours_there_is_no_traceback() -> None:
    message = (
        "failed 2 times in a row. Error:\nray::ServeReplica() (pid=1)\nshoal.errors.ShoalError: model 'm': no file"
    )
    with pytest.raises(ClusterError) as caught:
        deploy(FakeServe(message=message, run=RuntimeError("it failed")))
    assert str(caught.value) == "the endpoint 'shop' did not start: model 'm': no file"


def test_closing_goes_on_whatever_fails_and_does_nothing_twice() -> None:
    from shoal.serve.on_ray import deployment

    serve = FakeServe(delete=KeyboardInterrupt())
    with faked(serve):
        endpoint = deployment.deploy(EndpointSpec(name="shop", num_cpus=0.1), [MODEL])
        with pytest.raises(KeyboardInterrupt):
            endpoint.close()
        endpoint.close()
    assert serve.done == ["make", "start", "run", "delete", "shutdown", "end"]


def test_endpoints_of_one_process_end_serve_with_the_last_one() -> None:
    from shoal.serve.on_ray import deployment

    serve = FakeServe()
    with faked(serve):
        first, second = (deployment.deploy(EndpointSpec(name=name, num_cpus=0.1), [MODEL]) for name in ("shop", "b"))
        assert (first.url.count("/"), second.url) == (2, "http://127.0.0.1:8000/b")
        with pytest.raises(ConfigError, match=r"grpc_port = 0: is not that .* the first of them has no gRPC"):
            deployment.deploy(EndpointSpec(name="c", grpc_port=0), [MODEL])
        first.close()
        with pytest.raises(ConfigError, match="lifetime = 'detached': is not for an endpoint that follows the weights"):
            deployment.deploy(EndpointSpec(name="c", lifetime="detached"), [MODEL])
        second.close()
    assert serve.done == ["make", "start", "run", "make", "run", "delete", "end", "delete", "shutdown", "end"]


def test_an_endpoint_between_two_replicas_says_so_and_ends_nobody() -> None:
    from ray.serve.exceptions import DeploymentUnavailableError

    def broadcast(method: str) -> object:
        raise DeploymentUnavailableError(SimpleNamespace(name="replica", app_name="shop"))

    endpoint = deploy(FakeServe())
    endpoint._handle = SimpleNamespace(broadcast=broadcast)
    with pytest.raises(ClusterError, match="the replicas of 'shop' did not answer"):
        endpoint.stats()


def test_an_endpoint_whose_driver_is_gone_makes_room() -> None:
    serve = FakeServe("old")
    deploy(serve, f"endpoint-old-0a1b2c3d@{GONE}", "weights-of-a-run", "endpoint-apps-0a1b2c3d")
    assert serve.done == ["shutdown", f"end endpoint-old-0a1b2c3d@{GONE}", "make", "start", "run"]


def test_a_serve_that_is_ending_is_waited_for_and_one_that_stays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.on_ray import shared_cluster

    for ending in (FakeServe(), FakeServe("old")):
        ending.is_there, ending.looks_until_gone = True, 4
        for application in ending.applications.values():
            application.status = "DELETING"
        deploy(ending)
        assert ending.done == ["make", "start", "run"]
    stays = FakeServe()
    stays.is_there = True
    monkeypatch.setattr(shared_cluster, "SHUTDOWN_TIMEOUT_S", 0.0)
    with pytest.raises(ClusterError, match=r"Serve runs on this cluster \(without an application\)"):
        deploy(stays)
    assert stays.done == []


def test_a_name_that_is_taken_is_refused_before_anything_starts() -> None:
    from shoal.serve.on_ray.ownership import require_free_name

    refusal = pytest.raises(
        ConfigError, match=r"'old': is the name of an endpoint of ada@head.*`shoal serve delete old`"
    )
    with faked(FakeServe(), (f"endpoint-old-0a1b2c3d@{LIVING}",)), refusal:
        require_free_name("old")
    with faked(FakeServe(), (f"endpoint-old-0a1b2c3d@{LIVING}",)):
        require_free_name("new")
    with faked(FakeServe(), (f"endpoint-old-0a1b2c3d@{GONE}", "weights-of-a-run")):
        require_free_name("old")  # it makes room


def test_a_controller_whose_endpoint_never_came_to_be_is_ended() -> None:
    serve = FakeServe()
    deploy(serve, f"endpoint-old-0a1b2c3d@{GONE}")
    assert serve.done == [f"end endpoint-old-0a1b2c3d@{GONE}", "make", "start", "run"]


@pytest.mark.parametrize(
    ("applications", "actors"),
    [
        (["old"], ["endpoint-old-0a1b2c3d"]),  # Serve's own, of a file
        (["old", "other"], [f"endpoint-old-0a1b2c3d@{GONE}"]),
        (["other"], []),
    ],
)
def test_what_somebody_keeps_up_stays(applications: list[str], actors: list[str]) -> None:
    serve = FakeServe(*applications)
    with pytest.raises(
        ClusterError, match=rf"\({', '.join(applications)}\), and not for `shoal serve deploy`.*serve shutdown"
    ):
        deploy(serve, *actors)
    assert serve.done == []


def test_an_endpoint_is_closed_also_when_its_record_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.flows import serving
    from shoal.flows.serving_spec import ServingSpec

    done: list[str] = []

    def record(name: str, kind: str, address: str, state: str) -> None:
        raise RunError("the record is locked")

    @contextmanager
    def create(job: str, spec: str, *arguments: object, **options: object) -> Iterator[SimpleNamespace]:
        assert "  name: m\n" in spec  # lists call the run by its endpoint
        yield SimpleNamespace(record_endpoint=record)

    endpoint = SimpleNamespace(
        name="m", url="http://127.0.0.1:1", grpc="", close=lambda: done.append("close"), status=lambda: {"models": []}
    )
    for name in ("check", "require_importable", "require_cpus"):
        monkeypatch.setattr(serving, name, lambda *asked: None)
    monkeypatch.setattr(serving, "model_from_ref", lambda ref: MODEL)
    monkeypatch.setattr("shoal.serve.on_ray.deployment.deploy", lambda spec, models, record: endpoint)
    monkeypatch.setattr("shoal.runs.create", create)
    with pytest.raises(RunError, match="the record is locked"):
        serving.serve_models(ServingSpec(models=["m@1"]), "serve")
    assert done == ["close"]


def test_a_change_that_cannot_be_recorded_now_ends_no_endpoint() -> None:
    from shoal.flows.serving import record_changes
    from shoal.serve.controller.state import Event

    told: list[str] = []

    def event(kind: str, **details: object) -> None:
        told.append(kind)
        raise RunError("the record is locked")  # which has kept it

    endpoint = SimpleNamespace(take_events=lambda: [Event(1, 0.0, "canary", "m"), Event(2, 0.0, "rollback", "m")])
    record_changes(endpoint, SimpleNamespace(record_event=event))  # type: ignore[arg-type]
    assert told == ["canary", "rollback"]


def test_an_endpoint_that_the_cluster_has_no_room_for_names_its_own_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.flows import serving
    from shoal.flows.serving_spec import ServingSpec

    for name in ("check", "require_importable"):
        monkeypatch.setattr(serving, name, lambda spec: None)
    monkeypatch.setattr(serving, "model_from_ref", lambda ref: MODEL)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr("shoal.cluster.capacity.find_growth", lambda: Growth({}))
    with pytest.raises(ConfigError) as caught:
        serving.serve_models(ServingSpec(models=["m@1"]).override(["endpoint.num_cpus=100"]), "serve")
    assert caught.value.problem == "is more than the 2 of the cluster"
    assert caught.value.remedy == "lower endpoint.num_cpus or endpoint.num_replicas, or use a larger cluster"


CUDA = {"device": "cuda"}


@pytest.mark.parametrize(
    ("by_host", "values", "reserved"),
    [
        ([0.0], {"model": CUDA}, 0.0),  # each replica says that there is no CUDA device
        ([4.0], {}, 0.0),  # auto may be the CPU
        ([4.0], {"num_gpus": 0.5}, 0.5),
        ([4.0], {"model": CUDA, "num_gpus": 0}, 0.0),
        ([4.0], {"model": CUDA}, 1.0),
        ([1.0], {"model": CUDA, "num_replicas": 2}, 0.5),
        ([1.0], {"models": {"m": {"cuda_graphs": True}}, "num_replicas": 3}, 0.3333),
        ([1.0, 1.0], {"model": CUDA, "scale": {"max": 3}}, 0.5),
    ],
)
def test_gpus_are_shared_by_the_replicas_of_a_model_that_needs_one(
    by_host: list[float], values: dict[str, object], reserved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.cluster.capacity import count_gpu_slots
    from shoal.serve.on_ray.deployment import resolve_gpus
    from shoal.serve.on_ray.options import deployment_options

    hosts_with(by_host, monkeypatch)
    spec = resolve_gpus(EndpointSpec.parse({"name": "m", **values}))
    assert spec.num_gpus == reserved
    assert deployment_options(spec)["ray_actor_options"].get("num_gpus", 0.0) == reserved
    assert not reserved or count_gpu_slots(reserved, by_host) >= spec.most_replicas


@pytest.mark.parametrize(
    ("by_host", "num_gpus", "replicas", "problem"),
    [
        ([0.0], 1.0, 1, "the cluster has 0 GPUs, which is room for 0 of 1 workers"),
        ([1.0], 0.6, 2, "the cluster has 1 GPUs, which is room for 1 of 2 workers"),
        ([1.0, 1.0], 2.0, 1, "the cluster has 2 GPUs, which is room for 0 of 1 workers"),
    ],
)
def test_gpus_that_the_cluster_has_not_are_refused_at_once(
    by_host: list[float], num_gpus: float, replicas: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.serve.on_ray import deployment

    hosts_with(by_host, monkeypatch)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    spec = EndpointSpec(name="m", num_gpus=num_gpus, num_replicas=replicas)
    with pytest.raises(ConfigError) as caught:
        deployment.deploy(spec, [MODEL])
    assert (caught.value.field, caught.value.problem) == ("num_gpus", problem)
    assert caught.value.remedy == "lower endpoint.num_gpus or endpoint.num_replicas, or use a larger cluster"


def hosts_with(gpus: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, **({"GPU": each} if each else {})}} for each in gpus]
    monkeypatch.setattr("ray.nodes", lambda: [*nodes, {"Alive": False, "Resources": {"GPU": 8.0}}])
    monkeypatch.setattr("shoal.cluster.capacity.find_growth", lambda: Growth({}))


def test_replicas_may_wait_for_nodes_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.on_ray.deployment import resolve_gpus

    hosts_with([0.0], monkeypatch)
    growth = Growth({"CPU": 4.0}, (NodeType("gpus", {"CPU": 2.0, "GPU": 1.0}, 2),))
    monkeypatch.setattr("shoal.cluster.capacity.find_growth", lambda: growth)
    assert resolve_gpus(EndpointSpec.parse({"name": "m", "model": CUDA, "num_replicas": 2})).num_gpus == 1.0
    assert resolve_gpus(EndpointSpec.parse({"name": "m", "model": CUDA, "num_replicas": 4})).num_gpus == 0.5
    with pytest.raises(
        ConfigError, match=r"room for 0 of 2 .* its autoscaler may add no more than 2 gpus \(2 CPU, 1 GPU\)"
    ):
        resolve_gpus(EndpointSpec.parse({"name": "m", "num_gpus": 1, "num_cpus": 3, "num_replicas": 2}))


@pytest.mark.parametrize("is_installed", [True, False])
def test_grpc_is_refused_where_uvicorn_has_no_way_for_it(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.on_ray import replica_worker

    handed: list[object] = []

    def install(application: object) -> bool:
        handed.append(application)
        return is_installed

    monkeypatch.setattr("shoal.serve.http.fast_path.install_application", install)
    entrance: Any = object()
    replica_worker.install_fast_path(EndpointSpec(name="m"), entrance)
    replica_worker.install_fast_path(EndpointSpec.parse({"name": "m", "scale": {"max": 2}}), entrance)
    assert handed == [entrance, entrance]
    with_grpc = EndpointSpec(name="m", grpc_port=0)
    if is_installed:
        replica_worker.install_fast_path(with_grpc, entrance)
        return
    with pytest.raises(ConfigError, match="gRPC needs a class of uvicorn's"):
        replica_worker.install_fast_path(with_grpc, entrance)


SHARED_DRIVER = """
import json, sys, ray
ray.init(namespace="shoal", log_to_driver=False)
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.on_ray.deployment import deploy
from shoal.serve.spec.model_source import model_from_ref
spec = EndpointSpec.parse({"num_cpus": 0.1, "grpc_port": 0, **json.loads(sys.argv[1])})
endpoint = deploy(spec, [model_from_ref("shared@1")])
print(endpoint.url, endpoint.grpc, flush=True)
if not endpoint.is_detached:
    sys.stdin.read()
    endpoint.close()
print("closed", flush=True)
"""


class Load:
    """Calls an endpoint without a pause, and retries nothing; `errors` of all calls."""

    def __init__(self, url: str, key: str) -> None:
        self.errors = list[Exception]()
        self.num_answers = 0
        self._is_ending = False
        self._url, self._key = url, key
        self._thread = Thread(target=self._call)

    def _call(self) -> None:
        with Client(self._url, token=self._key, num_retries=0) as client:
            while not self._is_ending:
                try:
                    client.infer("shared", np.array([[3.0]], np.float32))
                    self.num_answers += 1
                except (ConnectionLost, InferenceError) as error:
                    self.errors.append(error)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._thread.join()


def start_driver(name: str, **fields: object) -> Program:
    spec = {"name": name, "token": f"token-of-{name}-0123456789", **fields}
    return Program([sys.executable, "-c", SHARED_DRIVER, json.dumps(spec)], stdin=subprocess.PIPE)


def call_grpc(address: str, key: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """The code of a call that needs the key, to what the metadata names."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(SERVER_METADATA, request_serializer=None, response_deserializer=None)
        try:
            call(b"", metadata=[("authorization", f"Bearer {key}"), *metadata], timeout=STATE_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return,attr-defined]
    return grpc.StatusCode.OK


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Serve's own specs
def test_endpoints_share_a_cluster_and_none_disturbs_another(cluster: EmbeddedCluster) -> None:
    from shoal.serve.on_ray import deployment, ownership
    from shoal.serve.on_ray.shared_cluster import end_endpoint

    weights = WeightSnapshot.of(1, {"weight": np.ones((1, 1), np.float32), "bias": np.zeros(1, np.float32)})
    linear = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 1, "out_features": 1})
    Registry().register("shared", weights, model=linear, signature=SIGNATURE)
    present = ownership.living_drivers()
    drivers = {name: start_driver(name) for name in ("one", "two")}
    with drivers["one"] as one, drivers["two"] as two:  # both at once
        found = {name: each.wait_for_line("^http://.*")[0].split() for name, each in drivers.items()}
        root, other = sorted(found, key=lambda name: len(found[name][0]))  # one has the root, whichever was first
        assert found[other] == [f"{found[root][0]}/{other}", found[root][1]]
        keys = {name: f"token-of-{name}-0123456789" for name in (root, other, "three", "four")}
        for name, (url, address) in found.items():
            with Client(url, token=keys[name]) as client:
                status = client.status()
                assert (status.endpoint, status.models[0].name, status.lifetime) == (name, "shared", "driver")
                assert re.fullmatch(r"\S+@\S+", status.owner)
            with Client(url, token=keys[root if name == other else other]) as client:
                with pytest.raises(InferenceError, match="a known key is required") as refused:
                    client.infer("shared", np.array([[3.0]], np.float32))
                assert refused.value.status == 401
            assert call_grpc(address, keys[name], ("application", name)) == grpc.StatusCode.OK
        assert call_grpc(address, keys[root]) == grpc.StatusCode.OK  # as before the other one came
        assert call_grpc(address, keys[other]) == grpc.StatusCode.UNAUTHENTICATED
        assert call_grpc(address, keys[other], ("application", "none")) == grpc.StatusCode.UNAVAILABLE
        for fields, problem in (
            (
                {"port": 1},
                "endpoint.port = 1: is not that of the cluster's endpoints, which share one address: theirs is",
            ),
            ({"grpc_port": 1}, "endpoint.grpc_port = 1: is not that of the cluster's endpoints"),
            ({"host": "::1"}, "endpoint.host = '::1': is not that of the endpoint whose address it shares"),
            ({"name": "v2"}, "endpoint.name = 'v2': is a path of the endpoint that has the root"),
            (
                {"name": root},
                f"'{root}': is the name of an endpoint of .* set {root} .*, or end that one first: .* delete {root}",
            ),
        ):
            with pytest.raises(ConfigError, match=problem):
                deployment.deploy(EndpointSpec.parse({"name": "refused", **fields}), [model_from_ref("shared@1")])
        with Load(found[root][0], keys[root]) as load:
            killed = two if other == "two" else one
            killed.process.kill()
            killed.wait()
            wait_for(lambda: other in ownership.list_driver_endpoints().abandoned, STATE_TIMEOUT_S, "the driver's end")
            living = ownership.living_drivers()
            with start_driver("three", lifetime="detached") as three:
                url = three.wait_for_line("^http://.*")[0].split()[0]
                three.wait()
            wait_for(lambda: ownership.living_drivers() <= living, STATE_TIMEOUT_S, "the driver's end")
            assert other not in ownership.list_driver_endpoints().abandoned  # the next one has removed it
            assert [each for each in list_endpoints() if each.is_detached] == [FoundEndpoint("three", url, "", True)]
            with Client(url, token=keys["three"]) as client:
                assert client.infer("shared", np.array([[4.0]], np.float32))["x"].tolist() == [[4.0]]
                assert client.status().lifetime == "detached"
            end_endpoint("three")
            with Client(url, token=keys["three"], num_retries=0) as client, pytest.raises(InferenceError):
                client.status()
            assert list_endpoints() == []
            seen = load.num_answers
            wait_for(lambda: load.num_answers > seen or load.errors, STATE_TIMEOUT_S, "an answer")
        assert not load.errors
        staying = one if other == "two" else two
        staying.process.kill()
        staying.wait()
        wait_for(lambda: ownership.living_drivers() <= present, STATE_TIMEOUT_S, "the driver's end")
    last = deployment.deploy(EndpointSpec(name="last", num_cpus=0.1), [model_from_ref("shared@1")])
    with closing(last):
        assert [each.name.partition("-")[0] for each in (home() / "endpoints").glob("*.json")] == ["last"]
        with Client(last.url) as client:
            assert client.metadata("shared").name == "shared"
        with Client(found[root][0], timeout_s=5.0) as client, pytest.raises(ConnectionLost):
            client.metadata("shared")
    assert not ownership.is_serve_running()
    assert not [*(home() / "endpoints").glob("*.json")]
