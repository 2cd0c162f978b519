"""Micro-batches of ever other shapes in a pipeline, which differ between data ranks; some of them are seen again."""

from __future__ import annotations

import pytest
import torch
from cases import SEED, whole_gradients
from torch import Tensor, nn

from learnable import Classifier
from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.pipeline.stages import ScheduleCache, shape_key

CPU = torch.device("cpu")
LENGTHS = [(5, 5), (5, 3), (4, 5), (3, 4), (2, 2), (5, 3)]  # of the samples of each data rank, by step


class Cut(Classifier):
    cuts: list[str] | None = ["4"]  # noqa: RUF012


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def _share(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    length = LENGTHS[step][rank]
    features = torch.randn(4, length, 6, generator=generator)
    return features, torch.randint(0, 3, (4, length), generator=generator)


def _stepped(world: World, shard: bool) -> list[dict[str, Tensor | None]]:
    """The gradients of each step. Three schedules are kept, of four that there are."""
    from shoal.parallel.pipeline import stages

    stages.MAX_SCHEDULES = 3
    spec = ParallelSpec.parse({"data": 2, "pipeline": 2, "micro_batches": 2, "shard": shard})
    degrees = spec.resolve_dims(world.size)
    at = degrees.coordinates(world.rank).data
    parallel = parallelize(_model(), Cut(), spec, degrees, world, _share(0, at), SEED)
    found = []
    for step in range(len(LENGTHS)):
        parallel.train_step(_share(step, at), step)
        found.append(whole_gradients(parallel.named_parameters()))
    parallel.close()
    return found


@pytest.mark.parametrize("shard", [False, True])
def test_shapes_may_change_and_differ_between_data_ranks(shard: bool) -> None:
    """Tolerance 1e-5: fp32 sums in another order."""
    ranks = run_ranks(_stepped, 4, shard)
    for step in range(len(LENGTHS)):
        model, learnable = _model(), Cut()
        for rank in (0, 1):
            share = _share(step, rank)
            share_of_labels = LENGTHS[step][rank] / sum(LENGTHS[step])  # the loss is a mean over labels
            (learnable.loss(model(share[0]), share) * share_of_labels).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        for found in ranks:
            assert found[step]
            for name, gradient in found[step].items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


def test_the_newest_schedules_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.parallel.pipeline.stages.MAX_SCHEDULES", 2)
    kept, forms = ScheduleCache(None, CPU), [shape_key((torch.zeros(2, length), torch.zeros(2))) for length in range(3)]
    for number, form in enumerate(forms[:2]):
        assert kept.is_missing(form)
        kept.put(form, number, {})
    assert kept.get(forms[0]) == (0, {})
    kept.put(forms[2], 2, {})
    assert [form in kept for form in forms] == [True, False, True]  # that of the second was not used for longest
    assert not kept.is_missing(forms[0])
