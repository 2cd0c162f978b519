"""Self-organising maps: the batch rule against its definition, the search against brute force, and the recipe."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal.runs
from blocks import run_blocks
from shoal.cli.commands.run_session import RunArguments, RunSession
from shoal.cli.support.console import make_literal_console
from shoal.errors import ConfigError, DataError
from shoal.libs.som import network as engine
from shoal.libs.som.network import (
    Grid,
    SelfOrganisingMap,
    UnitSearch,
    compute_sigma,
    compute_u_matrix,
    draw_weights,
    find_units,
    fit_epoch,
    measure_errors,
)
from shoal.registry import Registry
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions

ROOT = Path(__file__).parents[3]
GRIDS = [
    Grid(4, 6, hexagonal=hexagonal, toroidal=toroidal) for hexagonal in (False, True) for toroidal in (False, True)
]


@pytest.fixture
def som(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe, as a module that a worker's process can import too."""
    monkeypatch.syspath_prepend(str(ROOT / "jobs"))
    sys.modules.pop("som", None)
    import som

    return som


def rows_of(num_rows: int, num_features: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(5, num_features, generator=random, dtype=torch.float64)
    kinds = torch.randint(5, (num_rows,), generator=random)
    return (centres[kinds] + torch.randn(num_rows, num_features, generator=random, dtype=torch.float64)).to(dtype)


def naive_distance(grid: Grid, first: int, second: int) -> float:
    """On the grid, by trying all nine copies of a torus."""
    places = []
    for node in (first, second):
        row, column = divmod(node, grid.columns)
        places.append((row * (math.sqrt(3) / 2 if grid.hexagonal else 1), column + grid.hexagonal * (row % 2) / 2))
    height = grid.rows * (math.sqrt(3) / 2 if grid.hexagonal else 1)
    copies = [(a * height, b * grid.columns) for a in (-1, 0, 1) for b in (-1, 0, 1)] if grid.toroidal else [(0, 0)]
    return min(math.hypot(places[0][0] - places[1][0] + y, places[0][1] - places[1][1] + x) for y, x in copies)


def naive_epoch(rows: np.ndarray, weights: np.ndarray, grid: Grid, sigma: float) -> np.ndarray:
    """w_k = sum_i h(c_i, k) x_i / sum_i h(c_i, k), row by row."""
    units = [int(((row - weights) ** 2).sum(1).argmin()) for row in rows]
    new = np.empty_like(weights)
    for node in range(grid.num_nodes):
        pull = np.array([math.exp(-(naive_distance(grid, unit, node) ** 2) / (2 * sigma**2)) for unit in units])
        new[node] = (pull[:, None] * rows).sum(0) / pull.sum()
    return new


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_an_epoch_is_the_batch_rule_on_every_grid(grid: Grid) -> None:
    rows, weights = rows_of(60, 3), rows_of(grid.num_nodes, 3, seed=1)
    for sigma in (1.7, 0.8):
        (found,) = fit_epoch(rows, weights[None], grid, [sigma])
        np.testing.assert_allclose(found.numpy(), naive_epoch(rows.numpy(), weights.numpy(), grid, sigma), rtol=1e-10)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_neighbours_are_the_nodes_one_apart(grid: Grid) -> None:
    first, second = grid.find_neighbours()
    limit = 1.2 if grid.hexagonal else 1.5
    nodes = range(grid.num_nodes)
    expected = {(a, b) for a in nodes for b in nodes if a != b and naive_distance(grid, a, b) < limit}
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == expected
    if grid.toroidal:
        assert len(expected) == grid.num_nodes * (6 if grid.hexagonal else 8)


def test_a_node_without_rows_in_reach_keeps_its_weights() -> None:
    grid = Grid(1, 40)
    weights = torch.full((1, 40, 2), 50.0) + torch.arange(40.0)[:, None]
    weights[0, 0] = 0.0
    (new,) = fit_epoch(torch.zeros(5, 2) + torch.tensor([1.0, 0.0]), weights, grid, [0.5])  # exp(-2 39^2) is 0
    assert new[0].tolist() == [1.0, 0.0]
    assert torch.equal(new[39], weights[0, 39])


def test_the_width_decays_exponentially() -> None:
    assert [compute_sigma(epoch, 4, 8.0, 0.5) for epoch in range(5)] == pytest.approx([8, 4, 2, 1, 0.5])
    assert Grid(30, 30).default_sigma == 7.5


# -- the search


def brute_force(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cdist(rows.double(), weights.double(), compute_mode="donot_use_mm_for_euclid_dist").argmin(1)


@pytest.mark.parametrize(("rank", "fewest", "most"), [(4, 5.0, 20.0), (16, 1.2, 3.0), (32, 1.0, 1.0)])
def test_a_screened_search_is_exact(rank: int, fewest: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller the subspace, the more candidates are left, which are compared by their distances."""
    monkeypatch.setattr(engine, "PAIR_COST", 1.0)  # so that no rank is too small to be worth it
    monkeypatch.setattr(engine, "MIN_ROWS", 0)
    rows, grid = rows_of(700, 300), Grid(12, 12)
    weights = grid.smooth(draw_weights(rows, 144, seed=1), 2.0) / grid.smooth(torch.ones(144, 1).double(), 2.0)
    search = UnitSearch(weights, rows[:256], (rank,))
    assert search.rank == rank
    candidates = search._screen(rows - search.centre, search.basis, search.shadows, search.slack).sum(1).mean()
    assert fewest <= candidates <= most
    assert torch.equal(find_units(rows, weights[None], (rank,))[0], brute_force(rows, weights))
    assert torch.equal(find_units(rows, weights[None])[0], brute_force(rows, weights))


def test_a_screen_that_would_leave_most_nodes_is_not_used() -> None:
    rows = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    search = UnitSearch(draw_weights(rows, 200, seed=0), rows)
    assert search.rank == 256
    assert torch.equal(search.find(rows), brute_force(rows, search.weights))


def test_of_equal_nodes_the_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(50, 4)
    weights = rows[:10].repeat_interleave(2, 0)  # every node twice
    (found,) = find_units(rows, weights[None])
    assert set((found % 2).tolist()) == {0}
    assert found[:10].tolist() == list(range(0, 20, 2))
    monkeypatch.setattr(engine, "PAIR_COST", 1.0)
    monkeypatch.setattr(engine, "MIN_ROWS", 0)
    wide = torch.nn.functional.pad(weights, (0, 296)), torch.nn.functional.pad(rows, (0, 296))
    assert UnitSearch(wide[0], wide[1], (8,)).rank == 8
    assert torch.equal(find_units(wide[1], wide[0][None], (8,))[0], found)


def test_stacked_maps_are_the_maps_of_fits_of_their_own() -> None:
    rows, grid = rows_of(400, 300), Grid(6, 6, hexagonal=True)
    stacked = torch.stack([draw_weights(rows, 36, seed) for seed in range(3)])
    alone = [stacked[at : at + 1] for at in range(3)]
    for epoch in range(4):
        sigmas = [compute_sigma(epoch, 4, first, 0.3) for first in (1.0, 1.5, 2.0)]
        stacked = fit_epoch(rows, stacked, grid, sigmas)
        alone = [fit_epoch(rows, each, grid, [sigma]) for each, sigma in zip(alone, sigmas, strict=True)]
    torch.testing.assert_close(stacked, torch.cat(alone), rtol=1e-12, atol=1e-12)


# -- errors, pictures, network


def test_errors_of_a_map_that_can_be_computed_by_hand() -> None:
    """Nodes in a row at 0, 1, 2, 10: the row 1.4 lies between neighbours, and 0.1's second-best unit is one too."""
    weights = torch.tensor([[0.0], [1.0], [2.0], [10.0]])
    rows = torch.tensor([[0.1], [1.4], [9.0]])
    errors = measure_errors(rows, weights, Grid(1, 4))
    assert errors == {"quantisation_error": pytest.approx(0.5), "topographic_error": 0.0, "dead_units": 1.0}
    swapped = weights[[0, 2, 1, 3]]  # 1 is no neighbour of 0 now, nor 2 of 10
    assert measure_errors(rows, swapped, Grid(1, 4))["topographic_error"] == pytest.approx(2 / 3)
    diagonal = weights[[0, 2, 3, 1]]
    assert measure_errors(rows[:1], diagonal, Grid(2, 2))["topographic_error"] == 0.0  # diagonals are neighbours
    assert measure_errors(rows[:1], diagonal, Grid(2, 2, hexagonal=True))["topographic_error"] == 1.0  # not there


def test_the_u_matrix_is_the_mean_distance_to_neighbours() -> None:
    weights = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert compute_u_matrix(weights, Grid(1, 4)).tolist() == [[1.0, 1.5, 3.0, 4.0]]
    assert compute_u_matrix(weights, Grid(2, 2, hexagonal=True)).flatten().tolist() == pytest.approx(
        [2.0, (1 + 2 + 6) / 3, (3 + 2 + 4) / 3, 5.0]
    )


def test_the_network_gives_places_and_distances_of_raw_rows() -> None:
    network = SelfOrganisingMap(2, 3, 2)
    weights = torch.tensor([[0.0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]])
    network.load_state_dict({"weights": weights, "shift": torch.tensor([10.0, 0]), "scale": torch.tensor([2.0, 1])})
    found = network(torch.tensor([[14.0, 1.25], [10.0, -3.0]]))
    assert {name: value.tolist() for name, value in found.items()} == {
        "row": [1, 0], "column": [2, 0], "distance": [0.25, 3.0]
    }  # fmt: skip


def test_the_pages_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("libs/som.md")
    assert "quantisation_error" in capsys.readouterr().out


# -- the recipe


def write_table(path: Path, num_rows: int = 300) -> Path:
    table = rows_of(num_rows, 4).numpy() * [1, 10, 100, 0] + [0, 5, 0, 7]  # the last column is constant
    np.savetxt(path, table, delimiter=",", header="speed,load,torque,site", comments="")
    return path


@pytest.mark.usefixtures("drawn_report")
def test_a_run_leaves_a_registered_map_errors_and_pictures(
    som: ModuleType, tmp_path: Path, shoal_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_table(tmp_path / "table.csv")
    words = [f"data={path}", "rows=6", "columns=5", "grid=hexagonal", "toroidal=true", "epochs=4", "maps=2"]
    errors = som.run_som(som.spec().override([*words, "threads=1"]))
    run = shoal.runs.load("latest")
    assert run.latest()["som/quantisation_error"] == pytest.approx(errors["quantisation_error"])
    assert [details["seed"] for kind, details in run.list_events("map")] == [0, 1]
    assert sorted(each.name for each in (run.folder / "pictures").iterdir()) == [
        "1-u-matrix.png", "2-component-planes.png"
    ]  # fmt: skip
    assert (run.folder / "report.html").read_text().count("data:image/png;base64") == 2
    version = Registry().get("som@champion")
    assert version.manifest.metrics == pytest.approx(errors)
    signature = version.manifest.signature
    assert (signature.inputs[0].datatype, signature.inputs[0].columns) == ("FP64", ["speed", "load", "torque", "site"])
    predictor = Predictor(version.manifest.model, signature, ModelOptions())  # as a replica has it
    raw = som.read_table(path)[0]
    [answer] = predictor.load(version.snapshot()).predict_batch([{"rows": raw}])
    assert answer["distance"].mean() == pytest.approx(errors["quantisation_error"], rel=1e-4)
    assert (answer["row"].max(), answer["column"].max()) == (5, 4)
    assert "registered som@1" in capsys.readouterr().out


def test_shoal_run_ends_with_a_summary_of_the_map(
    som: ModuleType, tmp_path: Path, shoal_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"data={write_table(tmp_path / 'table.csv')}", "rows=3", "columns=3", "epochs=2", "threads=1"]
    som.run_som(som.spec().override(words))
    session = RunSession(RunArguments("som", (), 0), Path("som.py"), make_literal_console(), plain=True)
    session.run_id = shoal.runs.load("latest").id
    capsys.readouterr()
    session._print_summary()
    said = capsys.readouterr().out
    assert "map 0 of 1, 2 epochs" in said
    assert "registered som@1 (champion)" in said


def test_two_workers_make_the_map_of_one(som: ModuleType, tmp_path: Path, shoal_home: Path) -> None:
    spec = som.spec().override([f"data={write_table(tmp_path / 'table.csv', 501)}", "rows=5", "columns=4", "threads=1",
                                "dtype=float64", "epochs=6"])  # fmt: skip
    rows = som.read_rows(spec).values
    made = []
    for workers in (1, 2):
        split = spec.override([f"workers={workers}"])
        weights, _ = som.fit_maps(split, rows, tmp_path / f"store-{workers}", lambda epoch, values: None)
        made.append(weights)
    torch.testing.assert_close(made[1], made[0], rtol=1e-12, atol=1e-12)


def test_without_the_dataset_images_are_generated_and_the_run_says_so(
    som: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(som, "INSTALLED", str(tmp_path))
    monkeypatch.setattr(som, "NUM_GENERATED", 50)
    rows = som.read_rows(som.spec().override([f"folder={tmp_path}"]))
    assert rows.values.shape == (50, 784)
    assert 0 <= rows.values.min() < rows.values.max() <= 1
    assert "GENERATED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n3,\n", r"table.csv': row 2 \(line 3\) has a gap in column 'b'"),
        ("a,b\n1,2\n\n3,4\n", r"row 2 \(line 3\) has a gap in column 'a'"),
        ("a,b\n1,2\n3,inf\n", r"row 2 \(line 3\) has inf in column 'b'"),
        ("a,b\n1,red\n2,4\n", r"column 'b' is not numeric: row 1 \(line 2\) has 'red', 50% of its values are numbers"),
        ("a,b\n", "table.csv': has no rows"),
        ("", "table.csv': cannot be read"),
        ("a,b\n1,2,3\n4,5,6\n", r"row 1 \(line 2\) has more values than the header has names"),
    ],
)
def test_a_table_that_cannot_be_mapped_is_rejected_by_file_and_row(
    som: ModuleType, tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=problem):
        som.read_table(path)


def test_a_missing_column_is_named(som: ModuleType, tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.csv", 3)
    assert som.read_table(path, ["load", "speed"])[1] == ["load", "speed"]
    with pytest.raises(DataError, match=r"has no such column\. there is speed, load"):
        som.read_table(path, ["torq"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["rows=1"], "rows = 1"),
        (["columns=0"], "columns = 0"),
        (["grid=hexagonal", "toroidal=true", "rows=5"], "only with an even number of rows"),
        (["workers=2", "device=cuda"], "share the rows on the CPU"),
        (["grid=triangular"], "grid = 'triangular'"),
    ],
)
def test_a_spec_that_cannot_be_trained_is_rejected(som: ModuleType, words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        som.spec().override(words)


def test_more_nodes_than_rows_are_allowed_with_a_warning(
    som: ModuleType, tmp_path: Path, shoal_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_table(tmp_path / "table.csv", 6)
    som.run_som(som.spec().override([f"data={path}", "rows=4", "columns=4", "epochs=2", "threads=1"]))
    assert "warning: 16 nodes for 6 rows" in capsys.readouterr().out
    assert "more_nodes_than_rows" in shoal.runs.load("latest").last_events()


@pytest.mark.parametrize("standardise", ["true", "false"])
def test_a_column_of_unix_seconds_is_mapped_as_one_of_seconds(
    som: ModuleType, tmp_path: Path, standardise: str
) -> None:
    table, answers = np.round(rows_of(120, 2).numpy() * [600, 100], 2), []
    for offset in (0.0, 1.76e9):
        path, raw = tmp_path / "table.csv", table + np.array([offset, 0])
        np.savetxt(path, raw, delimiter=",", header="time,load", comments="", fmt="%.2f")
        spec = som.spec().override([f"data={path}", "rows=4", "columns=4", f"standardise={standardise}"])
        rows = som.read_rows(spec)
        weights = som.train_maps(spec, rows.values, som.draw_maps(spec, rows.values), None, lambda *_: None)
        answers.append(som.build_network(spec, rows, weights[0])(torch.from_numpy(raw)))
    torch.testing.assert_close(answers[1]["distance"], answers[0]["distance"], rtol=1e-3, atol=1e-3)
    assert (answers[1]["row"] == answers[0]["row"]).double().mean() > 0.98  # one between two nodes may fall to either


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [
        ("a,b\n1,2\n3,1e200\n", [], r"column = 'b': has 1e\+200, whose square overflows.*below 1e\+100"),
        (
            "a,b\n1,0\n3,1e25\n",
            ["standardise=false"],
            r"column = 'b': spans 1e\+25.*overflow in torch.float32.*standardise=true",
        ),
        (
            "a,b\n0,0\n1e-30,0\n",
            ["standardise=false"],
            r"column = 'a': spans 1e-30.*vanish in torch.float32.*another unit",
        ),
    ],
)
def test_a_scale_that_overflows_is_named(
    som: ModuleType, tmp_path: Path, text: str, words: list[str], problem: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=problem):
        som.read_rows(som.spec().override([f"data={path}", *words]))


@pytest.mark.parametrize("scale", [1e90, 1e-200])
def test_any_other_scale_is_standardised(som: ModuleType, tmp_path: Path, scale: float) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"a,b\n1,{scale}\n2,{3 * scale}\n")
    assert som.read_rows(som.spec().override([f"data={path}"])).values.tolist() == [[-1, -1], [1, 1]]
