"""The documentation is true: files on a page run, commands print what the page says, docstring examples hold.

Comments in a page, invisible to its readers, say what the block below them is:

    <!-- file: NAME -->                     a part of the file NAME; blocks of one name, in order, are the whole file
    <!-- output of: COMMAND -->             what the command prints in the folder of the page's files
    <!-- excerpt of: PATH CLASS.METHOD -->  a method in a file of the repository
    <!-- run: ABOUT -->                     commands that succeed, one per line; those of a page in order, in one folder

`make docs` (python tests/test_docs.py) writes outputs and excerpts of all pages anew.
"""

from __future__ import annotations

import ast
import doctest
import glob
import importlib
import os
import pkgutil
import re
import sys
import tempfile
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fdg
from fdg.cli import app
from fdg.registry import import_file
from fdg.runtime.forkserver import forkserver
from fdg.testing import assert_policies_equal

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^<!-- (file|output of|excerpt of|run): (.*?) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
POLICIES = ("single_learner_coarse", "sharded_replay", "single_learner_fine")


def write_files(page: Path, folder: Path) -> list[Path]:
    """Put the files of a page into a folder."""
    files: dict[str, str] = {}
    for kind, name, body in BLOCK.findall(page.read_text()):
        if kind == "file":
            files[name] = files.get(name, "") + body
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def outputs(page: Path) -> list[tuple[str, str]]:
    """The commands of a page and what it says they print."""
    return [(command, body) for kind, command, body in BLOCK.findall(page.read_text()) if kind == "output of"]


def invoke(command: str, folder: Path) -> Result:
    """Run an fdg command in a folder; names with a * stand for the files there, as in a shell."""
    program, *words = command.split()
    assert program == "fdg", f"{command}: only fdg commands are run"
    here = Path.cwd()
    os.chdir(folder)
    try:
        arguments = [name for word in words for name in (sorted(glob.glob(word)) if "*" in word else [word])]
        return CliRunner().invoke(app, arguments)
    finally:
        os.chdir(here)


def run(command: str, folder: Path) -> str:
    """What an fdg command prints in a folder."""
    return invoke(command, folder).output.replace(f"{folder.resolve()}/", "")


def excerpt(place: str) -> str:
    """The source of a method, given as PATH CLASS.METHOD."""
    path, _, name = place.partition(" ")
    text = (ROOT / path).read_text()
    class_name, _, method = name.partition(".")
    (owner,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    (found,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return textwrap.dedent("\n".join(text.splitlines()[found.lineno - 1 : found.end_lineno])) + "\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import from; its modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


COMMANDS = [(page.name, page, command, shown) for page in PAGES for command, shown in outputs(page)]


@pytest.mark.parametrize("page, command, shown", [c[1:] for c in COMMANDS], ids=[f"{c[0]}: {c[2]}" for c in COMMANDS])
def test_commands_print_what_the_page_shows(page: Path, command: str, shown: str, folder: Path) -> None:
    write_files(page, folder)
    assert run(command, folder) == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_succeed(page: Path, folder: Path) -> None:
    write_files(page, folder)
    blocks = [body for kind, _, body in BLOCK.findall(page.read_text()) if kind == "run"]
    with forkserver() if blocks else nullcontext():
        for command in "".join(blocks).splitlines():
            done = invoke(command, folder)
            assert done.exit_code == 0, f"{command}\n{done.output}"


def test_the_example_trains_alike_under_every_policy(folder: Path) -> None:
    write_files(ROOT / "docs" / "writing-algorithms.md", folder)
    module = import_file(str(folder / "actor_critic.py"))
    for actors in (1, 2):
        assert_policies_equal(
            module.ActorCritic, POLICIES, actors=actors, envs=2, iterations=3, steps=5, evaluate_every=2
        )


@pytest.mark.parametrize(
    "name, refused, remedy",
    [
        ("longer.py:Longer", 'td["next", "reward"].mean()', 'self.msrl.mean(td["next", "reward"])'),
        ("until_done.py:UntilDone", "while not done.all()", "while not self.msrl.all(done)"),
        (
            "until_done.py:UntilDone",
            '                self.msrl.log(i, reward=td["next", "reward"])\n                td = step_mdp(td)\n',
            "                td = step_mdp(td)\n            self.msrl.log(i, rows=td.numel())\n",
        ),
    ],
)
def test_what_the_page_says_to_write_instead_runs(name: str, refused: str, remedy: str, folder: Path) -> None:
    write_files(ROOT / "docs" / "writing-algorithms.md", folder)
    file, _, class_name = name.partition(":")
    text = (folder / file).read_text()
    assert refused in text
    (folder / file).write_text(text.replace(refused, remedy))
    trainer = getattr(import_file(str(folder / file)), class_name)
    assert_policies_equal(trainer, POLICIES, actors=2, envs=2, iterations=2, steps=5)


def test_the_variant_of_dqn_trains_alike_under_every_policy(folder: Path) -> None:
    write_files(ROOT / "docs" / "writing-algorithms.md", folder)
    trainer = import_file(str(folder / "greedy_at_the_end.py")).GreedyAtTheEnd
    assert_policies_equal(trainer, POLICIES, actors=2, envs=2, iterations=4, learning_starts=8, batch_size=8, updates=2)


def test_the_normalized_variant_trains_alike_under_every_policy(folder: Path) -> None:
    write_files(ROOT / "docs" / "writing-algorithms.md", folder)
    trainer = import_file(str(folder / "normalized.py")).Normalized
    assert_policies_equal(trainer, (*POLICIES, "multi_learner"), actors=2, envs=2, iterations=3, steps=5)


def test_the_own_policy_runs_the_example(folder: Path) -> None:
    write_files(ROOT / "docs" / "writing-algorithms.md", folder)
    policy = import_file(str(folder / "apart.py")).Apart
    trainer = import_file(str(folder / "actor_critic.py")).ActorCritic
    assert_policies_equal(trainer, [policy], actors=2, envs=2, iterations=2, steps=5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_on_a_page_pass(page: Path, folder: Path) -> None:
    for file in write_files(page, folder):
        if file.name.startswith("test_"):
            module = import_file(str(file))
            for name in [name for name in vars(module) if name.startswith("test_")]:
                getattr(module, name)()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_excerpts_are_what_stands_in_the_file(page: Path) -> None:
    for kind, place, body in BLOCK.findall(page.read_text()):
        if kind == "excerpt of":
            assert excerpt(place) == body, f"{page.name}: {place}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


MODULES = sorted(
    module.name
    for package in ("fdg", "fdg.compiler", "fdg.draw", "fdg.policies", "fdg.runtime", "fdg.algorithms")
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
    if not module.ispkg
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    for test in finder.find(module, name):
        if test.examples:
            failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
            assert not failed, f"{test.name} ({test.filename}:{test.lineno})"


def test_every_public_name_says_what_it_is() -> None:
    for name in fdg.__all__:
        assert getattr(fdg, name).__doc__, name


def renew(page: Path) -> None:
    """Write into a page what its commands print now, and its excerpts as they stand now."""
    with tempfile.TemporaryDirectory() as name:
        write_files(page, Path(name))

        def block(match: re.Match[str]) -> str:
            if match[1] in ("file", "run"):
                return match[0]
            body = run(match[2], Path(name)) if match[1] == "output of" else excerpt(match[2])
            return f"{match[0][: match.start(3) - match.start()]}{body}```"

        page.write_text(BLOCK.sub(block, page.read_text()))


if __name__ == "__main__":
    for page in PAGES:
        renew(page)
