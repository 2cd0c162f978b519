"""Batch prediction: every row of a file or folder gets a registered model's outputs, in Parquet.

    python -m shoal.libs.batch_predict.flow model=fashion@champion input=images.parquet output=predicted

Called by `shoal batch-predict`, in a process connected to a Ray cluster. It owns the order of events and the run
record; the workers do the work.
"""

from __future__ import annotations

import time
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import Field

import shoal.runs
from shoal.config import Spec
from shoal.errors import DataError, needs_extra
from shoal.extend.cluster import expected_run_id, job_main
from shoal.extend.registry import ModelVersion, Registry
from shoal.extend.serve import BatchLayout, GpuCount, ModelOptions, RegisteredModel
from shoal.libs.batch_predict.output import BucketOutput, open_lines
from shoal.libs.batch_predict.table_predictor import find_texts
from shoal.open_inference.tables import choose_columns, parse_columns
from shoal.store import is_url, locate, open_source, require_location

with needs_extra("data"):
    import pyarrow as pa
    import pyarrow.parquet

JOB = "batch_predict"
SUFFIXES = (".parquet", ".csv", ".jsonl")


class BatchPredictSpec(Spec):
    """A model, its input rows, and how to run it.

    model:         name@version, name@alias, or name for the newest version; fixed when the run begins
    input:         a file of Parquet, CSV or JSON lines, or a folder of one kind; or its URL
    output:        a new folder, or its URL: Parquet files with the rows in their order
    columns:       the columns of an input: `a,b,c` for the only one, `x=a,b,c` for each of several
    text:          of a language model: the column of texts, or of messages, that it answers
    generate:      of its answers: fields of the HTTP API, such as `max_tokens`
    keep:          columns to copy from the input; empty for all
    skip_errors:   rows that the model fails on get no outputs, and the reason in the column `error`
    workers:       processes with a copy of the model; None for one on each CPU but one, as far as GPUs suffice
    num_gpus:      GPUs, or a fraction of one, for each worker; None: with `options.device: cuda` one, or an even share
                   when there are more workers than GPUs, and otherwise 0
    torch_threads: per worker
    options:       how to run the model: precision, device, compile, preprocess, ...
    """

    model: str = ""
    input: str = ""
    output: str = ""
    columns: list[str] = Field(default_factory=list)
    text: str = ""
    generate: dict[str, Any] = Field(default_factory=dict)
    keep: list[str] = Field(default_factory=list)
    skip_errors: bool = False
    workers: int | None = Field(default=None, ge=1)
    num_gpus: GpuCount | None = None
    torch_threads: int = Field(default=1, ge=1)
    options: ModelOptions = ModelOptions(max_batch_size=256, max_queue_size=1024)


def list_input_files(path: str) -> list[Path]:
    """The file, or the files of the folder sorted by name. Raises ConfigError, DataError."""
    location = locate(path, "input")
    paths = sorted(location.iterdir(), key=attrgetter("name")) if location.is_dir() else [location]
    files = [file for file in paths if file.suffix in SUFFIXES and not file.name.startswith(".")]
    if not files or not all(file.is_file() for file in files):
        raise DataError("input", path, "is no file of Parquet, CSV or JSON lines (.jsonl), nor a folder of them")
    kinds = {file.suffix for file in files}
    if len(kinds) > 1:
        raise DataError("input", path, f"has files of {' and '.join(sorted(kinds))}", "give each kind a folder")
    return files


def check(spec: BatchPredictSpec) -> None:
    """Require the model, the columns and readable files. Raises ConfigError, DataError, RegistryError."""
    for field in ("model", "input", "output"):
        if not getattr(spec, field):
            raise DataError(field, "", "is not given", f"write {field}=...")
    open_output(spec.output)
    # Of all files now: a broken one must not fail the run hours later.
    schemas = {file: _read_schema(file) for file in list_input_files(spec.input)}
    first, *others = schemas
    chosen = _match_columns(Registry().get(spec.model), spec, schemas[first])
    texts = [spec.text] if spec.text else []
    if missing := [column for column in (*spec.keep, *texts) if column not in schemas[first].names]:
        raise DataError(
            "text" if missing[0] == spec.text else "keep",
            missing[0],
            "is not in the table",
            f"it has {', '.join(schemas[first].names)}",
        )
    wanted = [*(column for columns in chosen.values() for column in columns), *spec.keep]
    for file in others:
        if wrong := [column for column in wanted if schemas[file].names.count(column) != 1]:
            problem = f"the column {wrong[0]!r} is not once in it, as in {first.name}"
            raise DataError("input", str(file), problem, "give each file the same columns")


def open_output(path: str) -> Path | BucketOutput:
    """A new folder, or one in a bucket. Raises ConfigError, DataError."""
    if is_url(location := require_location("output", path) if is_url(path) else path):
        output = BucketOutput(location)
        output.require_new()
        return output
    folder = Path(location).resolve()
    if folder.exists():
        raise DataError("output", path, "exists already", "name a folder that does not, or remove it")
    return folder


def _match_columns(version: ModelVersion, spec: BatchPredictSpec, seen: pa.Schema) -> dict[str, list[str]]:
    """The columns of each of the model's inputs. Raises ConfigError for options that do not fit them, DataError."""
    if spec.text:
        find_texts("check")(version, spec.options, spec.generate)
        return {"text": [spec.text]}
    inputs = BatchLayout(version.manifest.signature, spec.options).signature.inputs
    try:
        return choose_columns(inputs, seen.names, parse_columns(spec.columns, inputs))
    except DataError as error:
        if "tokenizer.json" in version.manifest.files:
            remedy = f"for answers to texts: --text COLUMN, of {', '.join(seen.names)}"
            raise DataError(error.field, error.value, error.problem, remedy) from None
        raise


def batch_predict(spec: BatchPredictSpec, job: str) -> str:
    """Predict every row and return the run's id. Raises DataError, RegistryError, RunError, ClusterError."""
    from shoal.libs.batch_predict.ray_batch import BLOCK_ROWS, TEXT_BLOCK_ROWS, BatchJob, predict_files, resolve_gpus

    check(spec)
    registry, files = Registry(), list_input_files(spec.input)
    version = registry.get(spec.model)
    chosen = _match_columns(version, spec, _read_schema(files[0]))
    work = BatchJob(
        RegisteredModel(version.name, registry.location),
        version.version,
        spec.options,
        chosen,
        spec.keep or None,
        spec.skip_errors,
        spec.torch_threads,
        spec.text,
        spec.generate,
    )
    with shoal.runs.create(job, spec.to_record(), expected_run_id(), kind=shoal.runs.RunKind.PREDICTION) as recorder:
        begun_s = time.monotonic()
        kind = "file" if len(files) == 1 else "files"
        print(f"run {recorder.id}: {version.ref} answers the rows of {spec.input} ({len(files)} {kind})", flush=True)
        num_gpus = resolve_gpus(spec.num_gpus, spec.options, spec.workers)
        block_rows, output = TEXT_BLOCK_ROWS if spec.text else BLOCK_ROWS, open_output(spec.output)
        rows = predict_files(work, files, output, spec.workers, num_gpus, block_rows)
        seconds = time.monotonic() - begun_s
        recorder.record_event("predicted", model=version.name, version=version.version, rows=rows, seconds=seconds)
        print(f"{rows:,} rows in {seconds:.1f} s ({rows / seconds:,.1f} rows/s): {spec.output}", flush=True)
    return recorder.id


def _read_schema(file: Path) -> pa.Schema:
    """The file's schema; that of lines is inferred from their beginning. Raises DataError."""
    try:
        if file.suffix != ".parquet":
            with open_lines(file) as reader:
                return reader.schema
        with open_source(file) as source:
            return pyarrow.parquet.read_schema(source)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError("input", str(file), f"cannot be read: {reason}", f"give a sound {file.suffix} file") from None


if __name__ == "__main__":
    job_main(BatchPredictSpec(), batch_predict, job=JOB, check=check)
