"""Batch prediction through Ray Data: files in, files out, with a TablePredictor in every worker.

Called by the flow, on a cluster. Rows keep their order, and the output's folder appears complete or not at all.
"""

from __future__ import annotations

import gc
import logging
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import ray
import ray.data
import ray.util.annotations
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.datasource import WriteResult

from shoal.device_memory import limit_device_memory
from shoal.errors import ClusterError, DataError, RunError, error_summary
from shoal.extend.cluster import (
    GPU_GRAINS,
    PlacementRequest,
    gpu_share,
    gpus_by_host,
    require_gpus,
    wait_for_resource,
)
from shoal.extend.serve import ModelOptions, RegisteredModel
from shoal.libs.batch_predict.output import (
    BucketOutput,
    Part,
    count_rows,
    has_rows,
    make_incoming_path,
    open_lines,
    publish_output,
    read_csv_options,
    require_all_rows,
    verify_row_count,
)
from shoal.libs.batch_predict.table_predictor import TablePredictor, TextPredictor, keep_columns
from shoal.store import BucketPath, fetch

BLOCK_ROWS = 4096  # sent to a worker together
TEXT_BLOCK_ROWS = 128  # of texts: each takes seconds, and a block's last ones leave slots of the engine empty
READ_ROWS = 65536  # of a file in a bucket, at once
FILE_IO_CPUS = 0.5  # reserved by reading, and by writing
MIN_WORKER_CPUS = 0.25  # of a worker
CAPACITY_WAIT_S = 2.0  # the wait for places, which processes that just ended still occupy
PLACEMENT_ATTEMPTS = 3
WORKER_RESTARTS = 2  # Ray Data's default has no limit, even for rows that kill every worker
_REMEDY = "wait for what runs (`shoal status`), or use fewer workers"
_NAMED = re.compile(r"^[\w.]*(?:Error|Exception): .+$", re.MULTILINE)


@dataclass(frozen=True)
class BatchJob:
    """The parameters of every worker, as in TablePredictor; with `text`, a column, as in TextPredictor."""

    source: RegisteredModel
    version: int
    options: ModelOptions
    columns_by_input: Mapping[str, Sequence[str]]
    keep: Sequence[str] | None
    skip_errors: bool
    torch_threads: int
    text: str = ""
    generate: Mapping[str, Any] = field(default_factory=dict)


class PredictWorker:
    """Ray Data's object in each worker: forwards to a TablePredictor or a TextPredictor."""

    def __init__(self, job: BatchJob, num_gpus: float) -> None:
        limit_device_memory(num_gpus)
        self._job, self._texts = job, None
        if job.text:
            self._texts = TextPredictor(job.source, job.version, job.options, job.generate, job.torch_threads)
            return
        self._predictor = TablePredictor(
            job.source.load_package(job.version),
            job.options,
            columns_by_input=job.columns_by_input,
            keep=job.keep,
            skip_errors=job.skip_errors,
            torch_threads=job.torch_threads,
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        if self._texts is None:
            return self._predictor(table)
        answers = self._texts(table[self._job.text], self._job.skip_errors)
        output = keep_columns(table, self._job.keep, answers.column_names)
        for name in answers.column_names:
            output = output.append_column(name, answers[name])
        return output


class BucketTables(ray.data.Datasource):
    """Files of a bucket, all of one kind, each read by one task on any host."""

    def __init__(self, files: Sequence[BucketPath]) -> None:
        self._files = files

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ray.data.ReadTask]:
        return [
            ray.data.ReadTask(
                partial(_read_tables, file),
                BlockMetadata(None, file.size_bytes, None, input_files=(file.url,)),
            )
            for file in self._files
        ]


class PartSink(ray.data.Datasink[Part | None]):
    """Writes the parts of an output; `parts` has them afterwards."""

    def __init__(self, output: BucketOutput) -> None:
        self._output = output
        self.parts: list[Part] = []

    def write(self, blocks: Iterable[Block], ctx: Any) -> Part | None:
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        return self._output.write_part(ctx.task_idx, [table for table in tables if table.num_rows])

    def on_write_complete(self, write_result: WriteResult[Part | None]) -> None:
        self.parts = [part for part in write_result.write_returns if part is not None]


def _read_tables(file: BucketPath) -> Iterator[pa.Table]:
    fetch([file])
    if file.suffix != ".parquet":
        with open_lines(file) as reader:
            yield from (pa.Table.from_batches([batch]) for batch in reader)
        return
    with pyarrow.parquet.ParquetFile(file) as source:
        yield from (pa.Table.from_batches([batch]) for batch in source.iter_batches(READ_ROWS))


def predict_files(
    job: BatchJob,
    files: Sequence[Path],
    output: Path | BucketOutput,
    workers: int | None,
    num_gpus: float = 0.0,
    block_rows: int = BLOCK_ROWS,
) -> int:
    """Write Parquet files with a row for each row of `files` (all of one kind); returns the number of rows.

    workers:    processes with the model; None: one on each free CPU except one, which reads and writes, and no more
                than fit the free GPUs
    num_gpus:   GPUs that each worker reserves
    block_rows: rows that a worker gets together

    Raises RunError with the error of the first worker that failed, when workers die repeatedly, or when another process
    has created `output` by the end; DataError for no rows; ConfigError when the cluster has too few GPUs, ClusterError
    when no CPU or GPU is free.
    """
    if not has_rows(files):
        raise DataError("input", str(files[0]), "has no rows", "there is nothing to predict")
    if num_gpus:
        require_gpus(num_gpus, workers or 1, "num_gpus or workers")
    count, cpus_each = _allocate_workers(workers, num_gpus)
    reserved = {"num_cpus": cpus_each, **({"num_gpus": num_gpus} if num_gpus else {})}
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.use_datasource_v2 = False  # it lists Parquet files in a task of 1 CPU, whatever reading reserves
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the error is raised and shown once
    with ExitStack() as on_failure:
        if isinstance(output, Path):
            incoming = make_incoming_path(output)
            on_failure.callback(shutil.rmtree, incoming, ignore_errors=True)
        else:
            on_failure.callback(output.discard)
            sink = PartSink(output)

        def predict() -> None:
            rows = _map(_read(files, block_rows), job, count, reserved, block_rows)
            if isinstance(output, Path):
                rows.write_parquet(str(incoming), ray_remote_args={"num_cpus": FILE_IO_CPUS})
            else:
                rows.write_datasink(sink, ray_remote_args={"num_cpus": FILE_IO_CPUS})

        if (failure := _catch_failure(predict)) is not None:
            gc.collect()  # ends the workers: Ray Data drops them, but reference cycles keep its objects alive
            raise failure
        if isinstance(output, Path):
            num_rows = verify_row_count(incoming, files)
        else:
            num_rows = sum(part.rows for part in sink.parts)
            require_all_rows(num_rows, files)
        on_failure.pop_all()
    if isinstance(output, Path):
        publish_output(incoming, output)
    else:
        output.publish(sink.parts)
    return num_rows


def _read(files: Sequence[Path], block_rows: int) -> ray.data.Dataset:
    options: dict[str, Any] = {"num_cpus": FILE_IO_CPUS}
    if block_rows != BLOCK_ROWS:  # a small file is one block, and so one worker's; `repartition` takes a CPU of its own
        options["override_num_blocks"] = max(len(files), math.ceil(count_rows(files) / block_rows))
    if in_bucket := [file for file in files if isinstance(file, BucketPath)]:
        return ray.data.read_datasource(BucketTables(in_bucket), **options)
    paths = [str(file) for file in files]
    if paths[0].endswith(".csv"):
        return ray.data.read_csv(paths, partitioning=None, **options, **read_csv_options(files[0]))
    if paths[0].endswith(".jsonl"):
        return ray.data.read_json(paths, partitioning=None, file_extensions=None, **options)
    # `partitioning`, in all: a folder named day=3 is not a column
    # Ray Data ignores the part of a path after a ? when it checks the extension.
    return ray.data.read_parquet(paths, partitioning=None, file_extensions=None, **options)


def _catch_failure(predict: Callable[[], None]) -> RunError | None:
    """As text only: the frames of Ray's error keep the workers, and so their CPUs, reserved."""
    try:
        predict()
    except ray.exceptions.RayError as error:
        return _to_run_error(error)
    return None


def _map(
    rows: ray.data.Dataset, job: BatchJob, count: int, reserved: Mapping[str, float], block_rows: int
) -> ray.data.Dataset:
    with warnings.catch_warnings():
        # Ray 2.60 has no other way to limit restarts, although this one is deprecated.
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)
        return rows.map_batches(
            PredictWorker,
            fn_constructor_args=(job, reserved.get("num_gpus", 0.0)),
            batch_format="pyarrow",
            batch_size=block_rows,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=count),
            **reserved,
            zero_copy_batch=True,
            max_restarts=WORKER_RESTARTS,
            max_task_retries=WORKER_RESTARTS,
        )


def resolve_gpus(num_gpus: float | None, options: ModelOptions, workers: int | None) -> float:
    """The GPUs that each worker reserves: as given; else, for a model with `device: cuda`, one or an even share of
    all."""
    if num_gpus is not None or not options.needs_cuda:
        return num_gpus or 0.0
    return gpu_share(workers or 1, gpus_by_host())


def _allocate_workers(workers: int | None, num_gpus: float) -> tuple[int, float]:
    """The number of workers and the CPUs of each, since Ray Data waits without end for resources that are never free.

    Raises ClusterError when the cluster has no capacity for them and a reader.
    """
    for _ in range(PLACEMENT_ATTEMPTS):
        count, cpus_each = _divide_capacity(workers, num_gpus)
        gpus = {"GPU": num_gpus} if num_gpus else {}
        with closing(PlacementRequest([{"CPU": cpus_each, **gpus}, {"CPU": FILE_IO_CPUS}])) as request:
            if request.is_granted(CAPACITY_WAIT_S):  # what Ray reports as free may be some tenths of a second old
                return count, cpus_each
    raise ClusterError(f"a worker needs {cpus_each:g} CPUs of one node free, and a reader {FILE_IO_CPUS:g}: {_REMEDY}")


def _divide_capacity(workers: int | None, num_gpus: float) -> tuple[int, float]:
    least = FILE_IO_CPUS + (workers or 1) * MIN_WORKER_CPUS
    free = wait_for_resource("CPU", least, CAPACITY_WAIT_S) - FILE_IO_CPUS
    count = workers or max(1, int(free))
    if num_gpus:
        free_gpus = wait_for_resource("GPU", num_gpus * (workers or 1), CAPACITY_WAIT_S)
        places = int(free_gpus / num_gpus + 0.5 / GPU_GRAINS)
        if places < (workers or 1):
            remedy = f"{_REMEDY} or a smaller num_gpus"
            raise ClusterError(f"{count} workers need {count * num_gpus:g} GPUs, {free_gpus:g} are free: {remedy}")
        count = min(count, places)
    if free < count * MIN_WORKER_CPUS:
        raise ClusterError(f"{count} workers need {count * MIN_WORKER_CPUS + FILE_IO_CPUS:g} CPUs free: {_REMEDY}")
    return count, min(1.0, free / count)


def _to_run_error(error: Exception) -> RunError:
    """The error of our worker, which Ray Data leaves as a traceback's text; or the last error named there."""
    text = str(error).strip()
    if ours := error_summary(text):  # also for a worker that failed to start, which Ray reports as dead
        return RunError(ours)
    if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)):
        why = "its process was killed, for example out of memory, or the model ended it"
        remedy = "try fewer workers, a smaller options.max_batch_size, or fewer rows"
        return RunError(f"a worker with the model died, after {WORKER_RESTARTS} others: {why}. {remedy}")
    named = _NAMED.findall(text) or text.splitlines() or [repr(error)]  # Ray adds advice below
    return RunError(f"batch prediction failed: {named[-1]}")
