"""The one tree of errors a user can meet: each says what is wrong, where, the value seen, and what to write instead."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import sysconfig
import traceback
from collections.abc import Iterable, Sequence


class FdgError(Exception):
    """Any failure that FDG itself reports."""


class UsageError(FdgError):
    """A name, flag, value or file the user gave cannot be used; the command line exits with code 2."""


class CompileError(UsageError):
    """A trainer that cannot be projected onto the policy's fragments.

    Carries the place in the user's source; printing it shows the line with a caret below the expression, then `notes`:
    how it came about, step by step.
    """

    def __init__(
        self,
        reason: str,
        *,
        file: str = "",
        line: int = 0,
        column: int = 0,
        source: str = "",
        hint: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        self.reason, self.file, self.line, self.column = reason, file, line, column
        self.source, self.hint, self.notes = source.rstrip(), hint, list(notes)
        where = f"{file}:{line}:{column + 1}: " if file else ""
        lines = [f"{where}{reason}"]
        if self.source:
            lines += [f"    {self.source}", "    " + " " * column + "^"]
        lines += self.notes
        if hint:
            lines.append(f"write instead: {hint}")
        super().__init__("\n".join(lines))


class PolicyError(UsageError):
    """A distribution policy that does not fit the program."""


class LearnerError(CompileError, PolicyError):
    """A learner whose `learn` cannot be split by rows, under a policy that has several learners."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be written, read, or brought into the program as it is."""


class GraphError(FdgError):
    """A graph that cannot be executed: an edge or region the program needs is not in it."""


class RunError(FdgError):
    """A run that could not go on."""


class WorkerLost(RunError):
    """A worker process has ended; the run goes on from its last checkpoint."""


MANY = 20


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The sentence that follows an unknown name: the nearest valid one, and all of them if they are few.

    >>> did_you_mean("dqm", ["dqn", "reinforce"])
    "did you mean 'dqn'? (known: dqn, reinforce)"
    """
    known = sorted(choices)
    words = {choice.lower().lstrip("-"): choice for choice in known}  # dashes make all flags alike
    near = difflib.get_close_matches(name.lower().lstrip("-"), words, n=1, cutoff=0.5)
    listing = f"known: {', '.join(known)}"
    if not near:
        return listing
    return f"did you mean {words[near[0]]!r}?" + (f" ({listing})" if len(known) <= MANY else "")


# ---- errors in the user's own code


def debugging() -> bool:
    """True if whole tracebacks are wanted: FDG_DEBUG=1."""
    return os.environ.get("FDG_DEBUG", "0") not in ("", "0")


@functools.cache
def own_folders() -> tuple[str, ...]:
    """Where FDG itself stands; the bundled algorithms are not among them, they are read like a user's."""
    found = [os.path.dirname(__file__)]
    for name in ("fdg.runtime", "fdg.policies"):
        spec = importlib.util.find_spec(name)
        found += spec.submodule_search_locations or [] if spec else []
    return tuple(f"{folder}{os.sep}" for folder in found)


def is_users(file: str) -> bool:
    """True for a file that is neither FDG's, nor Python's, nor an installed library's."""
    if file.startswith(("<", sysconfig.get_paths()["stdlib"], *own_folders())):
        return False
    return not {"site-packages", "dist-packages"} & set(file.split(os.sep))


def users_traceback(error: BaseException) -> str:
    """The traceback from the user's first line on, without FDG's own frames between the user's.

    Of what a library did below the user's last line only the end is shown.
    """
    whole = traceback.TracebackException.from_exception(error)
    waiting: list[traceback.TracebackException | None] = [whole]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        waiting += [part.__cause__, part.__context__]
        users = [index for index, frame in enumerate(part.stack) if is_users(frame.filename)]
        if users:
            part.stack = traceback.StackSummary.from_list(
                frame
                for index, frame in enumerate(part.stack)
                if index == len(part.stack) - 1
                or (users[0] <= index <= users[-1] and not frame.filename.startswith(own_folders()))
            )
    return "".join(whole.format())


def users_place(error: BaseException) -> str:
    """The line of the user's whose component call was refused, to stand below the message; empty for other errors."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [index for index, frame in enumerate(frames) if is_users(frame.filename)]
    if not users or users[-1] + 1 == len(frames) or not frames[users[-1] + 1].filename.endswith("msrl.py"):
        return ""
    frame = frames[users[-1]]
    return f"\n  at {frame.filename}:{frame.lineno}: {frame.line}"


def import_failed(file: str, error: BaseException) -> UsageError:
    """The refusal of a user's file that raised while it was imported: the line that did, in whichever file it stands."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    place, line, source = (frames[-1].filename, frames[-1].lineno, frames[-1].line) if frames else (file, 1, "")
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        place, line, source = error.filename or place, error.lineno or line, (error.text or "").strip()
        reason = f"{type(error).__name__}: {error.msg}"
    of = "" if place == file else f" of {os.path.basename(file)}"
    shown = f"\n    {source}" if source else ""
    return UsageError(f"{place}:{line}: the import{of} failed: {reason}{shown}")
