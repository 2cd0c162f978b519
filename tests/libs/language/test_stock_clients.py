"""The stock clients `openai` and `anthropic`, unchanged, against a server on loopback."""

import subprocess
from pathlib import Path

import pytest
from tests.libs.language.tiny_served import Models, serve_tiny

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / ".venv-clients"


def run_clients(script: str) -> None:
    if not [*CLIENTS.glob("lib/*/site-packages/anthropic")]:
        pytest.skip("there is no anthropic in .venv-clients: make test brings it")
    with serve_tiny(Models()) as port:
        command = [CLIENTS / "bin" / "python", HERE / script, str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_stock_clients_pass_their_common_calls() -> None:
    run_clients("stock_clients.py")


def test_gateways_of_others_find_what_they_read_of_vllm_as_far_as_reading_them_tells() -> None:
    """None of them is run: the script sends and reads what their code does."""
    run_clients("gateways_of_others.py")
