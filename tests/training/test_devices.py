"""What lies on the model's device, on `meta`: its tensors refuse those of other devices as CUDA's do, without a GPU."""

import torch
from torch import Tensor, nn

from shoal.data import Loader
from shoal.parallel import ParallelSpec, World
from shoal.parallel.spmd.base import SpmdModel
from shoal.train.loop.evaluation import evaluate
from train_task import CLASSES, FEATURES, Points, Toy

META = World(0, 1, torch.device("meta"))


class Elsewhere(SpmdModel):
    """A model of a device that computes nothing: what it adds up is made up, the means are 1."""

    def __init__(self) -> None:
        model = nn.Linear(FEATURES, CLASSES, device=META.device)
        super().__init__(model, Toy(), ParallelSpec(), World.single("cpu"), 0)  # where masks are drawn: not on meta
        self._world = META

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        assert super().sum_over_data_ranks(values).device == META.device
        return torch.ones(values.shape)


def test_an_evaluation_adds_up_where_the_model_is() -> None:
    loader = Loader(Points(50, 2), batch_size=32, device=META.device, shuffle=False, drop_last=False)
    assert evaluate(Elsewhere(), loader) == {"loss": 1.0, "accuracy": 1.0}


def test_the_norm_of_no_gradients_is_where_the_model_is() -> None:
    model = Elsewhere()
    without = model.clip_gradients(1.0)
    model.module(torch.zeros(2, FEATURES, device=META.device)).sum().backward()
    assert without.device == model.clip_gradients(1.0).device == META.device
