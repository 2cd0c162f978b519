"""What the parts of a gateway share: its setting, and the state that its thread changes under its lock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from shoal.errors import ConfigError
from shoal.rl.experience.demonstrations import DemonstrationSite
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.gateway.actor_stats import ActorTable, RunProgress
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.gateway.sessions import Sessions
from shoal.rl.part_specs import GatewaySpec
from shoal.rl.spec import RLSpec, require_segment_fits
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec
from shoal.wire.messages import Ack, ErrorMessage, GameSettings, Message, Pong, SettingsMessage

LEDGER_INDEPENDENT = (Pong, ErrorMessage)


@dataclass(frozen=True)
class GatewaySetting:
    """What a gateway is started with. Raises ConfigError for an empty token, and where `spec.curve` lacks its keys.

    token, run_id:     of the run, as its actors must know them
    curve_keys:        (public, secret) as zmq.curve_keypair() makes them
    is_synchronous:    actors pause between two batches
    steps_ahead:       environment steps that may be queued and on their way while the learner learns, and twice as many
                       while it waits; 0: as many segments as the queue takes
    learns_from_users: it takes the episodes of the endpoint's users
    policy:            its name, which is the path of its WebSocket address; "" where the run gives none
    demonstrations:    where those of others than the policy are stored, with the other files of the run
    settings:          of the game, with which a run begins
    front:             an `OpenFront`; None for no other way in for episodes
    """

    spec: GatewaySpec
    experience: ExperienceSpec
    token: str
    run_id: str = ""
    target_return: float | None = None
    curve_keys: tuple[bytes, bytes] | None = None
    is_synchronous: bool = False
    steps_ahead: int = 0
    learns_from_users: bool = False
    policy: str = ""
    demonstrations: DemonstrationSite | None = None
    settings: GameSettings = field(default_factory=dict)
    front: Any = None

    @classmethod
    def of_run(
        cls, spec: RLSpec, experience: ExperienceSpec, folder: Path, token: str, stored_as: str = "", **others: Any
    ) -> Self:
        """The setting of a run with files in `folder`. stored_as: that folder in `$SHOAL_STORE`, below that of all
        runs; "": nothing of it is there. others: further fields"""
        return cls(
            spec.applied_gateway,
            experience,
            token,
            is_synchronous=spec.algorithm.pauses_actors,
            steps_ahead=spec.steps_ahead,
            learns_from_users=spec.learn_from_endpoint,
            demonstrations=DemonstrationSite(spec.demonstrations, experience, folder, stored_as),
            **others,
        )

    @property
    def site(self) -> DemonstrationSite:
        """Where a run has its files."""
        assert self.demonstrations is not None
        return self.demonstrations

    def __post_init__(self) -> None:
        if not self.token:
            raise ConfigError("token", "", "is empty", "a gateway without a token would take anybody's experience")
        if self.spec.curve and self.curve_keys is None:
            raise ConfigError("gateway.curve", True, "needs a key pair", "pass curve_keys=zmq.curve_keypair()")
        require_segment_fits(self.spec, self.experience)


class GatewayState:
    """The state of one gateway. `weights` are the newest; one reference, which another thread replaces.

    opponents:    of a run with self-play
    group_commit: with `durable: store`
    demonstrations: takes the segments of others than the policy
    episodes:     records some
    """

    def __init__(
        self,
        setting: GatewaySetting,
        queue: ExperienceQueue,
        opponents: OpponentPool | None = None,
        group_commit: GroupCommit | None = None,
    ) -> None:
        self.setting = setting
        self.queue = queue
        self.opponents = opponents
        self.group_commit = group_commit
        self.demonstrations = setting.demonstrations.open_recorder() if setting.demonstrations else None
        site, record = setting.demonstrations, setting.spec.record
        self.episodes = site.open_episodes(record) if site else None
        self.progress = RunProgress(setting.target_return, opponent_names=opponents.names if opponents else {})
        self.actors = ActorTable()
        length = setting.experience.segment_length
        self.sessions = Sessions(queue, length if setting.is_synchronous else 0, setting.steps_ahead)
        self.send_queue = SendQueue(group_commit)
        self.weights: WeightSnapshot | None = None
        self.settings: GameSettings = {}  # of the game; `progress.settings` is their version
        self._settings_before: GameSettings = {}  # of the version below

    def restore(self) -> None:
        """Continue from what an earlier gateway has left in the ledger."""
        ledger = self.queue.ledger
        if (before := ledger.get_fact("progress")) is not None:
            self.progress.restore(before)
        if (known := ledger.get_fact("settings")) is not None:
            self.progress.settings, self.settings = json.loads(known)
        else:
            self.change_settings(self.setting.settings)  # before a game joins

    def change_settings(self, values: GameSettings) -> None:
        """Tell all games these settings, unless they are the present ones."""
        if values == self.settings:
            return
        self._settings_before, self.settings = self.settings, dict(values)
        self.progress.change_settings(values)
        self.queue.ledger.set_fact("settings", json.dumps([self.progress.settings, self.settings]))
        self.queue.ledger.set_fact("progress", self.progress.dump_state())  # with no return of the earlier ones
        for route, session in self.sessions.items():
            if session.is_welcomed:
                session.progress.settings = self.progress.settings
                self.send_queue.add(route, SettingsMessage(self.progress.settings, self.settings))

    def find_settings(self, version: int) -> GameSettings:
        """Those of a version; empty where it is older than the last but one."""
        newest = self.progress.settings
        return {newest: self.settings, newest - 1: self._settings_before}.get(version, {})

    def get_counts(self) -> dict[str, dict[str, int] | None]:
        """Of the demonstrations and the episodes that are kept; None for what is not."""
        kept = {"demonstrations": self.demonstrations, "recorded": self.episodes}
        return {name: None if each is None else each.get_counts() for name, each in kept.items()}

    def close(self) -> None:
        """Write what waits. Idempotent."""
        for each in (self.demonstrations, self.episodes):
            if each is not None:
                each.close()

    @property
    def version(self) -> int:
        """The version of the newest weights; 0 before the first."""
        return self.weights.version if self.weights else 0


class QueuedMessage(NamedTuple):
    """A message, the frames after its header, and its receiver. group: it waits until this one is in the store; 0: for
    none"""

    route: bytes
    message: Message
    frames: Sequence[bytes]
    should_await_commit: bool
    group: int


class SendQueue:
    """Outgoing messages, taken all at once, or without those that wait. group_commit: acknowledgements wait for it"""

    def __init__(self, group_commit: GroupCommit | None) -> None:
        self._group_commit = group_commit
        self._pending: list[QueuedMessage] = []

    def add(self, route: bytes, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Queue a message."""
        group = self._group_commit.await_group() if self._group_commit and isinstance(message, Ack) else 0
        awaits_commit = not isinstance(message, LEDGER_INDEPENDENT)
        self._pending.append(QueuedMessage(route, message, frames, awaits_commit, group))

    def drop_route(self, route: bytes) -> None:
        """Drop the messages of this connection, which begins another session."""
        self._pending = [message for message in self._pending if message.route != route]

    def take(self, is_written: bool) -> list[QueuedMessage]:
        """The messages that may be sent; while the ledger is not written, only those that do not depend on it."""
        num_groups = self._group_commit.num_uploaded if self._group_commit else 0
        pending, self._pending = self._pending, []
        taken: list[QueuedMessage] = []
        for message in pending:
            is_waiting = message.group > num_groups or (message.should_await_commit and not is_written)
            (self._pending if is_waiting else taken).append(message)
        return taken

    def clear(self) -> None:
        self._pending.clear()
