"""Agents that know nothing of sessions: stock clients of OpenAI and Anthropic, with the environment of a session.

.venv-clients/bin/python tests/libs/agents/stock_agents.py    # $OPENAI_BASE_URL, ... as a session's `env` has them
"""

from typing import Any

import anthropic
import openai

QUESTION: Any = {"role": "user", "content": "ab"}
TOOL: Any = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
gpt, claude = openai.OpenAI(), anthropic.Anthropic()


def talk() -> None:
    create: Any = gpt.chat.completions.create
    first = create(model="gpt-4o-mini", messages=[QUESTION])
    assert first.model == "gpt-4o-mini"
    again = {"model": "gpt-4o-mini", "messages": [QUESTION, first.choices[0].message, QUESTION]}
    chunks = list(create(**again, stream=True))
    assert chunks[-1].choices[0].finish_reason
    assert create(**again, tools=[TOOL]).choices[0].message.role == "assistant"


def respond() -> None:
    first: Any = gpt.responses.create(model="o9", input="cd", store=False)
    messages: Any = [{"role": "user", "content": "cd"}, *first.output, QUESTION]
    assert gpt.responses.create(model="o9", input=messages, store=False).usage.output_tokens


def converse() -> None:
    asked: Any = {"model": "claude-5", "max_tokens": 5}
    first: Any = claude.messages.create(messages=[QUESTION], **asked)
    messages: Any = [QUESTION, {"role": "assistant", "content": first.content or "-"}, QUESTION]
    with claude.messages.stream(messages=messages, **asked) as stream:
        assert stream.get_final_message().usage.output_tokens


talk()
respond()
converse()
