"""Launch a trainer: build its parts, run it under a policy on an engine, and report what happened."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fdg.api import Actor, Trainer, build_parts
from fdg.capacity import Needs, check_workers, stuck
from fdg.config import Config, make_config
from fdg.errors import CheckpointError, CompileError, UsageError, WorkerLost
from fdg.graph import Graph
from fdg.msrl import MSRL
from fdg.registry import find_engine, find_policy, find_storage
from fdg.runtime import checkpoint, recovery
from fdg.runtime import trace as tracing
from fdg.runtime.backends import backend_for, resolve_env
from fdg.runtime.boundary import Boundaries, Point, Stop
from fdg.runtime.callbacks import Callbacks, StopTraining
from fdg.runtime.coordinator import Coordinator, DriverMSRL, global_value
from fdg.runtime.engine import Engine
from fdg.runtime.inprocess import InProcess
from fdg.runtime.load import load_class
from fdg.runtime.parts import Parts, actor_environment
from fdg.runtime.progress import Progress
from fdg.runtime.rows import Table
from fdg.runtime.runfolder import LOGS, POLICY
from fdg.runtime.session import Session
from fdg.runtime.snapshot import encode
from fdg.runtime.streams import Streams
from fdg.runtime.values import Handle, Varying
from fdg.runtime.weights import _Pickler, parameters_of, sha256
from fdg.tuned import bundled
from fdg.tuned import tuned as settings_for


@dataclass
class Result:
    """What a run left behind."""

    trainer: Trainer
    returned: Any
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    parameters: dict[str, torch.Tensor]
    graph: Graph | None = None
    calls: dict[str, int] = field(default_factory=dict)
    """How often each region was called."""

    @property
    def params_sha256(self) -> str:
        return self.metrics["params_sha256"]


@dataclass(frozen=True)
class Options:
    """How a run is executed: nothing here but `fuse` and `compile_update` changes its result."""

    engine: str = "inprocess"
    workers: int | None = None
    sample_parallelism: int = 1
    sample_work: int = 0
    eval_episodes: int = 0
    eval_every: int = 0
    eval_every_episodes: int = 10
    threads: int = 1
    passes: Iterable[str] | None = None
    deadline: float = 60.0
    """Seconds without a sign of life after which a worker counts as lost."""
    fuse: bool = False
    """Whether the actors of one worker act in one batch: quicker, with other random numbers."""
    replay_storage: str = "memory"
    """Where replay rows are: in the memory of the process that has their shard, or in Flame's object cache."""
    compile_update: bool = False
    """Whether `Learner.update` is compiled: quicker, with other last bits."""


def launch(
    trainer_class: type[Trainer],
    config: Config | None = None,
    *,
    policy: Any = "local",
    engine: str = "inprocess",
    workers: int | None = None,
    sample_parallelism: int = 1,
    sample_work: int = 0,
    eval_episodes: int = 0,
    eval_every: int = 0,
    eval_every_episodes: int = 10,
    threads: int = 1,
    observers: Iterable[Any] = (),
    callbacks: Iterable[Any] = (),
    passes: Iterable[str] | None = None,
    graph: Graph | None = None,
    checkpoint_every: int = 0,
    folder: str | os.PathLike[str] | None = None,
    resume: str | Path | dict[str, Any] | None = None,
    deadline: float = 60.0,
    notice: Callable[[str], None] | None = None,
    fuse: bool | None = None,
    compile_update: bool | None = None,
    replay_storage: str = "memory",
    trace: str | os.PathLike[str] | None = None,
    tuned: bool = True,
    **overrides: Any,
) -> Result:
    """Train. The result depends on the trainer and its config alone, not on policy, engine or workers.

    >>> launch(DQN, iterations=5, seed=7, policy="single_learner_coarse").params_sha256          # doctest: +SKIP

    `eval_episodes` is the number of episodes of the final evaluation; every `eval_every` calls of `log`, the policy is
    evaluated over `eval_every_episodes`. `callbacks` are told what happens, see `fdg.Callback`.

    `threads` is the number of torch's threads. `graph` runs a graph made (or edited) before; without it the trainer is
    projected here. A checkpoint is taken every `checkpoint_every` turns of the outermost loop, and written to `folder` if
    there is one; `resume` goes on from a checkpoint, or from the newest in a run folder (or from a state that
    `fdg.runtime.recovery.read` read before), with the config it was taken with. A worker that is lost, or silent for
    `deadline` seconds, is told to `notice`. With `fuse` the actors of one worker act in one batch, where the program
    allows it: quicker, but with other random numbers and other last bits (`metrics["fused"]` says whether it came to
    that). With `compile_update` the learner's updates are compiled, where they can be: quicker, but with other last bits
    (`metrics["compiled_updates"]` counts them). A run that goes on keeps both, unless they are given. `replay_storage` is "memory", or "flame": rows of the replay buffer lie in Flame's object cache. `trace` is a file, or a
    folder, for a trace of the run that Perfetto and chrome://tracing show.

    Keyword arguments that are not launch options override fields of the config. Without a config, the other fields of a
    bundled algorithm are as `fdg.tuned` has them for the environment, unless `tuned` is False.
    """
    engine = find_engine(engine)
    if engine == "inprocess" and ((workers or 1) > 1 or sample_parallelism > 1):
        what = f"workers is {workers}" if (workers or 1) > 1 else f"sample_parallelism is {sample_parallelism}"
        raise UsageError(
            f"{what}; the engine 'inprocess' has one process and asks for one sample at a time: leave it out, or choose "
            "--engine process"
        )
    replay_storage = find_storage(replay_storage)
    session = Session(checkpoint_every, folder, notice or say)
    saved: dict[str, Any] = {}
    if resume is not None:
        session.open(resume, trainer_class)
        saved = dict(session.last["config"])
        config = make_config(trainer_class.config_class(), {**saved, **overrides}) if config is None else config
        overrides = {}
    if config is None or overrides:
        if config is not None:
            base = {f: getattr(config, f) for f in config.__dataclass_fields__}
        else:
            base = tuned_settings(trainer_class, overrides) if tuned else {}
        config = make_config(trainer_class.config_class(), {**base, **overrides})
    if config.backend == "auto" and isinstance(config.env, str):
        config = copy.copy(config)
        config.env = resolve_env(config.env)
        config.backend = saved.get("backend") or backend_for(config.env)  # part of the experiment, so it is recorded
    if resume is not None:
        recovery.check_config(session.last, config)
    exact = session.last.get("options", {}) if resume is not None else {}
    chosen = find_policy(policy)
    check_workers(workers, config, chosen)
    options = Options(
        engine=engine,
        workers=workers,
        sample_parallelism=sample_parallelism,
        sample_work=sample_work,
        eval_episodes=eval_episodes,
        eval_every=eval_every,
        eval_every_episodes=eval_every_episodes,
        threads=threads,
        passes=passes,
        deadline=deadline,
        fuse=exact.get("fuse", False) if fuse is None else fuse,
        replay_storage=replay_storage,
        compile_update=exact.get("compile_update", False) if compile_update is None else compile_update,
    )
    watchers = tuple(observers)
    if callbacks := tuple(callbacks):
        watchers += (Callbacks(callbacks, config.seed),)
    if trace is not None:
        tracing.begin()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # part of the result: how many threads add up changes the last bits
    try:
        while True:
            run = None
            with tables(options) as table:
                try:
                    run = Run(trainer_class, config, chosen, watchers, options, session, table)
                    return run.go(graph)
                except WorkerLost as error:
                    session.lost(error)
                finally:
                    if run is not None:
                        run.close()
    finally:
        torch.set_num_threads(before)
        if trace is not None:
            tracing.write(trace, [tracing.Place(os.getpid(), tracing.DRIVER_ROW, tracing.end()), *session.places])


def tuned_settings(trainer_class: type[Trainer], overrides: dict[str, Any]) -> dict[str, Any]:
    """What is tuned for a bundled trainer on the environment it will have."""
    if not (algorithm := bundled(trainer_class.__module__)):
        return {}
    env = overrides.get("env", trainer_class.config_class().env)
    return settings_for(algorithm, resolve_env(env))


def tables(options: Options) -> AbstractContextManager[Callable[[int], Table]]:
    """What makes the memory of replay shards, for the time of one attempt at a run."""
    if options.replay_storage == "memory":
        return nullcontext(Table)
    from fdg.runtime.flame_storage import replay_tables

    return replay_tables(options.engine)


def say(text: str) -> None:
    print(f"fdg: {text}", file=sys.stderr, flush=True)


class Run:
    """One run, from building the parts to the result; or, after a worker was lost, one more attempt at it."""

    def __init__(
        self,
        trainer_class: type[Trainer],
        config: Config,
        policy: Any,
        observers: Sequence[Any],
        options: Options,
        session: Session,
        table: Callable[[int], Table],
    ) -> None:
        self.trainer_class, self.config, self.policy, self.options = trainer_class, config, policy, options
        self.session = session
        self.progress = Progress(config, observers, session.notice)
        self.progress.reported = session.reported
        self.observers = observers
        self.engine: Engine | None = None
        self.coordinator: Coordinator | None = None
        self.streams = Streams(config.seed)
        environment = actor_environment(config, self.streams, 0)
        self.spec = environment.spec
        with self.streams.of("build"):
            self.trainer = trainer_class(config)
            self.agent, self.buffer = build_parts(self.trainer, self.spec)
        if self.buffer is not None:
            self.needs([]).check()
            self.buffer.table = table
            self.buffer.open(
                config.actors, config.replay_shards if policy.per(policy.fragment_of("buffer")) == "shard" else 1
            )
        self.parts = Parts(trainer_class, config, self.agent, self.buffer, self.spec, sample_work=options.sample_work)
        self.parts.streams, self.parts.environments[0] = self.streams, environment
        self.parts.compile_update, self.parts.notice = options.compile_update, session.notice
        self.shared_attributes = self.shared_with_agent()

    def close(self) -> None:
        self.session.reported = self.progress.reported
        if self.engine is not None:
            self.engine.stop()
        self.parts.close()

    def go(self, graph: Graph | None) -> Result:
        if (unshared := self.parts.unshared()) and not self.session.started:
            self.session.notice(unshared)
        if self.policy.name == "local" and self.config.actors == 1 and graph is None:
            graph = self.try_project() if self.observers else None
            self.tell_needs([])
            trainer, msrl = self.whole()
        else:
            graph = graph or self.project(self.options.passes)
            graph.placed(self.options.engine, self.options.workers or os.cpu_count() or 1)
            for said in graph.passes:
                if said.startswith("fuse: ") and not any(part.fused for part in graph.fragments.values()):
                    self.session.notice(f"not fused: {said.removeprefix('fuse: ')}")
            trainer, msrl = self.fragments(graph)
        trainer.msrl = msrl
        state = self.session.state()
        point = None
        if state is not None:
            recovery.check_agent(state, self.agent)
            point, lost = recovery.go_on(state, trainer, msrl, self.coordinator, self.progress)
            for item in lost:
                self.session.notice(item)
        self.progress.eval_every = self.options.eval_every
        self.progress.evaluate = lambda: self.evaluate(msrl, self.options.eval_every_episodes)
        if self.session.wanted:
            msrl.attach(Boundaries(lambda point: self.boundary(point, trainer, msrl), point))
        if not self.session.started:
            self.session.started = True
            for observer in self.observers:
                observer.on_start(self.config, graph)
        if self.session.folder is not None and self.engine is not None and self.engine.name == "process":
            self.engine.log_to(Path(self.session.folder) / LOGS)
        self.progress.start = time.perf_counter()
        with self.streams.of("driver"), self.session.interruptible(), settled():
            if state is not None:
                recovery.set_random_state(state["random"])
            with tracing.span(tracing.DRIVER_ROW, f"{self.trainer_class.__name__}.train", "train"):
                try:
                    returned = trainer.train()
                except StopTraining:
                    returned = None
                except KeyboardInterrupt:
                    self.interrupted(msrl)
                    raise
        if tracing.on() and self.engine is not None:
            self.session.places += self.engine.spans()
        return self.result(trainer, returned, msrl, graph)

    def whole(self) -> tuple[Any, MSRL]:
        """Everything in one place: the user's own objects and loop."""
        msrl, trainer = self.parts.local(self.progress.log), self.trainer
        self.progress.environments = [self.parts.environment(0)]
        if tracing.on():
            tracing.watch(msrl, tracing.DRIVER_ROW, tracing.PHASE_OF)
        if self.session.wanted:
            from fdg.compiler.source import from_class

            made = self.resumable(from_class(self.trainer_class))
            if made is not None:
                file = Path(made.boundaries[0].file).with_suffix(".resumable")
                trainer = self.instance_of(load_class(self.trainer_class, made.source, made.line_map, file))
        return trainer, msrl

    def fragments(self, graph: Graph) -> tuple[Any, MSRL]:
        """The driver of the graph's fragments, which the engine hosts."""
        self.check_shared_state(graph)
        if self.policy.replicated:
            if self.options.compile_update and self.learners() > 1:
                self.session.notice("several learners: updates are not compiled, since gradients are summed in between")
            from fdg.compiler.rowwise import check_learner

            check_learner(self.agent.learner, self.policy.name)
        own = {name: value for name, value in vars(self.trainer).items() if name not in self.shared_attributes}
        self.parts.attributes = own
        self.engine = self.start_engine(self.parts.with_graph(graph))
        coordinator = Coordinator(graph, self.engine, self.parts.instance_keys(), self.config.actors)
        coordinator.weight_bytes = sum(math.prod(size) * 4 for _, _, size, _ in self.parts.places)
        coordinator.watch = next((item.on_cross for item in self.observers if hasattr(item, "on_cross")), None)
        self.coordinator, self.progress.environments = coordinator, coordinator.counts
        source, line_map, file = graph.driver, graph.driver_map, self.parts.files["driver"]
        if self.session.wanted:
            from fdg.compiler.source import from_class

            text = file.read_text()
            made = self.resumable(from_class(self.trainer_class), text, line_map if text == source else [], str(file))
            if made is not None:
                source, line_map, file = made.source, made.line_map, file.with_suffix(".resumable")
        driver = load_class(self.trainer_class, source, line_map, file)
        msrl = DriverMSRL(coordinator, config=self.config, streams=self.streams, log=self.log_joined)
        return self.instance_of(driver), msrl

    def instance_of(self, generated: Any) -> Any:
        trainer = generated.__new__(generated)
        vars(trainer).update(vars(self.trainer))
        return trainer

    def resumable(self, *what: Any) -> Any:
        """`train` with boundaries; None where it can have none and nobody asked for checkpoints."""
        from fdg.compiler.resume import resumable

        try:
            return resumable(*what)
        except CompileError as error:
            if self.session.every or self.session.last is not None:
                raise
            self.session.wanted = False
            self.session.why = f"{os.path.basename(error.file)}:{error.line}: {error.reason}"
            return None

    def boundary(self, point: Point, trainer: Any, msrl: MSRL) -> None:
        """Between two turns of the outermost loop: a checkpoint if one is due, and the end if it was asked for."""
        if not self.session.due(point):
            if self.session.done == 1 and self.session.folder is not None and not self.session.why:
                self.foresee(point)
            return
        skipped = self.shared_attributes
        try:
            kept = self.session.keep(
                {
                    **recovery.take(point, self.trainer_class, trainer, skipped, msrl, self.coordinator, self.progress),
                    "agent": recovery.agent_hash(self.agent),
                    "options": {name: getattr(self.options, name) for name in ("fuse", "compile_update")},
                }
            )
        except CheckpointError as error:
            if not self.session.stopping:
                raise
            self.stopped(msrl, "without a checkpoint" + ("" if self.session.why else f" ({error})"))
            raise Stop from None
        for observer in self.observers:
            if hasattr(observer, "on_checkpoint"):
                observer.on_checkpoint(kept)
        if self.session.stopping:
            raise Stop

    def foresee(self, point: Point) -> None:
        """Say early if there can be no checkpoint, since a local variable cannot be kept."""
        elsewhere = () if self.coordinator is None else (Handle, Varying, list, tuple, dict)  # may be in a fragment
        at_hand = {name: value for name, value in point.values.items() if not isinstance(value, elsewhere)}
        try:
            encode(at_hand, copy=False)
        except CheckpointError as error:
            self.session.why = str(error)
            self.session.notice(f"this run can have no checkpoint: {error}")

    def interrupted(self, msrl: MSRL) -> None:
        """Ctrl-C in the middle of a turn: the policy is kept as it is, where it is at hand."""
        if self.progress.history and (self.engine is None or self.engine.name == "inprocess"):
            why = self.session.why
            self.stopped(msrl, f"without a checkpoint ({why})" if why else "in the middle of an iteration")

    def stopped(self, msrl: MSRL, how: str) -> None:
        """Keep the policy of a run that has no checkpoint of its last iteration, and say so."""
        kept = "; the policy is kept for fdg eval" if self.save_policy(msrl) else ""
        self.session.notice(f"stopped {how}{kept}")

    def result(self, trainer: Any, returned: Any, msrl: MSRL, graph: Graph | None) -> Result:
        coordinator = self.coordinator
        seconds, phases = self.progress.seconds(), dict(self.phases(msrl))
        self.progress.drain()
        for name, value in vars(trainer).items():
            if isinstance(value, (Handle, Varying)):
                setattr(trainer, name, global_value(value, self.config.envs))
        returned = global_value(returned, self.config.envs)
        mean = self.progress.mean_return()
        if coordinator is None:
            parameters = parameters_of(msrl._learner) if msrl._learner is not None else {}
        else:
            parameters = coordinator.engine.parameters()
        if phases["learn"] and self.progress.given and not any(row["values"] for row in self.progress.history):
            self.session.notice(
                "no number was logged in this run, only None: let `learn` return a loss or a dict of losses"
            )
        if not phases["learn"] and self.progress.history and msrl._learner is not None:
            starts = getattr(self.config, "learning_starts", 0)
            because = f": learning_starts is {starts:,}" if starts > self.progress.frames() else ""
            self.session.notice(
                f"nothing was learned in these {self.progress.frames():,} frames, agent_learn was never called{because}"
            )
        self.save_policy(msrl)
        for observer in self.observers if self.options.eval_episodes else ():
            if hasattr(observer, "on_final_evaluation"):
                observer.on_final_evaluation(self.options.eval_episodes)
        if self.options.eval_episodes and (returns := self.evaluate(msrl, self.options.eval_episodes)):
            mean = sum(returns) / len(returns)
            with contextlib.suppress(StopTraining):
                self.progress.tell_evaluation(None, returns)
        metrics = {
            "algorithm": self.trainer_class.__name__.lower(),
            "env": self.config.env,
            "backend": self.spec.backend,
            "policy": self.policy.name,
            "engine": "inprocess" if self.policy.name == "local" else self.options.engine,
            "actors": self.config.actors,
            "replay_shards": self.config.replay_shards,
            "replay_storage": self.options.replay_storage,
            "seed": self.config.seed,
            "threads": torch.get_num_threads(),
            "fused": bool(coordinator and graph and any(part.fused for part in graph.fragments.values())),
            "compiled_updates": msrl.compiled() if coordinator is None else coordinator.compiled,
            "learners_draw": coordinator is not None and coordinator.learners_draw,
            "frames": self.progress.frames(),
            "episodes": self.progress.episodes,
            "seconds": seconds,
            "frames_per_second": self.progress.frames() / seconds if seconds else 0.0,
            "mean_reward": mean,
            "not_finite": self.progress.not_finite or None,
            "phases": phases,
            "bytes": {f"{e.source}->{e.target}:{e.value}": e.bytes for e in graph.edges}
            if coordinator and graph
            else {},
            "calls": dict(coordinator.calls) if coordinator else {},
            "params_sha256": sha256(parameters),
            "iterations": self.progress.history,
        }
        for observer in self.observers:
            observer.on_end(metrics)
        return Result(trainer, returned, metrics, self.progress.history, parameters, graph, metrics["calls"])

    def evaluate(self, msrl: MSRL, episodes: int) -> list[float] | None:
        """Returns of the policy as it is now; None without a learner."""
        start = time.perf_counter()
        if self.coordinator is not None:
            returns = self.coordinator.engine.evaluate(episodes, self.config.seed)
        else:
            returns = msrl.returns_apart(episodes, self.config.seed) if msrl._learner is not None else None
        phases = self.phases(msrl)
        phases["evaluate"] = phases.get("evaluate", 0.0) + time.perf_counter() - start
        return returns

    def phases(self, msrl: MSRL) -> dict[str, float]:
        return msrl.record.phases if self.coordinator is None else self.coordinator.phases

    def save_policy(self, msrl: MSRL) -> bool:
        """Keep the policy in the run folder, for `fdg eval`; whether there is one that can be kept."""
        if self.session.folder is None:
            return False
        try:
            if self.coordinator is not None:
                state = self.coordinator.engine.policy_state()
            else:
                state = msrl.policy_state() if msrl._learner is not None else None
            if state is not None:
                checkpoint.save(
                    Path(self.session.folder) / POLICY, {"trainer": self.trainer_class.__name__, "actor": state}
                )
            return state is not None
        except CheckpointError as error:
            self.session.notice(f"the policy is not kept for fdg eval: {error}")
            return False

    def start_engine(self, parts: Parts) -> Engine:
        if self.options.engine == "inprocess" or self.policy.name == "local":
            self.tell_needs([])
            return InProcess(parts)
        if why := stuck(parts):
            raise UsageError(why)
        from fdg.runtime.process import Processes, worker_names

        self.tell_needs(worker_names(parts, self.options.workers))
        if self.options.engine == "process":
            return Processes(parts, self.options)
        from fdg.runtime.flame import Flame

        return Flame(parts, self.options)

    def needs(self, workers: list[str]) -> Needs:
        options = self.options
        return Needs.of(self.buffer, self.spec, self.config.actors, workers, options.engine, options.replay_storage)

    def tell_needs(self, workers: list[str]) -> None:
        """Check what the run needs, and tell those who want to know."""
        needs = self.needs(workers)
        needs.check()
        if not self.session.started:
            for observer in self.observers:
                if hasattr(observer, "on_needs"):
                    observer.on_needs(needs)

    def project(self, passes: Any = None) -> Graph:
        from fdg.compiler import PASSES, project

        return project(
            self.trainer_class,
            policy=self.policy,
            actors=self.config.actors,
            replay_shards=self.config.replay_shards,
            workers=self.learners(),
            passes=PASSES if passes is None else passes,
            fused=self.options.fuse,
        )

    def learners(self) -> int:
        """How many learners there are where each worker has one."""
        if self.options.engine == "inprocess":
            return 1
        return self.options.workers or min(os.cpu_count() or 1, self.config.actors)

    def try_project(self) -> Graph | None:
        """The graph to show beside a local run, which does not need one."""
        try:
            return self.project()
        except UsageError:
            return None

    def log_joined(self, step: int, value: Any, metrics: dict[str, Any]) -> None:
        """`log` at the driver of fragments: varying values are joined, handles fetched."""
        envs = self.config.envs
        self.progress.log(
            int(global_value(step, envs)),
            global_value(value, envs),
            {name: global_value(item, envs) for name, item in metrics.items()},
        )

    # state that would be two copies --------------------------------------------------------------------------------------

    def shared_with_agent(self) -> frozenset[str]:
        """The trainer's attributes that are part of the agent."""
        names = [name for name in vars(self.trainer) if name not in ("config", "msrl")]
        if not names:
            return frozenset()
        inside = reachable_ids(self.agent) - reachable_ids(self.config) - reachable_ids(self.spec)
        return frozenset(name for name in names if reachable_ids(vars(self.trainer)[name]) & inside)

    def check_shared_state(self, graph: Graph) -> None:
        """Refuse a `train` that reaches into the agent through the trainer: in fragments it would see a copy."""
        shared = self.shared_attributes
        if not shared:
            return
        from fdg.compiler.source import from_class

        for owner in from_class(self.trainer_class).bases:
            for method, node in owner.methods.items():
                if method in ("__init__", "agent", "replay_buffer"):
                    continue
                for name in shared:
                    place = find_attribute(node, name, owner.module)
                    if place is not None:
                        raise place.error(
                            f"`self.{name}` is part of the agent (made in `agent`), and `{method}` uses it: under "
                            f"{graph.policy!r} the agent lives in other fragments, and this would be a second copy",
                            "do it in Actor.act or Learner.learn, and pass what they need as an argument",
                        )


def find_attribute(function: Any, name: str, module: Any) -> Any:
    """The place of the first `self.<name>` in a method, or None."""
    import libcst as cst
    import libcst.matchers as m

    this = function.params.params[0].name.value if function.params.params else ""
    for node in m.findall(function, m.Attribute(value=m.Name(this), attr=m.Name(name))):
        assert isinstance(node, cst.Attribute)
        return module.origin(node)
    return None


def reachable_ids(value: Any) -> set[int]:
    """Ids of the mutable objects that can be reached from a value."""
    seen: set[int] = set()
    atoms = (int, float, str, bytes, bool, type(None), type, tuple, complex)

    class Visitor(_Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if (not isinstance(obj, atoms) and not callable(obj)) or isinstance(obj, (torch.nn.Module, Actor)):
                seen.add(id(obj))
            return super().persistent_id(obj)

    try:
        Visitor(io.BytesIO(), []).dump(value)
    except Exception:  # what cannot be pickled is reported where it is copied
        return seen
    return seen


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Within, collections of garbage pass over what was there before: modules, mostly, some 0.1 s each time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
