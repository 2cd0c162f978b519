"""Tasks whose losses do not divide by the number of samples, for `benchmarks.split_losses`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import shoal


class ClassWeighted(shoal.Task):
    """Cross entropy with class weights of 1 and 20: divides by the sum of the batch's weights."""

    def __init__(self, is_double: bool = False) -> None:
        self.dtype = torch.float64 if is_double else torch.float32
        self.weights = torch.tensor([1.0, 20.0], dtype=self.dtype)

    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(3)]
        return nn.Sequential(nn.Linear(12, 24), *blocks, nn.Linear(24, 2)).to(self.dtype)

    def data(self) -> shoal.Data:
        x = torch.randn(320, 12, generator=torch.Generator().manual_seed(1), dtype=self.dtype)
        return shoal.Data(train=TensorDataset(x, self.label(x)))

    def label(self, x: Tensor) -> Tensor:
        return (x.sum(1) > 3).long()

    def loss(self, outputs: Tensor, batch: Any) -> shoal.Mean:
        total = functional.cross_entropy(outputs, batch[1], self.weights, reduction="sum")
        return shoal.Mean(total, self.weights[batch[1]].sum())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


class FewLabels(ClassWeighted):
    """Four of five rows have no label; some parts of a batch have none."""

    def label(self, x: Tensor) -> Tensor:
        unlabelled = torch.rand(len(x), generator=torch.Generator().manual_seed(4)) < 0.8
        return torch.where(unlabelled, -100, (x.sum(1) > 0).long())

    def loss(self, outputs: Tensor, batch: Any) -> shoal.Mean:
        total = functional.cross_entropy(outputs, batch[1], reduction="sum")
        return shoal.Mean(total, (batch[1] >= 0).sum())


class PaddedGPT2(shoal.Task):
    """A small causal language model of transformers; the loss is a mean over tokens, and texts differ in length."""

    def __init__(self, is_double: bool = False) -> None:
        self.dtype = torch.float64 if is_double else torch.float32

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 24, "vocab_size": 64}
        drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)).to(self.dtype)

    def data(self) -> shoal.Data:
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(64, (320, 24), generator=generator)
        lengths = torch.randint(2, 25, (320, 1), generator=generator)
        return shoal.Data(train=TensorDataset(tokens, torch.where(torch.arange(24) < lengths, tokens, -100)))

    def loss(self, outputs: Any, batch: Any) -> shoal.Mean:
        labels = batch[1][:, 1:]
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return shoal.Mean(functional.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels >= 0).sum())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)
