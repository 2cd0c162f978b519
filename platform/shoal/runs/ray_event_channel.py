"""What rank 0 says, on its way to the driver: kept in a mailbox, a worker of Ray's on the driver's node.

Messages are numbered from 0, by rank 0. Whoever has had no answer asks again, and nothing is lost or said twice.
Called by `train.ray_train`; knows nothing of training, and loads no torch: the mailbox is a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.errors import RunError, ShoalError
from shoal.ray_call import call_or_none

CALL_TIMEOUT_S = 30.0
DELIVERY_INTERVAL_S = 0.2  # between two deliveries of rank 0; also how late it hears of a request to stop
FLUSH_TIMEOUT_S = 5.0  # the longest that rank 0 waits for a mailbox which does not answer, and with it all ranks
Message = tuple[str, tuple[Any, ...]]


class Mailbox:
    """What workers have said and the driver has not yet read; and whether they are asked to stop."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._num_delivered = 0
        self._errors: list[ShoalError] = []
        self._stop = False
        self._abort_reason = ""
        self._lock = threading.Lock()

    def deliver(self, begin: int, messages: list[Message]) -> tuple[bool, str]:
        """From rank 0: its messages from number `begin` on, some of them perhaps again; answers whether to stop, and
        why nothing is to be saved any more, if so."""
        with self._lock:
            new = messages[self._num_delivered - begin :]
            self._messages += new
            self._num_delivered += len(new)
            return self._stop, self._abort_reason

    def report_failure(self, error: ShoalError) -> None:
        """From any rank: why it ended."""
        with self._lock:
            self._errors.append(error)

    def poll(self, begin: int) -> tuple[list[Message], list[ShoalError]]:
        """For the driver, which has those before number `begin`: the messages since, and every error so far."""
        with self._lock:
            first = self._num_delivered - len(self._messages)
            del self._messages[: max(0, begin - first)]
            return list(self._messages), list(self._errors)

    def request_stop(self) -> None:
        """For the driver: ask the workers to save and end."""
        self._stop = True

    def abort(self, why: str) -> None:
        """For the driver: ask the workers to end, and to save nothing: the run is another's."""
        with self._lock:
            self._stop, self._abort_reason = True, why


def start_mailbox() -> ActorHandle:
    """On this node: no other one's death is to end what the driver hears."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    worker = ray.remote(num_cpus=0, max_concurrency=8)(Mailbox)
    return worker.options(scheduling_strategy=here).remote()


class RayLog:
    """The journal of rank 0: a thread delivers what it is told, and hears whether to stop.

    | capacity  | what blocks                  | who unblocks | close()                            |
    |-----------|------------------------------|--------------|------------------------------------|
    | unbounded | `flush`, for FLUSH_S at most | a delivery   | delivers the rest, ends the thread |

    It is emptied every DELIVERY_S, and by `flush`.

    While the mailbox does not answer, messages wait here. When it is dead, so is the run's driver, or the driver makes
    another attempt: `stop_asked` is set.
    """

    def __init__(self, mailbox: ActorHandle) -> None:
        self._mailbox = mailbox
        self._pending: list[Message] = []
        self._num_delivered = 0
        self._abort_reason = ""
        self._is_flush_requested = self._is_closing = False
        self._changed = threading.Condition()  # of all of these
        self.stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._enqueue(("log", (step, dict(values))))

    def record_event(self, kind: str, /, **details: object) -> None:
        self._enqueue(("event", (kind, details)))

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._enqueue(("histogram", (step, name, counts, edges)))

    def flush(self) -> None:
        """Until the mailbox, which outlives this process, has what was said so far; not for ever.

        What it has not got by then is delivered later: the last reports are in the checkpoint, too. Raises RunError
        when the driver has said that the run is another's.
        """
        with self._changed:
            end = self._num_delivered + len(self._pending)
            self._is_flush_requested = bool(self._pending)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_delivered >= end, FLUSH_TIMEOUT_S)
            if self._abort_reason:
                raise RunError(self._abort_reason)

    def close(self) -> None:
        """Deliver the rest. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(2 * CALL_TIMEOUT_S)  # for a delivery that is under way, and for the last one

    def _enqueue(self, message: Message) -> None:
        with self._changed:
            self._pending.append(message)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._is_flush_requested or self._is_closing, DELIVERY_INTERVAL_S)
                self._is_flush_requested, is_last = False, self._is_closing
            self._deliver()

    def _deliver(self) -> None:
        with self._changed:
            messages = list(self._pending)
        try:
            answer = call_or_none(self._mailbox.deliver, self._num_delivered, messages, timeout_s=CALL_TIMEOUT_S)
        except RayError:  # the mailbox is dead: save, and end
            answer = (True, "")
        if answer is None:
            return  # they are still pending
        is_to_stop, refusal = answer
        with self._changed:
            del self._pending[: len(messages)]
            self._num_delivered += len(messages)
            self._abort_reason = refusal or self._abort_reason
            self._changed.notify_all()
        if is_to_stop:
            self.stop_requested.set()
