"""Text of an answer, token by token: never half a character, cut before the first stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

_UNFINISHED = "\ufffd"  # what bytes decode to that are no character yet
_MAX_PENDING = 4  # tokens: a character of UTF-8 has four bytes, so what is longer will never be one
_CONTEXT = 6  # tokens of the prompt that decide whether a space begins the text

_MAX_DECODED = 16_384  # texts that are remembered
Decode = Callable[[list[int]], str]


def remember(decode: Decode) -> Decode:
    """The same function, which remembers what it decoded last: the few tokens that a text ends with come back."""
    known = lru_cache(_MAX_DECODED)(lambda tokens: decode(list(tokens)))
    return lambda tokens: known(tuple(tokens))


class TextStream:
    """Decodes the last few tokens only, and holds back what may become a character or a stop text.

    `push` and `finish` return text that is certain; `stopped` is the stop text that was met, `num_chars` the length of
    all that was decoded.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._tokens = list(prompt[-_CONTEXT:])
        self._read = len(self._tokens)  # tokens that are text already
        self._before = decode(self._tokens)
        self._retained = ""
        self.num_chars = 0
        self.stopped = ""

    def push(self, token: int) -> str:
        """Add a token."""
        self._tokens.append(token)
        now = self._decode(self._tokens)
        is_whole = len(now) > len(self._before) and not now.endswith(_UNFINISHED)
        if not is_whole and len(self._tokens) - self._read < _MAX_PENDING:
            return ""
        return self._take(now)

    def finish(self) -> str:
        """The rest, with unfinished characters as replacement characters."""
        text = self._take(self._decode(self._tokens)) + self._retained
        self._retained = ""
        return text

    def _take(self, now: str) -> str:
        if self.stopped:
            return ""
        self._retained += now[len(self._before) :]
        self.num_chars += len(now) - len(self._before)
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        self._before = self._decode(self._tokens)
        met = [(begin, stop) for stop in self._stops if (begin := self._retained.find(stop)) >= 0]
        if met:
            begin, self.stopped = min(met)
            text, self._retained = self._retained[:begin], ""
            return text
        # the longest end of what is held that begins a stop text
        most = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(most, len(self._retained)), 0, -1):
            if any(stop.startswith(self._retained[-length:]) for stop in self._stops):
                text, self._retained = self._retained[:-length], self._retained[-length:]
                return text
        text, self._retained = self._retained, ""
        return text
