"""The alias of a registered model and its rollout: a promotion moves it, a rollback moves it back, both or neither.

Called by the controller in the moment of a flip. Moves the alias and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import ConfigError, RegistryError
from shoal.serve.controller_state import Deployment
from shoal.serve.rollout import Rollout
from shoal.serve.sources import Catalogue


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
        else:
            catalogue.rollback(name, alias)
    except (ConfigError, RegistryError) as error:
        return f"{name}@{alias} cannot be moved: {error}"
    return ""
