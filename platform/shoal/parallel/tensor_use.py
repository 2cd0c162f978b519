"""What stands between the layers of a pair besides their parts. Called by `tensor_trial`."""

from __future__ import annotations

from collections.abc import Iterator

from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from shoal.parallel.tensor_trace import Pair, Trace


def lost_gradient(trace: Trace, pair: Pair) -> str | None:
    """What would get the gradient of one part only: it comes from between the layers, which a rank does in part.

    The graph of a training step is walked from each call of the second layer back to the first ones. Nothing else may
    be at its ends, and nothing in it may hide what it is made of.
    """
    columns = {call.name for call in pair.columns}
    stops = {call.gave for call in trace.trained if call.name in columns}
    rows = [call for call in trace.trained if call.name == pair.row.name]
    trains = any(each.requires_grad for call in (*pair.columns, pair.row) for each in call.module.parameters())
    between = f"between {pair.columns[0].name} and {pair.row.name}"
    if not rows or not columns <= {call.name for call in trace.trained}:
        return f"{pair.columns[0].name} or {pair.row.name} is not called in training"
    if trains and not all(call.has_gradients for call in trace.trained if call.name in pair.names):
        return f"what happens {between} cannot be seen: they are called without gradients, or recomputed reentrantly"
    names = {id(parameter): name for name, parameter in trace.model.named_parameters()}
    for call in rows:
        for node in _back(call.read, stops):
            if getattr(node, "_forward_cls", None) is CheckpointFunction:
                return f"what happens {between} cannot be seen: it is recomputed reentrantly"
            if hasattr(node, "variable"):
                what = names.get(id(node.variable), "a tensor that is no parameter")
                return f"{what} enters {between}, where it would get the gradient of one part only"
    return None


def _back(node: Node | None, stops: set[Node | None]) -> Iterator[Node]:
    """The nodes behind `node`, itself included, as far as `stops`."""
    seen = set(stops)
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]
