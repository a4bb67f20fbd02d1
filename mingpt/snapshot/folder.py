"""The folder of a run's snapshots: writes, finds and loads them, and deletes those that have expired."""

import errno
import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.config.schema import TrainerConfig
from mingpt.errors import UserError
from mingpt.files import open_regular, replaced_file
from mingpt.monitoring.logging import BAR_OPTIONS, logger
from mingpt.snapshot.format import check_content

SNAPSHOT_NAME = re.compile(r"step_(\d{8})\.pt")
OTHER_NAME = re.compile(r".+\.pt(\.zip)?")  # such as `step_00000080 (1).pt` after a download, or best.pt
# Files that killed processes leave behind. Each name contains a UUID, since the folder may hold other files.
LEFTOVER_NAME = re.compile(rf"{SNAPSHOT_NAME.pattern}\.[0-9a-f]{{32}}\.tmp|[0-9a-f]{{32}}\.mark")
SPARE_STEPS = 100  # scheduled steps to remember beyond `keep`, since the mirror may have older snapshots


class DamagedSnapshotError(Exception):
    """The bytes of the file differ from the written ones."""


@contextmanager
def raise_user_error(problem: str, advice: str) -> Iterator[None]:
    """Turns any exception into a UserError. Each kind of store has its own classes."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem}: {_reason(error)}; {advice}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def snapshot_name(step: int) -> str:
    return f"step_{step:08d}.pt"


def expired_steps(steps: Sequence[int], scheduled: Collection[int], best: int | None, keep: int) -> list[int]:
    """Returns the steps whose snapshots are deleted: all but the newest, the best, and the newest scheduled ones.

    Args:
        steps: steps of whole snapshots, in ascending order
        scheduled: steps that trainer.save_every asked for, or that ended a run
        keep: number of scheduled ones to keep
    """
    stays = {*steps[-1:], best, *[step for step in steps if step in scheduled][-keep:]}
    return [step for step in steps if step not in stays]


class SnapshotFolder:
    """The snapshots of a run: files `step_00000500.pt` in a local folder or at any fsspec URL.

    A file with that name is complete. Scheduled snapshots and the best one are flushed to disk. Of the others, only the
    newest is kept, and it is not flushed: a killed process loses nothing of the page cache, and after a power failure
    the CRC-32 detects damage.

    The methods raise a UserError if the folder can't be read or written.

    Args:
        path: folder or URL
        keep: number of scheduled snapshots to keep
    """

    def __init__(self, path: str, keep: int = 1) -> None:
        problem = f"trainer.snapshot_path: {path} can't be opened"
        with raise_user_error(problem, "it must be a folder, or a URL for fsspec"):
            self.fs, self.root = fsspec.url_to_fs(path)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.path = path.rstrip("/")  # for messages
        self.keep = keep
        self.scheduled: list[int] = []  # steps of the newest scheduled snapshots, including deleted ones
        self.best: int | None = None  # step of the best snapshot that could be saved
        self.whole: set[int] = set()  # steps of files that this process has written or loaded
        self.damaged: set[int] = set()  # steps of damaged files: they are not counted, and are kept for inspection
        self.warned: set[str] = set()  # subjects that a warning has named

    def make(self) -> None:
        """Makes the folder and its parents if they are missing. Deletes local files that killed processes have left."""
        with raise_user_error(
            f"trainer.snapshot_path: {self.path} can't be written", "make it writable, or set another folder"
        ):
            self.fs.makedirs(self.root, exist_ok=True)
        for name in self._names() if self.is_local else []:
            if LEFTOVER_NAME.fullmatch(name):
                self._remove(name)

    def files(self) -> dict[int, str]:
        """Returns the names of all snapshots by step, in ascending order, damaged ones included."""
        matches = map(SNAPSHOT_NAME.fullmatch, self._names())
        return dict(sorted((int(match[1]), match[0]) for match in matches if match))

    def file(self, step: int) -> str:
        """Returns the path of a snapshot, for messages and for `load_snapshot`."""
        return f"{self.path}/{snapshot_name(step)}"

    def other_files(self) -> str:
        """Returns the names of files that look like snapshots, but do not have the name of one."""
        names = [name for name in self._names() if OTHER_NAME.fullmatch(name) and not SNAPSHOT_NAME.fullmatch(name)]
        return ", ".join(sorted(names))

    def _names(self) -> list[str]:
        with raise_user_error(f"{self.path} can't be read", "make it readable, or name another folder"):
            try:
                self.fs.invalidate_cache()  # other processes also write here
                return [os.path.basename(name) for name in self.fs.ls(self.root, detail=False)]
            except FileNotFoundError:
                return []

    def load_newest(self, after: int = -1) -> dict[str, Any] | None:
        """Loads the newest undamaged snapshot. Returns None if there is none.

        Warnings name damaged files, and the older file that is used instead.

        Args:
            after: ignore snapshots up to this step

        Raises:
            UserError: the newest one can't be read.
        """
        tried: set[int] = set()
        # A file that a run has just deleted has a successor, which only a new listing contains.
        while steps := [step for step in self.files() if step > after and step not in tried]:
            step = steps[-1]
            tried.add(step)
            if snapshot := self._load(step):
                if self.damaged:
                    logger.warning(f"{self.file(step)} is used instead")
                return snapshot
        return None

    def _load(self, step: int) -> dict[str, Any] | None:
        """Loads a snapshot. Returns None if it is damaged or was deleted."""
        path = self.file(step)
        with raise_user_error(f"{path} can't be read", "make it readable, move it away, or name another one"):
            try:
                snapshot = load_snapshot(path)
                self.whole.add(step)
                return snapshot
            except FileNotFoundError:
                return None
            except DamagedSnapshotError as error:
                self.damaged.add(step)
                logger.warning(f"{path} is damaged ({error}) and skipped")
                return None

    def is_whole(self, step: int) -> bool:
        """Returns whether a snapshot exists and is undamaged; reads it unless this process has written or loaded it."""
        return step not in self.damaged and (step in self.whole or self._load(step) is not None)

    def resume(self, header: dict[str, Any]) -> None:
        """Prepares the folder for a run that continues from a snapshot, which may be in another folder."""
        self.scheduled = header["scheduled"]
        self.best = header["best_saved"]
        for step in self._expired(header["step"]):  # finds damaged ones that an earlier start has skipped
            try:
                self._load(step)
            except UserError as error:
                self.damaged.add(step)
                logger.warning(str(error))
        self.prune(header["step"])

    def _expired(self, newest: int) -> list[int]:
        whole = [step for step in self.files() if step <= newest and step not in self.damaged]
        return expired_steps(whole, self.scheduled, self.best, self.keep)

    def prune(self, newest: int) -> None:
        """Deletes the snapshots up to step `newest` that are no longer kept, and warns if it can't."""
        try:
            for step in self._expired(newest):
                self._remove(snapshot_name(step))
        except UserError as error:
            self.warn_once("listing", str(error))

    def _remove(self, name: str) -> None:
        try:
            self.fs.rm_file(f"{self.root}/{name}")
        except FileNotFoundError:  # another machine may have deleted it
            pass
        except Exception as error:
            self.warn_once(name, f"trainer.snapshot_path: {self.path}/{name} can't be deleted: {_reason(error)}")

    def warn_once(self, subject: str, message: str) -> None:
        if subject not in self.warned:
            self.warned.add(subject)
            logger.warning(message)

    def write(self, snapshot: dict[str, Any]) -> None:
        """Writes a snapshot to a local folder, then deletes those that are no longer kept.

        Raises:
            UserError: the snapshot can't be written. Existing snapshots are unchanged.
        """
        step = snapshot["step"]
        name = snapshot_name(step)
        is_kept = step in (*snapshot["scheduled"], snapshot["best_saved"])
        problem = f"trainer.snapshot_path: {self.path}/{name} can't be written"
        with raise_user_error(problem, "free disk space, or make the folder writable"):
            try:
                with replaced_file(f"{self.root}/{name}", flush=is_kept) as file:
                    torch.save(snapshot, file)
            except RuntimeError as error:  # on a full disk, it is "unexpected pos 960 vs 896" after an OSError
                raise error.__context__ or error from None
        self.scheduled = snapshot["scheduled"][-self.keep - SPARE_STEPS :]
        self.best = snapshot["best_saved"]
        self.damaged.discard(step)
        self.whole.add(step)
        self.prune(step)


def open_folders(config: TrainerConfig) -> tuple[SnapshotFolder, SnapshotFolder | None]:
    """Returns the local folder of a run's snapshots, and the mirror if trainer.snapshot_path is a URL."""
    local = SnapshotFolder(f"{config.run_dir}/snapshots", config.keep_snapshots)
    if config.snapshot_path is None:
        return local, None
    folder = SnapshotFolder(config.snapshot_path, config.keep_snapshots)
    return (folder, None) if folder.is_local else (local, folder)


def load_snapshot(path: str) -> dict[str, Any]:
    """Checks a file or fsspec URL for damage, and loads it onto the CPU, mapped into memory.

    Raises:
        DamagedSnapshotError: its bytes do not match their CRC-32, or it is not a file of torch.save.
        FileNotFoundError: the file does not exist.
        UserError: the file is whole, but `torch.load` or `check_content` refuses it.
    """
    with local_copy(path) as name, open_regular(name) as file:  # a mapping stays valid after the file is deleted
        check_crc32(name)
        opened = f"/dev/fd/{file.fileno()}"  # torch.load accepts only names in UTF-8, and maps only files with a name
        opened = opened if os.path.exists(opened) else name  # some containers have no /dev/fd
        try:
            snapshot = torch.load(opened, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            # a damaged list of parts, or a damaged header
            if isinstance(error, ValueError) or re.search("PytorchStreamReader|inline_container", str(error)):
                raise DamagedSnapshotError(f"torch.load refuses it: {error}") from error
            reason = re.findall(r"GLOBAL \S+", str(error)) or error  # code in the file, without torch.load's advice
            raise UserError(f"{path} is not damaged, but torch.load refuses it: {reason}") from error
    check_content(snapshot, path)
    return snapshot


def check_crc32(name: str) -> None:
    """Compares the parts of a snapshot, which is a zip archive, with their CRC-32.

    It reads the file, because an error in a mapped file ends the process by SIGBUS instead of raising an OSError. It
    does not check the space between parts and unused fields of headers, which do not change the result of torch.load:
    of 150,000 damaged files (bits, words, pages, truncation), all were refused or bitwise identical when loaded.

    Raises:
        DamagedSnapshotError: names the part.
    """
    bar = {"desc": f"reading {os.path.basename(name)}", "total": os.path.getsize(name), **BAR_OPTIONS}
    with open(name, "rb") as file, tqdm.wrapattr(file, "read", **bar) as shown:
        try:
            with zipfile.ZipFile(shown) as archive:  # type: ignore[call-overload]
                part = archive.testzip()
        except Exception as error:  # zipfile raises a dozen classes
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek to a damaged offset
                raise
            file.seek(0)
            if not b"PK".startswith(file.read(2)):
                raise DamagedSnapshotError("it does not begin like a file of torch.save") from error
            raise DamagedSnapshotError(f"cut short, or damaged in the list of its parts: {error}") from error
    if part is not None:
        raise DamagedSnapshotError(f"the bytes of its part {part} do not match their CRC-32")


@contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Context manager that yields the name of a local file with the bytes of a file or fsspec URL."""
    fs, name = fsspec.url_to_fs(path)
    if isinstance(fs, LocalFileSystem):
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = f"{folder}/snapshot.pt"
        fs.get_file(name, copy)
        yield copy


def fingerprint(tensors: dict[str, Any]) -> str:
    """Returns a digest of tensors by name, which may be nested. It is equal for equal names, shapes, dtypes, bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, dict):
            digest.update(f"{name}/{fingerprint(value)}".encode())
        else:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
