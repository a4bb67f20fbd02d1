"""The content of a snapshot, and the check that a file has it: another version may have written the file."""

import reprlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError, create_model, with_config
from pydantic_core import ErrorDetails
from torch import Tensor
from typing_extensions import NotRequired, TypedDict  # pydantic does not take those of typing before Python 3.12

from mingpt.config.schema import KEYS, REMOVED_KEYS, SECTIONS, SHAPE_KEYS, GPTConfig
from mingpt.errors import UserError

FORMAT_VERSION = 2  # format 1 may have model.gelu_approximate
# Keys that a run keeps from start to start: the meaning of its tensors, its part of the text, and its order.
KEPT_KEYS = (*SHAPE_KEYS, "data.train_split", "data.truncate", "optimizer.name", "trainer.seed")
STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
MAX_MISTAKES = 5  # in a message


class Best(TypedDict):
    """The snapshot of lowest validation loss so far."""

    step: int | None
    val_loss: float


class Lowest(TypedDict):
    """The evaluation of lowest validation loss so far, after which trainer.patience counts."""

    step: int
    val_loss: float


class Choices(TypedDict):
    """What determined the last bits of the run."""

    precision: Literal["fp32", "bf16", "fp16"]
    threads: int
    world_size: int
    hardware: str
    pytorch: NotRequired[str]  # old snapshots have none


@with_config(STRICT)
class Snapshot(TypedDict):
    """The content of a snapshot. All but `model` and `optimizer` is its header."""

    format: Literal[1, 2]
    step: NonNegativeInt
    samples: NonNegativeInt
    val_loss: float | None
    best: NotRequired[Best]  # old snapshots have none
    lowest: NotRequired[Lowest]  # likewise
    config: dict[str, dict[str, Any]]  # by section and key
    vocabulary: str
    choices: Choices
    learning_rate: float
    text_sha256: str
    scaler: dict[str, float]
    model: dict[str, Tensor]  # weights by parameter name
    optimizer: dict[str, dict[str, Tensor]]  # by parameter name and kind


def _config_model() -> type[BaseModel]:
    """The configuration in a snapshot. Keys that a run keeps are required, and their types are checked.

    A snapshot of an earlier version may lack other keys, and may have removed ones.
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


def check_content(content: Any, path: str, advice: str = "take the version that wrote it") -> None:
    """Checks that the content of a file is that of a snapshot; changes the keys of format 1 to those of this version.

    Args:
        path: names the file in the message, which ends with the advice

    Raises:
        UserError: lists what is missing, unknown or of another type.
    """
    try:
        SNAPSHOT.validate_python(content)
        config = content["config"]
        if content["format"] == 1:
            config["model"] = _current_keys(config.get("model", {}), path)
        CONFIG.model_validate(config)
        gpt_config(content)
    except ValidationError as invalid:
        mistakes = [_describe(error) for error in invalid.errors(include_url=False)]
        more = len(mistakes) - MAX_MISTAKES
        listed = "; ".join(mistakes[:MAX_MISTAKES]) + (f"; and {more} more" if more > 0 else "")
        raise UserError(f"{path} is no snapshot that this version reads: {listed}; {advice}") from invalid


def check_header(header: dict[str, Any], path: str) -> None:
    """Checks a snapshot without its tensors before it is written to a path, as its reader will check it.

    Raises:
        UserError: no start could load it: the code was changed in one place, and not in the other.
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
    """The shape of a snapshot's model."""
    config = snapshot["config"]
    vocab_size = len(snapshot["vocabulary"])
    return GPTConfig(**config["model"], vocab_size=vocab_size, block_size=config["data"]["block_size"])


def _current_keys(model: dict[str, Any], path: str) -> dict[str, Any]:
    """The model section of a snapshot of format 1, with the keys of this version.

    Raises:
        UserError: the model has an activation that this version does not have.
    """
    model = {"architecture": "gpt2", "conv_kernel_size": None} | model
    gelu_approximate = model.pop("gelu_approximate", "tanh")
    if model["architecture"] == "gpt2" and gelu_approximate != "none":
        raise UserError(
            f"{path} was trained with model.gelu_approximate {gelu_approximate}, which this program does not have: "
            "take the program that wrote it"
        )
    return model
