"""Callers of an endpoint while faults strike: each answer is complete, to its own question, and of one live version."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from shoal.client import Client, ConfigError, ConnectionLost, InferenceError
from shoal.libs.chaos.promises import Promise

NUM_QUESTIONS = 8
NUM_RETRIES = 8
PAUSE_S = 0.02
TOLERANCE = 1e-4  # between places in a batch, and batches of different sizes: sums have another order there


class EndpointCaller:
    """Asks from its construction until `close`, in a thread: the same questions again and again, two equal rows each.

    model: with numeric inputs
    """

    def __init__(self, url: str, model: str, token: str, seed: int = 0) -> None:
        self._model = model
        self._client = Client(url, token=token, num_retries=NUM_RETRIES, retry_lost=True)
        self._rng = np.random.default_rng(seed)
        self._known: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # answers, by version and question
        self._wrong: list[str] = []
        self._failures = Counter[str]()
        self._num_answers = 0
        self._num_asked = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def check(self, live: Collection[int]) -> Iterator[Promise]:
        """live: the versions that were published or promoted"""
        never = sorted({version for version, _ in self._known} - {*live})
        wrong = [*self._wrong, *(f"version {each} was never live" for each in never)]
        evidence = f"{self._num_answers:,} answers of {len({version for version, _ in self._known})} versions"
        yield Promise("no answer mixed, doubled, or of a version that was never live", not wrong,
                      "; ".join(wrong[:3]) or evidence)  # fmt: skip
        lost = "; ".join(f"{num} times {problem}" for problem, num in self._failures.most_common(3))
        yield Promise("no answer lost", not self._failures, lost or f"all {self._num_asked:,} requests were answered")

    def _run(self) -> None:
        questions: list[dict[str, np.ndarray]] = []
        while not self._is_over.wait(PAUSE_S):
            try:
                questions = questions or [self._make_question() for _ in range(NUM_QUESTIONS)]
                number = self._num_asked % NUM_QUESTIONS
                self._num_asked += 1
                self._ask(number, questions[number])
            except (ConfigError, ConnectionLost, InferenceError) as error:
                if self._is_over.is_set() or not questions:  # its first version is on its way
                    continue
                self._failures[str(error)[:120]] += 1
                time.sleep(1.0)

    def _make_question(self) -> dict[str, np.ndarray]:
        """Two rows that are equal."""
        question: dict[str, Any] = {}
        for each in self._client.metadata(self._model).inputs:
            shape = [size if size > 0 else 1 for size in each.shape[1:]]
            question[each.name] = np.repeat(self._rng.standard_normal([1, *shape]), 2, axis=0)
        return question

    def _ask(self, number: int, question: dict[str, np.ndarray]) -> None:
        name = f"{number}-{self._num_asked}"
        answer = self._client.infer(self._model, question, request_id=name)
        self._num_answers += 1
        if answer.request_id != name:
            self._wrong.append(f"{name} got the answer to {answer.request_id}")
        known = self._known.setdefault((answer.version, number), answer.outputs)
        for output, rows in answer.outputs.items():
            if not np.allclose(rows[0], rows[1], TOLERANCE, TOLERANCE):
                self._wrong.append(f"two equal rows got different {output} (version {answer.version})")
            elif not np.allclose(rows, known[output], TOLERANCE, TOLERANCE):
                self._wrong.append(f"version {answer.version} gave two different {output} for one question")
