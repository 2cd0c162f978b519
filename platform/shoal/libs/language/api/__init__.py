"""HTTP for models that write text, as the stock clients of OpenAI and Anthropic call it. docs/generation.md."""

from shoal.libs.language.api.app import make_app

__all__ = ["make_app"]
