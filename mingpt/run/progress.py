"""The progress of a run, and the results of its newest step."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from mingpt.snapshot.format import Best, Lowest


@dataclass
class Progress:
    """The progress of a run. With the state of model and optimizer, it is everything that a run needs to continue.

    Attributes:
        step: finished optimizer steps
        samples: number of sequences in these steps
        val_loss: validation loss of this step, in nats per character; None: not evaluated, or not yet
        best: the saved snapshot with the lowest validation loss
        lowest: the evaluation with the lowest validation loss; its snapshot may not have been saved
    """

    step: int = 0
    samples: int = 0
    val_loss: float | None = None
    best: Best = field(default_factory=lambda: Best(step=None, val_loss=math.inf))
    lowest: Lowest = field(default_factory=lambda: Lowest(step=0, val_loss=math.inf, evaluations_since=0))

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any], text_sha256: str) -> None:
        """Loads the header of a snapshot.

        Args:
            text_sha256: digest of this run's text. If it differs from the snapshot's, the best snapshot and the lowest
                validation loss are not loaded, since losses on two texts do not compare.
        """
        self.step = state["step"]
        self.samples = state["samples"]
        self.val_loss = state["val_loss"]
        self.lowest["step"] = self.step
        if state["text_sha256"] != text_sha256:
            return
        self.best = state.get("best", self.best)  # snapshots of earlier versions may lack these entries
        self.lowest |= state.get("lowest", {})

    def set_val_loss(self, val_loss: float, counts: bool) -> None:
        """Sets the validation loss of this step.

        Args:
            counts: trainer.patience counts the evaluation: trainer.eval_every was the reason for it, not the run's end
        """
        self.val_loss = val_loss
        self.lowest["evaluations_since"] += int(counts)
        if val_loss < self.lowest["val_loss"]:
            self.lowest = Lowest(step=self.step, val_loss=val_loss, evaluations_since=0)


class StepResult(NamedTuple):
    """The results of an optimizer step. Tensors are on the device."""

    batch: range  # its sample numbers, of all ranks together
    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float
