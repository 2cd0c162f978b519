"""Films of an actor's own episodes, written on its host while a run learns. Called by the bundled actor."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.atomic_file import make_folder
from shoal.extend.rl import ActorClient, is_parallel, make_policy
from shoal.home import home
from shoal.libs.films.episode import Recording, open_camera
from shoal.libs.films.film_file import thin_out, write_film
from shoal.libs.films.players import describe_outputs
from shoal.wire.action_masks import INFO_KEY

_log = logging.getLogger(__name__)
MAX_FILMS = 40  # of an actor; then every second one is deleted, and half as many are taken
MAX_SHARE = 0.25  # of an actor's time, that films take


class FilmedGame:
    """An environment of which each so many episodes, `every`, one is filmed; the rest is the environment's own.

    folder: where films are written; "": into the run's folder where it is on this host, or else into ./RUN-films
    """

    def __init__(self, environment: Any, clients: Sequence[ActorClient], folder: str, every: int) -> None:
        self._environment = environment
        self._client = clients[0]
        self._folder = folder
        self._every = every
        self._number = -1
        self._rest_until = 0.0
        self._spent_s = 0.0
        self._recording: Recording | None = None
        self._agent: Any = None
        self._thoughts = _Thoughts(clients[0])
        environment.reset()  # what draws is imported now, and not in the first episode
        _, why = open_camera(environment)
        if why:
            _log.warning("films are charts: %s", why)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, **options: Any) -> Any:
        shown = self._environment.reset(**options)
        self._number += 1
        self._recording = None
        if self._number % self._every == 0 and time.monotonic() >= self._rest_until:
            began = time.monotonic()
            self._agent = None
            if is_parallel(self._environment):
                self._agent = [*self._client.spec.agents, *self._environment.possible_agents][0]
            self._recording = Recording(open_camera(self._environment)[0])
            self._thoughts.reset()
            self._first_version = self._thoughts.version
            self._step = 0
            self._return = 0.0
            self._shown = shown
            self._spent_s = time.monotonic() - began
        return shown

    def step(self, action: Any) -> Any:
        if self._recording is None:
            return self._environment.step(action)
        began = time.monotonic()
        self._recording.take(self._step)
        observations, infos = (self._get_own(each) for each in (self._shown[0], self._shown[-1]))
        own = self._get_own(action)
        if observations is not None and own is not None:
            thoughts = self._thoughts.find(observations, (infos or {}).get(INFO_KEY))
            self._recording.add(self._step, observations, own, thoughts)
        self._spent_s += time.monotonic() - began
        self._shown = result = self._environment.step(action)
        self._step += 1
        reward, terminated, truncated = (self._get_own(each) for each in result[1:4])
        self._recording.reward(float(reward or 0.0))
        self._return += float(reward or 0.0)
        if terminated or truncated or self._recording.is_full:
            self._write(self._recording, "terminated" if terminated else "truncated" if truncated else "")
            self._recording = None
        return result

    def _get_own(self, value: Any) -> Any:
        return value if self._agent is None else value.get(self._agent)

    def _write(self, recording: Recording, outcome: str) -> None:
        try:
            self._write_film(recording, outcome)
        except OSError as error:  # such as a full disk: the game is played on, without films
            _log.warning("no more films of this actor: %s", error)
            self._rest_until = math.inf

    def _write_film(self, recording: Recording, outcome: str) -> None:
        began, client = time.monotonic(), self._client
        recording.take(self._step, is_last=True)
        first, version = self._first_version, self._thoughts.version
        versions = f"version {version}" if first == version else f"versions {first} to {version}"
        title = f"{versions} · episode {self._number + 1} · {self._agent or client.actor_id}"
        if (episode := recording.finish(title, outcome)) is None:
            return
        folder = Path(self._folder) if self._folder else home() / "runs" / client.run_id / "films"
        if not self._folder and not folder.parent.is_dir():
            folder = Path(f"{client.run_id}-films").absolute()
        make_folder(folder)
        actor = re.sub(r"[^A-Za-z0-9_-]", "-", client.actor_id)
        path = folder / f"v{version:06d}-e{self._number + 1:06d}-r{self._return:.6g}-{actor}.webp"
        write_film(path, [episode])
        own = re.compile(rf"v\d+-e\d+-r[-+.\deinfa]+-{actor}\.webp")  # of an earlier start of this actor too
        films = sorted(each for each in folder.iterdir() if own.fullmatch(each.name))
        self._every *= 1 + (len(thin_out(films, MAX_FILMS)) < len(films))
        now = time.monotonic()
        self._rest_until = now + (self._spent_s + now - began) * (1 / MAX_SHARE - 1)


class _Thoughts:
    """What the actor's policy computes at an observation, by the same weights; nothing where it runs elsewhere, or
    where a past version may play."""

    def __init__(self, client: ActorClient) -> None:
        self._client, self._run_id = client, ""
        self._policy: Any = None

    @property
    def version(self) -> int:
        return int(self._client.published_version if self._policy is None else self._policy.version)

    def reset(self) -> None:
        """An episode begins, maybe of another run."""
        client = self._client
        if self._run_id != client.run_id:
            self._run_id, self._policy = client.run_id, None
            if client.inference == "local" and not client.spec.self_play:
                self._policy = make_policy(client.spec.policy, action_shape=client.spec.action.shape)
        if self._policy is not None:
            self._load_newest()
            self._policy.reset(0)

    def find(self, observation: Any, mask: Any) -> Mapping[str, np.ndarray]:
        """What a film shows."""
        if self._policy is None:
            return {}
        self._load_newest()
        spec = self._client.spec
        rows = np.asarray(observation, spec.observation.numpy_dtype())[None]
        outputs = self._policy.compute_outputs(rows, [0])[0]
        if spec.policy.action_low:
            return {}
        if spec.policy.epsilon:
            return describe_outputs({"q_values": outputs}, [])
        if mask is not None:
            outputs = np.where(np.asarray(mask, np.bool_).ravel(), outputs, -np.inf)
        return describe_outputs({"logits": outputs}, list(spec.policy.action_sizes))

    def _load_newest(self) -> None:
        if (newer := self._client.received_weights(self._policy.version)) is not None:
            self._policy.load(*newer)
