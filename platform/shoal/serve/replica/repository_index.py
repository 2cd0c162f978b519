"""The repository index of a replica: which versions can answer here, or through another replica, and why not.

Called by the model manager. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.messages.inference import RepositoryEntry
from shoal.serve.messages.replica_report import RejectedVersion


def build_repository_index(
    plans: Iterable[ModelPlan],
    loaded: Mapping[str, list[int]],
    rejected: Mapping[str, RejectedVersion],
    retiring: Iterable[str],
    show_errors: bool,
) -> list[RepositoryEntry]:
    """List every planned version. A model on demand is READY: it is loaded when it is asked for.

    loaded:   versions by model
    retiring: models that only answer their pending requests
    """
    entries = []
    for plan in plans:
        name, versions = plan.name, loaded.get(plan.name, [])
        entries += [RepositoryEntry(name, str(version), "READY") for version in versions]
        error = rejected.get(name)
        for version in plan.staged:
            if version in versions:
                continue
            if error is not None and error.version == version:
                reason = error.reason if show_errors else "it cannot be loaded: see the status"
                entries.append(RepositoryEntry(name, str(version), "UNAVAILABLE", reason))
            else:
                entries.append(RepositoryEntry(name, str(version), "LOADING" if plan.signature is None else "READY"))
        if not versions and not plan.staged:
            reason = plan.reason if show_errors else ""
            entries.append(RepositoryEntry(name, "", "UNAVAILABLE", reason or "no weights yet"))
    return entries + [RepositoryEntry(name, "", "UNLOADING") for name in retiring]
