"""The process engine: the same results from worker processes, and what it leaves behind, which is nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import mismatches, run_reference
from strategies import program_of
from tensordict import TensorDict
from test_execution import QLike
from toy import ToyActor, ToyConfig, ToyTrainer, advance

from fdg.algorithms.dqn import DQN
from fdg.algorithms.reinforce import REINFORCE
from fdg.api import Agent
from fdg.capacity import lend, lent
from fdg.runtime import wire
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import launch
from fdg.runtime.shared import Arena, parts
from fdg.runtime.worker import Worker
from fdg.testing import assert_policies_equal

COARSE, SHARDED, FINE = "single_learner_coarse", "sharded_replay", "single_learner_fine"


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """One forkserver for all tests here: they start in milliseconds."""
    with forkserver():
        yield


def children() -> set[int]:
    """Processes that descend from this one, without the forkserver."""
    found, tree = set(), {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            tree.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    first = tree.get(os.getpid(), [])
    todo = [child for pid in first for child in tree.get(pid, [])]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += tree.get(pid, [])
    return found


# Bytes and memory ----------------------------------------------------------------------------------------------------


def through(value):
    message = wire.pack(value)
    return wire.unpack(message.head, message.buffers)


def test_a_message_keeps_identity_layout_and_shared_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    items = [1]
    td = TensorDict({"x": base}, [3], names=["env"])
    got = through({"base": base, "view": base[1:], "turned": base.t(), "a": items, "b": items, "td": td})
    assert got["a"] is got["b"] and got["td"]["x"] is got["base"] and got["td"].names == ["env"]
    assert got["turned"].stride() == base.t().stride()
    got["base"][1, 0] = 99
    assert got["view"][0, 0] == 99 and base[1, 0] == 4, "shared there, not with here"


def test_a_message_is_cut_from_autograd_and_aligned() -> None:
    leaf = torch.ones(3, requires_grad=True)
    got = through({"leaf": leaf, "made": leaf * 2, "array": np.arange(5)})
    assert got["leaf"].requires_grad and not got["made"].requires_grad
    assert got["leaf"].data_ptr() % 64 == 0 and got["array"].flags.writeable


def test_slots_are_used_again() -> None:
    arena = Arena(1)
    for turn in range(50):
        slot = arena.put(wire.pack(torch.full((1000,), turn)))
        head, buffers = parts(arena.segments[slot.segment], slot)
        assert wire.unpack(head, buffers)[0] == turn
        arena.free(slot)
    assert len(arena.segments) == 1
    slots = [arena.put(wire.pack(torch.zeros(300_000))) for _ in range(4)]
    size = sum(segment.size for segment in arena.segments)
    for slot in slots:
        arena.free(slot)
    for slot in [arena.put(wire.pack(torch.zeros(300_000))) for _ in range(4)]:
        arena.free(slot)
    assert sum(segment.size for segment in arena.segments) == size
    del head, buffers
    arena.close()


# Equal to the bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [COARSE, SHARDED, FINE])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_result(policy: str, workers: int) -> None:
    expected = launch(QLike, policy="local", actors=3, replay_shards=3, seed=5)
    seen = launch(QLike, policy=policy, engine="process", workers=workers, actors=3, replay_shards=3, seed=5)
    assert seen.params_sha256 == expected.params_sha256
    assert [row["values"] for row in seen.history] == [row["values"] for row in expected.history]
    assert seen.metrics["frames"] == expected.metrics["frames"]


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_dqn_with_four_shards(prioritized: bool, parallel: int) -> None:
    small = dict(iterations=2, actors=4, replay_shards=4, seed=3, learning_starts=8, steps=4, updates=2, batch_size=8)
    small["prioritized"] = prioritized
    expected = launch(DQN, policy=COARSE, **small)
    seen = launch(DQN, policy=SHARDED, engine="process", workers=2, sample_parallelism=parallel, **small)
    assert seen.params_sha256 == expected.params_sha256


def test_reinforce_with_a_gaussian_policy() -> None:
    assert_policies_equal(
        REINFORCE, [COARSE], ["process"], env="Pendulum-v1", actors=2, envs=2, iterations=2, episodes_per_iter=4
    )


@pytest.mark.parametrize("seed", range(40, 46))
def test_random_trainers(seed: int) -> None:
    program = program_of(seed, 1)
    outcome = run_reference(program.load(), program.config())
    for policy in (COARSE, SHARDED):
        trainer = program.load()
        found = mismatches(outcome, launch(trainer, program.config(), policy=policy, engine="process"), trainer)
        assert not found, f"under {policy}: {found[0]}\n{program}"


@pytest.mark.parametrize("seed", range(3))
def test_random_trainers_with_two_actors(seed: int) -> None:
    program = program_of(seed, 2)
    outcome = run_reference(program.load(), program.config())
    trainer = program.load()
    result = launch(trainer, program.config(), policy=COARSE, engine="process", workers=2)
    found = mismatches(outcome, result, trainer)
    assert not found, f"{found[0]}\n{program}"


# What goes where ------------------------------------------------------------------------------------------------------


def test_rows_and_batches_do_not_pass_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own messages do not grow with the number of rows."""
    from fdg.runtime.channel import Channel

    def bytes_sent(steps: int) -> int:
        total = 0
        send = Channel.send

        def counting(self, value, needs=()):
            nonlocal total
            size = send(self, value, needs)
            if value[0] in ("perform", "insert", "answer"):
                total += size
            return size

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", counting)
            launch(QLike, policy=SHARDED, engine="process", actors=2, replay_shards=2, steps=steps)
        return total

    assert bytes_sent(40) < 1.2 * bytes_sent(4)


class Failing(ToyActor):
    def act(self, td, *args, **kwargs):
        if self.calls >= 4:
            raise KeyError("no such thing")  # ▶
        return super().act(td, *args, **kwargs)


class FailingTrainer(QLike):
    def agent(self, spec) -> Agent:
        agent = super().agent(spec)
        return Agent(actor=Failing(agent.actor.net, agent.actor.shift), learner=agent.learner)


def test_an_exception_ends_in_the_users_line() -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        launch(FailingTrainer, policy=COARSE, engine="process", actors=2)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert Path(last.filename).name == "test_process.py" and "▶" in last.line


@pytest.mark.parametrize("engine", ["inprocess", "process"])
def test_time_is_told_by_phase(engine: str) -> None:
    metrics = launch(QLike, policy=SHARDED, engine=engine, actors=2, iterations=5).metrics
    phases = metrics["phases"]
    assert all(phases[name] > 0 for name in ("collect", "sample", "learn"))
    assert sum(phases.values()) <= metrics["seconds"]


def test_nothing_is_left_after_a_run() -> None:
    launch(QLike, policy=SHARDED, engine="process", actors=2, replay_shards=2)
    assert not children()
    with pytest.raises(KeyError):
        launch(FailingTrainer, policy=COARSE, engine="process", actors=2)
    assert not children()


def test_nothing_is_left_when_the_driver_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_execution import QLike
            from fdg.runtime.run import launch

            class Watch:
                def on_start(self, *_): pass
                def on_log(self, row):
                    print("running", flush=True)
                def on_end(self, *_): pass

            launch(QLike, policy="sharded_replay", engine="process", actors=2, iterations=100_000, observers=[Watch()])
            """
        )
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None and driver.stdout.readline().strip() == "running"
    tree = descendants(driver.pid)
    assert len(tree) >= 4, "forkserver, actors, a shard, the learner"
    driver.kill()
    driver.wait()
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in state(pid) for pid in tree):
            break
        time.sleep(0.1)
    assert not [pid for pid in tree if Path(f"/proc/{pid}").exists() and "Z" not in state(pid)]


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def test_classes_of_a_script_travel_by_value(tmp_path: Path) -> None:
    """A trainer in `__main__`, without the guard that other libraries need."""
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_execution import QLike
            from toy import advance
            from fdg import launch

            def half(x):
                return x // 2

            class Mine(QLike):
                def train(self):
                    td = self.msrl.env_reset()
                    for i in range(self.config.iterations):
                        td = self.msrl.agent_act(td, half(i))
                        td = self.msrl.env_step(td)
                        self.msrl.replay_buffer_insert(td)
                        td = advance(td)
                        loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(4))
                        self.msrl.log(i, loss)

            a = launch(Mine, policy="local").params_sha256
            b = launch(Mine, policy="single_learner_coarse", engine="process").params_sha256
            print("equal" if a == b else "different")
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["equal"], done.stderr


class Quiet(ToyTrainer):
    """Many calls of small regions."""

    config: ToyConfig

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.agent_act(td, i)
            td = self.msrl.env_step(td)
            td = advance(td)
            if i % 500 == 0:
                self.msrl.log(i, seen=float(i))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def test_memory_stays_flat() -> None:
    """Ten thousand region calls: neither the driver nor the workers grow."""
    seen: list[dict[int, int]] = []

    class Watch:
        def on_start(self, *_) -> None: ...

        def on_log(self, row) -> None:
            seen.append({pid: resident(pid) for pid in (os.getpid(), *children())})

        def on_end(self, *_) -> None: ...

    result = launch(Quiet, policy=COARSE, engine="process", iterations=10_000, observers=[Watch()])
    assert sum(result.calls.values()) >= 10_000
    first, last = seen[4], seen[-1]
    for pid, pages in last.items():
        assert pages <= first[pid] * 1.03 + 512, f"process {pid} grew from {first[pid]} to {pages} pages"


def test_workers_with_several_threads_each() -> None:
    settings = dict(env="HalfCheetah-v5", envs=2, actors=2, episodes_per_iter=4, iterations=1, tuned=False, threads=2)
    expected = launch(REINFORCE, policy="local", **settings)
    seen = launch(REINFORCE, policy="single_learner_coarse", engine="process", workers=2, **settings)
    assert seen.params_sha256 == expected.params_sha256


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU alone has no others")
def test_a_worker_with_a_cpu_of_its_own_may_use_the_others_while_they_are_idle() -> None:
    before = os.sched_getaffinity(0)
    own = {min(before)}
    try:
        Worker(None, None).pin(own)
        assert (os.sched_getaffinity(0), lent()) == (own, before - own)
    finally:
        os.sched_setaffinity(0, before)
        lend(set())
