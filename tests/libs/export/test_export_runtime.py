"""What an exported folder runs: its own test, the HTTP server, and the handler of AWS Lambda."""

import ast
import base64
import json
import socket
import subprocess
import sys
import threading
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from answering import run_server
from libs.export.exported import INFER, export_pair, register_file, request, write
from shoal.errors import ConfigError, InferenceError
from shoal.libs.export.folder import LAMBDA_CLIENT
from shoal.libs.export.runtime import http_server
from shoal.libs.export.runtime.http_server import FolderServer
from shoal.libs.export.runtime.lambda_events import make_handler
from shoal.libs.export.runtime.model import FolderModel, measure_difference, read_number
from shoal.libs.export.runtime.runtime_api import make_event

LAMBDA_TEST_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_pair(tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("to", ["container", "lambda"])
def test_a_folder_tests_itself_and_has_no_shoal(to: str, folder: Path, tmp_path: Path) -> None:
    register_file((folder / "model.onnx").read_bytes(), "onnx")
    report = write(tmp_path / "out", to)
    assert report.size_bytes < 250 * 2**20
    roots = {"msgspec", "numpy", "onnxruntime", "runtime", *sys.stdlib_module_names}
    for path in (tmp_path / "out").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.partition(".")[0] for name in names} <= roots, path
    pinned = (tmp_path / "out" / "requirements.txt").read_text()
    assert [line.partition("==")[0] for line in pinned.splitlines()] == [
        *("flatbuffers", "msgspec", "numpy", "onnxruntime", "packaging", "protobuf")
    ]
    command = [sys.executable, "-B", "test_folder.py"]
    done = subprocess.run(
        command, cwd=tmp_path / "out", capture_output=True, text=True, timeout=LAMBDA_TEST_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pair@1: 3 examples differ by 0")
    examples = json.loads((tmp_path / "out" / "examples.json").read_bytes())
    examples[0]["answer"]["outputs"][0]["data"][0] += 1
    (tmp_path / "out" / "examples.json").write_text(json.dumps(examples))
    if to == "container":
        done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=False)
        assert "AssertionError: example 1 differs by" in done.stderr


def test_a_function_answers_events_of_http(folder: Path) -> None:
    handle = make_handler(folder)
    event = make_event(INFER, request(1, 2))
    plain = handle(request(1, 2), None)
    assert json.loads(handle(event, None)["body"]) == plain
    event |= {"rawPath": f"/prod{INFER}", "requestContext": {**event["requestContext"], "stage": "prod"}}
    event |= {"body": base64.b64encode(event["body"].encode()).decode(), "isBase64Encoded": True}
    assert json.loads(handle(event, None)["body"]) == plain
    binary = handle(make_event(INFER, {**request(1, 2), "parameters": {"binary_data_output": True}}), None)
    assert binary["isBase64Encoded"]
    length = int(binary["headers"]["inference-header-content-length"])
    labels = base64.b64decode(binary["body"])[length:][-16:]
    assert np.frombuffer(labels, np.int64).tolist() == plain["outputs"][1]["data"]
    ready = make_event("/v2/health/ready", None)
    ready["requestContext"]["http"]["method"] = "GET"
    assert (handle(ready, None)["statusCode"], json.loads(handle(ready, None)["body"])) == (200, {"ready": True})
    assert handle(make_event("/v2/models/other/infer", {}), None)["statusCode"] == 404


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"inputs": []}, "input 'left' is missing"),
        ([1], "not an inference request"),
        ({"requestContext": {}, "httpMethod": "GET"}, "choose payload format 2.0"),
        ({**request(1, 2), "parameters": {"binary_data_output": True}}, "leave out binary_data"),
    ],
)
def test_a_plain_invocation_fails_with_the_endpoints_error(folder: Path, event: Any, error: str) -> None:
    with pytest.raises(InferenceError, match=error):
        make_handler(folder)(event, None)


@pytest.fixture
def server(folder: Path) -> Any:
    with FolderServer(("127.0.0.1", 0), FolderModel(folder)) as server, run_server(server):
        yield server


def connect(server: FolderServer) -> closing[HTTPConnection]:
    return closing(HTTPConnection("127.0.0.1", server.server_address[1], timeout=60))


def test_a_server_answers_several_requests_of_one_connection(server: FolderServer) -> None:
    with connect(server) as connection:
        for method, path, status in (
            *(("POST", f"{INFER}?a=b", 200), ("PUT", INFER, 405), ("HEAD", "/v2/health/live", 200)),
            *(("GET", "/v2/health/ready", 200), ("GET", "/v2/nothing", 404)),
        ):
            connection.request(method, path, json.dumps(request(1, 2)) if method == "POST" else None)
            answer = connection.getresponse()
            content = answer.read()
            assert (answer.status, answer.will_close) == (status, False)
            assert (not content) == (method == "HEAD")


@pytest.mark.parametrize(
    ("headers", "sent", "status", "error"),
    [
        ({"content-length": "x"}, b"", 400, "Content-Length = 'x': expected a number of bytes"),
        ({"content-length": str(1 << 30)}, bytes(1 << 20), 413, "the limit is 16777216"),
        ({"content-length": "9"}, b"{", 400, "the body ends after 1 of 9 bytes"),
        ({"transfer-encoding": "chunked"}, b"0\r\n\r\n", 411, "send it with its Content-Length"),
        ({"transfer-encoding": "chunked", "content-length": "5"}, b"0\r\n\r\n", 411, "send it with its Content-Length"),
        ({"content-length": "2", "Content-Length": "3"}, b"{}", 400, "Content-Length is given as 2 and 3"),
        ({"a" * 9: "b" * 9000, "content-length": "0"}, b"", 431, "the limit is 8192"),
        ({f"x{number}": "" for number in range(200)}, b"", 431, "Too many headers"),
    ],
)
def test_a_server_rejects_what_is_no_request(
    server: FolderServer, headers: dict[str, str], sent: bytes, status: int, error: str
) -> None:
    with connect(server) as connection:
        connection.putrequest("POST", INFER)
        for name, text in headers.items():
            connection.putheader(name, text)
        connection.endheaders(sent)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_WR)  # no more is sent
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("content-type")) == (status, "application/json")
        assert error in json.loads(answer.read())["error"]


def test_a_server_without_its_address_says_which(
    server: FolderServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "__file__", str(folder / "runtime" / "http_server.py"))
    for host, port, error in (
        ("127.0.0.1", str(server.server_address[1]), "already in use"),
        *(("127.0.0.1", "70000", "must be 0-65535"), ("no host", "0", "")),
    ):
        monkeypatch.setenv("HOST", host)
        monkeypatch.setenv("PORT", port)
        with pytest.raises(SystemExit, match=f"error: HOST = '{host}', PORT = {port}: .*{error}"):
            http_server.main()


def test_a_server_that_ends_answers_what_is_in_progress(server: FolderServer, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()
    may_end = threading.Event()
    answer = FolderModel.answer

    def wait(*arguments: Any) -> Any:
        began.set()
        may_end.wait()
        return answer(*arguments)

    monkeypatch.setattr(FolderModel, "answer", wait)
    with connect(server) as connection:
        connection.request("GET", "/v2/health/live")
        began.wait()
        drained = threading.Thread(target=server.drain)
        drained.start()
        assert drained.is_alive()
        may_end.set()
        drained.join()
        assert connection.getresponse().read() == b'{"live":true}'


# -- parts ------------------------------------------------------------------------------------------------------------


def test_differences_are_relative_to_the_largest_value_or_to_one() -> None:
    def difference(first: Any, second: Any, dtype: Any = np.float32) -> float:
        return measure_difference({"y": np.array(first, dtype)}, {"y": np.array(second, dtype)})

    nan, inf = float("nan"), float("inf")
    assert difference([1, 100], [1, 101]) == pytest.approx(0.01)
    assert difference([0.5, 0], [0.5, 0.25]) == 0.25
    assert difference([nan, inf], [nan, inf]) == 0
    assert difference([], []) == 0
    for first, second in (([nan], [1]), ([inf], [-inf]), ([1], [1, 1])):
        assert difference(first, second) == inf
    assert difference([1], [2], np.int64) == inf
    assert measure_difference({"y": np.zeros(1)}, {"z": np.zeros(1)}) == inf


def test_a_folder_names_the_client_that_is_tested_here() -> None:
    assert LAMBDA_CLIENT in (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()


def test_an_environment_variable_that_is_no_number_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "http")
    with pytest.raises(ConfigError, match="PORT = 'http'"):
        read_number("PORT", 8000)
