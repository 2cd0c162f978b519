"""Hide each inner node of a piece of Python code in turn, and let the endpoint guess its kind.

python serve_apps/trees_client.py "total = sum(x * x for x in values)" "if not ready: raise ValueError(name)"
"""

import ast
import sys

import numpy as np

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for
from shoal.libs.trees.syntax_tree import KIND_OF_TOKEN, KINDS, MASKED, number_nodes, pad_trees


def hide_each(code: str) -> tuple[dict[str, np.ndarray], list[tuple[int, int]]]:
    """A request with one tree for each inner node, in which that node is hidden; and (node, kind) of each."""
    numbered = number_nodes(ast.parse(code).body[0])
    assert numbered is not None
    tokens, parents = numbered
    hidden = sorted(set(parents) - {-1})
    trees = [([MASKED if place == node else token for place, token in enumerate(tokens)], parents) for node in hidden]
    return pad_trees(trees), [(node, int(KIND_OF_TOKEN[tokens[node]])) for node in hidden]


def main() -> None:
    found = find_endpoint()
    with Client(found.url, token=token_for(found.url)) as client:
        for code in sys.argv[1:] or ["total = sum(x * x for x in values)"]:
            request, hidden = hide_each(code)
            answer = client.infer("trees", request)
            print(f"{code}  (version {answer.version})")
            for logits, (node, kind) in zip(answer["logits"], hidden, strict=True):
                guess = KINDS[logits[node].argmax()]
                print(f"  node {node}: {KINDS[kind]}, guessed {guess}{'' if guess == KINDS[kind] else ', wrong'}")


if __name__ == "__main__":
    main()
