"""The destination of an endpoint's traces in its spec: `otlp://HOST:PORT`, `file:FOLDER`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from shoal.errors import ConfigError


@dataclass(frozen=True)
class TraceDestination:
    """The destination of spans. target: a URL, or a folder."""

    kind: Literal["otlp", "file"]
    target: str
    ratio: float = 1.0

    @classmethod
    def parse(cls, text: str) -> TraceDestination:
        """Parse a destination. Raises ConfigError."""
        parts = urlsplit(text)
        remedy = "otlp://HOST:PORT, otlps://HOST:PORT or file:FOLDER, with ?ratio=0.01 if not all"
        try:
            ratio = float(parse_qs(parts.query, strict_parsing=True)["ratio"][0]) if parts.query else 1.0
        except (KeyError, ValueError):
            raise ConfigError("trace", text, "has text after ? that is not ratio=NUMBER", remedy) from None
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError("trace", text, "the ratio is not between 0 and 1", remedy)
        match parts.scheme:
            case "otlp" | "otlps" if parts.netloc:
                scheme = "http" if parts.scheme == "otlp" else "https"
                return cls("otlp", f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/v1/traces", ratio)
            case "file" if parts.path:
                return cls("file", parts.path, ratio)
        raise ConfigError("trace", text, "is not a destination of traces", remedy)
