"""Regression from few rows: rows and columns are sets, no label leaks, closed forms, typed errors, an endpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_t
from torch import Tensor

import shoal.runs
from blocks import run_blocks
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.client import Client
from shoal.errors import ConfigError, DataError
from shoal.libs.tables.closed_form import LINEAR, PRIOR_ROWS, REGRESSORS, predict_closed_form
from shoal.libs.tables.few_rows import load_network
from shoal.libs.tables.network import NUM_BINS, PriorFittedNetwork, log_density, predict, summarise
from shoal.libs.tables.prior import PriorSpec, TablePrior
from shoal.libs.tables.tables import build_tables
from shoal.libs.tables.tokens import prepare
from shoal.registry import Registry
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import ModelPackage, RegisteredModel
from shoal.train import TrainSpec
from shoal.train.launch.local import fit_locally
from shoal.train.task import Task, make_task

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "jobs" / "few_rows.py")
SMALL = {"width": 32, "depth": 1, "tables": 2048, "validation": 128}
# The network computes in float32 and sums in another order: thousandths of the predicted deviation.
TOLERANCE = {"rtol": 0.0, "atol": 2e-3}


@pytest.fixture(scope="module")
def network() -> PriorFittedNetwork:
    """With weights of which each has an influence."""
    torch.manual_seed(0)
    model = PriorFittedNetwork(width=32, depth=2)
    torch.nn.init.normal_(model.head.weight, std=0.2)
    return model.eval()


def draw(seed: int, C: int = 9, D: int = 4, T: int = 1, Q: int = 5, B: int = 3) -> list[Tensor]:
    """x [B, C, D], y [B, C, T] and x_query [B, Q, D] of the prior; two rows of the context have no label."""
    x, y = TablePrior(PriorSpec(), torch.Generator().manual_seed(seed)).sample(B, C + Q, D, T)
    known = y[:, :C].clone()
    known[:, -2:, 0] = torch.nan
    return [x[:, :C], known, x[:, C:]]


def ask(model: PriorFittedNetwork, tables: list[Tensor]) -> np.ndarray:
    """Quantiles, as deviations of the mixture from its centre: [B, Q, T, 5], with the means as a sixth."""
    with torch.no_grad():
        outputs = {name: values.numpy() for name, values in model(*tables).items()}
    answer = summarise(outputs)
    found = np.concatenate([answer["quantiles"], answer["mean"][..., None]], -1)
    return found / outputs["scale"][..., None]


def test_rows_and_columns_are_sets(network: PriorFittedNetwork) -> None:
    x, y, query = draw(0, T=2)
    rows = torch.randperm(9)
    columns = torch.randperm(4)
    queries = torch.randperm(5)
    expected = ask(network, [x, y, query])
    np.testing.assert_allclose(ask(network, [x[:, rows], y[:, rows], query]), expected, **TOLERANCE)
    np.testing.assert_allclose(ask(network, [x[..., columns], y, query[..., columns]]), expected, **TOLERANCE)
    np.testing.assert_allclose(ask(network, [x, y, query[:, queries]]), expected[:, queries], **TOLERANCE)
    np.testing.assert_allclose(ask(network, [x, y.flip(-1), query]), expected[:, :, ::-1], **TOLERANCE)
    assert np.abs(ask(network, [x.flip(1), y, query]) - expected).max() > 0.05  # labels of other rows


def test_a_prediction_depends_on_no_other_query_and_on_no_label_to_be_predicted(network: PriorFittedNetwork) -> None:
    x, y, query = draw(1)
    expected = ask(network, [x, y, query])
    alone = [ask(network, [x, y, query[:, index : index + 1]]) for index in range(5)]
    np.testing.assert_allclose(np.concatenate(alone, 1), expected, **TOLERANCE)
    # The features of a labelled row compare its label with what the others predict: the prediction ignores its own.
    changed = y.clone()
    changed[:, 0] += 0.1 * y.nan_to_num().std()
    before, after = (predict_closed_form(*standard(x, each)).mean for each in (y, changed))
    own, others = (before - after)[..., 0].abs(), (before - after)[..., 1:].abs()
    fixed = [index for index, (kernel, _) in enumerate(REGRESSORS) if kernel < 4]  # no weights from correlations
    assert own[:, fixed].max() < 1e-9 * others[:, fixed].max()


def standard(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `predict_closed_form`."""
    values = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    exists, target = torch.ones(len(x), x.shape[2], dtype=torch.bool), y[..., 0]
    return values.double(), exists, target.nan_to_num(0).double(), ~target.isnan()


def test_unlabelled_rows_and_other_targets_are_information(network: PriorFittedNetwork) -> None:
    x, y, query = draw(2, T=2)
    expected = ask(network, [x, y, query])[:, :, 0]
    assert np.abs(ask(network, [x[:, :-2], y[:, :-2], query])[:, :, 0] - expected).max() > 1e-2
    assert np.abs(ask(network, [x, y[..., :1], query])[:, :, 0] - expected).max() > 1e-2
    changed = y.clone()
    changed[:, -1, 1] += 2 * y[..., 1].nan_to_num().std()
    assert np.abs(ask(network, [x, changed, query])[:, :, 0] - expected).max() > 1e-3


def test_padding_of_nan_changes_nothing(network: PriorFittedNetwork) -> None:
    x, y, query = draw(3, T=2)
    expected = ask(network, [x, y, query])

    def pad(values: Tensor, rows: int, columns: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, columns, 0, rows), value=torch.nan)

    found = ask(network, [pad(x, 3, 2), pad(y, 3, 0), pad(query, 2, 2)])
    np.testing.assert_allclose(found[:, :5], expected, **TOLERANCE)
    assert np.isfinite(found).all()


def test_units_of_the_target_and_of_the_columns_do_not_matter(network: PriorFittedNetwork) -> None:
    x, y, query = draw(4)
    expected = ask(network, [x, y, query])
    np.testing.assert_allclose(ask(network, [x, 1024 * y, query]), expected, **TOLERANCE)
    np.testing.assert_allclose(ask(network, [x * 8 + 2, y, query * 8 + 2]), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("which", [1, 3, 5])
def test_the_closed_forms_are_those_of_scipy_and_of_a_refit(which: int) -> None:
    x, y, _ = draw(5, C=8, B=1)
    values, exists, target, labelled = standard(x, y)
    found = predict_closed_form(values, exists, target, labelled)
    kernel, ratio = REGRESSORS[which]
    assert kernel == LINEAR

    def covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return ratio * (a @ b.T) / a.shape[1] + 1 + ratio

    rows, known = values[0].numpy(), target[0].numpy()
    context, scale = rows[:6], PRIOR_ROWS / (1 + ratio) / PRIOR_ROWS
    inverse = np.linalg.inv(covariance(context, context) + np.eye(6))
    noise = (known[:6] @ inverse @ known[:6] + PRIOR_ROWS * scale) / (6 + PRIOR_ROWS)
    across = covariance(rows[6:], context)
    np.testing.assert_allclose(found.mean[0, which, 6:], across @ inverse @ known[:6], rtol=1e-6)
    own = np.diag(covariance(rows[6:], rows[6:])) + 1 - np.einsum("ij,jk,ik->i", across, inverse, across)
    np.testing.assert_allclose(found.scale[0, which, 6:], np.sqrt(noise * own), rtol=1e-6)
    rest = np.arange(1, 6)  # without the first row
    refit = np.linalg.solve(covariance(context[rest], context[rest]) + np.eye(5), known[rest])
    np.testing.assert_allclose(found.mean[0, which, 0], covariance(context[:1], context[rest]) @ refit, rtol=1e-6)

    def evidence(index: int) -> float:
        size = REGRESSORS[index][1]
        shape = (size * context @ context.T / context.shape[1] + 1 + size + np.eye(6)) / (1 + size)
        return float(multivariate_t(shape=shape, df=PRIOR_ROWS).logpdf(known[:6]))

    expected = np.exp(evidence(which) - evidence(2))
    np.testing.assert_allclose(found.weight[0, which] / found.weight[0, 2], expected, rtol=1e-6)


def test_densities_quantiles_and_means_agree(network: PriorFittedNetwork) -> None:
    x, y, query = draw(6, B=1, Q=1)
    with torch.no_grad():
        outputs = network(x, y, query)
    centre, scale = outputs["centre"].item(), outputs["scale"].item()
    values = centre + scale * torch.linspace(-27.28, 27.28, 400_001, dtype=torch.float64)
    many = {name: each.double().expand(1, len(values), *each.shape[2:]) for name, each in outputs.items()}
    masses = log_density(many, values.view(1, -1, 1))[0, :, 0].exp() * (values[1] - values[0])
    assert masses.sum().item() == pytest.approx(1, abs=1e-3)
    answer = summarise({name: each.numpy() for name, each in outputs.items()})
    assert answer["mean"].item() == pytest.approx((masses * values).sum().item(), abs=1e-2 * scale)
    at = torch.searchsorted(values, torch.from_numpy(answer["quantiles"][0, 0, 0]).double())
    np.testing.assert_allclose(masses.cumsum(0)[at], [0.05, 0.25, 0.5, 0.75, 0.95], atol=2e-3)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([[1.0, 2.0]], [5.0]),
        ([[1.0, 2.0], [2.0, 3.0], [4.0, 1.0]], [7.0, 7.0, 7.0]),
        ([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan]], [1.0, 2.0, np.nan]),
        ([[3.0, 3.0], [3.0, 3.0]], [0.0, 0.0]),
        ([[1e6, 1e-6], [1e6 + 1, 2e-6]], [1e-6, 2e-6]),
    ],
    ids=["one row", "a constant target", "gaps", "constant columns", "far units"],
)
def test_hard_tables_have_finite_answers_in_order(network: PriorFittedNetwork, x: Any, y: Any) -> None:
    found = predict(network, x, y, [[1.5, 2.5], [np.nan, 100.0]])
    low, lower, upper, high = found.interval_90[0], *found.interval_50, found.interval_90[1]
    assert np.isfinite([low, lower, found.median, upper, high, found.mean]).all()
    assert (np.diff([low, lower, found.median, upper, high], axis=0) >= 0).all()
    assert (low < high).all()


@pytest.mark.parametrize(
    ("x", "y", "query", "message"),
    [
        ((0, 2), [], (1, 2), "0 labels.*has no label.*give 1 to 20 rows"),
        ((2, 2), [np.nan, np.nan], (1, 2), "table 0, target 0: 0 labels"),
        ((21, 2), (21,), (1, 2), "21 labels.*too many"),
        ((65, 2), [0.0, *[np.nan] * 64], (1, 2), "rows = 65.*at most 64"),
        ((3, 11), (3,), (1, 11), "columns = 11.*at most 10"),
        ((3, 2), (3, 5), (1, 2), "targets = 5.*at most 4"),
        ((3, 2), (4,), (1, 2), r"x \[1, 3, 2\], y \[1, 4, 1\].*do not fit"),
        ((3, 2), (3,), (1, 3), "do not fit"),
        ([[0.0], [np.inf]], (2,), (1, 1), "x = 'table 0, row 1, column 0': is infinite"),
        ([1.0, 2.0], (2,), (1, 1), "has other dimensions.*rows x columns"),
    ],
)
def test_tables_that_do_not_fit_are_rejected_by_name(
    network: PriorFittedNetwork, x: Any, y: Any, query: tuple[int, ...], message: str
) -> None:
    """A shape stands for zeros."""
    given = [np.zeros(each) if isinstance(each, tuple) else each for each in (x, y, query)]
    with pytest.raises(DataError, match=message):
        predict(network, *given)


def test_the_prior_is_typed_and_repeats() -> None:
    with pytest.raises(ConfigError, match="lineer"):
        PriorSpec.parse({"lineer": 1.0})
    with pytest.raises(ConfigError, match="version"):
        PriorSpec.parse({"version": 2})
    first, again, other = (draw(seed, B=64) for seed in (7, 7, 8))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    x, y = TablePrior(PriorSpec(), torch.Generator().manual_seed(0)).sample(256, 30, 6, 2)
    assert x.isfinite().all()
    assert y.isfinite().all()
    num_values = torch.tensor([len(column.unique()) for column in x.transpose(1, 2).reshape(-1, 30)])
    assert 0.1 < (num_values <= 5).float().mean() < 0.3  # columns as of a category
    assert x.std(1).log10().std() > 0.4  # mixed units


@pytest.mark.parametrize("family", ["linear", "gaussian_process", "network", "trees", "factors"])
def test_each_family_alone_can_be_predicted_in_part(family: str) -> None:
    families = ("linear", "gaussian_process", "network", "trees", "factors")
    frequencies = {name: float(name == family) for name in families}
    spec = PriorSpec.parse({**frequencies, "noise": [0.01, 0.02], "heavy_tailed": 0.0})
    x, y = TablePrior(spec, torch.Generator().manual_seed(0)).sample(64, 36, 3)
    x = x[:, :36]
    found = prepare(x[:, :20], y[:, :20], x[:, 20:])
    left = (y[:, 20:, 0] - found.centre).abs().mean(1) / (y[:, 20:, 0] - y[:, :20].mean(1)).abs().mean(1)
    assert left.quantile(0.25) < 0.85  # of the mean's error


# -- the recipe


@pytest.fixture(scope="module")
def recipe() -> Task:
    return make_task(RECIPE, SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The small network, trained and registered as the recipe does it."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("SHOAL_HOME", str(home))
        patch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)  # it takes longer than the run
        threads = torch.get_num_threads()
        spec = TrainSpec.parse(
            {
                "task": RECIPE, "args": SMALL, "name": "few-rows", "threads": 1, "batch_size": 32,
                "optimizer": {"name": "adamw", "learning_rate": 5e-3}, "stop": {"steps": 40}, "average": 0.9,
            }
        )  # fmt: skip
        outcome = fit_locally(spec)
        package: ModelPackage = RegisteredModel("few-rows", Registry().location).load_package(1)
        version = Registry().get("few-rows@champion")
        yield {"package": package, "metrics": outcome.metrics, "version": version, "home": home}
        torch.set_num_threads(threads)


def test_training_improves_on_the_closed_forms(trained: dict[str, Any]) -> None:
    metrics = trained["metrics"]
    assert metrics["log_loss"] < metrics["log_loss_closed_form"] - 0.02
    assert 0.6 < metrics["coverage_90"] < 1


def test_batches_of_training_differ_and_those_of_validation_repeat(recipe: Task) -> None:
    data = recipe.data()
    first, again = (data.validation.batch(np.arange(4)) for _ in range(2))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True))
    torch.manual_seed(0)
    shapes = {data.train.batch(np.arange(4))[0].shape for _ in range(20)}
    assert len(shapes) > 10
    assert all(shape[1] <= 36 and shape[2] <= 10 for shape in shapes)


def load(trained: dict[str, Any], **options: Any) -> Any:
    package = trained["package"]
    predictor = Predictor(package.factory, package.signature, ModelOptions.parse({"warm_up": False, **options}))
    return predictor.load(package.snapshot)


def test_the_endpoint_answers_tables_of_any_size_as_predict_does(trained: dict[str, Any]) -> None:
    model = load(trained, ragged="pad", pad_value="nan")
    several = [draw(seed, C=C, D=D, Q=Q, B=1) for seed, C, D, Q in ((0, 5, 3, 2), (1, 12, 5, 7))]
    requests = [
        dict(zip(("x", "y", "x_query"), (values.double().numpy() for values in each), strict=True)) for each in several
    ]
    network = trained["version"].manifest.model.build()
    weights = trained["package"].snapshot.tensors()
    network.load_state_dict({name: torch.from_numpy(each) for name, each in weights.items()})
    for request in requests:
        answer = model.predict_batch([request])[0]
        expected = predict(network.eval(), request["x"][0], request["y"][0], request["x_query"][0])
        np.testing.assert_allclose(answer["mean"][0], expected.mean, rtol=1e-4)
        np.testing.assert_allclose(answer["quantiles"][0, ..., 0], expected.interval_90[0], rtol=1e-4)


def test_rows_go_to_an_endpoint_and_predictions_come_back(trained: dict[str, Any]) -> None:
    model, signature = load(trained), trained["package"].signature
    fake = FakeModel(
        "few-rows", signature.inputs, signature.outputs, compute=lambda arrays: model.predict_batch([arrays])[0]
    )
    with served(FakeHost(fake)) as (url, _), Client(url, token=TOKEN, timeout_s=60.0) as client:
        request = build_tables([[50, 2], [70, 3], [60, 2], [90, 4]], [100, 150, 120, np.nan], [[90, 4]])
        answer = client.infer("few-rows", request)
    low, high = answer["quantiles"][0, 0, 0, [0, -1]]
    assert 100 < answer["mean"].item() < 250
    assert low < answer["mean"].item() < high


def test_the_python_of_the_page_runs(
    trained: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(trained["home"]))
    load_network.cache_clear()
    run_blocks("libs/tables.md", {})
    load_network.cache_clear()
    assert "between" in capsys.readouterr().out


def test_a_fresh_network_is_the_mixture_of_the_closed_forms() -> None:
    x, y, query = draw(9)
    with torch.no_grad():
        outputs = PriorFittedNetwork(width=32, depth=1)(x, y, query)
    answer = summarise({name: values.numpy() for name, values in outputs.items()})
    np.testing.assert_allclose(answer["mean"], outputs["centre"], atol=1e-4 * outputs["scale"].max().item())
    assert outputs["logits"].shape == (3, 5, 1, NUM_BINS)
