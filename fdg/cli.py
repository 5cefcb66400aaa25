"""The command line: `fdg train`, `eval`, `plot`, `compare`, `graph`, `check`, `list`, `doctor`, `flame`.

Everything heavy (torch, torchrl, the compiler) is imported inside the command that needs it, so that help, listings
and drawings answer at once.

    cli_options.py      options that several commands have
    cli_flags.py        what flags mean: trainer, config, how to launch
    cli_files.py        files that a command writes
    cli_errors.py       how a command fails
"""

from __future__ import annotations

import json
import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax

from fdg import __version__, flame_cli, registry, tuned
from fdg.cli_errors import Commands
from fdg.cli_files import check_writable, write
from fdg.cli_flags import (
    check_replay,
    choose_replay,
    configure,
    count,
    find_target,
    go_on,
    launch_flags,
    previous_flags,
    read_launch_flags,
    run_folder_of,
    show_help,
)
from fdg.cli_options import (
    OPEN,
    Actors,
    CompileUpdate,
    Deadline,
    Env,
    Envs,
    Fuse,
    Help,
    Iterations,
    Name,
    Parallelism,
    PolicyName,
    Quiet,
    Seed,
    Settings,
    Shards,
    Storage,
    Untuned,
    Work,
    Workers,
)
from fdg.errors import CompileError, PolicyError, UsageError, did_you_mean

if TYPE_CHECKING:
    from fdg.api import Trainer
    from fdg.graph import Graph

FORMATS = ("text", "mermaid", "dot", "svg", "json")
SUFFIXES = {".txt": "text", ".mmd": "mermaid", ".dot": "dot", ".gv": "dot", ".svg": "svg", ".json": "json"}


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),  # --dist_policy is --dist-policy
    },
)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fdg {__version__}")
        raise typer.Exit()


@app.callback(epilog="FDG_DEBUG=1 fdg … shows the whole traceback of an error.")
def fdg(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Write a reinforcement-learning algorithm once; choose at launch how it is distributed."""


@app.command(**OPEN)
def train(
    ctx: typer.Context,
    algorithm: Name = None,
    env: Env = None,
    dist_policy: PolicyName = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What runs the fragments (fdg list); by default inprocess, or process if there are several --workers.",
        ),
    ] = None,
    actors: Actors = None,
    envs: Envs = None,
    workers: Workers = None,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="simple|sharded", help="Replay in one place, or in --replay-shards K (4) under sharded_replay."
        ),
    ] = None,
    replay_shards: Shards = None,
    sample_parallelism: Parallelism = "1",
    sample_work: Work = "0",
    replay_storage: Storage = "memory",
    iterations: Iterations = None,
    seed: Seed = None,
    settings: Settings = None,
    no_tuned: Untuned = False,
    checkpoint_every: Annotated[
        str,
        typer.Option(
            metavar="N", help="Turns of the outermost loop between two checkpoints; 0: only when stopped by Ctrl-C."
        ),
    ] = "0",
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run: its folder, or one of its checkpoints.")
    ] = None,
    deadline: Deadline = "60",
    fuse: Fuse = False,
    compile_update: CompileUpdate = False,
    trace: Annotated[
        str | None,
        typer.Option(metavar="[FILE]", help="Write a trace for ui.perfetto.dev; by default in the run folder."),
    ] = None,
    log_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where the run folder is made.")] = Path("runs"),
    metrics_json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run's metrics there.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw returns and phases into the run folder.")] = False,
    eval_every: Annotated[
        str, typer.Option(metavar="N", help="Evaluate every N logged iterations; 0: only at the end.")
    ] = "0",
    eval_episodes: Annotated[
        str | None, typer.Option(metavar="M", help="Episodes of an evaluation; 100 at the end, else 10.")
    ] = None,
    callback: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:NAME", help="A callback of yours (see fdg.Callback); may be repeated."),
    ] = None,
    quiet: Quiet = False,
    local: Annotated[bool, typer.Option("--local", help="Same as --dist-policy local.")] = False,
    help: Help = False,
) -> None:
    """Train. Every field of the algorithm's config is a flag: fdg train dqn --help lists them."""
    if resume is not None and algorithm is not None and algorithm.startswith("-"):  # a config flag, and no algorithm
        ctx.args.insert(0, algorithm)
        algorithm = None
    if algorithm is None and resume is not None and not help:
        algorithm = previous_flags(resume).get("algorithm")
        if algorithm is None:
            why = "does not say which algorithm ran" if resume.exists() else "does not exist"
            raise UsageError(f"--resume: {resume} {why}; write fdg train ALGO --resume RUN, with a folder that it made")
    if algorithm is None or help:
        return show_help(ctx, algorithm, help)
    target = find_target(algorithm)
    if local and dist_policy not in (None, "local"):
        raise UsageError(f"--local and --dist-policy {dist_policy} disagree; give one of them")
    choose_replay(ctx, resume)
    flags = launch_flags(ctx, resume)
    policy = registry.find_policy("local" if flags["dist_policy"] is None else flags["dist_policy"])
    physical = read_launch_flags(flags)
    if policy.name == "local" and (physical["workers"] or 1) > 1:
        raise UsageError(
            f"--workers is {physical['workers']}, and under the policy 'local' everything is in one process; write "
            "--dist-policy single_learner_coarse (or another of fdg list), or leave --workers out"
        )
    callbacks = []
    for name in flags["callback"] or ():
        from fdg.runtime.callbacks import find_callback

        callbacks.append(find_callback(name))
    for path, folder in [(metrics_json, False), (Path(trace) if trace else None, False), (log_dir, True)]:
        if path is not None:
            check_writable(path, folder)
    state = None
    if resume is None:
        trainer, config = configure(ctx, target, settings)
        check_replay(replay, trainer)
        if not quiet and not no_tuned and (taken := tuned.said(tuned.bundled(target.module), config)):
            typer.echo(taken)
    else:
        trainer, config, state = go_on(ctx, target, settings, resume)

    from fdg.console import RunConsole
    from fdg.flags import changes
    from fdg.runtime.boundary import Stop
    from fdg.runtime.run import launch
    from fdg.runtime.runfolder import ASIDE, RunFolder, as_json

    if state is not None and not quiet and (changed := changes(config, state["config"])):
        typer.echo(f"resumed with {changed}")
    home = run_folder_of(resume)
    if state is not None and home is not None:
        runs = RunFolder.again(home, state)
        if not quiet:
            names = ", ".join(file.name for file in runs.later())
            aside = f": {names} and metrics.csv as they were are kept in {home / ASIDE}" if names else ""
            typer.echo(f"going on after turn {state['done']}{aside}")
    else:
        runs = RunFolder(log_dir, config.env, target.name, policy.name, config.seed)
    given = {name: physical.get(name, value) for name, value in flags.items() if value is not None}
    runs.flags = {"algorithm": target.full_name, **given}
    if state is not None:  # what is not given is as in the checkpoint
        physical |= {name: physical[name] or None for name in ("fuse", "compile_update")}
    observers: list[Any] = [runs]
    try:
        with ExitStack() as stack:
            stack.enter_context(runs)
            if not quiet:
                observers.append(stack.enter_context(RunConsole(folder=runs, evaluates=bool(physical["eval_every"]))))
            result = launch(
                trainer,
                config,
                policy=policy,
                **physical,
                observers=observers,
                callbacks=callbacks,
                folder=runs,
                resume=state,
                notice=notice,
                trace=runs if trace == "" else trace,
            )
    except (Stop, KeyboardInterrupt, Exception) as error:
        if runs.has_checkpoint() and not isinstance(error, UsageError):
            said = "stopped with a checkpoint" if isinstance(error, Stop) else "there is a checkpoint"
            command = ["fdg", "train", algorithm, "--resume", str(runs.path)]
            typer.echo(f"{said}; go on with: {shlex.join(command)}", err=True)
        if isinstance(error, Stop):
            raise typer.Exit(130) from None
        raise
    if metrics_json is not None:
        write(metrics_json, as_json(result.metrics), quiet)
    if plot:
        from fdg.plot import NothingToDraw, draw, read_run

        try:
            drawn = draw([read_run(runs.path)], runs.path / "plot.png")
        except NothingToDraw as nothing:  # the run itself is well
            typer.echo(f"no plot: {nothing}", err=True)
        else:
            if not quiet:
                typer.echo(f"plot {drawn}")


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a checkpoint in it.")],
    episodes: Annotated[
        str | None, typer.Option(metavar="N", help="Episodes; by default as many as the run had at its end, or 100.")
    ] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="S", help="Seed of environments and actions; by default the run's.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the return of each episode there.")
    ] = None,
) -> None:
    """Evaluate what a run learned, on environments of its own."""
    home = run_folder_of(run)
    if not run.exists() or home is None or not (home / "config.json").is_file():
        raise UsageError(f"{run} is no run folder: name one that fdg train made, such as runs/CartPole-v1__dqn__…")
    flags = previous_flags(home)
    at_the_end = int(flags.get("eval_episodes", 0)) or 100
    number = at_the_end if episodes is None else count("--episodes", episodes, 1)
    if "algorithm" not in flags:
        raise UsageError(f"{home / 'launch.json'} does not say which algorithm ran; it is of an older version")
    target = find_target(flags["algorithm"])
    if json_file is not None:
        check_writable(json_file)

    from fdg.config import make_config
    from fdg.runtime.evaluation import evaluate_run

    trainer = target.load()
    config = make_config(trainer.config_class(), json.loads((home / "config.json").read_text()))
    chosen = config.seed if seed is None else count("--seed", seed, 0)
    returns = evaluate_run(trainer, config, run, number, chosen)

    from statistics import mean, pstdev

    typer.echo(
        f"{target.name} on {config.env}: mean return {mean(returns):.1f} ± {pstdev(returns):.1f} over {number} episodes"
        f" (least {min(returns):.1f}, most {max(returns):.1f}), seed {chosen}"
    )
    if json_file is not None:
        about = {"run": str(run), "env": config.env, "seed": chosen, "mean_return": mean(returns), "returns": returns}
        write(json_file, json.dumps(about, indent=2) + "\n")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A PNG, PDF or SVG file.")] = Path(
        "plot.png"
    ),
    title: Annotated[str, typer.Option(metavar="TEXT", help="A title.")] = "",
) -> None:
    """Draw runs: return over frames and over time, and where the time went; runs that differ in the seed are one line."""
    check_writable(output)

    from fdg.plot import NothingToDraw, draw, read_run

    found, left_out = [], []
    for run in runs:
        try:
            found.append(read_run(run))
        except NothingToDraw as nothing:
            left_out.append(nothing)
    if not found:
        raise left_out[0]
    for why in left_out:
        typer.echo(f"left out: {why}", err=True)
    typer.echo(f"plot {draw(found, output, title)}")


@app.command(**OPEN)
def compare(
    ctx: typer.Context,
    algorithm: Name = None,
    dist_policy: Annotated[
        str, typer.Option("--dist-policy", metavar="A,B,…", help="Policies; the first is the reference.")
    ] = "local,single_learner_coarse",
    engine: Annotated[str, typer.Option(metavar="X,Y", help="Engines, each for every policy.")] = "inprocess",
    env: Env = None,
    actors: Actors = None,
    envs: Envs = None,
    workers: Workers = None,
    replay_shards: Shards = None,
    sample_parallelism: Parallelism = "1",
    sample_work: Work = "0",
    replay_storage: Storage = "memory",
    iterations: Iterations = None,
    seed: Seed = None,
    settings: Settings = None,
    no_tuned: Untuned = False,
    deadline: Deadline = "60",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the comparison there.")
    ] = None,
    quiet: Quiet = False,
    help: Help = False,
) -> None:
    """Run one algorithm with one seed under several policies: equal or not, seconds, calls, bytes.

    The exit code is 1 if a policy that promises the same result has another.
    """
    if algorithm is None or help:
        return show_help(ctx, algorithm, help)
    target = find_target(algorithm)
    policies = [registry.find_policy(name.strip()) for name in dist_policy.split(",")]
    engines = [registry.find_engine(name.strip()) for name in engine.split(",")]
    names = ("workers", "sample_parallelism", "sample_work", "replay_storage", "deadline")
    options = read_launch_flags({name: ctx.params[name] for name in names} | {"engine": engines[0]})
    del options["engine"]
    if json_file is not None:
        check_writable(json_file)
    _, config = configure(ctx, target, settings)
    for policy in policies:  # refused before the first run, not after it
        project(target, policy, config.actors, config.replay_shards, options["workers"])

    from dataclasses import asdict

    from fdg.compare import compare, table
    from fdg.runtime.runfolder import as_json

    rows = []
    for row in compare(target.load_anew, config, policies, engines, **options):
        rows.append(row)
        if not quiet and Console(stderr=True).is_terminal:
            typer.echo(f"{row.name}: {row.result.metrics['seconds']:.1f} s", err=True)
    if not quiet:
        typer.echo("\n".join(table(rows)))
    if json_file is not None:
        about = {"algorithm": target.name, "config": asdict(config), "runs": [row.as_dict() for row in rows]}
        write(json_file, as_json(about), quiet)
    if any(row.difference and row.exact for row in rows):
        raise typer.Exit(1)


@app.command()
def graph(
    algorithm: Name = None,
    dist_policy: PolicyName = None,
    actors: Annotated[str, typer.Option(metavar="A", help="Logical actors.")] = "1",
    replay_shards: Annotated[str, typer.Option(metavar="K", help="Shards of the replay buffer.")] = "1",
    workers: Annotated[str | None, typer.Option(metavar="W", help="Workers; by default one per actor.")] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="What is to run it; says where fragments are.")
    ] = "inprocess",
    format: Annotated[str | None, typer.Option(metavar="|".join(FORMATS), help="What to draw.")] = None,
    fuse: Annotated[bool, typer.Option("--fuse", help="The actors of one worker act in one batch.")] = False,
    source: Annotated[bool, typer.Option("--source", help="Print the generated code instead.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there.")] = None,
) -> None:
    """Draw the fragmented dataflow graph of a trainer under a policy, or print the code that runs."""
    target = find_target(algorithm)
    size = count("--actors", actors, 1), count("--replay-shards", replay_shards, 1)
    copies = None if workers is None else count("--workers", workers, 1)
    if format is None:
        suffix = output.suffix if output and not source else ""
        if suffix and suffix not in SUFFIXES:
            raise UsageError(f"{output}: no format is known by {suffix!r} ({', '.join(SUFFIXES)} are); give --format")
        format = SUFFIXES.get(suffix, "text")
    format = format.lower()
    if format not in FORMATS:
        raise UsageError(f"no format {format!r}; {did_you_mean(format, FORMATS)}")
    if output is not None:
        check_writable(output)

    from fdg.draw import draw

    drawn = project(target, registry.find_policy("local" if dist_policy is None else dist_policy), *size, copies, fuse)
    drawn.placed(registry.find_engine(engine), copies or os.cpu_count() or 1)
    text = sources(drawn) if source else draw(drawn, format)
    console = Console()
    if output is not None:
        write(output, text.rstrip() + "\n")
    elif source and console.is_terminal:
        console.print(Syntax(text, "python", background_color="default", word_wrap=True))
    else:
        typer.echo(text.rstrip())


@app.command(**OPEN)
def check(
    ctx: typer.Context,
    algorithm: Name = None,
    env: Env = None,
    dist_policy: PolicyName = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="What is to run it.")] = "inprocess",
    actors: Actors = None,
    envs: Envs = None,
    workers: Workers = None,
    replay_shards: Shards = None,
    iterations: Iterations = None,
    seed: Seed = None,
    settings: Settings = None,
    no_tuned: Untuned = False,
    help: Help = False,
) -> None:
    """Check a trainer without running it: config, agent, memory, checkpoints, and fragments under a policy (or each)."""
    if algorithm is None or help:
        return show_help(ctx, algorithm, help)
    target = find_target(algorithm)
    names = [dist_policy] if dist_policy is not None else [policy.name for policy in registry.policies()]
    policies = [registry.find_policy(name) for name in names]
    engine, copies = registry.find_engine(engine), None if workers is None else count("--workers", workers, 1)
    trainer, config = configure(ctx, target, settings)
    typer.echo(f"OK  config       {config}")

    from fdg.api import Trainer, build_parts
    from fdg.capacity import Needs, check_workers, stuck
    from fdg.compiler.rowwise import check_learner
    from fdg.runtime.parts import Parts, make_environment
    from fdg.runtime.process import worker_names

    environment = make_environment(config, config.envs, config.seed)
    try:
        made = trainer(config)
        agent, buffer = build_parts(made, environment.spec)
    finally:
        environment.close()
    parts = Parts(trainer, config, agent, buffer, environment.spec, attributes=vars(made))
    unshared = parts.unshared()
    named = f"{type(agent.actor).__name__} and {type(agent.learner).__name__} on {config.env}"
    typer.echo(f"--  agent        {named}: {unshared}" if unshared else f"OK  agent        {named}")
    needs = Needs.of(buffer, environment.spec, config.actors, engine=engine)
    needs.check()
    typer.echo(f"OK  memory       {needs.replay() or 'no replay buffer'}")
    why = stuck(parts)
    typer.echo(
        f"--  processes    {why}" if why else "OK  processes    config, agent and trainer can go to other processes"
    )
    typer.echo(checkpoints(trainer))
    lacking = ""
    for policy in policies:
        try:
            found = project(target, policy, config.actors, config.replay_shards, copies)
            used = [region.lines[0] for region in found.regions() if any("replay_" in call for call in region.calls)]
            if buffer is None and used:
                lacking = (
                    f"line {min(used)} uses a replay buffer, and this trainer makes none: "
                    "write def replay_buffer(self, spec): return ReplayBuffer(capacity)"
                )
                if trainer.replay_buffer is Trainer.replay_buffer:
                    raise UsageError(lacking)
            check_workers(copies, config, policy)
            if policy.replicated:
                check_learner(agent.learner, policy.name)
        except PolicyError as error:
            if dist_policy:
                raise
            typer.echo(f"--  policy       {policy.name}: does not fit: {error}")
            continue
        counts = (len(found.fragments), "fragment"), (len(list(found.regions())), "region"), (len(found.edges), "edge")
        typer.echo(f"OK  policy       {policy.name}: {', '.join(some(*count) for count in counts)}")
        if engine != "inprocess" and policy.name != "local":
            parts.fragments = found.fragments
            needs = Needs.of(buffer, environment.spec, config.actors, worker_names(parts, copies), engine)
            needs.check()
            typer.echo(f"    {needs.processes()}: {', '.join(needs.workers)}")
        for advice in found.advice:
            typer.echo(f"    advice: {advice}")
    if lacking:
        typer.echo(f"--  replay       {lacking}")


def checkpoints(trainer: type[Trainer]) -> str:
    """Where a run of a trainer can be saved, or why it cannot."""
    from fdg.compiler.resume import resumable
    from fdg.compiler.source import from_class

    try:
        found = resumable(from_class(trainer)).boundaries
    except CompileError as error:
        return f"--  checkpoints  {os.path.basename(error.file)}:{error.line}: {error.reason}"
    loops = [f"line {loop.line} of {os.path.basename(loop.file)}" for loop in found]
    saved = dict.fromkeys(name for loop in found for name in loop.saves)
    between = f"between turns of the loop{'s' if len(loops) > 1 else ''} in {', '.join(loops)}"
    return f"OK  checkpoints  {between}" + (f", with {', '.join(saved)}" if saved else "")


@app.command(name="list")
def list_() -> None:
    """List the algorithms, policies, engines and environment aliases."""
    from fdg.runtime.backends import ALIASES

    sections = {
        "algorithms": {target.name: target.doc for target in registry.algorithms()},
        "policies": {policy.name: policy.doc for policy in registry.policies()},
        "engines": registry.ENGINES,
        "environments (any Gymnasium id, or)": ALIASES,
    }
    for title, rows in sections.items():
        typer.echo(f"{title}")
        for name, doc in rows.items():
            typer.echo(f"  {name:<24}{doc}")


@app.command()
def doctor(
    env: Annotated[
        str | None, typer.Option(metavar="ID", help="Measure what steps this environment, and advise.")
    ] = None,
) -> None:
    """Look at the installation and the machine, and say the next step for what is missing."""
    from fdg.doctor import examine, measure

    bad = 0
    for finding in examine() if env is None else measure(env):
        bad += finding.state == "bad"
        typer.echo(f"{finding.state:<6}{finding.what:<20}{finding.seen}")
        if finding.next_step:
            typer.echo(f"{'':<26}→ {finding.next_step}")
    if bad:
        raise typer.Exit(1)


app.add_typer(flame_cli.app, name="flame")

# ---- what the commands share


def notice(text: str) -> None:
    """Tell the user something while a run goes on. Not through buffers: it may come from a signal handler."""
    os.write(2, f"{text}\n".encode())


def project(
    target: registry.Target,
    policy: Any,
    actors: int,
    replay_shards: int,
    workers: int | None = None,
    fused: bool = False,
) -> Graph:
    from fdg import compiler

    return compiler.project(
        file=target.file,
        class_name=target.class_name,
        policy=policy,
        actors=actors,
        replay_shards=replay_shards,
        workers=workers,
        fused=fused,
    )


def sources(graph: Graph) -> str:
    """The generated code, each part under a heading that is itself a comment."""
    parts = [("driver", graph.driver), *((part.name, part.source) for part in graph.fragments.values())]
    return "\n\n".join(f"# ==== {name}\n{source.strip()}" for name, source in parts)


def some(count: int, noun: str) -> str:
    """`1 edge`, `2 edges`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def main() -> None:
    app()
