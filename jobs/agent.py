"""An agent with the stock client of OpenAI, and no code of Shoal's: it answers, checks itself, and prints the result.

    pip install openai
    shoal run agents model=smollm env=reasoning_gym:chain_sum agent=jobs/agent.py --agents 8

A driver starts it for each episode. OPENAI_BASE_URL and OPENAI_API_KEY, which the client reads, are those of the
episode's session, and SHOAL_TASK is its task. The last line that it prints is graded. docs/agents.md has the rest.
"""

import json
import os

import openai

CHECK = "Check that. Then write the final answer alone, as <answer>...</answer>."


def main() -> None:
    client = openai.OpenAI()
    messages = json.loads(os.environ["SHOAL_TASK"])["messages"]
    first = client.chat.completions.create(model="policy", messages=messages, max_tokens=128)
    messages += [first.choices[0].message, {"role": "user", "content": CHECK}]
    second = client.chat.completions.create(model="policy", messages=messages, max_tokens=64)
    print(" ".join((second.choices[0].message.content or "").split()))


if __name__ == "__main__":
    main()
