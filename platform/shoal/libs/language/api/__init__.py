"""HTTP for models that write text, as the stock clients of OpenAI and Anthropic call it. docs/generation.md."""
