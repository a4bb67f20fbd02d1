"""The progress of a run, and what its newest step has computed."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass
class Progress:
    """The progress of a run: with the state of model and optimizer, all that a run needs to continue.

    Attributes:
        step: finished optimizer steps
        samples: the sequences in them
        val_loss: validation loss of this step, in nats per character; None: not evaluated, or not yet
        best_step: step of the saved snapshot with the lowest validation loss; None: no snapshot has one
        best_val_loss: its validation loss
        lowest_step: step of the evaluation with the lowest validation loss, whose snapshot need not be saved
        lowest_val_loss: its validation loss
    """

    step: int = 0
    samples: int = 0
    val_loss: float | None = None
    best_step: int | None = None
    best_val_loss: float = math.inf
    lowest_step: int = 0
    lowest_val_loss: float = math.inf

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self.samples,
            "val_loss": self.val_loss,
            "best": {"step": self.best_step, "val_loss": self.best_val_loss},
            "lowest": {"step": self.lowest_step, "val_loss": self.lowest_val_loss},
        }

    def load_state_dict(self, state: dict[str, Any], text_sha256: str) -> None:
        """Loads the header of a snapshot.

        Args:
            text_sha256: digest of this run's text. If the snapshot has another, the best snapshot and the lowest
                validation loss are not loaded, since losses on two texts do not compare.
        """
        self.step = state["step"]
        self.samples = state["samples"]
        self.val_loss = state["val_loss"]
        self.lowest_step = self.step
        if state["text_sha256"] != text_sha256:
            return
        if "best" in state:  # snapshots of earlier versions have none
            self.set_best(state["best"])
        if "lowest" in state:
            self.lowest_step = state["lowest"]["step"]
            self.lowest_val_loss = state["lowest"]["val_loss"]

    def set_val_loss(self, val_loss: float) -> None:
        """Sets the validation loss of this step."""
        self.val_loss = val_loss
        if val_loss < self.lowest_val_loss:
            self.lowest_step = self.step
            self.lowest_val_loss = val_loss

    def set_best(self, best: dict[str, Any]) -> None:
        self.best_step = best["step"]
        self.best_val_loss = best["val_loss"]


class StepResult(NamedTuple):
    """What an optimizer step has computed. Tensors are on the device."""

    batch: range  # its sample numbers, of all ranks together
    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float
