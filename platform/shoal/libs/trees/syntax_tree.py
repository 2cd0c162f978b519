"""A child-sum Tree-LSTM over syntax trees (Tai et al., arXiv:1503.00075, equations 2 to 8), and Python code as trees.

Called by jobs/trees.py; `check_trees` is the preprocessing of an endpoint.
`shoal.libs.trees` computes the trees.
Legend: B trees, N nodes of all trees, T nodes of the largest tree, C classes.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from shoal.errors import TreeError
from shoal.libs.trees import ChildSumLSTMCell, TreeBatch, TreeRNN

NO_NODE = -1  # pads tokens and parents to the largest tree; as a parent: the root has none


class TreeLSTM(nn.Module):
    """Trees to logits of each root, or of each node. Tokens that it does not know share a row.

    per_node: whether each node is classified, and not only the root
    """

    def __init__(
        self, num_tokens: int = 256, num_classes: int = 2, width: int = 64, hidden: int = 64, per_node: bool = False
    ) -> None:
        super().__init__()
        self.num_tokens, self.per_node = num_tokens, per_node
        self.token = nn.Embedding(num_tokens + 1, width)
        self.rnn = TreeRNN(ChildSumLSTMCell(width, hidden))
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, trees: TreeBatch | Tensor, parents: Tensor | None = None) -> Tensor:
        """Logits of roots [B, C], or of nodes: [N, C] in output order of a TreeBatch, [B, T, C] of padded trees.

        trees:   a TreeBatch with the input `token`; or the tokens int64 [B, T] of padded trees, see `read_padded`
        parents: int64 [B, T], of padded trees

        Where a padded tree has no node, its logits are 0. Raises TreeError for padded trees that are none.
        """
        if isinstance(trees, TreeBatch):
            return self._compute(trees)
        assert parents is not None
        batch = read_padded(trees.numpy(force=True), parents.numpy(force=True))
        logits = self._compute(batch.map_tensors(lambda tensor: tensor.to(trees.device)))
        if not self.per_node:
            return logits
        padded = logits.new_zeros(*trees.shape, logits.shape[1])
        padded[trees >= 0] = batch.in_node_order(logits)
        return padded

    def _compute(self, trees: TreeBatch) -> Tensor:
        known = self.token(trees.inputs["token"].long().clamp(max=self.num_tokens))
        states = self.rnn(known, trees)
        logits: Tensor = self.head(states if self.per_node else trees.roots(states))
        return logits


# -- trees of requests


def read_padded(tokens: np.ndarray, parents: np.ndarray) -> TreeBatch:
    """Trees from rectangular arrays, with the input `token`.

    tokens:  int64 [B, T], what each node is; NO_NODE where a tree has no more nodes
    parents: int64 [B, T], the place of each node's parent in its row; NO_NODE for the root

    Raises TreeError, naming tree and node, for rows that are no tree.
    """
    exists = tokens >= 0
    trees = TreeBatch.from_padded(parents, exists, inputs={"token": tokens})
    bad = np.argwhere(~exists & (parents != NO_NODE))
    if len(bad):
        tree, node = bad[0].tolist()
        raise TreeError(tree, node, "has a parent and no token", f"padding is {NO_NODE} in both")
    return trees


def check_trees(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """`tokens` and `parents`, unchanged. Raises TreeError as `read_padded`, before the network runs.

    The plan that this makes is cached, so that the network finds it made.
    """
    read_padded(arrays["tokens"], arrays["parents"])
    return arrays


# -- Python code as trees

_STATEMENTS = (
    *("FunctionDef", "AsyncFunctionDef", "ClassDef", "Return", "Delete", "Assign", "AugAssign", "AnnAssign", "For"),
    *("AsyncFor", "While", "If", "With", "AsyncWith", "Match", "Raise", "Try", "TryStar", "Assert", "Import"),
    *("ImportFrom", "Global", "Nonlocal", "Expr", "Pass", "Break", "Continue", "TypeAlias"),
)
_EXPRESSIONS = (
    *("BoolOp", "NamedExpr", "BinOp", "UnaryOp", "Lambda", "IfExp", "Dict", "Set", "ListComp", "SetComp", "DictComp"),
    *("GeneratorExp", "Await", "Yield", "YieldFrom", "Compare", "Call", "FormattedValue", "JoinedStr", "Constant"),
    *("Attribute", "Subscript", "Starred", "Name", "List", "Tuple", "Slice"),
)
_PARTS = (
    *("comprehension", "ExceptHandler", "arguments", "arg", "keyword", "alias", "withitem", "match_case"),
    *("MatchValue", "MatchSingleton", "MatchSequence", "MatchMapping", "MatchClass", "MatchStar", "MatchAs", "MatchOr"),
)
KINDS = (*_STATEMENTS, *_EXPRESSIONS, *_PARTS, "Module", "other")  # of nodes; "other": of a newer Python

_ARITHMETIC = (
    "Add",
    "Sub",
    "Mult",
    "MatMult",
    "Div",
    "FloorDiv",
    "Mod",
    "Pow",
    "LShift",
    "RShift",
    "BitOr",
    "BitXor",
    "BitAnd",
)
_DETAILS: dict[str, tuple[str, ...]] = {
    "BoolOp": ("And", "Or"),
    "BinOp": _ARITHMETIC,
    "AugAssign": _ARITHMETIC,
    "UnaryOp": ("Invert", "Not", "UAdd", "USub"),
    "Compare": ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "Is", "IsNot", "In", "NotIn"),  # the first comparison
    "Constant": ("str", "bytes", "int", "float", "complex", "bool", "NoneType", "ellipsis"),
    **dict.fromkeys(("Attribute", "Subscript", "Starred", "Name", "List", "Tuple"), ("Store", "Del")),
}
MASKED = 0  # the token of a node whose kind is held out
TOKENS = ("?", *KINDS, *(f"{kind} {detail}" for kind, details in _DETAILS.items() for detail in details))
_TOKEN = {word: token for token, word in enumerate(TOKENS)}
_IN_TOKENS = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)  # part of their parent's token


def number_nodes(tree: ast.AST, max_nodes: int | None = None) -> tuple[list[int], list[int]] | None:
    """Token and parent of each node, in preorder, so that the root is node 0. None above `max_nodes`.

    Names and values are not part of a token: only the kind of node, and of its operator, constant or context.
    """
    tokens: list[int] = []
    parents: list[int] = []
    waiting = [(tree, NO_NODE)]
    while waiting:
        if len(tokens) == max_nodes:
            return None
        node, parent = waiting.pop()
        number = len(tokens)
        kind = type(node).__name__
        detail: object = None
        if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign | ast.UnaryOp):
            detail = node.op
        elif isinstance(node, ast.Compare):
            detail = node.ops[0]
        elif isinstance(node, ast.Constant):
            detail = node.value
        elif isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Name | ast.List | ast.Tuple):
            detail = node.ctx
        token = f"{kind} {type(detail).__name__}"
        tokens.append(_TOKEN[token] if token in _TOKEN else _TOKEN.get(kind, _TOKEN["other"]))
        parents.append(parent)
        children: list[ast.AST] = []
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                children.append(value)
            elif isinstance(value, list):
                children += [each for each in value if isinstance(each, ast.AST)]
        waiting += [(child, number) for child in reversed(children) if not isinstance(child, _IN_TOKENS)]
    return tokens, parents


# [tokens]: places in KINDS
KIND_OF_TOKEN = np.array([KINDS.index("other"), *(KINDS.index(token.partition(" ")[0]) for token in TOKENS[1:])])
