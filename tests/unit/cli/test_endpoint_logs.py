"""Which of Ray's files are an endpoint's, on which host, and which of their lines are shown."""

import httpx2
import pytest

from shoal.cli.support import endpoint_logs
from shoal.cli.support.endpoint_logs import EndpointLogs
from shoal.cluster.cluster_handle import ClusterHandle

CLUSTER = ClusterHandle("10.0.0.1:6379", "http://10.0.0.1:8265", "token", {})
FILES = {
    "worker-a-01-11.err": "m: version 1 failed (cf17)\n",
    "worker-b-01-12.out": "of another endpoint\n",
    "worker-c-01-13.out": "deploy m@1\nINFO 2026 serve 7 -- of Serve\n",
    "worker-d-02-11.err": "of another job, with the same process id\n",
}


def list_actors(host: str) -> list[dict[str, object]]:
    found = [("ServeReplica:shop:replica", "", 11), ("ServeReplica:shop2:replica", "", 12)]
    found.append(("ControllerWorker", "EndpointController:shop", 13))
    return [{"class_name": a, "repr_name": b, "pid": pid, "job_id": "01", "node_id": host} for a, b, pid in found]


def test_the_lines_of_an_endpoint_are_found_on_each_host_by_its_actors_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = {"n1": "ALIVE", "n2": "DEAD"}

    def answer(asked: httpx2.Request) -> httpx2.Response:
        path, query = asked.url.path, asked.url.params
        if path.endswith("/logs/file"):
            return httpx2.Response(200, text=f":job_id:01\n:actor_name:x\n{FILES[query['filename']]}")
        rows = [{"node_id": each, "node_name": f"{each}.example", "state": state} for each, state in hosts.items()]
        actors = [each for host in hosts for each in list_actors(host)]
        result = {"/api/v0/nodes": {"result": rows}, "/api/v0/actors": {"result": actors}}.get(path, {"all": [*FILES]})
        return httpx2.Response(200, json={"data": {"result": result}})

    monkeypatch.setattr(
        endpoint_logs, "connect", lambda _: httpx2.Client(base_url="http://h", transport=httpx2.MockTransport(answer))
    )
    reader = EndpointLogs(CLUSTER, "shop")
    lines = [("controller", "deploy m@1"), ("replica-11", "m: version 1 failed (cf17)")]
    assert reader.read_new_lines(is_over=False) == lines
    monkeypatch.setitem(FILES, "worker-a-01-11.err", FILES["worker-a-01-11.err"] + "more\nhalf a li")
    assert reader.read_new_lines(is_over=False) == [("replica-11", "more")]
    assert reader.read_new_lines(is_over=True) == [("replica-11", "half a li")]
    hosts["n2"] = "ALIVE"
    assert reader.read_new_lines(is_over=False)[0] == ("controller@n2.example", "deploy m@1")
