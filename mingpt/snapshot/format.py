"""The content of a snapshot, and checks of it: another version of the program may have written the file."""

import reprlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError, create_model, with_config
from pydantic_core import ErrorDetails
from torch import Tensor
from typing_extensions import NotRequired, TypedDict  # pydantic refuses typing.TypedDict before Python 3.12

from mingpt.config.schema import KEYS, REMOVED_KEYS, SECTIONS, SHAPE_KEYS, GPTConfig
from mingpt.errors import UserError

FORMAT_VERSION = 2
# Keys that a run keeps: they determine the meaning of its tensors, its part of the text, and the order of samples.
KEPT_KEYS = (*SHAPE_KEYS, "data.train_split", "data.truncate", "optimizer.name", "trainer.seed")
STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
MAX_MISTAKES = 5  # most mistakes in a message


class Best(TypedDict):
    """The snapshot with the lowest validation loss so far."""

    step: int | None
    val_loss: float


class Lowest(TypedDict):
    """The evaluation with the lowest validation loss so far."""

    step: int
    val_loss: float
    evaluations_since: NotRequired[int]  # later evaluations that trainer.patience counts; old snapshots lack it


class Choices(TypedDict):
    """The choices that determined the last bits of the run."""

    precision: Literal["fp32", "bf16", "fp16"]
    threads: int
    world_size: int
    hardware: str
    pytorch: NotRequired[str]  # old snapshots lack it


@with_config(STRICT)
class Snapshot(TypedDict):
    """The content of a snapshot. Everything except `model` and `optimizer` is its header."""

    format: Literal[2]
    step: NonNegativeInt
    samples: NonNegativeInt
    val_loss: float | None
    best: NotRequired[Best]  # old snapshots lack it
    lowest: NotRequired[Lowest]  # old snapshots lack it
    config: dict[str, dict[str, Any]]  # by section and key
    vocabulary: str
    choices: Choices
    learning_rate: float
    text_sha256: str
    scaler: dict[str, float]
    model: dict[str, Tensor]  # weights by parameter name
    optimizer: dict[str, dict[str, Tensor]]  # by parameter name and kind


def _config_model() -> type[BaseModel]:
    """Returns the model of the configuration in a snapshot. Keys that a run keeps are required and checked.

    A snapshot of an earlier version may lack other keys, and may have keys that were removed since.
    """
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name in (*KEYS, *REMOVED_KEYS):
        section, key = name.split(".")
        is_needed = name in (*KEPT_KEYS, "trainer.init_from")
        sections[section][key] = (KEYS[name].annotation, ...) if is_needed else (Any, None)
    models: dict[str, Any] = {
        section: (create_model(section, __config__=STRICT, **fields), ...) for section, fields in sections.items()
    }
    return create_model("config", __config__=STRICT, **models)


SNAPSHOT = TypeAdapter(Snapshot)
CONFIG = _config_model()


def check_content(content: Any, path: str, advice: str = "use the version that wrote it") -> None:
    """Checks that the content of a file is a snapshot.

    Args:
        path: names the file in the message
        advice: end of the message

    Raises:
        UserError: lists entries that are missing, unknown or of another type.
    """
    try:
        SNAPSHOT.validate_python(content)
        CONFIG.model_validate(content["config"])
        gpt_config(content)
    except ValidationError as invalid:
        mistakes = [_describe(error) for error in invalid.errors(include_url=False)]
        more = len(mistakes) - MAX_MISTAKES
        listed = "; ".join(mistakes[:MAX_MISTAKES]) + (f"; and {more} more" if more > 0 else "")
        raise UserError(f"{path} is not a snapshot that this version can read: {listed}; {advice}") from invalid


def check_header(header: dict[str, Any], path: str) -> None:
    """Checks the header of a snapshot before it is written, with the same checks as its reader.

    Raises:
        UserError: no start could load it, because the code was changed here or in its other place only.
    """
    without_tensors = {"format": FORMAT_VERSION, **header, "model": {}, "optimizer": {}}
    check_content(without_tensors, f"{path}, not yet written,", "change Snapshot in mingpt/snapshot/format.py, too")


def _describe(error: ErrorDetails) -> str:
    name = ".".join(map(str, error["loc"])) or "its content"
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "extra_forbidden":
        return f"{name} is unknown"
    return f"{name} is {reprlib.repr(error['input'])}, {error['msg'].replace('Input should', 'must')}"


def split_header(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Returns a snapshot without its tensors."""
    return {key: value for key, value in snapshot.items() if key not in ("model", "optimizer")}


def gpt_config(snapshot: dict[str, Any]) -> GPTConfig:
    """Returns the shape of a snapshot's model."""
    config = snapshot["config"]
    vocab_size = len(snapshot["vocabulary"])
    return GPTConfig(**config["model"], vocab_size=vocab_size, block_size=config["data"]["block_size"])
