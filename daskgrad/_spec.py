"""Derivatives as text, for the command line: `spot`, `spot,vol`, `norm(x)`, as a caller of `derivatives` writes them, without quotes.

The grammar is Python's own for expressions, of which only this is taken:

    value · ()                      the value
    x · x,y · x,dot(x, v)           orders: steps are names and directions
    norm(x) · norm(x, y) · norm((x, y)) · project(x, 8, seed=1) · aux(name) · problem
    model.0 · "any name"            a part of a module; a name that is no word, or that is a word from above
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable
from typing import Any

from ._derivative import Derivative, aux, dot, norm, parse, problem, project
from ._errors import PlanError

POSSIBLE = "value; x; x,y (by x, then by y); norm(x); norm(x, y) (joint); dot(x, v); project(x, 8); aux(name); problem"
"""What can be written, for messages and help."""

_PLAIN = re.compile(r"[^\W\d][\w.*]*")  # a name, or a part of a module: model.0.weight, which Python would not take

_REDUCTIONS: dict[str, Callable[..., Any]] = {"norm": norm, "project": project, "aux": aux}
_WORDS: dict[str, Derivative] = {"value": (), "problem": problem}


def derivative(text: str, name: Hashable) -> Derivative:
    """The derivative that `text` spells, for `name`.

    Raises:
        PlanError: it spells none.
    """
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    return parse(text if _PLAIN.fullmatch(text) else _part(_tree(text), text), name)


def by(text: str) -> Any:
    """What `--wrt` means by `text`: an argument, or a reduction of the gradient. Every word is an argument's name."""
    if "(" not in text and "," not in text:
        return text
    found = _part(_tree(text), text)
    if isinstance(found, tuple):
        raise PlanError(f"--wrt {text!r} is an order, which needs a name of its own: --derivative 'name={text}'")
    return found


def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise _unknown(text) from None


def _part(node: ast.expr, text: str) -> Any:
    """A name, a tuple or list of parts, or a call of the vocabulary."""
    if isinstance(node, ast.Tuple):
        return tuple(_part(element, text) for element in node.elts)
    if isinstance(node, ast.List):
        return [_part(element, text) for element in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node.func.id, node, text)
    return _name(node, text)


def _name(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value, text)}.{node.attr}"
    raise _unknown(text)


def _call(function: str, node: ast.Call, text: str) -> Any:
    options = {option.arg: _literal(option.value, text) for option in node.keywords if option.arg is not None}
    if not node.args or len(options) < len(node.keywords):
        raise _unknown(text)
    first, *rest = node.args
    try:
        if function == "dot":
            (vector,) = rest
            return dot(_name(first, text), _vector(vector, text), **options)
        if function == "norm" and rest:
            return norm([_part(argument, text) for argument in node.args], **options)
        return _REDUCTIONS[function](_part(first, text), *(_literal(argument, text) for argument in rest), **options)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise _unknown(text) from None


def _vector(node: ast.expr, text: str) -> Any:
    """The direction of `dot`: the label of a column, or numbers."""
    return _name(node, text) if isinstance(node, ast.Name | ast.Attribute) else _literal(node, text)


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _unknown(text) from None


def _unknown(text: str) -> PlanError:
    return PlanError(f"{text!r} is no derivative. Possible: {POSSIBLE}; a name that is no word stands in quotes.")
