"""Checkpoints: a run's state as a file that is whole or not there, and that never runs code when it is read.

    <run folder>/checkpoints/00000120.fdg        the state after 120 turns of the outer loop

    header    magic, version of the format, length and sha256 of what follows
    payload   torch's own format, of plain data alone (see `snapshot`), read with weights_only

A checkpoint is written beside its place and then renamed, so that one which fails half way (a full disk, a kill) leaves
the one before as it was.

    write(run_folder, 120, {"learner": state_of(learner), "values": encode({"td": td})})
    state = load(latest(run_folder))
    restore(learner, state["learner"])
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fdg.errors import CheckpointError
from fdg.runtime.snapshot import Adapter, Data, decode, encode, restore, state_of

__all__ = [
    "Adapter",
    "Data",
    "checkpoints",
    "decode",
    "encode",
    "latest",
    "load",
    "restore",
    "save",
    "state_of",
    "write",
]

MAGIC = b"FDG checkpoint\n\0"
FORMAT = 1
"""The version of the format that this code writes, and the newest it reads."""
KEEP = 2
"""Checkpoints of a run that are kept."""
FOLDER, SUFFIX = "checkpoints", ".fdg"
_HEADER = struct.Struct("<16sIQ32s")
_BLOCK = 1 << 20


def write(run_folder: str | Path, number: int, state: dict[str, Any], *, keep: int = KEEP) -> Path:
    """Save a run's state as its checkpoint of that number, then remove all but the newest `keep`.

    Raises:
        CheckpointError: a value cannot be saved, or the disk does not take it; older checkpoints are as they were.
    """
    folder = Path(run_folder) / FOLDER
    path = folder / f"{number:08d}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {folder}: {error.strerror}") from error
    save(path, state)
    for old in (*checkpoints(folder)[:-keep], *folder.glob(f".*{SUFFIX}.tmp")):
        old.unlink(missing_ok=True)
    return path


def latest(run_folder: str | Path) -> Path:
    """The newest checkpoint of a run; a path to a checkpoint itself is returned as it is.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(run_folder)
    if folder.is_file():
        return folder
    found = checkpoints(folder / FOLDER)
    if not found:
        what = "has no checkpoints" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{folder} {what}: name a run folder that was written with --checkpoint-every N")
    return found[-1]


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write a state, all or nothing. It holds what `encode` takes: the data of `state_of` and `encode` among others.

    Raises:
        CheckpointError: a value cannot be saved, or the disk does not take it; what was at `path` is as it was.
    """
    path = Path(path)
    data = encode(state, copy=False)
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{SUFFIX}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(bytes(_HEADER.size))
            sink = _Sink(file)
            torch.save(data, sink)  # type: ignore[arg-type]
            if sink.error is not None:
                raise sink.error
            file.seek(0)
            file.write(_HEADER.pack(MAGIC, FORMAT, sink.length, sink.digest.digest()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name too must survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be written: {error.strerror or error}; the one before it is as it was. Make "
            "room, or write to another disk with --log-dir"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | Path) -> dict[str, Any]:
    """Read a state. No code in the file is run, whatever it holds.

    Raises:
        CheckpointError: there is no such file, or it is damaged, no checkpoint, or of a newer version of FDG.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            _check(file, path)
            payload: Any = _Payload(file)
            data = torch.load(payload, weights_only=True, map_location="cpu")
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:  # its sum is right: it was made to be like this
        raise CheckpointError(
            f"{path} is refused: it holds more than plain data ({str(error).splitlines()[0][:200]})"
        ) from error
    if not isinstance(data, dict) or data.keys() != {"root", "objects", "storages"}:
        raise CheckpointError(f"{path} is no checkpoint of FDG: it holds a {type(data).__name__} of another form")
    return decode(data, copy=False)


def _check(file: BinaryIO, path: Path) -> None:
    """Refuse a file that is not what was written."""
    header = file.read(_HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
        begins = f"it begins with {header[:16]!r}" if header else "it is empty"
        raise CheckpointError(f"{path} is no checkpoint of FDG: {begins}")
    other = _another(path)
    if len(header) < _HEADER.size:
        raise CheckpointError(f"the checkpoint {path} is damaged: it ends after {len(header)} bytes{other}")
    _, version, length, digest = _HEADER.unpack(header)
    if version > FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {version}, and this FDG reads up to {FORMAT}: resume with the FDG that wrote it"
        )
    size = os.fstat(file.fileno()).st_size - _HEADER.size
    if size != length:
        raise CheckpointError(f"the checkpoint {path} is damaged: {size} bytes of {length} are there{other}")
    sum_ = hashlib.sha256()
    while block := file.read(_BLOCK):
        sum_.update(block)
    if sum_.digest() != digest:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: its sha256 is {sum_.hexdigest()[:16]}…, {digest.hex()[:16]}… was written{other}"
        )


def _another(path: Path) -> str:
    """The end of a sentence: which checkpoint to take instead."""
    others = [other for other in checkpoints(path.parent) if other != path]
    return f"; the one before is {others[-1]}: write --resume {others[-1]}" if others else ""


class _Sink:
    """Takes what torch writes, and adds it up. After an error it takes and forgets: torch has no way back from one."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.length, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        data = memoryview(data)
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
            self.digest.update(data)
            self.length += data.nbytes
        return data.nbytes

    def flush(self) -> None:
        pass


class _Payload(io.RawIOBase):
    """The part of a file behind the header, as a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        file.seek(_HEADER.size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.file.readinto(buffer)  # type: ignore[attr-defined]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset + (_HEADER.size if whence == os.SEEK_SET else 0), whence) - _HEADER.size

    def tell(self) -> int:
        return self.file.tell() - _HEADER.size
