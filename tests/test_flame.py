"""The Flame engine, against real servers on loopback: the same results, faults that end, and nothing left behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_execution import QLike
from test_process import FailingTrainer
from test_recovery import same
from typer.testing import CliRunner

from fdg.algorithms.dqn import DQN
from fdg.algorithms.reinforce import REINFORCE
from fdg.cli import app
from fdg.doctor import flame as flame_servers
from fdg.doctor import flame_cluster
from fdg.errors import RunError
from fdg.runtime import flame, flame_cache
from fdg.runtime.flame import services
from fdg.runtime.flame_cluster import LIMIT, Loopback, is_alive, loopback, members
from fdg.runtime.run import Result, launch

pytestmark = pytest.mark.flame

COARSE, SHARDED = "single_learner_coarse", "sharded_replay"
TOY: dict[str, Any] = dict(actors=2, replay_shards=2, iterations=8, seed=4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Loopback]:
    """One cluster for all tests, and services that are started once."""
    with loopback() as cluster:
        with services():
            yield cluster
        sockets, folder = cluster.known()["sockets"], cluster.folder
    assert not members(sockets) and not folder.exists() and not Path(sockets).exists()


@pytest.fixture(scope="module")
def expected() -> Result:
    return launch(QLike, policy="local", **TOY)


class At:
    """Does something at the end of an iteration, once; it gets the engine of that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, iteration: int, action: Callable[[Any], None]) -> None:
        self.iteration, self.action = iteration, action
        self.engines: list[flame.Flame] = []
        start = flame.Flame.__init__

        def starting(engine: flame.Flame, *arguments: Any) -> None:
            self.engines.append(engine)
            start(engine, *arguments)

        monkeypatch.setattr(flame.Flame, "__init__", starting)

    def on_start(self, *_: Any) -> None: ...

    def on_log(self, row: dict[str, Any]) -> None:
        if row["iteration"] == self.iteration:
            self.action(self.engines[-1])

    def on_end(self, *_: Any) -> None: ...


def remote(engine: flame.Flame, name: str) -> flame.FlameRemote:
    return next(remote for remote in engine.remotes if remote.name == name)


# A cluster of one's own -----------------------------------------------------------------------------------------------


def test_up_status_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `fdg flame up` starts is found without variables, and is gone after `fdg flame down`."""
    for name in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE", LIMIT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FDG_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # where the user's own flame.yaml is not

    def fdg(*words: str) -> tuple[int, str]:
        seen = CliRunner().invoke(app, ["flame", *words])
        return seen.exit_code, seen.output

    assert fdg("status") == (1, "no Flame cluster runs here; fdg flame up starts one\n")
    assert flame_cluster().state == "note"
    code, text = fdg("up", "--executors", "3")
    known = Loopback(tmp_path / "flame").known()
    try:
        assert code == 0 and f"127.0.0.1:{known['port']}" in text and "run code as you" in text
        code, text = fdg("status")
        assert code == 0 and "ready" in text and "0 of 3 executors" in text
        code, text = fdg("up")
        assert code == 2 and "fdg flame down" in text
        assert flame_cluster().state == "ok" and "fdg flame up" in flame_cluster().seen
        found = flame.Cluster()
        try:
            assert found.nodes() and not found.executors() and os.environ[LIMIT] == "3"
            os.kill(Loopback(tmp_path / "flame").alive()["cache"], signal.SIGKILL)
            wait_until(lambda: fdg("status")[0] == 1)
            assert "flame-object-cache" in fdg("status")[1] and "gone" in fdg("status")[1]
        finally:
            found.close()
    finally:
        fdg("down")
    assert not members(known["sockets"]) and not Path(known["sockets"]).exists()
    assert fdg("status")[0] == 1 and "no Flame cluster" in fdg("down")[1]


def test_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With an authority of one's own, at both endpoints; services are told of it."""
    files = {f"{name}_file": str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca")}
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout own.pem -out ca.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out request.pem",
        "x509 -req -in request.pem -CA ca.pem -CAkey own.pem -copy_extensions copy -days 2 -out cert.pem",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True, cwd=tmp_path)
    monkeypatch.setattr(flame, "_kept", [])
    small = {**TOY, "iterations": 2}
    with loopback(tls=files):
        assert flame_cluster().state == "ok" and "https" in flame_cluster().seen
        seen = launch(QLike, policy=COARSE, engine="flame", workers=1, **small)
        monkeypatch.setenv("FLAME_CA_FILE", str(tmp_path / "none"))
        assert "FLAME_CA_FILE" in flame_cluster().next_step
    same(launch(QLike, policy="local", **small), seen)


def test_without_a_cluster_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FDG_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE", LIMIT):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(flame, "_kept", [])
        with pytest.raises(RunError, match=r"no Flame cluster runs here.*fdg flame up"):
            launch(QLike, policy=COARSE, engine="flame", **TOY)
    monkeypatch.setenv("FLAME_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("fdg.runtime.flame_cluster.PREFIX", tmp_path / "prefix")
    finding = flame_servers()
    assert finding.state == "note" and str(tmp_path / "nowhere") in finding.seen and "FLAME_HOME" in finding.next_step


# Equal to the bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [COARSE, SHARDED])
def test_services_do_not_change_the_result(policy: str, cluster: Loopback, expected: Result) -> None:
    same(expected, launch(QLike, policy=policy, engine="flame", workers=2, **TOY))


@pytest.mark.parametrize("policy", [COARSE, SHARDED])
def test_dqn(policy: str, cluster: Loopback) -> None:
    small = dict(iterations=2, actors=2, replay_shards=2, seed=3, learning_starts=8, steps=4, updates=2, batch_size=8)
    same(
        launch(DQN, policy="local", **small), launch(DQN, policy=policy, engine="flame", sample_parallelism=2, **small)
    )


def test_reinforce(cluster: Loopback) -> None:
    small = dict(actors=2, envs=2, iterations=2, episodes_per_iter=4, seed=1)
    same(launch(REINFORCE, policy="local", **small), launch(REINFORCE, policy=COARSE, engine="flame", **small))


# What goes where ------------------------------------------------------------------------------------------------------


def test_rows_do_not_pass_the_driver_and_objects_are_deleted(
    cluster: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the driver's messages nor what lies in the cache grow with the number of rows or iterations."""

    def seen(steps: int, iterations: int) -> tuple[int, int]:
        sent, objects = 0, 0
        ask = flame.ask

        def counting(session: Any, data: bytes, answer: Any) -> None:
            nonlocal sent, objects
            sent += len(data)
            objects = max(objects, sum(1 for file in (cluster.folder / "cache").rglob("*") if file.is_file()))
            ask(session, data, answer)

        with monkeypatch.context() as patch:
            patch.setattr(flame, "ask", counting)
            launch(QLike, policy=SHARDED, engine="flame", **{**TOY, "steps": steps, "iterations": iterations})
        return sent, objects

    few, many = seen(4, 4), seen(40, 4)
    assert many[0] < 1.2 * few[0]
    assert seen(4, 12)[1] <= few[1] + 5


def test_messages_above_flames_limit(cluster: Loopback) -> None:
    """Batches of some 10 MB; a task's own bytes may be 4 MB."""
    large = dict(actors=1, iterations=1, seed=3, learning_starts=8, steps=16, updates=1, batch_size=120_000)
    small = launch(DQN, policy="local", **large)
    same(small, launch(DQN, policy=SHARDED, engine="flame", **large))


def test_an_exception_ends_in_the_users_line(cluster: Loopback) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        launch(FailingTrainer, policy=COARSE, engine="flame", actors=2)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert Path(last.filename).name == "test_process.py" and "▶" in last.line


def test_an_older_copy_of_the_users_code_is_never_run(
    cluster: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services stay; the trainer's module, and one that it imports, change."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_trainer.py").write_text(
        textwrap.dedent(
            """
            from test_execution import QLike
            from toy import ToyActor
            from my_factor import factor
            from fdg.api import Agent

            class Mine(QLike):
                def agent(self, spec):
                    agent = super().agent(spec)
                    return Agent(actor=Scaled(agent.actor.net, agent.actor.shift), learner=agent.learner)

            class Scaled(ToyActor):
                def act(self, td, *args, **kwargs):
                    td = super().act(td, *args, **kwargs)
                    return td.set("action", td["action"] * factor())
            """
        )
    )
    found = []
    for factor in (1, 3):
        (tmp_path / "my_factor.py").write_text(f"def factor():\n    return {factor}\n")
        for name in ("my_trainer", "my_factor"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        trainer = importlib.import_module("my_trainer").Mine
        found.append(launch(trainer, policy="local", **TOY).params_sha256)
        assert launch(trainer, policy=COARSE, engine="flame", **TOY).params_sha256 == found[-1]
        (tmp_path / "my_factor.py").write_text("raise RuntimeError('read where it should not be')\n")
    assert found[0] != found[1], "the change shows"


def test_an_own_environment_travels_with_the_run(cluster: Loopback, tmp_path: Path) -> None:
    """Its file is the driver's. The reward tells whether the module was read anew where the environment is."""
    (tmp_path / "helps_environment.py").write_text("import os\n\nREAD_BY = os.getpid()\n")
    (tmp_path / "travelling_environment.py").write_text(
        textwrap.dedent(
            """
            import os

            import gymnasium as gym
            import helps_environment


            def make_env():
                env = gym.make("CartPole-v1", max_episode_steps=5)
                return gym.wrappers.TransformReward(env, lambda _: float(helps_environment.READ_BY != os.getpid()))
            """
        )
    )
    seen = launch(
        DQN,
        env=f"{tmp_path / 'travelling_environment.py'}:make_env",
        policy=COARSE,
        engine="flame",
        iterations=1,
        steps=20,
        eval_episodes=0,
    )
    assert seen.history[-1]["episodic_return"] == 5.0


# Faults ---------------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced(cluster: Loopback, expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    at = At(monkeypatch, 4, lambda engine: os.kill(remote(engine, "replay[1]").pid, signal.SIGKILL))
    said: list[str] = []
    run = dict(policy=SHARDED, engine="flame", checkpoint_every=2, observers=[at], notice=said.append)
    same(expected, launch(QLike, **run, **TOY))
    assert len(at.engines) == 2 and "replay[1]" in said[0] and "SIGKILL" in said[0]


def supervisor(cluster: Loopback, engine: flame.Flame, name: str) -> int:
    """The process that Flame has started for a worker."""
    executor = engine.cluster.executors()[remote(engine, name).session.id].metadata.id
    for pid in members(cluster.known()["sockets"]):
        if f"/{executor}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            if b"fdg.runtime.flame_service" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise LookupError(name)


def test_a_killed_service_is_replaced(cluster: Loopback, expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker ends with it, and its session stays open: closing it would keep Flame busy for ever."""
    lost: list[Any] = []

    def kill(engine: flame.Flame) -> None:
        lost.append(remote(engine, "learner"))
        os.kill(supervisor(cluster, engine, "learner"), signal.SIGKILL)

    at = At(monkeypatch, 4, kill)
    said: list[str] = []
    run = dict(policy=COARSE, engine="flame", checkpoint_every=2, observers=[at], notice=said.append)
    same(expected, launch(QLike, **run, **TOY))
    assert len(at.engines) == 2 and "worker learner" in said[0]
    wait_until(lambda: not is_alive(lost[0].pid))
    assert lost[0].session.id in at.engines[1].cluster.executors()


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_session_that_somebody_closes_is_replaced(
    cluster: Loopback, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flamepy

    at = At(monkeypatch, 4, lambda engine: flamepy.close_session(remote(engine, "actors[0]").session.id))
    said: list[str] = []
    run = dict(policy=COARSE, engine="flame", checkpoint_every=2, observers=[at], notice=said.append)
    same(expected, launch(QLike, **run, **TOY))
    assert len(at.engines) == 2 and "actors[0]" in said[0] and "closed session" in said[0]


def test_an_idle_release_is_noticed(cluster: Loopback, expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flame ends services without work after some time; here after 3 seconds, while the driver does something else."""
    monkeypatch.setattr(flame, "DELAY_RELEASE", 3)
    monkeypatch.setattr(flame, "_kept", [])

    def pause(engine: flame.Flame) -> None:
        wait_until(lambda: not any(is_alive(remote.pid) for remote in engine.remotes), 30)

    at = At(monkeypatch, 4, pause)
    said: list[str] = []
    run = dict(
        policy=COARSE, engine="flame", workers=1, checkpoint_every=2, deadline=20.0, observers=[at], notice=said.append
    )
    same(expected, launch(QLike, **run, **TOY))
    assert len(at.engines) >= 2 and any("worker actors[0]" in text for text in said)


def test_a_service_that_cannot_start_is_named(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame, "_kept", [])
    monkeypatch.setenv("FDG_FLAME_PYTHON", "/no/such/python")
    with pytest.raises(RunError, match=r"cannot start the service of worker actors\[0\].*FDG_FLAME_PYTHON"):
        launch(QLike, policy=COARSE, engine="flame", workers=1, **TOY)


def test_a_session_manager_that_is_slow_to_answer_is_no_error() -> None:
    def slow(_: str) -> Any:
        raise flamepy.FlameError(3, "failed to get session: Deadline Exceeded")

    import flamepy

    remote: Any = object.__new__(flame.FlameRemote)
    remote.session, remote.cluster = (
        SimpleNamespace(id="1"),
        SimpleNamespace(connection=SimpleNamespace(get_session=slow)),
    )
    remote.check_events()


def test_no_room_is_an_error_with_numbers(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    import flamepy

    before = len(flamepy.list_sessions())
    monkeypatch.setenv(LIMIT, "3")
    with pytest.raises(RunError, match=r"needs 5 executors \(actors\[0\].*room for [0-3].*started for 3"):
        launch(QLike, policy=SHARDED, engine="flame", workers=2, **TOY)
    monkeypatch.delenv(LIMIT)
    monkeypatch.setenv(flame.RESREQ, "cpu=1,mem=900g")
    with pytest.raises(RunError, match=r"room for 0.*mem=900g.*MiB"):
        launch(QLike, policy=COARSE, engine="flame", **TOY)
    assert len(flamepy.list_sessions()) == before


def test_a_lost_cache_is_named(
    cluster: Loopback, expected: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = At(monkeypatch, 4, lambda engine: os.kill(cluster.alive()["cache"], signal.SIGKILL))
    run = dict(policy=SHARDED, engine="flame", checkpoint_every=2, folder=tmp_path, deadline=5.0)
    with pytest.raises(RunError, match=r"object cache does not answer.*--resume"):
        launch(QLike, observers=[at], **run, **TOY)
    cluster.start("cache", mine=True)
    same(expected, launch(QLike, policy=SHARDED, engine="flame", resume=tmp_path))


def test_a_stopped_cache_does_not_stop_the_driver(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers."""
    monkeypatch.setattr(flame_cache, "CALL_SECONDS", 2.0)
    monkeypatch.setattr(flame_cache, "DELETE_SECONDS", 1.0)
    cache = cluster.alive()["cache"]
    at = At(monkeypatch, 4, lambda engine: os.kill(cache, signal.SIGSTOP))
    try:
        with pytest.raises(RunError, match=r"(actors|learner|replay).*object cache does not answer"):
            launch(QLike, policy=SHARDED, engine="flame", observers=[at], deadline=5.0, **TOY)
    finally:
        os.kill(cache, signal.SIGCONT)


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from test_execution import QLike
from fdg.runtime import flame, flame_cache
from fdg.runtime.run import launch

class Said:
    def on_start(self, *_): ...
    def on_log(self, row): print(row["iteration"], flush=True)
    def on_end(self, *_): ...

flame.LEASE_SECONDS = 4.0
launch(QLike, policy="single_learner_coarse", engine="flame", observers=[Said()], actors=2, workers=1, iterations=10**6)
"""


def test_services_of_a_killed_driver_end(cluster: Loopback) -> None:
    """Nobody tells them; the driver says nothing any more."""
    import flamepy

    before = {executor.status.session_id for executor in flamepy.list_executors()}
    program = DRIVER.format(tests=str(Path(__file__).parent))
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None and driver.stdout.readline()

        def others() -> set[str]:
            return {executor.status.session_id for executor in flamepy.list_executors()} - before - {""}

        assert len(others()) == 2
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not others(), 60)


def test_several_learners(cluster: Loopback) -> None:
    """On one machine: the same as with worker processes."""
    small = dict(policy="multi_learner", workers=2, actors=2, envs=2, iterations=2, episodes_per_iter=4, seed=1)
    same(launch(REINFORCE, engine="process", **small), launch(REINFORCE, engine="flame", **small))


def test_learners_on_other_machines_are_refused(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(RunError, match=r"on node .*driver on elsewhere.*single_learner_coarse"):
        launch(REINFORCE, policy="multi_learner", engine="flame", workers=2, actors=2, envs=2, episodes_per_iter=4)


def test_a_lost_node_is_named(
    cluster: Loopback, expected: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = At(monkeypatch, 4, lambda engine: os.kill(cluster.alive()["executors"], signal.SIGKILL))
    said: list[str] = []
    run = dict(policy=COARSE, engine="flame", workers=1, checkpoint_every=2, folder=tmp_path, deadline=2.0)
    with pytest.raises(RunError, match=r"no node that is ready.*2 executors \(actors\[0\], learner\).*--resume"):
        launch(QLike, observers=[at], notice=said.append, **run, **TOY)
    assert "actors[0]" in said[0] and "node" in said[0]
    cluster.start("executors", mine=True)
    same(expected, launch(QLike, policy=COARSE, engine="flame", workers=1, resume=tmp_path))


def test_a_lost_session_manager_is_named(cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    at = At(monkeypatch, 4, lambda engine: os.kill(cluster.alive()["sessions"], signal.SIGKILL))
    said: list[str] = []
    with pytest.raises(RunError, match=f"{cluster.known()['port']}.*does not answer"):
        launch(QLike, policy=COARSE, engine="flame", workers=1, observers=[at], notice=said.append, **TOY)
    assert "worker actors[0]" in said[0]
    cluster.start("sessions", mine=True)
