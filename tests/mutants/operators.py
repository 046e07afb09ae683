"""The operators of generated mutants: each changes one place in a function, in a way that a programmer may err.

A hand-written mutant breaks a rule that has a name. These have no name, and there are thousands: `changes` makes each
of them in turn.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
#: functions whose result is often the same as one of their arguments
CHOOSING = {"min", "max", "sorted", "set", "frozenset", "reversed", "abs"}
#: (node, field): what stands there is taken for true or false
CONDITIONS = {(ast.If, "test"), (ast.While, "test"), (ast.IfExp, "test"), (ast.comprehension, "ifs")}


@dataclass(frozen=True)
class Change:
    """One place of a function, changed."""

    line: int
    was: str
    becomes: str


def changes(function: ast.FunctionDef) -> Iterator[Change]:
    """Make each change in turn. It stands there until the next one is asked for, and is then taken back."""
    for node in _nodes(function):
        for field, value in _fields(node):
            for was, becomes, other in _others(node, field, value):
                setattr(node, field, other)
                yield Change(was.lineno, _text(was), _text(becomes))
            setattr(node, field, value)


def makes(whole: str, broken: str) -> bool:
    """Whether one change turns a file's source into that of a mutant."""
    before, after = functions(ast.parse(whole)), functions(ast.parse(broken))
    changed = [name for name, function in before.items() if ast.dump(function) != ast.dump(after.get(name, ast.Pass()))]
    if len(changed) != 1:
        return False
    function, wanted = before[changed[0]], ast.dump(after[changed[0]])
    return any(ast.dump(function) == wanted for _ in changes(function))


def functions(parent: ast.AST, prefix: str = "") -> dict[str, ast.FunctionDef]:
    """Functions and methods by qualified name; a function inside another one is part of it."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= functions(node, f"{prefix}{node.name}.")
    return found


def _text(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node).partition("\n")[0]


def _nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """What is run when it is called; not annotations, what is logged, or what an error says."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [function]
    while waiting:
        found.append(node := waiting.pop())
        for _, value in _fields(node):
            children = value if isinstance(value, list) else [value]
            waiting += (each for each in children if isinstance(each, ast.AST) and not _is_words(each))
    return found


def _fields(node: ast.AST) -> list[tuple[str, Any]]:
    names = () if isinstance(node, ast.Call) else ("annotation", "returns", "args", "decorator_list")
    return [(name, value) for name, value in ast.iter_fields(node) if name not in names]


def _is_words(node: ast.AST) -> bool:
    """A docstring, a raised error with its text, a call of the log."""
    if isinstance(node, ast.Raise):
        return True
    called = node.value if isinstance(node, ast.Expr) else None
    return isinstance(called, ast.Constant) or (isinstance(called, ast.Call) and _text(called.func).startswith("log."))


def _others(node: ast.AST, field: str, value: object) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST | None, object]]:
    """What a field of a node may become: the part that changes, what it becomes (None: it goes), the field's value."""
    is_condition = (type(node), field) in CONDITIONS
    if isinstance(value, ast.expr):
        for other in _expressions(value, is_condition):
            yield value, other, other
    elif isinstance(value, list):
        for index, each in enumerate(value):
            before, after = value[:index], value[index + 1 :]
            if isinstance(each, ast.expr) and field != "targets":
                for other in _expressions(each, is_condition):
                    yield each, other, [*before, other, *after]
            elif isinstance(each, ast.stmt) and not _is_words(each):
                for others in _statements(each):
                    yield each, others[0] if others else None, [*before, *others, *after] or [ast.Pass()]


def _expressions(node: ast.expr, is_condition: bool) -> Iterator[ast.expr]:
    """What may stand in the place of an expression."""
    if is_condition:
        yield from (ast.Constant(True), ast.Constant(False))
    if others := EXPRESSIONS.get(type(node)):
        yield from others(node)


def _without_an_operand(node: ast.BoolOp) -> Iterator[ast.expr]:
    for rest in _shorter(node.values):
        yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _without_the_sign(node: ast.UnaryOp) -> Iterator[ast.expr]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield node.operand


def _compared_otherwise(node: ast.Compare) -> Iterator[ast.expr]:
    for index, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield ast.Compare(node.left, [*node.ops[:index], other(), *node.ops[index + 1 :]], node.comparators)


def _computed_otherwise(node: ast.BinOp) -> Iterator[ast.expr]:
    if other := ARITHMETIC.get(type(node.op)):
        yield from (ast.BinOp(node.left, other(), node.right), node.left, node.right)


def _one_branch(node: ast.IfExp) -> Iterator[ast.expr]:
    yield from (node.body, node.orelse)


def _another_value(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)


def _unchosen(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Name) and node.func.id in CHOOSING and not node.keywords:
        yield from (each for each in node.args if not isinstance(each, ast.Starred))


def _one_fewer(node: ast.Tuple | ast.List | ast.Set) -> Iterator[ast.expr]:
    if len(node.elts) > 1 and isinstance(getattr(node, "ctx", None), ast.Load | None):
        for rest in _shorter(node.elts):
            yield ast.Set(rest) if isinstance(node, ast.Set) else type(node)(rest, ast.Load())


def _shorter(values: list[ast.expr]) -> Iterator[list[ast.expr]]:
    return (values[:index] + values[index + 1 :] for index in range(len(values)))


EXPRESSIONS: dict[type[ast.expr], Callable[[Any], Iterator[ast.expr]]] = {
    ast.BoolOp: _without_an_operand,
    ast.UnaryOp: _without_the_sign,
    ast.Compare: _compared_otherwise,
    ast.BinOp: _computed_otherwise,
    ast.IfExp: _one_branch,
    ast.Constant: _another_value,
    ast.Call: _unchosen,
    ast.Tuple: _one_fewer,
    ast.List: _one_fewer,
    ast.Set: _one_fewer,
}


def _statements(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """What may stand in the place of a statement."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Pass):
        return
    yield []
    match node:
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield [ast.Return(None)]
        case ast.With(_, body):
            yield body
        case ast.Try(body, handlers, orelse, final):
            yield [*body, *orelse, *final]
            if final:
                yield [ast.Try(body, handlers, orelse, [])] if handlers else body
        case ast.If(test, body, [_, *_]):
            yield [ast.If(test, body, [])]
        case ast.Break():
            yield [ast.Continue()]
        case ast.Continue():
            yield [ast.Break()]
