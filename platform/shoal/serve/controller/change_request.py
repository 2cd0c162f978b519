"""The changes that an administrator may request: the fields of `POST /shoal/v1/rollout`, validated.

    {"action": "deploy",   "model": "lenet@champion", "options": {...}}     serve it, or another version of it, at once
    {"action": "set",      "model": "lenet", "options": {...}}              serve it with other options
    {"action": "canary",   "model": "lenet", "version": 3, "percent": 5}    0 percent: only calls with its track
    {"action": "shadow",   "model": "lenet", "version": 3, "percent": 20}   computed and compared; 0 ends it
    {"action": "promote",  "model": "lenet"}                                the candidate becomes stable
    {"action": "rollback", "model": "lenet", "reason": "..."}               drops the candidate or restores the last
    {"action": "rollback", "model": "lenet", "from_version": 3}             409 when it would leave another version
    {"action": "rollback", "model": "policy", "version": 41}                pins a live model to 41, or to the last
    {"action": "canary",   "model": "policy", "percent": 5}                 a live model's newest gets a share
    {"action": "promote",  "model": "policy"}                               a live model follows its run again
    {"action": "delete",   "model": "lenet"}
    {"action": "metric",   "model": "lenet", "metric": "accuracy", "value": 0.91}       of the candidate, for the guard

Pure: knows nothing of deployed models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import msgspec

from shoal.config import merge
from shoal.errors import ConfigError, InferenceError
from shoal.registry import split_ref
from shoal.serve.messages.desired_state import TrafficShares
from shoal.serve.spec.model_options import GuardOptions, ModelOptions
from shoal.serve.spec.model_source import LATEST

ChangeAction = Literal["deploy", "set", "canary", "shadow", "promote", "rollback", "delete", "metric"]
MAX_REASON_CHARS = 500
MAX_TIMEOUT_S = 3600.0
ASKED = "asked for"  # the reason of a rollback whose author gave none


class ChangeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One requested change. `version` "" (also `latest`, which `deploy` lets the model follow) leaves the choice to the
    action.

    from_version: the version that a rollback is meant to leave, so that it does not go back twice; 0: any
    """

    action: ChangeAction
    model: str
    version: str | int = ""
    from_version: int = 0
    percent: float | None = None
    options: dict[str, Any] = {}
    metric: str = ""
    value: float | None = None
    reason: str = ""
    timeout_s: float = 120.0

    @property
    def version_ref(self) -> str:
        """The version as text: a number, an alias, or ""."""
        return str(self.version)

    @property
    def ends_shadow(self) -> bool:
        return self.action == "shadow" and not self.percent

    def require_share(self) -> None:
        """Check that this opens a candidate. Raises InferenceError (409)."""
        if self.ends_shadow:
            raise InferenceError(409, f"model {self.model!r} has no shadow that could end: see its status")

    def shares_over(self, shares: TrafficShares) -> TrafficShares:
        """The candidate's new shares in place of these."""
        percent = self.percent or 0.0
        return replace(shares, **{"percent" if self.action == "canary" else "shadow_percent": percent})


def parse_change(values: Mapping[str, Any]) -> ChangeRequest:
    """Parse a change. Raises InferenceError (400) naming the field."""
    if isinstance(action := values.get("action"), str) and action not in get_args(ChangeAction):
        raise InferenceError(400, f"action = {action[:40]!r}: expected {', '.join(get_args(ChangeAction))}")
    try:
        change = msgspec.convert(dict(values), ChangeRequest)
    except msgspec.ValidationError as error:
        raise InferenceError(400, f"not a change: {error}") from None
    try:
        name, named = split_ref(change.model)
        version = split_ref(f"{name}@{change.version_ref}")[1] if change.version_ref else ""
    except ConfigError as error:
        raise InferenceError(400, str(error)) from None
    if named and version not in ("", named):
        raise InferenceError(400, f"model says version {named!r}, version says {version!r}: name it once")
    if change.action == "deploy" and LATEST in (change.version_ref, change.model.removeprefix(f"{name}@")):
        version = LATEST
    change = msgspec.structs.replace(change, model=name, version=named or version)
    if change.percent is not None and not 0.0 <= change.percent <= 100.0:
        raise InferenceError(400, f"percent = {change.percent:g}: expected 0 to 100")
    if not 0.0 < change.timeout_s <= MAX_TIMEOUT_S:
        raise InferenceError(400, f"timeout_s = {change.timeout_s:g}: expected 0 to {MAX_TIMEOUT_S:g}")
    if change.action == "metric" and (not change.metric or change.value is None or not math.isfinite(change.value)):
        raise InferenceError(400, "a metric needs a name (metric) and a finite number (value)")
    if change.action in ("canary", "shadow") and change.percent is None:
        raise InferenceError(400, f"{change.action} needs percent, from 0 to 100")
    if change.action == "set" and (not change.options or change.version_ref):
        raise InferenceError(400, "set needs options, and no version: `deploy` changes that")
    if change.from_version and change.action != "rollback":
        raise InferenceError(400, f"from_version belongs to a rollback, not to {change.action}")
    if len(change.reason) > MAX_REASON_CHARS:
        raise InferenceError(400, f"reason has {len(change.reason)} characters, {MAX_REASON_CHARS} are allowed")
    return change


def parse_options(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `values` over `base`, part by part, into validated ModelOptions. Raises InferenceError (400)."""
    try:
        return ModelOptions.parse(merge(base, values)).model_dump(mode="json")
    except ConfigError as error:
        raise InferenceError(400, f"options.{error}") from None


def list_options(values: Mapping[str, Any], path: str = "") -> list[str]:
    """The fields of nested `values` as `a.b=c`."""
    fields: list[str] = []
    for name, value in values.items():
        fields += list_options(value, f"{path}{name}.") if isinstance(value, dict) else [f"{path}{name}={value}"]
    return fields


def append_details(reason: str, details: str) -> str:
    """The details of a change after its author's reason."""
    return f"{reason} ({details})" if reason else details


def append_shares(reason: str, shares: TrafficShares) -> str:
    """A candidate's shares after the reason."""
    words = f"{shares.percent:g} percent of the requests, {shares.shadow_percent:g} percent shadowed"
    return append_details(reason, words)


def require_from_version(change: ChangeRequest, version: int) -> None:
    """Check that a rollback leaves the version it names, not another. Raises InferenceError (409)."""
    if change.from_version not in (0, version):
        what = f"version {version}" if version else "no version"
        problem = f"a rollback of {change.model!r} would leave {what}, not {change.from_version}: see its status"
        raise InferenceError(409, problem)


def require_guard_metric(change: ChangeRequest, options: Mapping[str, Any]) -> GuardOptions:
    """The model's guard, which uses the reported metric. Raises InferenceError (400)."""
    guard = ModelOptions.parse(options).guard
    if change.metric != guard.metric:
        looks_at = f"{guard.metric!r}, not {change.metric!r}" if guard.metric else "no metric: set guard.metric"
        raise InferenceError(400, f"the guard of {change.model!r} uses {looks_at}")
    return guard
