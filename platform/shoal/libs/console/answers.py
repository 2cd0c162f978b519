"""How the console answers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def answer_json(content: Any, status: int = 200) -> Response:
    """JSON, in which numbers that are not finite are null."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
