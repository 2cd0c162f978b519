"""What three gateways send to vLLM and read of its answers, sent to `tiny_served` and read of its by a stock client.

Written from a reading of rLLM's model gateway, of verifiers' client for chats and of Agent Lightning's proxy, as they
were in the summer of 2026: the packages themselves are not run here. Run by an environment that has `openai`:

.venv-clients/bin/python tests/libs/language/gateways_of_others.py PORT
"""

import sys
from typing import Any

import openai
from openai.types.chat import ChatCompletion

USER: Any = [{"role": "user", "content": "hi"}]
gpt = openai.OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="x", max_retries=0)


def read_prompt(answer: Any) -> list[int]:
    """rLLM and Agent Lightning: of the answer, as chats have it, else of its first choice, as completions do."""
    return answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids") or []


def read_logprobs(choice: Any) -> list[float]:
    """rLLM: either form; entries without a number are dropped."""
    shown = choice.get("logprobs") or {}
    entries = [each["logprob"] for each in shown.get("content") or []] or shown.get("token_logprobs") or []
    return [each for each in entries if each is not None]


def check(prompt: list[int], ids: list[int], logprobs: list[float], num: int = 9) -> None:
    assert prompt
    assert len(ids) == len(logprobs) == num


def rllm() -> None:
    """Both fields go into every body. A later turn is a completion of tokens, with what else the chat's body had."""
    body = {"model": "tiny", "max_tokens": 9, "temperature": 1.0, "logprobs": True}
    extra: Any = {"return_token_ids": True}
    create: Any = gpt.chat.completions.create
    whole = create(messages=USER, **body, extra_body=extra).model_dump()
    prompt, ids = read_prompt(whole), whole["choices"][0]["token_ids"]
    check(prompt, ids, read_logprobs(whole["choices"][0]))
    extra |= {"prompt": [*prompt, *ids, 33], "add_special_tokens": False}
    second = gpt.post("/completions", body=body | extra, cast_to=object)
    assert read_prompt(second) == extra["prompt"]
    check(read_prompt(second), second["choices"][0]["token_ids"], read_logprobs(second["choices"][0]))
    for kind, asked in ((gpt.chat.completions, {"messages": USER}), (gpt.completions, {"prompt": extra["prompt"]})):
        stream: Any = kind.create(**asked, **body, stream=True, extra_body={"return_token_ids": True})
        chunks = [each.model_dump() for each in stream]
        parts = [each["choices"][0] for each in chunks if each["choices"]]
        sampled = [token for part in parts for token in part.get("token_ids") or []]
        check(read_prompt(chunks[0]), sampled, [each for part in parts for each in read_logprobs(part)])


def verifiers() -> None:
    """Attributes of the stock client's object. A sampler's fields are sent at their neutral values too."""
    sampling = {
        "max_completion_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "logprobs": True,
        "return_token_ids": True,
    }
    sampling |= {"top_k": -1, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0}
    said = {"role": "assistant", "content": "so", "tool_calls": None, "reasoning_content": None}
    for messages in (USER, [*USER, said, *USER]):
        body = {"model": "tiny", "messages": messages, **sampling}
        answer: Any = gpt.post("/chat/completions", body=body, cast_to=ChatCompletion)
        (choice,) = answer.choices
        assert hasattr(choice, "token_ids")
        assert hasattr(answer, "prompt_token_ids")
        check(answer.prompt_token_ids, choice.token_ids, [each.logprob for each in choice.logprobs.content])
    said |= choice.message.model_dump() | {"token_ids": choice.token_ids, "logprobs": choice.logprobs.model_dump()}
    create: Any = gpt.chat.completions.create
    assert create(model="tiny", messages=[*USER, said, *USER], max_tokens=1).usage.completion_tokens == 1
    words = ""
    try:
        create(model="tiny", messages=[{"role": "user", "content": "a" * 3000}])
    except openai.BadRequestError as error:
        words = error.response.text
    assert "context length" in words  # by which it ends the turn, and not the program


def agent_lightning() -> None:
    """The body of an agent with two fields; in evaluation without log-probabilities. Equal prompts are one turn."""
    for mode in ({"temperature": 1.0, "logprobs": True}, {"temperature": 0.0}):
        for path, asked in (("chat/completions", {"messages": USER}), ("completions", {"prompt": "hi"})):
            body = {"model": "tiny", "max_tokens": 9, **asked, **mode, "return_token_ids": True}
            answer: Any = gpt.post(f"/{path}", body=body, cast_to=object)
            check(read_prompt(answer), answer["choices"][0].get("token_ids", []), read_logprobs(answer["choices"][0]))


rllm()
verifiers()
agent_lightning()
