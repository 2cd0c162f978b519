"""Extracts our error's message from a traceback that Ray passed on as text. Called by the shells around Ray."""

from __future__ import annotations

import re

_OURS = re.compile(r"^shoal\.errors\.\w+: (.+)$", re.MULTILINE)


def error_summary(text: str) -> str:
    """The message of our last error in a traceback; "" for none."""
    ours = _OURS.findall(text)
    return str(ours[-1]) if ours else ""
