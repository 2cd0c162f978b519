"""Demonstrations as files: a segment each, in safetensors, its facts in the metadata; and recorded episodes, an episode
each, which are several segments end to end.

    RUN/demonstrations/human-1f0c9ad2-000003.safetensors
    RUN/episodes/policy-5b20e1c7-000412.safetensors

They lie in the folder of a run on the gateway's host, and in `$SHOAL_STORE`, for hosts that share no files.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import safetensors.numpy

from shoal.extend.rl import DemonstrationSite
from shoal.home import home
from shoal.store import Store, open_shared_store, open_store, store_url
from shoal.wire import ExperienceSpec, PackedSegment, Segment, unpack_segment

FOLDER, EPISODES = "demonstrations", "episodes"  # of a run
SUFFIX = ".safetensors"
FORMAT = 1
_INFO = "demonstration"  # in the metadata
_EXTRA = "extra."  # before the name of an extra
_FACTS = ("terminated", "truncated", "episode_return", "episode_length", "behaviour", "assisted", "success", "settings")
PER_STEP = ("actions", "rewards", "log_probabilities", "versions")
_log = logging.getLogger(__name__)


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a demonstration, or of an episode. run_steps: the steps of the run's policy when it came

    lengths, behaviours: of an episode, the steps of each segment, and who took them
    settings, values:    the version of the game's settings, and these; None: unknown
    skipped:             how many episodes its gateway had left out when it wrote this one
    """

    behaviour: str
    actor_id: str
    incarnation: int
    seq: int
    num_steps: int
    run_steps: int = 0
    created_at: float = 0.0
    terminated: bool = False
    truncated: bool = False
    episode_return: float | None = None
    episode_length: int | None = None
    assisted: bool = False
    format: int = FORMAT
    lengths: tuple[int, ...] = ()
    behaviours: tuple[str, ...] = ()
    success: bool | None = None
    settings: int = 0
    values: dict[str, bool | int | float | str] | None = None
    skipped: int = 0


class Demonstration(NamedTuple):
    info: Info
    segment: Segment

    @property
    def name(self) -> str:
        """Of its file, and of that of the same segment that comes again."""
        who = sha256(f"{self.info.actor_id} {self.info.incarnation}".encode()).hexdigest()[:8]
        return f"{self.info.behaviour or 'policy'}-{who}-{self.info.seq:06d}"

    @classmethod
    def of(cls, actor: tuple[str, int], seq: int, segment: Segment, run_steps: int) -> Demonstration:
        info = Info(
            actor_id=actor[0],
            incarnation=actor[1],
            seq=seq,
            num_steps=segment.num_steps,
            run_steps=run_steps,
            created_at=time.time(),
            **{name: getattr(segment, name) for name in _FACTS},
        )
        return cls(info, segment)

    def to_bytes(self) -> bytes:
        segment = self.segment
        arrays = {"observations": segment.observations, "actions": segment.actions, "rewards": segment.rewards}
        if not segment.behaviour:
            arrays |= {"log_probabilities": segment.log_probabilities, "versions": segment.versions}
        arrays |= {_EXTRA + name: each for name, each in segment.extras.items()}
        contiguous = {name: np.asarray(each, order="C") for name, each in arrays.items()}
        return bytes(safetensors.numpy.save(contiguous, {_INFO: msgspec.json.encode(self.info).decode()}))

    @classmethod
    def from_bytes(cls, payload: bytes) -> Demonstration:
        """Raises ValueError for what is no demonstration."""
        try:
            metadata = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])["__metadata__"]
            info = msgspec.json.decode(metadata[_INFO], type=Info)
            arrays = safetensors.numpy.load(payload)
            extras = {name.removeprefix(_EXTRA): each for name, each in arrays.items() if name.startswith(_EXTRA)}
            rewards = arrays["rewards"]
            segment = Segment(
                arrays["observations"],
                arrays["actions"],
                rewards,
                arrays.get("log_probabilities", np.zeros(len(rewards), np.float32)),
                arrays.get("versions", np.zeros(len(rewards), np.int64)),
                extras=extras,
                **{name: getattr(info, name) for name in _FACTS},
            )
            if sum(info.lengths) not in (0, len(rewards)) or len(info.behaviours) != len(info.lengths):
                raise ValueError("is no demonstration (its segments are not as long as it is)")
        except (safetensors.SafetensorError, msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ValueError(f"is no demonstration ({error})") from None
        return cls(info, segment)

    def fit(self, experience: ExperienceSpec) -> Demonstration:
        """As the beginning of such a run has it: a recurrent policy knows no other network's state. Raises
        InvalidSegment where it is not one of such a run."""
        states = {
            each.name: np.zeros((1, *each.tensor.shape), each.tensor.numpy_dtype())
            for each in experience.extras
            if each.per == "segment"
        }
        segment = replace(self.segment, extras={**self.segment.extras, **states})
        packed = PackedSegment.from_segment(segment)
        length = max(1, segment.num_steps)
        checked = unpack_segment(
            packed.header, packed.tensors, msgspec.structs.replace(experience, segment_length=length)
        )
        return Demonstration(msgspec.structs.replace(self.info, run_steps=0), checked)

    @classmethod
    def join(cls, actor: tuple[str, int], number: int, pieces: Sequence[Segment]) -> Demonstration:
        """An episode of its segments, in order; `split` takes it apart. number: among those of the actor"""
        joined = replace(join_pieces(pieces), behaviour="")
        info = cls.of(actor, number, joined, run_steps=0).info
        lengths, behaviours = tuple(each.num_steps for each in pieces), tuple(each.behaviour for each in pieces)
        return cls(msgspec.structs.replace(info, lengths=lengths, behaviours=behaviours), joined)

    def split(self) -> list[Demonstration]:
        """The segments of an episode, each by itself; a demonstration is one."""
        info, whole = self
        pieces, begin = [], 0
        for index, (length, behaviour) in enumerate(zip(info.lengths, info.behaviours, strict=True)):
            end, is_last = begin + length, index == len(info.lengths) - 1
            facts: dict[str, Any] = {
                "terminated": info.terminated and is_last,
                "truncated": info.truncated and is_last,
                "episode_return": info.episode_return if is_last else None,
                "episode_length": info.episode_length if is_last else None,
                "behaviour": behaviour,
            }
            piece = replace(
                whole,
                observations=whole.observations[begin : end + 1],
                **{name: getattr(whole, name)[begin:end] for name in PER_STEP},
                extras={
                    name: each[begin : end + 1] if len(each) == whole.num_steps + 1 else each[index : index + 1]
                    for name, each in whole.extras.items()
                },
                **facts,
            )
            own = msgspec.structs.replace(info, num_steps=length, lengths=(), behaviours=(), **facts)
            pieces.append(Demonstration(own, piece))
            begin = end
        return pieces or [self]


def join_pieces(pieces: Sequence[Segment]) -> Segment:
    """The last one, with the steps of all, each of which begins where the one before ends."""
    last = pieces[-1]

    def join_rows(arrays: Iterable[np.ndarray]) -> np.ndarray:
        """Of each observation, or one of each piece."""
        *earlier, newest = arrays
        return np.concatenate([*(each if len(each) == 1 else each[:-1] for each in earlier), newest])

    return replace(
        last,
        observations=join_rows(each.observations for each in pieces),
        **{name: cast("Any", np.concatenate([getattr(each, name) for each in pieces])) for name in PER_STEP},
        extras={name: join_rows(each.extras[name] for each in pieces) for name in last.extras},
    )


class DemonstrationFiles:
    """The demonstrations in several stores; one may be in several of them. Methods raise StoreError, OSError."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = stores

    def list_names(self) -> list[str]:
        """The oldest first."""
        ages: dict[str, float] = {}
        for store in self.stores:
            for each in store.list_entries():
                if each.key.endswith(SUFFIX) and "/" not in each.key:
                    ages.setdefault(each.key.removesuffix(SUFFIX), each.modified_s)
        return sorted(ages, key=lambda name: (ages[name], name))

    def read(self, name: str) -> Demonstration:
        """Raises FileNotFoundError, and ValueError for what is no demonstration."""
        for store in self.stores:
            try:
                return Demonstration.from_bytes(store.read(name + SUFFIX))
            except FileNotFoundError:
                continue
        raise FileNotFoundError(f"there is no demonstration {name}")

    def read_sound(self, names: Iterable[str] | None = None) -> dict[str, Demonstration]:
        """Those, or all, that are there and can be read, by name."""
        found = {}
        for name in self.list_names() if names is None else names:
            try:
                found[name] = self.read(name)
            except FileNotFoundError:
                continue  # dropped meanwhile
            except ValueError as error:
                _log.warning("%s %s: it is left out", name, error)
        return found

    def delete(self, names: Iterable[str]) -> None:
        keys = [name + SUFFIX for name in names]
        for store in self.stores:
            store.delete(keys)


def open_files(site: DemonstrationSite, folder: str = FOLDER) -> DemonstrationFiles:
    """Those of one policy of a run. Raises OSError, ConfigError."""
    shared = open_shared(site.name, folder)
    return DemonstrationFiles([open_store(site.folder / folder), *([] if shared is None else [shared])])


def open_shared(name: str, folder: str = FOLDER) -> Store | None:
    """Where those of a policy lie in `$SHOAL_STORE`; None if that is not set, or is `$SHOAL_HOME`. name: as a site's"""
    store = open_shared_store(home(), store_url()) if name else None
    return None if store is None else store.open_folder(f"runs/{name}/{folder}").without_waiting()
