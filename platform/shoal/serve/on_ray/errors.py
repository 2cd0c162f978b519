"""What an error of ours says, where Ray has left it as the text of a traceback. Called by the shells around Ray."""

from __future__ import annotations

import re

_OURS = re.compile(r"^shoal\.errors\.\w+: (.+)$", re.MULTILINE)


def error_summary(text: str) -> str:
    """The message of the last of our errors in a traceback; "" when there is none."""
    ours = _OURS.findall(text)
    return str(ours[-1]) if ours else ""
