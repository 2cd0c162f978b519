"""Tasks of Hugging Face's models: language models, and classifiers of texts, words and pictures.

    shoal run train task=shoal.libs.hf.tasks:CausalLM args.model=./SmolLM2 args.data=texts.jsonl stop.epochs=1

Called by name in workers and at endpoints. Loads transformers when a model or data is asked for. Legend: B samples, T
tokens, V words of the vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from shoal.errors import ConfigError
from shoal.extend.data import Data, ImageFolder
from shoal.extend.parallel import Loss, Mean
from shoal.extend.registry import Signature, TensorSignature
from shoal.extend.train import Registration, load_initial_weights, read_state_dict
from shoal.libs.hf import texts
from shoal.libs.hf.network import (
    PACKABLE,
    LoraSpec,
    MergedWeights,
    add_adapters,
    build_network,
    find_weights,
    is_fake,
)
from shoal.libs.hf.pictures import make_picture_transform
from shoal.libs.hf.source import load_tokenizer, make_absolute, make_config, read_companions, read_config
from shoal.libs.hf.texts import IGNORED, Record, TextSpec, TokenRows, TokenSample
from shoal.libs.hf.transfer import Transferable, find_model_folder, register_base
from shoal.plugins.find import load_sound_extensions

_POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # modules of learnt positions
LORA_RATE = 2e-4
FULL_RATE = 2e-5
BATCH_SIZE = 8
SMALL_FILE_BYTES = 1_000_000  # a larger one is not read to count its samples
_DATATYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16", "float64": "FP64"}


class HuggingFaceTask(Transferable):
    """What all kinds have in common.

    model:      a folder, a GGUF file, `org/name` in the hub's cache, or NAME@VERSION of the registry
    data:       a file of samples (see `shoal.libs.hf.texts`), or a folder of pictures
    validation: another such file, or a share of the samples, such as 0.1; 0: none
    dtype:      of the weights: float32, bfloat16, float16; auto: that of the folder's configuration
    labels:     the names of the classes, or their number; None: those of the model
    lora:       fields of LoraSpec, such as {"rank": 8}: adapters are trained, and nothing else but a head for labels
    merge:      register the model with its adapters merged into it; otherwise the adapters, as a version that refers to
                the registered base
    config:     the contents of a config.json, in place of the folder's: with it no folder is needed
    base:       NAME@VERSION of the registry whose weights adapters belong to: set when adapters are registered
    """

    input_names: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")

    def __init__(
        self,
        *,
        model: str = "",
        data: str = "",
        validation: str | float = 0.0,
        dtype: str = "float32",
        labels: Sequence[str] | int | None = None,
        lora: Mapping[str, Any] | None = None,
        merge: bool = False,
        config: Mapping[str, Any] | None = None,
        base: str = "",
    ) -> None:
        model, data = make_absolute(model), make_absolute(data)
        validation = make_absolute(validation) if isinstance(validation, str) else validation
        self.lora = None if lora is None else LoraSpec.parse(lora)
        self.args: dict[str, Any] = self._given(
            {
                "model": model,
                "data": data,
                "validation": validation,
                "dtype": dtype,
                "labels": labels,
                "lora": self.lora and self.lora.model_dump(),
                "merge": merge,
                "config": config,
                "base": base,
            }
        )
        self._model = model
        self._data = data
        self._validation = validation
        self._dtype = dtype
        self._labels = labels
        self._merge = merge
        self._config = config
        self._base = base
        check_labels(labels)
        if merge and lora is None:
            raise ConfigError("merge", merge, "merges adapters, and there are none", "give lora.rank=8, say")

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        data = Path(self._data)
        is_small = data.is_file() and data.stat().st_size < SMALL_FILE_BYTES
        return {
            "batch_size": min(BATCH_SIZE, len(self.data().train)) if is_small else BATCH_SIZE,
            "optimizer": {"name": "adamw", "learning_rate": FULL_RATE if self.lora is None else LORA_RATE},
            "schedule": {"name": "cosine", "warmup": 0.03},
            "clip_norm": 1.0,
            "stop": {"epochs": 1},
        }

    @staticmethod
    def _given(args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that are not as by default."""
        return {name: each for name, each in args.items() if each not in (None, "", False)}

    # -- the model ------------------------------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The model's. Raises ConfigError, and RegistryError for an unknown version."""
        return find_model_folder(self._model)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of config.json, with the labels of this Task. Raises ConfigError."""
        values = dict(self._config) if self._config is not None else read_config(self.folder)
        if self._labels is not None:
            is_number = isinstance(self._labels, int)
            names = [f"LABEL_{each}" for each in range(self._labels)] if is_number else list(self._labels)  # type: ignore
            values |= {
                "id2label": {str(index): name for index, name in enumerate(names)},
                "label2id": {name: index for index, name in enumerate(names)},
            }
            values.pop("num_labels", None)
        return values

    @property
    def label_numbers(self) -> dict[str, int]:
        """The number of each class, by name."""
        names = self.config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
        return {str(names[each]): int(each) for each in sorted(names, key=int)}

    def model(self) -> nn.Module:
        network = self._build()
        if self.lora is not None:
            if not is_fake():
                load_initial_weights(network, self._base or self._find_weights(network))
            add_adapters(network, self.lora)
        return network

    def _build(self) -> nn.Module:
        return build_network(self.auto, self.config, self._dtype, self.input_names)

    def initial_weights(self) -> str | Mapping[str, Tensor]:
        """Those of the folder; of a model with adapters none: `model` loads the base, which is frozen."""
        if self.lora is not None or self._config is not None:
            return ""
        with torch.device("meta"):
            network = build_network(self.auto, self.config, "float32", ())
        return self._find_weights(network)

    def _find_weights(self, network: nn.Module) -> Mapping[str, Tensor]:
        return find_weights(network, self.auto, self.config, self.folder)

    def registration(self) -> Registration:
        """The configuration in place of the folder. Of adapters: the base is registered, if it is not yet."""
        args: dict[str, Any] = {"config": self.config, "dtype": self._dtype}
        files, lineage = read_companions(self.folder), {"source": self._model}
        if self.lora is None:
            return Registration(args, files, lineage)
        if self._merge:
            return Registration(args, files, {**lineage, "lora": self.lora.model_dump()}, self.merge_weights)
        base = register_base(self, self._model)
        adapted = {**args, "base": base.ref, "lora": self.lora.model_dump()}
        return Registration(adapted, files, {"base": base.ref, "base_sha256": base.manifest.sha256})

    def merge_weights(self, adapters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with torch.device("meta"):
            network, plain = self.model(), self._build()
        base = read_state_dict(self._base) if self._base else self._find_weights(plain)
        return MergedWeights(network, plain, base, adapters)

    def signature(self) -> Signature | None:
        names = ("input_ids", "attention_mask")
        logits = TensorSignature(name="logits", datatype=_DATATYPES[self._datatype_name], shape=self._output_shape)
        return Signature(
            inputs=[TensorSignature(name=each, datatype="INT64", shape=[-1, -1]) for each in names], outputs=[logits]
        )

    @property
    def _datatype_name(self) -> str:
        configured = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        return configured if self._dtype == "auto" else self._dtype

    @property
    def _output_shape(self) -> list[int]:
        return [-1, len(self.label_numbers)]

    # -- the loss -------------------------------------------------------------------------------------------------

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return tuple(batch[name] for name in self.input_names)

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        """Over everything that has a label."""
        labels = batch["labels"].flatten()
        logits = outputs.reshape(-1, outputs.shape[-1])
        total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return Mean(total, (labels != IGNORED).sum())

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Loss]:
        labels = batch["labels"]
        is_right = (outputs.argmax(-1) == labels).float().sum()
        return {"accuracy": Mean(is_right, (labels != IGNORED).sum())}


def check_labels(labels: object) -> None:
    """Raises ConfigError for what is neither at least two names nor their number."""
    if labels is None or (isinstance(labels, int) and not isinstance(labels, bool) and labels >= 2):
        return
    if not isinstance(labels, list | tuple):
        raise ConfigError("labels", labels, "is no list of names, and no number from 2 on", "give labels=['no','yes']")
    if wrong := [each for each in labels if not isinstance(each, str)]:
        problem = f"has {wrong[0]!r}, which is no string: YAML reads no, yes and 1 as other values"
        raise ConfigError("labels", labels, problem, "quote them: ['no','yes']")
    if len(set(labels)) < max(2, len(labels)):
        raise ConfigError("labels", labels, "are not at least two distinct names", "give each class a name of its own")


class _TextTask(HuggingFaceTask):
    """A Task on texts.

    max_length: tokens of a sample, at most
    truncate:   cut longer samples instead of rejecting them
    packing:    put several samples into each row of `max_length` tokens; none sees another
    """

    encoder: ClassVar[Callable[[Sequence[Record], TextSpec, Mapping[str, int]], list[TokenSample]]]

    def __init__(self, *, max_length: int = 512, truncate: bool = False, **args: Any) -> None:
        super().__init__(**args)
        self.args |= self._given({"max_length": max_length, "truncate": truncate})
        if max_length < 2:
            raise ConfigError("max_length", max_length, "is less than two tokens", "give 512, say")
        self._max_length, self._truncate = max_length, truncate
        self._is_packed = False

    def data(self) -> Data:
        """The rows, which this process makes once."""
        paths = [Path(each) for each in (self._data, self._validation) if isinstance(each, str) and each]
        stats = [each.stat() for each in paths if each.is_file()]  # a change of a file is one of its size or time
        versions = [(each.st_size, each.st_mtime_ns) for each in stats]
        key = (type(self), repr(self.args), str(self.folder), *versions)
        if _newest.get("key") != key:
            _newest.update(key=key, rows=self.load_rows())
        return Data(*_newest["rows"])

    def decode_tokens(self, tokens: Sequence[int]) -> str:
        """The text, for those who see what is predicted."""
        return str(load_tokenizer(self.folder).decode(tokens))

    def load_rows(self) -> tuple[TokenRows, TokenRows | None]:
        """Load those for training and validation. Raises DataError."""
        tokenizer = load_tokenizer(self.folder)
        if not self._data:
            raise ConfigError("data", self._data, "is not given", "name a file of samples, as in data=texts.jsonl")
        records, held_out = texts.read_records(Path(self._data)), None
        if isinstance(self._validation, str):
            held_out = texts.read_records(Path(self._validation)) if self._validation else None
        elif not 0 <= self._validation < 1:
            raise ConfigError("validation", self._validation, "is no share of the samples", "give 0.1, say, or a file")
        elif self._validation:
            records, held_out = texts.split_records(records, self._validation)
        vocabulary = getattr(make_config(self.config).get_text_config(), "vocab_size", None)
        spec = TextSpec(tokenizer, self._max_length, self._truncate, vocabulary)
        pad = get_pad(tokenizer)
        if vocabulary is not None and pad >= vocabulary:
            problem = f"has a tokenizer that pads with token {pad}, and a vocab_size of {vocabulary}"
            raise ConfigError("model", str(self.folder), problem, "set its pad_token to a token that the model has")
        row_length = self._max_length if self._is_packed else None
        encode, labels = type(self).encoder, self.label_numbers
        train = encode(records, spec, labels)
        validation = None if held_out is None else encode(held_out, spec, labels)
        rows = TokenRows(train, pad, row_length, self._data)
        held_rows = None if validation is None else TokenRows(validation, pad, row_length)
        width = max(each.width for each in (rows, held_rows) if each is not None)
        with torch.device("meta"):
            limit = count_positions(self._build())
        if limit is not None and width > limit:
            problem = f"lets rows have {width} tokens, and the model has learnt {limit} positions"
            raise ConfigError("max_length", self._max_length, problem, f"give max_length={limit}")
        return rows, held_rows


_newest: dict[str, Any] = {}  # the rows that were made last: a run's check makes them, and then the run


def get_pad(tokenizer: Any) -> int:
    """The token that pads: the tokenizer's, or else the one that ends a text."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


def count_positions(network: nn.Module) -> int | None:
    """The tokens of a row for which the network has learnt positions; None: they are computed."""
    limit = getattr(network.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr, operator]
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in _POSITIONS and isinstance(module, nn.Embedding) and limit is not None:
            return int(limit) if module.padding_idx is None else int(limit) - module.padding_idx - 1  # as RoBERTa
    return None


class CausalLM(_TextTask):
    """A language model: logits [B, T, V] of the tokens that follow input_ids [B, T]."""

    auto = "AutoModelForCausalLM"
    encoder = texts.encode_language

    def __init__(self, *, packing: bool = False, **args: Any) -> None:
        super().__init__(**args)
        self.args |= self._given({"packing": packing})
        self._is_packed = packing
        if packing:
            self.input_names = ("input_ids", "position_ids")  # type: ignore[misc]

    def registration(self) -> Registration:
        found = super().registration()
        with torch.device("meta"):
            network = self._build()
        problems = [find(network, found.files) for find in load_sound_extensions("shoal.text_problems").values()]
        return replace(found, problem="".join(problems))

    @property
    def _output_shape(self) -> list[int]:
        return [-1, -1, make_config(self.config).get_text_config().vocab_size]


class TokenPolicy(CausalLM):
    """A language model that is trained by tokens of its own: logits [n, V] of the n places where `logits_to_keep`, bool
    [B, T], is true; of a network that cannot leave the others out, [B, T, V]."""

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several samples, with `position_ids` [B, T]; otherwise one, with an `attention_mask`."""
        return self.config.get("model_type") in PACKABLE

    @contextmanager
    def disable_adapters(self, network: nn.Module) -> Iterator[None]:
        """Let a network compute as without adapters, within."""
        layers: list[Any] = [each for each in network.modules() if hasattr(each, "lora_A")]
        try:
            for each in layers:
                each.enable_adapters(False)
            yield
        finally:
            for each in layers:
                each.enable_adapters(True)

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("input_ids", "position_ids" if self.is_packed else "attention_mask", "logits_to_keep")


class SequenceClassification(_TextTask):
    """A class for each text: logits [B, C]."""

    auto = "AutoModelForSequenceClassification"
    encoder = texts.encode_text_classes

    @cached_property
    def config(self) -> dict[str, Any]:
        """With the token that pads rows: the class of a text is read at the last token before it."""
        values = super().config
        if self._config is None:
            try:
                values["pad_token_id"] = get_pad(load_tokenizer(self.folder))
            except ConfigError:  # a folder without a tokenizer can be registered, but not trained
                if values.get("pad_token_id") is None:
                    raise
        return values


class TokenClassification(_TextTask):
    """A class for each word: logits [B, T, C], of which the first token of each word counts."""

    auto = "AutoModelForTokenClassification"
    encoder = texts.encode_token_classes

    @property
    def _output_shape(self) -> list[int]:
        return [-1, -1, len(self.label_numbers)]


class ImageClassification(HuggingFaceTask):
    """A class for each picture: logits [B, C]. The data are folders of pictures, one for each class."""

    auto = "AutoModelForImageClassification"
    input_names = ("pixel_values",)

    def data(self) -> Data:
        if not self._data:
            raise ConfigError("data", self._data, "is not given", "name a folder with one folder for each class")
        pictures = self._open(self._data)
        if isinstance(self._validation, str) and self._validation:
            return Data(pictures, self._open(self._validation))
        if not self._validation:
            return Data(pictures)
        order = np.random.default_rng(0).permutation(len(pictures))
        size = max(1, round(float(self._validation) * len(pictures)))
        return Data(Subset(pictures, order[size:].tolist()), Subset(pictures, order[:size].tolist()))

    def _open(self, folder: str) -> Any:
        prepare = make_picture_transform(self.folder, self.config)
        is_grey = self.config.get("num_channels", 3) == 1
        pictures = ImageFolder(folder, transform=prepare, mode="L" if is_grey else "RGB")
        if pictures.classes != list(self.label_numbers):
            problem = f"are {', '.join(self.label_numbers)}, and the folder has {', '.join(pictures.classes)}"
            raise ConfigError("labels", self._labels, problem, f"give labels=[{','.join(pictures.classes)}]")
        return pictures

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0].to(getattr(torch, self._datatype_name)),)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """The mean over the pictures."""
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Loss]:
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean()}

    def signature(self) -> None:
        """Found by running the network."""
