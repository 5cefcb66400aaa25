"""The one tree of errors a user can meet: each says what is wrong, where, the value seen, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FdgError(Exception):
    """Any failure that FDG itself reports."""


class UsageError(FdgError):
    """A name, flag, value or file the user gave cannot be used; the command line exits with code 2."""


class CompileError(UsageError):
    """A trainer that cannot be projected onto the policy's fragments.

    Carries the place in the user's source; printing it shows the line with a caret below the expression.
    """

    def __init__(
        self, reason: str, *, file: str = "", line: int = 0, column: int = 0, source: str = "", hint: str = ""
    ) -> None:
        self.reason, self.file, self.line, self.column = reason, file, line, column
        self.source, self.hint = source.rstrip(), hint
        where = f"{file}:{line}:{column + 1}: " if file else ""
        lines = [f"{where}{reason}"]
        if self.source:
            lines += [f"    {self.source}", "    " + " " * column + "^"]
        if hint:
            lines.append(f"write instead: {hint}")
        super().__init__("\n".join(lines))


class PolicyError(UsageError):
    """A distribution policy that does not fit the program."""


class GraphError(FdgError):
    """A graph that cannot be executed: an edge or region the program needs is not in it."""


class RunError(FdgError):
    """A run that could not go on."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The sentence that follows an unknown name: the nearest valid one, or all of them.

    >>> did_you_mean("dqm", ["dqn", "reinforce"])
    "did you mean 'dqn'? (known: dqn, reinforce)"
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name.lower(), [choice.lower() for choice in known], n=1, cutoff=0.5)
    listing = f"known: {', '.join(known)}"
    if not near:
        return listing
    best = next(choice for choice in known if choice.lower() == near[0])
    return f"did you mean {best!r}? ({listing})"
