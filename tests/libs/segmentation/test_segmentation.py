"""Parts of segmentation: simulated plants, skeletons, losses, scores, crops, augmentation, tiles, U-Net, comparison."""

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.data import Loader
from shoal.libs.segmentation.comparison import encode_comparison
from shoal.libs.segmentation.crops import Distortion, EvaluationTiles, TrainingCrops, relight, warp
from shoal.libs.segmentation.losses import compute_loss, cross_entropy, soft_dice, soft_skeleton_recall
from shoal.libs.segmentation.photographs import IGNORED, PALETTE, Photograph
from shoal.libs.segmentation.scores import SegmentationScore, score_pictures
from shoal.libs.segmentation.simulation import CLASSES, STYLES, simulate
from shoal.libs.segmentation.thinning import measure_length, thin, thin_classes
from shoal.libs.segmentation.unet import PictureSegmenter, UNet, predict_probabilities, remove_background

SIZE = (96, 72)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plants() -> list[Photograph]:
    return simulate(4, 2, STYLES["greenhouse"], SIZE, seed=1)


# -- simulated plants -------------------------------------------------------------------------------------------------


def test_simulated_photographs_have_every_class_and_follow_from_their_seed(plants: list[Photograph]) -> None:
    again = simulate(4, 2, STYLES["greenhouse"], SIZE, seed=1)
    others = simulate(1, 1, STYLES["simulated"], SIZE, seed=2)
    assert [each.name for each in plants[:3]] == ["p000_0", "p000_1", "p001_0"]
    for each, same in zip(plants, again, strict=True):
        assert each.picture.shape == (3, *SIZE)
        assert np.unique(each.classes).tolist() == [0, 1, 2, 3]
        assert (each.classes > 0).mean() < 0.2  # thin things
        np.testing.assert_array_equal(each.picture, same.picture)
    assert not np.array_equal(plants[0].picture, plants[1].picture)
    assert not np.array_equal(plants[0].picture, others[0].picture)


# -- skeletons --------------------------------------------------------------------------------------------------------


def thin_by_loops(mask: np.ndarray) -> np.ndarray:
    """Zhang and Suen's algorithm as the paper has it, one pixel after the other."""
    image = np.pad(mask.astype(int), 1)
    while True:
        before = image.copy()
        for number in range(2):
            marked = []
            for row, column in np.argwhere(image):
                p2 = image[row - 1, column]
                p3 = image[row - 1, column + 1]
                p4 = image[row, column + 1]
                p5 = image[row + 1, column + 1]
                p6 = image[row + 1, column]
                p7 = image[row + 1, column - 1]
                p8, p9 = image[row, column - 1], image[row - 1, column - 1]
                ring = [p2, p3, p4, p5, p6, p7, p8, p9, p2]
                rises = sum(a == 0 and b == 1 for a, b in pairwise(ring))
                first, second = ((p2, p4, p6), (p4, p6, p8)) if number == 0 else ((p2, p4, p8), (p2, p6, p8))
                if 2 <= sum(ring[:-1]) <= 6 and rises == 1 and not np.prod(first) and not np.prod(second):
                    marked.append((row, column))
            for row, column in marked:
                image[row, column] = 0
        if (image == before).all():
            return image[1:-1, 1:-1].astype(bool)


def test_skeletons_are_those_of_the_paper(plants: list[Photograph]) -> None:
    random = np.random.default_rng(0)
    blobs = [random.random((24, 31)) < share for share in (0.3, 0.6, 0.9)]
    for mask in [*blobs, plants[0].classes > 0, np.zeros((5, 5), bool), np.ones((9, 7), bool)]:
        np.testing.assert_array_equal(thin(mask), thin_by_loops(mask))


def test_lengths_are_those_of_lines_drawn() -> None:
    canvas = np.zeros((60, 60), bool)
    canvas[10, 5:46] = True
    assert measure_length(canvas) == 40
    canvas[20:41, 5:26] |= np.eye(21, dtype=bool)
    assert measure_length(canvas) == pytest.approx(40 + 20 * np.sqrt(2))
    thick = np.zeros((60, 60), bool)
    thick[20:25, 5:55] = True
    assert measure_length(thin(thick)) == pytest.approx(49, abs=5)  # thinning takes half the width at each end
    corner = np.zeros((9, 9), bool)
    corner[2, 2:6] = corner[2:6, 5] = True
    assert measure_length(corner) == 6  # no diagonal short cut


# -- losses and scores ------------------------------------------------------------------------------------------------


def losses_setting() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 4, 12, 10, generator=generator)
    classes = torch.randint(0, 4, (4, 12, 10), generator=generator).to(torch.uint8)
    classes[1, :3] = IGNORED
    classes[2] = 0
    return logits, classes, (torch.rand(4, 12, 10, generator=generator) < 0.3) & (classes % IGNORED > 0)


def test_losses_are_those_of_their_definitions() -> None:
    logits, classes, skeleton = losses_setting()
    probabilities = logits.softmax(1).numpy().astype(float)
    crosses = []
    dices = []
    recalls = []
    for number in range(4):
        known = classes[number].numpy() != IGNORED
        real = classes[number].numpy()
        rows, columns = np.nonzero(known)
        crosses.append(-np.log(probabilities[number, real[known], rows, columns]).mean())
        tube = np.zeros_like(known)
        for row, column in np.argwhere(skeleton[number].numpy()):
            tube[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] = True
        dice, recall = [], []
        for label in (1, 2, 3):
            target, found = real == label, probabilities[number, label] * known
            if target.any():
                dice.append(2 * (found * target).sum() / (found.sum() + target.sum()))
            if (target & tube).any():
                recall.append(found[target & tube].mean())
        dices.append(np.mean(dice) if dice else 1.0)
        recalls.append(np.mean(recall) if recall else 1.0)
    soft = logits.softmax(1)
    assert cross_entropy(logits.log_softmax(1), classes).item() == pytest.approx(np.mean(crosses), rel=1e-5)
    assert soft_dice(soft, classes).item() == pytest.approx(np.mean(dices), rel=1e-5)
    assert soft_skeleton_recall(soft, classes, skeleton).item() == pytest.approx(np.mean(recalls), rel=1e-5)
    expected = np.mean(crosses) + (1 - np.mean(dices)) + 0.5 * (1 - np.mean(recalls))
    assert compute_loss(logits, classes, skeleton, recall=0.5).item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_the_mean_over_samples_and_a_right_answer_has_none() -> None:
    logits, classes, skeleton = losses_setting()
    each = [compute_loss(*(part[[number]] for part in (logits, classes, skeleton))) for number in range(4)]
    assert compute_loss(logits, classes, skeleton).item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)
    right = 50 * torch.nn.functional.one_hot(classes.long() % IGNORED, 4).permute(0, 3, 1, 2).float()
    assert compute_loss(right, classes, skeleton).item() == pytest.approx(0, abs=1e-4)
    nothing = torch.full_like(classes, IGNORED)
    assert compute_loss(logits, nothing, skeleton & False).item() == 0


def test_scores_count_pixels_of_all_pictures_and_merge() -> None:
    random = np.random.default_rng(0)
    real = random.integers(0, 4, (6, 20, 20)).astype(np.uint8)
    real[0, :5] = IGNORED
    found = np.where(random.random(real.shape) < 0.7, real % IGNORED, random.integers(0, 4, real.shape)).astype(
        np.uint8
    )
    skeleton = random.random(real.shape) < 0.4
    one, other, full = (SegmentationScore(CLASSES) for _ in range(3))
    for score, part in ((one, slice(0, 2)), (other, slice(2, 6)), (full, slice(None))):
        score.update(*(torch.from_numpy(each[part]) for each in (found, real, skeleton)))
    one.merge_state(other)
    assert one.compute() == full.compute()
    known = real != IGNORED
    for label, name in enumerate(CLASSES, 1):
        both = ((found == label) & (real == label)).sum()
        either = (((found == label) | (real == label)) & known).sum()
        line = (real == label) & skeleton
        key = name.replace(" ", "_")
        assert full.compute()[f"iou_{key}"] == pytest.approx(both / either)
        assert full.compute()[f"recall_{key}"] == pytest.approx(((found == label) & line).sum() / line.sum())
    full.reset()
    assert full.compute()["iou"] == 1


def test_lengths_of_full_pictures_are_compared(plants: list[Photograph]) -> None:
    same = score_pictures([(each.classes, each.classes) for each in plants], CLASSES)
    assert same["iou"] == same["skeleton_recall"] == same["length_ratio"] == 1
    assert same["length_r2"] == pytest.approx(1)
    lost = score_pictures([(each.classes % 3, each.classes) for each in plants], CLASSES)  # no secondary roots
    assert lost["recall_secondary_root"] == lost["iou_secondary_root"] == 0
    assert lost["iou_stem"] == 1
    assert lost["length_ratio"] < 0.8
    assert np.isnan(score_pictures([(plants[0].classes, plants[0].classes)], CLASSES)["length_r2"])


# -- crops and augmentation -------------------------------------------------------------------------------------------


def test_a_third_of_the_crops_is_centred_on_a_root(plants: list[Photograph]) -> None:
    np.random.seed(0)
    shares = []
    for foreground in (0.0, 1 / 3, 1.0):
        crops = TrainingCrops(plants, 4, 8, 300, foreground=foreground)
        _, classes, _ = crops.batch(np.arange(300))
        shares.append((classes[:, 4, 4] % IGNORED > 0).float().mean().item())
    anywhere = shares[0]
    assert shares[2] == 1
    assert anywhere < 0.25
    assert shares[1] == pytest.approx(1 / 3 + anywhere * 2 / 3, abs=0.1)


def test_crops_follow_from_seed_epoch_and_batch_and_stay_bytes(plants: list[Photograph]) -> None:
    crops = TrainingCrops(plants, 4, 32, 16, distortion=Distortion())
    found = []
    for epoch in (0, 0, 1):
        loader = Loader(crops, batch_size=8, seed=3)
        loader.seek(epoch=epoch)
        found.append([tensor.clone() for tensor in next(iter(loader))])
    pictures, classes, skeletons = found[0]
    assert (pictures.dtype, classes.dtype, skeletons.dtype) == (torch.uint8, torch.uint8, torch.bool)
    assert (pictures.shape, classes.shape) == ((8, 3, 32, 32), (8, 32, 32))
    assert set(classes.unique().tolist()) <= {0, 1, 2, 3, IGNORED}
    assert all(torch.equal(*pair) for pair in zip(found[0], found[1], strict=True))
    assert not torch.equal(found[0][0], found[2][0])


def test_a_warp_without_distortion_is_the_centre_and_classes_move_with_the_picture() -> None:
    torch.manual_seed(0)
    still = Distortion(rotation=0, scale=1, elastic=0, flips=False)
    pictures = torch.rand(2, 3, 20, 20)
    labels = torch.randint(0, 4, (2, 1, 20, 20)).float()
    moved, classes = warp(pictures, labels, 12, still, outside=IGNORED)
    torch.testing.assert_close(moved, pictures[:, :, 4:16, 4:16], atol=1e-5, rtol=0)
    torch.testing.assert_close(classes, labels[:, :, 4:16, 4:16])
    block = torch.zeros(16, 1, 64, 64)
    block[:, :, 20:40, 26:50] = 1
    far = Distortion(rotation=40, scale=1.3, elastic=5)
    moved, classes = warp(block.expand(-1, 3, -1, -1), block, 40, far, outside=IGNORED)
    is_known = classes[:, 0] != IGNORED
    assert ((moved[:, 0] > 0.5) == (classes[:, 0] == 1))[is_known].float().mean() > 0.98
    assert (classes[0] != classes[1]).any()
    outside, ignored = warp(block.expand(-1, 3, -1, -1), block, 128, still, outside=IGNORED)
    assert (ignored[:, :, :30] == IGNORED).all()
    assert outside.isfinite().all()


@pytest.mark.parametrize("size", [31, 32])
def test_crops_that_are_not_warped_stay_sharp(size: int) -> None:
    torch.manual_seed(0)
    some = Distortion(warped=0.5, flips=False)
    side, number = some.input_size(size), 64
    pictures = torch.rand(number, 3, side, side)
    moved, _ = warp(pictures, pictures[:, :1], size, some, outside=IGNORED)
    begin = (side - size) // 2
    centre = pictures[:, :, begin : begin + size, begin : begin + size]
    is_sharp = (moved - centre).abs().amax((1, 2, 3)) < 1e-4
    assert 0.25 * number < is_sharp.sum() < 0.75 * number


def test_light_changes_and_stays_within_its_range() -> None:
    torch.manual_seed(0)
    pictures = torch.rand(8, 3, 16, 16)
    lit = relight(pictures, Distortion())
    assert 0 <= lit.min() < lit.max() <= 1
    assert (lit.mean((1, 2, 3)) - pictures.mean((1, 2, 3))).abs().max() > 0.05
    still = relight(pictures, Distortion(brightness=0, contrast=0, tint=0, noise=0))
    torch.testing.assert_close(still, pictures)


def test_evaluation_has_every_pixel_once(plants: list[Photograph]) -> None:
    tiles = EvaluationTiles(plants[:2], 4, 40)
    pictures, classes, skeletons = tiles.batch(np.arange(len(tiles)))
    assert len(tiles) == 2 * 3 * 2
    counts = np.bincount(classes.flatten().numpy(), minlength=256)
    expected = np.bincount(np.concatenate([each.classes.ravel() for each in plants[:2]]), minlength=4)
    assert counts[:4].tolist() == expected.tolist()
    assert skeletons.sum() == sum(thin_classes(each.classes, 4).sum() for each in plants[:2])
    np.testing.assert_array_equal(pictures[0], plants[0].picture[:, :40, :40])


# -- network and tiles ------------------------------------------------------------------------------------------------


def test_a_low_pass_is_removed() -> None:
    pictures = torch.rand(1, 3, 20, 17)
    found = remove_background(pictures, 5)
    grey = pictures[0].mean(0).numpy()
    for row, column in ((0, 0), (10, 8), (19, 16), (3, 15)):
        window = grey[max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3]
        assert found[0, 0, row, column].item() == pytest.approx(grey[row, column] - window.mean(), abs=1e-5)


@pytest.mark.parametrize(("height", "width"), [(50, 37), (32, 32), (7, 100), (1, 1)])
def test_tiles_give_what_a_network_of_single_pixels_gives_at_once(height: int, width: int) -> None:
    """Such a network sees no borders, so that tiles, weights and mirrored tiles must change nothing."""
    torch.manual_seed(0)
    pixelwise = torch.nn.Conv2d(3, 4, 1)
    picture = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    with torch.no_grad():
        expected = pixelwise(picture[None] / 255).softmax(1)[0]
        found = predict_probabilities(lambda tiles: pixelwise(tiles / 255), picture, tile=32, flips=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_network_has_the_size_it_says_and_takes_bytes_and_floats() -> None:
    network = UNet(4).eval()
    assert sum(each.numel() for each in network.parameters()) == 488_196
    pictures = torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8)
    with torch.no_grad():
        logits = network(pictures)
        assert logits.shape == (2, 4, 32, 48)
        torch.testing.assert_close(network(pictures.float()), logits)
        torch.testing.assert_close(network(pictures[:1]), logits[:1], atol=1e-5, rtol=1e-4)  # no other sample counts
    assert UNet(2, width=8, background=False).down[0][0].in_channels == 3


def test_only_the_region_is_segmented() -> None:
    torch.manual_seed(0)
    network = PictureSegmenter(4, 8, colours=PALETTE, region=(0.25, 0.5, 1.0, 1.0), tile=32)
    torch.nn.init.constant_(network.head.bias, 0)
    with torch.no_grad():
        network.head.bias[2] = 100.0
    classes = network.segment(np.zeros((3, 40, 60), np.uint8))
    assert (classes[20:, 15:] == 2).all()
    assert classes.sum() == 2 * 20 * 45
    network.shrink = 4
    assert network.segment(np.zeros((3, 40, 60), np.uint8)).sum() == 2 * 20 * 44  # in blocks
    assert network.segment(np.zeros((3, 2, 2), np.uint8)).shape == (2, 2)


@pytest.mark.parametrize("width", [300, 40])
def test_a_comparison_shows_what_was_found_what_is_true_and_a_legend(width: int) -> None:
    picture = np.full((3, 40, width), 100, np.uint8)
    found, truth = np.zeros((2, 40, width), np.uint8)
    found[10:20] = 1
    truth[20:30] = 2
    truth[30:] = 255
    names, colours = ("stem", "main root", "secondary root"), ("#000000", "#ff0000", "#00ff00", "#0000ff")
    with Image.open(io.BytesIO(encode_comparison(picture, found, truth, names, colours))) as opened:
        shown = np.asarray(opened.convert("RGB"))

    def count(pixels: np.ndarray, colour: list[int]) -> int:
        return int((pixels == colour).all(-1).sum())

    left, right = np.array_split(shown, 2, axis=1)
    red, green, grey = [193, 40, 40], [40, 193, 40], [100, 100, 100]
    assert count(left, red) >= 10 * width
    assert count(right, green) >= 10 * width
    assert count(left, green) == count(right, red) == 0
    assert min(count(left, grey), count(right, grey)) >= 30 * width
    for colour in ([255, 0, 0], [0, 255, 0], [0, 0, 255]):  # of the legend
        assert count(shown, colour)
    assert (shown < 64).all(-1).any()  # the names
