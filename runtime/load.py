"""Load generated code: from the graph or, where the user edited it, from the file; tracebacks end in the user's lines.

Generated classes are kept as files in a cache folder (`FDG_CACHE`, by default ~/.cache/fdg), one folder per graph. What
stands there is what runs: an edited file is used as it is.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from fdg.graph import Graph
from fdg.runtime.values import UNBOUND

LineMap = list[tuple[int, str, int]]


def cache_folder(graph: Graph) -> Path:
    root = os.environ.get("FDG_CACHE") or Path.home() / ".cache" / "fdg"
    return Path(root) / graph.hash()[:16]


def write_sources(graph: Graph) -> dict[str, Path]:
    """Write the generated code where it is not yet; returns the files by fragment name."""
    folder = cache_folder(graph)
    sources = {"driver": graph.driver, **{name: fragment.source for name, fragment in graph.fragments.items()}}
    files = {}
    for name, source in sources.items():
        files[name] = folder / f"{name}.py"
        if not files[name].exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = files[name].with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(source)
            partial.replace(files[name])
    return files


def load_class(trainer: type, source: str, line_map: LineMap, file: Path) -> Any:
    """The generated class, as a subclass of the user's trainer."""
    text = file.read_text() if file.exists() else source
    tree = ast.parse(text, str(file))
    edited = text != source
    owners = {} if edited else _map_lines(tree, line_map)
    names = _outer_names(trainer)
    # A factory whose parameters are the names that the user's module does not have: enclosing variables, classes.
    factory = ast.parse(f"def _make({', '.join(names)}):\n    pass")
    function = factory.body[0]
    assert isinstance(function, ast.FunctionDef)
    class_node = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    function.body = [class_node, ast.Return(ast.Name(class_node.name, ast.Load()))]
    ast.fix_missing_locations(factory)
    compiled = compile(factory, str(file), "exec", dont_inherit=True, flags=_future_flags(trainer))
    if owners:
        compiled = _set_files(compiled, owners, str(file))
    module = sys.modules.get(trainer.__module__)
    namespace = vars(module) if module is not None else {}
    if not namespace:
        namespace = _functions(trainer)[0].__globals__
    scratch: dict[str, Any] = {}
    exec(compiled, namespace, scratch)
    generated = scratch["_make"](*names.values())
    _give_globals(generated, trainer, owners)
    generated.__name__, generated.__qualname__ = trainer.__name__, trainer.__qualname__  # as the user's code knows it
    return generated


def _give_globals(generated: type, trainer: type, owners: dict[str, str]) -> None:
    """A method that stems from a base class in another module sees that module's names."""
    homes = {function.__code__.co_filename: function.__globals__ for function in reversed(_functions(trainer))}
    for name, file in owners.items():
        function = vars(generated)[name]
        home = homes.get(file)
        if home is not None and home is not function.__globals__:
            moved = FunctionType(function.__code__, home, name, function.__defaults__, function.__closure__)
            moved.__kwdefaults__, moved.__doc__ = function.__kwdefaults__, function.__doc__
            setattr(generated, name, moved)


def _functions(trainer: type) -> list[Any]:
    return [value for cls in trainer.__mro__ for value in vars(cls).values() if inspect.isfunction(value)]


def _outer_names(trainer: type) -> dict[str, Any]:
    """Names that generated code may use and that are not in the user's module: classes and enclosing variables."""
    names: dict[str, Any] = {"_unbound": UNBOUND}
    for cls in reversed(trainer.__mro__[:-1]):
        names[cls.__name__] = cls
    for function in _functions(trainer):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                try:
                    names[name] = cell.cell_contents
                except ValueError:
                    continue
    return names


def _future_flags(trainer: type) -> int:
    import __future__

    module = sys.modules.get(trainer.__module__)
    return __future__.annotations.compiler_flag if module is not None and hasattr(module, "annotations") else 0


def _map_lines(tree: ast.Module, line_map: LineMap) -> dict[str, str]:
    """Move every node to the user's line; returns the user's file for each generated method."""
    places = {line: (file, origin) for line, file, origin in line_map}
    owners = {}
    for class_node in tree.body:
        if not isinstance(class_node, ast.ClassDef):
            continue
        for function in class_node.body:
            if not isinstance(function, ast.FunctionDef):
                continue
            owners[function.name] = places.get(function.lineno, ("", 0))[0]
            last = places.get(function.lineno, ("", 1))
            nodes: Iterator[Any] = ast.walk(function)
            for node in nodes:
                if not hasattr(node, "lineno"):
                    continue
                last = places.get(node.lineno, last)
                end = places.get(node.end_lineno or node.lineno, last)
                text = linecache.getline(last[0], last[1]).rstrip("\n")
                node.lineno, node.end_lineno = last[1], max(end[1], last[1])
                node.col_offset = len(text) - len(text.lstrip())
                node.end_col_offset = max(len(text), node.col_offset + 1)
                if node.end_lineno != node.lineno:
                    node.end_lineno = node.lineno
    return owners


def _set_files(code: CodeType, owners: dict[str, str], fallback: str) -> CodeType:
    """Give each method's code the name of the user's file it stems from."""

    def visit(inner: CodeType, file: str | None) -> CodeType:
        here = owners.get(inner.co_name, file) if file is None else file
        constants = tuple(visit(const, here) if isinstance(const, CodeType) else const for const in inner.co_consts)
        return inner.replace(co_consts=constants, co_filename=here or fallback)

    return visit(code, None)
