"""Batch prediction through Ray Data: files in, files out, with a TablePredictor in every worker.

Called by the flow, on a cluster. Rows keep their order, and the output's folder appears whole or not at all.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import ray
import ray.data

from shoal.errors import RunError, ShoalError
from shoal.serve.options import ModelOptions
from shoal.serve.sources import RegisteredModel
from shoal.serve.table_predictor import TablePredictor

BLOCK_ROWS = 4096  # that travel to a worker together


@dataclass(frozen=True)
class BatchJob:
    """What every worker must know. `said` and `keep` as in TablePredictor."""

    source: RegisteredModel
    version: int
    options: ModelOptions
    said: Mapping[str, Sequence[str]]
    keep: Sequence[str] | None
    skip_errors: bool
    torch_threads: int


class PredictWorker:
    """What Ray Data holds in each worker: forwards to a TablePredictor."""

    def __init__(self, job: BatchJob) -> None:
        self._predictor = TablePredictor(
            job.source.package(job.version),
            job.options,
            said=job.said,
            keep=job.keep,
            skip_errors=job.skip_errors,
            torch_threads=job.torch_threads,
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        return self._predictor(table)


def predict_files(job: BatchJob, files: Sequence[Path], output: Path, workers: int | None) -> int:
    """Write Parquet files with a row for each row of `files` (all CSV or all Parquet); the number of rows.

    workers: processes with the model; None for one on each CPU but one

    Raises what the first worker raised (DataError, InferenceError, WeightsError); RunError for Ray's own trouble.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # which remarks on the bars that are off
    count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) - 1)
    paths = [str(file) for file in files]
    incoming = output.with_name(f".incoming-{output.name}")
    shutil.rmtree(incoming, ignore_errors=True)
    try:
        rows = ray.data.read_csv(paths) if files[0].suffix == ".csv" else ray.data.read_parquet(paths)
        answered = rows.map_batches(
            PredictWorker,
            fn_constructor_args=(job,),
            batch_format="pyarrow",
            batch_size=BLOCK_ROWS,
            compute=ray.data.ActorPoolStrategy(size=count),
            num_cpus=1,
            zero_copy_batch=True,
        )
        answered.write_parquet(str(incoming))
        num_rows: int = sum(pyarrow.parquet.read_metadata(file).num_rows for file in incoming.glob("*.parquet"))
        incoming.rename(output)
    except ray.exceptions.RayError as error:
        raise _cause(error) from None
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return num_rows


def _cause(error: BaseException) -> ShoalError:
    """The error of ours within Ray's wrappings, or Ray's own in one line."""
    seen: BaseException | None = error
    while seen is not None:
        inner = getattr(seen, "cause", None)
        if isinstance(inner, ShoalError):
            return inner
        if isinstance(seen, ShoalError):
            return seen
        seen = inner if isinstance(inner, BaseException) and inner is not seen else seen.__cause__
    return RunError(f"batch prediction failed: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}")
