"""The content of snapshots."""

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mingpt.config.schema import SHAPE_KEYS, GPTConfig
from mingpt.errors import UserError

Snapshot = dict[str, Any]  # the content of a file
Header = dict[str, Any]  # a snapshot without its tensors

FORMAT_VERSION = 3
OTHER_PROGRAMS = "weights of other programs must be a folder of transformers (docs/export.md)"
# Keys that can't change in a run. They determine the meaning of tensors, the part of the text, and the sample order.
KEPT_KEYS = (*SHAPE_KEYS, "data.field", "data.train_split", "data.truncate", "optimizer.name", "trainer.seed")


@dataclass
class Best:
    """The evaluation with the lowest validation loss so far. The snapshot of its step is kept."""

    step: int | None = None
    val_loss: float = math.inf


@dataclass
class Progress:
    """The progress of a run. With the state of model and optimizer, it is everything that a run needs to continue.

    Snapshots contain all fields. A field that a snapshot lacks gets its default.

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

    @classmethod
    def from_header(cls, header: Header) -> "Progress":
        """Returns the progress in a snapshot."""
        values = {each.name: header[each.name] for each in fields(cls) if each.name in header}
        return cls(**values | {"best": Best(**header["best"])})


def check_content(content: Any, path: str) -> None:
    """Raises a UserError if another program or another version of this one has written a file.

    Keys of the model that it lacks get their defaults, so a new key's default must keep the old behavior.
    """
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} is not a snapshot that this version can read: its format is {version}, must be {FORMAT_VERSION}; "
            f"{OTHER_PROGRAMS}"
        )
    try:
        gpt_config(content)
    except ValidationError as error:
        raise UserError(f"{path} is not a snapshot of this code: config.model: {error}") from error


def split_header(snapshot: Snapshot) -> Header:
    """Returns a snapshot without its tensors."""
    return {key: value for key, value in snapshot.items() if key not in ("model", "optimizer")}


def gpt_config(snapshot: Snapshot) -> GPTConfig:
    """Returns the shape of a snapshot's model."""
    config = snapshot["config"]
    sizes = {"vocab_size": snapshot["vocab_size"], "block_size": config["data"]["block_size"]}
    # In JSON, a list may be a tuple.
    return TypeAdapter(GPTConfig).validate_json(json.dumps(config["model"] | sizes))
