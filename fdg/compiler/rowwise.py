"""Refuse a `learn` that cannot be split by rows: it looks at statistics of the batch that it is given.

Under a policy with several learners each has some rows of a batch, and `returns.std()` would be that of these rows. The
source of the learner is read: `learn`, and what it calls of its own class and module. What cannot be seen there shows in
the first updates, where gradients of all rows and of some are compared.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from fdg.errors import LearnerError, is_users

SPREADS = {"std", "var", "std_mean", "var_mean"}


def check_learner(learner: Any, policy: str) -> None:
    """Refuse a learner that several learners cannot stand in for.

    Raises:
        LearnerError: names the line, and what to write there.
    """
    if learner is None:
        return
    for function, this in reachable(type(learner)):
        for node, seen, instead in statistics(function.node, this):
            raise LearnerError(
                f"`{seen}` is a statistic of the rows at hand; under {policy!r} each learner has some rows of a batch",
                file=function.file,
                line=function.first + node.lineno - 1,
                column=node.col_offset + function.indent,
                source=function.lines[node.lineno - 1],
                hint=instead,
            )
    check_modules(learner, policy)


def check_modules(learner: Any, policy: str) -> None:
    """Modules of the learner that compute statistics of their batch."""
    import torch

    name = type(learner).__name__
    own = [learner, *vars(learner).values()] if hasattr(learner, "__dict__") else [learner]
    for module in [inner for item in own if isinstance(item, torch.nn.Module) for inner in item.modules()]:
        kind = type(module).__name__
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise LearnerError(
                f"{name} has a {kind}, which normalises by the rows at hand; under {policy!r} each learner has some rows of "
                "a batch",
                hint="torch.nn.LayerNorm, which looks at one row at a time",
            )
        for setting in ("normalize_advantage", "average_gae"):
            if getattr(module, setting, False) is True:
                raise LearnerError(
                    f"{name} has a {kind} with {setting}=True, which normalises by the rows at hand; under {policy!r} each "
                    "learner has some rows of a batch",
                    hint=f"{setting}=False, and in `learn`: (advantage - self.mean(advantage)) / self.std(advantage)",
                )


class Function:
    """A function of the user's, as source."""

    def __init__(self, function: Any) -> None:
        lines, self.first = inspect.getsourcelines(function)
        text = textwrap.dedent("".join(lines))
        self.file = inspect.getsourcefile(function) or ""
        self.lines = [line.rstrip("\n") for line in lines]
        self.indent = len(lines[0]) - len(lines[0].lstrip())
        self.node = ast.parse(text).body[0]


def reachable(cls: type) -> Iterator[tuple[Function, str]]:
    """`learn`, and the methods and functions of the same module that it calls, each with its name for the learner."""
    waiting: list[tuple[Any, bool]] = [(getattr(cls, "learn", None), True)]
    seen: set[Any] = set()
    while waiting:
        function, method = waiting.pop(0)
        function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
        if not inspect.isfunction(function) or function in seen:
            continue
        seen.add(function)
        try:
            found = Function(function)
        except (OSError, TypeError, SyntaxError, IndexError):
            continue
        if not is_users(found.file) or not isinstance(found.node, ast.FunctionDef):
            continue
        arguments = found.node.args.args
        this = arguments[0].arg if method and arguments else ""
        yield found, this
        module = vars(sys.modules.get(function.__module__, object())) if function.__module__ in sys.modules else {}
        for node in ast.walk(found.node):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                other = module.get(node.func.id)
                if getattr(other, "__module__", None) == function.__module__:
                    waiting.append((other, False))
            elif (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == this and this
            ):
                waiting.append((inspect.getattr_static(cls, node.attr, None), True))
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("super("):
                waiting += [(vars(base)[node.attr], True) for base in cls.__mro__[1:] if node.attr in vars(base)]


def statistics(function: ast.AST, this: str) -> Iterator[tuple[ast.expr, str, str]]:
    """Statistics over rows: the expression, what it is, what to write."""
    me = this or "self"
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SPREADS:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == this:
                continue
            by_module = isinstance(owner, ast.Name) and owner.id in ("torch", "np", "numpy")
            of, others = (node.args[0] if node.args else owner, node.args[1:]) if by_module else (owner, node.args)
            if over_rows(others, node.keywords):
                x = ast.unparse(of)
                square = " ** 2" if node.func.attr.startswith("var") else ""
                also = f" and {me}.mean({x})" if node.func.attr.endswith("_mean") else ""
                yield node, ast.unparse(node), f"{me}.std({x}){square}{also}"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            right = node.right
            if (
                isinstance(right, ast.Call)
                and isinstance(right.func, ast.Attribute)
                and right.func.attr == "mean"
                and over_rows(right.args, right.keywords)
                and ast.dump(right.func.value) == ast.dump(node.left)
            ):
                x = ast.unparse(node.left)
                yield right, ast.unparse(right), f"{me}.mean({x})"


def over_rows(positional: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    """Whether a statistic is over dimension 0, as far as its arguments tell."""
    given = [word.value for word in keywords if word.arg in ("dim", "axis")] or positional[:1]
    if not given:
        return True
    return isinstance(given[0], ast.Constant) and given[0].value in (0, None)
