"""Evaluate formulas with the Tree-LSTM.

python serve_apps/syntax_tree_client.py "not (True and False) or False" "True and not True"
"""

import sys

from syntax_tree import as_arrays

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for


def main() -> None:
    formulas = sys.argv[1:] or ["not (True and False) or False"]
    found = find_endpoint()
    with Client(found.url, token=token_for(found.url)) as client:
        answer = client.infer("syntax", as_arrays(formulas))
    for formula, worth in zip(formulas, answer["logits"].argmax(1), strict=True):
        print(f"{formula} is {bool(worth)}, by version {answer.version}")


if __name__ == "__main__":
    main()
