"""The language model of a run of agents: its network, its tokenizer, and what its versions are in the registry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.errors import needs_extra
from shoal.extend.registry import ModelFactory, ModelVersion, Registry, Signature
from shoal.extend.train import Registration, build, make_task
from shoal.libs.agents.config import PolicyGradientTextConfig
from shoal.weights import WeightSnapshot

CAUSAL_LM = "shoal.libs.hf.tasks:CausalLM"


@dataclass(frozen=True)
class PretrainedModel:
    """config: that of transformers; stop_tokens: those that end an answer"""

    algorithm: PolicyGradientTextConfig
    config: Any
    tokenizer: Any
    stop_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary, as the network has it."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer."""
        return int(self.config.get_text_config().max_position_embeddings)

    def make_module(self) -> torch.nn.Module:
        """A causal network of transformers, with fresh weights; of adapters, with those of their base."""
        from shoal.libs.language.served.prepared import share_module

        module = share_module(make_task(CAUSAL_LM, self.algorithm.task_args).model())
        assert module is not None
        return module


def open_pretrained(algorithm: PolicyGradientTextConfig) -> PretrainedModel:
    """The model with which a run begins. Raises ConfigError, RegistryError."""
    with needs_extra("language"):
        from shoal.libs.hf.source import load_tokenizer, make_config, read_config, read_json
        from shoal.libs.hf.transfer import find_model_folder
    folder = find_model_folder(algorithm.pretrained)
    config = make_config(read_config(folder))
    tokenizer = load_tokenizer(folder)
    generation = Path(folder, "generation_config.json")
    given = read_json("model", generation).get("eos_token_id") if generation.is_file() else None
    stops: set[int] = set()
    for each in (given, config.eos_token_id, tokenizer.eos_token_id):
        stops.update([each] if isinstance(each, int) else each or ())
    return PretrainedModel(algorithm, config, tokenizer, tuple(sorted(stops)))


class AgentsModel(NamedTuple):
    """Of a run's versions: the network without their weights, and what the registry has beside them."""

    factory: ModelFactory
    signature: Signature
    registration: Registration


def describe(config: PolicyGradientTextConfig) -> AgentsModel:
    """The model as endpoints and the registry have it; of adapters, the base is registered, if it is not yet."""
    task = make_task(CAUSAL_LM, config.task_args)
    registration, signature = task.registration(), task.signature()
    assert registration is not None
    assert signature is not None
    kwargs = {"task": CAUSAL_LM, "args": dict(registration.args or {})}
    return AgentsModel(ModelFactory(factory=f"{build.__module__}:build", kwargs=kwargs), signature, registration)


def register(description: AgentsModel, name: str, snapshot: WeightSnapshot) -> ModelVersion:
    """Register weights as a version of `name`, with its tokenizer; adapters as those of their base."""
    factory, signature, registration = description
    return Registry().register(
        name,
        snapshot,
        model=factory,
        signature=signature,
        lineage=registration.lineage,
        files=registration.files,
        aliases=("champion",),
        problem=registration.problem,
    )
