"""The sections of the configuration: every key with its type, default, bounds and description."""

import os
import re
from dataclasses import field, fields, is_dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, to_jsonable_python

# The docstring of a key is its description in the yaml and in --help.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
# Keys that name locations. They may differ between ranks and between starts.
PLACES = ("data.path", "trainer.run_dir", "trainer.snapshot_path", "distributed.init_method")
# Headings of groups of keys in the yaml, each before a key
HEADINGS = {
    "trainer.max_epochs": "Length and batch",
    "trainer.precision": "Precision and speed",
    "trainer.log_every": "Evaluation and logs",
    "trainer.save_every": "Snapshots and folders",
}
MAX_STEPS = 99_999_999  # names of snapshots have eight digits: step_00000500.pt


def _expand_path(path: str) -> str:
    """Replaces ~ and variables such as $HOME in a path, like a shell."""
    expanded = os.path.expandvars(os.path.expanduser(path))
    if re.search(r"\$(\w|{)", expanded):
        raise PydanticCustomError("path", "a path whose variables are set in the environment")
    return expanded


def _check_folder(path: str) -> str:
    if "://" in path:
        raise PydanticCustomError("path", "a folder of this machine; only trainer.snapshot_path may be a URL")
    return path


def _check_address(address: str) -> str:
    found = re.fullmatch(r"env://|file:///.*[^/]|tcp://[^/?#]+:(\d+)", address)
    if found is None or int(found[1] or 1) not in range(1, 2**16):
        raise PydanticCustomError("address", "env://, tcp://host:port or file:///path")
    return address


Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(_expand_path)]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The training text."""

    path: PathText = "data/input.txt"
    """UTF-8 text: a file, a glob (files in sorted order) or an fsspec URL; or a folder of data/prepare.py"""

    field: Text = "text"
    """field with the texts of JSON lines and of parquet rows"""

    block_size: PositiveInt = 64
    """tokens in the model's context window (T)"""

    train_split: float = Field(default=0.9, gt=0, lt=1)
    """fraction of the text to train on; the rest is for validation. A folder has its own"""

    truncate: float | None = Field(default=None, gt=0, le=1)
    """fraction of the training part to use, from its start; null: all"""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The shape of the model."""

    n_layer: PositiveInt = 4
    """transformer blocks"""

    n_head: PositiveInt = 4
    """attention heads in each block; must divide n_embd"""

    n_embd: PositiveInt = 128
    """embedding dimension (C)"""

    dropout: Fraction = 0.0
    """dropout probability; 0.1 to 0.2 helps if many epochs lead to overfitting"""

    bias: bool = True
    """biases in linear layers and layer norms"""

    gelu_approximate: Literal["none", "tanh"] = "none"
    """GELU without approximation (none), or GPT-2's own, tanh, which is slower on CPUs"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GPTConfig(ModelConfig):
    """The shape of the model, including the two sizes from the text and the data section."""

    vocab_size: PositiveInt
    """tokens in the vocabulary (V)"""

    block_size: PositiveInt
    """tokens in the context window (T)"""


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """The optimizer and the learning-rate schedule: linear warm-up, then linear decay."""

    name: Literal["muon", "adamw"] = "muon"
    """muon (for the matrices of the blocks, with AdamW for other parameters) or adamw"""

    learning_rate: PositiveFloat = 5e-3
    """peak learning rate, reached at the end of the warm-up"""

    min_learning_rate: NonNegativeFloat = 0.0
    """learning rate at the end of the linear decay"""

    warmup_steps: NonNegativeInt = 30
    """steps of linear warm-up from 0"""

    decay_steps: PositiveInt | None = None
    """step at which the decay reaches min_learning_rate; null: the last step of the run"""

    weight_decay: NonNegativeFloat = 0.1
    """decoupled weight decay, for matrices only"""

    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """AdamW's coefficients for the running averages"""

    grad_norm_clip: PositiveFloat | None = 1.0
    """maximum global gradient norm; null: no clipping"""


@dataclass(frozen=True, config=STRICT)
class TrainerConfig:
    """The training loop: its length, batches, evaluation and snapshots. Steps are optimizer steps."""

    max_epochs: PositiveInt | None = None
    """passes over the training text; null: no limit"""

    max_steps: int | None = Field(default=1600, ge=1, le=MAX_STEPS)
    """steps; null: no limit. The first limit reached ends the run; this default does not limit max_epochs"""

    batch_size: PositiveInt = 12
    """sequences per step, over all ranks"""

    micro_batch_size: PositiveInt | None = None
    """maximum number of sequences per forward pass on a rank; null: the rank's whole share"""

    seed: int = Field(default=1, ge=0, lt=2**63)
    """seed of initial weights, sample order and dropout"""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """autocast dtype: fp32, bf16, fp16 (CUDA only); auto: bf16 or fp16 where hardware is faster in it"""

    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads per rank; auto: OMP_NUM_THREADS, else idle cores or CPU quota divided by local ranks"""

    compile: bool = False
    """compile the model with torch.compile; the first start takes longer"""

    cuda_graphs: bool = False
    """on one GPU, record a step and replay its kernels; see docs/performance.md"""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """what backward recomputes: none, selective (all but matrix products), full (all)"""

    deterministic: bool = False
    """use only deterministic CUDA kernels, which are slower; CPU runs are always deterministic"""

    log_every: PositiveInt = 20
    """steps between rows of training metrics; the first step is included"""

    eval_every: PositiveInt = 400
    """steps between evaluations on the validation text"""

    eval_windows: PositiveInt | None = 20_000
    """windows in an evaluation, evenly spread over the validation text; null: all"""

    sample_every: PositiveInt | None = 400
    """steps between generated samples; null: none"""

    sample_prompt: Text | None = None
    """text that samples begin with; null: the first 20 tokens of the validation text"""

    profile_steps: PositiveInt | None = None
    """steps to record in a profiler trace per rank, from step 12 on; null: no trace"""

    wandb_project: Text | None = None
    """Weights & Biases project for the metrics; needs `pip install wandb`; null: none"""

    save_every: PositiveInt = 400
    """steps between snapshots"""

    save_overhead: float | None = Field(default=0.02, gt=0, lt=1)
    """maximum fraction of the run time for additional snapshots, which limit the work lost in a crash; null: none"""

    keep_snapshots: PositiveInt = 3
    """number of save_every snapshots to keep, in addition to the best and the newest one"""

    init_from: PathText | None = None
    """initial weights: a snapshot, a run folder, or a folder of transformers; null: random initialization"""

    run_dir: Annotated[PathText, AfterValidator(_check_folder)] = "runs/default"
    """run folder: config.yaml, metrics.jsonl, snapshots/"""

    snapshot_path: PathText | None = None
    """folder or fsspec URL to copy snapshots to, into a folder with the name of run_dir; null: none"""


@dataclass(frozen=True, config=STRICT)
class DistributedConfig:
    """The process group and the parallelization of the model."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """nccl (one CUDA GPU per process) or gloo (CPU); auto: nccl if there is a GPU, else gloo"""

    init_method: Annotated[str, AfterValidator(_check_address)] | None = None
    """rendezvous address: tcp://host:port or file:///path; null: from the launcher's environment"""

    timeout_seconds: float = Field(default=600.0, ge=1, le=1e9)
    """seconds to wait for another process before failing"""

    strategy: Literal["ddp", "zero1", "zero2", "fsdp"] = "ddp"
    """ddp shards nothing, zero1 the optimizer state, zero2 also the gradients, fsdp everything"""

    cpu_offload: bool = False
    """keep the shards of fsdp in host memory instead of GPU memory, which is slower"""

    pipeline_stages: PositiveInt = 1
    """pipeline stages that the blocks are split into; 1: no pipeline"""

    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """order of a stage's micro-batches: 1f1b, or gpipe (all forward passes first)"""

    bucket_cap_mb: PositiveFloat | None = None
    """size in MiB of the gradient buckets of ddp and zero1; null: 25, after a first bucket of 1"""

    reduction: Literal["fast", "tree"] = "fast"
    """gradient summation: fast (the backend's all-reduce) or tree (same bits for any number of ranks)"""

    @property
    def uses_fsdp(self) -> bool:
        return self.strategy in ("zero2", "fsdp")


@dataclass(frozen=True, config=STRICT)
class Config:
    """All sections."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    distributed: DistributedConfig = DistributedConfig()

    given: Annotated[frozenset[str], Field(exclude=True)] = field(default=frozenset(), compare=False)
    """keys on the command line, some with their defaults; it is in no yaml and in no snapshot"""


SECTIONS: dict[str, Any] = {item.name: item.type for item in fields(Config) if is_dataclass(item.type)}
KEYS: dict[str, FieldInfo] = {
    f"{name}.{key}": info for name, section in SECTIONS.items() for key, info in section.__pydantic_fields__.items()
}


# Keys that determine the names, the shapes and the meaning of the weights.
SHAPE_KEYS = (*(name for name in KEYS if name.startswith("model.") and name != "model.dropout"), "data.block_size")

Sections = dict[str, dict[str, Any]]  # values by section and key


def config_to_dict(config: Config) -> Sections:
    """Returns the configuration as lists, strings, numbers, booleans and None."""
    return to_jsonable_python(config)


def by_section(values: dict[str, Any]) -> Sections:
    """Groups values of full keys, such as `data.block_size`, by section."""
    sections: Sections = {section: {} for section in SECTIONS}
    for name, value in values.items():
        section, key = name.split(".")
        sections[section][key] = value
    return sections


def keys_without_places(config: Sections) -> dict[str, Any]:
    """Returns values by full key, without the keys in PLACES."""
    values = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    return {key: value for key, value in values.items() if key not in PLACES}
