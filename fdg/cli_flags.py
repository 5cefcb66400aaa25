"""What the flags of a command mean: which trainer, with which config, launched how.

config flags    what a run is: fields of the algorithm's config (`fdg.flags` reads them)
launch flags    how it is run: policy, engine, workers, …; they may change when a run goes on
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from fdg import registry, tuned
from fdg.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from fdg.api import Trainer
    from fdg.config import Config


def find_target(algorithm: str | None) -> registry.Target:
    known = ", ".join(target.name for target in registry.algorithms())
    if algorithm is None:
        raise UsageError(f"which algorithm? one of {known}, or FILE.py:CLASS")
    if algorithm.startswith("-"):
        raise UsageError(f"{algorithm} comes before the algorithm; write fdg train ALGO {algorithm} … (known: {known})")
    return registry.find_algorithm(algorithm)


def configure(ctx: typer.Context, target: registry.Target, settings: list[str] | None) -> tuple[type[Trainer], Config]:
    """The trainer and the config that the command line means."""
    from fdg.runtime.backends import resolve_env

    # What can be refused before torch is imported, is.
    if ctx.params["env"] is not None:
        resolve_env(ctx.params["env"])
    algorithm = "" if ctx.params["no_tuned"] else tuned.bundled(target.module)
    if (light := target.light_config()) is not None:
        read_flags(ctx, light, settings, algorithm=algorithm)
    trainer = target.load()
    return trainer, read_flags(ctx, trainer.config_class(), settings, algorithm=algorithm)


def read_flags(
    ctx: typer.Context, cls: type[Config], settings: list[str] | None, base: Any = None, algorithm: str = ""
) -> Config:
    from fdg.flags import SHARED, read_config

    given = {name: ctx.params[name] for name in SHARED}
    known = [flag for parameter in ctx.command.params for flag in parameter.opts if flag.startswith("--")]
    return read_config(cls, given, ctx.args, settings or [], known, base, algorithm)


LAUNCH_FLAGS = (
    "dist_policy",
    "engine",
    "workers",
    "sample_parallelism",
    "sample_work",
    "replay_storage",
    "checkpoint_every",
    "deadline",
    "fuse",
    "compile_update",
    "eval_every",
    "eval_episodes",
    "callback",
)
"""How a run is launched, and not what it is: they may change when it goes on."""


def launch_flags(ctx: typer.Context, resume: Path | None) -> dict[str, Any]:
    """The flags of a launch. A run that goes on has those it had before, where no others are given."""
    flags = {name: ctx.params[name] for name in LAUNCH_FLAGS}
    given = {name for name in flags if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if ctx.params["local"]:
        flags["dist_policy"] = "local"
        given.add("dist_policy")
    before = previous_flags(resume)
    if flags["callback"] == []:
        flags["callback"] = None
    if given & {"dist_policy", "engine"}:  # what was right for other processes
        before = {name: value for name, value in before.items() if name not in ("workers", "sample_parallelism")}
    flags |= {name: value for name, value in before.items() if name in flags and name not in given}
    if flags["engine"] is None:
        apart = any(str(flags[name] or "1") != "1" for name in ("workers", "sample_parallelism"))
        flags["engine"] = "process" if apart else "inprocess"
    return flags


def choose_replay(ctx: typer.Context, resume: Path | None) -> None:
    """`--replay simple|sharded` as the policy and the number of shards that it means."""
    replay, shards = ctx.params["replay"], ctx.params["replay_shards"]
    if replay is None:
        return
    if replay not in ("simple", "sharded"):
        raise UsageError(f"--replay is {replay!r}; {did_you_mean(replay, ('simple', 'sharded'))}")
    if resume is not None:
        raise UsageError("--replay is of a run that begins; to go on under another policy write --dist-policy NAME")
    if replay == "simple":
        if shards not in (None, "1"):
            raise UsageError(f"--replay simple has one shard, and --replay-shards is {shards}; write --replay sharded")
        return
    ctx.params["replay_shards"] = shards or "4"
    if ctx.params["dist_policy"] is None and not ctx.params["local"]:
        ctx.params["dist_policy"] = "sharded_replay"
    policy = registry.find_policy("local" if ctx.params["local"] else ctx.params["dist_policy"])
    if policy.per(policy.fragment_of("buffer")) != "shard":
        raise UsageError(
            f"--replay sharded: the policy {policy.name!r} has the replay buffer in one place; write --dist-policy "
            "sharded_replay, or leave --replay out"
        )


def check_replay(replay: str | None, trainer: type[Trainer]) -> None:
    """Refuse `--replay` for a trainer without a replay buffer."""
    from fdg.api import Trainer

    if replay is not None and trainer.replay_buffer is Trainer.replay_buffer:
        raise UsageError(f"--replay is {replay!r}, and {trainer.__name__} has no replay buffer; leave --replay out")


def previous_flags(resume: Path | None) -> dict[str, Any]:
    """The flags with which a run was launched before; empty where nothing is known of them."""
    home = run_folder_of(resume)
    try:
        return dict(json.loads((home / "launch.json").read_text())) if home is not None else {}
    except (OSError, ValueError):
        return {}


def read_launch_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a launch as `launch` takes them, but for the policy."""
    least = {"workers": 1, "sample_parallelism": 1, "sample_work": 0, "checkpoint_every": 0, "eval_every": 0}
    values: dict[str, Any] = {"engine": registry.find_engine(flags["engine"])}
    for name, at_least in least.items():
        if name in flags:
            text = flags[name]
            values[name] = None if text is None else count(f"--{name.replace('_', '-')}", text, at_least)
    values["replay_storage"] = registry.find_storage(flags["replay_storage"])
    if "eval_episodes" in flags:
        text = flags["eval_episodes"]
        values["eval_episodes"] = 100 if text is None else count("--eval-episodes", text, 0)
        values["eval_every_episodes"] = 10 if text is None else max(1, values["eval_episodes"])
    values |= {name: bool(flags[name]) for name in ("fuse", "compile_update") if name in flags}
    values["deadline"] = seconds("--deadline", flags["deadline"])
    return values


def run_folder_of(resume: Path | None) -> Path | None:
    """The folder of the run that `--resume` names; None for a checkpoint that lies elsewhere."""
    if resume is None:
        return None
    if resume.is_dir():
        return resume
    folder = resume.absolute().parent
    return folder.parent if folder.name == "checkpoints" else None


def go_on(
    ctx: typer.Context, target: registry.Target, settings: list[str] | None, resume: Path
) -> tuple[type[Trainer], Config, dict[str, Any]]:
    """The trainer, the config and the state of a run that goes on: what is given now counts, and else what was then."""
    from fdg.runtime.checkpoint import latest

    latest(resume)  # refused before the rest is imported
    trainer = target.load()

    from fdg.runtime import recovery

    state = recovery.read(resume, trainer)
    config = read_flags(ctx, trainer.config_class(), settings, state["config"])
    recovery.check_config(state, config)
    return trainer, config, state


def show_help(ctx: typer.Context, algorithm: str | None, asked: bool) -> None:
    """The command's help; with an algorithm, its own flags too, and its defaults for those that all have."""
    if not asked:
        find_target(None)
    if algorithm is None:
        return typer.echo(ctx.get_help())
    from fdg.flags import SHARED, flag, flag_table

    target = find_target(algorithm)
    cls = target.light_config() or target.load().config_class()
    rows = {row[0]: row for row in flag_table(cls)}
    shared = {flag(name): rows.pop(flag(name)) for name in SHARED}
    for parameter in ctx.command.params:  # of this invocation: Typer builds the command anew each time
        if (row := shared.get(parameter.opts[0])) is not None:
            parameter.default = row[2]
            parameter.help = row[3]  # type: ignore[attr-defined]
    typer.echo(ctx.get_help())
    table = Table("flag", "type", "default", "", title=f"Flags of {algorithm} ({cls.__name__})", title_justify="left")
    for row in rows.values():
        table.add_row(*row)
    Console().print(table)


def count(flag: str, text: str, least: int) -> int:
    """The whole number that a flag gives."""
    from fdg.config import read_value

    try:
        value = read_value(text, int)
    except ValueError:
        raise UsageError(f"{flag} is {text!r}; expected int") from None
    if value < least:
        raise UsageError(f"{flag} is {value}; it must be at least {least}")
    return value


def seconds(flag: str, text: str) -> float:
    """The time that a flag gives."""
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{flag} is {text!r}; expected a number of seconds") from None
    if not 0 < value < float("inf"):
        raise UsageError(f"{flag} is {text}; it must be more than 0 seconds")
    return value
