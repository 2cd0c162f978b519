"""The stock clients `openai` and `anthropic`, unchanged, against a server on loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CLIENTS = ROOT / ".venv-clients"


def test_stock_clients_pass_their_common_calls() -> None:
    if not [*CLIENTS.glob("lib/*/site-packages/anthropic")]:
        pytest.skip("there is no anthropic in .venv-clients: make test brings it")
    command = [sys.executable, HERE / "tiny_served.py"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        done = subprocess.run(
            [CLIENTS / "bin" / "python", HERE / "stock_clients.py", port], capture_output=True, text=True, timeout=120
        )
        server.stdin.close()
        assert server.wait(20) == 0
    assert done.returncode == 0, done.stderr
