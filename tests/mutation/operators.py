"""The mutations: cosmic-ray operators for what can go wrong with a guard, a boundary, an order or an argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import parso
from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Name

# Nothing below these is mutated: texts of errors, types, what only a type checker or a reader sees.
_LEFT_ALONE = frozenset({"raise_stmt", "assert_stmt", "decorator", "fstring", "import_name", "import_from", "tfpdef"})
_DESCRIBING = frozenset({"__repr__", "__str__"})
_LOGGERS = frozenset({"_log", "logger", "warnings"})
_MIRRORED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SHIFTED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_NEGATED = {"==": "!=", "!=": "==", "in": "not in", "not in": "in", "is": "is not", "is not": "is"}
_EMPTY = {"list": "[]", "tuple": "()", "Sequence": "()", "set": "set()", "frozenset": "frozenset()", "dict": "{}"}


class _Replacement(Operator):  # type: ignore[misc]  # cosmic_ray has no types
    """Replaces a part of the source by other text; a subclass says which part by which text."""

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        """Yield the nodes at or below `node` to replace, each with its new text."""
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for target, _ in self._of(node):
            yield target.start_pos, target.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        target, text = list(self._of(node))[index]
        leaf = Name(text, target.start_pos, prefix=target.get_first_leaf().prefix)
        if target is node:
            return leaf
        siblings = target.parent.children
        siblings[next(i for i, sibling in enumerate(siblings) if sibling is target)] = leaf
        return node

    def _of(self, node: Any) -> Iterator[tuple[Any, str]]:
        found = list(self.replacements(node))
        if found and not _left_alone(node):
            yield from found

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [Example(before, after, occurrence=number) for number, (before, after) in enumerate(cls.EXAMPLES)]

    EXAMPLES: tuple[tuple[str, str], ...] = ()


class Condition(_Replacement):
    """A branch, a loop or a filter that is always or never taken; its condition is evaluated all the same."""

    EXAMPLES = (("if a or b: f()", "if (a or b) and False: f()"), ("if a or b: f()", "if (a or b) or True: f()"))

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        for condition in _conditions(node):
            text = condition.get_code(include_prefix=False)
            if text == "TYPE_CHECKING":
                continue
            yield condition, f"({text}) and False"
            if node.type != "while_stmt":  # it would not end
                yield condition, f"({text}) or True"


class Operand(_Replacement):
    """An operand of `and`, `or`, `|`, `&`, `+` or `-` is left out."""

    EXAMPLES = (("x = a and b", "x = b"), ("x = a and b", "x = a"))

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type not in ("or_test", "and_test", "expr", "and_expr", "arith_expr") or _in_annotation(node):
            return
        operands, signs = node.children[::2], node.children[1::2]
        if any(operand.type in ("string", "strings", "fstring") for operand in operands):
            return
        for left_out in range(len(operands)):
            if left_out == 0 and signs[0].value == "-":
                continue
            kept = [
                ("" if number == 0 else signs[number - 1].value + " ") + operand.get_code(include_prefix=False)
                for number, operand in enumerate(operands)
                if number != left_out
            ]
            if left_out == 0:
                kept[0] = kept[0].removeprefix(signs[0].value).strip()
            yield node, " ".join(kept)


class Comparison(_Replacement):
    """A boundary that is shifted by one, or a comparison that is not the whole condition and is turned around."""

    EXAMPLES = (("x = a < b", "x = a <= b"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type != "comparison":
            return
        alone = node.parent.type in ("and_test", "or_test", "not_test") or _is_condition(node)
        for sign in node.children[1::2]:
            text = " ".join(sign.get_code(include_prefix=False).split())
            if text in _SHIFTED:
                yield sign, _SHIFTED[text]
            elif not alone:  # else leaving out or forcing it shows more
                yield sign, _NEGATED[text]


class Negation(_Replacement):
    """A `not` that is left out, where that is not a condition turned around."""

    EXAMPLES = (("x = not a", "x = a"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type == "not_test" and node.parent.type not in ("and_test", "or_test") and not _is_condition(node):
            yield node, node.children[1].get_code(include_prefix=False)


class Constant(_Replacement):
    """A small number that is one more or one less, `True` for `False`; larger numbers are tuning."""

    EXAMPLES = (("x = 1", "x = 2"), ("x = 1", "x = 0"))

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type == "number" and node.value in ("0", "1", "2") and not _in_annotation(node):
            number = int(node.value)
            yield node, str(number + 1)
            if number > 0:
                yield node, str(number - 1)
        elif node.type == "keyword" and node.value in ("True", "False"):
            yield node, "False" if node.value == "True" else "True"


class Mirror(_Replacement):
    """`min` for `max`, `any` for `all`, and the other way round."""

    EXAMPLES = (("x = min(a)", "x = max(a)"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type == "name" and node.value in _MIRRORED and node.parent.type in ("atom_expr", "argument"):
            if node.parent.type == "atom_expr" and node.parent.children[0] is not node:
                return
            yield node, _MIRRORED[node.value]


class Removal(_Replacement):
    """A call, an assignment to an attribute or an entry, `del`, `break` or `continue` is left out."""

    EXAMPLES = (("def f():\n    a.b()\n    c()\n", "def f():\n    pass\n    c()\n"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type != "simple_stmt" or not _in_function(node):
            return
        statement = node.children[0]
        if _is_effect(statement) and not _is_all_of_a_guard(node):
            yield statement, "pass"


class Order(_Replacement):
    """Two effects that follow each other change places."""

    EXAMPLES = (("def f():\n    a()\n    b()\n", "def f():\n    b()\n    a()\n"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type != "suite" or ((function := _function(node)) is not None and function.name.value == "__init__"):
            return
        statements = node.children[1:]
        for first, second in pairwise(statements):
            if not (first.type == second.type == "simple_stmt" and _has_call(first) and _has_call(second)):
                continue
            one, other = first.children[0], second.children[0]
            if not (_changes_more(one) and _changes_more(other)) or _defined(one) & _names(other) or _logs(one, other):
                continue
            indent = " " * one.start_pos[1]
            both = f"{other.get_code(include_prefix=False)}\n{indent}{one.get_code(include_prefix=False)}\n"
            yield _Both(first, second), both

    def mutate(self, node: Any, index: int) -> Any:
        both, text = list(self._of(node))[index]
        leaf = Name(text, both.start_pos, prefix=both.first.get_first_leaf().prefix)
        at = next(i for i, child in enumerate(node.children) if child is both.first)
        node.children[at : at + 2] = [leaf]
        return node


class _Both:
    """Two statements that follow each other."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.start_pos, self.end_pos = first.start_pos, second.end_pos


class Result(_Replacement):
    """A truth value turned around, nothing for something that may be nothing, an empty collection."""

    EXAMPLES = (("def f() -> bool:\n    return a\n", "def f() -> bool:\n    return not (a)\n"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type != "return_stmt" or (function := _function(node)) is None or function.annotation is None:
            return
        result, annotation = node.children[1], function.annotation.get_code(include_prefix=False)
        text = result.get_code(include_prefix=False)
        outer = annotation.partition("[")[0]
        if annotation == "bool" and result.type != "keyword":
            yield result, f"not ({text})"
        elif annotation.endswith("| None") and text != "None":
            yield result, "None"
        elif outer in _EMPTY and text != _EMPTY[outer]:
            yield result, _EMPTY[outer]


class Argument(_Replacement):
    """A keyword argument is left out of a call."""

    EXAMPLES = (("f(a, b=c)", "f(a)"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type != "trailer" or node.children[0].value != "(" or len(node.children) != 3:
            return
        inner = node.children[1]
        arguments = [c for c in inner.children if c.type != "operator"] if inner.type == "arglist" else [inner]
        for left_out in arguments:
            if left_out.type == "argument" and len(left_out.children) == 3 and left_out.children[1] == "=":
                kept = [a.get_code(include_prefix=False) for a in arguments if a is not left_out]
                yield node, f"({', '.join(kept)})"


class Handler(_Replacement):
    """An `except` that catches nothing."""

    EXAMPLES = (("try: f()\nexcept A: pass", "try: f()\nexcept (): pass"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type == "except_clause":
            yield node.children[1], "()"


class Loop(_Replacement):
    """A loop over nothing."""

    EXAMPLES = (("for a in b: f()", "for a in (): f()"),)

    def replacements(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type == "for_stmt":
            yield node.children[3], "()"


OPERATORS: dict[str, type[_Replacement]] = {
    operator.__name__: operator
    for operator in (
        Condition, Operand, Comparison, Negation, Constant, Mirror, Removal, Order, Result, Argument, Handler, Loop,
    )
}  # fmt: skip


class Provider:
    """What cosmic-ray asks for operators."""

    def __iter__(self) -> Iterator[str]:
        return iter(OPERATORS)

    def __getitem__(self, name: str) -> type[_Replacement]:
        return OPERATORS[name]


def mutants(source: str) -> Iterator[tuple[str, int, tuple[int, int], tuple[int, int]]]:
    """Operator, occurrence, start and end of every mutation of a source, for tests of the operators."""
    tree = parso.parse(source)
    for name, operator in OPERATORS.items():
        number = 0
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            for start, end in operator().mutation_positions(node):
                yield name, number, start, end
                number += 1
            nodes.extend(reversed(getattr(node, "children", ())))


def _parents(node: Any) -> Iterator[Any]:
    while node is not None:
        yield node
        node = node.parent


def _function(node: Any) -> Any:
    return next((parent for parent in _parents(node) if parent.type == "funcdef"), None)


def _in_function(node: Any) -> bool:
    """Whether the nearest function or class around a statement is a function."""
    nearest = next((parent for parent in _parents(node) if parent.type in ("funcdef", "classdef")), None)
    return nearest is not None and nearest.type == "funcdef"


def _left_alone(node: Any) -> bool:
    for parent in _parents(node):
        if parent.type in _LEFT_ALONE:
            return True
        if parent.type == "funcdef" and parent.name.value in _DESCRIBING:
            return True
        if parent.type in ("argument", "expr_stmt") and parent.get_first_leaf().value == "hint":
            return True
        if parent.type == "atom_expr" and parent.get_first_leaf().value.endswith("Error"):
            return True
        if parent.type == "classdef" and node.end_pos <= parent.get_suite().start_pos:
            return True
        if parent.type in ("simple_stmt", "atom_expr") and parent.get_first_leaf().value in _LOGGERS:
            return True
    return False


def _in_annotation(node: Any) -> bool:
    child = node
    for parent in _parents(node.parent):
        if parent.type == "annassign" and parent.children[1] is child:
            return True
        if parent.type == "tfpdef" or (parent.type == "funcdef" and parent.annotation is child):
            return True
        if parent.type == "funcdef":
            return False
        child = parent
    return False


def _conditions(node: Any) -> list[Any]:
    if node.type in ("if_stmt", "while_stmt"):
        children = node.children
        return [
            c for i, c in enumerate(children) if i and getattr(children[i - 1], "value", "") in ("if", "elif", "while")
        ]
    if node.type in ("test", "ternary"):
        return [node.children[2]]
    if node.type == "comp_if":
        return [node.children[1]]
    return []


def _is_condition(node: Any) -> bool:
    return any(condition is node for condition in _conditions(node.parent))


def _is_effect(statement: Any) -> bool:
    if statement.type in ("del_stmt", "break_stmt", "continue_stmt"):
        return True
    if statement.type == "keyword":
        return statement.value == "continue" or (statement.value == "break" and _loop(statement) == "for_stmt")
    if statement.type in ("atom_expr", "power"):
        last = statement.children[-1]
        return bool(last.type == "trailer" and last.children[0].value == "(")
    if statement.type == "expr_stmt":
        target, sign = statement.children[0], statement.children[1]
        return sign.type == "annassign" or target.type == "atom_expr" or getattr(sign, "value", "=") != "="
    return False


def _changes_more(statement: Any) -> bool:
    """Whether a statement may change something else than a name of its function."""
    return _is_effect(statement) and (statement.type != "expr_stmt" or statement.children[0].type == "atom_expr")


def _loop(node: Any) -> str:
    kinds: Iterator[str] = (parent.type for parent in _parents(node))
    return next(kind for kind in kinds if kind in ("for_stmt", "while_stmt"))


def _is_all_of_a_guard(simple: Any) -> bool:
    """Whether leaving out the statement is what never taking its branch does as well."""
    suite = simple.parent
    if suite.type != "suite":
        return bool(suite.type == "if_stmt")
    return (
        len(suite.children) == 2
        and suite.parent.type in ("if_stmt", "for_stmt")
        and "else" not in [getattr(child, "value", "") for child in suite.parent.children]
    )


def _has_call(node: Any) -> bool:
    if node.type == "trailer" and node.children[0].value == "(":
        return True
    return any(_has_call(child) for child in getattr(node, "children", ()))


def _names(node: Any) -> set[str]:
    if node.type == "name":
        return {node.value}
    return set().union(*(_names(child) for child in getattr(node, "children", ())))


def _defined(statement: Any) -> set[str]:
    """The plain names that an assignment sets; an attribute counts by its own name."""
    if statement.type != "expr_stmt":
        return set()
    target = statement.children[0]
    return (
        {target.children[-1].children[-1].value}
        if target.type == "atom_expr" and target.children[-1].children[0].value == "."
        else _names(target)
    )


def _logs(*statements: Any) -> bool:
    return any(statement.get_first_leaf().value in _LOGGERS for statement in statements)
