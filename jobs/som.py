"""A self-organising map of a table or of images: every row gets a place on a grid, and similar rows lie close together.

    shoal run som                                           # a 30x30 map of Fashion-MNIST's 60,000 images
    shoal run som data=table.csv rows=20 columns=30         # of your table: a header, then numbers
    shoal run som data=table.csv features='[speed, load]'   # of two of its columns
    shoal run som grid=hexagonal toroidal=true
    shoal run som workers=2                                 # two processes have half of the rows each; the same map
    shoal run som maps=30                                   # 30 maps of other seeds and widths, in one pass
    shoal serve deploy som                                  # rows in; row, column and distance out
    ray job submit --working-dir . -- python jobs/som.py    # the same on a cluster that is up

The map, its U-matrix and its component planes are in the run's report; docs/libs/som.md says how to read them. The
images are those of Debian's package, as in jobs/lenet.py; without it they are generated, and the run says so.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor

import shoal.runs
from shoal.cluster.job_main import expected_run_id, job_main
from shoal.config import Spec
from shoal.data.formats import Idx
from shoal.errors import DataError, RankLost, needs_extra
from shoal.libs.asynchronous.process_group import ForkedProcess, end_with_parent
from shoal.libs.som import network as som
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.comm.world import TIMEOUT_S, choose_device, set_network_interface
from shoal.registry import AliasNames, ModelFactory, Registry, Signature, TensorSignature
from shoal.runs import RunRecorder
from shoal.store import fetch, locate
from shoal.weights import WeightSnapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

INSTALLED = "/usr/share/datasets/fashion-mnist"
IMAGES = "train-images-idx3-ubyte.gz"
NUM_GENERATED, MAX_PLANES = 10_000, 12
OnEpoch = Callable[[int, dict[str, float]], None]  # its number, from 1, and its metrics


class SomSpec(Spec):
    """A run of the recipe.

    data:        a CSV file whose first line names its columns, or its URL in a bucket; "": Fashion-MNIST
    features:    the columns of the CSV file that the map sees; empty: all
    folder:      where Fashion-MNIST's files are
    standardise: a table's columns to standard deviation 1; their mean is always 0, and bytes of images become 0 to 1
    rows, columns, grid, toroidal: see `shoal.libs.som.network.Grid`
    sigma, sigma_final: the neighbourhood's first and last width; null: a quarter of the shorter side, and a tenth of it
    maps:        of seeds `seed`, `seed` + 1 ..., and first widths from 0.5 to 1.5 sigma; the one with the least
                 quantisation error is registered, and the record has the errors of all
    workers:     processes with a share of the rows each
    threads:     of each; an operation on a tile is too short to share: take workers before threads
    score_rows:  the first rows, on which errors are measured; null: all
    """

    data: str = ""
    features: tuple[str, ...] = ()
    folder: str = INSTALLED
    standardise: bool = True
    rows: int = Field(default=30, ge=2)
    columns: int = Field(default=30, ge=2)
    grid: Literal["rectangular", "hexagonal"] = "rectangular"
    toroidal: bool = False
    epochs: int = Field(default=10, ge=1)
    sigma: float | None = Field(default=None, gt=0)
    sigma_final: float | None = Field(default=None, gt=0)
    maps: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "float64"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    workers: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    score_rows: int | None = Field(default=None, ge=1)
    name: str = "som"
    aliases: AliasNames = ("champion",)

    @model_validator(mode="after")
    def _fits_together(self) -> SomSpec:
        if self.toroidal and self.grid == "hexagonal" and self.rows % 2:
            raise ValueError(f"rows={self.rows}: a hexagonal torus closes only with an even number of rows")
        if self.workers > 1 and self.device != "cpu":
            raise ValueError(f"workers={self.workers}: workers share the rows on the CPU; use device=cpu, or workers=1")
        return self

    @property
    def map_grid(self) -> som.Grid:
        return som.Grid(self.rows, self.columns, self.grid == "hexagonal", self.toroidal)

    def list_widths(self) -> list[tuple[float, float]]:
        """First and last sigma of each map."""
        first = self.sigma or self.map_grid.default_sigma
        last = self.sigma_final or 0.1 * first
        return [(first * factor, last) for factor in (np.linspace(0.5, 1.5, self.maps) if self.maps > 1 else [1.0])]


# -- the rows


@dataclass(frozen=True)
class Rows:
    """values: [N, D], (raw - shift) / scale; names: of the features."""

    values: Tensor
    shift: Tensor
    scale: Tensor
    names: list[str]
    title: str


def read_rows(spec: SomSpec) -> Rows:
    """Raises DataError, which names file, row and column."""
    dtype = getattr(torch, spec.dtype)
    if spec.data:
        path = locate(spec.data, "data")
        fetch([path])
        table, names = read_table(path, spec.features)
        values = torch.from_numpy(table)
        som.require_scale(values, names, None if spec.standardise else dtype)
        shift, deviation = som.measure_columns(values)  # distances are the same around any shift
        scale = deviation if spec.standardise else torch.ones_like(deviation)
        return Rows(((values - shift) / scale).to(dtype), shift, scale, names, spec.data)
    path, title = Path(spec.folder, IMAGES), "Fashion-MNIST"
    if spec.folder == INSTALLED and not path.exists():
        print(f"no Fashion-MNIST in {INSTALLED}: a map of GENERATED images (apt-get install dataset-fashion-mnist)")
        images, title = generate_images(NUM_GENERATED), "generated images"
    else:
        dataset = Idx(path, scale=False)
        (images,) = dataset.batch(np.arange(len(dataset)))
    values = images.flatten(1).to(dtype) / 255
    names = [f"pixel {at // 28}, {at % 28}" for at in range(values.shape[1])]
    return Rows(values, torch.zeros(len(names)), torch.full((len(names),), 255.0), names, title)


def generate_images(num_images: int) -> Tensor:
    """Noisy mixtures of ten patterns, uint8 [num_images, 28, 28]."""
    random = np.random.default_rng(1)
    patterns = random.integers(0, 256, (10, 7, 7)).repeat(4, 1).repeat(4, 2)  # [10, 28, 28]
    shares = random.dirichlet([0.3] * 10, num_images).astype(np.float32)
    images = 0.8 * shares @ patterns.reshape(10, -1) + random.uniform(0, 51, (num_images, 784))
    return torch.from_numpy(images.astype(np.uint8)).view(-1, 28, 28)


def read_table(path: Path, features: Sequence[str] = ()) -> tuple[np.ndarray, list[str]]:
    """Numbers float64 [N, D] and the columns' names. Raises DataError."""
    with needs_extra("data"):
        import pandas as pd
    try:
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            table: DataFrame = pd.read_csv(path, skip_blank_lines=False, index_col=False)
    except (OSError, ValueError, pd.errors.ParserWarning) as error:
        more = "row 1 (line 2) has more values than the header has names"  # of a later row pandas says as much itself
        problem = f"cannot be read ({more if isinstance(error, Warning) else error})"
        raise DataError("data", str(path), problem, "give a CSV file whose first line names its columns") from error
    if missing := [name for name in features if name not in table.columns]:
        there = f"there is {', '.join(map(str, table.columns))}"
        raise DataError("features", missing[0], f"{path} has no such column", there)
    table = table[list(features)] if features else table
    if table.empty:
        raise DataError("data", str(path), "has no rows", "give a file with at least one row below its header")
    for name in table.columns:
        numbers = pd.to_numeric(table[name], errors="coerce").to_numpy(float)
        if not (is_number := np.isfinite(numbers)).all():
            row = int(np.flatnonzero(~is_number)[0])
            value, where = table[name].iloc[row], f"row {row + 1} (line {row + 2})"
            if isinstance(value, str):
                numeric = f"{is_number.mean():.0%} of its values are numbers"
                problem = f"column {str(name)!r} is not numeric: {where} has {value!r}, {numeric}"
                raise DataError("data", str(path), problem, "leave it out with features=[...], or encode it as numbers")
            problem = f"{where} has {'a gap' if np.isnan(numbers[row]) else value} in column {str(name)!r}"
            raise DataError("data", str(path), problem, "fill the gap or drop the row: a map needs finite numbers")
        table = table.assign(**{name: numbers})
    return table.to_numpy(float), [str(name) for name in table.columns]


# -- training


def train_maps(
    spec: SomSpec, rows: Tensor, weights: Tensor, total: som.SumOverRanks | None, on_epoch: OnEpoch
) -> Tensor:
    """The maps' weights [M, K, D] after all epochs over this rank's rows [N, D]."""
    for epoch in range(spec.epochs):
        began_s = time.perf_counter()
        sigmas = [som.compute_sigma(epoch, spec.epochs, first, last) for first, last in spec.list_widths()]
        before, weights = weights, som.fit_epoch(rows, weights, spec.map_grid, sigmas, total)
        moved = float((weights - before).norm(dim=2).mean())
        values = {"sigma": sigmas[0], "movement": moved, "epoch_seconds": time.perf_counter() - began_s}
        on_epoch(epoch + 1, {f"som/{name}": value for name, value in values.items()})
    return weights


def draw_maps(spec: SomSpec, rows: Tensor) -> Tensor:
    """First weights of all maps, [M, K, D]: by all rows, so that every number of workers begins alike."""
    seeds = range(spec.seed, spec.seed + spec.maps)
    return torch.stack([som.draw_weights(rows, spec.map_grid.num_nodes, seed) for seed in seeds])


@contextmanager
def join_ranks(rank: int, spec: SomSpec, store: Path) -> Iterator[som.SumOverRanks | None]:
    """This process as one of `workers` ranks: what sums a tensor over them; None for a single one."""
    torch.set_num_threads(spec.threads)
    if spec.workers == 1:
        yield None
        return
    set_network_interface("127.0.0.1")
    limit = timedelta(seconds=TIMEOUT_S)  # for a worker that does not come
    shared_file = dist.FileStore(str(store))
    dist.init_process_group("gloo", store=shared_file, rank=rank, world_size=spec.workers, timeout=limit)
    shared = ShmAllReduce.try_create(dist.group.WORLD)

    def sum_over_ranks(sums: Tensor) -> Tensor:
        try:
            if shared is None:
                dist.all_reduce(sums)
                return sums
            return shared.sum(sums)
        except RuntimeError as error:
            raise RankLost(f"a worker of the map is gone: {error}. Run it again") from error

    try:
        yield sum_over_ranks
    finally:
        if shared is not None:
            shared.close()
        dist.destroy_process_group()


def run_worker(rank: int, spec_yaml: str, store: str) -> None:
    """The process of a rank above 0. Reads the rows itself, and keeps its share."""
    end_with_parent()
    spec = SomSpec.from_yaml(spec_yaml)
    with join_ranks(rank, spec, Path(store)) as sum_over_ranks:
        rows = read_rows(spec).values
        share = rows.tensor_split(spec.workers)[rank]
        dist.barrier()  # the first rank begins to count seconds
        train_maps(spec, share, draw_maps(spec, rows), sum_over_ranks, lambda epoch, values: None)


def fit_maps(spec: SomSpec, rows: Tensor, store: Path, on_epoch: OnEpoch) -> tuple[Tensor, float]:
    """Train all maps, as rank 0 of the spec's workers: their weights [M, K, D], and the seconds of the epochs."""
    arguments = spec.to_yaml(), str(store)
    processes = [ForkedProcess(f"worker {rank}", run_worker, (rank, *arguments)) for rank in range(1, spec.workers)]
    try:
        with join_ranks(0, spec, store) as sum_over_ranks:
            weights = draw_maps(spec, rows)
            device = choose_device(spec.device, 0)
            share = rows.tensor_split(spec.workers)[0].to(device)
            if sum_over_ranks is not None:
                dist.barrier()  # others have read their rows
            began_s = time.perf_counter()
            weights = train_maps(spec, share, weights.to(device), sum_over_ranks, on_epoch)
            return weights.cpu(), time.perf_counter() - began_s
    finally:
        for process in processes:
            process.end()


# -- what a run leaves


def build_network(spec: SomSpec, rows: Rows, weights: Tensor) -> som.SelfOrganisingMap:
    """The map [K, D] as a network."""
    network = som.SelfOrganisingMap(**describe_network(spec, rows))
    tensors = {"weights": weights.float(), "shift": rows.shift.double(), "scale": rows.scale.double()}
    network.load_state_dict(tensors)
    return network.eval()


def describe_network(spec: SomSpec, rows: Rows) -> dict[str, Any]:
    """The arguments by which an endpoint builds it."""
    return {**asdict(spec.map_grid), "num_features": rows.values.shape[1], "float64": True}


def register_map(
    spec: SomSpec, rows: Rows, network: som.SelfOrganisingMap, errors: dict[str, float], recorder: RunRecorder
) -> None:
    """Under the spec's name. `errors` are its metrics."""
    outputs = [TensorSignature(name=name, datatype="INT64", shape=[-1]) for name in ("row", "column")]
    outputs.append(TensorSignature(name="distance", datatype="FP32", shape=[-1]))
    shape, columns = [-1, rows.values.shape[1]], rows.names if spec.data else []  # nobody's table names pixels
    taken = TensorSignature(name="rows", datatype="FP64", shape=shape, columns=columns)
    version = Registry().register(
        spec.name,
        WeightSnapshot.of(spec.epochs, {key: value.numpy() for key, value in network.state_dict().items()}),
        model=ModelFactory(factory="shoal.libs.som.network:SelfOrganisingMap", kwargs=describe_network(spec, rows)),
        signature=Signature(inputs=[taken], outputs=outputs),
        run_id=recorder.id,
        metrics=errors,
        lineage={"data": rows.title, "features": rows.names[:100]},
        aliases=spec.aliases,
    )
    recorder.record_model(version.name, version.version, version.aliases)
    print(f"registered {version.ref}: `shoal serve deploy {spec.name}` answers with row, column and distance")


def draw_pictures(spec: SomSpec, rows: Rows, weights: Tensor, folder: Path) -> None:
    """U-matrix and component planes, as PNG files that the report shows."""
    with needs_extra("report"):
        from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 5), layout="constrained")
    _draw_plane(figure.subplots(), spec.map_grid, som.compute_u_matrix(weights, spec.map_grid).flatten(), "U-matrix")
    figure.savefig(folder / "1-u-matrix.png", dpi=110)
    varied = weights.var(0).topk(min(MAX_PLANES, weights.shape[1])).indices.sort().values
    figure = Figure(figsize=(12, 2.6 * -(-len(varied) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(varied) // 4), 4, squeeze=False).flat
    for axis, at in zip(axes, varied.tolist(), strict=False):
        raw = weights[:, at].double() * rows.scale[at] + rows.shift[at]
        _draw_plane(axis, spec.map_grid, raw, rows.names[at])
    for axis in list(axes)[len(varied) :]:
        axis.set_axis_off()
    figure.savefig(folder / "2-component-planes.png", dpi=110)
    if not spec.data:
        tiles = weights.view(spec.rows, spec.columns, 28, 28).permute(0, 2, 1, 3).reshape(spec.rows * 28, -1)
        figure = Figure(figsize=(9, 9 * spec.rows / spec.columns), layout="constrained")
        axis = figure.subplots()
        axis.imshow(tiles.numpy(), cmap="gray")
        axis.set_axis_off()
        figure.savefig(folder / "3-nodes.png", dpi=110)


def _draw_plane(axis: Axes, grid: som.Grid, values: Tensor, title: str) -> None:
    """A polygon for each node, with the colour of its value."""
    from matplotlib.collections import PolyCollection

    corners = 6 if grid.hexagonal else 4
    angles = np.pi * (0.5 if grid.hexagonal else 0.25) + 2 * np.pi * np.arange(corners) / corners
    outline = np.stack([np.cos(angles), np.sin(angles)], 1) * (3**-0.5 if grid.hexagonal else 0.5**0.5)
    row, column = np.divmod(np.arange(grid.num_nodes), grid.columns)
    places = np.stack([column + (row % 2) / 2 * grid.hexagonal, row * grid.row_distance], 1)
    drawn = PolyCollection(places[:, None] + outline, array=values.numpy(), cmap="viridis", edgecolors="face")
    axis.add_collection(drawn)
    axis.set(title=title, aspect="equal")
    axis.autoscale_view()
    axis.invert_yaxis()
    axis.set_axis_off()
    axis.figure.colorbar(drawn, ax=axis, shrink=0.8)


def run_som(spec: SomSpec, job: str = "som") -> dict[str, float]:
    """Train, measure, draw, register. Returns the errors of the registered map. Raises ShoalError."""
    rows = read_rows(spec)
    num_rows, num_features = rows.values.shape
    with shoal.runs.recording(spec.to_record(), job, begun="som", run_id=expected_run_id()) as recorder:
        print(f"run {recorder.id}: {spec.maps} x {spec.rows}x{spec.columns} of {num_rows:,} rows x {num_features}")
        recorder.record_event("som", rows=num_rows, features=num_features, data=rows.title)
        if spec.map_grid.num_nodes > num_rows:
            problem = f"{spec.map_grid.num_nodes} nodes for {num_rows} rows: most nodes stand for no row"
            print(f"warning: {problem}; a map of {max(2, int((5 * num_rows**0.5) ** 0.5))} rows and columns would do")
            recorder.record_event("more_nodes_than_rows", nodes=spec.map_grid.num_nodes, rows=num_rows)

        def report(epoch: int, values: dict[str, float]) -> None:
            recorder.log(epoch, values)
            print(f"epoch {epoch:3} | " + " | ".join(f"{name[4:]} {value:.4g}" for name, value in values.items()))

        weights, seconds = fit_maps(spec, rows.values, recorder.folder / "ranks", report)
        scored = rows.values[: spec.score_rows]
        errors = [som.measure_errors(scored, each, spec.map_grid) for each in weights]
        for number, (found, (sigma, _)) in enumerate(zip(errors, spec.list_widths(), strict=True)):
            recorder.record_event("map", number=number, seed=spec.seed + number, sigma=sigma, **found)
        best = min(range(spec.maps), key=lambda number: errors[number]["quantisation_error"])
        recorder.log(spec.epochs, {f"som/{name}": value for name, value in errors[best].items()})
        draw_pictures(spec, rows, weights[best], recorder.folder / "pictures")
        register_map(spec, rows, build_network(spec, rows, weights[best]), errors[best], recorder)
        detail = f"map {best} of {spec.maps}, {spec.epochs} epochs of {seconds / spec.epochs:.2f} s"
        ended = {"reason": "epochs", "detail": detail, "steps": spec.epochs, "kept": spec.epochs, "seconds": seconds}
        recorder.record_event("trained", **ended, map=best, metrics=errors[best])
        summary = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in errors[best].items())
        print(f"run {recorder.id}: {detail}: {summary}")
    shoal.runs.write_report_at_end(recorder.id)
    return errors[best]


def spec() -> SomSpec:
    """The recipe."""
    return SomSpec()


if __name__ == "__main__":
    job_main(spec(), run_som, job="som", check=read_rows)
