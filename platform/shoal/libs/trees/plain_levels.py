"""The levels of a batch as plain operations of autograd: for second derivatives and for transforms of torch.func.

Called where a function with a backward of its own does not serve (see `differentiation`), which is faster.
Legend: see `cell`; E edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.libs.trees.cell import CellForward, compute_level
from shoal.libs.trees.plan import Ints, Piece, TreePlan


def compute_plainly(forward: CellForward, plan: TreePlan, x: Tensor, pieces: list[Piece]) -> Tensor:
    """The outputs [N, S] in output order by a cell's `forward`, from x [N, P] in input order."""
    routes = _route_states(plan, pieces)
    received: list[list[list[Tensor]]] = [[] for _ in pieces]
    outputs: list[Tensor] = []
    dtypes: list[torch.dtype] = []
    for route, piece, parcels in zip(routes, pieces, received, strict=True):
        below = [torch.cat(each)[_to_device(route.order, x)] for each in zip(*parcels, strict=True)]
        parcels.clear()
        parent = None
        if piece.arity is None:
            parent = _to_device(plan.edge_parent[piece.edges] - (piece.positions.start - plan.num_leaves), x)
        x_m = x[piece.positions]
        states = compute_level(forward, x_m, below, len(x_m), piece.arity, parent)
        check_states(forward, states, len(x_m))
        dtypes = dtypes or [state.dtype for state in states]  # autocast may give a level another data type
        states = tuple(state.to(dtype) for state, dtype in zip(states, dtypes, strict=True))
        outputs.append(states[0])
        divided = [state[_to_device(route.rows, x)].split(route.counts) for state in states]
        for index, reader in enumerate(route.readers):
            received[reader].append([parts[index] for parts in divided])
    return torch.cat(outputs)[_to_device(plan.position_of_row, x)]


def check_states(forward: CellForward, states: Sequence[Tensor], num_nodes: int) -> None:
    for index, state in enumerate(states):
        if state.ndim == 0 or len(state) != num_nodes:
            name = f"state {index} of {type(forward).__name__}.forward"
            raise ValueError(f"{name} has the shape {[*state.shape]}, and needs a row for each of {num_nodes} nodes")


@dataclass(frozen=True)
class _Route:
    """The way of a piece's states to the pieces that read them, each once: no gradient is that of a whole buffer.

    rows, counts, readers: the states by reader, how many each gets, and which pieces these are
    order: of what this piece has received, piece after piece, the one for each of its edges
    """

    rows: Ints
    counts: list[int]
    readers: list[int]
    order: Ints


def _route_states(plan: TreePlan, pieces: list[Piece]) -> list[_Route]:
    child_row = np.arange(len(plan.edge_parent)) if plan.child_row is None else plan.child_row
    child = plan.position_of_row[child_row]  # [E] the place of each edge's child
    starts = np.array([piece.positions.start for piece in pieces])
    source = np.searchsorted(starts, child, side="right") - 1  # [E] pieces
    reader = np.repeat(np.arange(len(pieces)), [piece.edges.stop - piece.edges.start for piece in pieces])
    sent, got = np.lexsort((reader, source)), np.lexsort((source, reader))
    bounds = np.searchsorted(source[sent], np.arange(len(pieces) + 1))
    routes = []
    for index, piece in enumerate(pieces):
        edges = sent[bounds[index] : bounds[index + 1]]
        readers, counts = np.unique(reader[edges], return_counts=True)
        order = np.argsort(got[piece.edges])
        routes.append(_Route(child[edges] - starts[index], counts.tolist(), readers.tolist(), order))
    return routes


def _to_device(indices: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(indices).to(like.device)
