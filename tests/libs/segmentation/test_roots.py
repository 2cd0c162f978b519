"""Roots from photographs: a folder of the user's, and the recipe end to end, up to the answer of an endpoint."""

import io
import logging
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shoal.runs
from refusals import refused
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.client import Client
from shoal.errors import ConfigError, DataError, SpecMismatch
from shoal.flows.serving_spec import check, load_serving_spec
from shoal.libs.segmentation.photographs import (
    PALETTE,
    MaskFormat,
    Photograph,
    decode_picture,
    encode_mask,
    read_folder,
    require_classes,
    split_by_plant,
)
from shoal.libs.segmentation.simulation import CLASSES, STYLES, simulate
from shoal.libs.segmentation.thinning import measure_length, thin
from shoal.registry import Registry
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_source import RegisteredModel
from shoal.train.launch.local import fit_locally
from shoal.train.launch.overrides import load_recipe
from shoal.train.task import load_task_file, make_task

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "jobs" / "roots.py"
FORMAT = MaskFormat(CLASSES)
SIZE = (96, 72)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plants() -> list[Photograph]:
    return simulate(4, 2, STYLES["greenhouse"], SIZE, seed=1)


def write_folder(folder: Path, photographs: list[Photograph], mask: str = "png") -> Path:
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for each in photographs:
        Image.fromarray(each.picture.transpose(1, 2, 0)).save(folder / "images" / f"{each.name}.png")
        (folder / "masks" / f"{each.name}.{mask}").write_bytes(encode_mask(each.classes))
    return folder


# -- a folder of the user's -------------------------------------------------------------------------------------------


def test_a_folder_is_read_whatever_form_its_masks_have(plants: list[Photograph], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plants[:4])
    colours = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in PALETTE], np.uint8)
    coloured = Image.fromarray(colours[plants[1].classes])
    coloured.save(folder / "masks" / f"{plants[1].name}.png")
    Image.fromarray(plants[2].classes).save(folder / "masks" / f"{plants[2].name}.png")  # grey
    Image.fromarray(np.repeat(plants[3].classes[..., None], 3, 2)).save(folder / "masks" / f"{plants[3].name}.png")
    found = read_folder(folder, FORMAT)
    assert [(each.name, each.plant) for each in found] == [(each.name, each.plant) for each in plants[:4]]
    for each, expected in zip(found, plants, strict=False):
        np.testing.assert_array_equal(each.picture, expected.picture)
        np.testing.assert_array_equal(each.classes, expected.classes)


def test_a_mask_in_jpeg_is_thresholded_with_a_warning(
    plants: list[Photograph], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path, plants[:1])
    (folder / "masks" / f"{plants[0].name}.png").unlink()
    root = (plants[0].classes > 0).astype(np.uint8)
    Image.fromarray(root * 255).save(folder / "masks" / f"{plants[0].name}.jpg", quality=85)
    with caplog.at_level(logging.WARNING):
        [found] = read_folder(folder, MaskFormat(("root",)))
    assert (found.classes == root).mean() > 0.995
    assert f"{plants[0].name}.jpg: compression has changed its values" in caplog.text


def test_photographs_are_turned_as_exif_says(plants: list[Photograph], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plants[:1])
    path = folder / "images" / f"{plants[0].name}.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    Image.fromarray(plants[0].picture.transpose(1, 2, 0)).rotate(90, expand=True).save(path, exif=exif)
    [found] = read_folder(folder, FORMAT)
    np.testing.assert_array_equal(found.picture, plants[0].picture)
    Image.fromarray(plants[0].picture.transpose(1, 2, 0)).save(path, exif=exif)  # the mask is as before the turn
    with pytest.raises(DataError, match=r"p000_0\.png.*is of 72 x 96 pixels, and .* of 96 x 72.*turn the mask"):
        read_folder(folder, FORMAT)


def test_region_and_shrinking_lose_no_thin_root(tmp_path: Path) -> None:
    classes = np.zeros((40, 60), np.uint8)
    classes[:, 31], classes[7, :] = 3, 1
    photograph = Photograph("a_1", "a", np.full((3, 40, 60), 80, np.uint8), classes)
    folder = write_folder(tmp_path, [photograph])
    [found] = read_folder(folder, MaskFormat(CLASSES, region=(0.5, 0.0, 1.0, 0.5), shrink=4))
    assert found.classes.shape == (5, 7)
    assert (found.classes[:, 0] == 3).all()
    assert (found.classes[1, 1:] == 1).all()
    assert (found.picture == 80).all()
    assert found.classes.sum() == 5 * 3 + 6


def test_plants_are_split_and_never_shared(plants: list[Photograph], tmp_path: Path) -> None:
    for seed in range(4):
        train, held_back = split_by_plant(plants, 0.25, seed)
        assert (len(train), len(held_back)) == (6, 2)
        assert not {each.plant for each in train} & {each.plant for each in held_back}
    folder = write_folder(tmp_path, plants[:4])
    (folder / "plants.csv").write_text("name,plant\n" + "".join(f"{each.name}.png,same\n" for each in plants[:4]))
    with pytest.raises(DataError, match="all 4 photographs are of the plant 'same'"):
        split_by_plant(read_folder(folder, FORMAT), 0.25, 0)
    (folder / "plants.csv").write_text("name,plant\np000_0,same\n")
    with pytest.raises(DataError, match=r"plants\.csv.*has no row for p000_1"):
        read_folder(folder, FORMAT)
    (folder / "plants.csv").write_text("photograph;plant\n")
    with pytest.raises(DataError, match=r"plants\.csv.*has no columns 'name' and 'plant'"):
        read_folder(folder, FORMAT)


def spoil(folder: Path, how: str, each: Photograph) -> None:
    mask, image = folder / "masks" / f"{each.name}.png", folder / "images" / f"{each.name}.png"
    wrong = each.classes.copy()
    match how:
        case "no folder":
            image.parent.rename(folder / "pictures")
        case "empty":
            image.unlink()
        case "no mask":
            Image.new("RGB", (8, 8)).save(folder / "images" / "other_1.png")
        case "size":
            Image.fromarray(wrong[:-1]).save(mask)
        case "value":
            wrong[3, :5] = 9
            Image.fromarray(wrong).save(mask)
        case "colour":
            Image.fromarray(np.full((*wrong.shape, 3), (1, 2, 3), np.uint8)).save(mask)
        case "damaged mask":
            mask.write_bytes(mask.read_bytes()[:60])
        case "damaged":
            image.write_bytes(image.read_bytes()[:300])


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("no folder", "images.*is no folder.*images/NAME.jpg"),
        ("empty", "images.*has no pictures"),
        ("no mask", r"images/other_1\.png.*has no mask"),
        ("size", r"masks/p000_0\.png.*is of 72 x 95 pixels, and p000_0\.png of 72 x 96"),
        ("value", r"masks/p000_0\.png.*has the value 9 in 5 pixels.*1 stem, 2 main root, 3 secondary root"),
        ("colour", r"masks/p000_0\.png.*has the colour #010203 in 6,912 pixels"),
        ("damaged mask", r"masks/p000_0\.png.*is no picture, or a damaged one"),
        ("damaged", r"images/p000_0\.png.*is no picture, or a damaged one"),
    ],
)
def test_a_folder_with_something_wrong_is_refused_by_file(
    how: str, problem: str, plants: list[Photograph], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, plants[:1])
    spoil(folder, how, plants[0])
    with pytest.raises(DataError, match=problem):
        read_folder(folder, FORMAT)


def test_a_photograph_of_which_shrinking_leaves_nothing_is_named(plants: list[Photograph], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plants[:1])
    problem = r"images/p000_0\.png.*has 72 x 96 pixels, of which shrink = 80 leaves none"
    with pytest.raises(DataError, match=problem):
        read_folder(folder, MaskFormat(CLASSES, shrink=80))


def test_a_class_that_no_mask_for_training_has_is_named(plants: list[Photograph]) -> None:
    without = [Photograph(each.name, each.plant, each.picture, each.classes % 2) for each in plants]
    with pytest.raises(DataError, match="class = 'main root': is in none of the 8 masks for training: p000_0"):
        require_classes(without, FORMAT)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"style": "forest"}, "args.style = 'forest'.*simulated, greenhouse"),
        ({"crop": 100}, "args.crop = 100: does not divide by 8"),
        ({"crop": 0}, "args.crop = 0: does not divide by 8"),
        ({"shrink": 0}, "shrink = 0: divides by less than one"),
        ({"images": -1}, "args.images = -1: is no number of photographs"),
        ({"region": [0.5, 0, 0.2, 1]}, "region.*is no region"),
        ({"classes": list("abcdefgh")}, "colours.*are fewer than 8"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_task(str(RECIPE), args)


# -- the recipe -------------------------------------------------------------------------------------------------------

SMALL = {"crop": 32, "width": 8, "epoch": 32}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A run of the recipe on a folder: its id, and the folder."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("roots")
        patch.setenv("SHOAL_HOME", str(place / "home"))
        patch.setattr(shoal.runs, "write_report_at_end", lambda run_id: None)  # a test draws it
        folder = write_folder(place / "mine", simulate(4, 2, STYLES["greenhouse"], SIZE, seed=1))
        overrides = [f"args.folder={folder}", *(f"args.{name}={value}" for name, value in SMALL.items())]
        result = fit_locally(load_recipe(str(RECIPE)).override([*overrides, "stop.epochs=4", "threads=1"]))
        yield result.run_id, place


@pytest.fixture
def run_id(home: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHOAL_HOME", str(home[1] / "home"))
    monkeypatch.chdir(home[1])
    return home[0]


def test_a_run_learns_from_a_folder_and_its_report_shows_overlays(run_id: str) -> None:
    run = shoal.runs.load(run_id)
    losses = run.metrics()["validation/loss"].dropna().tolist()
    assert losses[-1] < losses[0]
    latest = run.latest()
    assert {"full/iou", "full/skeleton_recall", "full/length_ratio", "validation/iou_main_root"} <= set(latest)
    page = shoal.runs.write_report(run).read_text()
    assert page.count("data:image/png;base64,") == 2
    for path in sorted((run.folder / "pictures").glob("*.png")):
        assert path.stem in page
        with Image.open(path) as overlay:
            assert overlay.width > 2 * SIZE[1]  # found and true
            assert overlay.height > SIZE[0]  # and the classes' names


def test_training_can_start_from_simulated_roots_and_not_from_another_network(run_id: str) -> None:
    small = [f"args.{name}={value}" for name, value in SMALL.items()]
    spec = load_recipe(str(RECIPE)).override([*small, "args.folder=mine", "stop.steps=1", "threads=1"])
    first = fit_locally(spec.override(["init=roots@champion", "name=roots-next", "optimizer.learning_rate=1e-9"]))
    known = Registry().get("roots@champion").snapshot().payload
    begun, ended = (
        {name: tensor.float() for name, tensor in safetensors_of(payload).items()}
        for payload in (known, first.weights.read_bytes())
    )
    torch.testing.assert_close(begun, ended, atol=1e-5, rtol=0)
    with pytest.raises(SpecMismatch, match=r"init = 'roots@champion'.*down\.0\.0\.weight"):
        fit_locally(spec.override(["init=roots@champion", "args.background=false"]), registers=False)


def safetensors_of(payload: bytes) -> dict[str, torch.Tensor]:
    import safetensors.torch

    return safetensors.torch.load(payload)


def predictor_of(name: str) -> Any:
    package = RegisteredModel("roots", Registry().location).load_package(1)
    spec = load_serving_spec(ROOT / "serve_apps" / "roots.yaml")
    check(spec)
    predictor = Predictor(package.factory, package.signature, spec.endpoint.options(name))
    return package.signature, predictor.load(package.snapshot)


def test_a_client_sends_a_picture_of_any_size_and_gets_a_mask(run_id: str, plants: list[Photograph]) -> None:
    """The registered network behind the protocol's own application, over a socket."""
    signature, loaded = predictor_of("roots")
    model = FakeModel(
        "roots", signature.inputs, signature.outputs, lambda inputs: loaded.predict_batch([inputs])[0], versions=(1,)
    )
    files = []
    for each, (height, width) in zip(plants[:2], ((50, 41), (96, 72)), strict=True):
        written = io.BytesIO()
        Image.fromarray(each.picture.transpose(1, 2, 0)[:height, :width]).save(written, "PNG")
        files.append(written.getvalue())
    with served(FakeHost(model)) as (url, _), Client(url, token=TOKEN, timeout_s=60.0) as client:
        answer = client.infer("roots", {"picture": files})
        masks = [Image.open(io.BytesIO(content)) for content in answer["mask"]]
        assert [mask.size for mask in masks] == [(41, 50), (72, 96)]
        assert [mask.mode for mask in masks] == ["P", "P"]
        for mask, lengths, content in zip(masks, answer["length"], files, strict=True):
            classes = np.asarray(mask)
            assert set(np.unique(classes)) <= {0, 1, 2, 3}
            skeletons = [measure_length(thin(classes == label)) for label in (1, 2, 3)]
            np.testing.assert_allclose(lengths, skeletons, rtol=1e-5)
            assert decode_picture(content, "").shape[1:] == classes.shape
        network = make_task(str(RECIPE), SMALL).model().eval()
        network.load_state_dict(safetensors_of(Registry().get("roots@1").snapshot().payload))
        np.testing.assert_array_equal(np.asarray(masks[1]), network.segment(plants[1].picture))
        with refused(422, r"row 0, 9 bytes: is no picture.*its format is unknown"):
            client.infer("roots", {"picture": [b"no PNG at"]})


@pytest.fixture
def _found_endpoint(run_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registered network answers where a client looks for its endpoint."""
    signature, loaded = predictor_of("roots")
    model = FakeModel("roots", signature.inputs, signature.outputs, lambda inputs: loaded.predict_batch([inputs])[0])
    with served(FakeHost(model)) as (url, _):
        monkeypatch.setattr("shoal.client.discovery.find_endpoint", lambda: SimpleNamespace(url=url))
        monkeypatch.setattr("shoal.client.discovery.token_for", lambda url: TOKEN)
        yield


@pytest.mark.usefixtures("_found_endpoint")
def test_the_client_writes_masks_and_names_the_file_that_is_none(
    plants: list[Photograph], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(plants[0].picture.transpose(1, 2, 0)).save("a.jpg")
    Path("b.jpg").write_bytes(b"no picture")
    for words, message in (
        (["a.jpg", "b.jpg"], r"^error: b\.jpg: row 0, 10 bytes: is no picture"),
        (["c.jpg"], r"^error: .*No such file.*c\.jpg"),
        ([], "2"),  # the usage
    ):
        monkeypatch.setattr("sys.argv", ["roots_client.py", *words])
        with pytest.raises(SystemExit, match=message):
            runpy.run_path(str(ROOT / "serve_apps" / "roots_client.py"), run_name="__main__")
    assert "a.mask.png: lengths" in capsys.readouterr().out
    with Image.open("a.mask.png") as mask:
        assert mask.size == SIZE[::-1]


def test_images_are_of_as_many_plants_as_possible(plants: list[Photograph]) -> None:
    choose = load_task_file(RECIPE, "roots").choose_images
    assert [each.name for each in choose(plants, 5)] == ["p000_0", "p001_0", "p002_0", "p003_0", "p000_1"]
    with pytest.raises(ConfigError, match=r"args\.images = 9: there are 8 photographs"):
        choose(plants, 9)


def test_the_recipe_says_how_it_is_trained_and_what_can_be_left_out() -> None:
    spec = load_recipe(str(RECIPE))
    assert not spec.stop.is_empty
    assert spec.override(["parallel=ddp", "workers=2"]).resolve_dims().data == 2
    task = make_task(str(RECIPE), {})
    for args in task.parts.values():
        assert sum(each.numel() for each in make_task(str(RECIPE), dict(args)).model().parameters()) > 0


@pytest.mark.usefixtures("_found_endpoint")
def test_the_python_of_the_page_runs(plants: list[Photograph]) -> None:
    page = (ROOT / "docs" / "libs" / "segmentation.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    Image.fromarray(plants[0].picture.transpose(1, 2, 0)).save("photograph.jpg")
    for block in blocks:
        exec(compile(block, "roots.md", "exec"), {})
    with Image.open("mask.png") as mask:
        assert mask.size == (SIZE[1], SIZE[0])
