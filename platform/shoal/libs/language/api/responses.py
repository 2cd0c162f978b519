"""OpenAI's /v1/responses without stored responses: items to a job, answers to a response and its events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from shoal.errors import InferenceError
from shoal.libs.language.api.answers import Answers, TextAnswer
from shoal.libs.language.api.bodies import Json, ResponseBody, field_error, read_text, require
from shoal.libs.language.api.chat import Api, make_id, write_frame
from shoal.libs.language.api.prompt import Job, make_chat_job, read_format
from shoal.libs.language.api.tools import ToolCall, read_tool_use
from shoal.libs.language.text_model import TextModel


def prepare_response(model: TextModel, body: ResponseBody) -> Job:
    """Raises InferenceError (400)."""
    if body.n != 1:
        raise InferenceError(400, f"n = {body.n}: /v1/responses has one answer", field="n")
    for number, tool in enumerate(body.tools):
        if tool.get("type") != "function":
            path = f"tools[{number}].type"
            raise field_error(path, f"expected function, got {str(tool.get('type'))[:40]!r}")
    names = ("name", "description", "parameters")
    functions = [{name: each[name] for name in names if each.get(name) is not None} for each in body.tools]
    use = read_tool_use(functions, body.tool_choice, body.parallel_tool_calls)
    wanted, most = read_format(body.text.get("format") or {}, "text.format"), body.max_output_tokens
    return make_chat_job(model, body, _list_messages(body), use, "input", grammars=[wanted], max_tokens=most)


def _list_messages(body: ResponseBody) -> list[Json]:
    """Items as messages of the chat API. Calls of one turn are one message."""
    messages: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        path, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message":
            content = read_text(item.get("content"), f"{path}.content", item.get("role"))
            messages.append({"role": require(item, "role", str, path), "content": content})
        elif kind == "function_call":
            function = {name: require(item, name, str, path) for name in ("name", "arguments")}
            call = {"id": require(item, "call_id", str, path), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = read_text(item.get("output"), f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": require(item, "call_id", str, path), "content": text})
        else:
            raise field_error(f"{path}.type", f"{str(kind)[:40]!r} is not offered here")
    return messages


def write_response(answers: Answers) -> Json:
    """A response."""
    (answer,) = answers.all
    output = [_make_message(make_id("msg_"), answer.text)] if answer.text or not answer.calls else []
    return _make_response(answers, make_id("resp_"), answer, output + [_make_call(call) for call in answer.calls])


async def stream_response(answers: Answers) -> AsyncGenerator[bytes, None]:
    """response.created to response.completed, or response.incomplete."""
    number = -1
    head = make_id("resp_")
    item_id = make_id("msg_")
    part = {"item_id": item_id, "output_index": 0, "content_index": 0}

    def write(kind: str, **more: object) -> bytes:
        nonlocal number
        number += 1
        return write_frame({"type": f"response.{kind}", "sequence_number": number, **more}, f"response.{kind}")

    yield write("created", response=_make_response(answers, head))
    yield write("in_progress", response=_make_response(answers, head))
    output: list[Json] = []
    is_open = False
    async for answer, text in answers.read():
        if not is_open and (text or (answer.finish and not answer.calls)):
            is_open = True
            message = _make_message(item_id, "")
            yield write("output_item.added", output_index=0, item=message | {"status": "in_progress", "content": []})
            yield write("content_part.added", **part, part=message["content"][0])
        if text:
            yield write("output_text.delta", **part, delta=text, logprobs=[], **answers.describe_progress(answer))
    (answer,) = answers.all
    if is_open:
        message = _make_message(item_id, answer.text)
        yield write("output_text.done", **part, text=answer.text, logprobs=[])
        yield write("content_part.done", **part, part=message["content"][0])
        yield write("output_item.done", output_index=0, item=message)
        output.append(message)
    for call in answer.calls:
        item = _make_call(call)
        where = {"output_index": len(output), "item_id": item["id"]}
        started = item | {"arguments": "", "status": "in_progress"}
        yield write("output_item.added", output_index=len(output), item=started)
        yield write("function_call_arguments.delta", **where, delta=call.arguments)
        yield write("function_call_arguments.done", **where, name=call.name, arguments=call.arguments)
        yield write("output_item.done", output_index=len(output), item=item)
        output.append(item)
    response = _make_response(answers, head, answer, output)
    yield write(response["status"], response=response)


def _make_message(name: str, text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": name, "status": "completed", "role": "assistant", "content": [part]}


def _make_call(call: ToolCall) -> Json:
    item = {"type": "function_call", "id": make_id("fc_"), "call_id": make_id("call_"), "status": "completed"}
    return item | {"name": call.name, "arguments": call.arguments}


def _make_response(
    answers: Answers, name: str, answer: TextAnswer | None = None, output: list[Json] | None = None
) -> Json:
    """answer: None while it runs"""
    body: ResponseBody = answers.job.body
    is_cut = answer is not None and answer.finish == "length"
    status = "in_progress" if answer is None else "incomplete" if is_cut else "completed"
    copied = ("model", "temperature", "top_p", "max_output_tokens", "parallel_tool_calls", "tool_choice", "tools")
    response: Json = {"id": name, "object": "response", "created_at": int(time.time()), "status": status}
    response |= {each: getattr(body, each) for each in copied}
    response |= {"instructions": body.instructions or None, "text": body.text or {"format": {"type": "text"}}}
    response |= {"store": False, "previous_response_id": None, "error": None, "output": output or []}
    response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    response |= answers.describe_prompt(answers.all[0])
    if answer is None:
        return response
    before, new, total = answers.count_usage().values()
    usage: Json = {"input_tokens": before, "output_tokens": new, "total_tokens": total}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return response | {"usage": usage, **answers.describe_single()}


RESPONSES = Api(ResponseBody, prepare_response, write_response, stream_response)
