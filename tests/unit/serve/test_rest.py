"""The protocol over HTTP beside inferences, as a bare ASGI application: paths, methods, keys, limits, changes."""

import asyncio
import json

import pytest

from registered import tensors
from serving.asgi import Client, client, refused
from serving.fake_host import FakeHost, FakeModel
from shoal.errors import Closed, InferenceError, error_summary, summarize_error
from shoal.open_inference.episodes import EPISODES_PATH
from shoal.serve.http.app import RestApp
from shoal.serve.http.response import build_error_response
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_lifecycle import EndpointApp
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.api_key import ApiKey
from shoal.serve.spec.model_options import ModelOptions

ROW = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3.5]}]}


def two_models() -> FakeHost:
    return FakeHost(FakeModel("m", versions=(3, 7)), FakeModel("n", tensors(t=("BYTES", [-1, 2]))))


def test_the_server_says_what_it_is() -> None:
    subject = client()
    assert subject.get("/v2").body == {
        "name": "shoal",
        "version": "2",
        "extensions": ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
    }
    assert subject.get("/v2/").status == 200
    assert subject.get("/v2/health/live").body == {"live": True}
    assert subject.get("/v2/health/ready").body == {"ready": True}
    assert subject.get("/nothing").status == 404
    assert subject.app.get_status_counts() == {200: 4, 404: 1}


def test_a_model_says_what_it_takes_and_which_versions_there_are() -> None:
    subject = client(two_models())
    for path in ("/v2/models/m", "/v2/models/m/versions/3", "/v2/models/m/versions/7"):
        assert subject.get(path).body == {
            "name": "m",
            "versions": ["3", "7"],
            "platform": "shoal_pytorch",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
            "outputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        }
    assert subject.get("/v2/models/m/ready").headers["shoal-model-version"] == "7"
    assert subject.get("/v2/models/m/versions/3/ready").headers["shoal-model-version"] == "3"
    assert subject.get("/v2/models/n/config").body["input"] == [{"name": "t", "data_type": "TYPE_STRING", "dims": [2]}]


def test_statistics_of_a_version_a_model_and_all() -> None:
    subject = client(two_models())
    for version in ("3", "7", "7"):
        assert subject.infer(ROW, f"/v2/models/m/versions/{version}/infer").status == 200
    counted = [(each["name"], each["version"], each["inference_count"]) for each in _stats(subject, "/v2/models/stats")]
    assert counted == [("m", "3", 1), ("m", "7", 2), ("n", "7", 0)]
    assert [each["version"] for each in _stats(subject, "/v2/models/m/stats")] == ["3", "7"]
    (only,) = _stats(subject, "/v2/models/m/versions/7/stats")
    assert only["execution_count"] == only["inference_stats"]["success"]["count"] == 2
    assert only["batch_stats"][0]["batch_size"] == 1
    assert set(only["inference_stats"]["cache_hit"]) == {"count", "ns"}


def _stats(subject: Client, path: str) -> list[dict[str, object]]:
    return subject.get(path).body["model_stats"]  # type: ignore[no-any-return]


def test_the_repository_is_listed_and_changed() -> None:
    host = FakeHost(FakeModel("m"), shelf=(FakeModel("shelved"),))
    subject = client(host)
    ready = {"name": "m", "version": "7", "state": "READY", "reason": ""}
    shelved = {"name": "shelved", "version": "7", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert subject.post("/v2/repository/index").body == [ready, shelved]
    assert subject.post("/v2/repository/index", {"ready": True}).body == [ready]
    refused(subject.infer(ROW, "/v2/models/shelved/infer"), 404, "'shelved'", "'m'")

    reply = subject.post("/v2/repository/models/shelved/load", {"parameters": {"version": "champion"}})
    assert (reply.status, reply.body, host.parameters) == (200, {}, [{"version": "champion"}])
    assert subject.infer(ROW, "/v2/models/shelved/infer").status == 200
    assert subject.post("/v2/repository/models/shelved/unload").status == 200
    refused(subject.get("/v2/models/shelved"), 404)
    refused(subject.post("/v2/repository/models/none/load"), 404, "'none'")
    refused(subject.post("/v2/repository/models/shelved/load", {"parameters": {"a": [1]}}), 400, "not a request")


def test_a_load_goes_on_when_its_client_has_gone() -> None:
    class Slow(FakeHost):
        async def load(self, name: str, parameters: object, by: str = "") -> None:
            await asyncio.sleep(0.3)  # longer than what it takes to look for the client
            self.changes.append({"loaded": name, "by": by})

    async def run() -> FakeHost:
        gone = asyncio.get_running_loop().create_future()
        gone.set_result(None)
        host = Slow()
        for program in ("console", "guard from 1.2.3.4"):  # the second would name another address
            headers = {"authorization": "Bearer t", "shoal-program": program}
            path = "/v2/repository/models/m/load"
            reply = await client(host, token="t").call("POST", path, headers=headers, then=gone)
            assert reply.status == 200
        return host

    by = ["administrator (console)", "administrator"]
    assert asyncio.run(run()).changes == [{"loaded": "m", "by": each} for each in by]


def test_administration() -> None:
    host = FakeHost()
    subject = client(host)
    assert subject.get("/shoal/v1/status").body == {"models": {"m": {"version": 7}}}
    change = {"action": "canary", "model": "m", "version": 8, "percent": 5}
    assert subject.post("/shoal/v1/rollout", change).body["candidate"] == 8
    assert host.changes == [change]
    refused(subject.post("/shoal/v1/rollout", {"action": "dance"}), 400, "dance")
    for body in (b"[]", b"{", b"\xff", b"[" * 100_000):
        refused(subject.post("/shoal/v1/rollout", body), 400, "not a request")


def test_metrics_are_what_the_endpoint_gives() -> None:
    reply = client(metrics=lambda caller: b"nv_inference_count 3\n").get("/metrics")
    assert (reply.status, reply.content) == (200, b"nv_inference_count 3\n")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    refused(client().get("/metrics"), 404)


@pytest.mark.parametrize(
    "path",
    ["", "/", "//", "/v1", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/other",
     "/v2/models/m/versions", "/v2/models/m/versions//infer", "/v2/models/m/versions/6", "/v2/models/m/versions/x",
     "/v2/models/m/versions/-7", "/v2/models/m/versions/07x", "/v2/models/m/versions/\u0667", "/v2/models/m/explain",
     "/v2/models/m/versions/" + "7" * 5000, "/v2/models/m/versions/7/infer/x", "/v2/models/m/ready/x",
     "/v2/models/other/stats", "/v2/repository", "/v2/repository/models", "/v2/repository/models/m",
     "/v2/repository/models/m/load/x", "/shoal/v1", "/v2/health"],
)  # fmt: skip
def test_unknown_paths_models_and_versions_are_404(path: str) -> None:
    refused(client(max_path_chars=10_000).get(path), 404)


def test_wrong_methods_are_405_and_say_what_is_allowed() -> None:
    for method, path, allowed in [
        ("GET", "/v2/models/m/infer", "POST"),
        ("DELETE", "/v2/models/m/versions/7/infer", "POST"),
        ("POST", "/v2/models/m", "GET, HEAD"),
        ("POST", "/v2/models/m/ready", "GET, HEAD"),
        ("PUT", "/v2/health/live", "GET, HEAD"),
        ("GET", "/v2/repository/index", "POST"),
        ("GET", "/shoal/v1/rollout", "POST"),
    ]:
        reply = client().request(method, path)
        refused(reply, 405, method)
        assert reply.headers["allow"] == allowed


def test_a_key_is_asked_for_everywhere_but_at_the_health_of_the_server() -> None:
    subject = client(token="right")
    for reply in (
        subject.infer(ROW),
        subject.infer(ROW, headers={"authorization": "Bearer wrong"}),
        subject.infer(ROW, headers={"authorization": "right"}),
        *(subject.get(path) for path in ("/v2", "/v2/models/m/ready", "/metrics", "/openapi.json", "/nothing")),
        subject.post("/v2/repository/index"),
        subject.get("/shoal/v1/status"),
    ):
        refused(reply, 401, "Bearer")
        assert reply.headers["www-authenticate"].startswith("Bearer")
    assert subject.get("/v2/health/live").status == 200
    assert subject.get("/v2/health/ready").status == 200
    assert subject.infer(ROW, headers={"Authorization": "Bearer right"}).status == 200


def test_a_key_is_for_its_models_and_changes_nothing() -> None:
    keys = [ApiKey.model_validate({"name": "game", "key": "k", "models": ["n"]})]
    subject, key = client(two_models(), token="right", keys=keys), {"authorization": "Bearer k"}
    assert subject.get("/v2/models/n", headers=key).status == 200
    refused(subject.infer(ROW, headers=key), 403, "'game'", "'m'")
    for path in ("/v2/repository/models/n/load", "/v2/repository/models/n/unload", "/shoal/v1/rollout"):
        refused(subject.post(path, {}, headers=key), 403, "'game'")
    refused(subject.get("/shoal/v1/status", headers=key), 403)
    refused(subject.post(EPISODES_PATH, {"model": "m", "observation": [0.0]}, headers=key), 403, "'m'")
    seen = subject.get("/v2/models/stats", headers=key).body["model_stats"]
    assert {each["name"] for each in seen} == {"n"}
    assert {each["name"] for each in subject.post("/v2/repository/index", headers=key).body} == {"n"}


def test_a_body_that_claims_too_much_is_refused_before_it_is_read() -> None:
    subject = client(max_body_bytes=100)
    for path in ("/v2/models/m/infer", "/v2/repository/index", "/shoal/v1/rollout"):
        reply = subject.request("POST", path, [b"x" * 50, b"x" * 51])
        refused(reply, 413, "101", "100")
        assert reply.headers["connection"] == "close"
        assert len(subject.unread) == 2


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_large() -> None:
    subject = client(max_body_bytes=100)
    refused(subject.request("POST", "/v2/models/m/infer", [b"x" * 60] * 4, claim_length=False), 413, "100")
    assert len(subject.unread) == 2
    refused(subject.request("POST", "/v2/models/m/infer", [b"x" * 101], claim_length=False), 413)
    body = json.dumps(ROW).encode()
    assert subject.request("POST", "/v2/models/m/infer", [body[:10], body[10:11], b"", body[11:]]).status == 200


@pytest.mark.parametrize("length", ["-1", "ten", "1_0", "", "9" * 30])
def test_a_length_that_is_no_number_is_400(length: str) -> None:
    refused(client().infer(ROW, headers={"content-length": length}), 400, "Content-Length", length[:20])
    header = {"inference-header-content-length": length}
    refused(client().infer(ROW, headers=header), 400, "Inference-Header-Content-Length")


def test_heads_are_limited() -> None:
    refused(client(max_path_chars=20).infer(ROW, "/v2/models/m/versions/7/infer"), 414, "20")
    refused(client(max_header_bytes=100).infer(ROW, headers={"x": "y" * 100}), 431, "100")


def test_without_weights_it_is_live_but_not_ready() -> None:
    subject = client(FakeHost(FakeModel("m", versions=())))
    for reply in (subject.infer(ROW), subject.get("/v2/health/ready"), subject.get("/v2/models/m/ready")):
        refused(reply, 503, "weights")
        assert int(reply.headers["retry-after"]) >= 1
    assert subject.get("/v2/health/live").status == 200
    assert subject.get("/v2/models/m").body["versions"] == []


@pytest.mark.parametrize(
    ("error", "status", "words", "retry_after"),
    [
        (InferenceError(429, "the queue is full", 2.3), 429, "full", "3"),
        (InferenceError(429, "the queue is full"), 429, "full", "1"),
        (InferenceError(503, "staging", 0.0), 503, "staging", "1"),
        (InferenceError(504, "too late"), 504, "late", None),
        (InferenceError(500, "output 'y' has a NaN"), 500, "NaN", None),
        (Closed("no"), 503, "closing", "1"),
        (ValueError("odd"), 500, "ValueError: odd", None),
    ],
)
def test_what_a_model_refuses_keeps_its_status(
    error: Exception, status: int, words: str, retry_after: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    host = FakeHost()
    host.models_by_name["m"].error = error
    reply = client(host).infer(ROW)
    refused(reply, status, words)
    assert reply.headers.get("retry-after") == retry_after
    assert ("a request failed" in caplog.text) == isinstance(error, ValueError)


def test_a_model_that_was_loaded_anew_is_read_by_its_new_signature() -> None:
    host = FakeHost(FakeModel("m"))
    subject = client(host)
    assert subject.infer(ROW).status == 200
    host.models_by_name["m"] = FakeModel("m", tensors(x=("INT32", [-1, 3])))
    refused(subject.infer(ROW), 422, "INT32")
    host.models_by_name["m"].options = ModelOptions(max_batch_size=2)
    refused(subject.infer({"inputs": [{**ROW["inputs"][0], "shape": [3, 3], "datatype": "INT32"}]}), 422, "1 to 2 rows")


def test_lifespan() -> None:
    sent: list[str] = []
    events = ["lifespan.startup", "lifespan.shutdown"]

    async def receive() -> dict[str, str]:
        return {"type": events.pop(0)}

    async def send(message: dict[str, str]) -> None:
        sent.append(message["type"])

    asyncio.run(client().app({"type": "lifespan"}, receive, send))  # type: ignore[arg-type]
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def below(root: str) -> Client:
    host, access, limits = two_models(), AccessControl(None, []), RequestLimits()
    return Client(EndpointApp(RestApp(host, access), host, access, limits, root=root))  # type: ignore[arg-type]


def test_an_endpoint_below_a_path_of_its_own_has_all_of_its_paths_there() -> None:
    subject = below("/second")
    assert subject.get("/second/v2/models/m").body["name"] == "m"
    assert subject.infer(ROW, "/second/v2/models/m/infer").status == 200
    assert subject.get("/v2/models/m").body["name"] == "m"  # what has come without it
    assert subject.get("/other/v2/models/m").status == 404
    mounted = below("")
    mounted.root_path = "/cartpole"
    assert mounted.get("/v2/models/m").status == mounted.infer(ROW).status == 200


# -- what is kept of a text in which Ray has buried an error of ours

BURIED = """The deployment failed to start 2 times in a row. See controller logs for details. Error:
ray::ServeReplica:s:replica.initialize_and_get_metadata() (pid=23567, ip=127.0.0.1)
  File "/site-packages/ray/serve/_private/replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
shoal.errors.ConfigError: what was tried first
  File "/platform/shoal/serve/replica/replica.py", line 79, in start
    raise ShoalError(trouble)
shoal.errors.ShoalError: model 'm': ConfigError: preprocess = 'mine:nosuch': 'mine' has no 'nosuch'
"""


def test_the_last_error_of_ours_is_kept_and_nothing_else() -> None:
    assert error_summary(BURIED) == "model 'm': ConfigError: preprocess = 'mine:nosuch': 'mine' has no 'nosuch'"
    assert error_summary("RuntimeError: shoal.errors.ConfigError is not ours here") == ""
    killed = (
        "5 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 0a) was"
        " 22.41GB used / 23.54GB limit (0.952155)\nOOM kill reason: ...\nRefer to the documentation"
    )
    assert error_summary(killed) == "Ray ended the process, since 22.41 of its host's 23.54 GB of memory were in use"


@pytest.mark.parametrize(
    ("words", "first", "last"),
    [
        ("", "RuntimeError", "RuntimeError"),
        (" \n", "RuntimeError", "RuntimeError"),
        ("one line", "one line", "one line"),
        ("\nnot enough memory\n  advice\nShoalError: why \n", "not enough memory", "ShoalError: why"),
        ("x" * 300, "x" * 200, "x" * 200),
    ],
)
def test_an_error_in_one_line(words: str, first: str, last: str) -> None:
    assert summarize_error(RuntimeError(words)) == first
    assert summarize_error(RuntimeError(words), line=-1) == last
    assert len(summarize_error(RuntimeError("x" * 300), max_chars=None)) == 300


def test_half_a_pair_of_utf_16_in_what_went_wrong_is_told_and_not_in_the_way() -> None:
    """As in the name of a file whose bytes are no UTF-8, in an error of the user's code."""
    error = InferenceError(500, "no such file: \udcff.txt")
    assert json.loads(build_error_response(error).body) == {"error": "no such file: \\udcff.txt"}
