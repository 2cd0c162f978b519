"""What an engine takes and gives: requests, events, and what can be observed. Plain data, checked at the border."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shoal.errors import ConfigError, suggest

Swap = Literal["continue", "finish", "refuse"]
GrammarKind = Literal["json_schema", "regex", "lark", "choice"]
FinishReason = Literal["stop", "length", "cancelled", "deadline", "swapped", "error"]

TokenIds = tuple[int, ...]

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
SWAPS = ("continue", "finish", "refuse")


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits; temperature 0 takes the greatest.

    Applied in this order: grammar, `logit_bias`, penalties, temperature, `top_k`, `top_p`, `min_p`.

    repetition_penalty: divides positive logits of tokens in prompt and answer, multiplies negative ones (1909.05858)
    presence_penalty, frequency_penalty: subtracted once, and per occurrence, for tokens of the answer
    min_p:              least probability, as a share of the greatest (2407.01082)
    seed:               of the request's own uniform stream; the engine draws one where it is None
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class TextRequest:
    """A prompt, and what is wanted of its continuation.

    max_tokens:    None: as many as the context holds
    num_answers:   answers of their own streams, after one prefill; their events have `index` 0, 1, ...
    stop:          texts that end an answer; the answer is cut before them
    stop_tokens:   tokens that end an answer; None: those of the engine
    given:         tokens that were generated already, elsewhere: the answer continues behind them, and the same stream
                   of uniform numbers with it
    grammar:       what the answer must satisfy: its kind, and a JSON schema, a regular expression, a Lark grammar, or
                   a list of texts
    top_logprobs:  alternatives reported with each token
    behaviour:     report how likely each token was under the distribution that it was sampled from
    adapter:       the name of an adapter; "" for the base model
    swap:          when the weights are replaced: `continue` under the new ones once its cache was filled again by
                   them, `finish` under the old ones, or `refuse`: end. None: `continue`, or what an endpoint says
    priority:      a request of a higher one is admitted first, and takes the slot of a lower one, which waits
    begin_s, end_s: seconds from now within which the first and the last token must come; None: no limit
    """

    prompt: TokenIds
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    num_answers: int = 1
    stop: tuple[str, ...] = ()
    stop_tokens: TokenIds | None = None
    given: TokenIds = ()
    grammar: tuple[GrammarKind, Any] | None = None
    top_logprobs: int = 0
    behaviour: bool = False
    adapter: str = ""
    swap: Swap | None = None
    priority: int = 0
    begin_s: float | None = None
    end_s: float | None = None


class TokenEvent(msgspec.Struct, frozen=True):
    """A token of an answer, or its end, or both.

    token:        None where the answer ends without another token
    logprob:      natural logarithm of the token's probability under the model's own distribution: before grammar,
                  bias, penalties and temperature, as OpenAI's API has it
    top_logprobs: (token, logprob) of the most probable tokens, descending
    version:      of the weights that computed this token
    text:         what is certain by now, and not yet reported: never half a character, nor the begin of a stop text
    spans:        at the end: (version, number of tokens) in order, over all tokens that this engine generated
    offset:       where the token's text begins in the answer's
    stopped:      at the end: the stop text that was met. Tokens whose text does not begin before it are no answer
    behaviour_logprob: as `logprob`, under the distribution that the token was sampled from (0 for a greedy one). None
                  where the model's own was, or where the request does not ask for it
    """

    request: int
    index: int
    token: int | None = None
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()
    version: int | str = 0
    text: str = ""
    finish: FinishReason | None = None
    problem: str = ""
    spans: tuple[tuple[int | str, int], ...] = ()
    offset: int = 0
    stopped: str = ""
    behaviour_logprob: float | None = None


@dataclass(frozen=True)
class Observation:
    """Counts of an engine, now and since it was made.

    cells_used: share of the cache's cells that hold keys and values of a running answer
    versions:   answers that run, by version
    pending:    the version that waits until an older one is no longer used; None for none
    step_s:     expected seconds of a step that is full
    """

    running: int
    queued: int
    queued_tokens: int
    cells_used: float
    versions: Mapping[int | str, int]
    current: int | str
    pending: int | str | None
    step_s: float
    prompt_tokens: int
    shared_tokens: int
    new_tokens: int
    refilled_tokens: int
    preempted: int


@dataclass(frozen=True)
class Limits:
    """What an engine refuses beyond. `length`: tokens of prompt and answer together."""

    num_tokens: int
    length: int
    max_answers: int
    has_text: bool


def check_request(request: TextRequest, limits: Limits) -> None:
    """Raises ConfigError that names the field."""
    _check_tokens("prompt", request.prompt, limits.num_tokens)
    _check_tokens("given", request.given, limits.num_tokens)
    if not request.prompt:
        raise ConfigError("prompt", (), "holds no token", "give one at least, such as the model's first")
    if (known := len(request.prompt) + len(request.given)) >= limits.length:
        raise ConfigError("prompt", f"{known} tokens", f"leaves no token of the context length of {limits.length}")
    _check_range("max_tokens", request.max_tokens, 1, limits.length)
    if request.max_tokens is not None and request.max_tokens <= len(request.given):
        raise ConfigError("given", f"{len(request.given)} tokens", f"are max_tokens = {request.max_tokens} already")
    _check_range("num_answers", request.num_answers, 1, limits.max_answers)
    _check_range("top_logprobs", request.top_logprobs, 0, min(MAX_TOP_LOGPROBS, limits.num_tokens))
    if request.given and request.num_answers > 1:
        raise ConfigError("given", f"{len(request.given)} tokens", "continue one answer alone")
    if request.swap is not None and request.swap not in SWAPS:
        raise ConfigError("swap", request.swap, f"expected {', '.join(SWAPS)}", suggest(request.swap, SWAPS))
    for name, seconds in (("begin_s", request.begin_s), ("end_s", request.end_s)):
        if seconds is not None and not seconds > 0:
            raise ConfigError(name, seconds, "must be above zero")
    _check_stops(request, limits)
    _check_sampling(request.sampling, limits.num_tokens)


def _check_tokens(name: str, tokens: TokenIds, num_tokens: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < num_tokens):
        raise ConfigError(name, f"{len(tokens)} tokens", f"holds one outside of 0 to {num_tokens - 1}")


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(name, value, f"expected {low} to {high}")


def _check_stops(request: TextRequest, limits: Limits) -> None:
    if len(request.stop) > MAX_STOPS:
        raise ConfigError("stop", f"{len(request.stop)} texts", f"expected {MAX_STOPS} at most")
    for text in request.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise ConfigError("stop", text[:MAX_STOP_CHARS], f"expected 1 to {MAX_STOP_CHARS} characters")
    if request.stop and not limits.has_text:
        raise ConfigError("stop", request.stop[0], "needs an engine with a tokenizer", "give stop_tokens")
    if len(request.stop_tokens or ()) > MAX_BIASES:
        raise ConfigError("stop_tokens", f"{len(request.stop_tokens or ())} tokens", f"expected {MAX_BIASES} at most")


def _check_sampling(sampling: Sampling, num_tokens: int) -> None:
    _check_range("temperature", sampling.temperature, 0.0, 100.0)
    _check_range("top_k", sampling.top_k, 0, math.inf)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if len(sampling.logit_bias) > MAX_BIASES:
        raise ConfigError("logit_bias", f"{len(sampling.logit_bias)} tokens", f"expected {MAX_BIASES} at most")
    _check_tokens("logit_bias", tuple(sampling.logit_bias), num_tokens)
    for token, bias in sampling.logit_bias.items():
        _check_range(f"logit_bias.{token}", bias, -100.0, 100.0)
