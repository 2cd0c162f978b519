"""The processes of an asynchronous training run: started, placed on hosts, replaced when they die, and ended.

Owns the processes, and who takes part. Called by `replicas`, in the process that starts a run. In a run with a
range of workers, they join when they have a place to run, and leave, while the others go on.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.errors import RankLost, TrainError
from shoal.extend.sync import RpcClient
from shoal.extend.train import EventLog
from shoal.libs.asynchronous.messages import GetWorkers, LeaveRun

ANCHORED = ("worker 0", "server 0")
END_TIMEOUT_S = 10.0
MAX_DEATHS = 3  # of one process
SHORTAGE_TIMEOUT_S = 600.0  # for enough workers to join
REPORT_AFTER_S = 10.0  # a run says that it waits for its first workers
CHIEF_WAIT_S = 120.0  # for the chief to begin again, before another worker gives up its place


class ProcessHandle(Protocol):
    """A server's or a worker's process."""

    def poll(self) -> str | None:
        """None while it runs, or waits for a place to run; "" once it has ended; else what it died of."""
        ...

    def end(self) -> None:
        """End it, if it runs. Idempotent."""
        ...


StartProcess = Callable[[str, Callable[..., None], tuple[Any, ...]], ProcessHandle]  # its name, function and arguments
Target = tuple[Callable[..., None], tuple[Any, ...]]


class ForkedProcess:
    """A process on this machine, forked from a server that has loaded torch once for all."""

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shoal.libs.asynchronous.replicas", "torch._dynamo"])
        self._process = context.Process(target=target, args=arguments, name=name)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> str | None:
        code = self._process.exitcode
        return None if code is None else f"status {code}" if code else ""

    def end(self) -> None:
        self._process.kill()  # SIGTERM is the notice to leave between two steps
        self._process.join(END_TIMEOUT_S)


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however that ended. Ray does so for its own workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, name="parent watch", daemon=True).start()


class ProcessGroup:
    """The processes of servers and workers: `server 0`, `worker 0` and so on.

    min_workers: with so many the run goes on without those that have died MAX_DEATHS times; None: it ends then
    controller:  connection with the run's
    departed:    the workers that have left in order, after a notice; they are replaced, and forgotten there
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        min_workers: int | None,
        controller: RpcClient,
        journal: EventLog,
        start: StartProcess,
        departed: set[int] | None = None,
    ) -> None:
        self._targets, self._min_workers = targets, min_workers
        self._controller = controller
        self._journal = journal
        self._start_process = start
        self._departed: set[int] = set() if departed is None else departed
        self._processes: dict[str, ProcessHandle] = {}
        self._num_deaths: Counter[str] = Counter()
        self._present: set[int] = set()  # workers that take part
        self._has_started = self._is_shortage_reported = False
        self._short_since_s: float | None = None
        self._chief_lost_s: float | None = None  # since when the others train without it

    def start(self) -> None:
        for name, (target, arguments) in self._targets.items():
            self._processes[name] = self._start_process(name, target, arguments)

    def is_running(self, *, has_outcome: bool) -> bool:
        """Whether any worker runs, or is to be replaced; once there is an outcome, any that has joined."""
        if has_outcome:
            joined = [self._processes.get(f"worker {index}") for index in self._present]
            return any(process is not None and process.poll() is None for process in joined)
        workers = [process for name, process in self._processes.items() if name.startswith("worker")]
        return bool(self._departed) or any(process.poll() != "" for process in workers)  # all may die at once

    def maintain(self, now_s: float) -> None:
        """Replace what has ended, and note who takes part; called a few times a second. Raises RankLost, TrainError."""
        self.replace_dead(now_s)
        self.yield_to_chief(now_s)
        self.replace_departed()
        self.note_workers(now_s)

    def replace_dead(self, now_s: float) -> None:
        """Start another process for each that has died. Raises RankLost."""
        for name, process in list(self._processes.items()):
            cause = process.poll()
            if not cause:
                continue
            self._num_deaths[name] += 1
            kind, index = name.split()
            self._journal.record_event(f"{kind}_lost", index=int(index), cause=cause)
            if kind == "worker":
                self._controller.call(LeaveRun(int(index)))
                self._present.discard(int(index))
            if name == "worker 0":
                self._chief_lost_s = now_s
            if self._num_deaths[name] < MAX_DEATHS:
                self._processes[name] = self._start_process(name, *self._targets[name])
            elif self._is_dispensable(name):
                self._journal.record_event("worker_gone", index=int(index), deaths=MAX_DEATHS, cause=cause)
                del self._processes[name]
            else:
                raise RankLost(f"{name} died {MAX_DEATHS} times: {cause}")

    def yield_to_chief(self, now_s: float) -> None:
        """End another worker when the chief has waited long, as for a place: without it nothing is saved."""
        if self._chief_lost_s is None or now_s - self._chief_lost_s < CHIEF_WAIT_S:
            return
        present, self._chief_lost_s = self._controller.call(GetWorkers()).workers, now_s
        if 0 in present:
            self._chief_lost_s = None
        elif present:
            self._journal.record_event("chief_waits", gives_way=max(present))
            self._processes[f"worker {max(present)}"].end()

    def replace_departed(self) -> None:
        """Start another process for each worker that has left in order, once its process has ended."""
        for index in sorted(self._departed):
            name = f"worker {index}"
            if self._processes[name].poll() == "":
                self._journal.record_event("worker_departed", index=index)
                self._departed.discard(index)
                self._processes[name] = self._start_process(name, *self._targets[name])

    def _is_dispensable(self, name: str) -> bool:
        """Whether the run goes on without it: never without a server or the chief, worker 0."""
        if self._min_workers is None or name == "worker 0" or not name.startswith("worker"):
            return False
        return len(self._present) >= self._min_workers

    def note_workers(self, now_s: float) -> None:
        """In a run with a range of workers: record who has joined, and that the run waits. Raises TrainError."""
        if self._min_workers is None:
            return
        count = self._controller.call(GetWorkers())
        present, is_short = count.workers, count.is_short
        for index in sorted(set(present) - self._present):
            self._journal.record_event("worker_joined", index=index, workers=len(present))
        self._present = set(present)
        if not is_short:
            self._has_started = True
            self._short_since_s = None
            self._is_shortage_reported = False
            return
        if self._short_since_s is None:
            self._short_since_s = now_s
        waited_s = now_s - self._short_since_s
        if not self._is_shortage_reported and (self._has_started or waited_s > REPORT_AFTER_S):
            self._is_shortage_reported = True
            self._journal.record_event("workers_missing", workers=len(present), min_workers=self._min_workers)
        if waited_s > SHORTAGE_TIMEOUT_S:
            problem = f"{len(present)} workers take part, and the run needs {self._min_workers}"
            raise TrainError(f"{problem}: resume it when there are enough, or with a smaller min_workers")

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.end()
        self._controller.close()


class Host(NamedTuple):
    """One that is up. slots: how many workers it holds when it is empty."""

    id: str
    slots: int


class ReplicaPlacement:
    """On which host each process of a run begins: a policy, which knows no Ray, and remembers where each has begun.

    The run ends with the host of the process that has started it. So worker 0, which evaluates and saves, and server 0
    begin there, if it has a place for a worker: then the loss of any other host takes neither. The others are spread.

    home:       the host of the process that has started the run
    num_shared: of workers that share the memory of one host; 0: they need not
    """

    def __init__(self, home: str, num_shared: int = 0) -> None:
        self._home, self._num_shared = home, num_shared
        self._hosts: dict[str, str] = {}  # by process
        self._anchor = ""

    def choose(self, name: str, hosts: Sequence[Host]) -> str:
        """The id of the host on which the process begins, for the first time or again; "": any, as none has a place."""
        self._hosts.pop(name, None)
        chosen = anchor = self.find_anchor(hosts)
        if name not in ANCHORED and not self._num_shared:
            kind = name.split()[0]
            taken = [host for process, host in self._hosts.items() if process.startswith(kind)]
            loads = {host.id: taken.count(host.id) / host.slots for host in hosts if host.slots}
            free = [host for host, load in loads.items() if load < 1 or kind == "server"]
            chosen = min(free, key=lambda host: (loads[host], host != anchor), default="")
        self._hosts[name] = chosen
        return chosen

    def find_anchor(self, hosts: Sequence[Host]) -> str:
        """The host of worker 0 and server 0, until it is lost: home, if it has the places, else the one with most."""
        if self._anchor not in {host.id for host in hosts}:
            needed = self._num_shared or 1
            most = max(hosts, key=lambda host: (min(host.slots, needed), host.id == self._home, host.slots))
            self._anchor = most.id
        return self._anchor
