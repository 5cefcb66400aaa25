"""Find: where a trainer's source is, which classes it is made of, and what a name in it stands for.

Source is read, not imported, so that a graph can be drawn of a file whose imports are slow. A class object (from a
notebook, a test, a REPL) works too: its source is found through the code of its methods.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from fdg.compiler.tree import find
from fdg.errors import CompileError, UsageError, did_you_mean

ROOTS = {"fdg.Trainer", "fdg.api.Trainer"}


@dataclass(frozen=True)
class Origin:
    """A place in the user's source."""

    file: str
    line: int
    column: int
    end_line: int
    text: str

    def error(self, reason: str, hint: str = "", notes: Sequence[str] = ()) -> CompileError:
        place = {"file": self.file, "line": self.line, "column": self.column, "source": self.text}
        return CompileError(reason, **place, hint=hint, notes=notes)  # type: ignore[arg-type]


@dataclass(eq=False)
class Module:
    """One parsed source file and the names its top level binds."""

    file: str
    tree: cst.Module
    positions: Any
    lines: list[str]
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, cst.FunctionDef] = field(default_factory=dict)
    classes: dict[str, cst.ClassDef] = field(default_factory=dict)
    constants: dict[str, cst.BaseExpression] = field(default_factory=dict)
    state: set[str] = field(default_factory=set)
    """Top-level names that are assigned more than once or declared `global` somewhere: module state."""
    namespace: dict[str, Any] | None = None

    def origin(self, node: cst.CSTNode) -> Origin:
        where = self.positions[node]
        line = where.start.line
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return Origin(self.file, line, where.start.column, where.end.line, text)


@dataclass(eq=False)
class ClassSource:
    """One class of the trainer's line of descent."""

    name: str
    module: Module
    node: cst.ClassDef
    methods: dict[str, cst.FunctionDef]
    properties: set[str]
    free_names: set[str] = field(default_factory=set)


@dataclass(eq=False)
class TrainerSource:
    """A trainer and its bases, most derived first; `bases[0]` is the class itself."""

    name: str
    bases: list[ClassSource]

    @property
    def module(self) -> Module:
        return self.bases[0].module

    def find(self, method: str, after: ClassSource | None = None) -> tuple[ClassSource, cst.FunctionDef] | None:
        """The method that a call resolves to: the first in line, or, for `super()`, the first after a class."""
        start = 0 if after is None else self.bases.index(after) + 1
        for owner in self.bases[start:]:
            if method in owner.methods:
                return owner, owner.methods[method]
        return None


def dotted(node: cst.CSTNode) -> str | None:
    """`a.b.c` as text, or None when the expression is not a chain of names."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr.value}"
    return None


def imported_names(node: cst.Import | cst.ImportFrom, package: str = "") -> dict[str, str]:
    """What an import statement binds: local name -> qualified name."""
    names: dict[str, str] = {}
    if isinstance(node, cst.Import):
        for alias in node.names:
            full = dotted(alias.name) or ""
            if alias.asname:
                names[cst.ensure_type(alias.asname.name, cst.Name).value] = full
            else:
                names[full.split(".")[0]] = full.split(".")[0]
        return names
    if isinstance(node.names, cst.ImportStar):
        return names
    base = _imported_from(node, package)
    for alias in node.names:
        name = cst.ensure_type(alias.name, cst.Name).value
        bound = cst.ensure_type(alias.asname.name, cst.Name).value if alias.asname else name
        names[bound] = f"{base}.{name}" if base else name
    return names


def _imported_from(node: cst.ImportFrom, package: str) -> str:
    base = (dotted(node.module) or "") if node.module else ""
    return ".".join(part for part in (package, base) if part) if node.relative else base


_reading: set[Path] = set()
"""Files whose names are being collected for a star."""


def _star_names(name: str, folder: Path) -> dict[str, str]:
    """What `from NAME import *` binds: of a file beside the user's, or of a module that is loaded; else nothing is known."""
    beside = folder / (name.replace(".", "/") + ".py")
    if beside in _reading:  # two files that import each other
        return {}
    if beside.exists():
        _reading.add(beside)
        try:
            other = parse_module(str(beside))
        finally:
            _reading.discard(beside)
        own = {bound: f"{name}.{bound}" for bound in (*other.functions, *other.classes, *other.constants)}
        return {bound: full for bound, full in {**other.imports, **own}.items() if not bound.startswith("_")}
    loaded = sys.modules.get(name)
    public = getattr(loaded, "__all__", None) or [
        bound for bound in vars(loaded or object) if not bound.startswith("_")
    ]
    return {bound: f"{name}.{bound}" for bound in public}


def _read_top_level(module: Module) -> None:
    """Collect what a module binds; functions are entered only to see their `global` declarations."""
    for declaration in find(module.tree, cst.Global):
        module.state.update(item.name.value for item in declaration.names)
    _read_block(module, module.tree.body)


def _read_block(module: Module, body: Sequence[cst.CSTNode]) -> None:
    for statement in body:
        if isinstance(statement, cst.FunctionDef):
            module.functions[statement.name.value] = statement
        elif isinstance(statement, cst.ClassDef):
            module.classes[statement.name.value] = statement
        elif isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                _read_small(module, small)
        else:  # an `if`, `try` or `with` at the top level
            for block in find(statement, cst.IndentedBlock):
                _read_block(module, block.body)


def _read_small(module: Module, node: cst.CSTNode) -> None:
    if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
        module.imports.update(_star_names(_imported_from(node, _package_of(module.file)), Path(module.file).parent))
    elif isinstance(node, (cst.Import, cst.ImportFrom)):
        module.imports.update(imported_names(node, _package_of(module.file)))
    elif isinstance(node, cst.AugAssign) and isinstance(node.target, cst.Name):
        module.state.add(node.target.value)
    elif isinstance(node, (cst.Assign, cst.AnnAssign)) and node.value is not None:
        targets = [item.target for item in node.targets] if isinstance(node, cst.Assign) else [node.target]
        for target in targets:
            names = (
                [name.value for name in find(target, cst.Name)] if not isinstance(target, cst.Name) else [target.value]
            )
            for name in names:
                if name in module.constants or not isinstance(target, cst.Name):
                    module.state.add(name)
                module.constants.setdefault(name, node.value)


def _package_of(file: str) -> str:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file and getattr(module, "__package__", None):
            return module.__package__ or name
    return ""


def syntax_error(file: str, text: str, message: str) -> CompileError:
    """A file that does not parse, at the place that Python names."""
    line, column = 0, 0
    try:
        ast.parse(text)
    except SyntaxError as found:
        message, line, column = found.msg, found.lineno or 0, max((found.offset or 1) - 1, 0)
    lines = text.splitlines()
    source = lines[line - 1] if 0 < line <= len(lines) else ""
    reason = "this file does not parse: " + message.split("\n")[0]
    return CompileError(reason, file=file, line=line, column=column, source=source)


_parsed: dict[tuple[str, str], Module] = {}


def parse_module(file: str, text: str | None = None, namespace: dict[str, Any] | None = None) -> Module:
    """Parse one source file. A file that does not parse is a CompileError at the place of the mistake."""
    if text is None:
        try:
            text = Path(file).read_text()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
    key = (file, text)
    if key in _parsed:
        return replace(_parsed[key], namespace=namespace)
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        raise syntax_error(file, text, error.message) from None
    module = Module(file, wrapper.module, wrapper.resolve(PositionProvider), text.splitlines(), namespace=namespace)
    _read_top_level(module)
    if len(_parsed) > 64:
        _parsed.clear()
    _parsed[key] = module
    return module


def class_source(module: Module, node: cst.ClassDef) -> ClassSource:
    methods, properties = {}, set()
    for statement in node.body.body:
        if isinstance(statement, cst.FunctionDef):
            methods[statement.name.value] = statement
            marks = {dotted(decorator.decorator) for decorator in statement.decorators}
            if marks & {"property", "functools.cached_property", "cached_property"}:
                properties.add(statement.name.value)
    return ClassSource(node.name.value, module, node, methods, properties)


def from_class(trainer: type) -> TrainerSource:
    """The source of a trainer given as a class object."""
    from fdg.api import Trainer

    modules: dict[str, Module] = {}
    bases = []
    for cls in trainer.__mro__:
        if cls in (Trainer, object):
            continue
        functions: list[Any] = [value for value in vars(cls).values() if isinstance(value, FunctionType)]
        functions += [value.fget for value in vars(cls).values() if isinstance(value, property) and value.fget]
        functions = [inspect.unwrap(function) for function in functions]
        functions = [function for function in functions if function.__qualname__.startswith(cls.__qualname__ + ".")]
        if not functions:
            continue
        code = functions[0].__code__
        file = code.co_filename
        if file not in modules:
            text = "".join(linecache.getlines(file, functions[0].__globals__))
            if not text:
                raise CompileError(
                    f"there is no source to read for class {cls.__qualname__} ({file})",
                    hint="put the trainer in a file (or a notebook cell) and pass that class; code made by exec has no source",
                )
            modules[file] = parse_module(file, text, functions[0].__globals__)
        module, line = modules[file], code.co_firstlineno
        found = None
        for node in find(module.tree, cst.ClassDef):
            where = module.positions[node]
            if node.name.value == cls.__name__ and where.start.line <= line <= where.end.line:
                found = node
        if found is None:
            raise CompileError(f"class {cls.__qualname__} is no longer in {file}: was the file changed after import?")
        source = class_source(module, found)
        for function in functions:
            source.free_names.update(name for name in function.__code__.co_freevars if name != "__class__")
        bases.append(source)
    return TrainerSource(trainer.__name__, bases)


def from_file(file: str, class_name: str) -> TrainerSource:
    """The source of a trainer given as a file and a class name, without importing it."""
    module = parse_module(str(Path(file).resolve()))
    if class_name not in module.classes:
        raise UsageError(f"{file} has no class {class_name!r}; {did_you_mean(class_name, module.classes)}")
    bases: list[ClassSource] = []
    _collect_bases(module, module.classes[class_name], bases)
    return TrainerSource(class_name, bases)


def _collect_bases(module: Module, node: cst.ClassDef, bases: list[ClassSource]) -> None:
    if any(known.node is node for known in bases):
        return
    bases.append(class_source(module, node))
    for argument in node.bases:
        name = dotted(argument.value)
        if name is None:
            continue
        if name in module.classes:
            _collect_bases(module, module.classes[name], bases)
            continue
        head, _, rest = name.partition(".")
        qualified = module.imports.get(head, head) + (f".{rest}" if rest else "")
        if qualified in ROOTS or "." not in qualified:
            continue
        found = _find_class(qualified, Path(module.file).parent)
        if found is not None:
            _collect_bases(found[0], found[1], bases)


def _find_class(qualified: str, folder: Path) -> tuple[Module, cst.ClassDef] | None:
    """A class in another module, found as a file: beside the user's file first, then on the import path."""
    module_name, _, class_name = qualified.rpartition(".")
    beside = folder / (module_name.replace(".", "/") + ".py")
    file: str | None = str(beside) if beside.exists() else None
    if file is None:
        try:
            spec = importlib.util.find_spec(module_name)
        except (ImportError, ValueError):
            spec = None
        file = spec.origin if spec and spec.origin and spec.origin.endswith(".py") else None
    if file is None:
        return None
    module = parse_module(file)
    if class_name in module.classes:
        return module, module.classes[class_name]
    return _find_class(module.imports[class_name], Path(file).parent) if class_name in module.imports else None


_modules: dict[str, Module | None] = {}


def find_function(qualified: str, user: Module) -> tuple[Module, str] | None:
    """A function of the user's in another file; None for libraries and for what is not a plain function."""
    module_name, _, name = qualified.rpartition(".")
    if not module_name or module_name.split(".")[0] in sys.stdlib_module_names:
        return None
    folder = Path(user.file).parent
    beside = folder / (module_name.replace(".", "/") + ".py")
    file: str | None = str(beside) if beside.exists() else None
    if file is None:
        loaded = sys.modules.get(module_name)
        file = getattr(loaded, "__file__", None) if loaded is not None else None
        if file is None and "." not in module_name:
            spec = importlib.util.find_spec(module_name)
            file = spec.origin if spec is not None else None
    if file is None or not file.endswith(".py") or "site-packages" in file or "dist-packages" in file:
        return None
    if file not in _modules:
        try:
            _modules[file] = parse_module(file)
        except UsageError:
            _modules[file] = None
    module = _modules[file]
    return (module, name) if module is not None and name in module.functions else None


def qualified_name(name: str, module: Module, imports: Mapping[str, str] = {}) -> str | None:
    """What a dotted name at module level stands for: `np.random.rand` -> `numpy.random.rand`, `len` -> `builtins.len`.

    `imports` are those of the function that the name stands in: local name -> qualified name.
    """
    head, _, rest = name.partition(".")
    tail = f".{rest}" if rest else ""
    if head in imports:
        return imports[head] + tail
    if head in module.imports:
        return module.imports[head] + tail
    if head in module.functions or head in module.classes or head in module.constants or head in module.state:
        return None
    if module.namespace is not None and head in module.namespace:
        value = module.namespace[head]
        if inspect.ismodule(value):
            return value.__name__ + tail
        if getattr(value, "__module__", None) and getattr(value, "__qualname__", None):
            return f"{value.__module__}.{value.__qualname__}{tail}"
        return None
    if hasattr(builtins, head):
        return f"builtins.{head}{tail}"
    return None
