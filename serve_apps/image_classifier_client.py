"""Classify pictures with the image classifier: Fashion-MNIST's test images, or your own.

python serve_apps/image_classifier_client.py                       # 1,000 test images, and how many are right
python serve_apps/image_classifier_client.py shoe.png bag.jpg
"""

import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for
from shoal.data.formats import Idx

KINDS = ["T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
AT_ONCE = 50


def picture(path: str) -> np.ndarray:
    """Load a picture in the endpoint's format: float32 [1, 28, 28] of 0 to 255, white clothing on black."""
    return np.asarray(Image.open(path).convert("L").resize((28, 28)), np.float32)[None]


def classify(client: Client, images: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The likeliest kind of each image [B, 1, 28, 28], its probability, and the version of the model."""
    answer = client.infer("fashion", images, deadline_s=1.0)
    probabilities = answer["output"]
    return probabilities.argmax(1), probabilities.max(1), answer.version


def main() -> None:
    found = find_endpoint()
    with Client(found.url, token=token_for(found.url)) as client:
        if len(sys.argv) > 1:
            kinds, sure, version = classify(client, np.stack([picture(path) for path in sys.argv[1:]]))
            for path, kind, probability in zip(sys.argv[1:], kinds, sure, strict=True):
                print(f"{path}: {KINDS[kind]} ({probability:.0%}), by version {version}")
            return
        tests = Idx(*(INSTALLED / f"t10k-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")), scale=False)
        images, labels = (np.stack([np.asarray(tests[row][part]) for row in range(1000)]) for part in (0, 1))
        begun_s, right = time.monotonic(), 0
        for start in range(0, 1000, AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            kinds, _, version = classify(client, images[rows, None].astype(np.float32))
            right += int((kinds == labels[rows]).sum())
        print(f"{right / 10:.1f}% of 1,000 test images, by version {version}, in {time.monotonic() - begun_s:.2f} s")


if __name__ == "__main__":
    main()
