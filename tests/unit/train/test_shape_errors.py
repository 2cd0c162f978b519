"""A shape that does not fit is told with its layer and the shapes of the batch."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.errors import ConfigError
from shoal.train import Task, TrainSpec
from shoal.train.launch.validate import validate_run
from shoal.train.shape_errors import describe_shapes, explain_shapes


class Pictures(Task):
    def __init__(self, *, target: str = "int64") -> None:
        self.target = target

    def model(self) -> nn.Module:
        first: nn.Module = nn.Identity() if self.target == "int64" else nn.Flatten()
        return nn.Sequential(first, nn.Linear(784, 10))

    def data(self) -> Data:
        return Data(TensorDataset(torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=getattr(torch, self.target))))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (
            "int64",
            r"model\.1 = 'Linear\(in_features=784, out_features=10, bias=True\)': takes float32 \[\.\., 784\], and got"
            r" float32 \[2, 1, 28, 28\]\. the batch is float32 \[2, 1, 28, 28\], int64 \[2\]",
        ),
        (
            "float32",
            r"task = 'Pictures\.loss': raised RuntimeError \(.*\), of outputs float32 \[2, 10\]\. the batch is"
            r" float32 \[2, 1, 28, 28\], float32 \[2\]",
        ),
    ],
)
def test_a_run_is_refused_with_layer_and_shapes(target: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate_run(TrainSpec(task=f"{__name__}:Pictures", args={"target": target}, batch_size=8, stop={"steps": 1}))


def weigh(errors: Tensor, quantiles: Tensor) -> Tensor:
    """The pinball loss, of each quantile for each error."""
    return torch.maximum(quantiles * errors, (quantiles - 1) * errors).mean()


class Numbers(Task):
    """Outputs [n, 1] beside targets [n], in ways of which torch compares each with each."""

    forms: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
        "squares": lambda o, y: ((o - y) ** 2).mean(),
        "targets first": lambda o, y: (y.double() - o).abs().mean(),
        "times": lambda o, y: (o.sigmoid() * y).mean(),
        "mse_loss": nn.functional.mse_loss,
        "columns of targets": lambda o, y: nn.functional.l1_loss(o[:, 0], y[:, None]),
        "of a column": lambda o, y: ((y[:, None].log1p()[:, 0].float() / 2 - o) ** 2).mean(),
        "squeezed": lambda o, y: ((o.squeeze(1) - y) ** 2).mean(),
        "pairs": lambda o, y: (o - o[:, 0]).square().mean() + (y[:, None] == y).float().mean(),
        "quantiles": lambda o, y: weigh(y[:, None] - o, torch.tensor([0.1, 0.9])),
        "quantiles as targets are": lambda o, y: weigh(y[:, None] - o, y.new_tensor([0.1, 0.9])),
        "weights first": lambda o, y: (torch.ones(2)[:, None] * (o.squeeze(1) - y)).mean(),
    }

    def __init__(self, *, form: str) -> None:
        self.form = form

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def data(self) -> Data:
        return Data(TensorDataset(torch.zeros(8, 3), torch.zeros(8)))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss: Tensor = self.forms[self.form](outputs, batch[1])
        return loss


@pytest.mark.parametrize("form", Numbers.forms)
def test_a_loss_that_compares_each_output_with_each_target_is_refused(form: str) -> None:
    spec = TrainSpec(task=f"{__name__}:Numbers", args={"form": form}, batch_size=8, stop={"steps": 1})
    if form in [*Numbers.forms][-5:]:
        validate_run(spec)
        return
    with pytest.raises(
        ConfigError, match=r"Task\.loss = .* compares each of \[2, 1\] with each of \[2\].*outputs\.squeeze\(1\)"
    ):
        validate_run(spec)


@pytest.mark.parametrize(
    ("layer", "shape", "taken"),
    [
        (nn.Conv2d(3, 4, 3), (2, 1, 8, 8), r"takes float32 \[N, 3, \.\.\], and got float32 \[2, 1, 8, 8\]"),
        (nn.BatchNorm1d(5), (2, 4), r"takes float32 \[N, 5, \.\.\], and got float32 \[2, 4\]"),
        (nn.LayerNorm(5), (2, 4), r"LayerNorm.*got float32 \[2, 4\] \(Given normalized_shape=\[5\]"),
        (nn.LSTM(5, 2), (2, 3, 4), r"takes float32 \[\.\., 5\]"),
        (nn.Bilinear(5, 4, 3), (2, 4), r"Bilinear.*got float32 \[2, 4\]"),
    ],
)
def test_each_layer_has_its_words(layer: nn.Module, shape: tuple[int, ...], taken: str) -> None:
    batch = torch.zeros(shape)
    with pytest.raises(ConfigError, match=taken), explain_shapes(Pictures(), layer, batch):
        layer(batch)


def test_an_error_of_the_users_own_code_stays_as_it_is() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x[:, :1]]).reshape(-1)

    with pytest.raises(RuntimeError, match="Sizes of tensors"), explain_shapes(Pictures(), Own(), torch.zeros(2, 3)):
        Own()(torch.zeros(2, 3))


def test_a_dict_is_told_with_its_names_and_the_one_that_it_lacks() -> None:
    batch = {"x": torch.zeros(2), "more": (torch.zeros(1, 3), "text")}
    assert describe_shapes(batch) == "x float32 [2], more float32 [1, 3], str"
    lacks = r"'Pictures': reads 'label', which the batch does not have\. it is x float32 \[2\], more"
    with pytest.raises(ConfigError, match=lacks), explain_shapes(Pictures(), nn.Identity(), batch):
        batch["label"]
    with pytest.raises(KeyError), explain_shapes(Pictures(), nn.Identity(), batch):
        {}["x"]


def test_a_missing_file_is_told_before_a_missing_field() -> None:
    with pytest.raises(ConfigError, match=r"task = 'nowhere\.py:Net': there is no file nowhere\.py"):
        validate_run(TrainSpec(task="nowhere.py:Net"))
