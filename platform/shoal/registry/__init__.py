"""Models by name and version: immutable once registered, found by number or by alias."""

from shoal.registry.aliases import Aliases, Move
from shoal.registry.manifest import Manifest, ModelFactory, Signature, TensorSignature
from shoal.registry.registry import ModelVersion, Registry, require_alias, split_ref
from shoal.registry.source import RegistrySource

__all__ = [
    "Aliases",
    "Manifest",
    "ModelFactory",
    "ModelVersion",
    "Move",
    "Registry",
    "RegistrySource",
    "Signature",
    "TensorSignature",
    "require_alias",
    "split_ref",
]
