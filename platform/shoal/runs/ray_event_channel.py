"""Rank 0's messages to the driver: kept in a mailbox, a Ray worker on the driver's node.

Rank 0 numbers messages from 0. A sender or reader without an answer asks again; nothing is lost or duplicated.
Called by `train.launch.ray_train`; knows nothing of training, and loads no torch: the mailbox is a separate process.
"""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.errors import ConnectionLost, RunError, ShoalError
from shoal.ray_call import call_or_none
from shoal.runs.record.event_log import EventLog, LogMethod
from shoal.store import Mirror

CALL_TIMEOUT_S = 30.0
DELIVERY_INTERVAL_S = 0.2  # between two deliveries of rank 0; also how late it hears of a request to stop
FLUSH_TIMEOUT_S = 5.0  # the longest that rank 0 waits for a mailbox which does not answer, and with it all ranks
Message = tuple[LogMethod, tuple[Any, ...], dict[str, Any]]


class Mailbox:
    """The workers' messages that the driver has not read yet, and whether the workers must stop."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._num_delivered = 0
        self._errors: list[ShoalError] = []
        self._stop = False
        self._abort_reason = ""
        self._lock = threading.Lock()

    def deliver(self, begin: int, messages: list[Message]) -> tuple[bool, str]:
        """Called by rank 0: its messages from number `begin` on, some perhaps repeated. Returns whether to stop, and
        the reason when nothing may be saved any more."""
        with self._lock:
            new = messages[self._num_delivered - begin :]
            self._messages += new
            self._num_delivered += len(new)
            return self._stop, self._abort_reason

    def report_failure(self, error: ShoalError) -> None:
        """Called by any rank: the error that ended it."""
        with self._lock:
            self._errors.append(error)

    def poll(self, begin: int) -> tuple[list[Message], list[ShoalError]]:
        """Called by the driver, which has the messages before number `begin`: returns the later ones and every
        error."""
        with self._lock:
            first = self._num_delivered - len(self._messages)
            del self._messages[: max(0, begin - first)]
            return list(self._messages), list(self._errors)

    def request_stop(self) -> None:
        """Called by the driver: ask the workers to save and end."""
        self._stop = True

    def abort(self, why: str) -> None:
        """Called by the driver when another process has taken over the run: ask the workers to end without saving."""
        with self._lock:
            self._stop, self._abort_reason = True, why


def start_mailbox() -> ActorHandle:
    """Place it on this node, so that no other node's death cuts off the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    worker = ray.remote(num_cpus=0, max_concurrency=8)(Mailbox)
    return worker.options(scheduling_strategy=here).remote()


class RayLog(EventLog):
    """Rank 0's event log: a thread delivers its messages and receives the request to stop.

    | capacity  | what blocks                          | who unblocks | close()                            |
    |-----------|--------------------------------------|--------------|------------------------------------|
    | unbounded | `flush`, for FLUSH_TIMEOUT_S at most | a delivery   | delivers the rest, ends the thread |

    It is emptied every DELIVERY_INTERVAL_S, and by `flush`.

    While the mailbox does not answer, messages wait here. A dead mailbox means that the driver has died or makes
    another attempt: the workers then stop.
    """

    def __init__(self, mailbox: ActorHandle) -> None:
        self._mailbox = mailbox
        self._pending: list[Message] = []  # appended to by other threads, and shortened by the mirror's
        self._num_delivered = 0
        self._abort_reason = ""
        self.stop_requested = threading.Event()
        self._mirror = Mirror("journal", self._deliver, DELIVERY_INTERVAL_S, DELIVERY_INTERVAL_S)

    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        self._pending.append((method, arguments, details))

    def flush(self) -> None:
        """Wait, for a limited time, until the mailbox, which outlives this process, has all messages.

        The rest is delivered later: the last reports are in the checkpoint, too. Raises RunError when another process
        has taken over the run.
        """
        if self._pending:
            self._mirror.flush(FLUSH_TIMEOUT_S)
        if self._abort_reason:
            raise RunError(self._abort_reason)

    def close(self) -> None:
        """Deliver the rest. Idempotent."""
        self._mirror.close(2 * CALL_TIMEOUT_S)  # for a delivery in progress, and for the last one

    def _deliver(self) -> None:
        messages = list(self._pending)
        try:
            answer = call_or_none(self._mailbox.deliver, self._num_delivered, messages, timeout_s=CALL_TIMEOUT_S)
        except RayError:  # the mailbox is dead: save, and end
            answer = (True, "")
        if answer is None:
            raise ConnectionLost("the mailbox does not answer")
        is_to_stop, refusal = answer
        del self._pending[: len(messages)]
        self._num_delivered += len(messages)
        self._abort_reason = refusal or self._abort_reason
        if is_to_stop:
            self.stop_requested.set()
