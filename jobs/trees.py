"""A Tree-LSTM learns the grammar of Python: which kind of node is hidden in a syntax tree, given all that is below it.

    shoal run trees                                         # a cluster, the job and a live picture
    shoal run trees args.files=0                            # all of the standard library
    shoal run trees parallel=ddp workers=2                  # two workers share each batch, by nodes
    shoal run trees parallel=fsdp workers=2                 # ... and the parameters
    ray job submit --working-dir . -- python jobs/trees.py  # the same on a cluster that is up
    python -m shoal.train task=trees                        # in this process, without Ray
    shoal serve deploy serve_apps/trees.yaml                # serves the trained network

The trees are those of the standard library: one for each function, and one for each other statement at the top of a
module or class. Of 15% of the inner nodes the kind is held out, and predicted from the subtree: a tree of its own shape
for each node, so that every batch is another graph. A worker of the loader plans the batches ahead of the steps.

The baseline is the commonest kind: `accuracy` and `accuracy_commonest` are in the record, over the same nodes. Tensor
ranks have nothing to share in one recurrent layer, and a pipeline needs batches of one shape.
"""

import ast
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor, nn

from shoal.data import Data
from shoal.libs.trees import TreeBatch
from shoal.libs.trees.syntax_tree import KIND_OF_TOKEN, KINDS, MASKED, TOKENS, TreeLSTM, check_trees, number_nodes
from shoal.registry import Signature, TensorSignature
from shoal.train import Task, TrainSpec

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
VALIDATION_EVERY = 5  # files


class SyntaxTask(Task):
    """The kind of hidden nodes of syntax trees.

    folder:               with Python files, also in its folders; empty: the standard library of this Python
    files:                how many of them, evenly spaced; 0: all. Each fifth one is for validation
    min_nodes, max_nodes: of the trees that are used
    hidden_share:         of the inner nodes of a tree; at least one is hidden
    """

    parts: ClassVar = {
        "wide embedding": {"width": 8},
        "many units": {"hidden": 16},
        "several hidden nodes": {"hidden_share": 0.0},
    }

    def __init__(
        self,
        *,
        folder: str = "",
        files: int = 200,
        min_nodes: int = 10,
        max_nodes: int = 1000,
        hidden_share: float = 0.15,
        width: int = 64,
        hidden: int = 150,
    ) -> None:
        self.folder, self.files = folder or sysconfig.get_paths()["stdlib"], files
        self.min_nodes, self.max_nodes, self.hidden_share = min_nodes, max_nodes, hidden_share
        self.width, self.hidden = width, hidden

    def model(self) -> nn.Module:
        return TreeLSTM(len(TOKENS), len(KINDS), self.width, self.hidden, per_node=True)

    def data(self) -> Data:
        train, held_back = read_folder(self.folder, self.files, self.min_nodes, self.max_nodes)
        commonest = train.find_commonest_kind()
        return Data(
            TreesWithHiddenNodes(train, self.hidden_share, commonest, changes=True),
            validation=TreesWithHiddenNodes(held_back, self.hidden_share, commonest, changes=False),
            collate=plan_batch,
        )

    def inputs(self, batch: Any) -> tuple[TreeBatch]:
        return (batch,)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        losses = nn.functional.cross_entropy(outputs, batch.labels["kind"].long(), reduction="none")  # [N]
        return self._mean(losses, batch)

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        is_right = outputs.argmax(-1) == batch.labels["kind"]
        return {
            "accuracy": self._mean(is_right.float(), batch),
            "accuracy_commonest": self._mean(batch.labels["is_commonest"].float(), batch),
        }

    def _mean(self, values: Tensor, batch: TreeBatch) -> Tensor:
        """The mean over the trees of the mean over a tree's hidden nodes, of values [N]."""
        return batch.mean_per_tree(values, where=batch.labels["is_hidden"]).mean()

    # -- the endpoint: trees come padded, see `shoal.libs.trees.syntax_tree`

    def signature(self) -> Signature:
        inputs = [TensorSignature(name=name, datatype="INT64", shape=[-1, -1]) for name in ("tokens", "parents")]
        return Signature(
            inputs=inputs, outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, -1, len(KINDS)])]
        )

    def preprocess(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return check_trees(arrays)


class Forest(NamedTuple):
    """Trees, one after the other. Legend: T trees, N nodes."""

    sizes: np.ndarray  # int64 [T] nodes of each
    tokens: np.ndarray  # uint8 [N]
    parents: np.ndarray  # int32 [N] within the tree; -1: the root

    @property
    def first_node(self) -> np.ndarray:
        first: np.ndarray = np.cumsum(self.sizes) - self.sizes
        return first

    def count_children(self) -> np.ndarray:
        """[N]"""
        above = self.find_parents()
        return np.bincount(above[above >= 0], minlength=len(above))

    def find_parents(self) -> np.ndarray:
        """[N] among all nodes; -1: a root."""
        return np.where(self.parents < 0, -1, self.parents + np.repeat(self.first_node, self.sizes))

    def compute_depths(self) -> np.ndarray:
        """[T] edges from the root to the lowest leaf."""
        above = self.find_parents()
        depths, up = np.zeros(len(above), np.int64), above
        while (is_below := up >= 0).any():
            depths += is_below
            up = np.where(is_below, above[up], -1)
        return np.maximum.reduceat(depths, self.first_node) if len(depths) else depths

    def find_commonest_kind(self) -> int:
        """Of the inner nodes."""
        kinds = KIND_OF_TOKEN[self.tokens[self.count_children() > 0]]
        return int(np.bincount(kinds, minlength=len(KINDS)).argmax())

    def describe(self) -> str:
        """The number of trees, their nodes, depths and arities."""
        if not len(self.sizes):
            return "no trees"
        children = self.count_children()
        inner = children[children > 0]
        return (
            f"{len(self.sizes):,} trees of {len(self.tokens):,} nodes, {(children == 0).mean():.0%} of them leaves; "
            f"nodes of a tree: {_describe(self.sizes)}; depth: {_describe(self.compute_depths())}; "
            f"children of an inner node: {_describe(inner)}"
        )


def _describe(values: np.ndarray) -> str:
    return f"mean {values.mean():.1f}, median {np.median(values):.0f}, at most {values.max():,}"


class TreesWithHiddenNodes:
    """A sample is a tree: parents, tokens, kinds, and for each node whether it is hidden and of the commonest kind.

    changes: whether each epoch hides other nodes; otherwise always the same ones
    sample_sizes: [T] nodes of each tree, by which ranks share a batch
    """

    def __init__(self, forest: Forest, hidden_share: float, commonest: int, *, changes: bool) -> None:
        self.forest, self.threshold, self.commonest = forest, round(256 * hidden_share), commonest
        self.deterministic = not changes
        self.sample_sizes = forest.sizes
        self.first_node = forest.first_node
        self.is_inner = forest.count_children() > 0
        self.noise = np.random.default_rng(0).integers(0, 256, len(forest.tokens), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.sample_sizes)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        place = range(len(self))[index]
        nodes = slice(self.first_node[place], self.first_node[place] + self.sample_sizes[place])
        shift = 0 if self.deterministic else np.random.randint(256)
        drawn = np.where(self.is_inner[nodes], (self.noise[nodes].astype(np.int64) + shift) % 256, 256)
        is_hidden = drawn < self.threshold
        is_hidden[drawn.argmin()] = True
        tokens = self.forest.tokens[nodes]
        kinds = KIND_OF_TOKEN[tokens].astype(np.uint8)
        seen = np.where(is_hidden, np.uint8(MASKED), tokens)
        return self.forest.parents[nodes], seen, kinds, is_hidden, kinds == self.commonest


def plan_batch(samples: Sequence[tuple[np.ndarray, ...]]) -> TreeBatch:
    """Trees of `TreesWithHiddenNodes` as a batch with its plan: in a worker process of the loader."""
    parents, tokens, *labels = (list(each) for each in zip(*samples, strict=True))
    names = "kind", "is_hidden", "is_commonest"
    return TreeBatch.from_parents(parents, inputs={"token": tokens}, labels=dict(zip(names, labels, strict=True)))


# -- Python files as trees


@cache
def read_folder(folder: str, files: int, min_nodes: int, max_nodes: int) -> tuple[Forest, Forest]:
    """Trees for training and validation, of different files; read once in each process."""
    paths = find_files(Path(folder))
    chosen = [paths[at] for at in np.linspace(0, len(paths) - 1, min(files or len(paths), len(paths))).astype(int)]
    is_held_back = [place % VALIDATION_EVERY == VALIDATION_EVERY - 1 for place in range(len(chosen))]
    forests = []
    for name, wanted in (("training", False), ("validation", True)):
        part = [path for path, held_back in zip(chosen, is_held_back, strict=True) if held_back == wanted]
        forests.append(read_files(part, min_nodes, max_nodes))
        print(f"{name}: {len(part)} files, {forests[-1].describe()}", flush=True)
    return forests[0], forests[1]


def find_files(folder: Path) -> list[Path]:
    """Python files of `folder` and its folders, without tests and installed packages."""
    return sorted(
        path for path in folder.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(folder).parts[:-1])
    )


def read_files(paths: Sequence[Path], min_nodes: int, max_nodes: int) -> Forest:
    """The trees of the files' functions and statements. Files that this Python cannot parse are left out."""
    tokens, parents, sizes = bytearray(), list[np.ndarray](), list[int]()
    for path in paths:
        for node in parse_file(path):
            numbered = number_nodes(node, max_nodes)
            if numbered is not None and len(numbered[0]) >= min_nodes:
                tokens += bytes(numbered[0])
                parents.append(np.array(numbered[1], np.int32))
                sizes.append(len(numbered[0]))
    joined = np.concatenate(parents) if parents else np.zeros(0, np.int32)
    return Forest(np.array(sizes, np.int64), np.frombuffer(bytes(tokens), np.uint8), joined)


def parse_file(path: Path) -> Iterator[ast.AST]:
    """Functions and other statements, of the module and of its classes."""
    try:
        with warnings.catch_warnings(action="ignore"):
            waiting = list(ast.parse(path.read_bytes()).body)
    except (SyntaxError, ValueError):
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.ClassDef):
            waiting = [*node.body, *waiting]
        else:
            yield node


def spec() -> TrainSpec:
    """The recipe: six epochs of one cycle. A worker plans batches ahead, so that steps do not wait for plans."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "trees",
            "batch_size": 128,
            "threads": 1,  # its levels are too small to share
            "loader": {"workers": 1},
            "optimizer": {"name": "adam", "learning_rate": 5e-3},
            "schedule": {"name": "one_cycle"},
            "clip_norm": 1.0,
            "stop": {"epochs": 6},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
