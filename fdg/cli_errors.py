"""How a command fails: one message on stderr, and an exit code.

code    for
1       what went wrong while running, or a difference that was asked for
2       what the user gave
130     an interrupt
"""

from __future__ import annotations

import os
import select
import signal
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from fdg.errors import FdgError, UsageError, debugging, users_place, users_traceback


class Commands(TyperGroup):
    """The commands, with one way to fail: a message on stderr, code 2 for what the user gave, 1 for the rest.

    Of an error in the user's running code the traceback is shown, from the user's first line on.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--trace` may come without a file, and `--set` with several values, which Typer has no word for."""
        words: list[str] = []
        setting = False
        """Whether what stands here belongs to a `--set`."""
        for at, word in enumerate(args):
            if word == "--trace" and (at + 1 == len(args) or args[at + 1].startswith("-")):
                word = "--trace="
            if setting and words[-1] != "--set" and "=" in word and not word.startswith("-"):
                words.append("--set")
            words.append(word)
            setting = word == "--set" or (setting and "=" in word and not word.startswith("-"))
        return super().parse_args(ctx, words)

    def invoke(self, ctx: Any) -> Any:
        interrupts: list[int] = []

        def interrupt(number: int, frame: Any) -> None:
            interrupts.append(number)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            if interrupts or isinstance(
                error, KeyboardInterrupt
            ):  # a library on the way may have made another exception of it
                typer.echo("interrupted", err=True)
                raise typer.Exit(130) from None
            if isinstance(error, BrokenPipeError) and not read(1):  # fdg list | head -1
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise typer.Exit(1) from None
            if isinstance(error, MemoryError):
                error = UsageError(f"out of memory: {error}; use fewer --actors or --envs, or a smaller --buffer-size")
            if isinstance(error, FdgError):
                if debugging():
                    traceback.print_exception(error)
                typer.echo(f"error: {error}{users_place(error)}", err=True)
                raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort) or debugging():  # Typer's own, or raw
                raise
            typer.echo(users_traceback(error), err=True, nl=False)
            raise typer.Exit(1) from None
        finally:
            signal.signal(signal.SIGINT, before)


def read(descriptor: int) -> bool:
    """Whether somebody still reads what is written there."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))
