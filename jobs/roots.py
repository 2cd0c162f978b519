"""A U-Net finds stem, main root and secondary roots in photographs, after a dozen annotated ones.

    shoal run roots                                           # plants of our generator, for a first look
    shoal run roots args.folder=my_roots                      # my_roots/images/NAME.jpg, my_roots/masks/NAME.png
    shoal run roots args.style=simulated args.plants=150 name=roots-simulated           # pretrains ...
    shoal run roots args.folder=my_roots init=roots-simulated@champion                  # ... and starts from there
    shoal run roots args.folder=my_roots args.classes='[root]' args.region='[0.1, 0, 0.9, 1]'
    shoal run roots parallel=ddp workers=2                    # two workers share each batch
    shoal serve deploy serve_apps/roots.yaml                  # a picture in, a mask out
    python -m shoal.train task=roots                          # in this process, without Ray

Photographs have any size, and are split by plant: NAME without what follows its last underscore, or `plants.csv`. Masks
have the class of each pixel as its number or its colour. docs/libs/segmentation.md says how many photographs are
needed.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from shoal.data import Data
from shoal.errors import ConfigError
from shoal.libs.segmentation.comparison import encode_comparison
from shoal.libs.segmentation.crops import Distortion, EvaluationTiles, TrainingCrops
from shoal.libs.segmentation.losses import compute_loss
from shoal.libs.segmentation.photographs import (
    PALETTE,
    MaskFormat,
    Photograph,
    read_folder,
    require_classes,
    split_by_plant,
)
from shoal.libs.segmentation.scores import SegmentationScore, score_pictures
from shoal.libs.segmentation.simulation import CLASSES, STYLES, simulate
from shoal.libs.segmentation.unet import PictureSegmenter
from shoal.registry import Signature, TensorSignature
from shoal.train import Callback, Task, TrainingState, TrainSpec

MAX_OVERLAYS = 6


class RootTask(Task):
    """The class of each pixel of a photograph.

    folder:      of the photographs; "": `plants` plants of the generator, `per_plant` photographs each, in `style`,
                 `height` pixels high
    images:      at most so many photographs for training, of as many plants as possible; 0: all
    classes:     the names of classes 1 and on; colours: in masks and overlays, the background's first
    region:      left, top, right, bottom as shares of a photograph: the rest is background
    shrink:      divides both sides of the photographs
    split:       the seed by which plants are held back, a quarter of them
    crop:        side of the training crops, and of an endpoint's tiles; a multiple of 8
    epoch:       number of crops of an epoch
    foreground:  share of the crops that are centred on a root
    warped:      share of the crops that are rotated, scaled and bent; the others stay sharp
    flips:       whether full pictures are computed as they are and mirrored: better, and twice as long
    background:  whether the picture minus its low pass is a fourth channel
    skeleton:    weight of the skeleton recall in the loss
    """

    parts: ClassVar = {
        "background removal": {"background": False},
        "crops on roots": {"foreground": 0.0},
        "augmentation": {"augment": False},
        "sharp crops": {"warped": 1.0},
        "skeleton recall": {"skeleton": 0.0},
    }

    def __init__(
        self,
        *,
        folder: str = "",
        style: str = "greenhouse",
        plants: int = 24,
        per_plant: int = 2,
        height: int = 256,
        images: int = 0,
        classes: Sequence[str] = CLASSES,
        colours: Sequence[str] = PALETTE,
        region: Sequence[float] | None = None,
        shrink: int = 1,
        split: int = 0,
        crop: int = 128,
        epoch: int = 256,
        width: int = 16,
        foreground: float = 1 / 3,
        warped: float = 0.4,
        flips: bool = True,
        background: bool = True,
        augment: bool = True,
        skeleton: float = 1.0,
    ) -> None:
        if style not in STYLES:
            raise ConfigError("args.style", style, "is no style of the generator", f"one of {', '.join(STYLES)}")
        if crop < 8 or crop % 8:
            raise ConfigError("args.crop", crop, "does not divide by 8", "the network halves it three times")
        if images < 0:
            raise ConfigError("args.images", images, "is no number of photographs", "give 0 for all")
        self.format = MaskFormat(tuple(classes), tuple(colours), None if region is None else tuple(region), shrink)
        self.folder, self.generated, self.images, self.split = folder, (plants, per_plant, style, height), images, split
        self.crop, self.epoch, self.width, self.foreground = crop, epoch, width, foreground
        self.background, self.augment, self.skeleton, self.warped = background, augment, skeleton, warped
        self.flips = flips

    @property
    def num_classes(self) -> int:
        return len(self.format.classes) + 1

    def model(self) -> nn.Module:
        return PictureSegmenter(
            self.num_classes,
            self.width,
            background=self.background,
            colours=self.format.colours,
            region=self.format.region,
            shrink=self.format.shrink,
            tile=self.crop,
            flips=self.flips,
        )

    def photographs(self) -> tuple[list[Photograph], list[Photograph]]:
        """Those for training and those held back; no plant is in both. Raises DataError naming the file."""
        found = read(self.folder, self.format) if self.folder else generate(*self.generated)
        train, held_back = split_by_plant(found, 0.25, self.split)
        if self.images:
            train = choose_images(train, self.images)
        require_classes(train, self.format)
        return train, held_back

    def data(self) -> Data:
        train, held_back = self.photographs()
        distortion = Distortion(warped=self.warped) if self.augment else None
        crops = TrainingCrops(train, self.num_classes, self.crop, self.epoch, self.foreground, distortion)
        return Data(crops, validation=EvaluationTiles(held_back, self.num_classes, self.crop))

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return compute_loss(outputs, batch[1], batch[2], recall=self.skeleton)

    def stateful_metrics(self) -> dict[str, SegmentationScore]:
        return {"pixels": SegmentationScore(self.format.classes)}

    def update_metric(self, name: str, metric: Any, outputs: Any, batch: Any) -> None:
        metric.update(outputs.argmax(1), batch[1], batch[2])

    def callbacks(self) -> Sequence[Callback]:
        return [FullPictures(self)]

    def signature(self) -> Signature:
        """An endpoint takes the bytes of a picture's file, and gives those of a mask."""
        return Signature(
            inputs=[TensorSignature(name="picture", datatype="BYTES", shape=[-1])],
            outputs=[
                TensorSignature(name="mask", datatype="BYTES", shape=[-1]),
                TensorSignature(name="length", datatype="FP32", shape=[-1, self.num_classes - 1]),
            ],
        )


class FullPictures(Callback):
    """At the end: full photographs of held-back plants, by overlapping tiles as an endpoint does it.

    Their scores go into the record as full/NAME, and overlays beside the true classes into the run's pictures, which
    the report shows.
    """

    def __init__(self, task: RootTask) -> None:
        self.task = task

    def on_end(self, state: TrainingState) -> None:
        network = state.model[0]
        if not (state.is_first and isinstance(network, PictureSegmenter)):  # a shard, or a stage, sees no picture
            return
        was_training = network.training
        network.eval()
        _, held_back = self.task.photographs()
        found = [network.classify(each.picture) for each in held_back]
        network.train(was_training)
        pairs = [(mask, each.classes) for mask, each in zip(found, held_back, strict=True)]
        scores = score_pictures(pairs, self.task.format.classes)
        state.log({f"full/{name}": value for name, value in scores.items() if value == value})
        folder = state.folder / "pictures"
        folder.mkdir(parents=True, exist_ok=True)
        for mask, each in list(zip(found, held_back, strict=True))[:MAX_OVERLAYS]:
            kind = self.task.format
            shown = encode_comparison(each.picture, mask, each.classes, kind.classes, kind.colours)
            (folder / f"{each.name}.png").write_bytes(shown)


@cache
def read(folder: str, kind: MaskFormat) -> list[Photograph]:
    """The user's photographs, read once in each process."""
    return read_folder(Path(folder), kind)


@cache
def generate(plants: int, per_plant: int, style: str, height: int) -> list[Photograph]:
    """The generator's photographs, drawn once in each process."""
    print(f"photographs of {plants} GENERATED plants, {per_plant} of each: args.folder=FOLDER takes yours")
    return simulate(plants, per_plant, STYLES[style], (height, height * 3 // 4))


def choose_images(photographs: Sequence[Photograph], count: int) -> list[Photograph]:
    """So many photographs, of as many plants as possible: first one of each plant, then the second ones."""
    numbered: list[tuple[int, str, Photograph]] = []
    for each in photographs:
        numbered.append((sum(plant == each.plant for _, plant, _ in numbered), each.plant, each))
    if count > len(numbered):
        problem = f"there are {len(numbered)} photographs for training"
        raise ConfigError("args.images", count, problem, "a quarter of the plants is held back")
    return [each for _, _, each in sorted(numbered, key=lambda one: one[:2])[:count]]


def spec() -> TrainSpec:
    """The recipe: 320 steps under one cycle, six CPU-minutes."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "roots",
            "parallel": {"channels_last": True},
            "batch_size": 8,
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 1e-2},
            "schedule": {"name": "one_cycle", "warmup": 0.2},
            "clip_norm": 1.0,
            "stop": {"epochs": 10},
            "evaluate": {"every_epochs": 2},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
