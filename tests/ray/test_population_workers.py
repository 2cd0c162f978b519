"""A population whose members are in several Ray workers: the same lineage as in one process."""

from typing import Any

import pytest
import torch

import shoal.runs
from shoal.errors import SpecMismatch
from shoal.libs.population.flow.build import build_population
from shoal.libs.population.flow.ray_members import RayMembers
from shoal.libs.population.flow.run import run_population
from shoal.libs.population.spec import PopulationSpec
from train_task import Toy

FIELDS: dict[str, Any] = {
    "task": "tests/train_task.py:Toy",
    "members": 5,
    "rounds": 3,
    "steps_per_round": 6,
    "batch_size": 8,
    "space": {"optimizer.learning_rate": "log(1e-3, 1e-1)"},
    "metric": "loss",
    "evolution": "pbt",
    "engine": "looped",
    "threads": 1,
    "name": "toys",
}


def read_rounds(run_id: str) -> list[dict[str, Any]]:
    events = shoal.runs.load(run_id).events()
    return list(events[events["kind"] == "round"]["details"])


@pytest.mark.parametrize("order", ["shared", pytest.param("own", marks=pytest.mark.soak)])
@pytest.mark.usefixtures("cluster")
def test_members_in_workers_are_those_of_one_process(order: str) -> None:
    one = run_population(PopulationSpec.parse({**FIELDS, "order": order}), registers=False)
    several = run_population(PopulationSpec.parse({**FIELDS, "order": order, "workers": 2}), registers=False)
    rounds = read_rounds(several.run_id)
    assert rounds == read_rounds(one.run_id)
    shares = (range(2), range(2, 5))
    copies = [pair for each in rounds for pair in each["copies"]]
    assert any(loser in mine and winner not in mine for loser, winner in copies for mine in shares)  # between workers


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_one_worker_goes_on_with_the_state_of_members_in_this_process() -> None:
    """A run that is resumed on a cluster with another number of GPUs: members on one are in a worker."""
    spec, values = PopulationSpec.parse(FIELDS), [{"optimizer.learning_rate": 0.1}] * 5
    with build_population(spec, Toy(), torch.device("cpu"), values) as population:
        members = RayMembers(spec, values)
        try:
            members.load_state_dict(population.state_dict())
            population.load_state_dict(members.state_dict())
        finally:
            members.close()


@pytest.mark.usefixtures("cluster")
def test_a_worker_whose_members_are_all_retired_trains_and_scores_none_and_a_state_of_others_is_rejected() -> None:
    spec = PopulationSpec.parse({**FIELDS, "workers": 2})
    members = RayMembers(spec, [{"optimizer.learning_rate": 0.1}] * 5)
    batch = (torch.randn(8, 8), torch.arange(8), torch.arange(8) % 3)
    try:
        for member in (0, 1):
            members.retire(member)
        results = list(members.train([batch]))
        assert sorted(member for each in results for member in each.members) == [2, 3, 4]
        assert members.evaluate([batch])["loss"].isnan().tolist() == [True, True, False, False, False]
        with pytest.raises(SpecMismatch, match="use workers=3"):
            members.load_state_dict({"shares": [{}, {}, {}]})
    finally:
        members.close()
