"""Options that several commands have, as Typer's annotations."""

from __future__ import annotations

from typing import Annotated, Any

import typer

# Typer does not know an algorithm's own flags: it hands them on, and fdg.flags matches them to the config's fields.
# So help, too, is a flag like any other, read once the algorithm is known.
OPEN: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    "add_help_option": False,
}
Name = Annotated[
    str | None,
    typer.Argument(metavar="ALGO|FILE.py:CLASS", help="A bundled algorithm (fdg list), or your own."),
]
PolicyName = Annotated[
    str | None, typer.Option("--dist-policy", metavar="NAME", help="How it is distributed: a policy or FILE.py:CLASS.")
]
Env = Annotated[str | None, typer.Option(metavar="ID", help="Gymnasium id, or an alias such as cartpole.")]
Seed = Annotated[str | None, typer.Option(metavar="S", help="Seed of every random stream.")]
Actors = Annotated[str | None, typer.Option(metavar="A", help="Logical actors; part of the experiment.")]
Envs = Annotated[str | None, typer.Option(metavar="E", help="Environments of each actor.")]
Shards = Annotated[
    str | None, typer.Option(metavar="K", help="Owners of the replay rows; the result does not depend on it.")
]
Iterations = Annotated[str | None, typer.Option(metavar="N", help="Turns of the trainer's outer loop.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any field of the config, or several: --set lr=1e-4 gamma=0.98."),
]
Untuned = Annotated[
    bool, typer.Option("--no-tuned", help="The algorithm's defaults, not what is tuned for the environment.")
]
Help = Annotated[bool, typer.Option("--help", "-h", help="Show this, and with ALGO its own flags too.")]
Workers = Annotated[str | None, typer.Option(metavar="W", help="Processes that share the actors (--engine process).")]
Parallelism = Annotated[
    str, typer.Option("--sample-parallelism", metavar="P", help="Sample requests in flight (--engine process).")
]
Work = Annotated[str, typer.Option("--sample-work", metavar="N", help="Rounds of arithmetic on each sampled row.")]
Storage = Annotated[
    str,
    typer.Option("--replay-storage", metavar="memory|flame", help="Where replay rows are; flame: its object cache."),
]
Deadline = Annotated[
    str, typer.Option("--deadline", metavar="S", help="Seconds without a sign of life before a worker counts as lost.")
]
Fuse = Annotated[
    bool, typer.Option("--fuse", help="The actors of one worker act in one batch: quicker, other random numbers.")
]
CompileUpdate = Annotated[
    bool, typer.Option("--compile-update", help="Compile the learner's update step: quicker, other last bits.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
