"""Files that a command writes because the user asked for them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from fdg.errors import RunError, UsageError


def check_writable(path: Path, folder: bool = False) -> None:
    """Refuse a file (or folder) that could not be written, now and not after an hour of training."""
    if path.exists() and path.is_dir() != folder:
        raise UsageError(f"{path} cannot be written: it is a {'file' if folder else 'folder'}")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    try:
        if there.is_dir():
            tempfile.TemporaryFile(dir=there).close()
        else:
            there.open("a" if there == path.absolute() else "x").close()
    except OSError as error:
        reason = "that is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"{path} cannot be written: {there}: {reason}") from error


def write(file: Path, text: str, quiet: bool = False) -> None:
    """Write a file that the user asked for; a folder made for it is named."""
    try:
        if not file.parent.exists():
            file.parent.mkdir(parents=True)
            if not quiet:
                typer.echo(f"made the folder {file.parent}", err=True)
        file.write_text(text)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error
