"""Python code as trees: their nodes, their tokens, and the request that has them."""

from __future__ import annotations

import ast

import numpy as np

from shoal.libs.trees.syntax_tree import KIND_OF_TOKEN, KINDS, MASKED, TOKENS, number_nodes, pad_trees

WORDS = dict(enumerate(TOKENS))


def words_of(code: str) -> tuple[list[str], list[int]]:
    numbered = number_nodes(ast.parse(code).body[0])
    assert numbered is not None
    return [WORDS[token] for token in numbered[0]], numbered[1]


def test_nodes_are_numbered_from_the_root_and_children_are_in_their_order() -> None:
    words, parents = words_of("total += f(x, 1.5)[not y]")
    assert words == [
        *("AugAssign Add", "Name Store", "Subscript", "Call", "Name", "Name", "Constant float", "UnaryOp Not", "Name")
    ]
    assert parents == [-1, 0, 0, 2, 3, 3, 3, 2, 7]


def test_operators_constants_and_contexts_are_part_of_a_token() -> None:
    assert words_of("a is not None and b < 'x' < c")[0] == [
        *("Expr", "BoolOp And", "Compare IsNot", "Name", "Constant NoneType", "Compare Lt", "Name", "Constant str"),
        "Name",
    ]
    assert words_of("del a.b, c[...]")[0] == [
        *("Delete", "Attribute Del", "Name", "Subscript Del", "Name", "Constant ellipsis")
    ]


def test_every_kind_of_node_of_this_python_has_a_token() -> None:
    skipped = ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop, ast.mod, ast.type_ignore, ast.slice
    deprecated = {"Num", "Str", "Bytes", "NameConstant", "Ellipsis", "Index", "ExtSlice"}
    abstract = {"AST", "stmt", "expr", "excepthandler", "pattern", "slice", "type_param"}
    found = {
        name
        for name, value in vars(ast).items()
        if isinstance(value, type) and issubclass(value, ast.AST) and not issubclass(value, skipped)
    }
    assert {"FunctionDef", "Call", "arg"} <= found
    newer = {"TypeVar", "ParamSpec", "TypeVarTuple", "TemplateStr", "Interpolation"}  # of 3.12 and 3.14: "other"
    assert found - deprecated - abstract - newer - set(KINDS) == set()


def test_a_kind_of_a_newer_python_is_another() -> None:
    class Newer(ast.stmt):
        _fields = ("body",)

    node = Newer()
    node.body = [ast.Pass()]
    numbered = number_nodes(node)
    assert numbered is not None
    assert [WORDS[token] for token in numbered[0]] == ["other", "Pass"]


def test_a_tree_above_the_limit_is_left_out() -> None:
    tree = ast.parse("a = b").body[0]
    assert number_nodes(tree, max_nodes=2) is None
    assert number_nodes(tree, max_nodes=3) is not None


def test_the_kind_of_a_token() -> None:
    assert [KINDS[KIND_OF_TOKEN[TOKENS.index(word)]] for word in ("Name", "Name Store", "BinOp Add")] == [
        *("Name", "Name", "BinOp")
    ]
    assert KINDS[KIND_OF_TOKEN[MASKED]] == "other"
    assert len(set(TOKENS)) == len(TOKENS) < 256  # a byte each


def test_trees_are_padded_to_the_largest() -> None:
    found = pad_trees([([4], [-1]), ([1, 2], [-1, 0])])
    assert found["tokens"].tolist() == [[4, -1], [1, 2]]
    assert found["parents"].tolist() == [[-1, -1], [-1, 0]]
    assert pad_trees([])["tokens"].shape == (0, 0)
    assert found["tokens"].dtype == np.int64
