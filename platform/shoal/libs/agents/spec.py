"""The spec of a run of agents. Imports neither torch nor Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from shoal.config import Spec
from shoal.extend.rl import AnyAlgorithmConfig, GatewaySpec, LearnerSpec, RLSpec
from shoal.libs.agents.config import PolicyGradientTextConfig
from shoal.network_address import is_loopback


def _complete_path(model: str) -> str:
    """A folder of this one, for processes with another."""
    return str(Path(model).resolve()) if model and Path(model).is_dir() else model


class SessionsSpec(Spec):
    """How sessions are opened, and how groups are settled."""

    host: str = "127.0.0.1"
    advertise: str = Field(default="", description="URL by which agents reach it, as https://agents.example")
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free one")
    wait_s: float = Field(default=30.0, gt=0, description="for credit, within a request; then it is refused with 429")
    group_s: float = Field(default=600.0, gt=0, description="after the first end of a group, for the others")
    min_group: int | None = Field(
        default=None, ge=1, description="rewards that suffice then; default: half, at least 2"
    )
    truncated: Literal["train", "drop"] = Field(default="train", description="episodes that were cut off")
    cancelled: Literal["train", "drop"] = Field(default="drop", description="answers whose client has left")

    @model_validator(mode="after")
    def _is_closed_by_default(self) -> SessionsSpec:
        if not is_loopback(self.host) and not self.advertise.startswith("https://"):
            problem = f"host = {self.host!r} is beyond loopback, and keys would be in clear"
            raise ValueError(f"{problem}: put a proxy with TLS before it, and give advertise=https://NAME")
        return self


class ReplicaSpec(Spec):
    """What each replica that samples reserves of the cluster."""

    num_cpus: float = Field(default=0.5, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)


class AgentsSpec(Spec):
    """One run of agents elsewhere, who talk to a language model and are rewarded.

    A step of the learner takes `algorithm.groups_per_step` groups of `algorithm.group_size` sessions.
    """

    main_fields = (
        *("model", "env", "agents", "max_steps", "max_wall_s", "target_reward", "algorithm.name"),
        *("algorithm.learning_rate", "algorithm.group_size", "algorithm.groups_per_step", "max_version_lag", "resume"),
    )
    page = "agents.md"

    model: Annotated[str, AfterValidator(_complete_path)] = Field(
        default="", description="that learns: a folder of Hugging Face, or NAME@VERSION"
    )
    name: str = Field(default="", description="of the registered model; default: the model's")
    env: str = Field(
        default="", description="tasks of the run's own driver, as reasoning_gym:chain_sum or my_env.py:grade"
    )
    agents: int = Field(default=0, ge=0, description="episodes of the run's own driver at once; 0: drivers elsewhere")
    agent: str = Field(default="", description="a program that answers a task; default: one chat completion")
    algorithm: AnyAlgorithmConfig = Field(default={"name": "grpo"}, validate_default=True)
    learner: LearnerSpec = LearnerSpec()
    sessions: SessionsSpec = SessionsSpec()
    max_version_lag: int = Field(default=1, ge=0, description="versions that a token may be old when it is learnt")
    replicas: int = Field(default=0, ge=0, description="of an endpoint that samples; 0: the gateway's process does")
    replica: ReplicaSpec = ReplicaSpec()
    engine: Literal["slots", "vllm", "auto"] = Field(default="slots", description="of the endpoint that samples")
    engine_python: str = Field(default="", description="the Python of an environment with vLLM; default: the replica's")
    engine_args: dict[str, JsonValue] = Field(default_factory=dict, description="further arguments of vLLM's engine")
    slots: int = Field(default=64, ge=1, description="answers that are sampled at the same time, by each")
    length: int | None = Field(default=None, ge=2, description="tokens of an episode; default: the model's context")
    max_tokens: int | None = Field(default=None, ge=1, description="of an answer, at most")
    max_steps: int | None = Field(default=None, ge=1, description="of the learner")
    max_wall_s: float = Field(default=3600.0, gt=0, description="from the first session; then the run ends")
    target_reward: float | None = Field(default=None, description="mean of the last 256 sessions, at which to stop")
    resume: str = ""

    @model_validator(mode="after")
    def _engine_is_an_endpoints(self) -> Self:
        if self.engine != "slots" and not self.replicas:
            raise ValueError(f"engine = {self.engine} is for an endpoint that samples: set replicas to 1 or more")
        if self.engine != "slots" and getattr(self.algorithm, "lora", None):
            raise ValueError(f"engine = {self.engine} samples with whole weights: leave out algorithm.lora")
        return self

    @property
    def model_name(self) -> str:
        """Of the registered model, and of the endpoint."""
        from shoal.libs.hf.source import make_model_name  # it imports transformers

        return self.name or make_model_name(self.model)

    @property
    def text_algorithm(self) -> PolicyGradientTextConfig:
        """The algorithm, with the run's model."""
        assert isinstance(self.algorithm, PolicyGradientTextConfig)
        return self.algorithm.update({"pretrained": self.model})

    @property
    def credit(self) -> int:
        """Sessions that may be open or unlearnt."""
        algorithm = self.text_algorithm
        return (self.max_version_lag + 1) * algorithm.groups_per_step * algorithm.group_size

    def make_rl_spec(self) -> RLSpec:
        """What the gateway and the learner read of it."""
        spaces = json.dumps({"observation": [1], "action": 2})  # no game joins
        gateway = GatewaySpec(max_version_lag=self.max_version_lag, queue_capacity=64 * self.credit)
        learner = self.learner.update(
            {"publish_interval_s": 0}
        )  # each step is a version, with which its credit returns
        values: dict[str, Any] = {"env": spaces, "gateway": gateway, "learner": learner, "hidden": ()}
        return RLSpec.parse(values | {"algorithm": self.text_algorithm})
