"""Tables: kinds of columns, encoders of training rows alone, requests as rows are, errors that name the column."""

import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
import torch
from benchmarks.ours import messy_files
from pyarrow import parquet

import shoal.data
import shoal.runs
from serving.replica_set import ask, serving_one
from shoal.data import fingerprint
from shoal.errors import ConfigError, DataError
from shoal.extend.serve import ModelOptions, RegisteredModel, decode_rows
from shoal.libs.batch_predict.output import open_lines
from shoal.libs.batch_predict.table_predictor import TablePredictor
from shoal.libs.tabular import trees
from shoal.libs.tabular.dataset import Table, table
from shoal.libs.tabular.encoders import Encoders, Scale
from shoal.libs.tabular.network import TableNetwork
from shoal.libs.tabular.task import TableTask
from shoal.registry import Registry
from shoal.train.launch.local import fit_locally
from shoal.train.launch.overrides import spec_from_overrides

NUM_ROWS = 60
SMALL = {"width": 8, "depth": 1, "members": 2, "embedding": 2}


def make_columns(num_rows: int = NUM_ROWS) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    ages = rng.integers(18, 90, num_rows)
    return {
        "customer": [*range(1, num_rows + 1)],
        "age": [None if at % 9 == 0 else int(age) for at, age in enumerate(ages)],
        "plan": [str(each) for each in rng.choice(["basic", "plus", "family"], num_rows)],
        "since": [f"20{at % 20 + 5:02d}-0{at % 9 + 1}-1{at % 7}" for at in range(num_rows)],
        "left": [None if at % 2 else f"20{at % 20 + 6:02d}-0{at % 9 + 1}-1{at % 7}" for at in range(num_rows)],
        "news": ["" if at % 11 == 0 else ("true" if at % 3 else "false") for at in range(num_rows)],
        "country": ["xx"] * num_rows,
        "churned": ["yes" if age > 50 else "no" for age in ages],
    }


def write_csv(path: Path, columns: dict[str, list[Any]], separator: str = ",") -> str:
    rows = [columns, *zip(*columns.values(), strict=True)]
    path.write_text("".join(separator.join("" if each is None else str(each) for each in row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def customers(tmp_path: Path) -> str:
    return write_csv(tmp_path / "customers.csv", make_columns())


def kinds_of(found: Table) -> dict[str, str]:
    return {each.name: each.full_kind for each in found.encoders.columns}


KINDS = {"age": "number", "plan": "word", "since": "date", "left": "date", "news": "truth"}


def test_kinds_are_inferred_and_ids_and_constants_are_excluded_with_a_note(customers: str) -> None:
    found = shoal.data.table(customers, target="churned")
    assert kinds_of(found) == KINDS
    assert [" ".join(note.split()) for note in found.notes] == [
        "column kind gaps examples",
        "customer number 0 1, 2, 3 left out: it numbers the rows; columns.customer=number takes it in",
        "age number 7 63, 54, 37",
        *("plan word 0 family, plus, basic", "since date 0 2005-01-10, 2006-02-11, 2007-03-12"),
        *("left date 30 2006-01-10, 2008-03-12, 2010-05-14", "news truth 6 true, false"),
        "country word 0 xx left out: it has the same value in every row; columns.country=word takes it in",
        "churned word 0 yes, no the target",
    ]
    assert (found.num_training, len(found.validation)) == (48, 12)
    assert len(found.train) >= 2048
    taken = table(customers, "churned", columns={"customer": "number", "age": "word"}, leave_out=["left"])
    assert kinds_of(taken) == {"customer": "number", "age": "word", "plan": "word", "since": "date", "news": "truth"}


def test_the_same_table_from_any_source_is_the_same(tmp_path: Path, customers: str) -> None:
    import pandas as pd

    columns = make_columns()
    arrow = pa.table(columns | {"news": [None if each == "" else each == "true" for each in columns["news"]]})
    parquet.write_table(arrow, tmp_path / "customers.parquet")
    packed = tmp_path / "customers.csv.gz"
    packed.write_bytes(gzip.compress(Path(customers).read_bytes()))
    sources = [
        *(customers, Path(customers), packed, f"file://{customers}", tmp_path / "customers.parquet", arrow),
        *(write_csv(tmp_path / name, columns, sign) for name, sign in (("customers.tsv", "\t"), ("other.csv", ";"))),
        pd.read_csv(customers),
    ]
    want = table(customers, "churned").encoders
    for source in sources[:-1]:
        assert table(source, "churned").encoders == want, source
    assert kinds_of(table(sources[-1], "churned")) == KINDS  # pandas has read ages as fractions


def test_encoders_are_fitted_to_the_training_rows_alone(tmp_path: Path, customers: str) -> None:
    later = make_columns(12)
    later["age"], later["left"] = [200] * 12, [None] * 12
    found = table(customers, "churned", validation=write_csv(tmp_path / "later.csv", later)).encoders
    assert found.columns == table(customers, "churned", validation=customers).encoders.columns
    scale = found.columns[0].scale
    assert scale.knots[-1] == max(each or 0 for each in make_columns()["age"])


def test_a_validation_file_is_the_same_to_a_table_that_grows(tmp_path: Path, customers: str) -> None:
    other = make_columns(12)
    other["plan"][3] = "gold"
    later = write_csv(tmp_path / "later.csv", other)
    more = write_csv(tmp_path / "more.csv", make_columns(90))
    found, grown = (table(each, "churned", validation=later) for each in (customers, more))
    drawn, again = table(more, "churned"), table(more, "churned", leave_out=["age"], columns={"customer": "number"})
    typed = table(pa.table(make_columns()), "churned", validation=later)  # of other types than the file's texts
    assert typed.encoders.columns == found.encoders.columns
    assert fingerprint(drawn.validation) == fingerprint(again.validation) != fingerprint(found.validation)
    assert fingerprint(found.validation) == fingerprint(grown.validation)  # so the champion is the better one
    assert fingerprint(found.train) != fingerprint(grown.train)
    assert found.num_training == NUM_ROWS
    categories = found.validation.batch(np.arange(12))[1]
    assert categories[:, 0].tolist().index(1) == 3
    with pytest.raises(DataError, match="validation = 'customer': is not among its columns"):
        table(customers, "churned", validation={"age": [1], "churned": ["no"]})


def test_validation_rows_are_drawn_of_each_class_or_are_the_last() -> None:
    columns = make_columns(100)
    columns["churned"] = ["yes"] * 10 + ["no"] * 90
    assert table(columns, "churned").select("validation")["churned"].tolist().count("yes") == 2
    first, again, other = (table(columns, "churned", split=seed).values["since"] for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    ordered = table(columns, "churned", order_by="since", validation=0.1)
    assert ordered.select("train")["since"].max() <= ordered.select("validation")["since"].min()


def test_numbers_become_normal_scores_and_gaps_flags() -> None:
    rng = np.random.default_rng(1)
    values = np.append(np.exp(rng.normal(0, 3, 2000)), np.nan)
    scores = Scale.fit(values).apply(values)
    assert abs(scores[:-1].mean()) < 0.05
    assert abs(scores[:-1].std() - 1) < 0.05
    assert scores[-1] == 0.0
    outside = Scale.fit(values).apply(np.array([-1e9, 1e9, 1e300]))
    assert outside.tolist() == [scores[:-1].min(), *[scores[:-1].max()] * 2]
    assert Scale.fit(np.array([np.nan])).apply(np.array([3.0])) == [0.0]
    assert Scale.fit(np.array([0.0, 1.0] * 10)).apply(np.array([0.0])) == pytest.approx([-0.6745], abs=1e-3)


def test_dates_have_their_parts_and_differences(customers: str) -> None:
    found = table(customers, "churned", leave_out=["age", "plan", "news"]).encoders
    since, left = found.columns
    assert since.periods == ["weekday", "season"]
    assert left.has_gaps
    assert [names[:2] for names in found.differences] == [("since", "left")]
    year_s = 365.2425 * 86_400
    encoded = found.encode({"since": np.array([0.0, 0.0, np.nan]), "left": np.array([year_s, np.nan, 0.0])})["numbers"]
    assert encoded.shape == (3, found.num_numbers) == (3, 5 + 6 + 1)
    assert encoded[0, 3:5] == pytest.approx([0.0, 1.0])  # of the season
    assert (encoded[1:, -1] == 0.0).all()  # there is no difference to a gap
    assert np.isfinite(encoded).all()


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["2026-01-31", "2026-02-01", None], "date"),
        (["2026-01-31 10:00:00", "2026-02-01 11:30:00", None], "date"),
        (["01/31/2026", "02/01/2026", None], "date:%m/%d/%Y"),
        (["31.1.2026", "1.2.2026", "5.2.2026"], "date:%d.%m.%Y"),
        (["Jan 31, 2026", "Feb 1, 2026", None], "date:%b %d, %Y"),
        (["1/2/2026", "2/3/2026", "3/4/2026"], "word"),  # of months or of days
        (["1-2", "3-4", "5-6"], "word"),
        (["3,5", "1.024,75", "2"], "number:,"),
        (["-1,500", "2.5", "2"], "number:."),
        (["1,500", "2,250", "300"], "word"),  # of thousands or of halves
        (["2026-01-31", "soon", None], "word"),
        (["31.1.26 08:30", "1.2.26 17:00", "n/a"], "date:%d.%m.%y %H:%M"),
        (["5,5", "-", "NULL"], "number:,"),
        (["1 024,5", "?", "-1'500,25"], "number:,"),
        (["1e3", ".5", "#N/A"], "number"),
        (["01234", "04127", "99084"], "word"),  # codes
        (["TRUE", "false", "?"], "truth"),
    ],
)
def test_texts_are_dates_or_numbers_where_all_are_and_rows_may_have_such(texts: list[str | None], kind: str) -> None:
    columns = {"x": texts * 20, "y": ["a", "b", "c"] * 20}
    found = table(columns, "y")
    assert kinds_of(found) == {"x": kind}
    said = {"1/2/2026": "date:%d/%m/%Y", "1,500": "number:,"}.get(str(texts[0]))
    assert sum(str(said) in note for note in found.notes) == bool(said)
    if said:
        found = table(columns, "y", columns={"x": said})
        assert found.values["x"].min() in (np.datetime64("2026-02-01", "s").astype(float), 1.5)
    inputs = found.encoders.signature().inputs
    given = decode_rows(inputs, [{"x": each} for each in texts])["x"]
    if given.dtype == float:
        np.testing.assert_array_equal(np.unique(given), np.unique(found.values["x"]))
        with pytest.raises(DataError, match=r"x = '1st': is no .*training had" if ":" in kind else "is no"):
            decode_rows(inputs, [{"x": "1st"}])


def test_a_large_vocabulary_has_other_words_and_a_small_one_has_none() -> None:
    words = [f"w{at % 100 if at < 400 else at}" for at in range(500)]
    found = table({"x": words, "y": ["a", "b"] * 250}, "y", columns={"x": "word"}).encoders.columns[0]
    assert 50 < len(found.vocabulary) <= 100
    assert found.has_other
    assert found.encode_categories(np.array(["never"], object), is_strict=True).tolist() == [1]
    small = table({"x": ["u", "v"] * 20, "y": ["a", "a", "b", "b"] * 10}, "y", unknown="other")
    assert small.encoders.columns[0].has_other


def test_targets_are_classes_or_numbers() -> None:
    x = [*np.linspace(0, 1, 40)]
    integers = table({"x": x, "y": [at % 3 for at in range(40)]}, "y").encoders.target
    assert integers.classes == ["0", "1", "2"]
    assert table({"x": x, "y": [at % 2 == 0 for at in range(40)]}, "y").encoders.target.classes == ["false", "true"]
    found = table({"x": x, "y": [*range(40)]}, "y")
    assert found.encoders.num_outputs == 1
    y = found.encoders.target.encode(np.arange(40.0))
    assert found.encoders.decode_scores(y[:, None])["y"] == pytest.approx(np.arange(40.0), abs=1e-4)
    forced = table({"x": x, "y": [at % 3 for at in range(40)]}, "y", columns={"y": "number"})
    assert forced.encoders.target.classes == []
    dropped = table({"x": x, "y": [None, *range(39)]}, "y")
    assert dropped.notes[-1] == "1 rows have no y"


def request(**changed: Any) -> dict[str, np.ndarray]:
    row = {"age": 72.0, "plan": b"basic", "since": 1.7e9, "left": np.nan, "news": 1.0} | changed
    return {name: np.array([value], object if isinstance(value, bytes) else None) for name, value in row.items()}


def test_a_request_has_a_row_as_it_is(customers: str) -> None:
    fitted = TableTask(data=customers, target="churned", network=SMALL)
    task = TableTask(**json.loads(json.dumps(dict(fitted.fit_args()))), network=SMALL)  # as at an endpoint
    signature = task.signature()
    assert {each.name: (each.kind, each.datatype, each.shape) for each in signature.inputs} == {
        name: (kind, "BYTES" if kind == "word" else "FP64", [-1]) for name, kind in KINDS.items()
    }
    outputs = [(each.name, each.datatype, each.columns) for each in signature.outputs]
    assert outputs == [("churned", "BYTES", []), ("probability", "FP32", ["no", "yes"])]
    network = task.model().eval()
    gaps = request(age=np.nan, plan=b"", since=np.nan, news=np.nan)
    for each in (request(), gaps):
        inputs = [torch.from_numpy(array) for array in task.preprocess(each).values()]
        answer = task.postprocess({"output": network(*inputs).detach().numpy()})
        assert answer["churned"][0] in ("no", "yes")
        assert answer["probability"].dtype == np.float32
        assert answer["probability"].sum() == pytest.approx(1.0)
    training = fitted.data().select("train")
    want = fitted.encoders.encode(training)["numbers"]
    assert (want == fitted.data().train.tensors[0].numpy()).all()  # type: ignore[union-attr]
    assert task.encoders.ranges["age"] == (np.nanmin(training["age"]), np.nanmax(training["age"]))
    wrong: dict[str, Any] = {"plan": b"basik", "age": np.inf, "news": 3.0}
    for field, value in wrong.items():
        with pytest.raises(DataError, match=f"^{field} = ") as caught:
            task.preprocess(request(**{field: value}))
        assert caught.value.field == field


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    for text in ("Größe;ja\n1;2\n", "x;ja\nß;2\n"):
        (tmp_path / "old.csv").write_text(text, "latin-1")
        with pytest.raises(DataError, match=r"cannot be read as a table: 'utf-8' .*give a CSV file in UTF-8"):
            table(tmp_path / "old.csv", "ja")


@pytest.mark.parametrize("make", messy_files.FILES, ids=lambda make: make.__name__)
def test_files_as_people_have_them_have_their_kinds_and_each_row_is_a_request(make: Any, tmp_path: Path) -> None:
    file = make(tmp_path, messy_files.Parcels(make.__name__, 240))
    found = table(str(file.path), file.target)
    assert kinds_of(found) == file.kinds
    encoders = Encoders.parse(json.loads(json.dumps(found.encoders.model_dump(mode="json"))))
    rows = json.loads(json.dumps(messy_files.read_rows(file, "utf-8")))  # with the mark, where there is one
    asked = encoders.encode_request(decode_rows(encoders.signature().inputs, rows))
    for name, wanted in encoders.encode(found.values, is_strict=False).items():
        assert sorted(asked[name].tolist()) == sorted(wanted.tolist())


@pytest.mark.parametrize(
    ("names", "target", "cells"),
    [
        ("store,2024-01-01,2024-01-02", "store", "{word},{number},{number}"),
        ("sample,octane,1100.5,1103.0", "octane", "{at},{number},{number},0.5"),
        ("label,0.5,0.9", "label", "{word},{number},{number}"),
        ("0.5,0.9,1.1", "0.9", "{number},{number},{number}"),
        ("y,100,250,500,1000", "y", "{word},{number},1,{number},2"),
        ("id,year,2020,2021,2023", "2023", "{at},{at},{number},{number},{number}"),
    ],
)
def test_names_of_columns_may_be_numbers_and_dates(names: str, target: str, cells: str, tmp_path: Path) -> None:
    rows = [cells.format(at=at, word="ab"[at % 2], number=at % 20 + 0.25) for at in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join([names, *rows]))
    found = table(tmp_path / "rows.csv", target)
    assert {target} < {*found.values} <= {*names.split(",")}
    assert found.num_training == 32


@pytest.mark.parametrize("name", ["german", "with_mark", "without_names", "many_lines"])
async def test_a_batch_prediction_keeps_each_cell_and_an_endpoint_answers_each_raw_row_as_it_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
    file = messy_files.write_all(tmp_path, 60)[name]
    words = ["task=table", f"data={file.path}", f"target={file.target}", "threads=1", "trees=false", "name=parcels"]
    words += [f"network={json.dumps(SMALL)}", "stop.convergence=null", "stop.epochs=null", "stop.steps=1"]
    fit_locally(spec_from_overrides(words))
    predictor = TablePredictor(RegisteredModel("parcels", Registry().location).load_package(1), ModelOptions())
    with open_lines(file.path) as reader:
        answered = predictor(reader.read_all()).to_pylist()
    rows, target = messy_files.read_rows(file), str(file.target)
    assert [{each: row[f"input_{each}" if each == target else each] for each in rows[0]} for row in answered] == rows
    assert {*answered[0]["probability"]} == {row[target] for row in rows}
    async with serving_one("parcels") as (_, replica):
        asked = await ask(replica, "POST", "/v2/models/parcels/rows", messy_files.read_rows(file, "utf-8"))
    assert asked.status == 200, asked.body
    assert [row[target] for row in asked.body] == [row[target] for row in answered]
    assert asked.headers[b"shoal-ignored-fields"].decode() == quote(target)


def test_members_are_averaged_in_evaluations_and_apart_in_training(customers: str) -> None:
    task = TableTask(data=customers, target="churned")
    scores = torch.tensor([[[4.0, 0.0], [0.0, 4.0]]], requires_grad=True)  # two members of opposite opinions
    batch = (None, None, torch.tensor([1]))
    apart = task.loss(scores, batch)
    with torch.no_grad():
        together = task.loss(scores, batch)
    assert together.item() == pytest.approx(np.log(2), abs=1e-4)
    assert apart.item() == pytest.approx((4 + 2 * np.log1p(np.exp(-4))) / 2, abs=1e-4)
    assert task.loss(scores[:, 0], batch).item() == pytest.approx(4 + np.log1p(np.exp(-4)), abs=1e-4)
    ages = TableTask(data=customers, target="age")
    batch = ages.data().validation.batch(np.arange(11))
    with torch.no_grad():  # in no units: versions with other training rows are compared by it
        measured = ages.loss(batch[0][:, None, :1], batch), ages.metrics(batch[0][:, :1], batch)["r2"]
    assert measured[0].item() == pytest.approx(1 - measured[1].item())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"target": "churnt"}, "column = 'churnt': is not in the table. did you mean 'churned'"),
        ({"target": "loyal"}, "column = 'loyal': is not in the table. it has customer, age"),
        ({"target": ""}, "target = '': is missing. give one of customer, age"),
        ({"target": "", "data": "none.csv"}, "data = 'none.csv': does not exist"),
        ({"leave_out": ["agee"]}, "column = 'agee': is not in the table"),
        ({"columns": {"plan": "number"}}, "column = 'plan': has a value that is no number"),
        ({"columns": {"plan": "colour"}}, "columns.plan = 'colour': is no kind of column"),
        ({"target": "since"}, "target = 'since': is a date. predict a class, or a number"),
        ({"target": "country"}, "target = 'country': has the one class 'xx'"),
        ({"validation": 1.5}, "validation = 1.5: is no share of the rows"),
        ({"validation": 0.001}, "validation = 0.001: leaves one part of 60 rows empty"),
        ({"unknown": "ignore"}, "unknown = 'ignore': is neither error nor other"),
        ({"data": "none.csv"}, "data = 'none.csv': does not exist"),
        ({"data": "."}, "data = '.': is a folder"),
        ({"data": {"x": [], "churned": []}}, "data = 'dict': has no rows"),
        ({"data": {"x": [1], "y": [[1]]}, "target": "y"}, "data|target = 'y'"),
        ({"data": {"x": [1, 1], "churned": ["a", "b"]}}, "has no column from which to predict churned"),
        ({"data": 3}, "data = 'int': is no table"),
    ],
)
def test_what_does_not_fit_is_named(customers: str, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        table(**{"data": customers, "target": "churned", **changed})


def test_a_transformer_of_scikit_learn_takes_the_encoders_place(customers: str) -> None:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = "numbers", make_pipeline(SimpleImputer(), StandardScaler()), ["age"]
    transformer = ColumnTransformer([numbers, ("words", OneHotEncoder(handle_unknown="ignore"), ["plan"])])
    found = table(customers, "churned", transformer=transformer)
    encoders = Encoders.parse(json.loads(json.dumps(found.encoders.model_dump(mode="json"))))
    assert (encoders.num_numbers, encoders.category_sizes) == (4, [])
    encoded = encoders.encode_request(request())
    assert list(encoded) == ["numbers"]
    assert sorted(encoded["numbers"][0, 1:].tolist()) == [0.0, 0.0, 1.0]
    assert found.train.tensors[0].numpy()[:, 0].mean() == pytest.approx(0.0, abs=1e-6)  # type: ignore[union-attr]
    other = encoders.model_copy(update={"sklearn": "0.9"})
    with pytest.raises(ConfigError, match=r"scikit-learn = '0\.9': has fitted .* pip install scikit-learn==0\.9"):
        other.encode_request(request())
    with pytest.raises(DataError, match=r"^plan = 'basik'"):
        encoders.encode_request(request(plan=b"basik"))
    with pytest.raises(DataError, match="transformer = 'ColumnTransformer': does not fit the table"):
        table(customers, "churned", transformer=ColumnTransformer([("x", StandardScaler(), ["none"])]))


def test_names_of_columns_may_have_dots_and_blanks(tmp_path: Path) -> None:
    columns = make_columns(40)
    path = write_csv(tmp_path / "odd.csv", {"net.age": columns["age"], "no of": [*range(40)], "y": columns["churned"]})
    words = ["task=table", f"data={path}", "target=y", "columns.net.age=word", "stop.steps=1"]
    found = TableTask(**spec_from_overrides(words).args).data()
    assert (kinds_of(found), found.notes[2].endswith("; 'columns.no of=number' takes it in")) == (
        {"net.age": "word"},
        True,
    )


def test_a_resumed_run_has_its_encoders_and_rows_though_the_file_has_grown(
    customers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
    words = ["task=table", f"data={customers}", "target=churned", "threads=1", "batch_size=32"]
    words += [f"network={json.dumps(SMALL)}", "stop.convergence=null", "trees=false"]
    said, said_again = list[str](), list[str]()
    first = fit_locally(spec_from_overrides([*words, "stop.epochs=null", "stop.steps=2"]), say=said.append)
    assert [each.split()[0] for each in said][:3] == ["column", "customer", "age"]
    before = Registry().get("customers@1").manifest
    args = before.model.kwargs["args"]
    made_from = {"file": customers, "rows": NUM_ROWS, "target": "churned", "classes": ["no", "yes"]}
    assert before.lineage == made_from | {"categories": {"plan": "[family, plus, basic]"}}
    grown = make_columns(80)
    grown["plan"] = [*make_columns()["plan"], *["gold"] * 20]
    write_csv(Path(customers), grown)
    again = ["task=table", f"data={customers}", f"resume={first.run_id}", "stop.steps=4"]  # as the run says it
    fit_locally(spec_from_overrides(again), say=said_again.append)
    assert "left out" not in "".join(said_again)
    after = Registry().get("customers@2").manifest
    assert after.model.kwargs["args"] == args
    assert args["encoders"]["num_rows"] == NUM_ROWS
    assert after.data == before.data
    again = fit_locally(spec_from_overrides([*words, "stop.epochs=null", "stop.steps=1"]), registers=False)
    assert "gold" in shoal.runs.load(again.run_id).spec
    Path(customers).write_text("\n".join(Path(customers).read_text().splitlines()[:30]))
    with pytest.raises(DataError, match="has 29 rows, and had 60 when the encoders were fitted"):
        fit_locally(spec_from_overrides([f"resume={first.run_id}", "stop.steps=6"]))


def test_the_champion_reads_the_rows_of_the_next_month_by_its_own_encoders(
    customers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
    words = ["task=table", "target=churned", "threads=1", "batch_size=32", "stop.convergence=null", "stop.epochs=null"]
    words += ["stop.steps=2", f"network={json.dumps(SMALL)}", "trees=false", "name=customers"]
    fit_locally(spec_from_overrides([*words, f"data={customers}"]))
    later = write_csv(tmp_path / "later.csv", make_columns(80))
    assert fit_locally(spec_from_overrides([*words, f"data={later}"])).decision.endswith("on the validation data of 2")
    grown = make_columns(80)
    grown["churned"] = [*make_columns()["churned"], *["maybe"] * 20]
    odd = write_csv(tmp_path / "odd.csv", grown)  # a class that the champion does not know
    assert "is of other data than" in fit_locally(spec_from_overrides([*words, f"data={odd}"])).decision


def test_trees_are_fitted_after_training_within_a_limit_and_end_on_a_signal(
    customers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)
    words = ["task=table", f"data={customers}", "target=churned", f"network={json.dumps(SMALL)}", "threads=1"]
    said = list[str]()
    spec = spec_from_overrides([*words, "stop.convergence=null", "stop.epochs=null", "stop.steps=2"])
    run = shoal.runs.load(fit_locally(spec, registers=False, say=said.append).run_id)
    assert sum("at the end, gradient-boosted trees get 60 s" in line for line in said) == 1
    found = run.metrics()["validation/accuracy_trees"].dropna()
    assert [*found.index] == [2]
    assert found[2] > 0.8
    line = {"x": [each % 97 for each in range(200)], "y": [each % 97 / 2 for each in range(200)]}
    assert 0.9 < trees.score_trees(table(line, "y"))["validation/r2_trees"] <= 1
    for limit, is_asked in ((600.0, True), (0.0, False)):
        monkeypatch.setattr(trees, "LIMIT_S", limit)
        assert trees.score_trees(table(line, "y"), lambda is_asked=is_asked: is_asked) == {}  # type: ignore[misc]
    assert "left out of the comparison: ended after 0 s" in caplog.text
    monkeypatch.setattr(trees, "LIMIT_S", 600.0)
    monkeypatch.setattr(trees, "POLL_S", -1)  # an error here ends the process there
    with pytest.raises(ValueError, match="sleep"):
        trees.score_trees(table(line, "y"))


def test_a_network_has_a_score_of_each_member_for_any_columns() -> None:
    torch.manual_seed(0)
    network = TableNetwork(3, [4, 5], 2, **SMALL)
    numbers, categories = torch.randn(6, 3), torch.tensor([[0, 4]] * 6)
    assert network(numbers, categories).shape == (6, 2, 2)
    assert not torch.equal(network(numbers, categories), network(numbers, categories * 0))
    assert TableNetwork(3, [], 1, **SMALL)(numbers).shape == (6, 2, 1)
