"""Networks as an engine computes them: packed tokens, and the attention of `cells`.

`open_model` takes a causal model of transformers or a `Decoder` of this project, and compares it with its own forward
before it is used: a network whose attention is not understood is refused, not served wrongly.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.extend.models import Decoder
from shoal.libs.language.engine.cells import ACTIVE, CacheCells, TokenSegment, Work

ATTENTION = "shoal_slots"  # its name among transformers' attention functions
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the greatest logit; others 5%
# rows, rows, and parameters that no cache holds
_FEW = 8
_ROWS = 16
_LARGE = 16_000_000
_REFUSED_ROPE = ("dynamic", "longrope")  # a cell's key would depend on tokens that follow


class CausalModel:
    """A network, [T] tokens to logits. `context`: positions that it knows; None: any number. `head`: its last layer,
    which computes wanted tokens alone. `heads`: those of attention, which no tensor's shape shows. `token_bytes`: what
    `verify` has seen a token take in a cache.

    Versions whose tensors were given share one network, which has those of the version that has computed last."""

    token_bytes = 0

    def __init__(
        self, module: nn.Module, head: object, num_tokens: int, context: int | None, heads: list[int | None]
    ) -> None:
        self.head, self.heads = head, heads
        self.module = module.eval().requires_grad_(False)
        self.num_tokens = num_tokens
        self.context = context
        entries = _find_entries(self.module)
        self._entries, self._names = [*entries.values()], [*entries]
        self._tensors = [layer[key] for layer, key in self._entries]
        self._loaded = [self]  # of the versions that share the network
        self.device = next(module.parameters()).device
        self._is_large = self.device.type == "cpu" and sum(each.numel() for each in module.parameters()) > _LARGE

    def pad_rows(self, num: int) -> int:
        """How many rows products of `num` rows should have. On a processor those of 8 to 15 rows with a large matrix
        take up to three times as long as those of 16."""
        return _ROWS if self._is_large and _FEW <= num < _ROWS else num

    def compute(self, work: Work, wanted: Tensor) -> Tensor:
        """Logits float32 [len(wanted), num_tokens] of those tokens of the work; fills its cells."""
        if self._loaded[0] is not self:
            for (layer, key), tensor in zip(self._entries, self._tensors, strict=True):
                layer[key] = tensor
            self._loaded[0] = self
        return self._compute(work, wanted)

    def _compute(self, work: Work, wanted: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_plain(self, ids: Tensor) -> Tensor:
        """Logits [T, num_tokens] of one text [T], without cells."""
        raise NotImplementedError

    def replace_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> CausalModel:
        """The same network with other weights, which it takes over: they must not change any more.

        A network is taken as it is where its tensors have this one's types, else its tensors are. A mapping may leave
        tensors out, which both then share. Raises ConfigError where names or shapes differ.
        """
        old = dict(zip(self._names, self._tensors, strict=True))
        if isinstance(weights, nn.Module):
            new: dict[str, Tensor] = {**dict(weights.named_parameters(remove_duplicate=False))}
            if missing := next((name for name, _ in self.module.named_parameters() if name not in new), None):
                raise ConfigError("weights", missing, "is missing: another network")
            new |= dict(weights.named_buffers())
        else:
            new = dict(weights)
        for name, tensor in new.items():
            if name not in old:
                raise ConfigError("weights", name, "is no tensor of the network")
            if tensor.shape != old[name].shape:
                raise ConfigError("weights", name, f"has shape {tuple(tensor.shape)}, not {tuple(old[name].shape)}")
        if type(weights) is type(self.module) and all(
            (each.dtype, each.device) == (old[name].dtype, old[name].device) for name, each in new.items()
        ):  # no copy, which takes as long as a small network's step
            taken: CausalModel = type(self)(weights)  # type: ignore[call-arg]
            if taken.heads != self.heads:
                raise ConfigError("weights", taken.heads, f"are its heads, not {self.heads}: another network")
            return taken
        moved = {id(old[name]): each.detach().to(old[name].device, old[name].dtype) for name, each in new.items()}
        version = copy.copy(self)
        version._tensors = [moved.get(id(each), each) for each in self._tensors]  # a tensor may have several entries
        return version

    def verify(self) -> None:
        """Compare chunks and rows over cells with the network's own forward. Raises ConfigError."""
        num = min(12, self.context or 12)
        ids = torch.arange(num, device=self.device) * 7 % self.num_tokens
        cells = CacheCells(2, num)
        at = 0
        computed = []
        for size in (num // 2, num - num // 2 - 1, 1):
            segment = TokenSegment(1, at, ids[at : at + size].tolist(), True)
            work = Work(cells, [segment], self.device)
            computed.append(self.compute(work, torch.arange(size, device=self.device)))
            at += size
        self.token_bytes = cells.token_bytes
        expected = self.compute_plain(ids).float()
        share = (torch.cat(computed) - expected).abs().max() / expected.abs().max()
        if not share <= _TOLERANCE.get(next(self.module.parameters()).dtype, 0.05):
            problem = f"computes other logits over a cache, by {float(share):.2g} of the greatest"
            raise ConfigError("model", type(self.module).__name__, problem, "its layers keep more than keys and values")


class DecoderModel(CausalModel):
    """A `shoal.models.decoder.Decoder`."""

    def __init__(self, module: Decoder) -> None:
        layers: list[Any] = list(module)
        self._embedding, *self._blocks, self._head = layers
        self._position = self._embedding.position
        context = self._position.num_embeddings if self._position is not None else None
        heads = [each.attention.head_size for each in self._blocks]
        super().__init__(module, self._head.output, self._head.output.out_features, context, heads)

    def _compute(self, work: Work, wanted: Tensor) -> Tensor:
        ACTIVE.work = work
        x = self._embedding.token(work.ids)  # [T, D]
        if self._position is not None:
            x = x + self._position(work.positions)
        for number, block in enumerate(self._blocks):
            attention, normed = block.attention, block.norm1(x)
            query, key, value = (
                layer(normed).unflatten(-1, (-1, attention.head_size)).transpose(0, 1)
                for layer in (attention.query, attention.key, attention.value)
            )
            x = x + attention.output(work.attend(number, query, key, value, None, None).flatten(1))
            x = x + block.feed_forward(block.norm2(x))
        logits: Tensor = self._head(x[wanted])
        ACTIVE.work = None
        return logits.float()

    def compute_plain(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.module(ids[None])[0]
        return logits


class TransformersModel(CausalModel):
    """A causal model of transformers that takes its attention from transformers' registry of attention functions."""

    def __init__(self, module: nn.Module) -> None:
        config: Any = module.config
        name = type(module).__name__
        text = config.get_text_config()
        if "logits_to_keep" not in inspect.signature(type(module).forward).parameters:
            raise ConfigError("model", name, "is no causal language model")
        if any(kind in repr(getattr(text, "rope_parameters", None)) for kind in _REFUSED_ROPE):
            raise ConfigError("model", name, "has positions that depend on the length of the text")
        if not getattr(type(module), "_supports_attention_backend", False):
            raise ConfigError("model", name, "has an attention that cannot be exchanged")
        if any(each.endswith("sinks") for each, _ in module.named_parameters()):
            raise ConfigError("model", name, "has attention with s_aux")
        if getattr(text, "attn_logit_softcapping", None) is not None:
            raise ConfigError("model", name, "has attention with softcap")
        _register_attention()
        if config._attn_implementation != ATTENTION:  # as it is in a copy
            module.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        head = module.get_output_embeddings()  # type: ignore[operator]
        heads = [getattr(text, each, None) for each in ("num_attention_heads", "num_key_value_heads", "head_dim")]
        super().__init__(module, head, text.vocab_size, getattr(text, "max_position_embeddings", None), heads)
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)  # four dimensions: taken as it is

    def _compute(self, work: Work, wanted: Tensor) -> Tensor:
        ACTIVE.work = work
        try:
            output = self.module(
                input_ids=work.ids[None],
                position_ids=work.positions[None],
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=wanted,
            )
        finally:
            ACTIVE.work = None
        logits: Tensor = output.logits[0].float()
        return logits

    def compute_plain(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.module(input_ids=ids[None], use_cache=False).logits[0]
        return logits


def open_model(module: nn.Module) -> CausalModel:
    """The module as an engine computes it; the engine takes it over. Raises ConfigError for one that does not fit."""
    if isinstance(module, Decoder):
        model: CausalModel = DecoderModel(module)
    elif hasattr(module, "config") and hasattr(module, "set_attn_implementation"):
        model = TransformersModel(module)
    else:
        remedy = "expected a causal model of transformers, or shoal.models.decoder.Decoder"
        raise ConfigError("model", type(module).__name__, "is no network that generates", remedy)
    with torch.inference_mode():
        model.verify()
    return model


def _find_entries(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where a network's layers have its parameters and buffers, by name: a layer's own, and the key there."""
    return {
        ".".join(filter(None, (prefix, key))): (own, key)
        for prefix, layer in module.named_modules(remove_duplicate=False)
        for own in (layer._parameters, layer._buffers)
        for key, tensor in own.items()
        if tensor is not None
    }


def _register_attention() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    AttentionInterface.register(ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls attention: [1, H, T, D] to [1, T, H, D]. Outside of an engine's forward, its own."""
    if (work := ACTIVE.work) is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        return attended[0], None
    if others.get("position_bias") is not None:
        raise ConfigError("model", type(module).__name__, "has attention with position_bias")
    window = others.get("sliding_window")
    return work.attend(module.layer_idx, query[0], key[0], value[0], scaling, window)[None], None
