"""`shoal predict` against an endpoint of this process: every kind of input, what is printed, and what is refused."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from click.testing import Result
from PIL import Image

import shoal.runs
import typed
from registered import tensors
from serving import table_model
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.libs.predict.input_readers import from_table
from shoal.open_inference.messages import TensorMetadata
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

GREY = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16


@pytest.fixture(scope="module")
def host() -> FakeHost:
    return FakeHost(
        FakeModel("m", tensors(x=[-1, 3]), versions=(6, 7)),
        FakeModel("two", tensors(a=[-1, 2], b=("INT64", [-1]))),
        FakeModel("picture", tensors(image=[-1, 1, 4, 4])),
        FakeModel("colours", tensors(image=("UINT8", [-1, 4, 4, 3]))),
        FakeModel("planes", tensors(image=("UINT8", [-1, 3, 4, 4]))),
        FakeModel("halves", tensors(image=("BF16", [-1, 4, 4]))),
        FakeModel("wholes", tensors(image=("INT32", [-1, 4, 4]))),
        FakeModel("signed", tensors(image=("INT8", [-1, 4, 4]))),
        FakeModel("words", tensors(text=("BYTES", [-1]))),
        FakeModel("wide", tensors(x=[-1, -1])),
        FakeModel("texts", tensors(tokens=("BYTES", [-1, -1]), weight=[-1])),
        FakeModel("hashes", tensors(x=("UINT64", [-1, 2]))),
        FakeModel("flags", tensors(on=("BOOL", [-1, 2]))),
        FakeModel("long", tensors(x=[-1, 20])),
        FakeModel("sizes", tensors(image=[-1, -1, -1])),
        FakeModel("alone", tensors(x=[2, 2], rate=("INT64", [])), options=ModelOptions(max_batch_size=0)),
        FakeModel("charges", table_model.SIGNATURE.inputs),
        FakeModel("iris", [TensorSignature(name="x", datatype="FP32", shape=[-1, 2], columns=["length", "width"])]),
        FakeModel("odd", tensors(**{"logits[a]:key:": ("FP32", [-1])})),
    )


@pytest.fixture(scope="module")
def url(host: FakeHost) -> Iterator[str]:
    with served(host) as (found, _):
        yield found


@pytest.fixture(autouse=True)
def _recorded(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    with shoal.runs.create("serve", "") as recorder:
        recorder.record_endpoint("shop", "inference", url, "ready")
        yield


def predict(line: str, *words: str, stdin: str | None = None) -> Result:
    return typed.typed(f"predict {line}", *words, stdin=stdin)


def rows(line: str, *words: str, stdin: str | None = None) -> list[dict[str, Any]]:
    return list(json.loads(typed.said(f"predict --output json {line}", *words, stdin=stdin)))


def complaint(line: str, *words: str) -> str:
    return typed.complaint(f"predict {line}", *words)


def test_words_are_rows_of_the_only_input() -> None:
    assert rows("m --input 1,2,3") == [{"x": [1, 2, 3], "version": 7}]
    assert rows("m --input x=1,2,3,4,5,6")[1] == {"x": [4, 5, 6], "version": 7}
    assert rows("m --input '[[1, 2, 3], [4, 5, 6]]'")[1]["x"] == [4, 5, 6]


def test_words_of_other_kinds() -> None:
    assert rows("two --input a=1,2 --input b=3") == [{"a": [1, 2], "b": 3, "version": 7}]
    assert rows("words --input 'text= shoe, hat'") == [{"text": " shoe, hat", "version": 7}]
    assert [row["text"] for row in rows("words --input", '["shoe, hat", "coat"]')] == ["shoe, hat", "coat"]
    assert [row["text"] for row in rows("words --input 'a, b' --input text=c")] == ["a, b", "c"]
    assert rows("flags --input true,0")[0]["on"] == [True, False]


def test_numbers_beyond_int64_keep_their_digits(tmp_path: Path) -> None:
    expected = [{"x": [1, 2**63 + 1], "version": 7}, {"x": [2**64 - 1, 3], "version": 7}]
    assert rows("hashes --input", f"1,{2**63 + 1}", "--input", f"[[{2**64 - 1}, 3]]") == expected
    (tmp_path / "rows.json").write_text(f'[{{"x": [1, {2**63 + 1}]}}, {{"x": [{2**64 - 1}, 3]}}]')
    assert rows("hashes --json rows.json") == expected
    data = f"[1, {2**63 + 1}, {2**64 - 1}, 3]"
    request = f'{{"inputs": [{{"name": "x", "shape": [2, 2], "datatype": "UINT64", "data": {data}}}]}}'
    assert rows("hashes --json -", stdin=request) == expected
    (tmp_path / "rows.csv").write_text(f"a,b\n1,{2**63 + 1}\n{2**64 - 1},3\n")
    assert rows("hashes --csv rows.csv") == expected
    assert "is object, the model takes UINT64" in complaint("hashes --input '[[null, 1]]'")


def test_no_rows_are_said_to_be_none(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.float32))
    assert "has no rows" in complaint("m --npy none.npy")
    (tmp_path / "none.json").write_text("[]")
    assert "has no rows" in complaint("m --json none.json")


def test_json_is_rows_or_inputs_or_a_request_of_the_protocol(tmp_path: Path) -> None:
    request = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
    for content in ([[1, 2, 3]], [1, 2, 3], {"x": [[1, 2, 3]]}, {"x": [1, 2, 3]}, request):
        (tmp_path / "in.json").write_text(json.dumps(content))
        assert rows("m --json in.json") == [{"x": [1, 2, 3], "version": 7}], content
    assert rows("m --json -", stdin="[[1, NaN, 3]]")[0]["x"] == [1, None, 3]
    objects = '[{"a": [1, 2], "b": 1}, {"b": 2, "a": [3, 4]}]'
    assert [row["b"] for row in rows("two --json -", stdin=objects)] == [1, 2]


def test_rows_as_they_are_in_words_json_and_tables(tmp_path: Path) -> None:
    row = json.dumps(table_model.ROW)
    one = {"age": 72.0, "plan": "basic", "since": 1748649600.0, "active": 1.0, "balance": None, "version": 7}
    assert rows("charges", row) == [one]
    (tmp_path / "rows.json").write_text(f"[{row}, {row}]")
    assert rows("charges", row, row) == [one, one] == rows("charges --json rows.json")
    table = tmp_path / "rows.csv"
    table.write_text("since,id,plan,age,balance,active\n2025-05-31,1,basic,72,,yes\n,2,,,0.5,\n")
    gaps = {**dict.fromkeys(one), "plan": "", "balance": 0.5, "version": 7}
    assert rows(f"charges --csv {table}") == [one, gaps]
    table.write_text('since;"id, old";plan;age;balance;active\n31.05.2025;1;basic;72;;yes\n;2;;;0.5;\n')
    assert rows(f"charges --csv {table}") == [one, gaps]
    dates, plans = pa.array([20239, None], pa.date32()), pa.array(["basic", None]).dictionary_encode()
    columns = {"age": [72, None], "plan": plans, "since": dates, "active": [True, None], "balance": [None, 0.5]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert rows("charges --parquet rows.parquet") == [one, gaps]
    assert rows("iris", '{"width": 2, "length": 1}') == [{"x": {"length": 1.0, "width": 2.0}, "version": 7}]
    assert "length 1, width 2" in predict("iris", '{"width": 2, "length": 1}').stdout
    table.write_text(table.read_text().replace("0.5;", "0.5;perhaps"))
    assert "active = 'perhaps': row 1 is no truth" in complaint(f"charges --csv {table}")
    assert "plan = '': is missing" in complaint("charges", '{"age": 72}')


def test_to_a_model_without_a_batch_each_row_is_a_request(tmp_path: Path, host: FakeHost) -> None:
    first, second = ({"x": [[1, 2], [3, 4]], "rate": 5, "version": 7}, {"x": [[0, 0], [0, 1]], "rate": 6, "version": 7})
    assert rows("alone --input x=1,2,3,4 --input rate=5") == [first]
    stacked = tmp_path / "rows.npz"
    np.savez(stacked, x=np.array([first["x"], second["x"]], np.float32), rate=np.array([5, 6]))
    assert rows(f"alone --npy {stacked}") == [first, second]
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
    request = {"inputs": [tensor, {"name": "rate", "shape": [], "datatype": "INT64", "data": [5]}]}
    assert rows("alone --json -", stdin=json.dumps(request)) == [first]
    assert [call.inputs["x"].shape for call in host.models_by_name["alone"].calls] == [(2, 2)] * 4


def test_rows_may_differ_where_the_input_leaves_it_open(tmp_path: Path, host: FakeHost) -> None:
    ragged = [[1, 2], [3, 4], [5], [6, 7, 8]]
    pyarrow.parquet.write_table(pa.table({"x": ragged}), tmp_path / "in.parquet")
    words = [f"--input={','.join(map(str, row))}" for row in ragged]
    for given in (words, ["--input", json.dumps(ragged)], ["--parquet", "in.parquet"]):
        before = len(host.models_by_name["wide"].calls)
        assert [row["x"] for row in rows("wide", *given)] == ragged, given
        shapes = [call.inputs["x"].shape for call in host.models_by_name["wide"].calls[before:]]
        assert shapes == [(2, 2), (1, 1), (1, 3)], given
    objects = [{"tokens": ["a", "b"], "weight": 1}, {"tokens": ["c"], "weight": 2}]
    found = rows("texts --json -", stdin=json.dumps(objects))
    assert [(row["tokens"], row["weight"]) for row in found] == [(["a", "b"], 1), (["c"], 2)]
    assert "a b" in predict("texts --json -", stdin=json.dumps(objects)).stdout


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        (
            "two",
            "3",
            'is neither inputs nor rows. write {"a": [...], "b": [...]} or [{"a": ..., "b": ...}, ...]; inputs:',
        ),
        ("two", "[[1, 2]]", 'is neither inputs nor rows. write {"a": [...], "b": [...]} or'),
        ("m", "3", 'is neither inputs nor rows. write {"x": [...]} or [{"x": ...}, ...]; inputs: x: FP32 [any, 3]'),
        ("two", '[{"a": [1, 2], "b": 1}, {"a": [3, 4]}]', "row 1 has other inputs than row 0"),
        (
            "m",
            '[{"x": 1}, {"x": 2}, {"x": 3}]',
            "its 3 rows do not make 3 of the input 'x'. the input is FP32 [any, 3]",
        ),
        ("two", '{"a": [1, 2], "c": 3}', "the model has no input 'c'. inputs: a: FP32 [any, 2], b: INT64 [any]"),
        ("texts", '{"tokens": [["a", "b"], "c"], "weight": [1, 2]}', "has rows of different lengths"),
        ("m", '{"inputs": [{"name": "x"}]}', "is no request of the protocol: KeyError('data')"),
        ("m", '{"inputs": [{"name": "x", "shape": [], "data": [1]}]}', "the input 'x' has the shape [], which has no"),
    ],
)
def test_json_that_says_too_little_is_refused_with_what_to_write(model: str, text: str, message: str) -> None:
    Path("in.json").write_text(text)
    assert message in complaint(model, "--json", "in.json")


def test_tables_in_csv_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,a,b,c\nq,1,2,3\nr,4,5,6\n")
    assert [row["x"] for row in rows("m --csv in.csv --columns c,b,a")] == [[3, 2, 1], [6, 5, 4]]
    (tmp_path / "in.tsv").write_text("a\tb\tc\n1\t2\t3\n")
    assert rows("m --csv in.tsv")[0]["x"] == [1, 2, 3]
    pyarrow.parquet.write_table(pa.table({"a": [[1, 2]], "b": [7]}), tmp_path / "in.parquet")
    assert rows("two --parquet in.parquet") == [{"a": [1, 2], "b": 7, "version": 7}]


def test_words_of_a_csv_file_stay_as_they_are_whatever_they_look_like(tmp_path: Path) -> None:
    words = ["001", "1.50", "12345678901234567890123", "true", ""]
    (tmp_path / "in.csv").write_text("text,y\n" + "".join(f"{word},1\n" for word in words))
    specs = [TensorMetadata("text", "BYTES", [-1]), TensorMetadata("y", "INT64", [-1])]
    found = from_table(tmp_path / "in.csv", [], specs)
    assert list(found["text"]) == [word.encode() for word in words]
    assert list(found["y"]) == [1] * 5


def test_the_name_of_a_folder_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "days" / "day=3").mkdir(parents=True)
    table = pa.table({"a": [1.0], "b": [2.0], "c": [3.0]})
    pyarrow.parquet.write_table(table, tmp_path / "days" / "day=3" / "t.parquet")
    assert rows("m --parquet days") == [{"x": [1, 2, 3], "version": 7}]


def test_more_rows_than_a_request_takes_are_asked_in_turn(tmp_path: Path, host: FakeHost) -> None:
    (tmp_path / "in.csv").write_text("a,b,c\n" + "".join(f"{row},0,0\n" for row in range(10)))
    before = len(host.models_by_name["m"].calls)
    found = rows("m --csv in.csv --rows-per-request 4")
    assert [row["x"] for row in found] == [[row, 0, 0] for row in range(10)]
    assert [call.num_rows for call in host.models_by_name["m"].calls[before:]] == [4, 4, 2]


def test_deep_pictures_keep_their_greys(tmp_path: Path) -> None:
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    (found,) = rows("picture --image deep.png")
    np.testing.assert_allclose(found["image"], GREY[None] / 255, atol=1e-6)
    Image.fromarray(GREY.astype(np.float32)).save(tmp_path / "float.tiff")
    assert "has 32 bits a pixel (mode F). send an array (--npy)" in complaint("picture --image float.tiff")


def test_pictures_in_the_models_size_and_channels(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "grey.png")
    Image.fromarray(np.stack([GREY] * 3, axis=2).repeat(2, 0).repeat(2, 1)).save(tmp_path / "large.png")
    (found,) = rows("picture --image grey.png")
    np.testing.assert_allclose(found["image"], GREY[None] / 255, atol=1e-6)
    (found,) = rows("picture --image grey.png --white 255")
    np.testing.assert_array_equal(found["image"], GREY[None])
    assert "a white pixel was sent as 1; --white 255" in predict("picture --image grey.png").stderr
    assert "--white" not in predict("picture --image grey.png --white 1").stderr
    assert "--white" not in predict("wholes --image grey.png").stderr  # in whole numbers there is no doubt
    both = rows("colours --image grey.png --image large.png")
    np.testing.assert_array_equal(both[0]["image"], np.stack([GREY] * 3, axis=2))
    assert np.shape(both[1]["image"]) == (4, 4, 3)
    (found,) = rows("planes --image grey.png")
    np.testing.assert_array_equal(found["image"], np.stack([GREY] * 3))


def test_arrays_alone_by_name_and_together(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(2, 3))
    np.save(tmp_path / "one.npy", np.arange(3.0))
    np.savez(tmp_path / "two.npz", a=np.ones((1, 2)), b=np.array([5]))
    assert [row["x"] for row in rows("m --npy x.npy")] == [[0, 1, 2], [3, 4, 5]]
    assert rows("m --npy x=one.npy")[0]["x"] == [0, 1, 2]
    assert rows("two --npy two.npz") == [{"a": [1, 1], "b": 5, "version": 7}]


def test_versions_tracks_and_keys_are_passed_on(host: FakeHost) -> None:
    assert rows("m@6 --input 1,2,3")[0]["version"] == 6
    rows("m --input 1,2,3 --sticky me --track candidate --deadline-s 5")
    call = host.models_by_name["m"].calls[-1]
    assert (call.sticky, call.track, call.deadline_s is not None) == ("me", "candidate", True)
    assert "a known key is required" in complaint("m --input 1,2,3 --key wrong")


def test_what_is_not_finite_is_null(host: FakeHost) -> None:
    assert rows("m --input 1,nan,3")[0]["x"] == [1, None, 3]


def test_a_table_for_people_and_who_answered() -> None:
    result = predict("m --input 1,2.5,3")
    assert result.stdout.splitlines()[1].split() == ["0", "1", "2.5", "3", "(largest:", "2)"]
    assert result.stderr.startswith("m version 7, ")
    assert "... (20 values)" in predict("long --input", ",".join("1" * 20)).stdout
    assert "shoe" in predict("words --input shoe").stdout
    assert "logits[a]:key:" in predict("odd --input 1").stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m", "is not one kind of input. give one of ROW, --input, --json, --csv or --parquet, --image"),
        ("m --input 1 --json -", "inputs = '--input --json': is not one kind of input"),
        ("m@champion --input 1", "no model 'm'"),
        ("m --input 1,b,3", "input = '1,b,3': is not a list of FP32. for example x=1,0,1"),
        ("m --input y=1,2,3", "the model has no input 'y'. inputs: x: FP32 [any, 3]"),
        ("m --input '[[1, 2], [3]]'", "has rows of different lengths. the input is FP32 [any, 3]"),
        ("wide --input '[[1, 2], 3]'", "has rows of different lengths. the input is FP32 [any, any]"),
        ("wide --input '[[1, [2]], [3]]'", "has rows of different lengths"),
        ("m --input '[[1, 2]]' --input '[[1, 2, 3]]'", "has rows of another shape than x=... before it"),
        ("words --input '[1]'", "'text': element 0 is 1, no text"),
        ("m --input '[1, 2'", "is not JSON"),
        (
            "two --input 1,2",
            "does not say for which input. write a=...; inputs: a: FP32 [any, 2], b: INT64 [any]",
        ),
        ("two --input a=1,2,3,4 --input b=1", "inputs have different numbers of rows"),
        ("two --input a=1,2", "input 'b' is missing"),
        ("m --input 1,2", "input 'x': expected FP32 [-1, 3]"),
        ("m --json .", "'.': cannot be read: Is a directory. give a file, or -"),
        *((f"nobody {each} x=none", "'x=none': is not there") for each in ("--json", "--csv", "--npy", "--image")),
        ("m --image .", "which is no picture. send an array (--npy)"),
        ("nobody --input 1", "there is no model 'nobody'"),
        ("m@77 --input 1,2,3", "has no version '77'"),
        ("m --input 1,2,3 --track left", "expected stable or candidate"),
    ],
)
def test_what_does_not_fit_is_said_with_a_remedy(line: str, message: str) -> None:
    assert message in complaint(line)


def test_an_alias_asks_for_the_version_that_it_means() -> None:
    for _ in range(7):
        Registry().register(
            "m",
            WeightSnapshot.of(1, {"weight": np.zeros(1, np.float32)}),
            model=ModelFactory(factory="mine:clean"),
            signature=Signature(inputs=[], outputs=[]),
        )
    Registry().promote("m@6")
    assert rows("m@champion --input 1,2,3") == [{"x": [1, 2, 3], "version": 6}]


def test_a_file_that_is_no_array_is_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "cannot be read" in complaint("m --npy objects.npy")


def broken_files(folder: Path) -> dict[str, bytes]:
    """By name, what a file holds that cannot be read."""
    np.save(folder / "whole.npy", np.zeros((2, 3)))
    np.savez(folder / "whole.npz", x=np.zeros((2, 3)))
    Image.fromarray(GREY).save(folder / "whole.jpg")
    pyarrow.parquet.write_table(pa.table({"x": [1.0] * 9}), folder / "whole.parquet")
    array, archive, picture, table = (
        (folder / f"whole.{end}").read_bytes() for end in ("npy", "npz", "jpg", "parquet")
    )
    words = io.BytesIO()
    with zipfile.ZipFile(words, "w") as file:
        file.writestr("x", "hello")
    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    bomb = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in
                    ((b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")))  # fmt: skip
    return {
        **{"empty.npy": b"", "cut.npy": array[:-9], "text.npy": b"hello", "archive.npy": archive},
        **{"head.npy": array[:10] + b"(" * 20 + array[30:], "empty.npz": b"", "array.npz": array},
        **{"cut.npz": archive[:-30], "words.npz": words.getvalue()},
        **{
            "empty.json": b"",
            "deep.json": b"[" * 100_000,
            "long.json": b"[1" + b"0" * 5000 + b", 2, 3]",
            "no.json": b"\xff",
        },
        **{"empty.csv": b"", "cut.csv": b"a,b,c\n1,2\n", "twice.csv": b"a,a,c\n1,2,3\n"},
        **{"empty.parquet": b"", "flipped.parquet": table[:20] + b"\xff" * 30 + table[50:]},
        **{"empty.png": b"", "cut.jpg": picture[:200], "bomb.png": b"\x89PNG\r\n\x1a\n" + bomb},
    }


def test_a_broken_file_is_said_in_a_line(tmp_path: Path) -> None:
    kinds = {"npz": "npy", "png": "image", "jpg": "image"}
    for name, content in broken_files(tmp_path).items():
        (tmp_path / name).write_bytes(content)
        end = name.rpartition(".")[2]
        kind = kinds.get(end, end)
        said = complaint("picture" if kind == "image" else "m", f"--{kind}", name)
        assert "\n" not in said, name
        assert name in said or name == "twice.csv", said


def test_a_wrong_row_is_said_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,c\n1,2,3\n4,x,6\n")
    assert "column = 'b': row 1 cannot be FP32" in complaint("m --csv t.csv")
    (tmp_path / "t.csv").write_text("a,b,c\n1,2,3\n4,5\n")
    assert "Row #3: Expected 3 columns" in complaint("m --csv t.csv")
    table = pa.table({"x": [[1.0], [2.0], [3.0, 4.0], [5.0, None]]})  # of which the last two make a request
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert "column = 'x': row 3 has no value" in complaint("wide --parquet t.parquet")


def test_pictures_may_differ_in_size_where_the_input_leaves_it_open(tmp_path: Path, host: FakeHost) -> None:
    for name, rows_of in (("a.png", 4), ("b.png", 2)):
        Image.fromarray(GREY[:rows_of]).save(tmp_path / name)
    assert predict("sizes --image a.png --image b.png").exit_code == 0
    shapes = [call.inputs["image"].shape for call in host.models_by_name["sizes"].calls]
    assert shapes == [(1, 4, 4), (1, 2, 4)]
    assert "is no number of a pixel" in complaint("picture --image a.png --white nan")
    assert "which is no picture" in complaint("flags --image a.png")
