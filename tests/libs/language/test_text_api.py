"""The HTTP API in this process: what it answers, what it refuses before a token is spent, and how a stream ends."""

import asyncio
import json
import pickle
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.libs.language.tiny_served import Client, Models, make_tiny_app

from shoal.cluster.ingress import backup_listener
from shoal.extend.serve import HttpRequest, Send
from shoal.libs.language.api.app import BODIES
from shoal.libs.language.api.tools import ToolCall, ToolUse, read_tool_use
from shoal.serve.messages.inference import Relayed
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.api_key import ApiKey

pytest.importorskip("transformers")
USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": USER, "max_tokens": 6, "seed": 1}
ONE = {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"], "additionalProperties": False}
TOOL = {"name": "where", "parameters": ONE}
TOOLS = [{"type": "function", "function": TOOL}]
PATHS = {
    "chat/completions": CHAT,
    "completions": {"model": "bare", "prompt": "hi", "max_tokens": 6, "seed": 1},
    "responses": {"model": "tiny", "input": "hi", "max_output_tokens": 6, "seed": 1},
    "messages": CHAT,
}


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture
def client(models: Models) -> Iterator[Client]:
    yield Client(make_tiny_app(models))
    for each in (models.tiny, models.plain, models.bare):
        while each.engine.has_work:  # what was cancelled
            each.engine.step()


def find(value: Any, name: str) -> list[Any]:
    """All fields of this name, however deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value[name]] if isinstance(value, dict) and name in value else []
    return own + [found for each in inner for found in find(each, name)]


def join_text(path: str, frames: list[Any]) -> str:
    """What the events of a stream show."""
    deltas = [frame for frame in frames if frame != "[DONE]" and frame.get("type", "").partition(".")[2] != "done"]
    if path == "responses":
        return "".join(each["delta"] for each in deltas if each["type"].endswith("text.delta"))
    name = "content" if path == "chat/completions" else "text"
    return "".join(found for each in deltas for found in find(each, name) if isinstance(found, str))


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_has_the_text_and_the_spans_of_the_answer(path: str, client: Client) -> None:
    status, headers, answer = client.post(f"/any/root/v1/{path}", PATHS[path])
    assert (status, headers["shoal-model-version"]) == (200, "3")
    text = "".join(find(answer, "content" if path == "chat/completions" else "text")[-1:])
    status, headers, frames = client.post(f"/v1/{path}", PATHS[path] | {"stream": True})
    assert (status, headers["shoal-model-version"]) == (200, "3")
    assert join_text(path, frames) == text
    if path == "responses":
        assert [each["sequence_number"] for each in frames] == list(range(len(frames)))
    assert find(frames, "shoal")[-1] == find(answer, "shoal")[-1] == {"spans": [[3, 6]]}


def test_every_path_wakes_an_endpoint_that_sleeps() -> None:
    """The ingress has its own list: it imports no library."""
    for path in (*BODIES, "models", "models/tiny"):
        assert re.fullmatch(backup_listener.PATHS, f"v1/{path}"), path
    assert not re.fullmatch(backup_listener.PATHS, "v1/nonsense")


def test_new_weights_within_an_answer_are_in_its_spans(client: Client, models: Models) -> None:
    models.plain.switch_at = models.plain.engine.observe().new_tokens + 3
    (choice,) = client.post("/v1/chat/completions", CHAT | {"max_tokens": 20, "model": "plain"})[2]["choices"]
    first, second = choice["shoal"]["spans"]
    assert (second[0] - first[0], first[1] + second[1]) == (1, 20)


@pytest.mark.parametrize("path", PATHS)
def test_the_rest_of_a_stream_that_was_cut_is_what_would_have_come(path: str, client: Client, models: Models) -> None:
    most = "max_output_tokens" if path == "responses" else "max_tokens"
    asked = PATHS[path] | {"stream": True, most: 40, "stop": ["\n\n", "AAA"], "seed": 5, "min_p": 0.02}
    tools = {"tools": TOOLS} if path == "chat/completions" else {}  # whose marks retain text
    whole = client.post(f"/v1/{path}", asked | tools, idempotency_key="k")[2]
    for cut in (len(whole) // 4, len(whole) // 2):
        given = [pair for found in find(whole[:cut], "given") for pair in found]
        rest = client.post(f"/v1/{path}", asked | tools | {"given": given}, idempotency_key="k")[2]
        assert join_text(path, whole[:cut]) + join_text(path, rest) == join_text(path, whole)
        assert find(rest, "spans") == find(whole, "spans")
        assert find(rest, "usage")[-1:] == find(whole, "usage")[-1:]
    if path == "completions":
        client.post(f"/v1/{path}", asked | {"given": [[2, [65]], [3, [66]]], "stream": False}, idempotency_key="k")
        assert models.bare.calls[-1].last_version == 3
        assert find(client.post(f"/v1/{path}", asked | {"n": 2}, idempotency_key="k"), "given") == []


def test_fields_arrive_at_the_engine_and_the_model(client: Client, models: Models) -> None:
    fields = {"top_k": 5, "min_p": 0.1, "logit_bias": {"65": 2}, "presence_penalty": 0.5, "temperature": 0.3}
    asked = {"n": 2, "stop": "zz", "swap": "finish", "priority": 2, "deadline_s": 50, "user": "me", "metadata": None}
    headers = {"shoal_deadline_ms": "9000", "shoal_sticky": "a%20b", "shoal_track": "stable", "idempotency_key": "k"}
    status, _, answer = client.post("/v1/chat/completions", CHAT | fields | asked | {"model": "tiny@3"}, **headers)
    assert (status, len(answer["choices"]), answer["usage"]["total_tokens"]) == (200, 2, 21 + 12)
    call, request = models.tiny.calls[-1], models.tiny.requests[-1]
    assert (call.version, call.sticky, call.track, call.resume) == (3, "a b", "stable", "k")
    assert (request.num_answers, request.stop, request.swap, request.priority) == (2, ("zz",), "finish", 2)
    assert request.end_s is not None
    assert 8 < request.end_s <= 9
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.logit_bias, sampling.temperature) == (5, 0.1, {65: 2}, 0.3)


def test_the_template_gets_its_own_fields(client: Client, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    template = models.tiny.tokenizer.chat_template
    monkeypatch.setattr(models.tiny.tokenizer, "chat_template", template + "{% if not enable_thinking %}no{% endif %}")
    num_tokens = []
    for value in (True, False):
        fields = {"chat_template_kwargs": {"enable_thinking": value}}
        answer = client.post("/v1/chat/completions", CHAT | fields)[2]
        num_tokens.append(answer["usage"]["prompt_tokens"])
    assert num_tokens[1] == num_tokens[0] + 2


def test_prompts_of_a_completion_are_answered_together(client: Client, models: Models) -> None:
    asked = {"model": "bare", "prompt": ["a", [1, 2, 3]], "n": 2, "max_tokens": 4, "logprobs": 2}
    answer = client.post("/v1/completions", asked, idempotency_key="k")[2]
    assert [each.resume for each in models.bare.calls[-2:]] == ["k/0", "k/1"]
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    assert [len(each["logprobs"]["tokens"]) for each in answer["choices"]] == [4] * 4
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}


def test_a_stop_text_and_a_prefilled_message_of_anthropics_form(client: Client, models: Models) -> None:
    talk = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]
    asked = {"model": "tiny", "messages": talk, "max_tokens": 9, "stop_sequences": ["B"], "logit_bias": {"33": 100}}
    answer = client.post("/v1/messages", asked | {"temperature": 0, "system": [{"type": "text", "text": "s"}]})[2]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "B")
    assert models.tiny.tokenizer.decode(models.tiny.requests[-1].prompt).endswith("assistant\nI am")


@pytest.mark.parametrize(
    ("mark", "text", "shown", "calls"),
    [
        ("<tool_call>", 'ok <tool_call>\n{"name": "where", "arguments": {"n": 1}}\n</tool_call>', "ok ", 1),
        ("<tool_call>", '<tool_call>{"name": "where"}</tool_call>\n<tool_call>{"name": "where"}', "", 2),
        ("<tool_call>", '<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', 0),
        ("<tool_call>", "a <tool_ b <tool", "a <tool_ b <tool", 0),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "where", "arguments": {"n": 1}}, {"name": "where"}]', "", 2),
        ("", '<|python_tag|>{"name": "where", "parameters": {"n": 1}}', "", 1),
        ("", ' {"name": "where", "parameters": {"n": 1}}; {"name": "where"}', "", 2),
        ("", '{"city": "Rome"}', '{"city": "Rome"}', 0),
        ("", "no {}", "no {}", 0),
        ("", "[" * 5000, "[" * 5000, 0),
        # what was cut
        ("<tool_call>", "ok <tool_call>\n{ ...", "ok ", 0),
        ("<tool_call>", "ok <tool_c...", "ok ", 0),
        ("<tool_call>", "1 <...", "1 <", 0),
        ("<tool_call>", "vector<t...", "vector<t", 0),
        ("<tool_call>", '<tool_call>{"name": "where"}</tool_call>\n<tool_call>{"na...', "", 1),
        ("<tool_call>", '<tool_call>{"name": "where"}...', "", 1),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "wh...', "", 0),
        ("", ' { "name": "where", "para...', "", 0),
        ("", '{"na...', "", 0),
        ("", "<|pyth...", "", 0),
        ("", '{"city": "Ro...', '{"city": "Ro', 0),
        ("", '{"name": "Ada", "born": 18...', '{"name": "Ada", "born": 18', 0),
        ("", '{"name": "Ada", "born": 1815}...', '{"name": "Ada", "born": 1815}', 0),
    ],
)
def test_tool_calls_are_read_from_a_stream(mark: str, text: str, shown: str, calls: int) -> None:
    reader = ToolUse([TOOL]).make_reader(f"{mark} tools")
    seen = "".join(reader.push(letter) for letter in text.removesuffix("..."))
    rest, found = reader.finish(is_truncated=text.endswith("..."))
    assert (seen + rest, len(found)) == (shown, calls)
    assert set(found) <= {ToolCall("where", '{"n": 1}'), ToolCall("where", "{}")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "tools", "end"),
    [
        ("chat/completions", {"tools": TOOLS, "tool_choice": "required", "max_tokens": 9}, "length"),
        ("responses", {"tools": [TOOL | {"type": "function"}], "tool_choice": "required", "max_output_tokens": 9},
         "incomplete"),
        ("messages", {"tools": [{"name": "where", "input_schema": ONE}], "tool_choice": {"type": "any"},
                      "max_tokens": 9}, "max_tokens"),
    ],
)  # fmt: skip
def test_a_call_that_was_cut_is_no_text(
    path: str, tools: dict[str, Any], end: str, stream: bool, client: Client
) -> None:
    answer = client.post(f"/v1/{path}", PATHS[path] | tools | {"stream": stream})[2]
    assert join_text(path, answer if stream else [{"type": "", "delta": "", **answer}]) == ""
    ends = [each for name in ("finish_reason", "stop_reason", "status") for each in find(answer, name)]
    assert (end in ends, "tool_calls" in ends, find(answer, "arguments")) == (True, False, [])


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_log_probabilities_end_with_the_text_that_a_stop_cut(path: str, client: Client) -> None:
    asked = PATHS[path] | {"max_tokens": 40, "temperature": 0, "logit_bias": {"33": 9, "34": 9}, "logprobs": True}
    asked |= {"frequency_penalty": 2.0} | ({} if path == "chat/completions" else {"logprobs": 0})

    def read(answer: Any) -> tuple[str, list[str], int]:
        frames = answer if isinstance(answer, list) else [answer]
        is_chat = path == "chat/completions"
        shown = find(frames, "logprobs")
        tokens = [each["token"] for part in find(shown, "content") for each in part or []] if is_chat else [
            each for part in find(shown, "tokens") for each in part
        ]  # fmt: skip
        return "".join(tokens), tokens, find(frames, "finish_reason").count("stop")

    whole = client.post(f"/v1/{path}", asked)[2]
    text = "".join(find(whole, "content" if path == "chat/completions" else "text")[:1])
    for begin, size in ((3, 1), (3, 4), (7, 2)):
        stop = text[begin : begin + size]
        cut = text[: text.index(stop)]
        for stream in (False, True):
            answer = client.post(f"/v1/{path}", asked | {"stop": [stop, "xyz"], "stream": stream})[2]
            assert read(answer)[::2] == (cut, 1)


@pytest.mark.parametrize("path", PATHS)
def test_ids_and_log_probabilities_are_those_of_all_tokens_that_were_read_and_sampled(
    path: str, client: Client, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, stop = "max_output_tokens" if path == "responses" else "max_tokens", [" !", "BA"]
    asked = PATHS[path] | {most: 40, "logit_bias": {"32": 9, "33": 9}, "stop": stop, "return_token_ids": True}
    is_choice = path in ("chat/completions", "completions")
    whole, frames = (
        client.post(f"/v1/{path}", asked | {"temperature": 0.7, "stream": stream})[2] for stream in (False, True)
    )
    model = models.bare if path == "completions" else models.tiny
    text = model.tokenizer.decode(find(whole, "token_ids")[0])
    assert text.endswith("BA")  # in which the text is cut
    assert join_text(path, [{"type": "", "delta": "", **whole}] if path != "responses" else frames) == text[:-2]
    for answer in (whole, frames):
        ids = [each for some in find(answer, "token_ids") for each in some]
        [shoal] = [each for each in find(answer, "shoal") if "spans" in each]
        behaviour = [each for some in find(answer, "behaviour_logprobs") for each in some]
        logprobs = find(answer, "logprob") + shoal.get("logprobs", [])
        logprobs += [each for some in find(answer, "token_logprobs") for each in some]
        assert ids == find(whole, "token_ids")[0]
        assert {tuple(each) for each in find(answer, "prompt_token_ids")} == {model.requests[-1].prompt}
        assert (len(logprobs), len(behaviour), shoal["spans"]) == (len(ids), len(ids), [[3, len(ids)]])
        assert all(own < given for own, given in zip(logprobs, behaviour, strict=True))  # the bias made them likely
    if is_choice:
        assert "prompt_token_ids" in (frames[0] if path == "chat/completions" else frames[0]["choices"][0])
    monkeypatch.setattr(model.engine, "_stop_tokens", frozenset({33}))
    ended = client.post(f"/v1/{path}", asked | {"logit_bias": {"33": 99}})[2]
    assert find(ended, "token_ids") == [[33]]  # the end token, which is no text
    assert not find(client.post(f"/v1/{path}", PATHS[path])[2], "token_ids")


class KnownChats:
    """A gateway's model that knows what came before the newest message."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def continue_chat(self, messages: Any, tools: Any, fields: Any) -> tuple[int, ...] | None:
        self.asked.append((messages, tools, fields))
        return (7, 8, 9) if messages[0]["role"] == "assistant" else None


def test_a_model_may_know_the_tokens_of_a_conversation(client: Client, models: Models) -> None:
    """What a client sends with its messages besides is ignored, and does not reach the model."""
    known, rendered = KnownChats(models.tiny), models.tiny
    models.tiny = known  # type: ignore[assignment]
    called = {"id": "c", "type": "function", "function": {"name": "where", "arguments": '{"n":  1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [called], "token_ids": [1], "reasoning_content": "so"}
    asked = CHAT | {"messages": [said, *USER], "tools": TOOLS, "chat_template_kwargs": {"a": 1}}
    answer = client.post("/v1/chat/completions", asked | {"return_token_ids": True})[2]
    assert (answer["prompt_token_ids"], answer["usage"]["prompt_tokens"]) == ([7, 8, 9], 3)
    function = {"name": "where", "arguments": {"n": 1}}
    read = {"role": "assistant", "content": "", "tool_calls": [called | {"function": function}]}
    assert known.asked == [([read, *USER], TOOLS, {"a": 1})]
    assert client.post("/v1/chat/completions", CHAT)[2]["usage"]["prompt_tokens"] == 21  # of the template
    models.tiny = rendered


@pytest.mark.parametrize("mark", ["<tool_call>", "[TOOL_CALLS]", ""])
def test_a_compelled_call_is_in_the_form_of_the_template(mark: str, client: Client, models: Models) -> None:
    template = models.tiny.tokenizer.chat_template
    models.tiny.tokenizer.chat_template = template.replace("<tool_call>", mark)
    choice = {"type": "function", "function": {"name": "where"}}
    answer = client.post("/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 600})[2]
    models.tiny.tokenizer.chat_template = template
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])["n"]) == ("where", 1)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_a_single_call_is_given_where_several_are_not_wanted() -> None:
    use = read_tool_use([TOOL], "auto", parallel=False)
    reader = use.make_reader("")
    reader.push('{"name": "where"} {"name": "where"}')
    assert reader.finish() == ("", [ToolCall("where", "{}")])


DEEP = b'{"model": "tiny", "messages": ' + b"[" * 100_000
NESTED = json.loads('{"a": ' * 800 + "{}" + "}" * 800)
REFUSED: list[tuple[str, Any, int, str]] = [
    ("chat/completions", b"{", 400, "the body is not JSON"),
    ("chat/completions", b"\xff", 400, "the body is not JSON"),
    ("chat/completions", b'["a"]', 400, "not a JSON object"),
    ("chat/completions", DEEP, 400, "nested too deeply"),
    ("chat/completions", {"messages": USER}, 400, "model: Object missing required field"),
    ("completions", {"model": "tiny", "prompt": None}, 400, "prompt: is null"),
    ("chat/completions", {"tempersture": 1}, 400, "tempersture: .*did you mean 'temperature'?"),
    ("chat/completions", {"store": True}, 400, "^store = true: responses are not stored: .* as input$"),
    ("chat/completions", {"reasoning_effort": "low"}, 400, '^reasoning_effort = "low": .* not offered here$'),
    ("chat/completions", {"temperature": "hot"}, 400, "temperature: Expected `float`"),
    ("chat/completions", {"temperature": 101}, 400, "temperature = 101.0: expected 0.0 to 100.0"),
    ("chat/completions", {"n": 10**6}, 400, "n = 1000000: 1000000 answers, expected 128"),
    ("chat/completions", {"n": 10**30}, 400, "n: |out of range"),
    ("chat/completions", {"stop": ["a"] * 10_000}, 400, "stop = '10000 texts'"),
    ("chat/completions", {"messages": USER * 100_000}, 400, "messages: Expected `array` of length <= 4096"),
    ("chat/completions", {"messages": []}, 400, "messages: Expected `array` of length >= 1"),
    ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}, 400, r"role: 'robot' .* system, .*, tool$"),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, r"messages\[0\].content: is missing"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'image_url'"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a" * 3000}]}, 400, "has 30.. tokens"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a" * 300_000}]}, 400, "300000 characters"),
    ("chat/completions", {"logit_bias": {"x": 1}}, 400, "logit_bias.x: expected a token's number"),
    ("chat/completions", {"top_logprobs": 2}, 400, "top_logprobs: needs logprobs"),
    ("chat/completions", {"grammar": "start: /a/", "regex": "a"}, 400, "grammar and regex exclude each other"),
    ("chat/completions", {"response_format": {"type": "xml"}}, 400, "response_format.type: expected text"),
    ("chat/completions", {"regex": "(" * 99}, 400, r"^regex = '\({40}': unclosed group$"),
    ("chat/completions", {"grammar": "start: " + "a " * 20_000 + "\na: /a*/"}, 400, "Too many items"),
    ("chat/completions", {"model": "bare"}, 400, "model 'bare' has no chat template"),
    ("chat/completions", {"model": "plain", "tools": TOOLS}, 400, "template of model 'plain' has none: register"),
    ("chat/completions", {"stream_options": {"include_usage": True}}, 400, "stream_options: needs stream = true"),
    ("chat/completions", {"stream": True, "stream_options": {"include_usag": True}}, 400, "field `include_usag`"),
    ("chat/completions", {"chat_template_kwargs": {"tokenize": True}}, 400, "messages: .*'tokenize'"),
    ("chat/completions", {"model": "other"}, 404, "there is no model 'other'"),
    ("chat/completions", {"model": "tiny@7"}, 404, "no version 7"),
    ("chat/completions", {"model": "tiny@champion"}, 400, "'champion' is no number .*tiny@2"),
    ("chat/completions", {"tools": TOOLS, "tool_choice": "maybe"}, 400, "tool_choice = 'maybe'"),
    ("chat/completions", {"tool_choice": "required"}, 400, "there are no tools"),
    ("chat/completions", {"tools": [{"type": "function"}]}, 400, r"tools\[0\].function: expected dict"),
    ("chat/completions", {"given": [[3, [1]]], "seed": None}, 400, "given: needs the idempotency-key"),
    ("chat/completions", {"given": [[3, [1]]], "n": 2}, 400, "given: one answer alone"),
    ("chat/completions", {"given": [[3, [1, -1]]]}, 400, "given"),
    ("chat/completions", {"given": [[3, [1] * 6]]}, 400, "are max_tokens = 6 already"),
    ("chat/completions", {"given": [[3, [33]]], "stop": "B"}, 400, "are a whole answer already"),
    ("chat/completions", {"given": [[3, [33]]], "regex": "a*"}, 400, "do not follow the grammar"),
    ("chat/completions", {"deadline_s": 0}, 400, "^deadline_s = 0"),
    (
        "chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]},
        400,
        "deeply",
    ),
    ("completions", {"prompt": ["a"] * 2, "n": 200}, 400, "n = 200: 400 answers"),
    ("completions", {"prompt": ""}, 400, "prompt: has no token"),
    ("completions", {"prompt": [[1], "a", 3]}, 400, r"prompt\[2\]: expected a text"),
    ("completions", {"prompt": [999]}, 400, "holds one outside of 0 to"),
    ("completions", {"prompt": ["a"] * 1000}, 400, "expected 1 to 128 texts, got 1000"),
    ("completions", {"echo": True}, 400, "^echo = true: would change the answer, and is not offered here$"),
    ("responses", {"previous_response_id": "resp_1"}, 400, "responses are not stored"),
    ("responses", {"input": [{"type": "computer_call"}]}, 400, r"input\[0\].type: 'computer_call'"),
    ("responses", {"tools": [{"type": "web_search"}]}, 400, r"tools\[0\].type: expected function"),
    ("responses", {"input": [{"role": "user"}]}, 400, r"input\[0\].content: is missing"),
    ("messages", {"messages": [{"role": "user", "content": None}]}, 400, r"messages\[0\].content: is missing"),
    ("messages", {"max_tokens": None}, 400, "max_tokens"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "thinking = "),
    ("nothing", {}, 404, "no such path"),
]


@pytest.mark.parametrize(("path", "change", "status", "message"), REFUSED)
def test_what_is_wrong_is_refused_before_a_token_is_spent(
    path: str, change: Any, status: int, message: str, client: Client, models: Models
) -> None:
    counts = [each.engine.observe() for each in (models.tiny, models.bare)]
    body = change if isinstance(change, bytes) else PATHS.get(path, {}) | change
    if isinstance(body, dict) and change == {"messages": USER}:
        del body["model"]
    found, _, answer = client.post(f"/v1/{path}", body)
    assert found == status, answer
    assert re.search(message, answer["error"]["message"]), answer
    assert [each.engine.observe() for each in (models.tiny, models.bare)] == counts


def test_errors_have_the_form_of_the_api_that_was_called(client: Client) -> None:
    wrong = client.post("/v1/chat/completions", CHAT | {"n": 0})[2]["error"]
    assert (wrong["type"], wrong["param"], wrong["code"]) == ("invalid_request_error", "n", None)
    wrong = client.post("/v1/chat/completions", CHAT | {"n": 500})[2]["error"]
    assert wrong["param"] == "n"  # the engine calls it num_answers
    wrong = client.post("/v1/responses", {"model": "tiny", "input": "a" * 3000})[2]["error"]
    assert (wrong["param"], wrong["code"]) == ("input", "context_length_exceeded")
    wrong = client.post("/v1/messages", CHAT | {"n": 2})[2]
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "invalid_request_error")
    wrong = client.post("/chat/completions", CHAT)[2]["error"]
    assert (wrong["type"], "base_url" in wrong["message"]) == ("not_found_error", True)
    for path in ("responses/resp_1", "models/other", "models_", "nothing"):
        assert asyncio.run(client.call("GET", f"/v1/{path}"))[0] == 404
    status, headers, _ = asyncio.run(client.call("GET", "/v1/completions"))
    assert (status, headers["allow"]) == (405, "POST")
    assert asyncio.run(client.call("POST", "/v1/models"))[1]["allow"] == "GET, HEAD"


def test_a_body_that_does_not_end_is_cut_off(models: Models) -> None:
    client = Client(make_tiny_app(models, limits=RequestLimits(max_body_bytes=1000)))
    status, headers, answer = client.post("/v1/messages", b"[" * 1001)
    assert (status, answer["error"]["type"], headers["connection"]) == (413, "request_too_large", "close")


def test_keys_models_and_rates(models: Models) -> None:
    rates = {"requests_per_s": 0.01, "burst": 2}
    keys = [
        ApiKey(name="a", key="k" * 20, models=["tiny"], **rates),
        ApiKey(name="b", key="b", output_tokens_per_min=5),
    ]
    app = make_tiny_app(models, keys)
    assert Client(app).post("/v1/completions", b"x" * 99)[0] == 401
    client = Client(app, "k" * 20)
    client._head *= 2
    assert "several keys" in client.post("/v1/completions", PATHS["completions"])[2]["error"]["message"]
    client = Client(app, "k" * 20)
    assert [each["id"] for each in asyncio.run(client.call("GET", "/v1/models"))[2]["data"]] == ["tiny"]
    assert client.post("/v1/completions", PATHS["completions"])[0] == 403
    assert Client(app).post("/v1/messages", CHAT | {"max_tokens": 1}, x_api_key="k" * 20)[0] == 200
    status, headers, answer = client.post("/v1/chat/completions", CHAT)
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) > 1
    assert client.post("/v1/chat/completions", CHAT, shoal_peer="forged")[0] == 429
    assert client.post("/v1/chat/completions", CHAT, shoal_peer="peer")[0] == 200  # counted by the replica that sent it
    client = Client(app, "b")
    assert client.post("/v1/embeddings", {"model": "tiny", "input": "abc"})[0] == 200
    assert client.post("/v1/chat/completions", CHAT | {"stream": True})[0] == 200
    status, headers, answer = client.post("/v1/messages", CHAT)
    assert (status, headers["retry-after"], answer["type"]) == (429, "12", "error")
    assert "5 output tokens/min" in answer["error"]["message"]
    assert client.post("/v1/messages/count_tokens", CHAT)[0] == 200
    assert app._access.count_tokens()["b"] == {"input": 3 + 21, "output": 6}


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_ends_its_answers(n: int, client: Client, models: Models) -> None:
    async def leave() -> None:
        body = json.dumps(CHAT | {"max_tokens": 2000, "n": n, "stream": True}).encode()
        await client.call("POST", "/v1/chat/completions", body, leave_at=500)

    before = models.tiny.engine.observe().new_tokens
    asyncio.run(leave())
    models.tiny.engine.step()
    seen = models.tiny.engine.observe()
    assert (seen.running, seen.queued) == (0, 0)
    assert seen.new_tokens - before < 1900 * n


def give(fields: dict[str, Any]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """ASGI's `receive` of a client that sends these, and stays."""
    bodies = [json.dumps(fields).encode()]

    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop()}

    return receive


def test_a_client_that_takes_nothing_ends_its_answer(models: Models) -> None:
    app = make_tiny_app(models, limits=RequestLimits(answer_grace_s=0.01))
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()

    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(app(scope, give(CHAT | {"max_tokens": 2000, "stream": True}), send))  # type: ignore[arg-type]
    pickle.dumps(sent[0])  # Ray Serve does, with the messages of what it passes on
    assert len(sent) == 4  # no event was taken from the engine meanwhile
    models.tiny.engine.step()
    assert models.tiny.engine.observe().running == 0


def test_a_client_that_leaves_before_its_first_token_has_spent_its_prompt(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(request: Any, call: Any) -> AsyncIterator[Any]:
        yield await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(models.tiny, "generate", generate)
    body = json.dumps({"model": "tiny", "prompt": "x" * 150}).encode()
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    app = make_tiny_app(models, [ApiKey(name="a", key="a", input_tokens_per_min=100)])
    head = {"method": "POST", "path": "/v1/completions", "headers": [(b"authorization", b"Bearer a")]}
    asyncio.run(app(head, receive, send))  # type: ignore[arg-type]
    monkeypatch.undo()
    assert app._access.count_tokens()["a"]["input"] == 150
    assert Client(app, "a").post("/v1/chat/completions", CHAT)[0] == 429


def test_a_client_that_takes_nothing_ends_what_another_replica_answers(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(name: str, request: HttpRequest, send: Send) -> None:
        assert (request.path, request.list_headers()) == ("/v1/completions", {"shoal-peer": "x"})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise Relayed

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(models, "load", load)
    app = make_tiny_app(models, limits=RequestLimits(answer_grace_s=0.01))
    scope = {
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"shoal-peer", b"x"), (b"expect", b"100-continue")],
    }
    asyncio.run(asyncio.wait_for(app(scope, give({"model": "tiny", "prompt": "a"}), send), 10.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_failure_within_a_stream_is_its_last_event(path: str, client: Client, models: Models) -> None:
    asked = CHAT | {"model": "plain", "max_tokens": 200, "stream": True, "swap": "refuse"}
    models.plain.switch_at = models.plain.engine.observe().new_tokens + 3
    status, _, frames = client.post(f"/v1/{path}", asked)
    assert (status, len(frames) > 2) == (200, True)
    assert find(frames[-1], "message") == ["the weights were replaced, and swap = 'refuse'"]
    models.plain.switch_at = models.plain.engine.observe().new_tokens + 3
    assert client.post(f"/v1/{path}", asked | {"stream": False})[0] == 409


def test_what_is_large_is_rendered_in_a_thread(client: Client, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    render = models.tiny.tokenizer.apply_chat_template

    def record(*arguments: Any, **more: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return render(*arguments, **more)

    monkeypatch.setattr(models.tiny.tokenizer, "apply_chat_template", record)
    client.post("/v1/messages/count_tokens", {"model": "tiny", "messages": USER})
    client.post("/v1/messages/count_tokens", {"model": "tiny", "messages": USER * 1000})
    assert seen == [True, False]
