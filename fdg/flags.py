"""An algorithm's config fields as command-line flags: `--buffer-size 1000`, `--no-double`, `--num-envs 8`."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from fdg.config import FALSE, TRUE, Config, field_docs, field_types, make_config, read_value, type_name
from fdg.errors import UsageError, did_you_mean
from fdg.runtime.backends import resolve_env
from fdg.tuned import tuned

ALIASES = {
    "num_envs": "envs",
    "learning_rate": "lr",
    "env_id": "env",
    "num_iterations": "iterations",
    "num_actors": "actors",
    "optim_steps": "updates",
    "warmup_frames": "learning_starts",
    "target_update_tau": "tau",
    "start_e": "epsilon_start",
    "end_e": "epsilon_end",
}
"""Names that users of CleanRL, rl-zoo and Flame's examples type → ours. A config's own field of that name wins."""

TIMESTEPS = "total_timesteps"
"""Not a field: frames to see, turned into iterations."""

COLLECTION, COLLECTIONS = "frames_per_collection", "collections"
"""Not fields: frames that one collector brings in an iteration, turned into environments and steps of each actor; and
how many collectors there are, which is actors."""


BASE = tuple(field.name for field in dataclasses.fields(Config))
"""The fields that every algorithm has."""
SHARED = tuple(name for name in BASE if name != "backend")
"""Those that commands have flags for."""


def read_config(
    cls: type[Config],
    given: Mapping[str, Any],
    extra: list[str],
    settings: list[str],
    known: Iterable[str] = (),
    base: Mapping[str, Any] | None = None,
    algorithm: str = "",
) -> Config:
    """The config that a command line means.

    `given` are the flags every algorithm has (None if absent), `extra` the tokens of its own flags,
    `settings` the `key=value` of each `--set`, `known` the command's other flags, to name the nearest one. What is not
    given is as in `base`, the config of a run that goes on; else as tuned for the bundled `algorithm` on the environment;
    else the class's default.
    """
    values = {name: value for name, value in given.items() if value is not None}
    chosen = parse_settings(cls, settings)  # first: its messages are the better ones
    for name, value in [*parse_flags(cls, extra, known).items(), *chosen.items()]:
        if name in values:
            raise UsageError(f"{name} is given twice: {values[name]} and {value}")
        values[name] = value
    defaults = {field.name: field.default for field in dataclasses.fields(cls)} | dict(base or {})
    values["env"] = resolve_env(values.get("env", defaults["env"]))  # the full id is what is recorded
    base = {**(tuned(algorithm, values["env"]) if base is None else base), "env": values["env"]}
    collect(cls, values, base)
    if str(values.get("seed")) == "-1":  # Flame's examples: any seed; it is recorded like one that was given
        values["seed"] = secrets.randbelow(2**32)
    timesteps = values.pop(TIMESTEPS, None)
    if timesteps is not None:
        if "iterations" in values:
            raise UsageError("--total-timesteps and --iterations both say how long to train; give one of them")
        values["iterations"] = iterations_for(make_config(cls, {**base, **values}), timesteps)
    return make_config(cls, {**base, **values})


def collect(cls: type[Config], values: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Turn `--collections C` and `--frames-per-collection F` into actors, environments and steps.

    C actors collect F frames each per iteration. Where the number of environments is not given, it is made to divide F,
    so that there are as many frames as were asked for. With `--actors` given as well, those collect the C × F frames.
    """
    collections, frames = values.pop(COLLECTIONS, None), values.pop(COLLECTION, None)
    collectors = 1 if collections is None else whole_number(COLLECTIONS, collections)
    shared = collections is not None and "actors" in values
    if collections is not None:
        values.setdefault("actors", collectors)
    if frames is None:
        return
    if "steps" in values:
        raise UsageError("--frames-per-collection and --steps both say how much to collect; give one of them")
    config = make_config(cls, {**base, **values})
    wanted = whole_number(COLLECTION, frames)
    if shared:
        wanted = math.ceil(wanted * collectors / config.actors)
    if "envs" not in values:
        values["envs"] = max(envs for envs in range(1, min(config.envs, wanted) + 1) if wanted % envs == 0)
    values["steps"] = math.ceil(wanted / int(values.get("envs", config.envs)))


def changes(config: Config, base: Mapping[str, Any]) -> str:
    """How a config differs from the one of a checkpoint: `iterations = 20 (was 10)`; empty if it does not."""
    fields = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return ", ".join(
        f"{name} = {value} (was {base[name]})" for name, value in fields if name in base and base[name] != value
    )


def parse_flags(cls: type[Config], tokens: list[str], known: Iterable[str] = ()) -> dict[str, str]:
    """Flags of the algorithm's own: `--key value`, `--key=value`, and `--key` or `--no-key` for true and false."""
    types = field_types(cls)
    values: dict[str, str] = {}
    waiting = list(tokens)
    while waiting:
        token = waiting.pop(0)
        if not token.startswith("--"):
            written = f"--set {token}" if "=" in token else "--key value"
            raise UsageError(f"unexpected argument {token!r}; flags are written {written}")
        key, equals, value = token[2:].partition("=")
        name = field_name(key, types)
        if name is None and types.get(field_name(key.removeprefix("no-").removeprefix("no_"), types) or "") is bool:
            name, value, equals = field_name(key[3:], types), "false", "="
        if name is None:
            aliases = [alias for alias in ALIASES if field_name(alias, types) is not None]
            flags = {flag(choice) for choice in (*types, *aliases, TIMESTEPS)} | set(known)
            raise UsageError(f"no flag --{key} for this algorithm; {did_you_mean('--' + key, flags)}")
        if not equals:
            if types.get(name) is bool and not (waiting and waiting[0].lower() in TRUE + FALSE):
                value = "true"
            elif not waiting or waiting[0].startswith("--"):
                raise UsageError(f"--{key} needs a value: {type_name(types.get(name, int))}")
            else:
                value = waiting.pop(0)
        values[name] = value
    return values


def parse_settings(cls: type[Config], settings: list[str]) -> dict[str, str]:
    """Each `key=value` of `--set`."""
    types = field_types(cls)
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting!r} has no value; write --set {key}=VALUE")
        name = field_name(key.strip(), types)
        if name is None:
            raise UsageError(f"{cls.__name__} has no field {key!r}; {did_you_mean(key, types)}")
        if name in values:
            raise UsageError(f"{name} is given twice: {values[name]} and {value.strip()}")
        values[name] = value.strip()
    return values


def flag(name: str) -> str:
    """A field's flag: `--buffer-size` for buffer_size."""
    return f"--{name.replace('_', '-')}"


def field_name(key: str, types: Mapping[str, Any]) -> str | None:
    """The field that a flag means, by its own name or an alias in either direction; None if there is none."""
    name = key.replace("-", "_").lower()
    others = [ours for alias, ours in ALIASES.items() if alias == name]
    others += [alias for alias, ours in ALIASES.items() if ours == name]
    for candidate in (name, *others):
        if candidate in types:
            return candidate
    return name if name == TIMESTEPS or (name in (COLLECTION, COLLECTIONS) and "steps" in types) else None


def iterations_for(config: Config, timesteps: str) -> int:
    """How many iterations it takes to see that many frames."""
    wanted = whole_number(TIMESTEPS, timesteps)
    frames = config.frames_per_iteration()
    if not frames:
        raise UsageError(
            f"--total-timesteps: {type(config).__name__} does not say how many frames an iteration has; "
            "use --iterations, or write its method frames_per_iteration"
        )
    return math.ceil(wanted / frames)


def whole_number(name: str, text: str) -> int:
    """The number, at least 1, that a flag gives which is no field."""
    try:
        value = read_value(text, int)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; expected int") from None
    if value < 1:
        raise UsageError(f"{name} is {value}; it must be at least 1")
    return value


def flag_table(cls: type[Config]) -> list[tuple[str, str, str, str]]:
    """Flag, type, default and help of each field, the algorithm's own first."""
    docs, types = field_docs(cls), field_types(cls)
    rows = []
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in BASE):
        if not field.init:
            continue
        default = "" if field.default is dataclasses.MISSING else str(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = str(field.default_factory())
        rows.append((flag(field.name), type_name(types[field.name]), default, docs.get(field.name, "")))
    return rows
