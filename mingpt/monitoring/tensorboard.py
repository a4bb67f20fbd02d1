"""TensorBoard's event files, written row by row.

SummaryWriter writes in a thread, which a full disk ends for good, and names files by second and process id, while
TensorBoard reads files in the order of their names and never goes back: it would miss the file of a run that resumes
within the same second, or after the clock was set back. Here each file gets a number above those before it.
"""

import io
import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")


class EventFile:
    """An event file in a folder, which TensorBoard reads after those that are there already.

    After an error, the next row begins another file, since the end of this one may be torn.

    Args:
        purge_step: TensorBoard hides this step and later ones of earlier files

    Raises:
        OSError: it can't be written; from the other methods too.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        self.folder = folder
        self.file: io.FileIO | None = None
        self._open()
        start = SessionLog(status=SessionLog.START)
        self._write_event(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, *(summary.scalar(name, value) for name, value in values.items()))

    def add_text(self, step: int, name: str, text: str) -> None:
        """Adds a text in Markdown."""
        self._write(step, summary.text(name, text))

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
            self.file = None

    def _open(self) -> None:
        numbers = [int(match[1]) for name in os.listdir(self.folder) if (match := FILE_NAME.fullmatch(name))]
        number = max([int(time.time()), *(number + 1 for number in numbers)])
        name = f"events.out.tfevents.{number:010d}.{platform.node()}"
        self.file = io.FileIO(self.folder / name, "x")
        self._write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _write(self, step: int, *summaries: Any) -> None:
        if self.file is None:
            self._open()
        for each in summaries:
            self._write_event(Event(wall_time=time.time(), step=step, summary=each))

    def _write_event(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        try:
            written = self.file.write(record.getvalue())  # type: ignore[union-attr]
            if written != len(record.getvalue()):
                raise OSError(f"{written} bytes of {len(record.getvalue())} written")
        except OSError:
            self.close()
            raise
