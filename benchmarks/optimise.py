"""`shoal optimise` on a LeNet for Fashion-MNIST and on a decoder of 30 million parameters, beside their teachers.

    python -m benchmarks.optimise [--runs N] [--quick]

The LeNet is the recipe jobs/lenet.py as it is. Its student (benchmarks/ours/optimise_lenet.py) learns for twelve
epochs, and is chosen by FLOPs, of equal ones the fastest. The decoder (benchmarks/ours/optimise_text.py) learns
generated text for 120 steps, its student of half the width for 360; the choice is by latency. The decoder's peer is
the dynamic quantisation of onnxruntime, with its defaults, of the exported teacher. Metrics are of the validation data.
Milliseconds are of one sample, on one thread: all sides are called in rounds, in one process.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
from benchmarks.result import Row, compare, options, write
from shoal.libs.optimise import measure
from shoal.libs.optimise.choice import MaxDrop
from shoal.libs.optimise.request import OptimiseRequest
from shoal.libs.optimise.search import Outcome, optimise
from shoal.libs.optimise.steps import convert_model
from shoal.registry import ModelVersion

DROP, FLOPS_BAR, LATENCY_BAR, DECODER_BAR, PEER_BAR = 0.01, 1 / 3, 0.5, 0.6, 1.0
PEER, PEER_NOTE = "onnxruntime's int8", "quantize_dynamic of the exported teacher"
LENET, DECODER = "optimise, LeNet", "optimise, decoder of 30M"
STRIDED, TEXT = "benchmarks/ours/optimise_lenet.py:Strided", "benchmarks/ours/optimise_text.py:Text"


def shrink(
    task: str, name: str, student: str, overrides: tuple[str, ...], stop: dict[str, Any], **options: Any
) -> Outcome:
    """Train a teacher, and search with one student.

    overrides: of the student's training; stop: of the teacher's
    """
    shoal.fit(task, name=name, say=print, threads=1, stop=stop)
    request = OptimiseRequest(
        name,
        data=task,
        students=(student,),
        max_drop=MaxDrop(DROP, is_relative=True),
        overrides=("threads=1", *overrides),
        **options,
    )
    found = optimise(request, print)
    for model, measured in zip(found.models, found.measured, strict=True):
        print(f"{name}: {model.title}: {measured}", flush=True)
    return found


def time_sides(found: Outcome, runs: int, peer: Any = None) -> dict[str, list[float]]:
    """Milliseconds for one sample, of the teacher, the choice, the best of each kind, and the peer."""
    signature = found.teacher.manifest.signature
    sides = {"teacher": 0, "chosen": found.chosen}
    sides |= {model.title: index for index, model in enumerate(found.models) if index}
    forwards = [measure.open_forward(found.models[index], signature) for index in sides.values()]
    (spec,) = signature.inputs
    shape = [1, *spec.shape[1:]]
    draws = np.random.default_rng(0)
    values = draws.integers(0, 64, shape) if spec.datatype == "INT64" else draws.standard_normal(shape, np.float32)
    if peer is not None:
        sides, forwards = {**sides, "peer": -1}, [*forwards, peer]
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(runs):
        for side, latency_s in zip(sides, measure.measure_latencies(forwards, {spec.name: values}), strict=True):
            times[side].append(1e3 * latency_s)
    return times


def compare_sides(title: str, found: Outcome, times: dict[str, list[float]], bar: float) -> list[Row]:
    """The choice beside the teacher: time, FLOPs, size and the drop of the metric."""
    teacher, chosen = found.measured[0], found.measured[found.chosen]
    mine, theirs = times["chosen"], times["teacher"]
    steps = f"chosen: {found.models[found.chosen].title}"
    values = [each.metrics[found.metric] for each in (chosen, teacher)]
    drop = (values[1] - values[0]) * (1 if found.is_higher_better else -1) / abs(values[1])
    note = f"{steps}; {found.metric} {values[0]:.4f}, the teacher's {values[1]:.4f}"
    rows = [
        compare(f"{title}: one sample", "ms", "lower", mine, theirs, "teacher", bar, "ratio", steps),
        compare(f"{title}: drop of {found.metric}", "of it", "lower", [drop], bar=DROP, bar_kind="value", note=note),
        compare(f"{title}: size", "MB", "lower", [chosen.size_bytes / 1e6], [teacher.size_bytes / 1e6], "teacher"),
    ]  # fmt: skip
    for model, measured in list(zip(found.models, found.measured, strict=True))[1:]:
        note = f"{found.metric} {measured.metrics[found.metric]:.4f}"
        values = times[model.title]
        rows.append(compare(f"{title}: {model.title}", "ms", "lower", values, theirs, "teacher", note=note))
    needed = FLOPS_BAR if title == LENET else None
    flops = [[(each.flops or 0.0) / 1e6] for each in (chosen, teacher)]
    kind = "ratio" if needed else None
    rows.append(compare(f"{title}: FLOPs", "MFLOP", "lower", flops[0], flops[1], "teacher", needed, kind))
    return rows


def open_peer(teacher: ModelVersion, found: Outcome) -> Any:
    """The forward of onnxruntime's own `quantize_dynamic` of the exported teacher, with one thread."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    signature = teacher.manifest.signature
    example = [torch.zeros(2, *signature.inputs[0].shape[1:], dtype=torch.int64)]
    exported = convert_model(found.models[0], "onnx", found.models[0].factory, signature, example)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "peer.onnx")
        quantize_dynamic(onnx.load_from_string(exported.payload), path)
        setting = onnxruntime.SessionOptions()
        setting.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path.read_bytes(), setting)
    return lambda arrays: session.run(None, dict(arrays))


def compare_with_peer(found: Outcome, times: dict[str, list[float]]) -> list[Row]:
    """The choice, and the teacher after each single step, beside onnxruntime's own quantisation of the teacher."""
    peer = times["peer"]
    rows = [compare(f"{DECODER}: one sample", "ms", "lower", times["chosen"], peer, PEER, PEER_BAR, "ratio", PEER_NOTE)]
    for model in found.models:
        if model.steps and model.run_id is None:
            name = f"{DECODER}: {model.title}"
            rows.append(compare(name, "ms", "lower", times[model.title], peer, PEER, note="the teacher quantised"))
    return rows


def main() -> None:
    chosen = options(__doc__, runs=5)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_HOME"] = folder
        stop, limit = ({"steps": 100}, "steps=100") if chosen.quick else ({}, "epochs=12")
        images = shrink("lenet", "lenet", STRIDED, (f"stop.{limit}",), stop, batch=32, cost="flops")
        rows += compare_sides(LENET, images, time_sides(images, chosen.runs), LATENCY_BAR)
        steps = 5 if chosen.quick else 120
        text = shrink(
            TEXT, "text", "width=256", (f"stop.steps={3 * steps}",), {"steps": steps}, batch=4, cost="latency"
        )
        times = time_sides(text, chosen.runs, open_peer(text.teacher, text))
        rows += compare_sides(DECODER, text, times, DECODER_BAR)
        rows += compare_with_peer(text, times)
    write("optimise", rows, chosen.results)


if __name__ == "__main__":
    main()
