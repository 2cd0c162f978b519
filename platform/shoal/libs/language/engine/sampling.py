"""Tokens from logits: pure functions of a row's logits, its request and its own uniform number.

Rows never meet: a row's token depends on no other row. Legend: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.libs.language.engine.request import Sampling

_COLDEST = 1e-6  # temperature: below, quotients would not be finite
_NEAR = 256  # most probable tokens: nearly always enough for top_p and min_p, without a sort of the vocabulary


class Row(NamedTuple):
    """What one row is sampled by.

    counts:  occurrences of tokens in the answer
    prompt:  the tokens of the prompt, for `repetition_penalty`
    allowed: bool [V], by a grammar
    uniform: in [0, 1)
    behaviour: whether the token's log-probability under the row's own distribution is wanted
    """

    sampling: Sampling
    counts: Mapping[int, int]
    prompt: frozenset[int]
    allowed: Tensor | None
    uniform: float
    top_logprobs: int = 0
    behaviour: bool = False


class Sampled(NamedTuple):
    """token: -1 where the model's logits are not finite. behaviour_logprob: see `TokenEvent`"""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    behaviour_logprob: float | None = None


def draw_uniform(seed: int, index: int, position: int) -> float:
    """The uniform number in [0, 1) of a token. It depends on the seed, the answer and the token's place in the answer
    alone, so that it outlives preemption, and an answer that another engine continues."""
    digest = hashlib.blake2b(f"{seed}/{index}/{position}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """A token for each of the first rows of logits float32 [>= R, V]."""
    total = logits.logsumexp(-1)
    raw = logits[: len(rows)]
    scores = raw
    for number, row in enumerate(rows):
        if _is_altered(row):
            scores = raw.clone() if scores is raw else scores
            scores[number] = _alter(scores[number], row)
    chosen = scores.argmax(-1)
    hot = [number for number, row in enumerate(rows) if row.sampling.temperature > 0]
    behaviour: list[float | None] = [0.0 if row.behaviour else None for row in rows]
    if hot:
        drawn, own = _draw(scores if len(hot) == len(rows) else scores[hot], [rows[number] for number in hot])
        chosen[hot] = drawn
        for number, logprob in zip(hot, own, strict=True):
            behaviour[number] = logprob
    logprobs = (raw.gather(1, chosen[:, None])[:, 0] - total[: len(rows)]).tolist()
    is_finite = total.isfinite().tolist()
    results = []
    for number, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
        top: tuple[tuple[int, float], ...] = ()
        if row.top_logprobs:
            best = (raw[number] - total[number]).topk(row.top_logprobs)
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        results.append(Sampled(token if is_finite[number] else -1, logprobs[number], top, behaviour[number]))
    return results


def _is_altered(row: Row) -> bool:
    chosen = row.sampling
    penalties = chosen.repetition_penalty, chosen.presence_penalty, chosen.frequency_penalty
    return row.allowed is not None or bool(chosen.logit_bias) or penalties != (1.0, 0.0, 0.0)


def _alter(scores: Tensor, row: Row) -> Tensor:
    """Grammar, bias and penalties on one row [V]."""
    chosen = row.sampling
    if row.allowed is not None:
        scores = scores.masked_fill(~row.allowed, -torch.inf)
    if chosen.logit_bias:
        scores[list(chosen.logit_bias)] += scores.new_tensor(list(chosen.logit_bias.values()))
    if chosen.repetition_penalty != 1.0:
        seen = list(row.prompt | row.counts.keys())
        known = scores[seen]
        scores[seen] = torch.where(known > 0, known / chosen.repetition_penalty, known * chosen.repetition_penalty)
    if row.counts and (chosen.presence_penalty or chosen.frequency_penalty):
        times = scores.new_tensor(list(row.counts.values()))
        scores[list(row.counts)] -= chosen.presence_penalty + chosen.frequency_penalty * times
    return scores


def _draw(scores: Tensor, rows: Sequence[Row]) -> tuple[Tensor, list[float | None]]:
    """Tokens [R] by the inverse of each row's distribution function, at its uniform number; and see `Sampled`."""
    temperatures = [max(row.sampling.temperature, _COLDEST) for row in rows]
    scores = scores / scores.new_tensor(temperatures)[:, None]
    uniform = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=scores.device)
    probabilities = scores.softmax(-1).double()
    mass = probabilities.cumsum(-1)
    tokens = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0]
    tokens.clamp_(max=scores.shape[1] - 1)  # of a row that is not finite, whose token is not used
    behaviour: list[float | None] = []
    for number, row in enumerate(rows):
        chosen = row.sampling
        is_filtered = bool(chosen.top_k or chosen.top_p < 1 or chosen.min_p)
        is_wanted = row.behaviour and (chosen.temperature != 1 or is_filtered or _is_altered(row))
        if is_filtered:
            nearest, kept = _filter(scores[number], chosen)
            sums = kept.cumsum(-1)
            place = torch.searchsorted(sums, row.uniform * sums[-1:], right=True).clamp_(max=len(sums) - 1)[0]
            tokens[number] = nearest[place]
        elif is_wanted:
            kept, place = probabilities[number], tokens[number]
        behaviour.append(math.log(kept[place] / kept.sum()) if is_wanted else None)
    return tokens, behaviour


def _filter(scores: Tensor, chosen: Sampling) -> tuple[Tensor, Tensor]:
    """The most probable tokens of a row [V], descending, and their probabilities: 0 for those that top_k, top_p and
    min_p do not leave."""
    size = len(scores)
    num = min(chosen.top_k, size) if chosen.top_k else min(_NEAR, size)
    while True:
        best = scores.topk(num)  # descending
        # top_k comes first: what it leaves is all there is
        total = best.values.logsumexp(-1) if chosen.top_k else scores.logsumexp(-1)
        probabilities = (best.values - total).exp().double()
        mass = probabilities.cumsum(-1)
        keep = (mass - probabilities < chosen.top_p) & (probabilities >= chosen.min_p * probabilities[0])
        keep[0] = True
        if num == size or chosen.top_k or not keep[-1]:
            break
        num = size
    return best.indices, probabilities * keep
