"""On which hosts the processes of a run of replicas begin: a policy, which knows no Ray.

The run ends with the host of the process that has started it. So worker 0, which evaluates and saves, and server 0
begin there, if it has a place for a worker: then the loss of any other host takes neither. The others are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ANCHORED = ("worker 0", "server 0")


class Host(NamedTuple):
    """One that is up. slots: how many workers it holds when it is empty."""

    id: str
    slots: int


class ReplicaPlacement:
    """Of one run; it remembers where each process has begun.

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
