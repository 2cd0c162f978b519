"""The alias of a registered model and its rollout: an alias that has moved is followed; a promotion moves it, a
rollback moves it back, both or neither.

Called by the controller, at each tick and in the moment of a flip.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, InferenceError, RegistryError
from shoal.serve.controller.rollout import Goal, Phase, Rollout
from shoal.serve.controller.state import Deployment
from shoal.serve.spec.model_source import Catalogue

if TYPE_CHECKING:
    from shoal.serve.controller.controller import EndpointController

logger = logging.getLogger(__name__)


def move_alias(deployment: Deployment, rollout: Rollout, catalogue_in: Callable[[str], Catalogue]) -> str:
    """Why the alias cannot be moved; "" when it was, or when it means the candidate already."""
    name, alias = deployment.name, deployment.alias
    if not alias or rollout.kind not in ("promote", "rollback"):
        return ""
    try:
        catalogue = catalogue_in(deployment.registry)
        if catalogue.meant(name, alias) == rollout.candidate:
            return ""
        if rollout.kind == "promote":
            catalogue.promote(name, rollout.candidate, alias)
        elif catalogue.before(name, alias) != rollout.candidate:
            return f"{name}@{alias} has been moved meanwhile"
        else:
            catalogue.rollback(name, alias)
    except (ConfigError, RegistryError) as error:
        return f"{name}@{alias} cannot be moved: {error}"
    return ""


def follow_alias(controller: EndpointController, name: str) -> None:
    """Begin what the alias asks for, and leave what it asks for no longer. A version that was refused is not tried
    again until the alias has moved."""
    model = controller.state.models[name]
    deployment, rollout = model.deployment, model.rollout
    is_pinned = not deployment.alias and deployment.version != ""
    is_following = rollout.phase is Phase.STAGING and rollout.kind == "follow"
    if deployment.is_live or not (rollout.is_open or rollout.phase is Phase.CANARY or is_following):
        return
    if (is_pinned or not deployment.version) and rollout.phase is not Phase.VACANT:
        return
    try:
        meant = controller.catalogue(deployment.registry).meant(name, deployment.version)
    except RegistryError as error:
        if controller.trouble.get(name) != str(error):
            logger.error("%s: what is served goes on being served: %s", name, error)
        controller.trouble[name] = str(error)
        return
    controller.trouble.pop(name, None)
    if meant != model.meant:
        rollout = replace(rollout, refused=0) if model.meant else rollout
        model.meant, model.refused = meant, 0
        controller.adjust(name, rollout)
    ref = f"{name}@{deployment.version}" if deployment.version else name
    if is_following:
        if meant != rollout.candidate:
            controller.abandon(name, "registry", f"{ref} is version {meant} now")
        return
    if meant in (rollout.stable, rollout.refused, model.refused):
        return
    if rollout.phase is Phase.CANARY:
        if meant == rollout.candidate and controller.has_candidate(name):
            controller.adjust(name, replace(rollout, kind="promote", by="registry", why=f"{ref} moved"))
            with suppress(InferenceError):  # the registry has gone since it was asked: the next tick asks again
                controller.flip(name)
        return
    kind = "follow" if rollout.stable else "deploy"
    why = f"{ref} moved" if rollout.stable else ref
    controller.begin(name, meant, Goal.FLIP, kind=kind, by="registry", why=why)
