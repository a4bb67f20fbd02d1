"""The progress of a run, and the results of its newest step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from mingpt.snapshot.format import Best


@dataclass
class Progress:
    """The progress of a run. With the state of model and optimizer, it is everything that a run needs to continue.

    Attributes:
        step: finished optimizer steps
        samples: number of sequences in these steps
        val_loss: validation loss of this step, in nats per token; None: not evaluated, or not yet
        best: the evaluation with the lowest validation loss
    """

    step: int = 0
    samples: int = 0
    val_loss: float | None = None
    best: Best = field(default_factory=Best)

    def load_state_dict(self, header: dict[str, Any], text_sha256: str) -> None:
        """Loads the header of a snapshot.

        Args:
            text_sha256: digest of this run's text. If it differs from the snapshot's, `best` is not loaded, since
                losses on two texts are not comparable.
        """
        self.step = header["step"]
        self.samples = header["samples"]
        self.val_loss = header["val_loss"]
        if header["text_sha256"] == text_sha256:
            self.best = Best(**header["best"])

    def set_val_loss(self, val_loss: float, counts: bool) -> None:
        """Sets the validation loss of this step.

        Args:
            counts: whether trainer.patience counts the evaluation, since trainer.eval_every required it
        """
        self.val_loss = val_loss
        self.best.evaluations_since += int(counts)
        if val_loss < self.best.val_loss:
            self.best = Best(self.step, val_loss)


class StepResult(NamedTuple):
    """The results of an optimizer step. Tensors are on the device."""

    batch: range  # sample numbers of all ranks
    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float
