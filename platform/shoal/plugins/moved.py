"""Modules that have moved, which records of earlier releases name as they were: registered models, runs' specs."""

from __future__ import annotations

MOVED = {
    "shoal.data.formats.arrow": "shoal.libs.files.arrow",
    "shoal.data.formats.hdf5": "shoal.libs.files.hdf5",
    "shoal.data.formats.idx": "shoal.libs.files.idx",
    "shoal.data.formats.image_folder": "shoal.libs.files.image_folder",
    "shoal.data.formats.numpy_files": "shoal.libs.files.numpy_files",
    "shoal.data.formats.ray_data": "shoal.libs.files.ray_data",
    "shoal.games": "shoal.libs.games",
    "shoal.models.gaussian_actor": "shoal.libs.off_policy.gaussian_actor",
    "shoal.models.prior_fitted": "shoal.libs.tables",
    "shoal.models.q_network": "shoal.libs.off_policy.q_network",
    "shoal.models.som": "shoal.libs.som.network",
    "shoal.models.recurrent_actor_critic": "shoal.models.actor_critic",
    "shoal.models.syntax_tree": "shoal.libs.trees.syntax_tree",
    "shoal.population": "shoal.libs.population",
    "shoal.segmentation": "shoal.libs.segmentation",
    "shoal.sources.mqtt": "shoal.libs.stream.mqtt_source",
    "shoal.stream": "shoal.libs.stream",
    "shoal.trees": "shoal.libs.trees",
}


def translate_reference(reference: str) -> str:
    """The present name of `module:name`, or of a module."""
    module, colon, name = reference.partition(":")
    old = next((each for each in MOVED if f"{module}.".startswith(f"{each}.")), None)
    return reference if old is None else f"{MOVED[old]}{module.removeprefix(old)}{colon}{name}"
