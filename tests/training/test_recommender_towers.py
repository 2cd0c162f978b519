"""The two towers of `jobs/recommender.py`: what they see, what they are judged by, and from training to the page."""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import served
from shoal.errors import ConfigError, DataError
from shoal.registry import Registry
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import ModelPackage, RegisteredModel
from shoal.train.launch.overrides import load_recipe
from shoal.train.task import Task, load_task_file, make_task

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "recommender.py"
sys.path.append(str(ROOT / "serve_apps" / "recommender"))


def recipe() -> Any:
    return load_task_file(JOB, "recommender")


def task_of(**args: object) -> Task:
    return make_task(str(JOB), {"num_ratings": 6000, "num_films": 800, "width": 8, **args})


def test_the_recipe_is_a_spec_whose_parts_can_be_removed() -> None:
    spec = load_recipe(str(JOB))
    assert (spec.name, spec.stop.is_empty) == ("movies", False)
    for args in task_of().parts.values():
        assert sum(each.numel() for each in task_of(**args).model().parameters()) > 0


def test_padding_and_unknown_films_change_nothing() -> None:
    torch.manual_seed(0)
    towers = recipe().TwoTower(10, 8, 0.2, True).eval()
    history, stars = torch.tensor([[3, 4]]), torch.tensor([[5.0, 1.0]])
    candidates = torch.tensor([[1, 2, 7, 11, 0, 99]])
    scores = towers(history, stars, candidates)
    assert scores[0, 3] == scores[0, 4] == scores[0, 5]
    assert torch.unique(scores[0, :4]).numel() == 4
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(towers(history, stars, candidates[:, order]), scores[:, order])
    zeros = towers(torch.tensor([[3, 4, 0, 0]]), torch.tensor([[5.0, 1.0, 2.0, 4.0]]), candidates)
    torch.testing.assert_close(zeros, scores)
    assert not torch.allclose(towers(history, stars.flip(1), candidates), scores)


def test_validation_has_nothing_of_a_viewers_future() -> None:
    user = np.array([1, 2, 1, 1, 2, 3, 1])
    stars = np.array([4, 3, 5, 4, 2, 5, 1.0])
    train, validation = recipe().split_last_liked(user, np.arange(7), stars)
    assert validation.tolist() == [3]  # viewer 2 liked none, viewer 3 has none before
    assert train.tolist() == [0, 1, 2, 4]


def test_a_history_is_the_newest_first() -> None:
    film, stars = np.array([10, 11, 12, 20]), np.array([1.0, 2.0, 3.0, 4.0])
    found, given = recipe().gather_history(film, stars, np.array([0, 0, 3]), np.array([3, 1, 3]), 2)
    assert found.tolist() == [[12, 11], [10, 0], [0, 0]]
    assert given.tolist() == [[3.0, 2.0], [1.0, 0.0], [0.0, 0.0]]


def test_candidate_zero_is_the_liked_film_and_the_metrics_count_it() -> None:
    data = task_of().data()
    train, test = data.train, data.validation
    np.random.seed(0)
    history, stars, candidates, *_ = train.batch(np.arange(len(train)))  # type: ignore[union-attr]
    assert (history[:, 0] > 0).all()
    assert (candidates[:, :1] != candidates[:, 1:]).all()
    assert stars.max() <= 5.0
    batch = test.batch(np.arange(len(test)))  # type: ignore[union-attr]
    assert all(len(set(row[row > 0].tolist())) == (row > 0).sum() for row in batch[2])
    scores = torch.zeros(batch[2].shape)
    scores[:, 0] = 1.0
    found = {name: float(value) for name, value in task_of().metrics(scores, batch).items()}
    assert found["hit_rate"] == found["found_rate"] >= found["hit_rate_factors"] >= 0
    scores[:, 0] = -1.0
    assert float(task_of().metrics(scores, batch)["hit_rate"]) == 0.0


def test_more_films_than_rows_and_two_sources_are_named() -> None:
    with pytest.raises(ConfigError, match=r"args.num_films = 100: there are 800 films. give as many or more"):
        task_of(num_films=100).data()
    with pytest.raises(ConfigError, match=r"args.database = 'x': there is a folder too"):
        task_of(folder="y", database="x")
    with pytest.raises(DataError, match=r"args.database = '.*none.sqlite': cannot be read: unable to open"):
        task_of(database="none.sqlite").data()


@pytest.mark.parametrize("ratings", ["1,1,5,1\n", "1,1,2,1\n1,2,1,2\n2,1,3,3\n", "1,1,5,1\n1,2,5,2\n2,1,3,3\n"])
def test_ratings_from_which_nothing_can_be_learnt_are_named(ratings: str, tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n{ratings}")
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,A,x\n2,B,y\n")
    with pytest.raises(DataError, match=rf"ratings = '{tmp_path}': its \d ratings have too few films with 4 stars"):
        task_of(folder=str(tmp_path)).data()


def test_the_sites_database_is_read_with_each_pairs_newest_rating(tmp_path: Path) -> None:
    path = tmp_path / "ratings.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE films_film (id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TABLE films_rating (id INTEGER PRIMARY KEY, viewer_id, film_id, stars)")
        with pytest.raises(DataError, match="has no ratings"):
            recipe().read_database(path)
        connection.execute("INSERT INTO films_film VALUES (1), (2), (9)")
        connection.execute("INSERT INTO films_rating VALUES (1, 5, 2, 3.0), (2, 5, 1, 4.0), (3, 5, 2, 1.0)")
        connection.commit()
    num_films, user, film, stars = recipe().read_database(path)
    assert (num_films, user.tolist(), film.tolist(), stars.tolist()) == (9, [0, 0], [1, 2], [4.0, 1.0])


def test_from_training_to_an_order_on_the_site() -> None:
    """Trained and registered, served by the platform's protocol, asked by the site's client."""
    from films.rerank import Reranker

    spec = load_recipe(str(JOB)).override(
        ["stop.epochs=1", "stop.convergence=null", "args.num_ratings=4000", "args.num_films=800", "args.width=8"]
    )
    shoal.fit(spec)
    version = Registry().get("movies@champion")
    assert version.version == 1
    package: ModelPackage = RegisteredModel("movies", Registry().location).load_package(1)
    predictor: Any = Predictor(package.factory, package.signature, ModelOptions())
    loaded = predictor.load(package.snapshot)
    model = FakeModel(
        "movies", package.signature.inputs, package.signature.outputs, lambda each: loaded.predict_batch([each])[0],
        versions=(1,),
    )  # fmt: skip
    rated = np.array([3, 4])
    ratings = np.array([5.0, 1.0])
    candidates = np.arange(10, 210)
    with served(FakeHost(model), token=None) as (url, _), closing(Reranker(url, "movies", 60.0)) as reranker:
        found = reranker.rerank(rated, ratings, candidates)
    assert (found.outcome, found.version) == ("reranked", 1)
    module = package.factory.build().eval()
    tensors = {name: torch.from_numpy(value) for name, value in package.snapshot.tensors().items()}
    module.load_state_dict(tensors)
    scores = module(torch.tensor([[3, 4]]), torch.tensor([[5.0, 1.0]]), torch.from_numpy(candidates)[None])[0]
    assert (np.diff(scores.detach().numpy()[found.order]) <= 1e-5).all()


def test_stars_of_a_history_are_clipped_to_the_scale_and_what_is_none_is_rejected_by_its_film() -> None:
    def prepare(*stars: float) -> np.ndarray:
        history = np.array([[3, 4, 0]])
        arrays = {"history": history, "ratings": np.array([stars], np.float32), "candidates": history}
        return np.asarray(task_of().preprocess(arrays)["ratings"])

    found = prepare(50, 0, np.nan)  # padding has no stars
    assert (found.dtype, found.tolist()) == (np.float32, [[5, 0.5, 0]])
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match=f"film 4 has {wrong} stars, give a number"):
            prepare(5, wrong, 0)
