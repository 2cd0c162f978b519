"""Agents of frameworks, in .venv-agents and without code of ours: one after the other, each with a session's variables.

    .venv-agents/bin/python -m benchmarks.agents.framework_agents NAME

Takes {"env": {...}, "text": TEXT} for each episode, and says how many answers and tokens the framework has counted, or
why it has failed. Beside the variables an agent has one setting: its client repeats for as long as a gateway restarts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.talk import commands, say

MODEL, RETRIES, MAX_STEPS = "gpt-4o-mini", 20, 2
AGAIN = "And the other way round?"
Counts = list[int]  # the tokens of each answer
Play = Callable[[str], Counts]


def count_letters(text: str) -> int:
    """Count the letters of a text.

    Args:
        text: of which the letters are counted
    """
    return len(text)


def make_openai_agents(kind: str) -> Play:
    from openai import AsyncOpenAI

    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(disabled=True)
    models = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}

    def play(text: str) -> Counts:
        model = models[kind](MODEL, AsyncOpenAI(max_retries=RETRIES))
        agent = Agent("sorter", instructions="Sort letters.", tools=[function_tool(count_letters)], model=model)
        first = Runner.run_sync(agent, text, max_turns=4)
        second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": AGAIN}], max_turns=4)
        return [each.usage.output_tokens for result in (first, second) for each in result.raw_responses]

    return play


def make_langgraph() -> Play:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def play(text: str) -> Counts:
        agent: Any = create_react_agent(ChatOpenAI(model=MODEL, max_retries=RETRIES), [count_letters])
        said = agent.invoke({"messages": [("user", text)]})["messages"]
        said = agent.invoke({"messages": [*said, ("user", AGAIN)]})["messages"]
        return [each.usage_metadata["output_tokens"] for each in said if each.type == "ai"]

    return play


def make_smolagents(kind: str) -> Play:
    from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

    agents: Any = {"code": CodeAgent, "tools": ToolCallingAgent}
    tools = [tool(count_letters)]

    def play(text: str) -> Counts:
        model = OpenAIModel(MODEL, client_kwargs={"max_retries": RETRIES})
        agent = agents[kind](tools=tools, model=model, max_steps=MAX_STEPS, verbosity_level=LogLevel.OFF)
        agent.run(text)
        used: Iterable[Any] = (getattr(each, "token_usage", None) for each in agent.memory.steps)
        return [each.output_tokens for each in used if each is not None]

    return play


def make_anthropic() -> Play:
    from anthropic import Anthropic

    def play(text: str) -> Counts:
        client, messages, counts = Anthropic(max_retries=RETRIES), list[Any](), []
        for question in (text, AGAIN):
            messages.append({"role": "user", "content": question})
            answer = client.messages.create(model=MODEL, messages=messages, max_tokens=32)
            messages.append({"role": "assistant", "content": answer.content or "-"})
            counts.append(answer.usage.output_tokens)
        return counts

    return play


FRAMEWORKS: dict[str, Callable[[], Play]] = {
    "openai-agents, chat": lambda: make_openai_agents("chat"),
    "openai-agents, responses": lambda: make_openai_agents("responses"),
    "langgraph": make_langgraph,
    "smolagents, CodeAgent": lambda: make_smolagents("code"),
    "smolagents, ToolCallingAgent": lambda: make_smolagents("tools"),
    "anthropic": make_anthropic,
}


def main() -> None:
    play = FRAMEWORKS[sys.argv[1]]()
    say(ready=True)
    for asked in commands():
        os.environ.update(asked["env"])
        try:
            counts = play(asked["text"])
        except Exception as error:  # noqa: BLE001 - what a framework raises is its own
            say(failed=f"{type(error).__name__}: {error}"[:300])
        else:
            say(answers=len(counts), tokens=sum(counts))


if __name__ == "__main__":
    main()
