"""The specs of the parts of a run: gateway, learner, self-play, what the games are told, demonstrations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, ValidationInfo, field_validator, model_validator

from shoal.config import Spec
from shoal.network_address import WILDCARDS, is_loopback, require_origin, split_address

# What a game is told: a number that is not finite equals nothing, and would be sent again and again.
Setting = bool | Annotated[int, Field(ge=-(2**63), lt=2**63)] | FiniteFloat | str


class SettingsRule(Spec):
    """`set` holds from when the mean return of the last 100 episodes, or of at least 20, reaches `above`."""

    above: float
    set: dict[str, Setting] = Field(min_length=1)


class LearnerSpec(Spec):
    """How the learner takes experience, and how often it publishes and saves."""

    batch_steps: int | None = Field(
        default=None, ge=1, description="environment steps in a batch, at least; default: the algorithm's"
    )
    max_batch_steps: int | None = Field(
        default=None, ge=1, description="at most, when the learner has fallen behind; default: the algorithm's"
    )
    take_timeout_s: float | None = Field(
        default=None, gt=0, description="after which a smaller batch is taken; default: the algorithm's"
    )
    publish_interval_s: float = Field(default=0.05, ge=0, description="between two weight versions, at least")
    checkpoint_every_s: float = Field(
        default=5.0, gt=0, description="at least: saving takes no more than a tenth of the time"
    )
    keep_checkpoints: int = Field(default=2, ge=1)
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA where there is a GPU")
    replicas: int = Field(default=1, ge=1, description="learners that share each batch, or each sample of a replay")
    torch_threads: int = Field(default=1, ge=1, description="of each on a CPU; networks that are not small take more")
    num_cpus: float = Field(default=0.5, ge=0, description="what each reserves of the cluster")
    num_gpus: float = Field(default=1.0, gt=0, description="likewise, on cuda")
    max_restarts: int = Field(
        default=3, ge=0, description="of the gateway and of the learner, until the next segment is learnt"
    )
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)  # torch's range

    @model_validator(mode="after")
    def _limits_fit(self) -> LearnerSpec:
        if self.max_batch_steps and self.batch_steps and self.max_batch_steps < self.batch_steps:
            raise ValueError(f"max_batch_steps = {self.max_batch_steps} is below batch_steps = {self.batch_steps}")
        return self


class SelfPlaySpec(Spec):
    """Of an environment with several agents, one has the newest weights and the others a past version, which is drawn
    for each episode from a pool."""

    snapshot_every: int = Field(
        default=0, ge=0, description="environment steps between two of its versions that enter the pool; 0: none does"
    )
    opponents: tuple[str, ...] = Field(
        default=(), description="registered versions that are in the pool, as poker@3 or poker@champion"
    )
    max_versions: int = Field(
        default=64, ge=2, description="of its own; of more, those between the oldest and the newest thin out evenly"
    )

    @property
    def is_on(self) -> bool:
        return self.snapshot_every > 0 or bool(self.opponents)


class DemonstrationsSpec(Spec):
    """What people and scripts show to a run, and how it learns from that, beside the experience of its policy."""

    source: str = Field(default="", description="a run, or a folder, whose demonstrations this run starts with")
    passes: float = Field(
        default=200.0,
        ge=0,
        description="over each new one, in steps of cloning before the next update, of ppo and impala",
    )
    weight: float = Field(
        default=1.0, ge=0, description="of their cross entropy in the loss from then on, of ppo and impala"
    )
    fade_steps: int = Field(
        default=200_000, ge=1, description="environment steps after the newest one in which the weight falls to 0"
    )
    share: float = Field(default=0.25, ge=0, lt=1, description="of each sample of a replay, of dqn, r2d2 and sac")
    updates: int = Field(
        default=0, ge=0, description="on samples of those that the run starts with alone, before its games; likewise"
    )
    max_mb: float = Field(default=256.0, gt=0, description="MiB that are kept; beyond, the oldest go")

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """`demonstrations=RUN`"""
        return {**before, "source": text}


class RecordSpec(Spec):
    """Which episodes of the games a gateway stores in the run's folder `episodes`, and how many of them stay there."""

    share: float = Field(default=0.0, ge=0, le=1, description="of the episodes, drawn evenly; 0: none")
    newest: int = Field(default=1000, ge=1, description="episodes that are kept; beyond, the oldest go")
    max_mb: float = Field(default=256.0, gt=0, description="MiB that are kept; beyond, the oldest go")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: object) -> object:
        """`1%`: a share of the episodes; `50`: the newest 50 of all."""
        if isinstance(given, Mapping | RecordSpec):
            return given
        number = re.fullmatch(r"(\d+(?:\.\d+)?)%|([1-9]\d*)", str(given))
        if number is None or float(number[1] or 0) > 100:
            raise ValueError("is neither a share, as 1%, nor a number of episodes, as 50 for the newest 50")
        return {"share": float(number[1]) / 100} if number[1] else {"share": 1.0, "newest": int(number[2])}

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """`gateway.record=1%`: the other fields stay."""
        return {**before, "share": float(text[:-1]) / 100} if re.fullmatch(r"\d+(\.\d+)?%", text) else text


class GatewayTls(Spec):
    """The files of the gateway's certificate, on its host, in PEM. New content counts for new connections."""

    certificate: str = Field(min_length=1, description="with its chain")
    key: str = Field(min_length=1, description="its private key")

    @field_validator("certificate", "key")
    @classmethod
    def _is_full_path(cls, path: str) -> str:
        if not Path(path).is_absolute():
            raise ValueError("is relative: give the full path of the file on the gateway's host")
        return path


class GatewaySpec(Spec):
    """How actors reach the learner. Beyond loopback, encryption and the server's identity are required: `curve`, and
    `tls` for WebSocket."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free one")
    curve: bool = False
    shards: int = Field(
        default=1,
        ge=1,
        le=64,
        description="gateways of a policy, each a process with a share of the actors; those of one that is away move",
    )
    durable: Literal["disk", "store"] = Field(
        default="disk",
        description="where a segment is counted before it is acknowledged; store: it is also kept there until learnt,"
        " and outlives the gateway's host",
    )
    queue_capacity: int | None = Field(
        default=None, ge=2, description="segments; default: those of a batch or two, and one for each actor"
    )
    max_credits: int = Field(default=8, ge=1, description="segments that one actor may have on their way")
    max_version_lag: int = Field(default=30, ge=0, description="weight versions; not for dqn")
    heartbeat_s: float = Field(default=1.0, gt=0)
    timeout_s: float = Field(default=6.0, gt=0)
    episode_timeout_s: float = Field(
        default=300.0, gt=0, description="after which an episode of remote inference that no one continues expires"
    )
    max_message_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    advertise: str = Field(
        default="", description="HOST or HOST:PORT to which actors connect, behind NAT or a balancer; default: its own"
    )
    websocket: int | None = Field(
        default=None, ge=0, le=65535, description="port for games that speak WebSocket; 0 takes a free one"
    )
    origins: tuple[Annotated[str, AfterValidator(require_origin)], ...] = Field(
        default=(), description="of pages that may connect, as https://game.example; default: pages of the same address"
    )
    tls: GatewayTls | None = Field(default=None, description="of the port for WebSocket: its address is then wss://")
    record: RecordSpec = RecordSpec()
    pause_s: float = Field(
        default=300.0,
        gt=0,
        description="that a game may be silent over WebSocket, as at a menu, before its session ends",
    )

    @field_validator("advertise")
    @classmethod
    def _is_address(cls, advertise: str, info: ValidationInfo) -> str:
        if not advertise:
            return advertise
        host, _ = split_address(advertise)
        if host in WILDCARDS:
            raise ValueError("names no host: give the one to which actors connect")
        if not is_loopback(host) and not info.data.get("curve", True):
            raise ValueError("is beyond loopback: set curve=true, so that nothing is in clear")
        return advertise

    @property
    def advertised(self) -> tuple[str, int]:
        """Host and port of `advertise`; "" and 0 for those that it does not give."""
        return split_address(self.advertise) if self.advertise else ("", 0)

    def shift_ports(self, number: int) -> GatewaySpec:
        """The spec of a further gateway: each port that is given is higher by `number`."""
        host, port = self.advertised
        ports = {name: given + number for name in ("port", "websocket") if (given := getattr(self, name))}
        shown = f"[{host}]" if ":" in host else host
        return self.update({**ports, **({"advertise": f"{shown}:{port + number}"} if port else {})})

    @model_validator(mode="after")
    def _closed_by_default(self) -> GatewaySpec:
        if not is_loopback(self.host) and not self.curve:
            raise ValueError(f"gateway host {self.host!r} is not loopback: set curve=true, so that nothing is in clear")
        hosts = [self.host, *filter(None, self.advertised[:1])]
        if self.websocket is not None and self.tls is None and not all(map(is_loopback, hosts)):
            problem = f"websocket with the host {hosts[-1]!r}, which is not loopback, needs a certificate"
            raise ValueError(f"{problem}: give tls.certificate and tls.key, so that nothing is in clear")
        if self.tls is not None and self.websocket is None:
            raise ValueError("tls is for WebSocket: give websocket=PORT, too, or leave tls out")
        if self.timeout_s < 2 * self.heartbeat_s:
            raise ValueError("timeout_s must be at least twice heartbeat_s, or one lost ping ends a session")
        return self
