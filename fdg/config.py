"""The experiment's settings: one dataclass is config file, command-line flags and their help at once.

    @dataclass
    class DQNConfig(Config):
        lr: float = 2.5e-4
        '''Adam's step size.'''

    make_config(DQNConfig, {"lr": "1e-3", "actors": 2})

A literal below a field is its help. What is physical (policy, engine, workers, folders) is not part of a config.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fdg.errors import UsageError, did_you_mean

ConfigType = TypeVar("ConfigType", bound="Config")

MOST_ENVIRONMENTS = 1_000_000

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass
class Config:
    """What every experiment has. Algorithms subclass it and add their own fields."""

    env: str = "CartPole-v1"
    """Gymnasium id of the environment, or an alias such as cartpole."""
    seed: int = 1
    """Seed of every random stream."""
    actors: int = 1
    """Logical actors; part of the experiment, whatever the number of workers."""
    envs: int = 1
    """Environments of each actor, stepped as one vector environment."""
    replay_shards: int = 1
    """Shards of the replay buffer; actor a writes to shard a mod K."""
    iterations: int = 100
    """Turns of the trainer's outer loop."""
    backend: str = "auto"
    """What steps the environments: auto (a table says which), sync, or cartpole-vector; see fdg doctor --env ID."""

    def __post_init__(self) -> None:
        self.validate()

    if not TYPE_CHECKING:  # type checkers know the fields

        def __getattr__(self, name: str) -> Any:
            fields = [field.name for field in dataclasses.fields(self)]
            raise AttributeError(f"{type(self).__name__} has no {name!r}: {did_you_mean(name, fields)}")

    def validate(self) -> None:
        """Refuse values outside their range. Subclasses extend it: `super().validate()`, then `self.at_least(…)`."""
        self.at_least(1, "actors", "envs", "replay_shards", "iterations")
        self.at_least(0, "seed")
        if self.actors * self.envs > MOST_ENVIRONMENTS:
            raise UsageError(
                f"actors × envs is {self.actors} × {self.envs}; more than {MOST_ENVIRONMENTS:,} environments are surely a slip"
            )
        if self.seed >= 2**32:
            raise UsageError(f"seed is {self.seed}; it must be below 2**32 = {2**32}, numpy's limit")

    def at_least(self, least: float, *names: str) -> None:
        """Refuse fields whose value is below `least`."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value < least:
                raise UsageError(f"{name} is {value!r}; it must be at least {least}")

    def between(self, least: float, most: float, *names: str) -> None:
        """Refuse fields whose value is below `least` or above `most`."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not least <= value <= most:
                raise UsageError(f"{name} is {value!r}; it must be from {least} to {most}")

    def frames_per_iteration(self) -> int | None:
        """Environment steps in one iteration, None if it varies. Lets `--total-timesteps` stand for `--iterations`."""
        steps = getattr(self, "steps", None)
        return steps * self.envs * self.actors if isinstance(steps, int) else None


def field_docs(cls: type) -> dict[str, str]:
    """The literal below each field, bases included; a field without one is absent.

    >>> field_docs(Config)["seed"]
    'Seed of every random stream.'
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # typed at a prompt: no source, so no help, but still a config
            continue
        assert isinstance(body, ast.ClassDef)
        docs.update(class_field_docs(body))
    return docs


def class_field_docs(body: ast.ClassDef) -> dict[str, str]:
    """The literal below each annotated field of one parsed class."""
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def make_config(cls: type[ConfigType], overrides: Mapping[str, Any]) -> ConfigType:
    """Build a config; strings are read as the field's type, so what the command line gives needs no conversion.

    >>> make_config(Config, {"seed": "7"}).seed
    7

    Raises:
        UsageError: for a name that is no field, a value of another type or outside its range.
    """
    hints = field_types(cls)
    values = {}
    for name, value in overrides.items():
        if name not in hints:
            raise UsageError(f"{cls.__name__} has no field {name!r}; {did_you_mean(name, hints)}")
        try:
            values[name] = read_value(value, hints[name])
        except (ValueError, SyntaxError, TypeError) as error:
            nan = ", and nan is no number" if str(value).lower() == "nan" else ""
            raise UsageError(f"{name} is {value!r}; expected {type_name(hints[name])}{nan}") from error
    try:
        config = cls(**values)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:  # raised by the user's own __post_init__, or a field without default
        raise UsageError(f"{cls.__name__}: {error}") from error
    config.validate()  # a subclass may have its own __post_init__ that does not call ours
    return config


def field_types(cls: type) -> dict[str, Any]:
    """Each field's type, in the order of the class.

    Raises:
        UsageError: if `cls` is no config dataclass.
    """
    if not (isinstance(cls, type) and issubclass(cls, Config)):
        raise UsageError(f"{getattr(cls, '__name__', cls)!r} is no config class; write: class …(fdg.Config)")
    if "__dataclass_fields__" not in vars(cls) and vars(cls).get("__annotations__"):
        raise UsageError(f"{cls.__name__} adds fields but is no dataclass; write @dataclass above it")
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise UsageError(f"{cls.__name__}: the type of a field cannot be read: {error}") from error
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def read_value(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`. A string is parsed, anything else checked.

    >>> read_value("64,64", list[int]), read_value("1e5", int), read_value("none", float | None)
    ([64, 64], 100000, None)

    Raises:
        ValueError: if it is no such thing.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        for choice in arguments:
            if value == choice or (isinstance(value, str) and value.lower() == str(choice).lower()):
                return choice
        raise ValueError(value)
    if origin in (Union, types.UnionType):
        return _read_union(value, arguments)
    if origin in (list, tuple):
        return _read_sequence(value, origin, arguments)
    reader = READERS.get(hint)
    if reader is not None:
        return reader(value)
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    if isinstance(value, str):  # a bare list, a dict, a type of the user's: a Python literal, if it is one
        literal = ast.literal_eval(value)
        if not isinstance(origin or hint, type) or isinstance(literal, origin or hint):
            return literal
    raise ValueError(value)


def _read_union(value: Any, members: tuple[Any, ...]) -> Any:
    if type(None) in members and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    for member in sorted(members, key=lambda member: member is str):  # any text is a str, so that one comes last
        if member is type(None):
            continue
        try:
            return read_value(value, member)
        except (ValueError, SyntaxError, TypeError):
            continue
    raise ValueError(value)


def _read_sequence(value: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        value = [item.strip() for item in value.strip("[]() ").split(",") if item.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError(value)
    if origin is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise ValueError(value)
        return tuple(read_value(item, hint) for item, hint in zip(value, arguments, strict=True))
    return origin(read_value(item, arguments[0]) for item in value)


def _read_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = float(value)  # 1e6 is how people write a million
    if not math.isfinite(value) or value != int(value):
        raise ValueError(value)
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or math.isnan(float(value)):
        raise ValueError(value)
    return float(value)


def _read_bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


READERS: dict[Any, Callable[[Any], Any]] = {
    int: _read_int,
    float: _read_float,
    bool: _read_bool,
    str: _read_str,
    Path: lambda value: Path(value),
}


def type_name(hint: Any) -> str:
    """How a type reads in help and in errors.

    >>> type_name(float | None), type_name(Literal["relu", "tanh"]), type_name(list[int])
    ('float or none', 'relu|tanh', 'list[int]')
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if member is type(None) else type_name(member) for member in arguments)
    if hint is bool:
        return "true|false"
    return hint.__name__ if isinstance(hint, type) and not arguments else str(hint).replace("typing.", "")
