"""What a network predicts of the same validation samples: what is retained, drawn and written, and of which forms."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal import runs
from shoal.libs.films import samples
from shoal.libs.films.samples import SampleSheet, to_picture
from shoal.train.launch.local import fit_locally
from shoal.train.spec import TrainSpec


def write(folder: Path, batches: list[tuple[Any, Any]], task: Any = None, count: int = 4) -> dict[str, Any]:
    """The sheet of one evaluation."""
    sheet = SampleSheet(count, folder, task)
    for outputs, batch in batches:
        sheet.observe(outputs, batch)
    sheet.write(7, 1.5)
    found: dict[str, Any] = json.loads((folder / "samples" / "e00001.50-s000000007.json").read_bytes())
    return found


def test_classes_of_pictures_have_the_first_the_worst_and_a_confusion_matrix(tmp_path: Path) -> None:
    pictures = torch.arange(6 * 28 * 28, dtype=torch.uint8).reshape(6, 28, 28)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    logits = torch.full((6, 3), -2.0)
    logits[torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 1])] = torch.tensor([1.0, 2, 3, 4, 5, 9])
    batches = [(logits[part], (pictures[part], labels[part])) for part in (slice(0, 4), slice(4, 6))]
    sheet = write(tmp_path, batches, SimpleNamespace(classes=["a", "b", "c"]))
    assert [(each["label"], each["right"]) for each in sheet["fixed"]] == [
        *(("a", True), ("b", True), ("c", True), ("c", False))
    ]
    assert [each["label"] for each in sheet["worst"][:2]] == ["a", "c"]
    assert sheet["worst"][0]["answer"] == "b, 100%"
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose([each["loss"] for each in sheet["worst"]], losses.topk(4).values, rtol=1e-5)
    assert sheet["confusion"] == [[1, 1, 0], [0, 2, 0], [1, 0, 1]]
    with Image.open(next((tmp_path / "samples").glob("*.webp"))) as drawn:
        assert min(drawn.size) > 100


def test_pixels_tokens_and_numbers(tmp_path: Path) -> None:
    truth = torch.zeros(2, 16, 16, dtype=torch.long)
    truth[0, :8] = 1
    scores = torch.nn.functional.one_hot(truth, 2).movedim(-1, 1).float()
    scores[1, 0] = -9.0  # of the second picture every pixel is wrong
    pixels = write(tmp_path / "pixels", [(scores, {"image": torch.rand(2, 3, 16, 16), "labels": truth})])
    assert [each["answer"] for each in pixels["fixed"]] == ["100.0% of the pixels", "0.0% of the pixels"]

    ids = torch.tensor([[1, 2, 3, 4], [1, 3, 2, 0]])
    labels = ids.masked_fill(ids == 0, -100)
    logits = torch.nn.functional.one_hot(ids.roll(-1, 1), 5).float() * 9  # each token's scores are of the next one
    task = SimpleNamespace(decode_tokens=lambda tokens: "".join("-abcd"[each] for each in tokens))
    outputs = SimpleNamespace(logits=logits)
    tokens = write(tmp_path / "tokens", [(outputs, {"input_ids": ids, "labels": labels})], task)
    assert [(each["shown"], each["label"], each["answer"]) for each in tokens["fixed"]] == [
        *(("abcd", "bcd", "bcd"), ("acb-", "cb", "cb"))
    ]
    numbers = write(tmp_path / "numbers", [(torch.tensor([1.0, 2.0]), (torch.ones(2, 3), torch.tensor([1.5, 4])))])
    assert [(each["shown"], each["label"], each["answer"], each["loss"]) for each in numbers["worst"]] == [
        *(("1, 1, 1", "4", "2", 4.0), ("1, 1, 1", "1.5", "1", 0.25))
    ]
    assert not list((tmp_path / "numbers").rglob("*.webp"))


@pytest.mark.parametrize(
    ("outputs", "batch"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        ("words", (torch.zeros(2), torch.zeros(2))),
        (torch.zeros(2, 3, 4, 5, 6), (torch.zeros(2), torch.zeros(2, dtype=torch.long))),
        (torch.zeros(2, 30), (torch.zeros(2), torch.zeros(2, 30))),
        (torch.zeros(2, 3), (torch.zeros(2), torch.zeros(5, dtype=torch.long))),
        (torch.tensor(1.0), (torch.zeros(2), torch.tensor(1))),
        ({}, {}),
    ],
)
def test_other_forms_give_no_sheet_and_end_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, outputs: Any, batch: Any
) -> None:
    sheet = SampleSheet(4, tmp_path, None)
    with caplog.at_level(logging.WARNING):
        sheet.observe(outputs, batch)
        sheet.observe(outputs, batch)
    sheet.write(1, 1.0)
    assert not list(tmp_path.iterdir())
    assert caplog.text.count("no form that a sheet can show") == 1


def test_a_long_run_retains_sheets_of_its_whole_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_SHEETS", 5)
    sheet = SampleSheet(1, tmp_path, None)
    for step in range(12):
        sheet.observe(torch.zeros(1), (torch.zeros(1), torch.zeros(1)))
        sheet.write(step, step)
    steps = [int(path.stem.split("s")[1]) for path in sorted((tmp_path / "samples").iterdir())]
    assert len(steps) <= 5
    assert (steps[0], steps[-1]) == (0, 11)


def test_pictures_of_any_order_become_one() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 9, 12))
    first, last = to_picture(rows), to_picture(np.moveaxis(rows, 0, -1))
    assert last is not None
    np.testing.assert_array_equal(first, last)
    assert (first.min(), first.max()) == (0, 255)
    assert to_picture(np.zeros((9, 12, 7))) is None
    assert to_picture(np.zeros(5)) is None


def test_a_training_run_writes_a_sheet_for_each_epoch() -> None:
    spec = TrainSpec(task="train_task:Toy").override(["stop.epochs=2", "evaluate.samples=3", "threads=1"])
    result = fit_locally(spec, registers=False)
    folder = runs.load(result.run_id).folder / "samples"
    sheets = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    assert [each["epoch"] for each in sheets] == [1, 2]
    assert [len(each["fixed"]) for each in sheets] == [3, 3]
    assert [each["label"] for each in sheets[0]["fixed"]] == [each["label"] for each in sheets[1]["fixed"]]
