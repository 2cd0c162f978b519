"""Each recipe from its file: trained in this process as a user would, and under every plan that applies to it."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from programs import run_ranks
from shoal.data import Loader
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.train.task import make_task

Weights = dict[str, torch.Tensor]
JOBS = Path(__file__).parents[2] / "jobs"
BATCH_SIZE, STEPS = 16, 3
# float32 sums over 16 samples and at most 400 features in another order, through three steps
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}

SMALL: dict[str, dict[str, Any]] = {
    "lenet": {},
    "transformer": {"width": 16, "heads": 2, "context": 16},
    "forecaster": {"num_hours": 400, "window": 8, "horizon": 4, "hidden": 8},
    "trees": {"files": 10, "max_nodes": 100, "width": 8, "hidden": 16},
}
PLANS = {
    "ddp": list(SMALL),
    "fsdp": list(SMALL),
    "pipeline": ["lenet", "transformer", "forecaster"],  # no two batches of trees have one shape
    "tensor": ["lenet", "transformer"],  # an LSTM is not split
}


def trained(world: World, recipe: str, plan: str) -> Weights:
    """The weights after three steps of plain descent on the same global batch, on rank 0."""
    task = make_task(str(JOBS / f"{recipe}.py"), SMALL[recipe])
    spec = ParallelSpec.model_validate(plan)
    degrees = spec.resolve_dims(world.size)
    torch.manual_seed(0)
    model = task.model()
    share = (degrees.coordinates(world.rank).data, degrees.data)
    data = task.data()
    loader = Loader(data.train, batch_size=BATCH_SIZE, share=share, seed=1, collate=data.collate)
    batches = [(batch, loader.relative_share) for _, batch in zip(range(STEPS), loader, strict=False)]
    parallel = parallelize(model, task, spec, degrees, world, batches[0][0])
    optimizer = torch.optim.SGD([{"params": [each for _, each in parallel.named_parameters()]}], lr=0.1)
    for step, (batch, weight) in enumerate(batches):
        parallel.train_step(batch, step, weight)
        optimizer.step()
        parallel.on_optimizer_step()
    weights = parallel.full_weights()
    parallel.close()
    loader.close()
    return weights


def trained_under_every_plan(world: World) -> dict[tuple[str, str], Weights]:
    """By plan and recipe, one after the other in the same group: starting processes is what takes time."""
    return {(plan, recipe): trained(world, recipe, plan) for plan, recipes in PLANS.items() for recipe in recipes}


@functools.cache
def of_two_workers() -> dict[tuple[str, str], Weights]:
    return run_ranks(trained_under_every_plan, 2)[0]


@functools.cache
def of_one_process(recipe: str) -> Weights:
    return trained(World.single("cpu"), recipe, "single")


@pytest.mark.parametrize(("plan", "recipe"), [(plan, recipe) for plan, recipes in PLANS.items() for recipe in recipes])
def test_two_workers_make_the_network_of_one(plan: str, recipe: str) -> None:
    found, expected = of_two_workers()[plan, recipe], of_one_process(recipe)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, **TOLERANCE), name


@pytest.mark.parametrize("recipe", SMALL)
def test_a_recipe_trains_from_its_file_and_is_registered(recipe: str) -> None:
    import shoal.runs
    from shoal.registry import Registry
    from shoal.train.launch.local import fit_locally
    from shoal.train.launch.overrides import load_recipe

    path = str(JOBS / f"{recipe}.py")
    spec = load_recipe(path).model_copy(update={"args": SMALL[recipe]})
    words = ["stop.epochs=null", "stop.target=null", "stop.convergence=null", "stop.steps=4", "evaluate.every_steps=4"]
    outcome = fit_locally(spec.override([*words, "threads=1", "loader.workers=0"]))
    assert (outcome.reason, outcome.steps) == ("steps", 4)
    assert np.isfinite(list(outcome.metrics.values())).all()
    assert Registry().get(f"{spec.name}@champion").manifest.metrics == outcome.metrics
    data = shoal.runs.load(outcome.run_id).last_events()["data"]
    assert {"train", "validation"} <= data.keys()


def test_the_registered_network_of_trees_is_served_as_its_file_says() -> None:
    """Requests may have trees of several sizes."""
    from shoal.flows.serving_spec import check, load_serving_spec
    from shoal.libs.trees.syntax_tree import KINDS
    from shoal.registry import Registry
    from shoal.serve.model.predictor import Predictor
    from shoal.serve.spec.model_source import ModelPackage, RegisteredModel
    from shoal.train.launch.local import fit_locally
    from shoal.train.launch.overrides import load_recipe

    recipe = load_recipe(str(JOBS / "trees.py")).model_copy(update={"args": SMALL["trees"]})
    fit_locally(recipe.override(["stop.epochs=null", "stop.steps=2", "loader.workers=0", "threads=1"]))
    spec = load_serving_spec(JOBS.parent / "serve_apps" / "trees.yaml")
    check(spec)
    package: ModelPackage = RegisteredModel("trees", Registry().location).load_package(1)
    assert [(each.name, each.shape) for each in package.signature.inputs] == [
        *(("tokens", [-1, -1]), ("parents", [-1, -1]))
    ]
    model: Any = Predictor(package.factory, package.signature, spec.endpoint.options("trees")).load(package.snapshot)
    chain = ([3, 4, 5], [-1, 0, 1])
    flat = ([9, 2, 2, 2], [-1, 0, 0, 0])
    single = ([7], [-1])

    def pad_trees(trees: Any) -> dict[str, np.ndarray]:
        columns = [[torch.tensor(each) for each in column] for column in zip(*trees, strict=True)]
        padded = [pad_sequence(each, batch_first=True, padding_value=-1).numpy() for each in columns]
        return dict(zip(("tokens", "parents"), padded, strict=True))

    answers = model.predict_batch([pad_trees(each) for each in ([chain, single], [flat], [single])])
    assert [each["logits"].shape for each in answers] == [(2, 3, len(KINDS)), (1, 4, len(KINDS)), (1, 1, len(KINDS))]
