"""Several gateways of one policy, its shards: what they have counted together, and the experience of all.

Each is a whole gateway, with a process, a queue, a ledger and actors of its own. An actor's id says which one it
belongs to. Where that is away for long, the actor moves to another and drops what was not acknowledged, so that no
segment is learnt twice. Knows neither Ray nor sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from shoal.errors import ConfigError
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceSource
from shoal.rl.gateway.actor_stats import RunProgress
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.spec import RLSpec
from shoal.wire import DropReason

_ADDED = ("queue_depth", "queue_slots", "segments", "protocol_errors", "remote_inference", "demonstrations", "recorded")
_ADDRESSES = ("address", "bound")


def require_separable(spec: RLSpec) -> None:
    """Raise ConfigError for what several gateways cannot do, where there are several."""
    reasons = {
        f"{spec.algorithm.name} pauses actors until all have acted": spec.algorithm.pauses_actors,
        "self-play has one pool of opponents": spec.self_play.is_on,
        "a log in a store has the order of one queue": spec.gateway.durable == "store",
    }
    problem = next((reason for reason, holds in reasons.items() if holds), "")
    if spec.gateway.shards > 1 and problem:
        raise ConfigError("gateway.shards", spec.gateway.shards, f"cannot be above 1: {problem}", "leave it out")


def split_setting(setting: GatewaySetting) -> list[GatewaySetting]:
    """The setting of each gateway. The first has the run's folder and games by WebSocket; the others' ports follow."""
    if setting.spec.shards == 1:
        return [setting]
    first = replace(setting, target_return=None)  # which all reach together
    others = []
    for number in range(1, setting.spec.shards):
        name = f"shard-{number}"
        site = setting.site
        own = replace(site, folder=site.folder / name, name=f"{site.name}/{name}" if site.name else "")
        spec = setting.spec.shift_ports(number).update({"websocket": None, "tls": None})
        others.append(replace(first, spec=spec, demonstrations=own, learns_from_users=False, front=None))
    return [first, *others]


def merge_stats(shards: Sequence[Mapping[str, Any]], target_return: float | None) -> dict[str, Any]:
    """The counts of all, as one gateway has them; `pid` lists the processes."""
    if len(shards) == 1:
        return dict(shards[0])
    progress = RunProgress.merge([each["progress"] for each in shards], target_return)
    began = [each["first_segment_at"] for each in shards if each["first_segment_at"] is not None]
    return {
        **join_shards(shards),
        **progress.to_dict(),
        **{name: _add([each[name] for each in shards]) for name in _ADDED},
        "pid": [each["pid"] for each in shards],
        "settings_version": shards[0]["settings_version"],
        "first_segment_at": min(began, default=None),
        "counted_at": min(each["counted_at"] for each in shards),
        "actors": list(itertools.chain.from_iterable(each["actors"] for each in shards)),
        "quarantined": {actor: why for each in shards for actor, why in each["quarantined"].items()},
    }


def join_shards(addresses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The addresses of several gateways as those of one, which actors choose from by their ids."""
    return {
        **addresses[0],
        **{name: "+".join(each[name] for each in addresses) for name in _ADDRESSES if name in addresses[0]},
    }


def _add(values: Sequence[Any]) -> Any:
    known = [each for each in values if each is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        names = dict.fromkeys(itertools.chain.from_iterable(known))
        return {name: _add([each[name] for each in known if name in each]) for name in names}
    return all(known) if isinstance(known[0], bool) else sum(known)


class ShardedExperience:
    """The experience of several sources as one: a batch of whichever has one first. Implements ExperienceSource.

    A batch that another source has leased meanwhile is the next one.
    """

    def __init__(self, sources: Sequence[ExperienceSource]) -> None:
        self._sources = sources
        self._threads = ThreadPoolExecutor(len(sources), "experience")
        self._taking: dict[
            int, Future[ExperienceBatch | None]
        ] = {}  # by source; the one that gave a batch last is last

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        for number, source in enumerate(self._sources):
            if number not in self._taking:
                self._taking[number] = self._threads.submit(source.take, consumer, request)
        while self._taking:
            wait(self._taking.values(), return_when=FIRST_COMPLETED)
            for number in [number for number, each in self._taking.items() if each.done()]:
                if (batch := self._taking.pop(number).result()) is not None:
                    return replace(batch, lease_id=batch.lease_id * len(self._sources) + number)
        return None

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float] = ()) -> bool:
        lease, number = divmod(lease_id, len(self._sources))
        return self._sources[number].acknowledge(lease, outcomes, evidence)

    def close(self) -> None:
        """Drop, as SHUTDOWN, the batches that were leased and are not taken. Idempotent."""
        self._threads.shutdown()
        for number, taking in self._taking.items():
            if (batch := taking.result()) is not None:
                self._sources[number].acknowledge(batch.lease_id, [DropReason.SHUTDOWN] * len(batch.lengths))
        self._taking.clear()
