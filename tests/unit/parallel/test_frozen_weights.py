"""Weights that are neither trained nor saved: buffers, or parameters of a plan that shards them."""

import copy

import torch
from torch import nn

from shoal.parallel.state.module_snapshot import freeze_parameters, iter_frozen, restore_parameters, snapshot_module


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False))
    model[3].weight = model[0].weight
    freeze_parameters(model, ["0.weight", "2.weight", "3.weight"])
    return model


def test_no_state_has_them_in_either_form() -> None:
    model = make_model()
    expected = copy.deepcopy(model.state_dict())
    restored = copy.deepcopy(model)
    restore_parameters(restored)
    for each in (model, restored, copy.deepcopy(restored)):
        assert each.state_dict().keys() == expected.keys()
        assert not {"0.weight", "2.weight", "3.weight"} & expected.keys()
        assert torch.equal(each[0].weight, model[0].weight)
        assert each[0].weight is each[3].weight, "tied weights stay tied"
    assert [name for _, name, _ in iter_frozen(model)] == ["weight", "weight", "weight"]
    assert not list(iter_frozen(restored))
    frozen = {name for name, each in restored.named_parameters() if not each.requires_grad}
    assert frozen == {"0.weight", "2.weight"}
    assert frozen.isdisjoint(dict(model.named_parameters()))


def test_a_snapshot_does_not_copy_them() -> None:
    model = make_model()
    take_back = snapshot_module(model)
    with torch.no_grad():
        model[2].weight.fill_(7.0)
        model[1].running_mean.fill_(7.0)
    take_back()
    assert model[2].weight.unique().tolist() == [7.0]
    assert model[1].running_mean.unique().tolist() == [0.0]
