"""Anthropic's /v1/messages: blocks of text and tools to a job, answers to a message and its events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from shoal.errors import InferenceError
from shoal.libs.language.api.answers import Answers, TextAnswer
from shoal.libs.language.api.bodies import Json, MessageBody, read_text, require
from shoal.libs.language.api.chat import Api, make_id, write_frame
from shoal.libs.language.api.prompt import Job, make_chat_job
from shoal.libs.language.api.tools import read_tool_use
from shoal.libs.language.text_model import TextModel

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


def prepare_message(model: TextModel, body: MessageBody) -> Job:
    """Raises InferenceError (400)."""
    if body.n != 1:
        raise InferenceError(400, f"n = {body.n}: /v1/messages has one answer", field="n")
    messages = [{"role": "system", "content": read_text(body.system, "system")}] if body.system else []
    for number, message in enumerate(body.messages):
        messages += _divide(message, f"messages[{number}]")
    functions = []
    for number, tool in enumerate(body.tools):
        path = f"tools[{number}]"
        function = {"name": require(tool, "name", str, path), "description": str(tool.get("description", ""))}
        functions.append(function | {"parameters": require(tool, "input_schema", dict, path)})
    kind = body.tool_choice.get("type", "auto")
    choice = body.tool_choice if kind == "tool" else _CHOICES.get(str(kind), str(kind))
    use = read_tool_use(functions, choice, not body.tool_choice.get("disable_parallel_tool_use", False))
    continues = body.messages[-1].get("role") == "assistant" and "tool_calls" not in messages[-1]
    more: Json = {"max_tokens": body.max_tokens}
    more |= {"stop": tuple(body.stop_sequences)} if body.stop_sequences else {}
    names = {"stop": "stop_sequences"}
    return make_chat_job(model, body, messages, use, "messages", names=names, continues=continues, **more)


def _divide(message: Json, path: str) -> list[Json]:
    """A message of blocks as messages of the chat API."""
    role, content = require(message, "role", str, path), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": read_text(content, f"{path}.content", role)}]
    texts: list[str] = []
    calls: list[Json] = []
    results: list[Json] = []
    for number, block in enumerate(content):
        where = f"{path}.content[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            arguments = json.dumps(require(block, "input", dict, where))
            function = {"name": require(block, "name", str, where), "arguments": arguments}
            calls.append({"id": require(block, "id", str, where), "type": "function", "function": function})
        elif kind == "tool_result":
            text = read_text(block.get("content"), f"{where}.content")
            results.append({"role": "tool", "tool_call_id": require(block, "tool_use_id", str, where), "content": text})
        else:
            texts.append(read_text([block], f"{path}.content"))
    rest = {"role": role, "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})
    return results + [rest] * bool(texts or calls or not results)


def write_message(answers: Answers) -> Json:
    """A message."""
    (answer,) = answers.all
    text = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    tools = [{**_begin_tool(call.name), "input": json.loads(call.arguments)} for call in answer.calls]
    message = {**_make_head(answers), "content": [*text, *tools], **_describe_end(answer)}
    return message | {"usage": _count_usage(answers), **answers.describe_single()}


async def stream_message(answers: Answers) -> AsyncGenerator[bytes, None]:
    """message_start to message_stop."""
    head = {**_make_head(answers), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _write("message_start", message=head | {"usage": _count_usage(answers)})
    index, is_open = 0, False
    async for answer, text in answers.read():
        if text and not is_open:
            is_open = True
            yield _write("content_block_start", index=index, content_block={"type": "text", "text": ""})
        if text:
            delta = {"type": "text_delta", "text": text}
            yield _write("content_block_delta", index=index, delta=delta, **answers.describe_progress(answer))
    if is_open:
        yield _write("content_block_stop", index=index)
        index += 1
    (answer,) = answers.all
    for call in answer.calls:
        yield _write("content_block_start", index=index, content_block=_begin_tool(call.name))
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield _write("content_block_delta", index=index, delta=delta)
        yield _write("content_block_stop", index=index)
        index += 1
    yield _write("message_delta", delta=_describe_end(answer), usage=_count_usage(answers), **answers.describe_single())
    yield _write("message_stop")


def _write(kind: str, **more: object) -> bytes:
    return write_frame({"type": kind, **more}, kind)


def _make_head(answers: Answers) -> Json:
    head = {"id": make_id("msg_"), "type": "message", "role": "assistant", "model": answers.job.body.model}
    return head | answers.describe_prompt(answers.all[0])


def _begin_tool(name: str) -> Json:
    return {"type": "tool_use", "id": make_id("toolu_"), "name": name, "input": {}}


def _count_usage(answers: Answers) -> dict[str, int]:
    return {"input_tokens": answers.job.num_prompt_tokens, "output_tokens": answers.num_new_tokens}


def _describe_end(answer: TextAnswer) -> Json:
    """Why it ended."""
    met = answer.stopped if answer.finish == "stop" else None
    reason = "stop_sequence" if met else _STOPS.get(answer.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": met or None}


MESSAGES = Api(MessageBody, prepare_message, write_message, stream_message)
