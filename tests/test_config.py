"""A config is a dataclass: its fields are flags, the literals below them their help, strings are read by type."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdg.algorithms.dqn import DQNConfig
from fdg.config import Config, field_docs, make_config, read_value, type_name
from fdg.errors import UsageError
from fdg.flags import flag_table, read_config
from fdg.runtime.environments import make_env


@dataclass
class ExampleConfig(Config):
    """Settings of no particular algorithm."""

    env: str = "Acrobot-v1"
    lr: float = 1e-3
    """Adam's
    step size."""
    steps: int = 16
    buffer_size: int = 1000
    """Rows kept."""
    double: bool = True
    activation: Literal["relu", "tanh"] = "relu"
    clip: Optional[float] = None  # noqa: UP045  (people still write it)
    hidden: list[int] = field(default_factory=lambda: [64, 64])
    span: tuple[float, float] = (0.0, 1.0)


@dataclass
class DerivedConfig(ExampleConfig):
    lr: float = 1e-4
    """A smaller step size."""
    cells: dict[str, int] | None = None


NONE: dict[str, Any] = dict.fromkeys(["env", "seed", "actors", "envs", "replay_shards", "iterations"])


def config(*tokens: str, settings: tuple[str, ...] = (), **given: str) -> ExampleConfig:
    made = read_config(ExampleConfig, NONE | given, list(tokens), list(settings), ["--dist-policy"])
    assert isinstance(made, ExampleConfig)
    return made


def refusal(*tokens: str, settings: tuple[str, ...] = (), **given: str) -> str:
    with pytest.raises(UsageError) as caught:
        config(*tokens, settings=settings, **given)
    return str(caught.value)


def test_docs_are_the_literals_below_fields_bases_included():
    docs = field_docs(DerivedConfig)
    assert docs["lr"] == "A smaller step size."
    assert docs["buffer_size"] == "Rows kept."
    assert docs["actors"].startswith("Logical actors")
    assert "steps" not in docs
    assert field_docs(ExampleConfig)["lr"] == "Adam's step size."


def test_every_field_of_the_base_is_documented():
    assert set(field_docs(Config)) == {"env", "seed", "actors", "envs", "replay_shards", "iterations", "backend"}


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "12", 12),
        (int, "1e5", 100_000),
        (int, "-3", -3),
        (float, "2.5e-4", 2.5e-4),
        (float, "3", 3.0),
        (bool, "True", True),
        (bool, "off", False),
        (str, "12", "12"),
        (float | None, "none", None),
        (Optional[float], "0.5", 0.5),  # noqa: UP045
        (int | str, "8", 8),
        (int | str, "auto", "auto"),
        (Literal["relu", "tanh"], "Tanh", "tanh"),
        (Literal[1, 2], "2", 2),
        (list[int], "64,64", [64, 64]),
        (list[int], "[64, 32]", [64, 32]),
        (list[int], "", []),
        (tuple[float, float], "0.1,0.9", (0.1, 0.9)),
        (tuple[int, ...], "1,2,3", (1, 2, 3)),
        (dict[str, int], "{'a': 1}", {"a": 1}),
        (Path, "runs", Path("runs")),
    ],
)
def test_strings_are_read_by_type(hint, text, value):
    found = read_value(text, hint)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("buffer_size", "many", "int"),
        ("buffer_size", "1.5", "int"),
        ("buffer_size", True, "int"),
        ("buffer_size", [1], "int"),
        ("lr", "fast", "float"),
        ("lr", "nan", "float, and nan is no number"),
        ("double", "maybe", "true|false"),
        ("activation", "gelu", "relu|tanh"),
        ("clip", "much", "float or none"),
        ("hidden", "64,many", "list[int]"),
        ("span", "1,2,3", "tuple[float, float]"),
        ("env", 3, "str"),
    ],
)
def test_a_wrong_type_names_the_field_the_value_and_the_type(name, value, expected):
    with pytest.raises(UsageError) as caught:
        make_config(ExampleConfig, {name: value})
    assert str(caught.value) == f"{name} is {value!r}; expected {expected}"


def test_values_of_the_right_type_pass_unchanged():
    made = make_config(ExampleConfig, {"lr": 1, "hidden": [8], "clip": None, "seed": 5})
    assert (made.lr, made.hidden, made.clip, made.seed) == (1.0, [8], None, 5)


def test_an_unknown_key_gets_the_nearest_name():
    with pytest.raises(UsageError, match=r"ExampleConfig has no field 'bufer_size'; did you mean 'buffer_size'\?"):
        make_config(ExampleConfig, {"bufer_size": "1"})


@pytest.mark.parametrize("name", ["actors", "envs", "replay_shards", "iterations"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} is 0; it must be at least 1"):
        make_config(ExampleConfig, {name: "0"})
    with pytest.raises(UsageError):
        ExampleConfig(**{name: 0})


def test_environments_beyond_any_machine_are_refused():
    assert Config(actors=1000, envs=1000).actors == 1000
    with pytest.raises(UsageError, match="actors × envs is 1000 × 1001"):
        Config(actors=1000, envs=1001)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_numpy_cannot_take_are_refused(seed):
    with pytest.raises(UsageError, match="seed is"):
        Config(seed=seed)


def test_checks_of_the_users_own_are_usage_errors_and_never_replace_ours():
    @dataclass
    class Own(Config):
        rate: int = 1

        def __post_init__(self) -> None:
            if self.rate < 0:
                raise ValueError("rate must not be negative")

    with pytest.raises(UsageError, match="Own: rate must not be negative"):
        make_config(Own, {"rate": -1})
    with pytest.raises(UsageError, match="actors is 0"):
        make_config(Own, {"actors": 0})


def test_a_forgotten_decorator_is_named():
    class Plain(Config):
        rate: int = 1

    with pytest.raises(UsageError, match="write @dataclass above it"):
        make_config(Plain, {"rate": 2})
    with pytest.raises(UsageError, match="is no config class"):
        make_config(dict, {})


def test_a_config_without_source_still_works():
    space: dict[str, Any] = {}
    exec(
        "from dataclasses import dataclass\nfrom fdg.config import Config\n@dataclass\nclass C(Config):\n  a: int = 1",
        space,
    )
    assert "a" not in field_docs(space["C"])
    assert make_config(space["C"], {"a": "2"}).a == 2


# ---- flags


def test_fields_are_flags_in_every_spelling():
    made = config("--buffer-size", "5", "--lr=0.5", "--no-double", "--hidden", "8,8", "--Steps", "2")
    assert (made.buffer_size, made.lr, made.double, made.hidden, made.steps) == (5, 0.5, False, [8, 8], 2)
    assert config("--buffer_size", "6").buffer_size == 6
    assert config("--double", "false", "--lr", "2").double is False
    assert config("--no-double", "--double").double is True


def test_set_takes_any_field():
    made = config(settings=("buffer_size=5", "clip = 0.5", "env=CartPole-v1"))
    assert (made.buffer_size, made.clip, made.env) == (5, 0.5, "CartPole-v1")
    assert refusal(settings=("buffer_size",)) == "--set 'buffer_size' has no value; write --set buffer_size=VALUE"
    assert "did you mean 'buffer_size'?" in refusal(settings=("buffersize=1",))


def test_set_takes_a_field_once():
    assert refusal(settings=("lr=1", "learning-rate=2")) == "lr is given twice: 1 and 2"
    assert refusal("lr=2") == "unexpected argument 'lr=2'; flags are written --set lr=2"


def test_names_of_other_libraries_are_understood():
    made = config("--num-envs", "4", "--learning-rate", "0.1")
    assert (made.envs, made.lr) == (4, 0.1)


def test_an_alias_never_hides_a_field_of_that_name():
    @dataclass
    class Own(Config):
        learning_rate: float = 0.1

    made = read_config(Own, NONE, ["--lr", "0.2"], [])
    assert isinstance(made, Own) and made.learning_rate == 0.2


def test_total_timesteps_become_iterations():
    made = config("--total-timesteps", "1e4", "--num-envs", "4", actors="2")
    assert made.iterations == 79  # 10,000 / (16 steps × 4 environments × 2 actors), rounded up
    assert "give one of them" in refusal("--total-timesteps", "100", iterations="3")
    assert refusal("--total-timesteps", "-5") == "total_timesteps is -5; it must be at least 1"
    assert "expected int" in refusal("--total-timesteps", "long")
    with pytest.raises(UsageError, match="use --iterations"):
        read_config(Config, NONE, ["--total-timesteps", "100"], [])


def test_the_users_own_preparation_runs_once():
    @dataclass
    class Own(Config):
        steps: int = 2

        def __post_init__(self) -> None:
            self.steps *= 2

    made = read_config(Own, NONE, ["--total-timesteps", "40", "--env", "cartpole"], [])
    assert isinstance(made, Own)
    assert (made.steps, made.iterations, made.env) == (4, 10, "CartPole-v1")


def test_bad_flags_get_one_clear_message():
    assert "no flag --bufer-size for this algorithm; did you mean '--buffer-size'?" in refusal("--bufer-size", "1")
    assert "did you mean '--dist-policy'?" in refusal("--dist-polcy", "local")
    assert "did you mean" not in refusal("--zzz")
    assert refusal("--lr") == "--lr needs a value: float"
    assert refusal("--lr", "--double") == "--lr needs a value: float"
    assert "unexpected argument 'fast'" in refusal("fast")
    assert refusal("--num-envs", "2", envs="3") == "envs is given twice: 3 and 2"
    assert refusal("--lr", "2", settings=("lr=3",)) == "lr is given twice: 2 and 3"


def test_the_flag_table_shows_type_default_and_help():
    rows = {row[0]: row[1:] for row in flag_table(ExampleConfig)}
    assert rows["--lr"] == ("float", "0.001", "Adam's step size.")
    assert rows["--hidden"] == ("list[int]", "[64, 64]", "")
    assert rows["--env"][:2] == ("str", "Acrobot-v1")
    assert next(iter(rows)) == "--lr"  # the algorithm's own come first


@given(st.lists(st.integers(-(10**6), 10**6)), st.floats(allow_nan=False), st.booleans())
def test_what_is_printed_is_read_back(numbers, rate, flag):
    assert read_value(str(numbers), list[int]) == numbers
    assert read_value(str(rate), float) == rate
    assert read_value(str(flag), bool) is flag


def test_type_names():
    assert [type_name(hint) for hint in (int, int | None, Literal["a", "b"])] == ["int", "int or none", "a|b"]


def test_importing_the_config_does_not_import_torch():
    code = "import sys, fdg.config, fdg.flags; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_misspelt_setting_is_told_when_it_is_read() -> None:
    config = DQNConfig()
    with pytest.raises(AttributeError, match="DQNConfig has no 'bufer_size': did you mean 'buffer_size'"):
        _ = config.bufer_size  # type: ignore[attr-defined]
    spec = make_env("cartpole", 1, seed=0).spec
    with pytest.raises(AttributeError, match="EnvSpec has no 'num_actions': did you mean 'n_actions'"):
        _ = spec.num_actions  # type: ignore[attr-defined]
    for whole in (config, spec):
        assert pickle.loads(pickle.dumps(whole)) == copy.deepcopy(whole) == whole
        assert getattr(whole, "nothing", 3) == 3
