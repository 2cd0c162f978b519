"""GRPO, RLOO and REINFORCE++: a language model that learns from the tokens that it has sampled (see `losses`).

Each batch is one step of AdamW, with the gradient of all its trained tokens, computed by parts. Knows no gateway,
clock, run or Ray. Legend: S segments of N steps in all; B rows of T tokens; n trained tokens of a part of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import SpecMismatch
from shoal.extend.rl import (
    SINGLE,
    Algorithm,
    AlgorithmConfig,
    ExperienceBatch,
    LearnerGroup,
    Metrics,
    NonFiniteLoss,
    Normalizer,
    RLSpec,
    find_device,
    find_non_finite,
    restore_optimizer,
    set_learning_rate,
)
from shoal.extend.train import load_initial_weights
from shoal.libs.agents.config import ADVANTAGE, TRAINS, PolicyGradientTextConfig
from shoal.libs.agents.losses import compute_token_losses
from shoal.plugins.find import find_in_library
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec

SUMS = (
    "learner/loss",
    "agents/entropy",
    "agents/clip_share",
    "agents/token_lag_mean",
    "agents/kl",
    "same_version",
    "logprob_diff",
)
_NEWEST = "newest"  # extra of a prepared batch, int64 [S, 2]: the newest version, and whether it is the present weights


class MicroBatch(NamedTuple):
    """A part of a batch, as the network takes it.

    tokens: int64 [B, T]; of each segment all but the last, after which nothing is sampled
    layout: int64 [B, T], 0 on padding: positions in their segments, of rows that hold several; otherwise 1
    trains: bool [B, T]
    steps:  int64 [n], which of the batch's steps are trained, in the order of `trains`
    """

    tokens: Tensor
    layout: Tensor
    trains: Tensor
    steps: np.ndarray


class TokenMoments(NamedTuple):
    """Of a learner's trained tokens.

    sums:    [7], divided by the trained tokens of all learners, as SUMS names them; the last two are of tokens by the
             present weights alone
    largest: [3], |log π - log μ| of these, π / μ, lag
    """

    sums: Tensor
    largest: Tensor


class RoundingNormalizer(Normalizer):
    """Publishes weights in bf16, to the nearest of its numbers."""

    def fold(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        rounded = {}
        for name, each in arrays.items():
            is_float = each.dtype.kind == "f"
            rounded[name] = torch.from_numpy(each).bfloat16().view(torch.int16).numpy().view("V2") if is_float else each
        return rounded


class TextPolicyGradient(Algorithm):
    """One step of AdamW for each batch. The network is in evaluation mode: dropout would be another policy's."""

    _config: PolicyGradientTextConfig

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None) -> None:
        assert isinstance(spec.algorithm, PolicyGradientTextConfig)
        self._config = config = spec.algorithm
        self.device = find_device(spec)
        self._task = task = _make_task(config, config.lora or None)
        self._is_packed: bool = task.is_packed
        self.model = task.model().eval()
        if not config.lora:
            load_initial_weights(self.model, task.initial_weights())
        self.model.to(self.device)
        kind = RoundingNormalizer if config.weights == "bf16" else Normalizer
        self.normalizer = kind(spec, experience)
        self._parameters = [each for each in self.model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self._reference: nn.Module | None = None  # with the adapters disabled, if it has any
        self._reference_sha256 = ""
        if config.kl_cost:
            is_base = config.lora and not config.reference
            self._reference = self.model if is_base else self._load_reference()
            tensors = dict(self.model.named_buffers()) if is_base else self._reference.state_dict()
            self._reference_sha256 = hash_tensors(tensors)
        self._learnt_version = -1  # the newest one at the last step: the weights have changed since

    def _load_reference(self) -> nn.Module:
        task = _make_task(self._config, lora=None)
        network: nn.Module = task.model().eval().requires_grad_(False)
        load_initial_weights(network, self._config.reference or task.initial_weights())
        return network.to(self.device)

    def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        newest = np.full((len(batch.lengths), 2), (self.version, self.version != self._learnt_version), np.int64)
        return replace(self.normalizer.prepare(batch), extras={**batch.extras, _NEWEST: newest})

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        metrics = self._compute_gradients(batch, self.group)
        if not metrics["agents/trained_tokens"]:
            return
        if bad := find_non_finite(metrics):
            raise NonFiniteLoss(f"{', '.join(bad)} is not finite; lower algorithm.learning_rate or check the rewards")
        self._optimizer.step()
        self._learnt_version = self.version
        yield metrics

    def is_usable(self, segment: ExperienceBatch) -> bool:
        return not find_non_finite(self._compute_gradients(segment, SINGLE))

    def compute_log_ratios(self, batch: ExperienceBatch) -> np.ndarray:
        """0 where nothing is trained."""
        log_ratios = np.zeros(batch.num_steps, np.float32)
        with torch.no_grad():
            for part in self._divide(batch):
                log_pi, _ = self._evaluate(self.model, part, self._choose(part, batch.actions))
                log_ratios[part.steps] = (log_pi - self._choose(part, batch.log_probabilities)).cpu().numpy()
        return log_ratios

    def configure(self, config: AlgorithmConfig) -> None:
        assert isinstance(config, type(self._config))
        self._config = config
        set_learning_rate(self._optimizer, config.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Of a model with adapters, these alone."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "normalizer": self.normalizer.state_dict(),
            "reference": self._reference_sha256,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises SpecMismatch for a state of a run with another reference."""
        if self._reference is not None and state["reference"] not in ("", self._reference_sha256):
            problem = "has other weights than the reference that the run has begun with"
            remedy = "give the version that it was, by its number"
            raise SpecMismatch("algorithm.reference", self._config.reference, problem, remedy)
        self.model.load_state_dict(state["model"])
        self.normalizer.load_state_dict(state["normalizer"])
        restore_optimizer(self._optimizer, state["optimizer"], self._config.learning_rate)

    def _compute_gradients(self, batch: ExperienceBatch, group: LearnerGroup) -> dict[str, float]:
        """Store the clipped gradient of a batch, or of a learner's share of one, in the model; returns metrics."""
        mine, lengths = group.locate_segments(batch)
        facts = np.zeros((3, len(lengths)))
        facts[:, mine] = _describe_segments(batch)
        num_trained, advantages, rewards = _sum(group, torch.from_numpy(facts)).numpy()
        is_known = num_trained > 0  # of a learner that has died nothing is
        num_tokens = int(num_trained.sum())
        if not num_tokens:
            return {"agents/trained_tokens": 0.0}
        zero_share = float((advantages[is_known] == 0).mean())
        advantages_N = np.delete(batch.extras[ADVANTAGE], np.cumsum(batch.lengths + 1) - 1)
        if self._config.baseline == "global":
            known = advantages[is_known]
            advantages_N = ((advantages_N - known.mean()) / (known.std() + 1e-8)).astype(np.float32)

        moments = self._accumulate(batch, advantages_N, num_tokens)
        named = dict(zip(SUMS, moments.sums, strict=True))
        sums = group.sum_gradients(self._parameters, named, int(num_trained[mine].sum()), num_tokens)
        largest = torch.zeros(len(lengths), 3)
        largest[mine[0]] = moments.largest
        logprob_diff, ratio, lag = _sum(group, largest).amax(0).tolist()
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)

        num_same, sum_diff = sums.pop("same_version"), sums.pop("logprob_diff")
        if num_same:
            sums |= {"agents/logprob_diff_mean": sum_diff / num_same, "agents/logprob_diff_max": logprob_diff}
        if self._reference is None:
            del sums["agents/kl"]
        return {
            **sums,
            "learner/grad_norm": grad_norm.item(),
            "agents/ratio_max": ratio,
            "agents/token_lag_max": lag,
            "agents/trained_tokens": float(num_tokens),
            "agents/reward": float(rewards[is_known].mean()),
            "agents/zero_advantage_share": zero_share,
        }

    def _accumulate(self, batch: ExperienceBatch, advantages_N: np.ndarray, num_tokens: int) -> TokenMoments:
        """Replace the model's gradients by those of this learner's segments, with the advantages of their steps: sums,
        divided by the `num_tokens` of all learners."""
        for parameter in self._parameters:  # of a learner without a trained token, too
            parameter.grad = torch.zeros_like(parameter)
        newest = np.repeat(batch.extras[_NEWEST], batch.lengths, 0)
        lags = newest[:, 0] - batch.versions
        is_same = (lags == 0) & (newest[:, 1] > 0)
        sums, largest = torch.zeros(len(SUMS), device=self.device), torch.zeros(3, device=self.device)

        for part in self._divide(batch):
            actions = self._choose(part, batch.actions)
            log_pi, entropies = self._evaluate(self.model, part, actions)
            log_reference = None
            if self._reference is not None:
                with torch.no_grad(), self._task.disable_adapters(self._reference):
                    log_reference, _ = self._evaluate(self._reference, part, actions)
            log_mu = self._choose(part, batch.log_probabilities)
            chosen = self._choose(part, advantages_N)
            tokens = compute_token_losses(log_pi, log_mu, chosen, self._config, log_reference)
            tokens.losses.sum().div(num_tokens).backward()

            lag, same = self._choose(part, lags).float(), self._choose(part, is_same).float()
            diff = (log_pi.detach() - log_mu).abs() * same
            losses = tokens.losses.detach()
            per_token = torch.stack([losses, entropies, tokens.is_clipped.float(), lag, tokens.kl, same, diff])
            sums += per_token.sum(1) / num_tokens
            largest = largest.maximum(torch.stack([diff, tokens.ratios, lag]).amax(1))
        return TokenMoments(sums, largest.cpu())

    def _divide(self, batch: ExperienceBatch) -> Iterator[MicroBatch]:
        """The segments that have trained tokens, in micro-batches."""
        num_trained, *_ = _describe_segments(batch)
        for rows in arrange_segments(batch.lengths, num_trained > 0, self._config.minibatch_tokens, self._is_packed):
            yield make_micro_batch(batch, rows, self._is_packed, self.device)

    def _choose(self, part: MicroBatch, per_step: np.ndarray) -> Tensor:
        """The values [n] of the trained tokens, of those of all steps [N]."""
        return self.to_device(per_step[part.steps])

    def _evaluate(self, network: nn.Module, part: MicroBatch, actions: Tensor) -> tuple[Tensor, Tensor]:
        """log π of actions [n], differentiable, and the entropies [n] of their distributions."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._config.precision == "bf16"):
            logits = network(part.tokens, part.layout, part.trains)
        logits = (logits if logits.ndim == 2 else logits[part.trains]).float()
        if self._config.temperature != 1:
            logits = logits / self._config.temperature
        normalizers = logits.logsumexp(-1)
        log_pi = logits.gather(-1, actions.long()[:, None]).squeeze(-1) - normalizers
        with torch.no_grad():
            entropies = normalizers - ((logits - normalizers[:, None]).exp() * logits).sum(-1)
        return log_pi, entropies


def arrange_segments(lengths: np.ndarray, is_chosen: np.ndarray, limit: int, is_packed: bool) -> list[list[list[int]]]:
    """Arrange the chosen segments (bool [S]) in micro-batches of rows, of one segment each or of several.

    A row is as long as the longest segment of its micro-batch: attention is quadratic in it. Micro-batches have at most
    `limit` tokens, padding included, or one segment; those of similar lengths stand together.
    """
    parts: list[list[list[int]]] = []
    width, room = 0, list[int]()  # room: of each row of the last micro-batch
    for index in np.argsort(-lengths, kind="stable").tolist():
        if not is_chosen[index]:
            continue
        length = int(lengths[index])
        row = next((row for row, left in enumerate(room) if is_packed and length <= left), len(room))
        if row == len(room):
            if not parts or (row + 1) * width > limit:
                parts.append([])
                width, row, room = length, 0, []
            parts[-1].append([])
            room.append(width)
        parts[-1][row].append(index)
        room[row] -= length
    return parts


def make_micro_batch(
    batch: ExperienceBatch, rows: list[list[int]], is_packed: bool, device: torch.device
) -> MicroBatch:
    """Lay the segments of each row end to end."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    shape = len(rows), max(batch.lengths[row].sum() for row in rows)
    tokens = np.zeros(shape, np.int64)
    layout = np.zeros(shape, np.int64)
    trains = np.zeros(shape, np.bool_)
    steps = []
    for row, segments in enumerate(rows):
        end = 0
        for index in segments:
            length, first = batch.lengths[index], starts[index] + index
            here, there = slice(end, end + length), slice(first, first + length)
            tokens[row, here] = batch.observations[there]
            layout[row, here] = np.arange(length) if is_packed else 1
            trains[row, here] = batch.extras[TRAINS][there]
            steps.append(starts[index] + np.flatnonzero(trains[row, here]))
            end += length
    on_device = [torch.from_numpy(each).to(device) for each in (tokens, layout, trains)]
    return MicroBatch(on_device[0], on_device[1], on_device[2], np.concatenate(steps))


def _describe_segments(batch: ExperienceBatch) -> np.ndarray:
    """The trained tokens, the episode's advantage and the reward of each segment [3, S]."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    first = starts + np.arange(len(starts))  # of its observations
    num_trained = np.add.reduceat(batch.extras[TRAINS].astype(np.int64), first)
    advantages = batch.extras[ADVANTAGE][first + batch.lengths]
    return np.stack([num_trained, advantages, np.add.reduceat(batch.rewards, starts)])


def _sum(group: LearnerGroup, values: Tensor) -> Tensor:
    """The sum over the learners, which is of flat ones."""
    return group.sum(values.flatten()).view(values.shape)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    return WeightSnapshot.of(0, {name: each.cpu().numpy() for name, each in tensors.items()}).sha256


def _make_task(config: PolicyGradientTextConfig, lora: Mapping[str, Any] | None) -> Any:
    """The Task of the model, of the library for models of Hugging Face."""
    make = find_in_library("transformers", "shoal.token_policies", "hf", "algorithm", config.name)
    return make(model=config.pretrained, lora=lora)
