"""Send photographs to the endpoint of serve_apps/roots.py, and write a mask next to each.

python serve_apps/roots_client.py photograph.jpg another.png
"""

import sys
from pathlib import Path

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for


def segment(client: Client, path: Path) -> tuple[Path, list[float]]:
    """Write the mask of one photograph as NAME.mask.png; its path, and the length of each class in pixels."""
    answer = client.infer("roots", {"picture": [path.read_bytes()]})
    mask = path.with_suffix(".mask.png")
    mask.write_bytes(answer["mask"][0])
    return mask, answer["length"][0].tolist()


def main() -> None:
    found = find_endpoint()
    with Client(found.url, token=token_for(found.url)) as client:
        for name in sys.argv[1:]:
            mask, lengths = segment(client, Path(name))
            print(f"{mask}: lengths {', '.join(f'{length:.0f}' for length in lengths)} pixels")


if __name__ == "__main__":
    main()
