"""Models by name and version: immutable once registered, found by number or by alias."""

from shoal.registry.aliases import Aliases, Move
from shoal.registry.manifest import Manifest, ModelFactory, Signature, TensorSignature
from shoal.registry.registry import AliasWords, ModelVersion, Registry, require_name, split_ref

__all__ = [
    "AliasWords",
    "Aliases",
    "Manifest",
    "ModelFactory",
    "ModelVersion",
    "Move",
    "Registry",
    "Signature",
    "TensorSignature",
    "require_name",
    "split_ref",
]
