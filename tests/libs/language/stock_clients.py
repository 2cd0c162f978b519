"""Stock clients of OpenAI and Anthropic against `tiny_served`; run by an environment that has them.

.venv-clients/bin/python tests/libs/language/stock_clients.py PORT
"""

import asyncio
import sys
from typing import Any

import anthropic
import openai

URL = f"http://127.0.0.1:{sys.argv[1]}"
USER: Any = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
gpt = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)


def chat() -> None:
    create: Any = gpt.chat.completions.create
    raw = gpt.chat.completions.with_raw_response.create(
        model="tiny@3", messages=USER, max_tokens=6, n=2, logprobs=True, top_logprobs=2, seed=1, user="me"
    )
    assert raw.headers["shoal-model-version"] == "3"
    done: Any = raw.parse()
    assert [each.shoal for each in done.choices] == [{"spans": [[3, 6]]}] * 2
    assert len(done.choices[0].logprobs.content) == 6
    assert done.usage.completion_tokens == 12
    asked = {"model": "tiny", "messages": USER, "max_tokens": 6, "seed": 1}
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 50}))
    assert chunks[-1].usage.completion_tokens == 6
    assert chunks[-2].choices[0].shoal == {"spans": [[3, 6]]}
    asked |= {"stream": True, "extra_headers": {"idempotency-key": "k"}}
    chunks = list(create(**asked))
    given = [pair for each in chunks[:3] for pair in each.shoal["given"]]
    rest = list(create(**asked, extra_body={"given": given}))
    texts = ["".join(each.choices[0].delta.content for each in some) for some in (chunks, chunks[:3] + rest)]
    assert texts[0] == texts[1]
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    found = create(model="tiny", messages=USER, response_format=schema, max_tokens=400, temperature=0.2)
    assert found.choices[0].message.content.replace(" ", "").startswith("{")
    tool = {"type": "function", "function": {"name": "where", "parameters": CITY}}
    with gpt.chat.completions.stream(model="tiny", messages=USER, tools=[tool], tool_choice="required") as stream:
        message: Any = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "where"
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    assert create(model="tiny", messages=[*USER, message, answer], max_tokens=2).choices[0].finish_reason == "length"


def others() -> None:
    assert gpt.completions.create(model="bare", prompt=["a", "b"], max_tokens=3).usage.total_tokens == 8
    assert [each.choices[0].text is not None for each in gpt.completions.create(model="bare", prompt="a", stream=True)]
    assert {each.id for each in gpt.models.list()} == {"tiny", "plain", "bare"}
    assert gpt.models.retrieve("tiny").owned_by == "shoal"
    assert len(gpt.embeddings.create(model="tiny", input=["a", "b"]).data[1].embedding) == 8


def responses() -> None:
    tool: Any = {"type": "function", "name": "where", "parameters": CITY, "strict": True}
    done = gpt.responses.create(model="tiny", input="hi", instructions="be kind", max_output_tokens=6)
    assert (done.usage.output_tokens, done.status, done.output_text == "") == (6, "incomplete", False)
    with gpt.responses.stream(model="tiny", input=USER, tools=[tool], tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[-1], final.output[0].parsed_arguments) == ("response.completed", {"city": "Rome"})
    call: Any = final.output[0]
    items: Any = [*USER, call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    with gpt.responses.stream(model="tiny", input=items, max_output_tokens=6) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text


def claudes() -> None:
    tool: Any = {"name": "where", "input_schema": CITY}
    done: Any = claude.messages.create(model="tiny", messages=USER, max_tokens=6, system="be kind")
    assert (done.stop_reason, done.usage.output_tokens, done.shoal) == ("max_tokens", 6, {"spans": [[3, 6]]})
    asked: Any = {"model": "tiny", "max_tokens": 400}
    with claude.messages.stream(messages=USER, tools=[tool], tool_choice={"type": "any"}, **asked) as stream:
        final: Any = stream.get_final_message()
    assert (final.content[-1].input, final.stop_reason) == ({"city": "Rome"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": final.content[-1].id, "content": "sunny"}
    talk: Any = [*USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    asked["max_tokens"] = 6
    with claude.messages.stream(messages=talk, stop_sequences=["zz"], **asked) as stream:
        assert "".join(stream.text_stream) is not None
        assert stream.get_final_message().usage.output_tokens <= 6
    assert claude.messages.count_tokens(model="tiny", messages=USER).input_tokens == 21
    assert claude.models.list().data[0].display_name == "tiny"


def errors() -> None:
    for ask, kind in (
        (lambda: gpt.chat.completions.create(model="none", messages=USER), openai.NotFoundError),
        (lambda: gpt.chat.completions.create(model="bare", messages=USER), openai.BadRequestError),
        (lambda: gpt.responses.retrieve("resp_1"), openai.NotFoundError),
        (lambda: gpt.responses.create(model="tiny", input="a", previous_response_id="r"), openai.BadRequestError),
        (lambda: claude.messages.create(model="none", messages=USER, max_tokens=1), anthropic.NotFoundError),
    ):
        found: Any = None
        try:
            ask()
        except kind as error:
            found = error.body
        assert found.get("error", found)["message"], kind


async def cancelled() -> None:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="x")
    stream: Any = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
    async for _ in stream:
        break
    await stream.close()


chat()
others()
responses()
claudes()
errors()
asyncio.run(cancelled())
