"""A run of agents without Ray, on a model of a few thousand parameters, and a client that is no code of ours.

python agents_rig.py MODEL FOLDER    # as a process that a test can kill
"""

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.libs.agents.sessions.store import SessionRecords
from shoal.libs.agents.setting import make_setting
from shoal.libs.agents.spec import AgentsSpec
from shoal.rl.local_loop import LocalLoop

TOKEN = "the-run's"
SESSIONS = "/shoal/v1/sessions"
Json = dict[str, Any]


class Reply(NamedTuple):
    """status, the JSON of its body, and its headers by small letters"""

    status: int
    body: Any
    headers: dict[str, str]


def save_model(folder: Path, tokenizer: Any) -> Path:
    """A Llama of the tokenizer's vocabulary, with fresh weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_spec(model: Path, **fields: Any) -> AgentsSpec:
    """Steps of two groups of two sessions, answers of a few tokens."""
    algorithm = {"name": "grpo", "learning_rate": 1e-3, "group_size": 2, "groups_per_step": 2}
    return AgentsSpec.parse({"model": str(model), "algorithm": algorithm, "max_tokens": 6, "length": 256, **fields})


@contextmanager
def open_run(spec: AgentsSpec, folder: Path) -> Iterator[LocalLoop]:
    """The run's gateway, sampler and learner, in threads."""
    setting = make_setting(spec, folder, TOKEN, "run")
    with LocalLoop(spec.make_rl_spec(), setting.experience, folder, TOKEN, front=setting.front) as loop:
        yield loop


def find_url(loop: LocalLoop) -> str:
    return str(loop.gateway.stats()["sessions"]["url"])


def post(url: str, body: object, key: str = TOKEN, **headers: str) -> Reply:
    """One request, as a client that knows nothing of sessions sends it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **named}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return Reply(reply.status, json.loads(reply.read() or b"null"), dict(reply.headers.items()))
    except urllib.error.HTTPError as error:
        return Reply(error.code, json.loads(error.read()), {name.lower(): each for name, each in error.headers.items()})


def open_session(url: str, **fields: Any) -> Json:
    reply = post(url + SESSIONS, fields)
    assert reply.status == 201, reply
    return reply.body


def chat(session: Json, *texts: str, **fields: Any) -> Json:
    """The answer to a conversation of users' and assistants' texts by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    headers = fields.pop("headers", {})
    body = {"model": "gpt-4o-mini", "messages": messages, "return_token_ids": True, **fields}
    reply = post(session["base_url"] + "/chat/completions", body, session["key"], **headers)
    assert reply.status == 200, reply
    return reply.body


def read_answer(reply: Json) -> str:
    return str(reply["choices"][0]["message"]["content"])


def end(url: str, session: Json, **ending: Any) -> Reply:
    return post(f"{url}{SESSIONS}/{session['id']}/end", ending, session["key"])


def read_counts(folder: Path) -> dict[str, int]:
    """The tokens of the run's accounts."""
    return {what: sum(each.values()) for what, each in SessionRecords(folder).count_tokens().items()}


if __name__ == "__main__":
    with open_run(make_spec(Path(sys.argv[1])), Path(sys.argv[2])) as running:
        running.learner.save()  # a learner without a checkpoint begins with other numbers of versions
        sys.stdout.write(f"{find_url(running)}\n")
        sys.stdout.flush()
        threading.Event().wait()
