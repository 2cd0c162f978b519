"""What plays: a registered version in this process, or a model of an endpoint, one answer for each step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from shoal.client import Client
from shoal.extend.registry import LocalModel
from shoal.libs.films.episode import to_probabilities
from shoal.wire.action_masks import INFO_KEY

Outputs = Mapping[str, np.ndarray]
Acting = Literal["best", "sampled"] | None  # None: as the version was registered


class Player(Protocol):
    """A policy. Its outputs are those at one observation: `logits`, `value` and others, without a row axis."""

    name: str

    def act(self, observation: Any, mask: Any, agent: Hashable) -> tuple[Any, Outputs]: ...

    def reset(self) -> None:
        """An episode begins."""
        ...


class LocalPlayer:
    """A version of this registry, computed as an endpoint computes it."""

    def __init__(self, model: LocalModel, acting: Acting) -> None:
        self._model, self.name = model, f"{model.name}@{model.version}"
        self._deterministic = None if acting is None else acting == "best"

    def act(self, observation: Any, mask: Any, agent: Hashable) -> tuple[Any, Outputs]:
        action, outputs = self._model.decide(
            observation, deterministic=self._deterministic, mask=mask, stream=agent, is_flat=True
        )
        return action, {name: rows[0] for name, rows in outputs.items()}

    def reset(self) -> None:
        self._model.reset()


class EndpointPlayer:
    """A model of an endpoint; keeps the states of a recurrent policy. version: None for the serving one"""

    def __init__(self, client: Client, model: str, version: int | None, acting: Acting) -> None:
        self._client = client
        self._model = model
        self._version = version
        self._inputs = {each.name: each.shape for each in client.metadata(model).inputs}
        self._parameters: dict[str, Any] | None = None if acting is None else {"action": acting}
        self._states: dict[Hashable, np.ndarray] = {}
        self.name = model

    def act(self, observation: Any, mask: Any, agent: Hashable) -> tuple[Any, Outputs]:
        inputs: dict[str, np.ndarray] = {"observation": np.asarray(observation, np.float32)[None]}
        if "state" in self._inputs:
            inputs["state"] = self._states.get(agent, np.zeros((1, self._inputs["state"][1]), np.float32))
        if INFO_KEY in self._inputs:
            inputs[INFO_KEY] = np.asarray(mask, np.bool_)[None]
        answer = self._client.infer(self._model, inputs, version=self._version, parameters=self._parameters)
        self.name = f"{self._model}@{answer.version}"
        if "state" in self._inputs:
            self._states[agent] = answer["next_state"]
        action = answer["action"][0]
        return action.item() if action.ndim == 0 else action, {name: rows[0] for name, rows in answer.outputs.items()}

    def reset(self) -> None:
        self._states.clear()


def describe_outputs(outputs: Outputs, sizes: list[int]) -> dict[str, np.ndarray]:
    """What a film shows of them. sizes: of the choices of an action's numbers; [] for one choice"""
    shown = {"value": outputs["value"]} if "value" in outputs else {}
    if "logits" in outputs:
        logits = np.asarray(outputs["logits"], np.float64)
        shown["probabilities"] = to_probabilities(logits, np.cumsum([0, *(sizes or [len(logits)])]))
    elif "q_values" in outputs:
        shown |= {"scores": outputs["q_values"], "value": np.max(outputs["q_values"])}
    return shown
