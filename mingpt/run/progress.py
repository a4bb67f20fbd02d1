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

    def load_state_dict(self, header: dict[str, Any], text_sha256: str, eval_windows: int | None) -> None:
        """Loads the header of a snapshot, without `best` if its losses are not comparable with later ones.

        Args:
            text_sha256: digest of this run's text
            eval_windows: this run's trainer.eval_windows
        """
        self.step = header["step"]
        self.samples = header["samples"]
        self.val_loss = header["val_loss"]
        if is_comparable(header, text_sha256, eval_windows):
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


def is_comparable(header: dict[str, Any], text_sha256: str, eval_windows: int | None) -> bool:
    """Returns whether a run validates on the same windows as the run that saved a snapshot with this header."""
    before = header["config"]["trainer"].get("eval_windows", eval_windows)  # an older snapshot may lack it
    return header["text_sha256"] == text_sha256 and before == eval_windows


class StepResult(NamedTuple):
    """The results of an optimizer step. Tensors are on the device."""

    batch: range  # sample numbers of all ranks
    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float
