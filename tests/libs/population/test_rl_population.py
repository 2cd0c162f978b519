"""A population of learners: it learns, copies in memory, replaces a member whose weights are lost, and goes on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.runs
from leftovers import children_of
from shoal.errors import ConfigError
from shoal.flows.rl_policy import inspect_environment
from shoal.libs.population.lineage import Lineage
from shoal.libs.population.loop import run
from shoal.libs.population.loop.members import LoopMember, is_finite
from shoal.libs.population.loop.run import check_rl_population, run_rl_population
from shoal.libs.population.loop.spec import RLPopulationSpec
from shoal.registry import Registry
from shoal.rl.spec import RLSpec
from shoal.runs import RunKind, Status
from sign_job import spec as sign_job

LEARN = {name: getattr(sign_job(), name) for name in RLSpec.model_fields}


def spec_of(**fields: Any) -> RLPopulationSpec:
    small = {"members": 3, "rounds": 3, "steps_per_round": 1500, "model_name": "sign"}
    space = {"algorithm.learning_rate": "log(1e-5,5e-2)", "algorithm.entropy_cost": "log(1e-4,1e-1)"}
    return RLPopulationSpec.parse({**LEARN, "space": space, **small, **fields})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"algorithm": "dqn"}, "its learner has a replay"),
        ({"space": {"hidden": "choice(8,16)"}}, "cannot change 'hidden' while it learns"),
        ({"space": {"algorithm.entropy_cost": "uniform(-1,1)"}}, "entropy_cost = -1.0"),
        ({"members": 1}, "needs 2 at least"),
        ({"learner": {"replicas": 2}}, "is one process"),
        ({"gateway": {"port": 5555}}, "a free port"),
        ({"learn_from_endpoint": True}, "no endpoint"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_rl_population(spec_of(**fields))


@pytest.mark.usefixtures("drawn_report")
def test_a_population_learns_although_one_learner_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_round = LoopMember.begin_round
    rounds = [0]
    replaced = []

    def spoil(member: LoopMember, num_steps: int, min_episodes: int) -> None:
        if member.number == 1:
            rounds[0] += 1
            if rounds[0] == 2:
                for each in member.loop.learner.model.parameters():
                    each.data.fill_(torch.nan)
            elif rounds[0] == 3:
                replaced.append(is_finite(member.loop.learner.model.state_dict()))
        begin_round(member, num_steps, min_episodes)

    monkeypatch.setattr(LoopMember, "begin_round", spoil)
    record = shoal.runs.load(run_rl_population(spec_of()))
    assert (record.kind, record.status) == (RunKind.POPULATION, Status.FINISHED)
    assert children_of(os.getpid(), "shoal.actor") == []
    lineage = Lineage.from_events(record.list_events("round"))
    assert lineage.num_rounds == 3
    second = lineage.rounds[1]
    assert (second["scores"][1], second["retired"]) == (None, [1])
    source = dict(second["copies"])[1]
    assert lineage.rounds[2]["ancestors"][1][-1] == [2, source]
    assert replaced == [True]
    assert lineage.rounds[2]["scores"][1] is not None
    values = second["hyper_parameters"]["algorithm.learning_rate"]
    assert lineage.rounds[2]["hyper_parameters"]["algorithm.learning_rate"][1] != values[1]  # explored
    best = max(score for each in lineage.rounds for score in each["scores"] if score is not None)
    assert best > 6.0  # of 8; 4 by chance
    manifest = Registry().get("sign@1").manifest
    assert manifest.metrics == {"mean_return": best}
    assert manifest.lineage["schedule"][-1]["last_round"] == manifest.lineage["round"]
    assert "genealogy" in (record.folder / "report.html").read_text().lower()


def test_a_population_that_was_interrupted_goes_on_from_its_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    apply, states = run.RLPopulation._apply, []

    def die(population: run.RLPopulation, *decisions: Any) -> None:
        if population.state.round == 2:
            raise Killed
        apply(population, *decisions)
        states.extend(member.copy_state()["model"] for member in population.members)

    small = {"members": 2, "rounds": 2, "steps_per_round": 200}
    with monkeypatch.context() as patched:
        patched.setattr(run.RLPopulation, "_apply", die)
        with pytest.raises(Killed):
            run_rl_population(spec_of(**small))
    (before,) = shoal.runs.list_runs()
    begin, first = LoopMember.begin_round, {}

    def note(member: LoopMember, *round_of: int) -> None:
        first.setdefault(member.number, member.copy_state()["model"])
        begin(member, *round_of)

    monkeypatch.setattr(LoopMember, "begin_round", note)
    run_rl_population(spec_of(**small, resume=before.id))
    for number, state in enumerate(states):  # as the first round had left them
        assert all(torch.equal(first[number][name], each) for name, each in state.items())
    record = shoal.runs.load(before.id)
    lineage = Lineage.from_events(record.list_events("round"))
    assert (record.status, lineage.num_rounds) == (Status.FINISHED, 2)


def test_a_learner_takes_anothers_state_and_its_own_numbers_without_a_restart(tmp_path: Path) -> None:
    spec = spec_of()
    experience, _ = inspect_environment(spec)
    made = [
        LoopMember(number, spec.make_member_spec(number, {}), experience, tmp_path / str(number), 1)
        for number in range(2)
    ]
    winner, loser = made
    winner.loop.learner.algorithm._optimizer.param_groups[0]["lr"] = 0.5  # type: ignore[attr-defined]
    version = loser.loop.learner.version
    loser.replace_state(winner.copy_state())
    mine, others = loser.loop.learner.model.state_dict(), winner.loop.learner.model.state_dict()
    assert all(torch.equal(mine[name], others[name]) for name in others)
    assert all(mine[name].data_ptr() != others[name].data_ptr() for name in others)
    assert loser.loop.store.latest().version == version + 1
    assert loser.loop.learner.algorithm._optimizer.param_groups[0]["lr"] == 0.02  # type: ignore[attr-defined]
    loser.configure(spec.make_member_spec(1, {"algorithm.learning_rate": 0.3, "algorithm.entropy_cost": 0.7}))
    assert loser.loop.learner.algorithm._optimizer.param_groups[0]["lr"] == 0.3  # type: ignore[attr-defined]
    assert loser.loop.learner.algorithm._config.entropy_cost == 0.7  # type: ignore[attr-defined]
    for each in made:
        each.loop.close()
