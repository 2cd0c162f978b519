"""The registry, for libraries: models, versions and their code."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.loaded.model import LocalModel, find_version
    from shoal.registry import AliasNames, Criterion, ModelVersion, Registry, Signature, TensorSignature, split_ref
    from shoal.registry.aliases import require_alias
    from shoal.registry.code_import import activate_code, load_source
    from shoal.registry.manifest import ModelFactory, find_callable
    from shoal.registry.model_format import PAYLOAD_FILES, find_format

__getattr__ = load_on_demand(__name__)
