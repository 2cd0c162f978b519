"""Models by name and version: immutable once registered, found by number or by alias."""

from shoal.errors import needs_extra

with needs_extra("cluster"):
    from shoal.registry.aliases import Aliases, AliasMove, AliasNames, require_name, split_ref
    from shoal.registry.champion import Criterion
    from shoal.registry.manifest import Manifest, ModelFactory, Signature, TensorSignature
    from shoal.registry.registry import Registry
    from shoal.registry.version import ModelVersion

__all__ = [
    "AliasMove",
    "AliasNames",
    "Aliases",
    "Criterion",
    "Manifest",
    "ModelFactory",
    "ModelVersion",
    "Registry",
    "Signature",
    "TensorSignature",
    "require_name",
    "split_ref",
]
