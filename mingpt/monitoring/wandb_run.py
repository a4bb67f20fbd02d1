"""Weights & Biases: a run there that gets the values of TensorBoard, live."""

import importlib.util
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mingpt.errors import UserError
from mingpt.files import replace_file
from mingpt.monitoring.logging import logger


def check_wandb(project: str | None) -> None:
    """Raises a UserError if there is a project and wandb, which is optional, is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"trainer.wandb_project is {project}, which needs wandb: run `pip install wandb`, or set the key to null"
        )


class WandbRun:
    """A run in a project of Weights & Biases.

    The run folder's `wandb_id` has its id, so that a resumed run continues it. Weights & Biases ignores values of steps
    that it already has.

    Args:
        folder: the run folder, whose path is the name of the run
        config: the configuration, as nested dictionaries

    Raises:
        UserError: wandb can't begin, as without an API key.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = _import_wandb()
        file = folder / "wandb_id"
        run_id = file.read_text() if file.exists() else None
        try:
            self.run = wandb.init(
                project=project,
                id=run_id,
                name=str(folder),
                dir=folder,
                config=dict(config),
                resume="allow",
                settings=wandb.Settings(console="off"),  # it would take the live line for output
            )
        except wandb.Error as error:
            raise UserError(
                f"trainer.wandb_project: {error}; run `wandb login`, set WANDB_MODE=offline in the environment, or set "
                "the key to null"
            ) from error
        self.has_failed = False
        if run_id is None:
            replace_file(file, self.run.id)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._call(lambda: self.run.log(dict(values), step=step))

    def close(self) -> None:
        """Waits until the values are sent."""
        self._call(self.run.finish)

    def _call(self, function: Callable[[], None]) -> None:
        """Calls wandb, unless it has failed before, as when its own process has ended."""
        if self.has_failed:
            return
        try:
            function()
        except Exception as error:  # of several kinds
            self.has_failed = True
            logger.warning(f"trainer.wandb_project: wandb has failed: {error}; training continues without it")


def _import_wandb() -> Any:
    """Imports wandb, without the empty temporary folders that it makes for media files, which are not used here.

    It would remove them when the interpreter exits, which main.py does not wait for.
    """
    usual = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            import wandb  # noqa: PLC0415 - optional, and slow
        finally:
            tempfile.tempdir = usual
    return wandb
