"""What each option of a served model is worth: the time of one batch through the predictor, checks and copies included.

    python -m benchmarks.serving.options [--runs N] [--quick] [--write]

One thread, and its processor time, which says the same whatever else the machine does. Interleaved: every run times
each option once, and medians are compared. `--write` renews the table in docs/serving/gains.md. The rows are kept
apart from the README's: they compare us with ourselves.
"""

from __future__ import annotations

import io
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.children import ROOT
from benchmarks.result import Row, compare, number, options, write
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

PAGE = ROOT / "docs" / "serving" / "gains.md"
BEGIN, END = "<!-- options:begin -->", "<!-- options:end -->"
BATCHES = (1, 8, 64)
PLAIN = "as it is"
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("module", {}),
    "bf16": ("module", {"precision": "bf16"}),
    "int8": ("module", {"precision": "int8"}),
    "compile": ("module", {"compile": True}),
    "compile, bf16": ("module", {"compile": True, "precision": "bf16"}),
    "torch.export": ("torch_export", {}),
    "ONNX": ("onnx", {}),
}
SLICE_S = 0.05  # how long one option is timed in one run, at least


@dataclass(frozen=True)
class Model:
    """A model of the benchmark. shape: of one row of its input."""

    title: str
    factory: ModelFactory
    shape: tuple[int, ...]
    datatype: str
    output: tuple[int, ...]

    def signature(self) -> Signature:
        return Signature(
            inputs=[TensorSignature(name="x", datatype=self.datatype, shape=[-1, *self.shape])],
            outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, *self.output])],
        )

    def rows(self, num_rows: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        shape = (num_rows, *self.shape)
        whole = self.datatype == "INT64"
        return {"x": generator.integers(0, 256, shape) if whole else generator.standard_normal(shape, np.float32)}


MODELS = [
    Model("MLP 64-256-10", ModelFactory(factory="benchmarks.model:mlp"), (64,), "FP32", (10,)),
    Model(
        "MLP 1024-2048-2048-10",
        ModelFactory(factory="benchmarks.model:mlp", kwargs={"sizes": [1024, 2048, 2048, 10]}),
        (1024,),
        "FP32",
        (10,),
    ),
    Model("LeNet", ModelFactory(factory="shoal.models.lenet:LeNet"), (1, 28, 28), "FP32", (10,)),
    Model(
        "transformer, 2 layers of 256, 32 tokens",
        ModelFactory(factory="shoal.models.decoder:Decoder", kwargs={"width": 256}),
        (32,),
        "INT64",
        (32, 256),
    ),
]


def payload(kind: str, model: Model) -> bytes:
    """The model in one of its formats. Four rows stand for any number."""
    module = model.factory.build()
    assert isinstance(module, nn.Module)
    module.eval()
    if kind == "module":
        return WeightSnapshot.of(1, {name: value.numpy() for name, value in module.state_dict().items()}).payload
    file, example = io.BytesIO(), (torch.from_numpy(model.rows(4)["x"]),)
    if kind == "torch_export":
        batch = torch.export.Dim("batch", min=1, max=1024)
        torch.export.save(torch.export.export(module, example, dynamic_shapes=({0: batch},)), file)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the newer exporter needs packages that nothing else here does
            axes = {"x": {0: "batch"}, "y": {0: "batch"}}
            names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes}
            torch.onnx.export(module, example, file, dynamo=False, **names)
    return file.getvalue()


def load(model: Model, choice: str) -> LoadedModel | None:
    """The model with one option; None where the option has nothing to do for it."""
    kind, words = CHOICES[choice]
    factory = model.factory if kind == "module" else ModelFactory(format=kind)
    try:
        predictor = Predictor(factory, model.signature(), ModelOptions.parse(words))
    except ValueError as error:
        print(f"{model.title}, {choice}: {error}", flush=True)
        return None
    return predictor.load(WeightSnapshot.from_payload(1, payload(kind, model)))


def seconds(loaded: LoadedModel, requests: Sequence[dict[str, np.ndarray]]) -> float:
    """Of one batch, over at least SLICE_S."""
    loaded.predict_batch(requests)  # another option was timed before: its weights leave the caches
    num_calls, start = 0, time.thread_time()
    while (taken := time.thread_time() - start) < SLICE_S or num_calls < 3:
        loaded.predict_batch(requests)
        num_calls += 1
    return taken / num_calls


def measure(model: Model, num_runs: int) -> list[Row]:
    """One row for each option and batch, beside the model as it is."""
    loaded = {choice: made for choice in CHOICES if (made := load(model, choice)) is not None}
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(num_runs):
        for batch in BATCHES:
            requests = [model.rows(batch)]
            for choice, each in loaded.items():
                times.setdefault((choice, batch), []).append(seconds(each, requests) * 1e6)
    return [
        compare(f"{model.title}, batch of {batch}: {choice}", "µs", "lower", times[choice, batch],
                times[PLAIN, batch], PLAIN)
        for choice in loaded for batch in BATCHES
    ]  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each model and batch, a column for each option with its ratio to the first."""
    found = {row.name: row for row in rows}
    lines = [f"| µs | {' | '.join(CHOICES)} |", "|---|" + "---|" * len(CHOICES)]
    for model in MODELS:
        for batch in BATCHES:
            cells = []
            for choice in CHOICES:
                row = found.get(f"{model.title}, batch of {batch}: {choice}")
                ratio = f" ({row.ratio:.2f})" if row is not None and choice != PLAIN else ""
                cells.append(f"{number(row.ours)}{ratio}" if row is not None else "-")
            lines.append(f"| {model.title}, {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    renew = "--write" in sys.argv
    if renew:
        sys.argv.remove("--write")
    chosen = options(__doc__, runs=9)
    torch.set_num_threads(1)
    rows = [row for model in MODELS for row in measure(model, chosen.runs)]
    write("options", rows, chosen.results / "models")
    made = table(rows)
    print(made)
    if renew:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
