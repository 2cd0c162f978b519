"""Augmentations of many members, and ensembles: against plain computations of one member, one image at a time."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.libs.population.augmentation import Augmentation, augment_batch, brightness, erase, flip, noise, shift
from shoal.libs.population.ensemble import Ensemble, average_logits, fit_temperatures

PAGE = Path(__file__).parents[3] / "docs" / "libs" / "population.md"
ALL = {"shift": shift, "flip": flip, "erase": erase, "noise": noise, "brightness": brightness}


def make_generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("shape", [(8, 8), (3, 6, 9)])
@pytest.mark.parametrize("augmentation", ALL.values(), ids=ALL)
def test_a_member_has_the_draws_of_its_solo_run(augmentation: Augmentation, shape: tuple[int, ...]) -> None:
    images = torch.randn(5, *shape)
    strengths = torch.tensor([0.3, 0.0, 0.8])
    together = augmentation(images.expand(3, *images.shape), strengths, make_generators(1, 2, 3))
    assert together.shape == (3, *images.shape)
    for member in range(3):
        alone = augmentation(images[None], strengths[member, None], make_generators(member + 1))
        torch.testing.assert_close(together[member], alone[0], rtol=0, atol=0)
    torch.testing.assert_close(together[1], images, rtol=0, atol=0)  # a strength of 0 changes nothing


def test_a_shifted_image_is_the_image_moved_by_integers_up_to_its_strength() -> None:
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 1, 8, 8).expand(1, 40, 1, 8, 8)
    moved = shift(image, torch.tensor([2.0]), make_generators(0))
    padded = nn.functional.pad(image[0, :1].float(), (2, 2, 2, 2), mode="replicate")[0, 0].byte()
    possible = [padded[row : row + 8, column : column + 8] for row in range(5) for column in range(5)]
    found = {index for each in moved[0, :, 0] for index, one in enumerate(possible) if torch.equal(each, one)}
    assert all(any(torch.equal(each, one) for one in possible) for each in moved[0, :, 0])
    assert len(found) > 10


def test_an_erased_square_has_the_side_of_its_strength() -> None:
    erased = erase(torch.ones(1, 50, 1, 20, 20), torch.tensor([0.4]), make_generators(0))
    gone = (erased == 0).flatten(2).sum(-1)
    assert gone.max() == 8 * 8  # less where the square reaches beyond the border
    assert gone.min() > 0


def test_flips_have_the_probability_of_their_strength() -> None:
    images = torch.arange(4.0).view(1, 1, 1, 4).expand(2, 2000, 1, 1, 4)
    flipped = flip(images, torch.tensor([0.25, 1.0]), make_generators(0, 1))
    share = (flipped[..., 0] == 3).float().mean((1, 2, 3))
    assert share[0] == pytest.approx(0.25, abs=0.04)  # four standard deviations
    assert share[1] == 1


@pytest.mark.parametrize("kind", ["tuple", "mapping", "tensor"])
def test_a_batch_of_any_kind_has_its_inputs_augmented_and_its_targets_as_they_were(kind: str) -> None:
    images, targets = torch.randn(6, 1, 4, 4), torch.arange(6)
    both = images.expand(2, 6, 1, 4, 4), targets.expand(2, 6)
    batch = {"tuple": both, "mapping": {"inputs": both[0], "targets": both[1]}, "tensor": both[0]}[kind]
    strengths = {"brightness": torch.tensor([0.0, 0.5])}
    own = augment_batch(batch, ALL, strengths, make_generators(1, 2))
    inputs = own if isinstance(own, Tensor) else own["inputs"] if isinstance(own, dict) else own[0]
    torch.testing.assert_close(inputs[0], images)
    assert not torch.allclose(inputs[1], images)
    if not isinstance(own, Tensor):
        kept = own["targets"] if isinstance(own, dict) else own[1]
        assert kept.tolist() == [list(range(6))] * 2


def test_temperatures_minimise_the_likelihoods_loss() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4000, 5, generator=random)
    targets = torch.distributions.Categorical(logits=logits[0]).sample()
    distorted = torch.cat([logits * 3, logits * 0.4])  # overconfident, underconfident
    found = fit_temperatures(distorted, targets)
    for member, temperature in enumerate(found):
        losses = [
            nn.functional.cross_entropy(distorted[member] / (temperature * factor), targets, label_smoothing=1 / 4001)
            for factor in (0.98, 1.0, 1.02)
        ]
        assert losses[1] < min(losses[0], losses[2])
    assert found[0] / found[1] == pytest.approx(3 / 0.4, rel=1e-4)


def test_a_member_that_is_right_in_every_sample_does_not_become_certain() -> None:
    """Of three samples a fourth, of any class, may be missed: a third of 1/4 for each wrong class."""
    always_right = torch.eye(3)[None] * 5
    temperature = fit_temperatures(always_right, torch.arange(3))[0]
    probabilities = (always_right[0] / temperature).softmax(-1)
    torch.testing.assert_close(probabilities, torch.full((3, 3), 1 / 12) + 0.75 * torch.eye(3))


def test_an_ensemble_of_networks_with_several_outputs_averages_each() -> None:
    class TwoHeads(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"mean": inputs * self.value, "spread": inputs + self.value}

    found = Ensemble([TwoHeads(1.0), TwoHeads(3.0)], is_classifier=False)(torch.ones(2, 1))
    assert {name: each.flatten().tolist() for name, each in found.items()} == {"mean": [2, 2], "spread": [3, 3]}


def test_averaged_probabilities_are_probabilities_and_not_averaged_logits() -> None:
    logits = torch.tensor([[[4.0, 0.0]], [[0.0, 0.0]]])
    mean = average_logits(logits, torch.ones(2), torch.ones(())).exp()
    expected = (logits.softmax(-1)[0] + 0.5) / 2
    torch.testing.assert_close(mean, expected)


def test_the_pages_python_runs() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, PAGE.name, "exec"), names)
    faded = names["MyTask"]().augmentations()["fade"](
        torch.ones(2, 50, 3, 3), torch.tensor([0.0, 0.5]), make_generators(0, 1)
    )
    assert (faded[0] == 1).all()
    assert 0.5 <= faded[1].min() < faded[1].max() < 1
    assert names["losses"][names["best"]] < names["losses"][names["worst"]]


def test_an_ensemble_of_regressors_averages_outputs() -> None:
    members = [nn.Linear(3, 2), nn.Linear(3, 2)]
    inputs = torch.randn(4, 3)
    expected = (members[0](inputs) + members[1](inputs)) / 2
    torch.testing.assert_close(Ensemble(members, is_classifier=False)(inputs), expected)
