"""A loaded version as an engine takes it: its network, which shares the version's tensors, and its tokenizer.

Prepared in the thread that loads the version, so that a request finds all there. A version that an engine cannot
compute, or that has no tokenizer, answers tensors alone.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shoal.device_memory import count_memory
from shoal.errors import ConfigError
from shoal.extend.models import Decoder
from shoal.extend.registry import ModelVersion, Registry
from shoal.extend.serve import LoadedModel, ModelOptions, TextOptions
from shoal.libs.language.engine import SlotEngine
from shoal.libs.language.engine.models import TransformersModel, open_model
from shoal.libs.language.engine.request import TokenIds
from shoal.libs.language.engine.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)
CACHE_SHARE = 0.5  # of the memory, for the cache of a model without `text.length`
SPARE = 2  # slots of an engine beside those of its answers: one for a swap of weights, one for padding
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
MAX_LORA_RANK = 64  # of adapters with vLLM, unless `engine_args` say otherwise
_GENERATION = "generation_config.json"
TextGenerator = SlotEngine | VllmEngine


@dataclass(frozen=True, eq=False)
class PreparedVersion:
    """module: has the tensors of the loaded version; an engine takes it over
    context:  tokens of a prompt and its answer together
    created_s: seconds since 1970
    source:    the version in the registry; None for live weights
    """

    module: nn.Module
    tokenizer: Any
    stop_tokens: TokenIds
    context: int
    created_s: float
    source: ModelVersion | None


class VersionPreparation:
    """Prepares versions in any thread, and finds them as long as they are loaded."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[LoadedModel, PreparedVersion] = WeakKeyDictionary()
        self._tokenizers: dict[object, tuple[Any, TokenIds]] = {}  # by the digests of their files
        self._contexts: dict[tuple[str, type], tuple[int | None, int]] = {}  # that verified models know, and that fit
        self._lock = threading.Lock()

    def find(self, loaded: LoadedModel) -> PreparedVersion | None:
        """The version, if it writes text."""
        return self._found.get(loaded)

    def prepare(self, name: str, registry: str, options: ModelOptions, loaded: LoadedModel) -> None:
        """See `ModelManager.prepare_with`. Whatever is wrong with the texts of a version, it answers tensors."""
        try:
            if loaded.module is not None and (module := share_module(loaded.module)) is not None:
                self._found[loaded] = self._open(name, registry, options, loaded.version, module)
        except Exception as error:  # noqa: BLE001 - of files and networks that are the user's
            logger.warning("%s@%d answers tensors, and no text: %s", name, loaded.version, error)

    def open(self, name: str, registry: str, options: ModelOptions, loaded: LoadedModel) -> PreparedVersion:
        """The version as an engine takes it. Raises ConfigError for one that writes no text."""
        module = share_module(loaded.module) if loaded.module is not None else None
        if module is None:
            problem, remedy = "writes no text: it is no language model", "`shoal predict` and `shoal play` use others"
            raise ConfigError("model", f"{name}@{loaded.version}", problem, remedy)
        return self._open(name, registry, options, loaded.version, module)

    def _open(
        self, name: str, registry: str, options: ModelOptions, version: int, module: nn.Module
    ) -> PreparedVersion:
        read = self._read_tokenizer(name, registry, options, version)
        if read is None:
            problem, remedy = "has no tokenizer, and so no text", "text.tokenizer names one that has it"
            raise ConfigError("model", f"{name}@{version}", problem, remedy)
        key = (name, type(module))
        if (
            options.text.engine == "vllm"
        ):  # which says itself what it cannot compute, and takes the memory that it needs
            known = getattr(getattr(module, "config", None), "max_position_embeddings", None)
            self._contexts[key] = known, 1 << 62
        elif key not in self._contexts:
            model = open_model(module)
            fitting = int(CACHE_SHARE * count_memory(model.device) / model.token_bytes)
            self._contexts[key] = model.context, fitting
        (tokenizer, stops, source), (known, fitting) = read, self._contexts[key]
        created_s = time.time() if source is None else source.manifest.created_at
        eos = getattr(getattr(module, "config", None), "eos_token_id", None)
        context = min(options.text.length or known or 2048, known or 1 << 30)
        if options.text.length is None and (most := max(2, fitting // (options.text.slots + SPARE))) < context:
            message = "%s@%d: texts of %d tokens, not of %d: half of the memory has no more in %d slots (text.length)"
            logger.warning(message, name, version, most, context, options.text.slots)
            context = most
        return PreparedVersion(module, tokenizer, (*stops, *_list_tokens(eos)), context, created_s, source)

    def _read_tokenizer(
        self, name: str, registry: str, options: ModelOptions, version: int
    ) -> tuple[Any, TokenIds, ModelVersion | None] | None:
        """The tokenizer, the tokens that end an answer, and the registered version; None without a tokenizer."""
        given = options.text.tokenizer
        files: Mapping[str, Path] = {}
        key: object = given
        own = Registry(registry).get(f"{name}@{version}") if registry else None
        if given and "@" not in given:
            files = {each.name: each for each in Path(given).iterdir() if each.is_file()}
        elif source := Registry(registry or None).get(given) if given else own:
            key = tuple(sorted(source.manifest.files.items()))
            if key not in self._tokenizers:
                files = {each: source.fetch_file(each) for each in source.manifest.files}
        with self._lock:
            if key not in self._tokenizers:
                if not has_tokenizer(files):
                    return None
                self._tokenizers[key] = _load_tokenizer(files)
        return *self._tokenizers[key], own


def open_engine(
    prepared: PreparedVersion, version: int, options: TextOptions, changed: Callable[[], None] = lambda: None
) -> TextGenerator:
    """The engine of a version, as its options say. Raises ConfigError, and InferenceError 503 where vLLM ends.

    changed: called, in any thread, when an engine with a process of its own has something to do in a step
    """
    known = prepared.module, version, prepared.tokenizer, prepared.stop_tokens, options.slots, prepared.context
    if uses_vllm(options):
        loras = {"enable_lora": True, "max_lora_rank": MAX_LORA_RANK} if options.adapters else {}
        return VllmEngine(*known, options.engine_python, changed, {**loras, **options.engine_args})
    return SlotEngine(*known, deterministic=options.deterministic)


def uses_vllm(options: TextOptions) -> bool:
    """`auto`: where a GPU is, and vLLM is installed or named."""
    if options.engine != "auto":
        return options.engine == "vllm"
    has_vllm = bool(options.engine_python) or importlib.util.find_spec("vllm") is not None
    return has_vllm and torch.cuda.is_available()


def has_tokenizer(files: Container[str]) -> bool:
    """Whether the files of these names hold one."""
    return any(each in files for each in _TOKENIZER_FILES)


def find_problem(network: nn.Module, files: Container[str]) -> str:
    """Why an engine writes no text with a causal network of transformers, whose weights may be absent, and the files of
    its version; "" where it does, or has no tokenizer to do so."""
    if not has_tokenizer(files):
        return ""
    if (module := share_module(network)) is None:
        return f"{type(network).__name__} writes no text: it is no language model"
    try:
        TransformersModel(module)
    except ConfigError as error:
        return f"{type(network).__name__} writes no text: it {error.problem}"
    return ""


def share_module(module: nn.Module) -> nn.Module | None:
    """A copy of a causal language model that has the same tensors; None for any other network.

    The copy is an engine's, which changes its attention: the original computes as it did. A class that a Task has
    derived, to take tensors by position, gives way to that of transformers. A `Decoder`, in which an engine changes
    nothing, is shared as it is.
    """
    if type(module) is Decoder:
        return module
    kind: type | None = Decoder if isinstance(module, Decoder) else None
    if hasattr(module, "config") and hasattr(module, "set_attn_implementation"):
        own = [(each, vars(each)["forward"]) for each in type(module).__mro__ if "forward" in vars(each)]
        kind = next((each for each, call in own if "logits_to_keep" in inspect.signature(call).parameters), None)
    if kind is None:
        return None
    copied = copy.deepcopy(module, {id(each): each for each in (*module.parameters(), *module.buffers())})
    copied.__class__ = kind
    return copied


def embed(module: nn.Module, prompt: TokenIds) -> torch.Tensor:
    """The mean of the last hidden states over a prompt, of length 1: float32 [D]."""
    ids = torch.tensor([prompt], device=next(module.parameters()).device)
    with torch.inference_mode():
        if isinstance(module, Decoder):
            *layers, head = [*module]
            hidden = head.norm(nn.Sequential(*layers)(ids))  # type: ignore[operator]
        else:
            hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
        vector: torch.Tensor = nn.functional.normalize(hidden[0].float().mean(0), dim=0).cpu()
    return vector


def _load_tokenizer(files: Mapping[str, Path]) -> tuple[Any, TokenIds]:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:  # a store may have each file elsewhere, by its digest
        for name, path in files.items():
            if path.suffix in (".json", ".model", ".txt", ".jinja"):
                shutil.copyfile(path, Path(folder, name))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        has_defaults = _GENERATION in files
        defaults = json.loads(files[_GENERATION].read_text()) if has_defaults else {}
    return tokenizer, (*_list_tokens(defaults.get("eos_token_id")), *_list_tokens(tokenizer.eos_token_id))


def _list_tokens(given: int | list[int] | None) -> TokenIds:
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)
