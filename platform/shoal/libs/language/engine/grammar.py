"""Grammars of structured output, by llguidance: what an answer may continue with.

A grammar is compiled once, by the first request with it, within llguidance's limits of symbols, lexer states and work;
one that breaks them, or that no text satisfies, is refused before a token is computed.

Classes of a regular expression are those of ECMA 262, as in JSON schemas: `\\d` is 0-9, `\\w` is A-Z, a-z, 0-9 and _.
Between the parts of a JSON is little white space, in which a poor model would else write all of its tokens.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError, needs_extra
from shoal.libs.language.engine.request import MAX_CHOICES, GrammarKind

MAX_GRAMMAR_CHARS = 64 * 1024
MAX_COMPILED = 64
JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,16}"}  # a space, or a line of pretty JSON


class GrammarCompiler:
    """Compiles for one tokenizer: a fast one of transformers, or one that llguidance's TokenizerWrapper takes."""

    def __init__(self, tokenizer: Any, num_tokens: int, stop_tokens: Sequence[int]) -> None:
        with needs_extra("language"):
            import llguidance
            import llguidance.hf
        if hasattr(tokenizer, "backend_tokenizer"):
            ends = list(stop_tokens) or None
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=ends)
        else:
            wrapper = llguidance.TokenizerWrapper(tokenizer)
            self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=num_tokens)
        # A step is bounded too: the others of a batch wait for it.
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False
        )
        self._make, self._to_lark = llguidance.LLMatcher, llguidance.regex_to_lark
        self._compiled: OrderedDict[tuple[str, str], Matcher] = OrderedDict()  # the one used last at the end
        self._lock = threading.Lock()

    def start(self, kind: GrammarKind, value: Any) -> Matcher:
        """The beginning of an answer: quick for a grammar that was compiled, from any thread. Raises ConfigError."""
        key = kind, value if isinstance(value, str) else json.dumps(value)
        with self._lock:
            if (matcher := self._compiled.pop(key, None)) is not None:
                self._compiled[key] = matcher
        if matcher is None:
            matcher = self._compile(kind, value)
            with self._lock:
                self._compiled[key] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return matcher.fork()

    def _compile(self, kind: GrammarKind, value: Any) -> Matcher:
        text = value if isinstance(value, str) else json.dumps(value)
        shown = text[:40]
        if len(text) > MAX_GRAMMAR_CHARS:
            raise ConfigError("grammar", shown, f"has {len(text)} characters", f"expected {MAX_GRAMMAR_CHARS} at most")
        if kind in ("regex", "lark") and not isinstance(value, str):
            raise ConfigError("grammar", shown, "expected a text")
        if kind == "json_schema" and not isinstance(value, (str, dict)):
            raise ConfigError("grammar", shown, "expected an object")
        if kind == "regex":
            grammar = self._make.grammar_from_lark(f"start: /{self._to_lark(value, 'dw')}/")
        elif kind in ("json_schema", "lark"):
            lark = text if kind == "lark" else f"start: %json {text}"
            begin = f' {{"x-guidance": {json.dumps(JSON_OPTIONS)}'
            lark = re.sub(r"(?m)^(.*?%json)\s*\{\s*(\}?)", lambda found: f"{found[1]}{begin}{found[2] or ', '}", lark)
            grammar = self._make.grammar_from_lark(lark)
        elif kind == "choice":
            if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES or not all(value):
                raise ConfigError("grammar", shown, f"expected 1 to {MAX_CHOICES} texts")
            grammar = self._make.grammar_from_lark("start: " + " | ".join(json.dumps(str(each)) for each in value))
        else:
            raise ConfigError("grammar", kind, "expected json_schema, regex, lark or choice")
        matcher = self._make(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one finds what no text satisfies, and what is too dear
        if matcher.is_error():
            problem = matcher.get_error()  # a regex's has its reason below the regex
            reason = (re.findall("^error: (.*)", problem, re.MULTILINE) or problem.splitlines())[0]
            raise ConfigError("grammar", shown, reason[:300])
        return Matcher(matcher)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fork(self) -> Matcher:
        """Another answer from here."""
        return Matcher(self._matcher.deep_copy())

    @property
    def problem(self) -> str:
        """Why the grammar cannot be followed any further; "" while it can."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def allow(self, num_tokens: int, device: torch.device) -> Tensor:
        """Tokens that may come next, bool [num_tokens]."""
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) != 0
        if len(allowed) != num_tokens:
            allowed = torch.nn.functional.pad(allowed[:num_tokens], (0, max(0, num_tokens - len(allowed))))
        return allowed.to(device)

    def advance(self, token: int) -> None:
        """Take a token that was allowed."""
        self._matcher.consume_token(token)
