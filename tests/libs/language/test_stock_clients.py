"""The stock clients `openai` and `anthropic`, and a gateway of others, unchanged, against a server on loopback."""

import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.libs.language.tiny_served import Models, serve_tiny

from shoal.cluster.ports import find_free_port
from shoal.libs.language.engine import TextRequest, TokenEvent
from shoal.libs.language.text_model import TextCall
from waiting import wait_for

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / ".venv-clients"


def require_client(name: str) -> None:
    if not [*CLIENTS.glob(f"lib/*/site-packages/{name}")]:
        pytest.skip(f"there is no {name} in .venv-clients: make test brings it")


def run_clients(script: str) -> None:
    require_client("anthropic")
    with serve_tiny(Models()) as port:
        command = [CLIENTS / "bin" / "python", HERE / script, str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_stock_clients_pass_their_common_calls() -> None:
    run_clients("stock_clients.py")


def test_gateways_of_others_find_what_they_read_of_vllm_as_far_as_reading_them_tells() -> None:
    """None of them is run here: the script sends and reads what their code does."""
    run_clients("gateways_of_others.py")


def test_rllms_gateway_records_the_tokens_that_were_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_client("rllm_model_gateway")
    models, sampled = Models(), defaultdict[int, list[TokenEvent]](list)
    generate = models.tiny.generate

    async def note(request: TextRequest, call: TextCall) -> AsyncIterator[TokenEvent]:
        async for event in generate(request, call):
            sampled[event.request].append(event)
            yield event

    monkeypatch.setattr(models.tiny, "generate", note)
    address = f"127.0.0.1:{find_free_port()}"
    with serve_tiny(models) as port, httpx.Client(base_url=f"http://{address}", timeout=60) as http:
        words = ["--port", address.partition(":")[2], "--store", "memory", "--worker", f"http://127.0.0.1:{port}/v1"]
        command = [CLIENTS / "bin" / "python", "-m", "rllm_model_gateway", "--host", "127.0.0.1", *words]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as gateway:
            try:
                wait_for(lambda: gateway.poll() is not None or is_up(http), what="gateway")
                messages: list[Any] = [{"role": "user", "content": "hi"}]
                for fields in ({}, {"stream": True}, {"temperature": 0.5}):
                    body = {"model": "tiny", "messages": messages, "max_tokens": 9, **fields}
                    assert http.post("/sessions/one/v1/chat/completions", json=body).status_code == 200
                    messages += [{"role": "assistant", "content": "so"}, messages[0]]
                traces = wait_for(lambda: len(found := http.get("/sessions/one/traces").json()) == 3 and found)
            finally:
                gateway.terminate()
    for trace, request, events in zip(traces, models.tiny.requests, sampled.values(), strict=True):
        assert trace["prompt_token_ids"] == list(request.prompt)
        assert trace["completion_token_ids"] == [each.token for each in events]
        assert trace["logprobs"] == pytest.approx([each.logprob for each in events], abs=1e-4)
    assert [len(each) for each in sampled.values()] == [9] * 3


def is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
