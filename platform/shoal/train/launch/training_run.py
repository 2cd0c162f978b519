"""One training run, from its record to its registered network, wherever its workers are: that is a back end's affair.

    check ► record ► attempt (► attempt from the last checkpoint ...) ► predicted cost ► register ► report

Called by `fit_locally`, whose back end is this process, and by `flows.training`, whose back end is a Ray cluster.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shoal.cost import PREDICTED
from shoal.errors import RankLost
from shoal.plugins.find import find_extension
from shoal.runs import RunRecorder
from shoal.runs.record.event_log import EventLog
from shoal.train.launch.finalize import finalize_run
from shoal.train.launch.validate import ValidatedRun
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec

ATTEMPTS_WITHOUT_PROGRESS = 3
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun
LAUNCHERS = "shoal.launchers"  # the group of the words that `SyncConfig.launch` may be
_IDENTITY = re.compile(r"[0-9a-f]{8,}|\d+")  # of a process, a host or a port, which are others in each attempt


class Backend(Protocol):
    """Where the workers of a run are.

    step:           the newest step that they have reported, -1 before
    is_restartable: whether another attempt may follow one whose workers were lost
    """

    is_restartable: bool

    @property
    def step(self) -> int: ...

    def attempt(self, run: TrainingRun) -> TrainResult:
        """Train until the run ends or is interrupted. Raises RankLost when a worker was lost."""
        ...

    def predict_cost(self, spec: TrainSpec) -> dict[str, Any]:
        """The details of the event PREDICTED."""
        ...


class LaunchReplicas(Protocol):
    """Starts the processes of a run of replicas, and follows them to its end: what `SyncConfig.launch` names.

    tick:       called a few times a second; what it raises ends the run
    on_cluster: the processes are workers of the connected Ray cluster, rather than of this host

    Raises RankLost when another attempt, from the newest checkpoint, may succeed.
    """

    def __call__(
        self,
        spec: TrainSpec,
        run_id: str,
        folder: Path,
        log: EventLog,
        should_stop: Callable[[], bool],
        tick: Callable[[], object] = lambda: None,
        *,
        on_cluster: bool = False,
    ) -> TrainResult: ...


def find_launcher(spec: TrainSpec) -> LaunchReplicas:
    """What launches a run of replicas. Raises ValueError when it cannot be imported."""
    launch: LaunchReplicas = find_extension(spec.applied_sync.launch, LAUNCHERS)
    return launch


@dataclass
class TrainingRun:
    """One run, over all its attempts, in the process that decides about it.

    recorder:  None on the ranks of torchrun that do not write the record
    registers: register the network at the end
    predicts:  record the predicted cost at the end, when the cores are free; it takes a second or two
    should_stop: polled while the champion is measured, before the network is registered
    """

    spec: TrainSpec
    checked: ValidatedRun
    run_id: str
    folder: Path
    log: EventLog
    recorder: RunRecorder | None
    registers: bool = True
    predicts: bool = True
    should_stop: Callable[[], bool] = lambda: False

    def run(self, backend: Backend) -> TrainResult:
        """Attempt until the run ends, or until workers were lost several times without a step in between: twice, if it
        was for the same reason, and before the first step."""
        if self.recorder is not None:
            self.recorder.record_event("data", **self.checked.fingerprint)
        result = self._attempt_until_over(backend)
        if self.recorder is None:
            return result
        if self.predicts and not result.is_interrupted and not self.spec.has_replicas:
            self.log.record_event(PREDICTED, **backend.predict_cost(self.spec))
        about = (self.spec, result, self.checked, self.recorder)
        version = finalize_run(*about, registers=self.registers, should_stop=self.should_stop)
        if version is None:
            return result
        if version.problem:
            self.log.record_event("unservable", model=version.ref, error=version.problem)
        return replace(result, model=version.ref, decision=version.decision)

    def _attempt_until_over(self, backend: Backend) -> TrainResult:
        lost_in_a_row, reason = 0, ""
        while True:
            before = backend.step
            try:
                return backend.attempt(self)
            except RankLost as error:
                if not backend.is_restartable:
                    raise
                lost_in_a_row = 1 if backend.step > before else lost_in_a_row + 1
                earlier, reason = reason, _IDENTITY.sub("", str(error))
                if backend.step < 0 and reason == earlier:
                    raise
                self.log.record_event("workers_lost", step=backend.step, error=str(error))
                if lost_in_a_row >= ATTEMPTS_WITHOUT_PROGRESS:
                    raise


class Shutdown(threading.Event):
    """Set by a signal. number: the signal's; 0 before it"""

    number = 0


@contextmanager
def shutdown_event() -> Iterator[Shutdown]:
    """An event that Ctrl-C and SIGTERM set, and a run reads between steps. A second Ctrl-C raises KeyboardInterrupt.

    Under torchrun a second Ctrl-C is ignored: each rank receives one from the terminal and one from torchrun, which has
    a timeout of its own. What the program ignores, as Ctrl-C after a script's `&`, stays ignored. Outside the main
    thread, which alone receives signals, the event is never set.
    """
    asked = Shutdown()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(signum: int, frame: object) -> None:
        if asked.is_set() and TORCHRUN not in os.environ:
            raise KeyboardInterrupt
        asked.number = signum
        asked.set()

    heeded = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_program(number: int, message: str = "") -> None:
    """End this program as Python ends on the signal `number`, if it is one: a run has only deferred it.

    Ctrl-C raises KeyboardInterrupt with the message, SIGTERM SystemExit with status 143. A handler of the program's own
    is called instead, and may return.
    """
    handler = signal.getsignal(number) if number else None
    if handler is signal.default_int_handler:
        raise KeyboardInterrupt(message)
    if callable(handler):
        handler(number, None)
    elif number:
        raise SystemExit(128 + number)
