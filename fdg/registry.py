"""Names to things: algorithms and policies, bundled or in a file of the user's own.

    find_algorithm("dqn")   find_algorithm("my_file.py:MyTrainer")   find_policy("sharded-replay")

Files are looked at with `ast` and imported only by `load`, so that listing and drawing stay fast.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fdg.errors import PolicyError, RunError, UsageError, did_you_mean, import_failed

if TYPE_CHECKING:
    from fdg.api import Trainer
    from fdg.config import Config
    from fdg.policies import Policy

ENGINES = {
    "inprocess": "every fragment in this process, as objects that share nothing",
    "process": "fragments in worker processes of this machine, tensors by shared memory",
    "flame": "fragments as services of a Flame cluster",
}
STORAGES = {
    "memory": "replay rows in the memory of the process that has their shard",
    "flame": "replay rows in Flame's object cache",
}


@dataclass(frozen=True)
class Source:
    """One class in one file, known without importing it."""

    name: str
    file: str
    class_name: str
    doc: str
    module: str = ""
    """Import name of a bundled file; empty for a file of the user's."""

    def load_class(self) -> type:
        """Import the file and return the class."""
        if not self.module:
            return getattr(import_file(self.file), self.class_name)
        try:
            return getattr(importlib.import_module(self.module), self.class_name)
        except ImportError as error:
            raise RunError(f"{self.module} cannot be imported: {error}; fdg doctor says what is missing") from error


@dataclass(frozen=True)
class Target(Source):
    """A trainer to run."""

    @property
    def full_name(self) -> str:
        """What names it wherever the command is given: a bundled algorithm's name, or `/path/FILE.py:CLASS`."""
        return self.name if self.module else f"{self.file}:{self.class_name}"

    def load(self) -> type[Trainer]:
        """Import the trainer.

        Raises:
            UsageError: if the import fails, or the class is no trainer, or has no `train`.
        """
        from fdg.api import Trainer

        cls = self.load_class()
        if not (isinstance(cls, type) and issubclass(cls, Trainer)):
            raise UsageError(f"{self.file}: {self.class_name} is no trainer; write: class {self.class_name}(Trainer)")
        if cls.train is Trainer.train:
            raise no_train(self.file, self.class_name)
        if cls.agent is Trainer.agent:
            raise UsageError(
                f"{self.file}: {self.class_name} has no method `agent`; "
                "write: def agent(self, spec), which returns Agent(actor=…, learner=…)"
            )
        for method, *given in ((cls, "config"), (cls.train, "self"), (cls.agent, "self", "spec")):
            try:
                inspect.signature(method).bind(*given)
            except TypeError as error:
                name = self.class_name if method is cls else f"{self.class_name}.{method.__name__}"
                raise UsageError(f"{self.file}: {name} is called with {', '.join(given)}: {error}") from error
        try:
            cls.config_class()
        except NameError as error:
            raise UsageError(
                f"{self.file}: the annotation of {self.class_name}.config cannot be read: {error}"
            ) from error
        return cls

    def load_anew(self) -> type[Trainer]:
        """Import the user's file once more, so that the variables of its module are as they were at first."""
        for name, module in list(sys.modules.items()):
            if not self.module and getattr(module, "__file__", None) == self.file:
                del sys.modules[name]
        return self.load()

    def light_config(self) -> type[Config] | None:
        """The config class of a bundled algorithm, without the rest of its file, which imports torch for seconds.

        Good for help, and to refuse a wrong flag at once. None where only an import can tell.
        """
        tree = parse_file(Path(self.file))
        classes = classes_in(tree)
        wanted = [annotation_of(classes[self.class_name], "config")]
        while wanted[-1] in classes:
            wanted += base_names(classes[wanted[-1]])
        base = light_base(tree, wanted[-1])
        if not self.module or base is None:
            return None
        light = ("__future__", "dataclasses", "typing")
        body: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module in light]
        body += ast.parse("from fdg import UsageError").body
        body += [node for name, node in classes.items() if name in wanted]
        module = ModuleType(f"{self.module} (config)")
        module.__file__ = self.file
        setattr(module, wanted[-1], base)
        sys.modules[module.__name__] = module  # where `inspect` finds the source, and so the fields' help
        try:
            exec(compile(ast.Module(body, []), self.file, "exec"), vars(module))
        except NameError:  # it uses something else of its file
            return None
        return getattr(module, wanted[0])


def light_base(tree: ast.Module, name: str) -> type[Config] | None:
    """What a config in a bundled file extends: `Config`, or that of another bundled algorithm."""
    if name == "Config":
        return importlib.import_module("fdg").Config
    modules = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
    ]
    found = [target.light_config() for target in algorithms() if target.module in modules]
    return next((config for config in found if config is not None and config.__name__ == name), None)


def no_train(file: str, class_name: str) -> UsageError:
    return UsageError(f"{file}: {class_name} has no method `train`; write: def train(self), using self.msrl")


def no_class(file: Path, class_name: str, classes: Collection[str]) -> UsageError:
    if not class_name:
        return UsageError(
            f"{file}: which class? write {file.name}:CLASS with one of: {', '.join(classes) or '(none here)'}"
        )
    return UsageError(
        f"{file} has no class {class_name!r}; {did_you_mean(class_name, classes) if classes else 'none fits'}"
    )


# ---- algorithms


def algorithms() -> list[Target]:
    """The bundled algorithms."""
    found = []
    for file in package_files("fdg.algorithms"):
        tree = parse_file(file)
        if names := trainers_in(tree):
            doc = first_line(classes_in(tree)[names[0]])
            found.append(Target(file.stem, str(file), names[0], doc, f"fdg.algorithms.{file.stem}"))
    return found


def find_algorithm(name: str) -> Target:
    """The trainer that `name` means: a bundled algorithm, `FILE.py:CLASS`, or `FILE.py` if it holds one trainer.

    Raises:
        UsageError: for a name, file or class that does not exist or cannot be a trainer.
    """
    if (place := split_file(name)) is None:
        return pick(name, algorithms(), "algorithm")
    file, class_name = place
    tree = parse_file(file)
    classes = classes_in(tree)
    class_name = class_name or only_trainer(file, trainers_in(tree))
    if class_name not in classes:
        raise no_class(file, class_name, descendants_in(tree) or classes)
    if lacks_train(class_name, classes):
        raise no_train(f"{file}:{classes[class_name].lineno}", class_name)
    bundled = next((target for target in algorithms() if Path(target.file) == file), None)
    module = bundled.module if bundled else ""
    return Target(class_name.lower(), str(file), class_name, first_line(classes[class_name]), module)


def only_trainer(file: Path, names: list[str]) -> str:
    """The one trainer of a file, when the command names only the file."""
    if not names:  # its base may come from a module that only an import can tell
        module, trainer = import_file(str(file)), importlib.import_module("fdg.api").Trainer
        names = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, trainer) and value.__module__ == module.__name__
        ]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{file} holds no trainer; write: class MyTrainer(fdg.Trainer)")
    raise UsageError(f"{file} holds several trainers; write one of: {', '.join(f'{file}:{name}' for name in names)}")


def trainers_in(tree: ast.Module) -> list[str]:
    """Names of the trainers that no other class extends."""
    classes, kin = classes_in(tree), descendants_in(tree)
    extended = {base for name in kin for base in base_names(classes[name])}
    return [name for name in kin if name not in extended]


def descendants_in(tree: ast.Module) -> list[str]:
    """Names of the classes that descend from `Trainer` or from a bundled algorithm."""
    classes = classes_in(tree)
    roots = {"Trainer"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fdg.algorithms"):
            there = bundled_trainers(node.module or "")
            roots |= {alias.asname or alias.name for alias in node.names if alias.name in there}
    kin: set[str] = set()
    for _ in classes:  # a base may stand anywhere in the file: repeat until nothing is added
        kin |= {name for name, node in classes.items() if set(base_names(node)) & (roots | kin)}
    return [name for name in classes if name in kin]


def bundled_trainers(module: str) -> list[str]:
    """Names of the trainers in a bundled module: what else can be imported from there is none."""
    files = [file for file in package_files("fdg.algorithms") if f"fdg.algorithms.{file.stem}" == module]
    return [name for file in files for name in trainers_in(parse_file(file))]


def lacks_train(name: str, classes: dict[str, ast.ClassDef]) -> bool:
    """True if the class certainly has no `train`: every base is in this file, or is Trainer itself."""
    if name == "Trainer":
        return True
    node = classes.get(name)
    if node is None or node.decorator_list or not node.bases:
        return False
    defined = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
    defined |= {target.id for item in node.body if isinstance(item, ast.Assign) for target in names_of(item)}
    return "train" not in defined and all(lacks_train(base, classes) for base in base_names(node))


# ---- policies


def policies() -> list[Source]:
    """The bundled policies: each file of `fdg.policies` with a class that carries a `name`."""
    found = []
    for file in package_files("fdg.policies"):
        for node in parse_file(file).body:
            name = class_attribute(node, "name")
            if isinstance(node, ast.ClassDef) and name:
                found.append(Source(name, str(file), node.name, first_line(node), f"fdg.policies.{file.stem}"))
    return found


def find_policy(name: Any) -> type[Policy]:
    """The policy that `name` means: a bundled one, `FILE.py:CLASS`, or `FILE.py` if it holds one policy.

    >>> find_policy("Sharded-Replay").name
    'sharded_replay'

    Raises:
        UsageError: for a name, file or class that does not exist, or a class that is no complete policy.
    """
    from fdg.policies import Policy

    if not isinstance(name, str):
        return check_policy(name, "")
    if (place := split_file(name)) is None:
        return pick(name, policies(), "policy").load_class()
    file, class_name = place
    tree = parse_file(file)
    module = import_file(str(file))
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    known = [key for key, value in own.items() if isinstance(value, type) and issubclass(value, Policy)]
    if not class_name and len(known) == 1:
        class_name = known[0]
    if not known and not class_name:
        raise UsageError(f"{file} holds no policy; write: class MyPolicy(fdg.policies.Policy)")
    if not class_name or not hasattr(module, class_name):
        raise no_class(file, class_name, known)
    node = classes_in(tree).get(class_name)
    if not isinstance(getattr(module, class_name), type):
        raise no_class(file, class_name, known)
    return check_policy(getattr(module, class_name), f"{file}:{node.lineno}: " if node else f"{file}: ")


def check_policy(policy: Any, where: str) -> type[Policy]:
    """A policy of the user's own, if its declaration is complete; `where` it stands begins each refusal."""
    from fdg.policies import POLICIES, Policy

    cls = policy if isinstance(policy, type) else type(policy)
    word = cls.__name__
    if not issubclass(cls, Policy):
        raise PolicyError(f"{where}{word} is no policy; write: class {word}(Policy), from fdg.policies import Policy")
    if not isinstance(cls.name, str) or not cls.name:
        raise PolicyError(f"{where}policy {word} has no name; write in it: name = {word.lower()!r}")
    if not isinstance(cls.fragments, dict) or not cls.fragments:
        raise PolicyError(
            f"{where}policy {word} declares no fragments; write in it, for example: "
            'fragments = {"actors": ("env", "actor"), "learner": ("buffer", "learner")}'
        )
    for fragment, components in cls.fragments.items():
        if not isinstance(components, (tuple, list)) or not components:
            write = f"({components!r},)" if isinstance(components, str) else "a tuple of components"
            raise PolicyError(f"{where}policy {word}: fragment {fragment!r} is {components!r}; write {write}")
    bundled = POLICIES.get(cls.name)
    if bundled is not None and bundled.fragments != cls.fragments:
        raise PolicyError(f"{where}policy {word} has the name of a bundled one, {cls.name!r}; give it another")
    try:
        cls.check()
    except PolicyError as error:
        raise PolicyError(f"{where}{error}") from error
    return cls


def find_engine(name: str) -> str:
    """The engine's own spelling of `name`."""
    for engine in ENGINES:
        if plain(engine) == plain(name):
            return engine
    raise UsageError(f"no engine {name!r}; {did_you_mean(name, ENGINES)}")


def find_storage(name: str) -> str:
    """The replay storage's own spelling of `name`."""
    for storage in STORAGES:
        if plain(storage) == plain(name):
            return storage
    raise UsageError(f"no replay storage {name!r}; {did_you_mean(name, STORAGES)}")


# ---- looking into files


def plain(name: str) -> str:
    """A name without case, hyphens and underscores, so that Sharded-Replay is sharded_replay."""
    return name.lower().replace("-", "").replace("_", "")


def pick(name: str, sources: list[Any], kind: str) -> Any:
    """The source of that name, however it is spelled."""
    for source in sources:
        if plain(name) in (plain(source.name), plain(source.class_name)):
            return source
    raise UsageError(f"no {kind} {name!r}; {did_you_mean(name, [source.name for source in sources])}")


def split_file(name: str) -> tuple[Path, str] | None:
    """`FILE.py:CLASS` as file and class (empty if left out); None for what is no file name."""
    file, _, class_name = name.rpartition(":") if ".py:" in name else (name, "", "")
    if not file.endswith(".py"):
        if "/" in name or ":" in name:
            raise UsageError(f"{name!r} is no Python file; write FILE.py:CLASS")
        return None
    path = Path(file).expanduser()
    if path.is_dir():
        raise UsageError(f"{file!r} is a folder; write FILE.py:CLASS")
    if not path.is_file():
        near = [str(other) for other in path.parent.glob("*.py") if other.is_file()] if path.parent.is_dir() else []
        raise UsageError(f"no file {file!r}" + (f"; {did_you_mean(file, near)}" if near else ""))
    return path.resolve(), class_name


def package_files(package: str) -> list[Path]:
    """The Python files of a bundled package."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return sorted(file for folder in folders for file in Path(folder).glob("*.py") if not file.stem.startswith("_"))


def parse_file(file: Path) -> ast.Module:
    """The parsed file; one that does not parse is named with its line and a caret."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        if error.lineno is None:  # bytes that are no text
            raise UsageError(f"{file}: cannot be read as Python: {error.msg}") from error
        line, column = (error.text or "").rstrip("\n"), max((error.offset or 1) - 1, 0)
        shown = f"\n    {line}\n    {' ' * column}^" if line else ""
        raise UsageError(f"{file}:{error.lineno}:{column + 1}: does not parse: {error.msg}{shown}") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"{file}: cannot be read as Python: {error}") from error


def classes_in(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """The classes of a module by name, those in functions left out."""
    found: dict[str, ast.ClassDef] = {}
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            waiting += ast.iter_child_nodes(node)
    return found


def base_names(node: ast.ClassDef) -> list[str]:
    """The last word of each base: Trainer for `Trainer`, `fdg.Trainer` and `Trainer[Config]`."""
    words = []
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        words.append(base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", ""))
    return words


def names_of(item: ast.Assign) -> list[ast.Name]:
    return [target for target in item.targets if isinstance(target, ast.Name)]


def class_attribute(node: ast.AST, name: str) -> str:
    """The string a class body assigns to `name`, or an empty one."""
    for item in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
        targets = names_of(item) if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        value = getattr(item, "value", None)
        if any(getattr(target, "id", "") == name for target in targets) and isinstance(value, ast.Constant):
            return str(value.value)
    return ""


def annotation_of(node: ast.ClassDef, name: str) -> str:
    """The type that a class body declares for `name`, as written; empty if it does not."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and getattr(item.target, "id", "") == name:
            return ast.unparse(item.annotation)
    return ""


def first_line(node: ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def import_file(file: str) -> ModuleType:
    """Import a file of the user's, as `python FILE` would see it: its own folder comes first on the path.

    Raises:
        UsageError: names the line that raised, if one does.
    """
    path = Path(file)
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"fdg_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (Exception, SystemExit)):
            raise import_failed(str(path), error) from error
        raise
    return module
