"""Send photographs to the endpoint of serve_apps/roots.yaml, and write a mask next to each.

python serve_apps/roots_client.py photograph.jpg another.png
"""

import argparse
import sys
from pathlib import Path

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for
from shoal.errors import InferenceError, ShoalError


def segment(client: Client, path: Path) -> tuple[Path, list[float]]:
    """Write the mask of one photograph as NAME.mask.png; its path, and the length of each class in pixels."""
    answer = client.infer("roots", {"picture": [path.read_bytes()]})
    mask = path.with_suffix(".mask.png")
    mask.write_bytes(answer["mask"][0])
    return mask, answer["length"][0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", nargs="+", type=Path, metavar="photograph")
    chosen = parser.parse_args()
    try:
        found = find_endpoint()
        with Client(found.url, token=token_for(found.url)) as client:
            for path in chosen.photographs:
                try:
                    mask, lengths = segment(client, path)
                except InferenceError as error:
                    sys.exit(f"error: {path}: {error}")
                print(f"{mask}: lengths {', '.join(f'{length:.0f}' for length in lengths)} pixels")
    except (OSError, ShoalError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
