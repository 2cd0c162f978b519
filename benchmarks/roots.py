"""How many photographs does jobs/roots.py need, from scratch and after simulated roots; and nnU-Net at the same budget.

    python -m benchmarks.roots curve [--minutes M] [--images 3 12 50] [--quick]
    python -m benchmarks.roots peer [--minutes M] [--images 12]         # needs .venv-nnunet

The photographs are the generator's `greenhouse`, whose textures and plants the pretraining (`simulated`) never draws.
Training and test plants are apart; the same test photographs judge every network, in full, by tiles. Minutes are
processor minutes of training on one thread, with reading and augmentation, and without evaluation: some
steps of each side are timed first, and give the number of steps that fit. The pretraining is one for all
points; its minutes (`--pretraining`) come on top, once. Nothing is chosen by the test photographs: the last network
counts. Each point is one seed: differences of two or three points of IoU are noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import shoal.runs
from benchmarks.children import ROOT, scratch
from benchmarks.result import QUICK_RESULTS, RESULTS, Row, compare, write
from shoal.data import Loader
from shoal.libs.segmentation.scores import score_pictures
from shoal.libs.segmentation.simulation import CLASSES
from shoal.train import TrainSpec
from shoal.train.launch.local import fit_locally
from shoal.train.launch.overrides import load_recipe
from shoal.train.task import Task, make_task

RECIPE = str(ROOT / "jobs" / "roots.py")
NNUNET = ROOT / ".venv-nnunet" / "bin" / "python"
BATCH_SIZE = 8
FEW, MANY, MORE_POINTS = 3, 12, 3.0
PLANTS, PER_PLANT = 72, 2  # a quarter of the plants, 36 photographs, is for the test


def main() -> None:
    chosen = parse()
    torch.set_num_threads(1)
    size = {"height": chosen.height, "crop": chosen.crop, "width": chosen.width, "plants": PLANTS}
    with scratch() as folder, home_in(folder):
        if chosen.what == "curve":
            measure_curve(size, chosen, folder)
        else:
            write("roots_nnunet", measure_peer(size, chosen, folder), chosen.results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curve", "peer"))
    parser.add_argument("--minutes", type=float, default=30.0, help="processor minutes of a point (default 30)")
    parser.add_argument("--pretraining", type=float, default=None, help="processor minutes (default: those of a point)")
    parser.add_argument("--images", type=int, nargs="+", default=None, help="photographs for training")
    parser.add_argument("--height", type=int, default=256, help="of the photographs, in pixels")
    parser.add_argument("--crop", type=int, default=128)
    parser.add_argument("--width", type=int, default=16, help="channels of the network's first level")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works; not a measurement")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.minutes, chosen.height, chosen.crop, chosen.width = 0.02, 96, 32, 8
    chosen.pretraining = chosen.minutes if chosen.pretraining is None else chosen.pretraining
    chosen.images = chosen.images or ([3, 6, 12, 25, 50, 100] if chosen.what == "curve" else [12])
    chosen.results = QUICK_RESULTS if chosen.quick else RESULTS
    return chosen


@contextmanager
def home_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("SHOAL_HOME")
    os.environ["SHOAL_HOME"] = str(folder / "home")
    yield
    os.environ.pop("SHOAL_HOME")
    if before is not None:
        os.environ["SHOAL_HOME"] = before


def measure_curve(size: dict[str, Any], chosen: argparse.Namespace, folder: Path) -> None:
    """Rows for each number of photographs: after pretraining (ours), and from scratch (peer). Written after each."""
    step_s = measure_step_s(size)
    pretrained = train({**size, "style": "simulated"}, chosen.pretraining, step_s)
    weights = folder / "pretrained.safetensors"
    weights.write_bytes(pretrained["weights"].read_bytes())
    rows: list[Row] = []
    ious: dict[int, tuple[float, float]] = {}  # by number of images: pretrained, from scratch
    for count in chosen.images:
        one, other = (train({**size, "images": count}, chosen.minutes, step_s, init) for init in (str(weights), ""))
        setting = (
            f"{one['steps']} steps of {step_s:.3f} s, {chosen.minutes:g} processor minutes, one thread; photographs "
            f"{chosen.height} pixels high, crops of {chosen.crop}, {one['parameters']:,} parameters, one seed; "
            f"pretrained for {chosen.pretraining:g} minutes on simulated roots, whose textures and plants are others"
        )
        for key, unit, called in SCORES:
            ours, peer = (100 * each[key] if unit == "%" else each[key] for each in (one, other))
            rows.append(compare(f"roots: {called}, {count} images", unit, "higher", [ours], [peer], "from scratch"))
        bare = ", ".join(f"{key} {one[key]:.3f} / {other[key]:.3f}" for key in DETAILS)
        rows[-len(SCORES)] = with_note(rows[-len(SCORES)], f"{setting}; pretrained / from scratch: {bare}")
        ious[count] = 100 * one["iou"], 100 * other["iou"]
        write("roots", [*rows, *compare_few(ious)], chosen.results)


def compare_few(ious: dict[int, tuple[float, float]]) -> list[Row]:
    """The bar of pretraining, once both numbers of images are measured."""
    if not ious.keys() >= {FEW, MANY}:
        return []
    name = f"roots: IoU, {FEW} images after pretraining beside {MANY} from scratch"
    return [compare(name, "%", "higher", [ious[FEW][0]], [ious[MANY][1]], "from scratch", 1.0, "ratio")]


SCORES = (("iou", "%", "IoU"), ("skeleton_recall", "%", "skeleton recall"), ("length_r2", "", "r² of total length"))
DETAILS = ("iou_stem", "iou_main_root", "iou_secondary_root", "recall_secondary_root", "length_ratio")


def with_note(row: Row, note: str) -> Row:
    return Row(**{**row.__dict__, "note": note})


def make_spec(args: dict[str, Any], num_steps: int, init: str = "") -> TrainSpec:
    overrides = [f"args.{name}={value}" for name, value in args.items()]
    overrides += [f"stop.steps={num_steps}", "stop.epochs=null", f"evaluate.every_steps={num_steps}", "threads=1"]
    overrides += ["checkpoint.every_s=.inf", f"batch_size={BATCH_SIZE}"]
    return load_recipe(RECIPE).override([*overrides, *([f"init={init}"] if init else [])])


def train(args: dict[str, Any], minutes: float, step_s: float, init: str = "") -> dict[str, Any]:
    """Train for so many minutes; the scores over the full test photographs, the weights, and the number of steps."""
    num_steps = max(round(60 * minutes / step_s), 2)
    began_s = time.process_time()
    result = fit_locally(make_spec(args, num_steps, init), registers=False, say=lambda line: None)
    latest = shoal.runs.load(result.run_id).latest()
    scores = {name.removeprefix("full/"): value for name, value in latest.items() if name.startswith("full/")}
    scores.setdefault("length_r2", 0.0)  # equal lengths, of a network that finds nothing
    parameters = sum(each.numel() for each in make_task(RECIPE, args).model().parameters())
    taken_s = time.process_time() - began_s
    print(f"{args}, {'pretrained' if init else 'fresh'}: IoU {scores['iou']:.3f}, {taken_s:.0f} s", flush=True)
    return {**scores, "weights": result.weights, "steps": num_steps, "parameters": parameters}


def measure_step_s(args: dict[str, Any], num_steps: int = 12) -> float:
    """Processor seconds of a step, with reading and augmentation."""
    task = make_task(RECIPE, args)
    loader = Loader(task.data().train, batch_size=BATCH_SIZE)
    network = task.model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    taken_s: list[float] = []
    began_s = time.process_time()
    for number, batch in enumerate(loader):
        (pictures,) = task.inputs(batch)
        loss = task.loss(network(pictures.contiguous(memory_format=torch.channels_last)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now_s = time.process_time()
        taken_s.append(now_s - began_s)
        began_s = now_s
        if number == num_steps:
            break
    return float(np.median(taken_s[2:]))


def measure_peer(size: dict[str, Any], chosen: argparse.Namespace, folder: Path) -> list[Row]:
    """nnU-Net 2D on the same photographs, for the same minutes: it plans and preprocesses by itself, uncounted."""
    step_s = measure_step_s(size)
    rows = []
    for count in chosen.images:
        args = {**size, "images": count}
        ours = train(args, chosen.minutes, step_s)
        theirs = train_nnunet(make_task(RECIPE, args), chosen.minutes, folder / f"nnunet-{count}")
        note = (
            f"{chosen.minutes:g} processor minutes each, one thread, one seed; photographs {chosen.height} pixels high"
        )
        note += f"; ours {ours['steps']} steps, nnU-Net 2D {theirs['steps']} steps of its own plan"
        for key, unit, called in SCORES:
            mine, peers = (100 * each[key] if unit == "%" else each[key] for each in (ours, theirs))
            rows.append(
                compare(f"roots: {called}, {count} images", unit, "higher", [mine], [peers], "nnU-Net", note=note)
            )
        more = 100 * (ours["iou"] - theirs["iou"])
        name = f"roots: IoU above nnU-Net's, {count} images"
        rows.append(compare(name, "points", "higher", [more], bar=MORE_POINTS, bar_kind="value", note=note))
    return rows


def train_nnunet(task: Task, minutes: float, folder: Path) -> dict[str, Any]:
    """Its scores over the same test photographs."""
    train_part, test_part = task.photographs()  # type: ignore[attr-defined]
    raw = folder / "nnUNet_raw" / "Dataset001_Roots"
    for name in ("imagesTr", "labelsTr", "imagesTs"):
        (raw / name).mkdir(parents=True)
    for part, images, labels in ((train_part, "imagesTr", "labelsTr"), (test_part, "imagesTs", "")):
        for each in part:
            Image.fromarray(each.picture.transpose(1, 2, 0)).save(raw / images / f"{each.name}_0000.png")
            if labels:
                Image.fromarray(each.classes).save(raw / labels / f"{each.name}.png")
    names = {"background": 0, **{name: label for label, name in enumerate(CLASSES, 1)}}
    described = {"channel_names": {"0": "R", "1": "G", "2": "B"}, "labels": names, "numTraining": len(train_part)}
    (raw / "dataset.json").write_text(json.dumps({**described, "file_ending": ".png"}))
    places = {name: str(folder / name) for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    environment = {**os.environ, **places, "nnUNet_def_n_proc": "1", "nnUNet_n_proc_DA": "0", "OMP_NUM_THREADS": "1"}
    words = [str(NNUNET), str(ROOT / "benchmarks" / "peers" / "nnunet.py"), str(folder / "masks"), str(60 * minutes)]
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    masks = [np.asarray(Image.open(folder / "masks" / f"{each.name}.png")) for each in test_part]
    scores = score_pictures([(mask, each.classes) for mask, each in zip(masks, test_part, strict=True)], CLASSES)
    print(f"nnU-Net: IoU {scores['iou']:.3f}, {found}", flush=True)
    return {**scores, "length_r2": np.nan_to_num(scores["length_r2"]), **found}


if __name__ == "__main__":
    sys.exit(main())
