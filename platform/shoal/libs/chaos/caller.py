"""Callers of a model while faults strike: each answer is complete, to its own question, and of one live version."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from shoal.client import ConfigError, ConnectionLost, InferenceError, StreamedText
from shoal.client.discovery import FoundEndpoint
from shoal.libs.chaos.promises import Promise
from shoal.open_inference.messages import ModelMetadata

PROMPTS = ("One", "Once upon a time", "The sea", "A shoal of", "In the beginning", "Two and two", "Dear", "def main(")
NUM_QUESTIONS = len(PROMPTS)
NUM_TOKENS = 12
PATIENCE_S = 60.0  # for an answer: longer than a fault lasts, and what it has broken needs to come back
PAUSE_S = 0.02
TOLERANCE = 1e-4  # between places in a batch, and batches of different sizes: sums have another order there


class EndpointCaller(ABC):
    """Asks from `start` until `close`, in a thread: the same questions again and again.

    A question, asked of one version twice, has one answer.
    """

    def __init__(self, found: FoundEndpoint, model: str) -> None:
        self.model = model
        self.num_answers = 0
        self._client = found.connect(timeout_s=PATIENCE_S, num_retries=1000, retry_lost=True)
        self._known: dict[tuple[int, int], Any] = {}  # answers, by version and question
        self._wrong: list[str] = []
        self._failures = Counter[str]()
        self._num_asked = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask nothing more; a request that is on its way may still take its time."""
        self._is_over.set()

    def close(self) -> None:
        """Idempotent."""
        self.stop()
        self._thread.join()
        self._client.close()

    def check(self, live: Collection[int]) -> Iterator[Promise]:
        """After `close`. live: the versions that were published or registered; none: they were not recorded"""
        never = sorted({version for version, _ in self._known} - {*live}) if live else []
        wrong = [*self._wrong, *(f"version {each} was never live" for each in never)]
        evidence = f"{self.num_answers:,} answers of {len({version for version, _ in self._known})} versions"
        if not self.num_answers:
            wrong.append("it has answered nothing")
        yield Promise(f"{self.model}: no answer mixed, doubled, or of a version that was never live", not wrong,
                      "; ".join(wrong[:3]) or evidence)  # fmt: skip
        lost = "; ".join(f"{num} times {problem}" for problem, num in self._failures.most_common(3))
        all_answered = f"all {self._num_asked:,} requests were answered"
        yield Promise(f"{self.model}: no answer lost", not self._failures, lost or all_answered)

    def _run(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            try:
                number = self._num_asked % NUM_QUESTIONS
                self._num_asked += 1
                self._ask(number)
                self.num_answers += 1
            except (ConfigError, ConnectionLost, InferenceError) as error:
                if self._is_over.is_set() or not self.num_answers:  # its first version is on its way
                    self._num_asked -= 1
                    continue
                self._failures[str(error)[:120]] += 1
                time.sleep(1.0)

    @abstractmethod
    def _ask(self, number: int) -> None:
        """One of the questions. Raises ConnectionLost, InferenceError."""


class RowCaller(EndpointCaller):
    """Asks for two equal rows of random numbers, whose outputs are equal.

    metadata: of the model
    """

    def __init__(self, found: FoundEndpoint, model: str, metadata: ModelMetadata) -> None:
        super().__init__(found, model)
        rng = np.random.default_rng(0)
        self._has_rows = all(each.shape[:1] == [-1] for each in metadata.inputs)
        self._questions = [self._make_question(metadata, rng) for _ in range(NUM_QUESTIONS)]
        self._largest: dict[str, float] = {}  # by output

    def _make_question(self, metadata: ModelMetadata, rng: np.random.Generator) -> dict[str, np.ndarray]:
        question: dict[str, Any] = {}
        for each in metadata.inputs:
            values = rng.standard_normal([max(1, size) for size in each.shape])
            question[each.name] = np.repeat(values, 2, axis=0) if self._has_rows else values
        return question

    def _ask(self, number: int) -> None:
        name = f"{number}-{self._num_asked}"
        answer = self._client.infer(self.model, self._questions[number], request_id=name)
        if answer.request_id != name:
            self._wrong.append(f"{name} got the answer to {answer.request_id}")
        known = self._known.setdefault((answer.version, number), answer.outputs)
        for output, rows in answer.outputs.items():
            largest = self._largest.get(output, 1.0)
            if rows.dtype.kind == "f":
                self._largest[output] = largest = max(largest, float(np.nanmax(np.abs(rows), initial=0.0)))
            if self._has_rows and not are_equal(rows[0], rows[1], largest):
                self._wrong.append(f"two equal rows got different {output} (version {answer.version}): {rows}")
            elif not are_equal(rows, known[output], largest):
                self._wrong.append(f"version {answer.version} gave two different {output} for one question")


class TextCaller(EndpointCaller):
    """Asks a language model to continue texts, each time by its most probable tokens.

    A stream that has begun ends with the process that writes it, and says so: then the text is asked for again, once.
    """

    def _ask(self, number: int) -> None:
        text = self._generate(number)
        try:
            text.read()
        except (ConnectionLost, InferenceError):
            text = self._generate(number).read()
        for version, _ in text.spans:
            known = self._known.setdefault((version, number), text.text)
            if len(text.spans) == 1 and text.text != known:
                self._wrong.append(f"version {version} continued {PROMPTS[number]!r} by {known!r} and {text.text!r}")
        if sum(num for _, num in text.spans) != text.num_new_tokens:
            self._wrong.append(f"{text.num_new_tokens} tokens, of which {text.spans} have a version")

    def _generate(self, number: int) -> StreamedText:
        return self._client.generate(self.model, PROMPTS[number], max_tokens=NUM_TOKENS, temperature=0)


def are_equal(one: np.ndarray, other: np.ndarray, largest: float) -> bool:
    """Up to the order of sums, whose terms may be as large as the `largest` value of all answers."""
    if one.dtype.kind == "f":
        return bool(np.allclose(one, other, TOLERANCE, TOLERANCE * largest, equal_nan=True))
    return bool(np.array_equal(one, other))


def close_callers(callers: Sequence[EndpointCaller]) -> None:
    for caller in callers:
        caller.stop()
    for caller in callers:
        caller.close()


def open_callers(found: FoundEndpoint, models: Sequence[str]) -> list[EndpointCaller]:
    """Started callers of models that are ready. Raises ConnectionLost, InferenceError."""
    callers: list[EndpointCaller] = []
    with found.connect() as client:
        for model in models:
            metadata = client.metadata(model)
            if all(each.datatype.startswith("FP") for each in metadata.inputs):
                callers.append(RowCaller(found, model, metadata))
            else:
                client.generate(model, PROMPTS[0], max_tokens=1).read()  # an InferenceError of one that writes no text
                callers.append(TextCaller(found, model))
    for caller in callers:
        caller.start()
    return callers
