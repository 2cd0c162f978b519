"""The turns of a session as a tree, which owns their tokens: what was sampled is never encoded again.

Clients send texts. Encoded again, the text of an answer may have other tokens, thinking is gone, and calls are spelt in
another form. So the tree finds the turn that a request continues by its messages, and continues the turn's tokens.

    tree = TokenTree(tokenizer)
    plan = tree.plan(messages, tools)                       # messages of `read_messages`
    ...                                                     # an engine samples behind plan.prompt
    turn = tree.add(plan, answer_message, tokens, logprobs, versions)
    tree.segments()                                         # at the session's end

Called by the gateway of sessions, one tree each. It knows no HTTP, engine or process. Legend of shapes: T tokens of a
segment, P of a prompt, N that were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from shoal.libs.agents.sessions.chat_template import PROMPT, Json, encode, render, render_behind

_TOKEN, _LOGPROB = np.dtype("<i4"), np.dtype("<f4")  # as they are on disk


class Turn(msgspec.Struct, frozen=True):
    """A prompt and one answer. As MessagePack it is a record: 12 bytes for each sampled token, 4 for another.

    id:             its number in the tree, higher than its parent's
    parent:         the id of the turn that it continues; None: the prompt is complete
    key:            of its messages, the answer too (`hash_messages`)
    packed_prompt:  tokens of the prompt beyond the parent's end, int32
    packed_tokens:  that were sampled, the end token too, int32; packed_logprobs: theirs, float32
    spans:          the versions that sampled them, each with its number of tokens
    trains:         whether the sampled tokens are learnt; why_not: the reason, "" for none
    finish:         how the answer ended
    """

    id: int
    parent: int | None
    key: bytes
    packed_prompt: bytes
    packed_tokens: bytes
    packed_logprobs: bytes
    spans: tuple[tuple[int, int], ...]
    trains: bool = True
    why_not: str = ""
    finish: str = ""

    @property
    def prompt(self) -> np.ndarray:
        """int32 [P], beyond the parent's end."""
        return np.frombuffer(self.packed_prompt, _TOKEN)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [N]"""
        return np.frombuffer(self.packed_tokens, _TOKEN)

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [N]"""
        return np.frombuffer(self.packed_logprobs, _LOGPROB)

    @property
    def versions(self) -> np.ndarray:
        """int64 [N]"""
        spans = np.array(self.spans, np.int64).reshape(-1, 2)
        return np.repeat(spans[:, 0], spans[:, 1])


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request is in the tree. n answers of one request are added with the same plan.

    prompt:             [P] all tokens that the model reads
    parent:             the turn that it continues; None: the template has rendered the history
    num_parent_tokens:  of the prompt, those of the parent and before
    is_branch:          whether the session has turns, and none is continued
    key:                of the request's messages
    """

    prompt: tuple[int, ...]
    parent: Turn | None
    num_parent_tokens: int
    is_branch: bool
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSegment:
    """The tokens from the first turn to a last one.

    tokens:    int32 [T]
    trains:    bool [T], of tokens that are learnt in this segment, and in no other
    logprobs:  float32 [T], versions: int64 [T], of all sampled tokens; 0 for others
    turns:     the ids, from the first turn to the last
    """

    tokens: np.ndarray
    trains: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turns: tuple[int, ...]


class TokenTree:
    """The turns of one session, by id. One thread adds turns; `plan` reads, and may be called in others.

    tokenizer: of transformers, whose template `check_template` accepts
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.turns: dict[int, Turn] = {}
        self._by_key: dict[bytes, Turn] = {}

    def plan(
        self,
        messages: Sequence[Json],
        tools: list[Json] | None = None,
        template_fields: Mapping[str, Any] | None = None,
    ) -> Plan:
        """The prompt of a request: it continues the longest turn whose messages are the request's first ones, of equal
        ones the newest. Where there is none, the template renders the history.

        messages:        of `read_messages`
        tools:           of `ToolUse.describe`
        template_fields: the request's chat_template_kwargs

        Behind the tokens of a turn stands what the template writes behind an answer. Its first token, which ends the
        answer, is there once: sampled, or the template's, where the answer was cut or ended by another token.
        Raises InferenceError (400) for what the template refuses.
        """
        options = tools, PROMPT, template_fields
        keys = hash_messages(messages, tools, template_fields)
        for number in range(len(messages), 0, -1):
            parent = self._by_key.get(keys[number])
            if parent is None:
                continue
            behind = render_behind(self.tokenizer, messages, number - 1, *options)
            if not behind:  # the template does not show the answer
                continue
            added = encode(self.tokenizer, behind)
            if tuple(parent.tokens[-1:]) == added[:1]:
                added = added[1:]
            tokens = np.concatenate([each for turn in self._list_path(parent) for each in (turn.prompt, turn.tokens)])
            return Plan((*tokens.tolist(), *added), parent, len(tokens), False, keys[-1])
        prompt = encode(self.tokenizer, render(self.tokenizer, messages, *options))
        return Plan(prompt, None, 0, bool(self.turns), keys[-1])

    def add(
        self,
        plan: Plan,
        answer_message: Json,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        trains: bool = True,
        why_not: str = "",
        finish: str = "",
    ) -> Turn:
        """Add an answer to a request.

        answer_message: of `read_messages`, as the client receives it
        tokens:         [N] all that were sampled, the end token too; logprobs, versions: [N]
        trains, why_not, finish: of the Turn
        """
        assert len(tokens) == len(logprobs) == len(versions)
        turn = Turn(
            id=next(reversed(self.turns), -1) + 1,
            parent=None if plan.parent is None else plan.parent.id,
            key=_extend_key(plan.key, read_key(answer_message)),
            packed_prompt=np.array(plan.prompt[plan.num_parent_tokens :], _TOKEN).tobytes(),
            packed_tokens=np.array(tokens, _TOKEN).tobytes(),
            packed_logprobs=np.array(logprobs, _LOGPROB).tobytes(),
            spans=tuple((version, len([*group])) for version, group in groupby(versions)),
            trains=trains,
            why_not=why_not,
            finish=finish,
        )
        self.restore([turn])
        return turn

    def restore(self, turns: Iterable[Turn]) -> None:
        """Add turns that were written, in any order."""
        for turn in sorted(turns, key=lambda each: each.id):
            self.turns[turn.id] = self._by_key[turn.key] = turn

    def discard(self, turns: Iterable[Turn]) -> None:
        """Forget turns that could not be written. Of equal messages, an earlier turn is not found again."""
        for turn in turns:
            del self.turns[turn.id]
            self._by_key.pop(turn.key, None)

    def segments(self) -> list[TrainingSegment]:
        """A segment for each turn that none continues, in their order; none for one that has nothing to train.

        A turn in several is trained in the first of them: the trained tokens of all segments are the sampled tokens of
        the turns that train.
        """
        segments: list[TrainingSegment] = []
        assigned: set[int] = set()
        parents = {turn.parent for turn in self.turns.values()}
        for leaf in self.turns.values():
            if leaf.id in parents:
                continue
            path = self._list_path(leaf)
            own = [turn.id for turn in path if turn.id not in assigned]
            assigned.update(own)
            sizes = [(len(turn.prompt), len(turn.tokens)) for turn in path]
            masks = [[False, turn.trains and turn.id in own] for turn in path]
            segment = TrainingSegment(
                tokens=np.concatenate([each for turn in path for each in (turn.prompt, turn.tokens)]),
                trains=np.concatenate([np.repeat(mask, size) for mask, size in zip(masks, sizes, strict=True)]),
                logprobs=np.concatenate(
                    [each for turn in path for each in (np.zeros_like(turn.prompt, _LOGPROB), turn.logprobs)]
                ),
                versions=np.concatenate(
                    [each for turn in path for each in (np.zeros_like(turn.prompt), turn.versions)]
                ),
                turns=tuple(turn.id for turn in path),
            )
            if segment.trains.any():
                segments.append(segment)
        return segments

    def _list_path(self, leaf: Turn) -> list[Turn]:
        """The turns from the first one to this one."""
        path = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(self.turns[parent])
        return path[::-1]


def read_key(message: Json) -> str:
    """What equal messages have in common: role, text without outer white space, names and arguments of calls.

    Clients drop ids and fields that they do not know, and write JSON again: objects in another order, 1.0 as 1.
    """
    read: list[Any] = []
    if functions := [call["function"] for call in message.get("tool_calls", ())]:
        calls = json.dumps([(each["name"], each["arguments"]) for each in functions])
        read = json.loads(calls, parse_float=lambda text: int(found) if (found := float(text)).is_integer() else found)
    return json.dumps([message["role"], message["content"].strip(), read], sort_keys=True)


def hash_messages(
    messages: Sequence[Json], tools: list[Json] | None, template_fields: Mapping[str, Any] | None
) -> list[bytes]:
    """Keys of 16 bytes of the first 0, 1, ... and all messages. Tools and fields of the template are in each."""
    keys = [_extend_key(b"", json.dumps([tools or [], template_fields or {}], sort_keys=True))]
    for message in messages:
        keys.append(_extend_key(keys[-1], read_key(message)))
    return keys


def _extend_key(key: bytes, text: str) -> bytes:
    return blake2b(key + text.encode(), digest_size=16).digest()
