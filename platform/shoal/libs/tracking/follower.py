"""Follows the record of one run, and sends its new values to one tracker.

Called by `python -m shoal.libs.tracking`, which a recorder starts, and by `shoal runs track`. Only reads the record;
its own state lies in the run's folder. Whatever the tracker does, the run does not notice.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from shoal.atomic_file import replace_synced
from shoal.errors import RunError, summarize_error
from shoal.extend.cli import verb
from shoal.extend.runs import MetricValue, Run, Status, Tracker, load, load_tracker
from shoal.home import file_lock

POLL_S = 1.0
MAX_SHARE = 0.05  # of the time that may go into polls: a long run is read less often
MAX_RETRY_S = 120.0  # between two attempts to reach a server, which grows
GRACE_S = 30.0  # after the run's end, for a server that does not answer
PERSON_GRACE_S = 300.0  # the same, while a person waits, and may end it
LOST_S = 60.0  # without a heartbeat, until a lost run has ended: its process may only have been stopped for a while
BATCH = 10_000  # values between two writes of the state

_log = logging.getLogger(__name__)


def make_file_name(name: str, suffix: str) -> str:
    """The name of a tracker's file in the folder of a run: `tracking-mlflow.json`."""
    return f"tracking-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.{suffix}"


@dataclass(frozen=True)
class TrackingState:
    """How far a tracker is, in the file `tracking-NAME.json` of the run's folder.

    tracker_run: the run's id at the tracker
    time:        when the last value that was sent had been logged; Unix time in seconds
    sent:        the number of values sent
    problem:     why the tracker lacks something; "" for none
    is_complete: whether it has everything up to the run's end
    incarnation: of the run, whose values it has
    steps:       the highest step sent of each metric
    """

    tracker_run: str = ""
    url: str = ""
    time: float = 0.0
    sent: int = 0
    problem: str = ""
    is_complete: bool = False
    incarnation: int = 0
    steps: dict[str, int] = field(default_factory=dict)


def read_state(folder: Path, name: str) -> TrackingState:
    """The state of a tracker; that of one which has nothing yet where there is no file."""
    try:
        known = json.loads((folder / make_file_name(name, "json")).read_text())
    except FileNotFoundError:
        return TrackingState()
    return TrackingState(**{field: known[field] for field in TrackingState.__dataclass_fields__ if field in known})


class Follower:
    """Sends every step of each metric of a run once, in the order in which they were logged.

    A run that was resumed from a checkpoint repeats steps, which the tracker has: they are passed over. A follower that
    is killed sends its last batch again. `follow` may be called once.

    on_start: called when the tracker's library is loaded, and has the run
    """

    def __init__(
        self,
        run: Run,
        name: str,
        tracker: Callable[[], Tracker],
        *,
        poll_s: float = POLL_S,
        grace_s: float = GRACE_S,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._name = name
        self._make_tracker = tracker
        self._poll_s, self._grace_s = poll_s, grace_s
        self._on_start = on_start
        self._repeated: dict[str, range] | None = None  # steps of each metric that an earlier incarnation has sent
        self._tracker: Tracker | None = None
        self._is_open = False
        self._end_s: float | None = None
        self._progress_s = time.monotonic()
        self.state = TrackingState()

    def follow(self) -> TrackingState:
        """Send until the run has ended and the tracker has everything, or does not answer for `grace_s` after that.

        Returns early when the run was resumed: the follower that was started then goes on. Raises RunError when the run
        was removed, or when another follower sends to this tracker.
        """
        busy = RunError(f"run {self._run.id!r} is being sent to {self._name} by another process: wait until it ends")
        with file_lock(self._run.folder / make_file_name(self._name, "lock"), 2 * self._grace_s, busy):
            self.state = replace(read_state(self._run.folder, self._name), is_complete=False)
            wait_s = self._poll_s
            while not (self.has_expired() or self.is_superseded):
                try:
                    self._open()
                    began_s = time.process_time()  # a busy machine, on which a poll lasts long, is no reason to wait
                    if self._send_new():
                        break
                    wait_s = max(self._poll_s, (time.process_time() - began_s) / MAX_SHARE)
                except RunError:  # of the record
                    raise
                except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything
                    self.record_problem(summarize_error(error))
                    wait_s = min(2 * wait_s, MAX_RETRY_S)
                self._wait(wait_s)
        return self.state

    @property
    def is_superseded(self) -> bool:
        """Whether the run was resumed since. Raises RunError when it was removed."""
        return self._run.reload().incarnation != self._run.incarnation

    def has_expired(self) -> bool:
        """Whether the run has ended, and the tracker has taken nothing for `grace_s` since. Raises RunError."""
        run = self._run.reload()
        if self._end_s is None and (_is_over(run) or run.incarnation != self._run.incarnation):
            self._end_s = time.monotonic()
        return self._end_s is not None and time.monotonic() - max(self._end_s, self._progress_s) > self._grace_s

    def _wait(self, seconds: float) -> None:
        """Wait so long; a run that has ended is polled sooner."""
        until_s = time.monotonic() + seconds
        time.sleep(self._poll_s)
        while self._end_s is None and time.monotonic() < until_s and not self.has_expired():
            time.sleep(self._poll_s)

    def record_problem(self, problem: str) -> None:
        """Log and store why the tracker lacks something, once."""
        if problem != self.state.problem:
            if problem:
                _log.warning("run %s: %s: %s", self._run.id, self._name, problem)
            self._store(replace(self.state, problem=problem))

    def _open(self) -> None:
        """Load the tracker's library, and begin there. Does nothing the next time."""
        if self._tracker is None:
            self._tracker = self._make_tracker()
            self._progress_s = time.monotonic()  # its library is loaded
        if not self._is_open:
            tracker_run, url = self._tracker.begin(self._run, self.state.tracker_run)
            self._is_open = True
            self._store(replace(self.state, tracker_run=tracker_run, url=url))
            self._on_start()

    def _send_new(self) -> bool:
        """Whether the tracker has everything that there will be."""
        assert self._tracker is not None
        run = self._run.reload()  # before its values: an ended run has no more
        while values := run.list_values(self.state.time, BATCH):
            new = self._pass_over(values)
            if new:
                self._tracker.send(new)
            steps = dict(self.state.steps)
            for each in new:
                steps[each.name] = max(each.step, steps.get(each.name, each.step))
            sent = self.state.sent + len(new)
            self._store(replace(self.state, time=values[-1].time, sent=sent, steps=steps))
        if not _is_over(run) or run.incarnation != self._run.incarnation:
            self.record_problem("")
            return False
        self._tracker.finish(run)
        self._store(replace(self.state, problem="", is_complete=True))
        _log.info("run %s: %s has %d values: %s", run.id, self._name, self.state.sent, self.state.url)
        return True

    def _pass_over(self, values: list[MetricValue]) -> list[MetricValue]:
        """Those whose step an earlier incarnation of the run has not sent. Steps up to that of the checkpoint are still
        in the record, with their times; later ones, which were sent and then abandoned, come a second time."""
        if self._repeated is None:
            kept: dict[str, int] = {}
            is_resumed = bool(self.state.steps) and self.state.incarnation != self._run.incarnation
            after = 0.0 if is_resumed else math.inf
            while before := [each for each in self._run.list_values(after, BATCH) if each.time <= self.state.time]:
                after = before[-1].time
                for each in before:
                    kept[each.name] = max(each.step, kept.get(each.name, each.step))
            sent = self.state.steps if is_resumed else {}
            self._repeated = {name: range(kept.get(name, -1) + 1, last + 1) for name, last in sent.items()}
            self.state = replace(self.state, incarnation=self._run.incarnation)
        return [each for each in values if each.step not in self._repeated.get(each.name, ())]

    def _store(self, state: TrackingState) -> None:
        self._progress_s = time.monotonic() if not state.problem else self._progress_s
        self.state = state
        replace_synced(self._run.folder / make_file_name(self._name, "json"), json.dumps(asdict(state)).encode())


def _is_over(run: Run) -> bool:
    is_lost = run.status is Status.LOST and time.time() - run.heartbeat_at > LOST_S
    return is_lost or run.status not in (Status.CREATED, Status.RUNNING, Status.LOST)


def watch(follower: Follower, give_up: Callable[[], None], every_s: float = 1.0) -> threading.Thread:
    """Call `give_up` when the follower has expired in a call of the tracker's library that does not return."""

    def run() -> None:
        ended = threading.Event()
        while not ended.wait(every_s):
            try:
                has_expired = follower.has_expired()
            except RunError:  # the run was removed
                has_expired = True
            if has_expired:
                give_up()
                return

    thread = threading.Thread(target=run, name="tracking-watch", daemon=True)
    thread.start()
    return thread


@verb(work="sending the values")
def track(
    run: str = "latest",
    *,
    tracker: Annotated[str, "--to", "mlflow, wandb, trackio, or your own: my_tracker.py:MyTracker."],
) -> str:
    """Send a RUN (the newest when left out) to a tracker: all of it, or what the tracker lacks.

    For a run that had no `track`, or a tracker that did not answer. The tracker's own environment variables name its
    server. This follows a running run until it ends.

    \b
    Examples:
      MLFLOW_TRACKING_URI=http://127.0.0.1:5000 shoal runs track latest --to mlflow
      shoal runs track 20261120-0645 --to wandb
    """
    follow = load_tracker(tracker)
    record = load(run)
    state = Follower(record, tracker, follow, grace_s=PERSON_GRACE_S).follow()
    if not state.is_complete:
        raise RunError(f"{tracker} lacks values of run {record.id}: {state.problem or 'the run was resumed'}")
    return f"{record.id} is in {tracker} ({state.sent:,} values): {state.url}"
