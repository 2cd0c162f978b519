"""From the spec of a run of agents to what its gateway is started with. Needs no Ray."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError
from shoal.extend.rl import GatewaySetting
from shoal.libs.agents.config import PolicyGradientTextConfig, describe_tokens
from shoal.libs.agents.driver import find_program
from shoal.libs.agents.model import open_pretrained
from shoal.libs.agents.sessions.chat_template import check_template
from shoal.libs.agents.sessions.front import AgentsFrontSetting
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.agents.tasks import load_environment


def check(spec: AgentsSpec) -> None:
    """Raises ConfigError for a model that cannot be trained by its answers, an algorithm that learns no texts, and for
    tasks and an agent that the run's own driver cannot start with."""
    if not spec.model:
        raise ConfigError("model", "", "is not given", "name a folder of Hugging Face, or NAME@VERSION")
    if not isinstance(spec.algorithm, PolicyGradientTextConfig):
        raise ConfigError("algorithm", spec.algorithm.name, "learns no texts", "algorithm=grpo, rloo or reinforce_pp")
    if spec.agents:
        if not spec.env:
            raise ConfigError("env", "", "is not given", "name the tasks, as env=reasoning_gym:chain_sum, or agents=0")
        load_environment(spec.env).make_task(0).encode()
        find_program(spec.agent)
    check_template(open_pretrained(spec.text_algorithm).tokenizer)


def make_setting(spec: AgentsSpec, folder: Path, token: str, run_id: str) -> GatewaySetting:
    """What the run's gateway is started with."""
    algorithm = spec.text_algorithm
    model = open_pretrained(algorithm)
    front = AgentsFrontSetting(spec, folder, token)
    rl_spec = spec.make_rl_spec()
    experience = describe_tokens(model.num_tokens, spec.length or algorithm.segment_length)
    return GatewaySetting.of_run(rl_spec, experience, folder, token, run_id=run_id, front=front)
