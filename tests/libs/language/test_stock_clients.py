"""The stock clients `openai` and `anthropic`, unchanged, against a server on loopback."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from tests.libs.language.tiny_served import Models, make_tiny_app

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / ".venv-clients"


@pytest.fixture
def port() -> Iterator[int]:
    app = cast(Any, make_tiny_app(Models()))
    server = uvicorn.Server(uvicorn.Config(app, factory=False, lifespan="off", log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def test_stock_clients_pass_their_common_calls(port: int) -> None:
    if not [*CLIENTS.glob("lib/*/site-packages/anthropic")]:
        pytest.skip("there is no anthropic in .venv-clients: make test brings it")
    command = [CLIENTS / "bin" / "python", HERE / "stock_clients.py", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
