"""A stock tritonclient passes every call that it has for what is served: HTTP, gRPC, blocking, asyncio, streaming."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLIENTS = TESTS.parent / ".venv-clients" / "bin" / "python"
HERE = TESTS / "contracts"


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    server = subprocess.Popen(
        [sys.executable, "-W", "error", HERE / "triton_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'platform'}"},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server:
        yield json.loads(server.stdout.readline())
        server.stdin.close()
        assert server.wait(20) == 0


@pytest.mark.parametrize(
    ("kind", "http"),
    [("http", "http"), ("http", "proxy"), ("http_aio", "proxy"), ("grpc", "proxy"), ("grpc_aio", "proxy")],
)
def test_a_stock_client(kind: str, http: str, ports: dict[str, int]) -> None:
    assert CLIENTS.exists(), f"there is no {CLIENTS}: make test makes it"
    command = [CLIENTS, HERE / "triton_program.py", kind, *(str(ports[name]) for name in (http, "grpc"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["failures"], "\n".join(f"{name}\n{error}" for name, error in report["failures"].items())
    assert report["num_checks"] > 20
