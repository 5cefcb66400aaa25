"""What users write: an Actor, a Learner, an Agent that holds both, and a Trainer whose `train` is the whole algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from fdg.config import Config
from fdg.errors import UsageError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

    from fdg.msrl import MSRL
    from fdg.runtime.environments import EnvSpec
    from fdg.runtime.replay import ReplayBuffer

Function = TypeVar("Function", bound=Callable[..., Any])


class Actor:
    """Chooses actions. One copy per logical actor; it reads weights, never writes them."""

    def act(self, td: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        """Put an `action` into `td` and return it."""
        raise NotImplementedError(f"{type(self).__name__}.act is not written: put an 'action' into td and return td")

    def evaluate(self, td: TensorDictBase) -> Any:
        """The action to take when evaluated (usually the greedy one). By default: `act(td)`."""
        return self.act(td)


class Learner:
    """Turns data into better weights.

    `mean`, `std` and `sum` are over all rows of the batch, also where several learners have some of its rows each.
    """

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        """One update; returns what the trainer wants to know of it (a loss, a dict of numbers, a TensorDict)."""
        raise NotImplementedError(f"{type(self).__name__}.learn is not written: update the weights and return the loss")

    def update(self, loss_function: Callable[..., Any], *args: Any, optimizer: Any = None, compile: bool = True) -> Any:
        """One gradient step: `loss_function(*args)` is minimised; what it returned, cut from autograd, is returned.

            def learn(self, batch):
                return self.update(self.loss, batch)

        The loss is what the function returns, or in a dict or TensorDict the entry "loss"; where there is none, the sum
        of the entries whose names begin with "loss_", as TorchRL's losses have them. The optimizer is
        `self.optimizer`, unless another one is given; an `fdg.Adam` also clips the gradients. With `--compile-update` all this
        is compiled, unless `compile` is False, as is best where each batch has another number of rows.
        """
        from fdg.update import in_python, update

        if optimizer is None:
            optimizer = getattr(self, "optimizer", None)
            if optimizer is None:
                raise UsageError(
                    f"{type(self).__name__}.update: there is no optimizer; write self.optimizer = fdg.Adam(network) in "
                    "__init__, or give one: self.update(loss_function, …, optimizer=…)"
                )
        return (update if compile else in_python)(optimizer, loss_function, args)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of a value over all rows of the batch: `x.mean()`."""
        from fdg import statistics

        return statistics.mean(x)

    def std(self, x: torch.Tensor) -> torch.Tensor:
        """The standard deviation of a value over all rows of the batch: `x.std()`."""
        from fdg import statistics

        return statistics.std(x)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a value over all rows of the batch: `x.sum()`."""
        from fdg import statistics

        return statistics.total(x)


@dataclass
class Agent:
    """An actor and a learner. The modules and tensors reachable from both are the weights that travel."""

    actor: Actor
    learner: Learner | None = None


class Trainer:
    """One reinforcement-learning algorithm, as one sequential program.

    Subclasses write `agent` (build actor and learner), optionally `replay_buffer`, and `train`, in which everything
    goes through `self.msrl`. The annotation of `config` names the algorithm's config class.
    """

    config: Config
    msrl: MSRL

    def __init__(self, config: Any) -> None:
        self.config = config

    def agent(self, spec: EnvSpec) -> Agent:
        """Build the actor and the learner for an environment."""
        raise NotImplementedError(f"{type(self).__name__}.agent is not written: return Agent(actor=…, learner=…)")

    def replay_buffer(self, spec: EnvSpec) -> ReplayBuffer | None:
        """Build the replay buffer; None when the algorithm has none."""
        return None

    def train(self) -> Any:
        """The whole algorithm."""
        raise NotImplementedError(f"{type(self).__name__}.train is not written")

    @classmethod
    def config_class(cls) -> type[Config]:
        """The dataclass that the `config` annotation of this trainer names."""
        try:
            return get_type_hints(cls, localns={"MSRL": object}).get("config", Config)
        except NameError as error:
            raise UsageError(
                f"{cls.__name__}: the annotation of `config` cannot be resolved ({error}); define the config class at the "
                "top level of the trainer's module"
            ) from None


def build_parts(trainer: Trainer, spec: EnvSpec) -> tuple[Agent, ReplayBuffer | None]:
    """What a trainer's `agent` and `replay_buffer` return, checked.

    Raises:
        UsageError: one of them returned something else.
    """
    from fdg.runtime.replay import ReplayBuffer

    name = type(trainer).__name__
    agent = trainer.agent(spec)
    if not isinstance(agent, Agent):
        raise UsageError(f"{name}.agent returned {agent!r}; return Agent(actor=…, learner=…)")
    for part in (agent.actor, agent.learner):
        if isinstance(part, type):
            raise UsageError(f"{name}.agent returned the class {part.__name__}; make one: {part.__name__}(…)")
    buffer = trainer.replay_buffer(spec)
    if buffer is not None and not isinstance(buffer, ReplayBuffer):
        raise UsageError(f"{name}.replay_buffer returned {buffer!r}; return fdg.ReplayBuffer(capacity)")
    return agent, buffer


def pure(function: Function) -> Function:
    """Declare that a function only computes: no side effect, no random numbers, no writes to its arguments.

    Calls to it may then run wherever its arguments are; calls to unknown functions stay at the driver.
    """
    function.__fdg_pure__ = True  # type: ignore[attr-defined]
    return function
