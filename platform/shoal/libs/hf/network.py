"""Networks of transformers that take and give plain tensors, with their first weights, and adapters of LoRA on them.

The network is the module of transformers itself: tensors have the names that they have there. Called by the Tasks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.extend.parallel import freeze_parameters, pause_recording
from shoal.extend.train import SINGLE, open_folder
from shoal.libs.hf.source import hash_files, make_cached_folder, make_config
from shoal.weights.tensor_files import LazyTensors, TensorFiles

_ADAPTER = "lora_"
# Decoders that keep packed samples apart by their position_ids: tests/libs/hf/test_causal_lm.py. Others take
# position_ids too, and let a sample see the one before.
PACKABLE = (
    "cohere",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "llama",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)


PEFT_FIELDS = {  # of LoraSpec, by peft's names
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "modules",
    "use_rslora": "rslora",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
}


class LoraSpec(Spec):
    """Adapters of low rank (arXiv:2106.09685) on linear layers.

    alpha:         their outputs are scaled by alpha / rank
    modules:       the last parts of the layers' names, or "all-linear"; None: those that peft chooses for the type of
                   model
    rslora:        scale by alpha / sqrt(rank) (arXiv:2312.03732)
    rank_pattern:  other ranks, by the end of a layer's name or a regular expression of it
    alpha_pattern: other alphas, likewise
    """

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=8.0, gt=0)  # peft's default
    dropout: float = Field(default=0.0, ge=0, lt=1)
    modules: list[str] | str | None = None
    rslora: bool = False
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)


def build_network(auto: str, config: Mapping[str, Any], dtype: str, inputs: Sequence[str]) -> nn.Module:
    """The network of a configuration, with fresh weights. Its `forward` takes `inputs` by position, and gives logits.

    auto:  the class of transformers that chooses the network's, such as AutoModelForCausalLM
    dtype: of the weights, as torch names it; "auto": that of the configuration

    Raises ConfigError.
    """
    import transformers

    settings = make_config(config)
    kind = settings.dtype or torch.float32 if dtype == "auto" else dtype
    kind = getattr(torch, kind, None) if isinstance(kind, str) else kind
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError("dtype", dtype, "is no floating-point datatype", "give float32, bfloat16, float16 or auto")
    try:
        network: nn.Module = getattr(transformers, auto).from_config(settings, dtype=kind)
    except ValueError as error:
        raise ConfigError("model", settings.model_type, f"does not fit {auto}: {str(error).splitlines()[0]}") from error
    network.config.use_cache = False  # type: ignore[union-attr]
    _take_tensors(network, inputs)
    return network


def _take_tensors(network: nn.Module, names: Sequence[str]) -> None:
    """Let the network's `forward` take these inputs by position, and return its logits."""
    own = type(network)
    accepted = inspect.signature(own.forward).parameters
    if "position_ids" in names and str(network.config.model_type) not in PACKABLE:  # type: ignore[union-attr]
        problem = f"is not known to keep the samples of a row apart in {own.__name__}"
        raise ConfigError("packing", True, problem, f"leave it out; it is for {', '.join(PACKABLE)}")

    def forward(self: nn.Module, *tensors: Tensor) -> Tensor:
        given = {name: tensor for name, tensor in zip(names, tensors, strict=False) if name in accepted}
        logits: Tensor = own.forward(self, **given).logits
        return logits

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    network.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})


class RenamedTensors(LazyTensors):
    """Tensors of files by other names. files: the name of each there"""

    def __init__(self, tensors: TensorFiles, names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self.files = names

    def get_shape(self, name: str) -> torch.Size:
        """The shape of a tensor, which is not read."""
        return self._tensors.get_shape(self.files[name])

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self.files[name]]


def find_weights(network: nn.Module, auto: str, config: Mapping[str, Any], folder: Path) -> Mapping[str, Tensor]:
    """The folder's tensors by the network's names; without those of a head that the folder does not have.

    network: that of `build_network`, also on the meta device

    A folder whose tensors have other names is converted by transformers once, into `$SHOAL_HOME/hf`. Raises
    ConfigError, WeightsError.
    """
    is_pickled = not any(folder.glob("*.safetensors")) and any(folder.glob("pytorch_model*.bin"))
    if not is_pickled:
        tensors = open_folder(folder)
        names, missing = _match_names(network, tensors)
    if is_pickled or missing:
        with pause_recording():  # transformers fills a model, from which the network is not made
            tensors = open_folder(_convert(auto, config, folder, network))
        names, missing = _match_names(network, tensors)
    if missing:
        problem = f"lacks tensors of {type(network).__name__}: {', '.join(missing[:3])}"
        raise ConfigError("model", str(folder), problem, "give the folder of a complete model of this kind")
    return RenamedTensors(tensors, names)


def _match_names(network: nn.Module, tensors: TensorFiles) -> tuple[dict[str, str], list[str]]:
    """The folder's name of each of the network's tensors, and those that it lacks.

    A head for labels, and what pools for it, may be missing or of another size: it stays fresh.
    """
    prefix, own = f"{network.base_model_prefix}.", network.state_dict(keep_vars=True)
    has_labels = not type(network).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    names: dict[str, str] = {}
    optional = {name for name in own if has_labels and (not name.startswith(prefix) or ".pooler." in name)}
    for name, tensor in own.items():
        short = name.removeprefix(prefix)
        source = name if name in tensors else short if short in tensors else None
        if source is not None and (name not in optional or tensors.get_shape(source) == tuple(tensor.shape)):
            names[name] = source
    filled = {id(own[name]) for name in names}
    return names, [name for name, each in own.items() if id(each) not in filled and name not in optional]


def _convert(auto: str, config: Mapping[str, Any], folder: Path, network: nn.Module) -> Path:
    """The weights as transformers loads them, in a folder of the network's own names."""
    import transformers
    from safetensors.torch import save_file

    files = [each for each in folder.iterdir() if each.suffix in (".safetensors", ".bin", ".json")]

    def write(draft: Path) -> None:
        try:
            loaded, about = getattr(transformers, auto).from_pretrained(
                str(folder),
                config=make_config(config),
                dtype="auto",
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError("model", str(folder), f"cannot be loaded by transformers: {error}") from error
        fresh = {*about["missing_keys"], *(each[0] for each in about.get("mismatched_keys", ()))}
        saved: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in loaded.state_dict(keep_vars=True).items():
            if name not in fresh:
                saved.setdefault(id(tensor), (name, tensor.detach().contiguous()))
        save_file(dict(saved.values()), draft / SINGLE)

    return make_cached_folder(f"{hash_files(files)[:32]}-{type(network).__name__}", write)


def make_lora_config(lora: LoraSpec, network: nn.Module, **more: Any) -> Any:
    """The configuration of peft, with `more` of its fields."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    values = {theirs: getattr(lora, own) for theirs, own in PEFT_FIELDS.items()}
    is_transposed = any(isinstance(each, Conv1D) for each in network.modules())  # as are its weights
    return LoraConfig(**{**values, "fan_in_fan_out": is_transposed, **more})


def add_adapters(network: nn.Module, lora: LoraSpec) -> None:
    """Put adapters into the network; all else, but a head for labels and its pooler, is frozen and in no state dict.

    Checkpoints and versions hold adapters and head alone. Raises ConfigError for modules that the network does not
    have, or that share their weight with others.
    """
    from peft import inject_adapter_in_model

    before = {name for name, _ in network.named_parameters()}
    prefix = f"{network.base_model_prefix}."
    logits = network.get_output_embeddings()  # type: ignore[operator]
    output = set() if logits is None else {id(each) for each in logits.parameters()}
    settings = make_lora_config(lora, network)
    heads = {
        name
        for name, each in network.named_parameters()
        if (not name.startswith(prefix) or ".pooler." in name)
        and id(each) not in output
        and not name.startswith("lm_head")
    }
    settings.exclude_modules = sorted({name.rpartition(".")[0] for name in heads}) or None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings")  # which is refused below
            inject_adapter_in_model(settings, network)
    except ValueError as error:
        layers = {name.split(".")[-2] for name in before if name.endswith(".weight") and name.count(".") > 1}
        remedy = f"give lora.modules: the layers are {', '.join(sorted(layers)[:12])}"
        raise ConfigError("lora.modules", lora.modules, f"do not fit: {error}", remedy) from error
    _require_untied(network, lora)
    named = dict(network.named_parameters(remove_duplicate=False))
    trained = {name for name in named if _ADAPTER in name or name in heads}
    for name in trained:
        named[name].requires_grad_(True)
    freeze_parameters(network, named.keys() - trained)


def _require_untied(network: nn.Module, lora: LoraSpec) -> None:
    """Raises ConfigError for an adapter on a weight that another layer has too: that one would change by merging."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name.replace(".base_layer.", "."))
    for path, layer in network.named_modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if weight is not None and len(names[weight]) > 1:
            problem = (
                f"put an adapter on {path}, whose weight is tied ({' = '.join(names[weight])}): it cannot be merged"
            )
            raise ConfigError("lora.modules", lora.modules, problem, f"leave {path.rpartition('.')[2]} out")


class MergedWeights(LazyTensors):
    """The weights of the network without adapters that computes as with them: W + scale * B @ A, each when asked for.

    network:  with adapters, on the meta device
    plain:    without them, on the meta device
    base:     the weights of `plain`
    adapters: the weights of `network`
    """

    def __init__(
        self, network: nn.Module, plain: nn.Module, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]
    ) -> None:
        network.load_state_dict(dict(adapters), assign=True)
        self._network, self._base = network, base
        self._trained: dict[str, Tensor] = network.state_dict()
        self.files = plain.state_dict(keep_vars=True)
        self._sources = {id(self.files[name]): name for name in base}  # a tied weight may be there by one of its names

    def __getitem__(self, name: str) -> Tensor:
        if name in self._trained:
            return self._trained[name]
        own = self.files[name]
        weight = self._base[self._sources[id(own)]].to(own.dtype)
        path, _, last = name.rpartition(".")
        measure = getattr(self._network.get_submodule(path), "get_delta_weight", None)
        if last != "weight" or not callable(measure):
            return weight
        merged: Tensor = (weight.float() + measure("default").detach().float()).to(weight.dtype)
        return merged


def is_fake() -> bool:
    """Whether tensors made now have no values, as where only shapes are asked for."""
    tensor = torch.empty(0)
    return isinstance(tensor, FakeTensor) or tensor.is_meta
