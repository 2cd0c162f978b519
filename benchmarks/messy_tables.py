"""Twelve files as people have them, from the file to a served row, without a kind that is set by hand.

    python -m benchmarks.messy_tables [--quick]

Each file of `benchmarks.ours.messy_files` is trained on, briefly, and predicted as by a worker of `shoal
batch-predict`, three of them by its whole job, too; the output is compared cell by cell with what `csv.DictReader`
reads. Then one endpoint serves all twelve, and each raw row is sent by curl and by `shoal.Client`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pyarrow.parquet

from benchmarks.children import scratch
from benchmarks.ours.messy_files import MessyFile, read_rows, write_all
from benchmarks.result import compare, options, write

WORDS = ["stop.epochs=1", "stop.convergence=null", "threads=1", "trees=false", "network.width=32", "network.members=2"]
BY_JOB = ("german", "without_names", "many_lines")  # predicted through Ray, too
NUM_ROWS, LIMIT_S = 120, 600.0


def train(name: str, file: MessyFile) -> bool:
    """Whether every kind is as it is to be."""
    from shoal.libs.tabular.encoders import Encoders
    from shoal.registry import Registry
    from shoal.train.launch.local import fit_locally
    from shoal.train.launch.overrides import spec_from_overrides

    fit_locally(
        spec_from_overrides(["task=table", f"data={file.path}", f"target={file.target}", f"name={name}", *WORDS])
    )
    encoders = Encoders.parse(Registry().get(name).manifest.model.kwargs["args"]["encoders"])
    return {each.name: each.full_kind for each in encoders.columns} == file.kinds


def predict(name: str, file: MessyFile, output: Path, *, by_job: bool) -> tuple[int, bool]:
    """Cells of the output that are not as in the input, and whether the classes are named. Without the job, what each
    of its workers does is done here."""
    from shoal.extend.serve import ModelOptions, RegisteredModel
    from shoal.libs.batch_predict.flow import BatchPredictSpec, batch_predict
    from shoal.libs.batch_predict.output import open_lines
    from shoal.libs.batch_predict.table_predictor import TablePredictor
    from shoal.registry import Registry

    if by_job:
        batch_predict(BatchPredictSpec(model=name, input=str(file.path), output=str(output), workers=1), "messy")
        table = pyarrow.parquet.read_table(output)
    else:
        package = RegisteredModel(name, Registry().location).load_package(1)
        with open_lines(file.path) as reader:
            table = TablePredictor(package, ModelOptions(max_batch_size=64))(reader.read_all())
    found, rows, target = table.to_pylist(), read_rows(file), str(file.target)
    changed = sum(
        row[column] != answer[f"input_{column}" if column == target else column]
        for row, answer in zip(rows, found, strict=True)
        for column in row
    )
    return changed, {*found[0]["probability"]} == {row[target] for row in rows}


def send(name: str, file: MessyFile, url: str, token: str, folder: Path) -> tuple[int, int]:
    """Raw rows that curl, and the client, are refused."""
    from shoal.client import Client
    from shoal.errors import InferenceError

    rows = read_rows(file, "utf-8")  # with the mark, where there is one
    lines, target = list[str](), f"{url}/v2/models/{name}/rows"
    for at, row in enumerate(rows):
        body = folder / f"{name}-{at}.json"
        body.write_text(json.dumps(row))
        one = [f'url = "{target}"', f'header = "authorization: Bearer {token}"', f'data-binary = "@{body}"']
        lines += ["next"] * (at > 0) + [*one, 'write-out = "%{http_code}\\n"', 'output = "/dev/null"']
    config = folder / f"{name}.curl"
    config.write_text("\n".join(lines))
    said = subprocess.run(
        ["curl", "-s", "-K", str(config)], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    refused = 0
    with Client(url, token=token) as client:
        for row in rows:
            try:
                client.predict(name, row)
            except InferenceError:
                refused += 1
    return len(rows) - said.stdout.split().count("200"), refused


def main() -> None:
    chosen = options(__doc__, runs=1)
    num_rows = 60 if chosen.quick else NUM_ROWS
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        os.chdir(folder)
        import shoal
        from shoal.cluster.embedded_cluster import start_cluster
        from shoal.cluster.job_main import join_cluster

        files = write_all(folder, num_rows)
        right = [train(name, file) for name, file in files.items()]
        predicted = [predict(name, file, folder, by_job=False) for name, file in files.items()]
        with start_cluster(num_cpus=2) as cluster, join_cluster(cluster):
            predicted += [predict(name, files[name], folder / name, by_job=True) for name in BY_JOB]
        with shoal.serve(*files) as endpoint:
            sent = [send(name, file, endpoint.url, endpoint.token, folder) for name, file in files.items()]
    of, by = f"{len(files)} files of {num_rows} rows", "raw rows refused"
    write(
        "messy_tables",
        [
            compare(
                f"{of}: every kind as it is, none set by hand",
                "files",
                "higher",
                [sum(right)],
                bar=12,
                bar_kind="value",
            ),
            compare(f"{of}: {by} by curl", "", "lower", [sum(each for each, _ in sent)], bar=0, bar_kind="value"),
            compare(
                f"{of}: {by} by csv.DictReader", "", "lower", [sum(each for _, each in sent)], bar=0, bar_kind="value"
            ),
            compare(
                f"{of}: cells changed by batch-predict",
                "",
                "lower",
                [sum(each for each, _ in predicted)],
                bar=0,
                bar_kind="value",
            ),
            compare(
                f"{of}: classes named by batch-predict",
                "files",
                "higher",
                [sum(each for _, each in predicted[:12])],
                bar=12,
                bar_kind="value",
            ),
        ],
        chosen.results,
    )


if __name__ == "__main__":
    main()
