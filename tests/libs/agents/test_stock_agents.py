"""Stock clients, unchanged, as agents of a training session: each token that they were given is trained."""

import os
import subprocess
from pathlib import Path

import pytest
from agents_rig import end, find_url, make_spec, open_run, open_session, post, save_model
from test_token_tree import make_tokenizer

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / ".venv-clients"


def test_stock_clients_are_agents_without_code_of_ours(tmp_path: Path) -> None:
    if not [*CLIENTS.glob("lib/*/site-packages/anthropic")]:
        pytest.skip("there is no anthropic in .venv-clients: make test brings it")
    model = save_model(tmp_path / "model", make_tokenizer())
    folder = tmp_path / "run"
    folder.mkdir()
    with open_run(make_spec(model), folder) as loop:
        url = find_url(loop)
        session = open_session(url)
        command = [CLIENTS / "bin" / "python", HERE / "stock_agents.py"]
        variables = {**os.environ, **session["env"]}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
        assert done.returncode == 0, done.stderr
        ended = end(url, session, reward=1.0).body
        assert (ended["state"], ended["turns"]) == ("ended", 7)
        exported = loop.gateway.stats()["sessions"]
        assert exported["tokens/sampled"] == ended["tokens"]["sampled"] == ended["tokens"]["trains"]
        late = post(session["base_url"] + "/chat/completions", {"messages": []}, session["key"])
        assert late.status == 410
