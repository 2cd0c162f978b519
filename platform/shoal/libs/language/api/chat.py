"""OpenAI's /v1/chat/completions, /v1/completions and /v1/embeddings: bodies to jobs, answers to JSON and chunks."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal.libs.language.api.answers import Answers, TextAnswer
from shoal.libs.language.api.bodies import ChatBody, CompletionBody, EmbeddingBody, Fields, Json, field_error, require
from shoal.libs.language.api.prompt import Job, check_length, encode_prompts, make_chat_job, make_job, read_format
from shoal.libs.language.api.tools import ToolCall, read_tool_use
from shoal.libs.language.engine.request import TokenEvent, TokenIds
from shoal.libs.language.text_model import TextModel


class Api(NamedTuple):
    """One path. prepare: without the event loop, may take long; write: takes whole answers; stream: reads them."""

    body: type[Fields]
    prepare: Callable[[TextModel, Any], Job]
    write: Callable[[Answers], Any]
    stream: Callable[[Answers], AsyncGenerator[bytes, None]]


def write_frame(data: object, event: str = "") -> bytes:
    """A server-sent event."""
    head = b"event: %b\n" % event.encode() if event else b""
    return head + b"data: %b\n\n" % msgspec.json.encode(data)


def make_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"


def prepare_chat(model: TextModel, body: ChatBody) -> Job:
    """Raises InferenceError (400)."""
    if body.top_logprobs and not body.logprobs:
        raise field_error("top_logprobs", "needs logprobs = true")
    functions = [require(each, "function", dict, f"tools[{number}]") for number, each in enumerate(body.tools)]
    use = read_tool_use(functions, body.tool_choice, body.parallel_tool_calls)
    wanted = read_format(body.response_format, "response_format")
    most, top = body.max_completion_tokens or body.max_tokens, body.top_logprobs
    return make_chat_job(
        model, body, body.messages, use, "messages", grammars=[wanted], max_tokens=most, top_logprobs=top
    )


def write_chat(answers: Answers) -> Json:
    """A chat.completion."""
    choices = []
    for answer in answers.all:
        events = _take_shown(answers.job, answer)
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": describe_calls(answer.calls)}
        choice = {"index": answer.index, "message": message, "logprobs": _describe_tokens(answers.job, events)}
        choices.append({**choice, "finish_reason": answer.finish, **answers.describe_sampled(answer, events or ())})
    head = _make_head(answers, "chat.completion", "chatcmpl-") | answers.describe_prompt(answers.all[0])
    return {**head, "choices": choices, "usage": answers.count_usage()}


def stream_chat(answers: Answers) -> AsyncGenerator[bytes, None]:
    """chat.completion.chunk, and [DONE]."""

    def describe(answer: TextAnswer, text: str, events: Sequence[TokenEvent] | None, is_first: bool) -> Json:
        delta: Json = {"content": text} if text else {}
        if is_first:
            delta = {"role": "assistant", "content": text}
        if answer.calls:
            calls = describe_calls(answer.calls)
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        if not (delta or events or answer.finish):
            return {}
        choice = {"index": answer.index, "delta": delta}
        choice |= {"logprobs": _describe_tokens(answers.job, events)} if events else {}
        return {"choices": [choice], **(answers.describe_prompt(answer) if is_first else {})}

    return _stream(answers, "chat.completion.chunk", "chatcmpl-", describe)


def prepare_completion(model: TextModel, body: CompletionBody) -> Job:
    """Raises InferenceError (400)."""
    prompts = encode_prompts(model, body.prompt, "prompt", add_special_tokens=body.add_special_tokens)
    wanted = read_format(body.response_format, "response_format")
    more: Json = {"max_tokens": body.max_tokens, "top_logprobs": int(body.logprobs or 0)}
    return make_job(model, body, prompts, grammars=[wanted], names={"top_logprobs": "logprobs"}, **more)


def write_completion(answers: Answers) -> Json:
    """A text_completion."""
    choices = []
    for answer in answers.all:
        events = _take_shown(answers.job, answer)
        choice = {"index": answer.index, "text": answer.text, "logprobs": _list_columns(answers.job, events)}
        choice |= {"finish_reason": answer.finish, **answers.describe_prompt(answer)}
        choices.append(choice | answers.describe_sampled(answer, events or ()))
    head = _make_head(answers, "text_completion", "cmpl-")
    return {**head, "choices": choices, "usage": answers.count_usage()}


def stream_completion(answers: Answers) -> AsyncGenerator[bytes, None]:
    """text_completion, and [DONE]."""

    def describe(answer: TextAnswer, text: str, events: Sequence[TokenEvent] | None, is_first: bool) -> Json:
        if not (text or events or answer.finish):
            return {}
        choice = {"index": answer.index, "text": text, "logprobs": _list_columns(answers.job, events)}
        return {"choices": [choice | (answers.describe_prompt(answer) if is_first else {})]}

    return _stream(answers, "text_completion", "cmpl-", describe)


def prepare_embedding(model: TextModel, body: EmbeddingBody) -> list[TokenIds]:
    """The prompts. Raises InferenceError (400)."""
    prompts = encode_prompts(model, body.input, "input")
    for prompt in prompts:
        check_length(model, prompt, "input")
    return prompts


def write_embeddings(body: EmbeddingBody, num_tokens: int, vectors: Sequence[np.ndarray]) -> Any:
    """A list of embeddings."""
    data = []
    for index, vector in enumerate(vectors):
        floats = vector.astype("<f4")
        shown = base64.b64encode(floats.tobytes()).decode() if body.encoding_format == "base64" else floats.tolist()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def describe_calls(calls: Sequence[ToolCall]) -> list[Json]:
    """Calls as the chat API has them."""
    return [
        {"id": make_id("call_"), "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in calls
    ]


def _make_head(answers: Answers, kind: str, prefix: str) -> Json:
    return {"id": make_id(prefix), "object": kind, "created": int(time.time()), "model": answers.job.body.model}


async def _stream(
    answers: Answers,
    kind: str,
    prefix: str,
    describe: Callable[[TextAnswer, str, Sequence[TokenEvent] | None, bool], Json],
) -> AsyncGenerator[bytes, None]:
    """A chunk for each new text of an answer of which `describe` has something to say."""
    head, begun = _make_head(answers, kind, prefix), set[int]()
    async for answer, text in answers.read():
        events = _take_shown(answers.job, answer)
        if chunk := describe(answer, text, events, answer.index not in begun):
            more = answers.describe_sampled(answer, events or ())
            chunk["choices"][0] |= {"finish_reason": answer.finish or None, **more}
            yield write_frame({**head, **chunk, **answers.describe_progress(answer)})
        begun.add(answer.index)
    if answers.job.body.stream_options.include_usage:
        yield write_frame({**head, "choices": [], "usage": answers.count_usage()})
    yield b"data: [DONE]\n\n"


def _take_shown(job: Job, answer: TextAnswer) -> list[TokenEvent] | None:
    """Its tokens since the last call; None where neither they nor their log-probabilities are wanted."""
    events, answer.shown = answer.shown, []
    is_wanted = job.body.logprobs is not None and job.body.logprobs is not False
    return events if is_wanted or answer.shows_all else None


def _describe_tokens(job: Job, events: Sequence[TokenEvent] | None) -> Json | None:
    """Their log-probabilities."""
    if events is None:
        return None
    described = []
    for event in events:
        top = [_describe_token(job, *each) for each in event.top_logprobs]
        described.append(_describe_token(job, event.token, event.logprob) | {"top_logprobs": top})
    return {"content": described, "refusal": None}


def _describe_token(job: Job, token: int | None, logprob: float) -> Json:
    text = job.model.tokenizer.decode([token])
    known = None if "\ufffd" in text else list(text.encode())  # a part of a character has no text, and no bytes here
    return {"token": text, "logprob": logprob, "bytes": known}


def _list_columns(job: Job, events: Sequence[TokenEvent] | None) -> Json | None:
    """The same as /v1/completions has it; None for none."""
    if not events:
        return None
    decode = job.model.tokenizer.decode
    return {
        "tokens": [decode([event.token]) for event in events],
        "token_logprobs": [event.logprob for event in events],
        "top_logprobs": [{decode([token]): value for token, value in event.top_logprobs} for event in events],
        "text_offset": [event.offset for event in events],
    }


CHAT = Api(ChatBody, prepare_chat, write_chat, stream_chat)
COMPLETIONS = Api(CompletionBody, prepare_completion, write_completion, stream_completion)
