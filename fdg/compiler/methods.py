"""A method of the trainer, and what the expressions in it stand for.

component call      a call of an operation of `self.msrl`, also through a local name for it (`operation_of`)
call of a method    `self.m()`, `super().m()`, `Base.m(self)` (`method_call`)
variable            `td` or `self.best` (`variable`)
to bear             to make component calls, directly or through methods of the trainer (`Bearing`)
summary             what calling the method does, as its caller sees it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import libcst as cst

from fdg.compiler.bindings import bound_names, parameter_names
from fdg.compiler.ir import Effects, Statement
from fdg.compiler.source import ClassSource, Origin, TrainerSource
from fdg.compiler.tree import find, is_name
from fdg.compiler.values import Aliases, Kind, Value


@dataclass
class Summary:
    """What calling a method or function does, as seen by its caller."""

    effects: Effects = field(default_factory=Effects)
    mutated: set[str] = field(default_factory=set)
    returns: Value = field(default_factory=lambda: Value(None))
    shared: list[set[str]] = field(default_factory=list)
    """Groups of parameters and attributes that may share objects after the call."""
    given: dict[str, Kind] = field(default_factory=dict)
    """Kinds of the arguments that callers pass; `found` collects those of the current round."""
    found: dict[str, Kind] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)
    aliases: Aliases = field(default_factory=Aliases)
    made_global: set[str] = field(default_factory=set)
    """Variables that may hold a global object somewhere, found when values are typed."""

    def fingerprint(self) -> Any:
        effects = self.effects
        return (
            frozenset(effects.reads | effects.writes),
            frozenset(effects.mutates),
            len(set(effects.calls)),
            effects.pinned,
            frozenset(self.mutated),
            str(self.returns.kind),
            frozenset(self.returns.roots),
        )


@dataclass(eq=False)
class Method:
    """One method of the trainer, on its way from source to fragments; or a function of the user's, without a self."""

    owner: ClassSource
    node: cst.FunctionDef
    self_name: str
    parameters: list[str]
    aliases: dict[str, str] = field(default_factory=dict)
    """Local names that stand for `self.msrl` (value "") or for one of its operations."""
    body: list[Statement] = field(default_factory=list)
    summary: Summary = field(default_factory=Summary)

    @property
    def name(self) -> str:
        return self.node.name.value

    @property
    def key(self) -> tuple[str, str]:
        return (self.owner.name, self.name)

    @cached_property
    def bound(self) -> set[str]:
        """Names that the body binds, as it is when first asked."""
        return bound_names(self.body)

    @cached_property
    def lasting_defaults(self) -> set[str]:
        """Parameters whose default may be an object that can be changed, and so keeps what one call did for the next."""
        params = self.node.params
        given = (*params.posonly_params, *params.params, *params.kwonly_params)
        plain = (cst.BaseNumber, cst.BaseString, cst.UnaryOperation, cst.Name, cst.Attribute)
        return {item.name.value for item in given if item.default is not None and not isinstance(item.default, plain)}

    def origin(self, node: cst.CSTNode) -> Origin:
        return self.owner.module.origin(node)


def parse_method(owner: ClassSource, node: cst.FunctionDef) -> Method:
    names = parameter_names(node.params)
    if node.params.posonly_params or node.params.params:
        return Method(owner, node, names[0], names[1:])
    return Method(owner, node, "", names)


def is_msrl(node: cst.CSTNode, method: Method) -> bool:
    """Whether an expression is `self.msrl`, or a local name for it."""
    if isinstance(node, cst.Name):
        return method.aliases.get(node.value) == ""
    return (
        isinstance(node, cst.Attribute)
        and node.attr.value == "msrl"
        and isinstance(node.value, cst.Name)
        and node.value.value == method.self_name
    )


def operation_of(node: cst.CSTNode, method: Method) -> str | None:
    """The component call that `node` is, by name, or None."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        return method.aliases.get(node.func.value) or None
    if not (isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and is_msrl(node.func.value, method)):
        return None
    return node.func.attr.value


def method_call(
    node: cst.CSTNode, method: Method, trainer: TrainerSource
) -> tuple[ClassSource, cst.FunctionDef] | None:
    """The method of the trainer that a call goes to: `self.m()`, `super().m()` or `Base.m(self)`."""
    if not (isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)):
        return None
    base, name = node.func.value, node.func.attr.value
    if isinstance(base, cst.Name) and base.value == method.self_name:
        return trainer.find(name)
    if is_super(base):
        return trainer.find(name, after=method.owner)
    if isinstance(base, cst.Name) and node.args and is_name(node.args[0].value, method.self_name):
        for owner in trainer.bases:
            if owner.name == base.value and owner is not method.owner:
                after = trainer.bases.index(owner) - 1
                return trainer.find(name, after=trainer.bases[after] if after >= 0 else None)
    return None


def is_super(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and is_name(node.func, "super")


def variable(node: cst.CSTNode, method: Method) -> str:
    """The variable that an expression is, or an empty string."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and is_name(node.value, method.self_name):
        return f"self.{node.attr.value}"
    return ""


class _Names(cst.CSTTransformer):
    """Writes aliases of `self.msrl` out in full, and `super()` as `super(Owner, self)`, so that code can move."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        operation = (
            self.method.aliases.get(updated_node.func.value, "") if isinstance(updated_node.func, cst.Name) else ""
        )
        if operation:
            return updated_node.with_changes(func=cst.parse_expression(f"{self.method.self_name}.msrl.{operation}"))
        if is_super(updated_node) and not updated_node.args:
            return cst.parse_expression(f"super({self.method.owner.name}, {self.method.self_name})")
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if isinstance(updated_node.value, cst.Name) and self.method.aliases.get(updated_node.value.value) == "":
            return updated_node.with_changes(value=cst.parse_expression(f"{self.method.self_name}.msrl"))
        return updated_node


def canonical(node: cst.CSTNode, method: Method) -> cst.CSTNode:
    """The node as generated code writes it: aliases of `self.msrl` and `super()` in full."""
    if not method.self_name:
        return node
    renamed = node.visit(_Names(method))
    assert isinstance(renamed, cst.CSTNode)
    return renamed


def find_aliases(method: Method) -> None:
    """Note `msrl = self.msrl` and `act = self.msrl.agent_act`; a name that is also bound otherwise is refused."""
    others: dict[str, cst.Assign] = {}
    for node in find(method.node.body, cst.Assign):
        meaning = _msrl_meaning(node.value, method)
        for target in node.targets:
            if isinstance(target.target, cst.Name):
                name = target.target.value
                if meaning is None or method.aliases.setdefault(name, meaning) != meaning:
                    others[name] = node
    for name, other in others.items():
        if name in method.aliases:
            raise method.origin(other).error(
                f"`{name}` is sometimes `self.msrl` and sometimes something else, so its calls cannot be told apart",
                f"use {method.self_name}.msrl directly, or another name here",
            )


def _msrl_meaning(value: cst.BaseExpression, method: Method) -> str | None:
    """What of `self.msrl` an expression stands for: "" for itself, the name of an operation, None for nothing."""
    if is_msrl(value, method):
        return ""
    if isinstance(value, cst.Attribute) and is_msrl(value.value, method):
        return value.attr.value
    return method.aliases.get(value.value) if isinstance(value, cst.Name) else None


class Bearing:
    """Tells which expressions make component calls, directly or through a method of the trainer."""

    def __init__(self, trainer: TrainerSource) -> None:
        self.trainer = trainer
        self.methods: dict[tuple[str, str], Method] = {}
        self._bearing: dict[tuple[str, str], bool] = {}
        self._cache: dict[int, tuple[cst.CSTNode, bool]] = {}

    def method(self, owner: ClassSource, node: cst.FunctionDef) -> Method:
        key = (owner.name, node.name.value)
        if key not in self.methods:
            method = parse_method(owner, node)
            find_aliases(method)
            self.methods[key] = method
        return self.methods[key]

    def method_bears(self, owner: ClassSource, node: cst.FunctionDef) -> bool:
        key = (owner.name, node.name.value)
        if key not in self._bearing:
            self._bearing[key] = False  # a recursive call adds nothing by itself
            method = self.method(owner, node)
            self._bearing[key] = any(self._bears(call, method) for call in find(node.body, cst.Call))
        return self._bearing[key]

    def _bears(self, call: cst.CSTNode, method: Method) -> bool:
        if operation_of(call, method) is not None:
            return True
        target = method_call(call, method, self.trainer)
        return target is not None and self.method_bears(*target)

    def call(self, node: cst.CSTNode, method: Method) -> bool:
        """Whether this very node is a component call or a call of a method that makes one."""
        return isinstance(node, cst.Call) and self._bears(node, method)

    def within(self, node: cst.CSTNode, method: Method) -> bool:
        """Whether a component call stands anywhere inside."""
        known = self._cache.get(id(node))
        if known is None or known[0] is not node:
            found = any(self._bears(call, method) for call in find(node, cst.Call))
            known = self._cache[id(node)] = (node, found)
        return known[1]


def spread(arguments: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Arguments with `*(a, b)` and `**{"k": v}` written out."""
    out: list[cst.Arg] = []
    for argument in arguments:
        value = argument.value
        if argument.star == "*" and isinstance(value, (cst.Tuple, cst.List)):
            if not any(isinstance(item, cst.StarredElement) for item in value.elements):
                out += [cst.Arg(item.value) for item in value.elements]
                continue
        if argument.star == "**" and isinstance(value, cst.Dict):
            keys = [item.key if isinstance(item, cst.DictElement) else None for item in value.elements]
            names = [key.evaluated_value if isinstance(key, cst.SimpleString) else None for key in keys]
            if all(isinstance(name, str) and name.isidentifier() for name in names):
                for name, item in zip(names, value.elements, strict=True):
                    out.append(cst.Arg(item.value, keyword=cst.Name(str(name)), equal=cst.AssignEqual()))
                continue
        out.append(argument)
    return out


def match_arguments(
    arguments: Sequence[cst.Arg], parameters: list[str]
) -> Iterator[tuple[cst.BaseExpression, list[str], bool]]:
    """Each value that a call passes, the parameters it may go to, and whether that is certain and it goes whole."""
    given: set[str] = set()
    for index, argument in enumerate(spread(arguments)):
        surplus = argument.keyword is None and index >= len(parameters)
        if argument.star == "**":
            names = [name for name in parameters if name not in given]
        elif argument.star or surplus:
            names = parameters[index:] or parameters[-1:]
        else:
            names = [argument.keyword.value if argument.keyword else parameters[index]]
        given.update(names)
        yield argument.value, names, not (argument.star or surplus)
