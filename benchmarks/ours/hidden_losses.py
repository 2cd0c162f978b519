"""Losses that people write, by name: means over the samples, and such that divide by something else in silence.

Called by `random_splits`. A loss takes the outputs of a small network, [n, 4] or [n, LENGTH, 4], and a `Batch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as people write losses

NUM_CLASSES, LENGTH, VOCABULARY, IGNORED = 4, 5, 50, -100
WEIGHTS = torch.tensor([1.0, 1.0, 3.0, 20.0])


class Batch(NamedTuple):
    """x [n, 6]; y [n]: labels, IGNORED where there is none; t [n, 4]: targets; m [n, 4]: which of them count; g [n, 4]:
    targets, NaN where they do not count; w [n]: weights, 0 for a sample that does not count; z [n, LENGTH]: labels."""

    x: Tensor
    y: Tensor
    t: Tensor
    m: Tensor
    g: Tensor
    w: Tensor
    z: Tensor


Loss = Callable[[Any, Batch], Tensor]


def each(o: Tensor, b: Batch) -> Tensor:
    """[n]: cross entropies, 0 without a label."""
    return F.cross_entropy(o, b.y, reduction="none")


def squares(o: Tensor, b: Batch) -> Tensor:
    return (o - b.t).square()


def full(b: Batch) -> Tensor:
    """[n]: labels, also of those that have none."""
    return b.y.clamp(min=0)


def known(b: Batch) -> Tensor:
    return b.y != IGNORED


def divide_in_place(o: Tensor, b: Batch) -> Tensor:
    total = each(o, b).sum()
    total /= known(b).sum()
    return total


def mean_of_integers(o: Tensor, b: Batch) -> Tensor:
    index = known(b).nonzero()[:, 0]
    return F.mse_loss(o[index, 0], b.t[index, 0])


def focal(o: Tensor, b: Batch) -> Tensor:
    loss = F.cross_entropy(o, full(b), reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def soft_dice(o: Tensor, b: Batch) -> Tensor:
    p, t = o.sigmoid(), (b.t > 0).float()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def correlation(o: Tensor, b: Batch) -> Tensor:
    p, t = o[:, 0] - o[:, 0].mean(), b.t[:, 0] - b.t[:, 0].mean()
    similarity: Tensor = (p * t).sum() / (p.norm() * t.norm() + 1e-6)
    return 1 - similarity


def by_hand_weights(o: Tensor, b: Batch) -> Tensor:
    weights = WEIGHTS[full(b)] * known(b)
    return (each(o, b) * weights).sum() / weights.sum()


def balanced(o: Tensor, b: Batch) -> Tensor:
    counts = torch.bincount(full(b), minlength=NUM_CLASSES).clamp(min=1)
    return (F.cross_entropy(o, full(b), reduction="none") / counts[full(b)]).sum() / NUM_CLASSES


def list_of_rows(o: Tensor, b: Batch) -> Tensor:
    terms = [F.cross_entropy(o[i], b.y[i]) for i in range(len(o)) if b.y[i] != IGNORED]
    return torch.stack(terms).sum() / len(terms) if terms else o.sum() * torch.nan


def ranked(o: Tensor, b: Batch) -> Tensor:
    return F.margin_ranking_loss(o[:, 0], o[:, 1], torch.where(full(b) > 1, 1.0, -1.0))


def rows_of_tokens(o: Tensor, b: Batch) -> Tensor:
    loss = F.cross_entropy(o.transpose(1, 2), b.z, reduction="none")
    return ((loss).sum(1) / (b.z != IGNORED).sum(1).clamp(min=1)).mean()


def tokens_by_hand(o: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(o.transpose(1, 2), b.z, reduction="none").sum() / (b.z != IGNORED).sum()


PLAIN: dict[str, Loss] = {
    "cross_entropy of all labels": lambda o, b: F.cross_entropy(o, full(b)),
    "cross_entropy of probabilities": lambda o, b: F.cross_entropy(o, b.t.softmax(-1)),
    "CrossEntropyLoss, ignored labels": lambda o, b: nn.CrossEntropyLoss()(o, b.y),
    "CrossEntropyLoss, class weights": lambda o, b: nn.CrossEntropyLoss(WEIGHTS)(o, b.y),
    "CrossEntropyLoss, label smoothing": lambda o, b: nn.CrossEntropyLoss(label_smoothing=0.1)(o, b.y),
    "half of NLLLoss, class weights": lambda o, b: 0.5 * nn.NLLLoss(WEIGHTS)(o.log_softmax(-1), b.y),
    "nll_loss": lambda o, b: F.nll_loss(o.log_softmax(-1), b.y),
    "cross_entropy of tokens": lambda o, b: F.cross_entropy(o.flatten(0, 1), b.z.flatten()),
    "cross_entropy of selected": lambda o, b: F.cross_entropy(o[known(b)], b.y[known(b)]),
    "mse_loss": lambda o, b: F.mse_loss(o, b.t),
    "mse_loss with weight": lambda o, b: F.mse_loss(o, b.t, weight=b.w[:, None].expand_as(o)),  # type: ignore[call-arg]
    "l1_loss": lambda o, b: F.l1_loss(o, b.t),
    "l1_loss with weight": lambda o, b: F.l1_loss(o, b.t, weight=b.w[:, None].expand_as(o)),  # type: ignore[call-arg]
    "smooth_l1_loss": lambda o, b: F.smooth_l1_loss(o, b.t),
    "binary_cross_entropy": lambda o, b: F.binary_cross_entropy(o.sigmoid(), b.m.float()),
    "binary_cross_entropy_with_logits": lambda o, b: F.binary_cross_entropy_with_logits(
        o, b.m.float(), pos_weight=WEIGHTS
    ),
    "kl_div batchmean": lambda o, b: F.kl_div(o.log_softmax(-1), b.t.softmax(-1), reduction="batchmean"),
    "gaussian_nll_loss": lambda o, b: F.gaussian_nll_loss(o[:, :2], b.t[:, :2], o[:, 2:].exp()),
    "poisson_nll_loss": lambda o, b: F.poisson_nll_loss(o, b.t.abs()),
    "soft_margin_loss": lambda o, b: F.soft_margin_loss(o, b.m * 2.0 - 1.0),
    "multilabel_soft_margin_loss": lambda o, b: F.multilabel_soft_margin_loss(o, b.m.float()),
    "cosine_embedding_loss": lambda o, b: F.cosine_embedding_loss(o, b.t, torch.where(b.m[:, 0], 1.0, -1.0)),
    "margin_ranking_loss": ranked,
    "triplet_margin_loss": lambda o, b: F.triplet_margin_loss(o, b.t, b.t.flip(1)),
    "focal loss": focal,
    "mean of samples' masked sums": lambda o, b: (squares(o, b) * b.m).sum(1).mean(),
    "mean of samples' masked means": lambda o, b: ((squares(o, b) * b.m).sum(1) / b.m.sum(1).clamp(min=1)).mean(),
    "mean of samples' roots": lambda o, b: squares(o, b).mean(1).sqrt().mean(),
    "pinball": lambda o, b: torch.maximum(0.9 * (b.t - o), 0.1 * (o - b.t)).mean(),
    "sum over rows": lambda o, b: squares(o, b).sum() / len(o),
    "einsum over rows": lambda o, b: torch.einsum("ij,ij->", o, b.t) / len(o),
    "with a penalty, all labels": lambda o, b: F.cross_entropy(o, full(b)) + 0.1 * o.square().mean(),
    "distillation": lambda o, b: 0.5 * F.cross_entropy(o, full(b)) + F.mse_loss(o.softmax(-1), b.t.softmax(-1)),
    "rows of tokens": rows_of_tokens,
    "GPT2LMHeadModel": lambda o, b: o.loss,
    "BertForTokenClassification": lambda o, b: o.loss,
    "BertForSequenceClassification": lambda o, b: o.loss,
}
OTHER: dict[str, Loss] = {
    "/": lambda o, b: each(o, b).sum() / known(b).sum(),
    "/ clamp": lambda o, b: each(o, b).sum() / known(b).sum().clamp(min=1),
    "/=": divide_in_place,
    "div_": lambda o, b: each(o, b).sum().div_(known(b).sum()),
    "reciprocal": lambda o, b: each(o, b).sum() * known(b).sum().reciprocal(),
    "pow(-1)": lambda o, b: each(o, b).sum() * known(b).float().sum().pow(-1),
    ".item()": lambda o, b: each(o, b).sum() / known(b).sum().item(),
    "int of NumPy": lambda o, b: each(o, b).sum() / int(known(b).numpy().sum()),
    "len of a list": list_of_rows,
    "mean / mean": lambda o, b: each(o, b).mean() / known(b).float().mean(),
    "dot": lambda o, b: torch.dot(each(o, b), b.w) / b.w.sum(),
    "einsum": lambda o, b: torch.einsum("i,i->", each(o, b), b.w / b.w.sum()),
    "normalize p=1": lambda o, b: (each(o, b) * F.normalize(b.w, p=1, dim=0)).sum(),
    "weights of mean 1": lambda o, b: (each(o, b) * b.w / b.w.mean()).mean(),
    "softmax over samples": lambda o, b: (squares(o, b).mean(1) * b.w.softmax(0)).sum(),
    "indices": mean_of_integers,
    "index_select": lambda o, b: each(o, b).index_select(0, known(b).nonzero()[:, 0]).mean(),
    "mask": lambda o, b: each(o, b)[known(b)].mean(),
    "masked_select": lambda o, b: squares(o, b).masked_select(b.m).mean(),
    "nanmean": lambda o, b: torch.where(b.g.isnan(), b.g, squares(o, b)).nanmean(),
    "nansum / count": lambda o, b: torch.where(b.g.isnan(), b.g, squares(o, b)).nansum() / b.g.isfinite().sum(),
    "masked mse": lambda o, b: (squares(o, b) * b.m).sum() / b.m.sum(),
    "masked tokens": tokens_by_hand,
    "kl_div of selected": lambda o, b: F.kl_div(
        o[known(b)].log_softmax(-1), b.t[known(b)].softmax(-1), reduction="batchmean"
    ),
    "class weights by hand": by_hand_weights,
    "balanced in the batch": balanced,
    "ignored labels with a penalty": lambda o, b: F.cross_entropy(o, b.y) + 0.1 * o.square().mean(),
    "two cross entropies": lambda o, b: F.cross_entropy(o, b.y) + F.cross_entropy(o.flip(1), b.y, WEIGHTS),
    "RMSE": lambda o, b: F.mse_loss(o, b.t).sqrt(),
    "norm": lambda o, b: (o - b.t).norm() / len(o) ** 0.5,
    "perplexity": lambda o, b: F.cross_entropy(o, full(b)).exp(),
    "hardest half": lambda o, b: squares(o, b).mean(1).topk((len(o) + 1) // 2).values.mean(),
    "hardest sample": lambda o, b: squares(o, b).mean(1).max(),
    "above the mean": lambda o, b: F.relu(squares(o, b).mean(1) - squares(o, b).mean()).mean(),
    "median": lambda o, b: squares(o, b).mean(1).median(),
    "soft Dice": soft_dice,
    "correlation": correlation,
    "sum": lambda o, b: squares(o, b).sum() * 0.05,
    "relative to itself": lambda o, b: F.mse_loss(o, b.t) / F.mse_loss(o, b.t).detach(),
    "contrast": lambda o, b: F.cross_entropy(o @ b.t.T, torch.arange(len(o))),
}
LOSSES = {**PLAIN, **OTHER}
OF_TOKENS = ("cross_entropy of tokens", "rows of tokens", "masked tokens")
OF_MODELS = ("GPT2LMHeadModel", "BertForTokenClassification", "BertForSequenceClassification")
SIZES = {"vocab_size": VOCABULARY, "num_labels": NUM_CLASSES, "hidden_size": 8, "intermediate_size": 16}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LENGTH}


def make_network(name: str) -> nn.Module:
    if name not in OF_MODELS:
        last = [nn.Linear(8, 20), nn.Unflatten(1, (LENGTH, NUM_CLASSES))] if name in OF_TOKENS else [nn.Linear(8, 4)]
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), *last)
    import transformers

    if name == "GPT2LMHeadModel":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
        )
    else:
        config = transformers.BertConfig(**SIZES, **LAYERS)
    for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(config, field, 0.0)
    network: nn.Module = getattr(transformers, name)(config)
    return network


def make_inputs(name: str, b: Batch) -> dict[str, Tensor]:
    """The network's arguments, by name."""
    if name not in OF_MODELS:
        return {"x": b.x}
    tokens = (b.x[:, :LENGTH] * 10).long().remainder(VOCABULARY)
    labels = b.y if name == "BertForSequenceClassification" else b.z
    return {"input_ids": tokens, "labels": labels}
