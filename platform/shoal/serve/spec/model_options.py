"""The options of one model: parts of an endpoint's spec. No Ray, no torch."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, field_serializer, field_validator, model_validator

from shoal.config import Spec


def _require_reference(hook: str) -> str:
    if hook and re.fullmatch(r"[^:\s]+:[^:\s]+", hook) is None:
        raise ValueError("is not of the form module:name")
    return hook


Hook = Annotated[str, AfterValidator(_require_reference)]


class GuardOptions(Spec):
    """When a candidate is rolled back automatically, judged by its requests in comparison with the stable version's.

    For a live model, each published version is judged in comparison with the previous one.

    max_error_rate:    share of the candidate's requests, shadowed ones too, that fail with a 5xx of the model's making
                       where the stable version does not fail too; None: it may not fail more often than the stable
                       version by more than chance, and a live version at 2% of those that the previous one answers
    max_latency_ratio: the candidate's median compute time over the stable version's, for batches of equal size
    max_disagreement:  share of shadowed requests whose outputs differ by more than `tolerance` (None: recorded only)
    tolerance:         difference of an output beyond which answers disagree
    metric, min_value: a user's metric, reported to the endpoint; a candidate below `min_value` is rolled back
    min_requests:      needed before a judgement, except for errors of a live version that the previous one did not make
    """

    max_error_rate: float | None = Field(default=None, ge=0, le=1)
    max_latency_ratio: float = Field(default=2.0, gt=0)
    max_disagreement: float | None = Field(default=None, ge=0, le=1)
    tolerance: float = Field(default=1e-3, ge=0)
    metric: str = ""
    min_value: float = 0.0
    min_requests: int = Field(default=50, ge=1, le=1_000_000_000)


class TextOptions(Spec):
    """How an endpoint generates text with a language model.

    slots:         answers that are computed at the same time, by each version
    length:        tokens of a prompt and its answer together; None: what the model knows, if its slots then take no
                   more than half of the memory
    swap:          what becomes of an answer when the version changes, where its request leaves it open: it continues
                   with the new one, finishes with the old one, or is refused the rest
    deterministic: the bits of an answer do not depend on others, which costs a third of the speed
    tokenizer:     NAME@VERSION of the registry, or a folder, with the tokenizer's files; "": the version's own
    adapters:      registered adapters of the model that `MODEL:NAME` answers with: NAME, NAME@ALIAS, NAME@7; `*`: any
    engine:        what computes: `slots`, of this package, `vllm`, in a process beside the replica, or `auto`: vllm
                   where it is installed and a GPU is there
    engine_python: the Python of an environment with vLLM; "": the replica's own
    engine_args:   further arguments of vLLM's engine, such as tensor_parallel_size, quantization, enforce_eager
    """

    slots: int = Field(default=16, ge=1, le=4096)
    length: int | None = Field(default=None, ge=2, le=10_000_000)
    swap: Literal["continue", "finish", "refuse"] = "continue"
    deterministic: bool = False
    tokenizer: str = ""
    adapters: list[str] = Field(default_factory=list, max_length=64)
    engine: Literal["slots", "vllm", "auto"] = "slots"
    engine_python: str = ""
    engine_args: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _engine_has_it(self) -> TextOptions:
        for name in ("swap", "deterministic") if self.engine != "slots" else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} is for text.engine = slots alone: leave it out")
        return self


class ModelOptions(Spec):
    """The options of one model of an endpoint.

    max_batch_size: the most rows of one forward; 0: the model has no batch, and each request is a forward
    batch_dim:      the dimension of the batch in inputs and outputs where it is not 0, which undoes an entry; null for
                    a tensor without it:
                    requests of equal values then share a batch
    max_queue_size: rows per replica that may wait before requests are refused with 429
    max_queue_bytes: the same limit in bytes of their inputs, for large rows
    deadline_s:     how long after its arrival a request expires, unless it has its own deadline; None: never
    weight:         this model's share of a busy replica, relative to other models'
    ragged:         inputs whose variable dimensions differ: `bucket` batches equal shapes only, `pad` fills the shorter
                    ones with `pad_value` at the end (right only for models that ignore it)
    pad_value:      what `ragged=pad` fills with
    precision:      of the forward; bf16 by autocast, int8 by dynamic quantisation of linear layers (CPU)
    compile:        torch.compile the forward
    cuda_graphs:    replay the forward as one CUDA graph per batch size (CUDA only)
    device:         auto: the CPU, or the faster one where the replica has reserved a GPU
    preprocess, postprocess: `module:function` of a dict of arrays, run before and after the forward, per batch; None:
                    the registered hook; "": none
    action:         of a policy: best or sampled, where a request does not say; None: as its version says
    finite:         a NaN or infinite output is an error (500), and such weights are rejected; off: JSON has null for
                    them
    warm_up:        run the forward at every power of two of the batch before the version is ready
    pin:            loaded on every replica and never dropped, where `endpoint.memory` limits the loaded models
    text:           of a language model: see `TextOptions`
    follow:         how an alias that moves is followed: `canary` gives its version a tenth of the requests, until
                    `guard.min_requests` of them have brought nothing against it; `NAME@latest` follows every new one
    held_versions:  of a live model: versions retained for a rollback, half a minute apart, in addition to the answering
                    one and the one before
    """

    max_batch_size: int = Field(default=64, ge=0, le=10_000_000)
    batch_dim: dict[str, Annotated[int, Field(ge=0, lt=64)] | None] = Field(default_factory=dict)
    max_queue_size: int = Field(default=1024, ge=1, le=10_000_000)
    max_queue_bytes: int = Field(default=1 << 30, ge=1, le=1 << 50)
    deadline_s: float | None = Field(default=None, gt=0)
    weight: float = Field(default=1.0, gt=0)
    ragged: Literal["bucket", "pad"] = "bucket"
    pad_value: float = Field(default=0.0, allow_inf_nan=True)
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    compile: bool = False
    cuda_graphs: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    preprocess: Hook | None = None
    postprocess: Hook | None = None
    action: Literal["best", "sampled"] | None = None
    finite: bool = True
    warm_up: bool = True
    pin: bool = False
    follow: Literal["switch", "canary"] = "switch"
    held_versions: int = Field(default=2, ge=0, le=10_000)
    guard: GuardOptions = GuardOptions()
    text: TextOptions = TextOptions()

    @classmethod
    def explain_absence(cls, name: str) -> str:
        return "end the endpoint, then `shoal serve deploy MODEL --replicas N`" if name == "num_replicas" else ""

    @field_validator("batch_dim")
    @classmethod
    def _remove_defaults(cls, batch_dim: dict[str, int | None]) -> dict[str, int | None]:
        """So a change, which is merged into the former options, can undo an entry."""
        return {name: dimension for name, dimension in batch_dim.items() if dimension != 0}

    @property
    def max_rows(self) -> int:
        """The most rows of one forward. A request without a batch is one."""
        return self.max_batch_size or 1

    def get_batch_dim(self, tensor: str) -> int | None:
        """The dimension of the batch in an input or output; None for a tensor without it."""
        return self.batch_dim.get(tensor, 0) if self.max_batch_size else None

    @property
    def needs_cuda(self) -> bool:
        return self.device == "cuda" or self.cuda_graphs

    @field_serializer("pad_value", when_used="json")
    def _spell_infinity(self, pad_value: float) -> float | str:
        """Write infinity and NaN as text: JSON has no infinity, and NaN does not equal itself. It is read back as the
        same number."""
        return pad_value if math.isfinite(pad_value) else str(pad_value)

    @model_validator(mode="after")
    def _batches_are_possible(self) -> ModelOptions:
        if self.max_queue_size < self.max_batch_size:
            raise ValueError(f"max_queue_size = {self.max_queue_size} is below max_batch_size = {self.max_batch_size}")
        if self.batch_dim and not self.max_batch_size:
            undo = ", ".join(f"{name}: 0" for name in self.batch_dim)
            remedy = f"leave out batch_dim (batch_dim={{{undo}}} undoes it), or set a batch size"
            raise ValueError(f"max_batch_size = 0 serves without batches: {remedy}")
        if self.cuda_graphs and (self.batch_dim or not self.max_batch_size):
            field = "batch_dim" if self.batch_dim else "max_batch_size = 0"
            raise ValueError(f"cuda_graphs needs the batch in dimension 0: leave it out, or {field}")
        return self
