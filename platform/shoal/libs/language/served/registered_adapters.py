"""LoRA adapters of the registry as an engine takes them, found by the names that requests have.

A model's option `text.adapters` says which: without it, whoever may ask for a model could load all that is registered.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.errors import InferenceError, ShoalError
from shoal.extend.registry import ModelVersion, Registry, split_ref
from shoal.extend.train import read_state_dict

ANY, DEFAULT_ALIAS = "*", "champion"
MAX_ADAPTERS = 64  # in memory, of a model; beyond it those leave that were used longest ago
FOLLOW_S = 5.0  # an alias is read again by a request that comes as much later
_LAYER = re.compile(r"\.(lora_[AB])\.default\.")  # peft's names in a network; those of its files lack `default`


@dataclass(frozen=True, eq=False)
class RegisteredAdapter:
    """key:   by which an engine knows it: the name, or NAME@7 for a version that was asked for by its number
    bases: the base's weights by their digest, and by references to them
    state: its tensors, scaled
    """

    key: str
    version: int
    bases: frozenset[str]
    state: Mapping[str, Tensor]

    def fits(self, base: ModelVersion | None) -> bool:
        return base is not None and bool(self.bases & {base.ref, base.manifest.sha256})


class AdapterFinder:
    """The adapters of one served model. Call it on the event loop; the registry is read in a thread.

    allowed: NAME (its champion), NAME@ALIAS or NAME@7 of the registry; `*`: the champion of any name
    """

    def __init__(self, model: str, registry: str, allowed: Sequence[str]) -> None:
        self._model, self._registry = model, registry
        self._allowed = {split_ref(each)[0]: each for each in allowed if each != ANY}
        self._is_open = ANY in allowed
        self._found: dict[str, tuple[float, RegisteredAdapter]] = {}  # by when they were used, the last one last
        self._reading: dict[str, asyncio.Task[RegisteredAdapter]] = {}

    def list_names(self) -> list[str]:
        """Those that are named, or were asked for and found."""
        return list(dict.fromkeys([*self._allowed, *(key for key in self._found if "@" not in key)]))

    def require_allowed(self, name: str) -> None:
        """Raises InferenceError (404)."""
        if name not in self._allowed and not (self._is_open and len(name) <= 200):
            known = ", ".join(self._allowed) or "none"
            problem = f"model {self._model!r} has no adapter {name[:200]!r}; there are: {known}"
            raise InferenceError(404, problem, field="model")

    async def find(self, name: str, version: int | None) -> RegisteredAdapter:
        """Raises InferenceError: 404 for an unknown one, 422 for a version that is no adapter."""
        self.require_allowed(name)
        key = name if version is None else f"{name}@{version}"
        read_s, known = self._found.get(key, (-math.inf, None))
        if known is None or (version is None and time.monotonic() - read_s > FOLLOW_S):
            if key not in self._reading:  # one object for all that wait: another one would replace it in the engine
                self._reading[key] = asyncio.create_task(self._refresh(name, key, known))
            return await asyncio.shield(self._reading[key])
        self._keep(key, read_s, known)
        return known

    async def _refresh(self, name: str, key: str, known: RegisteredAdapter | None) -> RegisteredAdapter:
        try:
            adapter = await asyncio.to_thread(self._read, name, key, known)
            self._keep(key, time.monotonic(), adapter)
            return adapter
        finally:
            del self._reading[key]

    def _keep(self, key: str, read_s: float, adapter: RegisteredAdapter) -> None:
        self._found.pop(key, None)
        self._found[key] = read_s, adapter
        if len(self._found) > MAX_ADAPTERS:
            del self._found[next(iter(self._found))]

    def _read(self, name: str, key: str, known: RegisteredAdapter | None) -> RegisteredAdapter:
        given = self._allowed.get(name, name)
        ref = key if key != name else given if "@" in given else f"{given}@{DEFAULT_ALIAS}"
        registry = Registry(self._registry or None)
        try:
            registered = registry.get(ref)
            if known is not None and known.version == registered.version:
                return known
            base = registry.get(registered.manifest.lineage["base"]) if "base" in registered.manifest.lineage else None
            lora = registered.manifest.model.kwargs.get("args", {}).get("lora")
            if base is None or lora is None:
                raise InferenceError(422, f"{registered.ref} is no adapter: it has no base", field="model")
            is_trained = base.manifest.run_id is not None  # then its source has other weights
            source = base.ref if is_trained else str(base.manifest.lineage.get("source", ""))
            bases = {base.ref, base.manifest.sha256, source} - {""}
            return RegisteredAdapter(
                key, registered.version, frozenset(bases), _scale(read_state_dict(registered.ref), lora)
            )
        except InferenceError:
            raise
        except ShoalError as error:
            if known is not None:  # the registry is away
                return known
            raise InferenceError(404, f"adapter {ref!r}: {error}", field="model") from None


def _scale(state: Mapping[str, Tensor], lora: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors by peft's names, the second of each pair times alpha / rank as `LoraSpec` of shoal.hf has them."""
    scaled = {}
    for name in state:
        layer = name.partition(".lora_")[0]
        rank = _choose(lora.get("rank_pattern") or {}, layer, lora["rank"])
        alpha = _choose(lora.get("alpha_pattern") or {}, layer, lora.get("alpha") or 2 * lora["rank"])
        scale = alpha / (math.sqrt(rank) if lora.get("rslora") else rank)
        scaled[_LAYER.sub(r".\1.", name)] = state[name] * scale if ".lora_B." in name else state[name]
    return scaled


def _choose(patterns: Mapping[str, float], layer: str, default: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)
