"""The console's endpoints, *Try it*, models and cluster, at the border of HTTP: an endpoint without models, a registry,
a dashboard that answers what Ray's does."""

import contextlib
import io
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from answering import answering
from console_rig import open_console
from python_program import run_python
from registered import tensors
from serving import table_model
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.client.endpoint_status import EndpointStatus, EvidenceStatus, ModelStatus, VersionStatus
from shoal.home import home
from shoal.libs.console.serving import endpoints_api, readings
from shoal.libs.console.serving.readings import SharedReading
from shoal.libs.console.serving.try_api import REQUEST_FILE, write_code
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.runs import create
from shoal.runs.event_messages import WAITING
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot
from waiting import wait_for

NO_BATCH = {"max_batch_size": 0}
FORMS = {"since": {"kind": "date:%d.%m.%Y"}, "balance": {"kind": "number:,"}}
MODELS: dict[str, tuple[list[TensorSignature], dict[str, Any]]] = {
    "table": ([each.model_copy(update=FORMS.get(each.name)) for each in table_model.SIGNATURE.inputs], {}),
    "named": ([TensorSignature(name="x", datatype="FP32", shape=[-1, 2], columns=["it's", "b"])], {}),
    "policy": (tensors(observation=("FP32", [-1, 4]), mask=("BOOL", [-1, 2])), {}),
    "picture": (tensors(image=("FP32", [-1, 1, 28, 28])), {}),
    "texts": (tensors(words=("BYTES", [-1])), {}),
    "alone": (tensors(x=("FP32", [2, 3]), rate=("INT64", [])), NO_BATCH),
    "later": (tensors(x=("FP32", [2, -1])), {"batch_dim": {"x": 1}}),
}
STATUS = EndpointStatus(
    "shop",
    models=[
        ModelStatus(
            "table",
            source="table@champion",
            stable=7,
            candidate=8,
            versions=[VersionStatus(7, "stable", 0.9, 1200), VersionStatus(8, "candidate", 0.1, 34)],
            evidence=EvidenceStatus(requests=34, errors=1, stable_requests=300, min_requests=50),
        )
    ],
)


class Host(FakeHost):
    """Records who changes what; `status` says how it is."""

    async def administer(self, change: Mapping[str, Any], by: str = "") -> dict[str, Any]:
        await super().administer(change, by)
        self.changes[-1]["by"] = by
        return {"name": change["model"]}

    async def status(self) -> dict[str, Any]:
        document: dict[str, Any] = msgspec.to_builtins(STATUS)
        return document


@pytest.fixture(autouse=True)
def _patient_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading is waited for, however slow the machine."""
    monkeypatch.setattr(readings, "FIRST_PATIENCE_S", 600.0)


@pytest.fixture
def host() -> Iterator[Host]:
    """The endpoint `shop` of this host."""
    (home() / "token").write_text(TOKEN)
    models = [FakeModel(name, each, options=ModelOptions(**options)) for name, (each, options) in MODELS.items()]
    with served(host := Host(*models)) as (url, _):
        card = {"name": "shop", "url": url, "pid": os.getpid(), "host": socket.gethostname()}
        (home() / "endpoints").mkdir()
        (home() / "endpoints" / "shop.address").write_text(json.dumps(card))
        yield host


MODEL = "/api/endpoints/shop/models"


def run_here(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue()


def run_curl(line: str) -> Any:
    return json.loads(subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True).stdout)


def test_a_batch_in_another_dimension_is_seen(host: Host) -> None:
    found = open_console().get(f"{MODEL}/later/request").json()
    assert (found["action"], found["request"]["inputs"][0]["shape"]) == ("infer", [2, 1])


@pytest.mark.parametrize("model", ["table", "named", "policy", "texts", "alone"])
def test_the_suggested_request_is_answered_and_so_is_its_code(host: Host, model: str) -> None:
    console = open_console()
    found = console.get(f"{MODEL}/{model}/request").json()
    assert found["action"] == ("infer" if MODELS[model][1] else "rows")
    sent = console.post(f"{MODEL}/{model}/try?action={found['action']}&version=7", content=json.dumps(found["request"]))
    answered = sent.json()
    assert answered["version"] == "7"
    assert 0.0 < answered["took_s"] < 60.0
    assert TOKEN not in json.dumps(found)
    assert run_curl(found["code"]["curl"]) == answered["answer"]
    printed = run_here(found["code"]["python"])
    assert eval(printed) == answered["answer"] if found["action"] == "rows" else printed.startswith("7 {")
    assert len(host.models_by_name[model].calls) == 3


def test_the_code_in_javascript_runs(host: Host) -> None:
    code = open_console().get(f"{MODEL}/named/request").json()["code"]["javascript"]
    environment = {**os.environ, "SHOAL_TOKEN": TOKEN}
    command = ["node", "--input-type=module", "-e", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == 'version 7 { x: { "it\'s": 0, b: 0 } }\n'


@pytest.mark.parametrize("model", ["picture", "alone"])
def test_a_long_request_is_in_a_file_beside_the_code(
    host: Host, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.libs.console.serving.try_api.MAX_INLINE_CHARS", 10)
    console = open_console()
    found = console.get(f"{MODEL}/{model}/request").json()
    query = f"?action={found['action']}&version=7"
    code = console.post(f"{MODEL}/{model}/code{query}", content=json.dumps(found["request"])).json()
    assert code["file"] == REQUEST_FILE
    Path(REQUEST_FILE).write_text(json.dumps(found["request"]))
    assert "error" not in run_curl(code["curl"])
    assert run_here(code["python"])
    assert all("/versions/7/" in code[each] for each in ("curl", "javascript"))


def test_code_quotes_what_it_has_to(tmp_path: Path) -> None:
    """A model's name and the values are the user's: none of them ends a text of the code."""
    code = write_code("http://h:1", "m", "rows", {"it's": 'a "word" `$(id)`\n</script>'})
    subprocess.run(["sh", "-nc", code["curl"]], check=True)
    compile(code["python"], "code", "exec")
    (tmp_path / "request.mjs").write_text(code["javascript"])
    subprocess.run(["node", "--check", str(tmp_path / "request.mjs")], check=True)


def test_a_picture_becomes_the_values_of_a_row(host: Host) -> None:
    console, file = open_console(), io.BytesIO()
    picture = np.zeros((56, 56), np.uint8)
    picture[:28] = 255
    Image.fromarray(picture).save(file, "PNG")
    values = console.post(f"{MODEL}/picture/picture?input=image&white=2", content=file.getvalue()).json()
    assert np.shape(values) == (1, 28, 28)
    assert (values[0][0][0], values[0][27][27]) == (2.0, 0.0)
    for query, content, words in [
        ("input=image&name=a.png", b"no picture", "'a.png': is no picture"),
        ("input=other", file.getvalue(), "is no input of the model: it has image"),
        ("input=image&white=x", file.getvalue(), "is no number of a pixel"),
    ]:
        refused = console.post(f"{MODEL}/picture/picture?{query}", content=content)
        assert refused.status_code == 400
        assert words in refused.json()["error"].replace(". ", ": ")


def test_what_the_endpoint_refuses_is_shown(host: Host) -> None:
    console = open_console()
    for model, body, words in [("table", "{}", "is missing"), ("table", "{", "not a row"), ("gone", "{}", "no model")]:
        refused = console.post(f"{MODEL}/{model}/try?action=rows", content=body)
        assert words in refused.json()["error"]
    for query in ("action=load", "action=rows&version=../7"):
        assert console.post(f"{MODEL}/table/try?{query}", content="{}").status_code == 400


def test_changes_are_the_consoles_and_of_those_who_logged_in(host: Host) -> None:
    console, stranger = open_console(), open_console(logged_in=False)
    change = {"action": "promote", "version": 8}
    for path in ("try?action=rows", "rollout", "picture?input=image", "code?action=rows"):
        assert stranger.post(f"{MODEL}/table/{path}", json=change).status_code == 401
    for path in ("audit", "logs"):
        assert stranger.get(f"/api/endpoints/shop/{path}").status_code == 401
    assert stranger.get("/api/endpoints").status_code == 200
    assert not host.changes
    assert console.post(f"{MODEL}/table/rollout", json=change).json()["name"] == "table"
    assert host.changes == [{"model": "table", **change, "by": "administrator (console)"}]
    for action in ("delete", "deploy", None):
        assert console.post(f"{MODEL}/table/rollout", json={"action": action}).status_code == 400
    log = [{"endpoint": each, "by": str(number)} for number, each in enumerate(("shop", "other", "shop"))]
    (home() / "audit.jsonl").write_text("".join(json.dumps(each) + "\n" for each in log))
    assert [each["by"] for each in console.get("/api/endpoints/shop/audit").json()] == ["2", "0"]


def test_an_endpoint_is_shown_with_its_evidence_and_without_its_token(host: Host) -> None:
    console = open_console(logged_in=False)
    (found,) = console.get("/api/endpoints").json()
    assert found["name"] == console.get("/api/endpoints/shop").json()["name"] == "shop"
    assert msgspec.convert(found["status"], EndpointStatus) == STATUS
    assert TOKEN not in json.dumps(found)
    assert "there is no endpoint 'other' here now: shop" in console.get("/api/endpoints/other").json()["error"]


def test_an_endpoint_that_does_not_answer_is_listed_with_the_reason() -> None:
    (home() / "endpoints").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    card = {"name": "gone", "url": f"http://127.0.0.1:{port}", "pid": os.getpid(), "host": socket.gethostname()}
    (home() / "endpoints" / "gone.address").write_text(json.dumps(card))
    (found,) = open_console().get("/api/endpoints").json()
    assert (found["name"], found["status"]) == ("gone", None)
    assert "cannot be reached" in found["problem"]


# -- readings ---------------------------------------------------------------------------------------------------------


def test_a_slow_reading_is_one_for_all_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "PATIENCE_S", 0.0)
    gate, begun = threading.Event(), [0]

    def read() -> int:
        begun[0] += 1
        if begun[0] > 1:
            assert gate.wait(60.0)
        return begun[0]

    reading = SharedReading(read)
    assert reading.get() == 1  # the first one is waited for
    assert (reading.get(), begun) == (1, [1])  # fresh
    reading.forget()
    assert [reading.get() for _ in range(5)] == [1] * 5
    assert begun == [2]
    gate.set()
    wait_for(lambda: reading.value == 2)


# -- models -----------------------------------------------------------------------------------------------------------


def register(name: str = "table", **more: Any) -> int:
    found = Registry().register(
        name,
        WeightSnapshot.of(3, {"weight": np.zeros(1, np.float32)}),
        model=ModelFactory(factory="mine:clean"),
        signature=Signature(inputs=table_model.SIGNATURE.inputs, outputs=[]),
        **more,
    )
    return found.version


def test_models_are_listed_shown_and_promoted() -> None:
    for accuracy in (0.5, 0.75):
        register(metrics={"accuracy": accuracy}, aliases=["champion"])
    console = open_console()
    rows = console.get("/api/models").json()
    assert [(each["version"], each["aliases"], each["metrics"]["accuracy"]) for each in rows] == [
        (1, [], 0.5),
        (2, ["champion"], 0.75),
    ]
    detail = console.get("/api/models/table/2").json()
    assert [each["name"] for each in detail["signature"]["inputs"]] == list(table_model.COLUMNS)
    promoted = console.post("/api/models/table/1/promote", json={"alias": "stable"}).json()
    assert promoted == {"aliases": ["stable"]}
    assert console.post("/api/models/table/aliases/champion/rollback", json={}).json() == {"version": 1}
    moves = console.get("/api/models/table").json()["moves"]
    assert [(each["version"], each["kind"]) for each in moves["champion"]] == [
        (1, "promote"),
        (2, "promote"),
        (1, "rollback"),
    ]
    for path, fields in [
        ("table/9/promote", {}),
        ("table/1/promote", {"alias": "7"}),
        ("table/1/promote", {"alias": 7}),
    ]:
        assert console.post(f"/api/models/{path}", json=fields).status_code in (400, 404)
    assert open_console(logged_in=False).post("/api/models/table/1/promote", json={}).status_code == 401


def test_lineage_goes_from_the_run_to_the_requests(host: Host) -> None:
    for _ in range(20):
        register(aliases=[])
    with create("training", "task: none") as recorder:
        recorder.record_weights(3, 400, "0" * 64, 1.0)
        for _ in range(2):
            register(run_id=recorder.id, lineage={"teacher": "table@1", "lr": 0.1}, aliases=[])
    for _ in range(2):
        Registry().promote("table@7", "champion")
    Registry().promote("table@22", "candidate")
    found = open_console().get("/api/models/table/lineage").json()
    nodes = {each["id"]: each for each in found["nodes"]}
    edges = {tuple(each) for each in found["edges"]}
    run, weights = f"run {recorder.id}", f"checkpoint {recorder.id} 3"
    assert edges == {
        (run, weights),
        *((weights, f"version {number}") for number in (21, 22)),
        *(("base table@1", f"version {number}") for number in (21, 22)),
        ("version 7", "alias champion"),
        ("version 22", "alias candidate"),
        ("alias champion", "endpoint shop"),
        ("version 8", "endpoint shop"),
        ("endpoint shop", "requests shop 7"),
        ("endpoint shop", "requests shop 8"),
    }
    assert nodes[weights]["note"] == "step 400"
    assert nodes["requests shop 7"]["label"] == "1,200 requests"
    assert nodes["requests shop 8"]["to"] == "endpoints/shop/table"
    assert nodes["version 7"]["to"] == "models/table/7"
    assert open_console().get("/api/models/table/21").json()["run"]["name"] == "training none"
    assert found["left_out"] == 22 - len([each for each in nodes if each.startswith("version")]) == 22 - 14


def test_versions_that_a_run_numbers_are_not_taken_for_those_of_the_registry(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = msgspec.structs.replace(STATUS.models[0], phase="live")
    monkeypatch.setitem(globals(), "STATUS", msgspec.structs.replace(STATUS, models=[followed]))
    register(aliases=[])
    found = open_console().get("/api/models/table/lineage").json()
    assert [each["id"] for each in found["nodes"]] == ["version 1"]


# -- cluster ----------------------------------------------------------------------------------------------------------

NODE = {
    "hostname": "gpu-1",
    "cpu": 12.5,
    "mem": [100, 60, 40.0, 40],
    "gpus": [{"name": "H200", "utilizationGpu": 30, "memoryUsed": 1, "memoryTotal": 4}],
    "raylet": {
        "nodeId": "n1",
        "nodeManagerAddress": "10.0.0.7",
        "state": "ALIVE",
        "isHeadNode": True,
        "startTimeMs": "1000",
        "resourcesTotal": {"CPU": 16.0, "GPU": 1.0, "memory": 64.0},
    },
}


def list_answer(*found: Mapping[str, Any]) -> dict[str, Any]:
    return {"data": {"result": {"result": found}}}


ANSWERS: dict[str, Any] = {
    "/nodes": {"data": {"summary": [NODE, {**NODE, "raylet": {"state": "DEAD"}}]}},
    "/api/jobs/": [
        {"submission_id": "run-1", "job_id": "01", "status": "RUNNING", "entrypoint": "x --token=s3cret",
         "runtime_env": {"env_vars": {"SHOAL_TOKEN": "s3cret", "SHOAL_RUN_ID": "2026-a"}}},
        {"submission_id": None, "job_id": "02", "status": "RUNNING", "entrypoint": "",
         "driver_info": {"node_ip_address": "10.0.0.7", "pid": str(os.getpid())}},
    ],
    "/api/v0/actors": list_answer(
        {"job_id": "01", "node_id": "n1", "class_name": "Worker", "placement_group_id": "p",
         "required_resources": {"CPU": 1}},
        {"job_id": "01", "node_id": "n1", "class_name": "ServeReplica:shop:replica", "placement_group_id": None,
         "required_resources": {"CPU": 0.5}},
    ),
    "/api/v0/placement_groups": list_answer(
        {"creator_job_id": "01", "bundles": [{"node_id": "n1", "unit_resources": {"CPU": 2.0, "GPU": 1.0}}]},
    ),
}  # fmt: skip


def test_a_cluster_is_shown_with_who_has_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-1")
    with create("training", "task: none", "mine"), answering(ANSWERS.get) as server:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", server.url)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "ray-token")
        found = open_console(logged_in=False).get("/api/cluster").json()
    (cluster,) = found["clusters"]
    (node,) = cluster["nodes"]
    (reservation,) = cluster["reservations"]
    assert (node["host"], node["num_gpus"], node["memory_used_bytes"]) == ("gpu-1", 1.0, 40)
    assert node["gpus"] == [{"name": "H200", "percent": 30, "memory_used_bytes": 1 << 20, "memory_bytes": 4 << 20}]
    assert reservation == {
        "job": "run-1",
        "run": "2026-a",
        "node": "n1",
        "resources": {"CPU": 2.5, "GPU": 1.0},
        "processes": {"Worker": 1, "ServeReplica": 1},
    }
    assert [(each["id"], each["run"]) for each in cluster["jobs"]] == [("run-1", "2026-a"), ("02", "mine")]
    assert not any(secret in json.dumps(found) for secret in ("s3cret", "ray-token", TOKEN))


def test_a_cluster_that_does_not_answer_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(lambda path: None) as server:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", server.url)
        (cluster,) = open_console().get("/api/cluster").json()["clusters"]
    assert (cluster["dashboard_url"], "answered 500" in cluster["problem"]) == (server.url, True)


def test_without_a_cluster_nothing_of_ray_is_loaded() -> None:
    """Nor torch: the console starts at once, and stays small."""
    code = """
import sys
from shoal.libs.console.server import build_app
from shoal.libs.console.access import Access
from starlette.testclient import TestClient
console = TestClient(build_app(Access("t", port=8267)), base_url="http://localhost:8267")
for page in ("models", "endpoints", "cluster", "runs"):
    assert console.get(f"/api/{page}").status_code == 200, page
assert console.get("/api/cluster").json()["clusters"] == []
assert not {"ray", "torch", "pandas"} & set(sys.modules), {"ray", "torch", "pandas"} & set(sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run_python(code, env=environment)


def test_runs_that_wait_are_listed_in_their_order() -> None:
    needs = {"owner": "ada", "priority": 0, "since_s": 1.0, "needs": {"GPU": 2.0}, "reason": "no GPU is free"} | {
        "wait_s": 60.0
    }
    with create("training", "task: none") as first, create("training", "task: none") as second:
        for position, recorder in ((2, first), (1, second)):
            recorder.record_event(WAITING, position=position, **needs)
            recorder.flush()
        queue = endpoints_api.read_clusters()["queue"]
    assert [(each["position"], each["owner"], each["needs"]) for each in queue] == [
        (1, "ada", {"GPU": 2.0}),
        (2, "ada", {"GPU": 2.0}),
    ]
