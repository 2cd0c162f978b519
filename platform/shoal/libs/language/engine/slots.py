"""Which answer has which slot, what its cells hold, and which cells are copied instead of computed.

Owned by an engine. A slot's cells stay valid after its answer has left, until another takes the slot: the least
recently used one. A new answer copies the longest prefix that any slot holds of it, or is about to hold: of the answers
of a group, the first computes the prompt and the others wait for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from shoal.libs.language.engine.answer import AnswerState, CacheSlot, count_common
from shoal.libs.language.engine.cells import CacheCells, TokenSegment
from shoal.libs.language.engine.weights import Weights

MIN_SHARED = 8  # tokens: below, waiting and copying cost more than computing


class SlotTable:
    """`num_answers` answers may have a slot; `spare` more slots are for new weights."""

    def __init__(self, cells: CacheCells, num_answers: int, spare: int, chunk: int, deterministic: bool) -> None:
        self.num_answers, self._spare = num_answers, spare
        self._cells = cells
        self._chunk = chunk
        self._deterministic = deterministic
        self._slots = [CacheSlot() for _ in range(num_answers + spare)]
        self._clock = itertools.count(1)
        self._num_fills = 0
        self.num_shared_tokens = 0  # that were not computed, since the start

    def __getitem__(self, number: int) -> CacheSlot:
        return self._slots[number]

    def forget(self, current: Collection[Weights]) -> None:
        """Drop cells that no answer uses and no new one can: else they would keep their weights in memory."""
        for slot in self._slots:
            if slot.owner is None and slot.weights is not None and slot.weights not in current:
                slot.clear()
                slot.weights = None

    def take(self, answer: AnswerState, weights: Weights) -> None:
        """Give a slot to an answer, under these weights. At most `num_answers` have one."""
        answer.weights = weights
        answer.slot = self._bind(answer, weights)

    def follow(self, answer: AnswerState, weights: Weights) -> None:
        """Let a running answer go over to new weights: at once where its cache is not filled yet, else by a spare slot
        that is filled meanwhile, as soon as there is one."""
        assert answer.slot is not None
        slot = self._slots[answer.slot]
        if answer.fill is not None:
            if self._slots[answer.fill].weights is weights:
                return
            self._release_fill(answer)
        if answer.source is not None or len(answer.known) - len(slot.tokens) > 1:
            self.release(answer)
            self.take(answer, weights)
        elif self._num_fills < self._spare:
            self._num_fills += 1
            answer.fill = self._bind(answer, weights)

    def switch(self, answer: AnswerState, slot: int) -> None:
        """The answer's next token comes from this slot: from now on it is the answer's only one."""
        if answer.fill == slot:
            assert answer.slot is not None
            self._free(answer.slot)
            answer.slot = slot
            answer.fill = None
            answer.weights = self._slots[slot].weights
            self._num_fills -= 1

    def release(self, answer: AnswerState) -> None:
        """Take an answer's slots; their cells stay valid."""
        assert answer.slot is not None
        if answer.fill is not None:
            self._release_fill(answer)
        self._free(answer.slot)
        answer.slot = answer.source = None

    def note(self, segment: TokenSegment) -> None:
        """These tokens' cells are filled."""
        slot = self._slots[segment.slot]
        if slot.num_aligned == segment.start and len(segment.tokens) == self._chunk:
            slot.num_aligned += self._chunk
        slot.tokens += segment.tokens

    def is_replayed(self, answer: AnswerState, slot: int) -> bool:
        """Whether the next token is computed by a row, as it was at first: a chunk would give its cells other bits."""
        behind_prompt = len(self._slots[slot].tokens) >= len(answer.request.prompt) - 1
        return self._deterministic and slot == answer.slot and behind_prompt

    def share(self, answer: AnswerState) -> None:
        """Copy what the answer waits for, if it is there. An answer whose source has left looks for another."""
        if answer.source is None:
            return
        into = answer.slot if answer.fill is None else answer.fill
        assert into is not None
        number, owner = answer.source
        source, slot = self._slots[number], self._slots[into]
        if source.owner is not owner or source.weights is not slot.weights:
            assert slot.weights is not None
            answer.source, weights = None, slot.weights
            self._free(into)
            if answer.fill is None:
                answer.slot = self._bind(answer, weights)
            else:
                answer.fill = self._bind(answer, weights)
        elif len(source.tokens) >= answer.num_shared:
            answer.source = None
            self._copy(number, into, answer.num_shared)

    def _bind(self, answer: AnswerState, weights: Weights) -> int:
        """A free slot, with the longest prefix that can be had, or the promise of one in `answer.source`."""
        num_shared, number = self._find_prefix(answer, weights)
        free = [index for index, slot in enumerate(self._slots) if slot.owner is None]
        taken = min(free, key=lambda index: self._slots[index].used_at)
        source = self._slots[number]
        if num_shared and source.owner is None and (num_shared == len(source.tokens) or taken == number):
            taken = number  # nothing is lost that another could use
            del source.tokens[num_shared:]
            self.num_shared_tokens += num_shared
            source.num_aligned = min(source.num_aligned, num_shared)
        else:
            self._slots[taken].clear()
            if num_shared and len(source.tokens) >= num_shared:
                self._copy(number, taken, num_shared)
            elif num_shared:
                assert source.owner is not None
                answer.source, answer.num_shared = (number, source.owner), num_shared
        slot = self._slots[taken]
        slot.owner = answer
        slot.weights = weights
        slot.used_at = next(self._clock)
        return taken

    def _find_prefix(self, answer: AnswerState, weights: Weights) -> tuple[int, int]:
        """The most cells that a slot holds, or will hold, for this answer, and the slot; (0, 0) for too few."""
        best = (0, 0)
        first = answer.known[:MIN_SHARED]
        for number, slot in enumerate(self._slots):
            if slot.weights is not weights or slot.owner is answer:
                continue
            # What an owner computes itself is a promise; one that waits, perhaps for this answer, promises nothing.
            owner = slot.owner if slot.owner is not None and slot.owner.source is None else None
            known = slot.tokens if owner is None else owner.known
            if known[:MIN_SHARED] != first:
                continue
            if self._deterministic:  # cells of full chunks alone: their bits are those of computing them here
                most = slot.num_aligned
                if owner is not None:
                    most = max(most, (len(owner.request.prompt) - 1) // self._chunk * self._chunk)
                known = known[:most]
            num_common = min(count_common(known, answer.known), len(answer.known) - 1)
            if self._deterministic:  # tokens that were given have been rows, as they are again
                num_common = min(num_common, len(answer.request.prompt) - 1) // self._chunk * self._chunk
            if num_common >= MIN_SHARED and num_common > best[0]:
                best = num_common, number
        return best

    def _copy(self, source: int, target: int, num_cells: int) -> None:
        self._cells.copy(source, target, num_cells)
        self.num_shared_tokens += num_cells
        slot = self._slots[target]
        slot.tokens = self._slots[source].tokens[:num_cells]
        slot.num_aligned = min(self._slots[source].num_aligned, num_cells)

    def _free(self, number: int) -> None:
        slot = self._slots[number]
        slot.owner, slot.used_at = None, next(self._clock)

    def _release_fill(self, answer: AnswerState) -> None:
        assert answer.fill is not None
        self._free(answer.fill)
        answer.fill = answer.source = None
        self._num_fills -= 1
