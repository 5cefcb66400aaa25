"""`fdg flame up | down | status`: a Flame cluster on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="A Flame cluster on this machine, for --engine flame.")


@app.command()
def up(
    executors: Annotated[int, typer.Option(metavar="N", min=1, help="How many workers may run at once.")] = 16,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of the object cache.")] = "1G",
) -> None:
    """Start a cluster; fdg train --engine flame uses it until fdg flame down."""
    from fdg.runtime.flame_cluster import Loopback, default_folder

    cluster = Loopback(default_folder())
    cluster.up(executors, memory)
    known = cluster.known()
    typer.echo(
        f"a Flame cluster runs: {cluster.environment()['FLAME_ENDPOINT']}, room for {executors} workers; its logs are in "
        f"{cluster.folder}"
    )
    typer.echo(
        f"it asks nobody for a password, and ports {known['port']} and {known['port'] + 1} are open on all interfaces: who reaches "
        "them can run code as you (docs/flame.md says how to fence them)",
        err=True,
    )
    typer.echo("next: fdg train dqn --dist-policy single_learner_coarse --engine flame; at the end: fdg flame down")


@app.command()
def down() -> None:
    """End the cluster that fdg flame up has started, with all that runs in it."""
    from fdg.runtime.flame_cluster import Loopback, default_folder

    cluster = Loopback(default_folder())
    if not cluster.known():
        typer.echo("no Flame cluster of fdg flame up is known")
        return
    ended = cluster.down()
    typer.echo(f"the Flame cluster is down; {len(ended)} processes were ended")


@app.command()
def status() -> None:
    """Say whether the cluster runs, and what runs in it; code 1 if it does not."""
    from fdg.runtime.flame_cluster import SERVERS, Loopback, default_folder

    cluster = Loopback(default_folder())
    known, alive = cluster.known(), cluster.alive()
    if not known:
        typer.echo("no Flame cluster runs here; fdg flame up starts one")
        raise typer.Exit(1)
    for name, program in SERVERS.items():
        typer.echo(
            f"{program:<24}" + (f"process {alive[name]}" if name in alive else f"gone; see {cluster.folder / name}.log")
        )
    if len(alive) < len(SERVERS):
        typer.echo("a server is gone: fdg flame down, then fdg flame up")
        raise typer.Exit(1)
    for line in cluster.describe():
        typer.echo(line)
