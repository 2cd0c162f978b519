"""Keeps a registered model's alias and its rollout in step: the rollout follows an alias that moved; a promotion moves
the alias and a rollback moves it back, both or neither.

Called by the controller, at each tick and at each flip. `next_for_alias` decides; the controller acts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import ConfigError, RegistryError
from shoal.serve.controller.rollout import AbandonRollout, Phase, Rollout
from shoal.serve.controller.state import Deployment, ModelState
from shoal.serve.spec.model_source import LATEST, RegistryCatalogue


def move_alias(deployment: Deployment, rollout: Rollout, catalogue_in: Callable[[str], RegistryCatalogue]) -> str:
    """Move the alias to the candidate; returns the reason when it cannot be moved, else ""."""
    name, alias = deployment.name, deployment.alias
    if alias in ("", LATEST) or rollout.kind not in ("promote", "rollback"):
        return ""
    try:
        catalogue = catalogue_in(deployment.registry)
        if catalogue.resolve(name, alias) == rollout.candidate:
            return ""
        if rollout.kind == "promote":
            catalogue.promote(name, rollout.candidate, alias)
        elif catalogue.find_previous(name, alias, rollout.withdrawn) != rollout.candidate:
            return f"{name}@{alias} has been moved meanwhile"
        else:
            catalogue.rollback(name, alias, rollout.withdrawn)
    except (ConfigError, RegistryError) as error:
        return f"{name}@{alias} cannot be moved: {error}"
    return ""


@dataclass(frozen=True)
class BeginRollout:
    """Stage the alias's present version and let it answer."""

    kind: str
    why: str


@dataclass(frozen=True)
class PromoteCandidate:
    """The alias names the canary's candidate: the controller promotes it."""

    why: str


def is_following_alias(model: ModelState) -> bool:
    """Whether the model follows its alias now: not while an administrator's change is under way."""
    rollout = model.rollout
    is_following = rollout.phase is Phase.STAGING and rollout.kind == "follow"
    if not (rollout.is_open or rollout.phase is Phase.CANARY or is_following):
        return False
    return rollout.phase is Phase.VACANT or model.deployment.alias != ""


def next_for_alias(model: ModelState) -> BeginRollout | AbandonRollout | PromoteCandidate | None:
    """The action for the version that the alias names (`model.meant`). A rejected version is not tried again until the
    alias has moved."""
    deployment = model.deployment
    rollout = model.rollout
    meant = model.meant
    ref = f"{deployment.name}@{deployment.version}" if deployment.version else deployment.name
    if rollout.phase is Phase.STAGING or (rollout.phase is Phase.CANARY and rollout.kind == "follow"):
        return AbandonRollout(f"{ref} is version {meant} now") if meant != rollout.candidate else None
    if meant in (rollout.stable, rollout.refused, *model.rejected):
        return None
    if rollout.phase is Phase.CANARY:
        return PromoteCandidate(f"{ref} moved") if meant == rollout.candidate else None
    return BeginRollout("follow", f"{ref} moved") if rollout.stable else BeginRollout("deploy", ref)
