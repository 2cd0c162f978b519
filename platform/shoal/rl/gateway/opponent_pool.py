"""The pool of a run with self-play: past versions of the policy, and registered ones, which actors play against.

Fictitious play (Brown 1951; 1503.03474 for learned policies): the newest policy learns to beat the mixture of its past
ones, so it does not run in circles as one that only plays against itself. Called by the gateway's thread, which offers
each round's weights and sends the members to actors, one after the other.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from shoal import atomic_file
from shoal.registry import Registry
from shoal.rl.part_specs import SelfPlaySpec
from shoal.weights import WeightSnapshot

logger = logging.getLogger(__name__)
_SUFFIX, _GONE_SUFFIX = ".safetensors", ".gone"
_REGISTERED = "registered.json"


class OpponentPool:
    """Versions that were the newest at a multiple of `snapshot_every` environment steps, and the first one.

    At most `max_versions`: of more, one goes whose neighbours are the closest, never the oldest or the newest, so the
    others stay spread over the run. Members rest as files in `folder`, and are there again after a restart; those that
    have gone leave an empty file, since actors may still play against them.

    snapshot_every: 0: no version of the run enters
    registered:     references of further members, which stay. They are the versions from 1 on, and those of the run are
                    above; `names` has their exact references. A run that goes on has those that it began with.

    Raises RegistryError for a reference of nothing.
    """

    def __init__(
        self, folder: Path, snapshot_every: int, max_versions: int = 64, registered: Sequence[str] = ()
    ) -> None:
        atomic_file.make_folder(folder)
        self._folder, self._snapshot_every = folder, snapshot_every
        self.names = self._take_registered(registered)
        self.versions = sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}"))
        self._max_versions = max_versions
        self._gone = {int(path.stem) for path in folder.glob(f"*{_GONE_SUFFIX}")}
        self._taken_at: int | None = None  # environment steps, at the newest member

    @classmethod
    def of_run(cls, spec: SelfPlaySpec, folder: Path) -> OpponentPool | None:
        """The pool of a run with files in `folder`; None without self-play."""
        if not spec.is_on:
            return None
        return cls(folder / "opponents", spec.snapshot_every, spec.max_versions, spec.opponents)

    def offer(self, snapshot: WeightSnapshot, num_steps: int) -> None:
        """Add the newest weights if it is time, by the run's environment steps so far."""
        first_own = bisect_right(self.versions, len(self.names))
        has_own = first_own < len(self.versions)
        if self._taken_at is None and has_own:
            self._taken_at = num_steps  # of a run that goes on
        is_early = num_steps < (self._taken_at or 0) + self._snapshot_every
        if not self._snapshot_every or (has_own and (is_early or snapshot.version in self)):
            return
        self._taken_at = num_steps
        try:
            atomic_file.replace_synced(self._folder / f"{snapshot.version}{_SUFFIX}", snapshot.payload)
        except OSError as error:  # a full disk costs a member, not the run
            logger.warning("version %d does not enter the pool of opponents: %s", snapshot.version, error)
            return
        self.versions.append(snapshot.version)
        if len(self.versions) - first_own > self._max_versions:
            own = self.versions[first_own:]
            triples = zip(own, own[1:], own[2:], strict=False)
            self._remove(min(triples, key=lambda triple: triple[2] - triple[0])[1])  # its neighbours are the closest

    def _take_registered(self, references: Sequence[str]) -> dict[int, str]:
        """Copy the payloads of registered versions, once; returns their references by version."""
        index = self._folder / _REGISTERED
        if not index.exists():
            registry = Registry()
            members = [registry.get(each) for each in references]
            for number, each in enumerate(members, 1):
                atomic_file.replace_synced(self._folder / f"{number}{_SUFFIX}", each.snapshot().payload)
            atomic_file.replace_synced(index, json.dumps([each.ref for each in members]).encode())
        return dict(enumerate(json.loads(index.read_text()), 1))

    def _remove(self, version: int) -> None:
        self.versions.remove(version)
        self._gone.add(version)
        try:
            (self._folder / f"{version}{_SUFFIX}").rename(self._folder / f"{version}{_GONE_SUFFIX}")
            (self._folder / f"{version}{_GONE_SUFFIX}").write_bytes(b"")
        except OSError as error:  # it is a member again after a restart
            logger.warning("version %d leaves the pool of opponents, and not the disk: %s", version, error)

    def __contains__(self, version: int) -> bool:
        """Whether it is or was a member."""
        index = bisect_right(self.versions, version)
        return version in self._gone or (index > 0 and self.versions[index - 1] == version)

    def load_own(self) -> list[WeightSnapshot]:
        """The members that were versions of the run, oldest first."""
        members, version = list[WeightSnapshot](), len(self.names)
        while (member := self.find_next(version)) is not None:
            members.append(member)
            version = member.version
        return members

    def find_next(self, newer_than: int) -> WeightSnapshot | None:
        """The oldest member above this version, if there is one."""
        index = bisect_right(self.versions, newer_than)
        while index < len(self.versions):
            version = self.versions[index]
            try:
                payload = (self._folder / f"{version}{_SUFFIX}").read_bytes()
            except OSError as error:  # a missing file costs a member, not the run
                logger.warning("version %d leaves the pool of opponents: %s", version, error)
                del self.versions[index]
            else:
                return WeightSnapshot.from_payload(version, payload)
        return None
