"""What is known of calls the compiler does not see into: which only compute, which return views, which draw.

A statement may leave the driver only if all its calls are listed here or can be read in the user's own source. The
lists err on the side of the driver: what is missing costs a round trip, never a wrong result.
"""

from __future__ import annotations

from typing import Any, Literal

# Results that may hold, or be views of, their arguments.
_BUILTINS_ALIASING = """dict enumerate filter frozenset getattr iter list map max min next reversed set slice sorted sum
tuple zip""".split()
_BUILTINS_FRESH = """abs all any ascii bin bool bytes callable chr complex divmod float format hash hex int isinstance
issubclass len oct ord pow range repr round str type AssertionError Exception RuntimeError ValueError KeyError IndexError
TypeError StopIteration ArithmeticError ZeroDivisionError""".split()
_SCALAR = {f"builtins.{name}" for name in "all any bool float hash int isinstance len str repr".split()}
_SCALAR |= {f"random.{name}" for name in "random randint randrange uniform gauss normalvariate getrandbits".split()}

_PURE_PREFIXES = (
    "torch.",
    "numpy.",
    "math.",
    "cmath.",
    "operator.",
    "itertools.",
    "statistics.",
    "tensordict.",
    "torchrl.objectives.value.functional.",
)
_PURE_NAMES = {
    "torchrl.envs.utils.step_mdp",
    "torchrl.envs.step_mdp",
    "fdg.stack",
    "fdg.runtime.environments.stack",
    "fdg.step_mdp",
    "fdg.runtime.environments.step_mdp",
    "collections.deque",
    "collections.defaultdict",
    "collections.Counter",
    "collections.OrderedDict",
    "copy.copy",
    "copy.deepcopy",
    "functools.reduce",
    "dataclasses.replace",
    "dataclasses.asdict",
    "types.SimpleNamespace",
}
_DRAWS = """rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson dropout
dropout1d dropout2d dropout3d alpha_dropout feature_dropout rrelu gumbel_softmax binomial""".split()
_EFFECTS = """save load manual_seed seed initial_seed set_rng_state get_rng_state set_num_threads set_default_dtype
set_default_device set_grad_enabled compile backward grad savetxt savez loadtxt fromfile seterr
set_printoptions""".split()
_PREFIX_EFFECTS = (
    "numpy.random.",
    "torch.random.",
    "torch.cuda.",
    "torch.distributed.",
    "torch.optim.",
    "torch.nn.init.",
    "torch.utils.",
    "torch.distributions.",
    "torch.autograd.",
    "torch.multiprocessing.",
    "tensordict.nn.",
)
GRAD_CONTEXTS = {
    "torch.no_grad",
    "torch.enable_grad",
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.autocast",
    "torch.amp.autocast",
    "torch.autograd.no_grad",
    "torch.autograd.enable_grad",
    "torch.autograd.set_grad_enabled",
    "torch.autograd.inference_mode",
}
"""Contexts that a region enters again in its fragment; every other context stays at the driver."""

_FRESH = """stack cat concatenate zeros ones full arange linspace logspace geomspace tensor clone mean sum where zeros_like ones_like max min
argmax argmin exp log sqrt abs prod cumsum cumprod add sub mul div matmul softmax log_softmax sigmoid tanh relu clamp
clip deepcopy std var maximum minimum array norm dot outer logical_and logical_or logical_not isnan allclose equal eye
sort argsort floor ceil sin cos tan pow""".split()

CONTAINER_MUTATORS = """append appendleft extend extendleft insert remove pop popleft popitem clear sort reverse update add
discard setdefault subtract rotate intersection_update difference_update symmetric_difference_update move_to_end""".split()
CONTAINER_READERS = """get items keys values copy count index union intersection difference symmetric_difference issubset
issuperset isdisjoint most_common elements""".split()

_DATA_MUTATORS = """set update pop clear rename_key del_ requires_grad_ setdefault resize insert append
extend""".split()
_DATA_READERS = """all any mean sum std var max min amax amin argmax argmin item tolist numpy clone detach reshape view
squeeze unsqueeze flatten permute transpose t to float double int long bool half cpu expand expand_as repeat tile gather
index_select select narrow masked_select masked_fill where clamp clip abs neg sign exp log log1p sqrt square pow sigmoid
tanh softmax log_softmax relu cumsum cumprod prod norm dot matmul mm bmm add sub mul div eq ne lt gt le ge logical_and
logical_or logical_not logical_xor isnan isinf isfinite nonzero unique sort argsort topk diff flip roll split chunk
unbind size dim numel ndimension stride is_contiguous contiguous type type_as dtype new_zeros new_ones new_full new_tensor
new_empty get keys items values exclude select flatten_keys unflatten_keys unflatten batch_size is_empty get_at copy
to_dict to_tensordict apply named_apply replace empty round floor ceil fmod remainder outer diag tril triu median mode
quantile count_nonzero bitwise_and bitwise_or bitwise_not scatter scatter_add index_add lerp astype take ravel nbytes
searchsorted conj isclose allclose equal ptp nanmean nansum swapaxes moveaxis hex is_integer as_integer_ratio
bit_length strip lower upper format join startswith endswith rstrip lstrip title zfill encode
len""".split()
DATA_READERS = frozenset(_DATA_READERS)
_DRAWS_IN_PLACE = "uniform_ normal_ random_ exponential_ cauchy_ log_normal_ geometric_".split()
DATA_FRESH = frozenset(
    "all any mean sum std var max min amax amin argmax argmin item tolist clone exp log sqrt abs prod norm dot matmul "
    "cumsum cumprod float int bool size dim numel is_contiguous nonzero softmax log_softmax sigmoid tanh clamp".split()
)

DATA_SAME_SHAPE = frozenset(
    "clone copy detach cpu float double exp log sqrt abs cumsum cumprod round tanh sigmoid".split()
)

READERS = DATA_READERS.union(CONTAINER_READERS).difference(
    CONTAINER_MUTATORS, ["apply", "named_apply", "type", "format"]
)
"""Method names that only read, be the object one of Python's containers, a tensor or a TensorDict."""

Verdict = Literal["pure", "unknown", "draws"]


def judge(qualified: str) -> Verdict:
    """What a call of a library function may do, by its qualified name.

    >>> judge("torch.stack"), judge("torch.rand"), judge("builtins.print")
    ('pure', 'draws', 'unknown')
    """
    last = qualified.rpartition(".")[2]
    if qualified.startswith("builtins."):
        return "pure" if last in _BUILTINS_ALIASING or last in _BUILTINS_FRESH else "unknown"
    if qualified.startswith("random.") or qualified.startswith("numpy.random."):
        return "draws"
    if qualified in _PURE_NAMES:
        return "pure"
    if qualified in GRAD_CONTEXTS:
        return "pure"
    if qualified.startswith(_PURE_PREFIXES):
        if last in _DRAWS or last.rstrip("_") in _DRAWS:
            return "draws"
        if last in _EFFECTS or qualified.startswith(_PREFIX_EFFECTS):
            return "unknown"
        return "pure"
    return "unknown"


def changes_data(method: str) -> bool:
    """Whether a method of tensors and TensorDicts changes its object, and does nothing else.

    >>> changes_data("add_"), changes_data("set"), changes_data("normal_"), changes_data("backward")
    (True, True, False, False)
    """
    if method in _DRAWS_IN_PLACE or method.rstrip("_") in _DRAWS:
        return False
    return method in _DATA_MUTATORS or (method.endswith("_") and not method.startswith("_"))


def is_fresh(qualified: str) -> bool:
    """Whether the result of a pure call shares nothing with its arguments."""
    last = qualified.rpartition(".")[2]
    if qualified.startswith("builtins."):
        return last in _BUILTINS_FRESH
    if qualified.startswith(("math.", "cmath.", "statistics.")):
        return True
    return last in _FRESH


def is_vector(qualified: str, kinds: list[Any]) -> bool:
    """Whether a pure call makes an array or a tensor with one dimension, by what it is given.

    >>> is_vector("numpy.linspace", ["scalar"] * 3), is_vector("torch.tensor", [("container", "scalar")])
    (True, True)
    >>> is_vector("numpy.linspace", ["data", "data"]), is_vector("torch.tensor", [("container", "data")])
    (False, False)
    """
    library, _, last = qualified.rpartition(".")
    if library not in ("numpy", "torch"):
        return False
    if last in ("linspace", "logspace", "geomspace", "arange"):
        return len(kinds) <= 4 and all(kind in ("scalar", "function", None) for kind in kinds)
    return last in ("array", "tensor") and kinds[:1] == [("container", "scalar")]


def is_scalar(qualified: str) -> bool:
    """Whether the result of a call is a number, a string or another value without parts."""
    return qualified in _SCALAR or qualified.startswith(("math.", "cmath.", "statistics."))


def is_container(qualified: str) -> bool:
    """Whether a pure call builds one of Python's own containers."""
    return qualified.startswith("collections.") or qualified in {
        f"builtins.{name}"
        for name in (
            "list",
            "dict",
            "set",
            "tuple",
            "frozenset",
            "sorted",
            "range",
            "zip",
            "enumerate",
            "reversed",
            "map",
            "filter",
        )
    }
