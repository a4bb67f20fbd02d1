"""The configuration: every key with its type, default, description and bounds, and the checks between keys."""

import os
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

# The docstring of a key is its description.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
Fraction = Annotated[float, Field(ge=0, lt=1)]
# Keys that say where something is: they may differ between ranks, and from start to start.
PLACES = ("data.path", "trainer.run_dir", "trainer.snapshot_path", "distributed.init_method")
# Keys that determine names and shapes of the weights, and what they mean.
SHAPE_KEYS = (
    "model.architecture",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.conv_kernel_size",
    "model.bias",
    "data.block_size",
)
# Keys of earlier versions, with what replaces them. Snapshots of those versions have them.
REMOVED_KEYS = {
    "distributed.survive": "remove it; snapshots are saved about every second (trainer.save_overhead), and `torchrun "
    "--max_restarts=3` restarts the run",
    "trainer.save_minutes": "remove it; trainer.save_overhead decides how often snapshots are saved",
}
MAX_STEPS = 99_999_999  # snapshots are named step_00000500.pt, with eight digits
MAX_THREADS = 1024  # more than any machine has cores; a million would take all threads that a machine can start


def _expand_path(path: str | None) -> str | None:
    """A path with ~ and variables such as $HOME replaced, as a shell does."""
    if path is None:
        return None
    expanded = os.path.expandvars(os.path.expanduser(path))
    if re.search(r"\$(\w|{)", expanded):
        raise PydanticCustomError("path", "a path whose variables are set in the environment")
    return re.sub("^-", "./-", expanded)  # in the commands that programs show, it would be an option


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The training text."""

    path: str = Field(default="data/input.txt", min_length=1)
    """UTF-8 text: a file, a glob (files in sorted order) or an fsspec URL"""

    block_size: PositiveInt = 64
    """characters in the model's context window (T)"""

    train_split: float = Field(default=0.9, gt=0, lt=1)
    """fraction of the text to train on; the rest is for validation"""

    truncate: float | None = Field(default=None, gt=0, le=1)
    """fraction of the text to use, from its start; null: all of it"""

    _expand = field_validator("path")(_expand_path)


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The architecture and the shape of the model."""

    architecture: Literal["gpt2", "nanochat"] = "nanochat"
    """gpt2, or nanochat: rotary positions, RMSNorm, ReLU squared; docs/configuration.md compares them"""

    n_layer: PositiveInt = 4
    """transformer blocks"""

    n_head: PositiveInt = 4
    """attention heads in each block; must divide n_embd"""

    n_embd: PositiveInt = 128
    """embedding dimension (C)"""

    dropout: Fraction = 0.0
    """dropout probability; 0.1 to 0.2 helps where many epochs overfit"""

    conv_kernel_size: int | None = Field(default=None, ge=2)
    """characters in a causal convolution before attention and MLP, such as 4; null: none, for export.py"""

    bias: bool = True
    """gpt2 alone: biases in linear layers and layer norms"""

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.n_embd % self.n_head:
            raise ValueError(f"model.n_embd is {self.n_embd}, must be divisible by model.n_head, {self.n_head}")
        if self.architecture == "nanochat" and self.n_embd // self.n_head % 2:
            raise ValueError(
                f"model.n_embd / model.n_head is {self.n_embd} / {self.n_head}, must be even with model.architecture "
                "nanochat, whose rotary positions pair dimensions; or set that to gpt2"
            )
        return self

    @property
    def has_bias(self) -> bool:
        """Whether linear layers have biases."""
        return self.bias and self.architecture == "gpt2"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GPTConfig(ModelConfig):
    """The shape of the model, with the two sizes that come from the text and the data section."""

    vocab_size: PositiveInt
    """distinct characters (V)"""

    block_size: PositiveInt
    """characters in the context window (T)"""


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """The optimizer and the learning-rate schedule: linear warm-up, then linear decay."""

    name: Literal["muon", "adamw"] = "muon"
    """muon (for the matrices of the blocks, with AdamW for all else) or adamw"""

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

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"optimizer.min_learning_rate is {self.min_learning_rate}, must be at least 0 and at most "
                f"optimizer.learning_rate, {self.learning_rate}"
            )
        return self


@dataclass(frozen=True, config=STRICT)
class TrainerConfig:
    """The training loop: its length, batches, evaluation and snapshots. Steps are optimizer steps."""

    max_epochs: PositiveInt | None = None
    """passes over the training text; null: no limit"""

    max_steps: int | None = Field(default=1600, ge=1, le=MAX_STEPS)
    """steps; null: no limit. The first limit reached ends the run"""

    batch_size: PositiveInt = 12
    """sequences per step, over all ranks"""

    micro_batch_size: PositiveInt | None = None
    """maximum number of sequences per forward pass on a rank; null: the rank's whole share"""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """autocast dtype: fp32, bf16, fp16 (CUDA only); auto: bf16 where hardware supports it, else fp32"""

    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | Literal["auto"] = "auto"
    """CPU threads per rank; auto: OMP_NUM_THREADS, else idle cores or CPU quota / ranks here"""

    compile: bool = False
    """compile the model with torch.compile; takes a minute or so at the first start"""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """what backward recomputes: none, selective (all but matrix products), full (all)"""

    deterministic: bool = False
    """use only deterministic CUDA kernels, which are slower; CPU runs are always deterministic"""

    seed: int = Field(default=1, ge=0, lt=2**63)
    """seed of initial weights, sample order and dropout"""

    init_from: str | None = Field(default=None, min_length=1)
    """initial weights: a snapshot, a run folder or a folder of snapshots; null: random initialization"""

    log_every: PositiveInt = 100
    """steps between rows of training metrics; the first step has one too"""

    eval_every: PositiveInt = 400
    """steps between evaluations on the validation text"""

    eval_windows: PositiveInt | None = 20_000
    """windows in an evaluation, evenly spread over the validation text; null: all"""

    patience: PositiveInt | None = None
    """evaluations in a row without a lower validation loss, after which the run ends; null: no limit"""

    sample_every: PositiveInt | None = 400
    """steps between generated samples; null: none"""

    sample_prompt: str | None = None
    """text that samples begin with; null: the first 20 characters of the validation text"""

    save_every: PositiveInt = 400
    """steps between snapshots"""

    save_overhead: float | None = Field(default=0.02, gt=0, lt=1)
    """fraction of the time to spend on frequent snapshots in between, which make a kill cheap; null: none"""

    keep_snapshots: PositiveInt = 3
    """newest snapshots to keep, in addition to the best one"""

    profile_steps: PositiveInt | None = None
    """steps to record in a profiler trace per rank, from step 12 on; null: no trace"""

    wandb_project: str | None = Field(default=None, min_length=1)
    """project of Weights & Biases that gets the metrics; needs `pip install wandb`; null: none"""

    run_dir: str = Field(default="runs/default", min_length=1)
    """run folder: config.yaml, metrics.jsonl, snapshots/, cache/"""

    snapshot_path: str | None = Field(default=None, min_length=1)
    """folder or fsspec URL of the snapshots; null: snapshots/ in run_dir"""

    _expand = field_validator("init_from", "run_dir", "snapshot_path")(_expand_path)

    @model_validator(mode="after")
    def _check(self) -> "TrainerConfig":
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError(
                "trainer.max_epochs and trainer.max_steps are both null; set one, or training would not end"
            )
        if self.sample_prompt == "":
            raise ValueError("trainer.sample_prompt is empty, must be null or hold at least one character")
        # Parts of URLs, by which fsspec would take the folder for another.
        if "://" in self.run_dir or "::" in self.run_dir or self.run_dir.startswith(("file:", "local:")):
            raise ValueError(
                f"trainer.run_dir is {self.run_dir}, must be a folder of this machine and no URL; only "
                "trainer.snapshot_path may be one"
            )
        if self.snapshot_path is not None and "::" in self.snapshot_path:
            raise ValueError(
                f"trainer.snapshot_path is {self.snapshot_path}, must be a folder or a URL without ::, which chains "
                "file systems such as caches"
            )
        return self


def _is_init_method(address: str) -> bool:
    """Whether it is an address at which ranks can rendezvous."""
    if not address.startswith("tcp://"):
        return address == "env://" or (address.startswith("file:///") and not address.endswith("/"))
    try:
        url = urlsplit(address)
        return bool(url.hostname and url.port) and not (url.path or url.query or url.fragment)
    except ValueError:  # a port that is no number or above 65535, or half of an IPv6 address
        return False


@dataclass(frozen=True, config=STRICT)
class DistributedConfig:
    """The process group and how the model is parallelized."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """nccl (one CUDA GPU per process), gloo (CPU); auto: nccl where there is a GPU, else gloo"""

    init_method: str | None = None
    """rendezvous address: tcp://host:port or file:///path; null: from the launcher's environment"""

    timeout_seconds: float = Field(default=600.0, ge=1, le=1e9)
    """seconds to wait for another process before failing"""

    strategy: Literal["ddp", "zero1", "zero2", "fsdp"] = "ddp"
    """what ranks shard: ddp: nothing; zero1: optimizer state; zero2: gradients too; fsdp: all"""

    cpu_offload: bool = False
    """with fsdp on CUDA, keep shards in host memory; slower"""

    pipeline_stages: PositiveInt = 1
    """pipeline stages that the blocks are split into; 1: no pipeline"""

    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """order of a stage's micro-batches: 1f1b, or gpipe (all forward passes first)"""

    bucket_cap_mb: PositiveFloat | None = None
    """size in MiB of the gradient buckets of ddp and zero1; null: 25, after a first bucket of 1"""

    reduction: Literal["fast", "tree"] = "fast"
    """gradient summation: fast (the backend's all-reduce); tree: same bits for any number of ranks"""

    @model_validator(mode="after")
    def _check(self) -> "DistributedConfig":
        if self.init_method is not None and not _is_init_method(self.init_method):
            raise ValueError(
                f"distributed.init_method is {self.init_method!r}, must be null, env://, tcp://host:port or "
                "file:///path"
            )
        if self.cpu_offload and self.strategy != "fsdp":
            raise ValueError(
                f"distributed.cpu_offload is true, which needs distributed.strategy fsdp, not {self.strategy}"
            )
        if self.cpu_offload and self.pipeline_stages > 1:
            raise ValueError(
                "distributed.cpu_offload is true, must be false with distributed.pipeline_stages "
                f"{self.pipeline_stages}"
            )
        if self.reduction == "tree" and self.pipeline_stages > 1:
            raise ValueError(
                f"distributed.reduction is tree, must be fast with distributed.pipeline_stages {self.pipeline_stages}"
            )
        if self.reduction == "tree" and self.strategy != "ddp":
            raise ValueError(f"distributed.strategy is {self.strategy}, must be ddp with distributed.reduction tree")
        return self


@dataclass(frozen=True, config=STRICT)
class Config:
    """All sections.

    Raises:
        ValueError: two keys do not go together. The message begins with the name of one of them.
    """

    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)

    @model_validator(mode="after")
    def _check_pipeline(self) -> "Config":
        stages = self.distributed.pipeline_stages
        batch_size = self.trainer.batch_size
        if stages == 1:
            return self
        if stages > self.model.n_layer:
            raise ValueError(
                f"distributed.pipeline_stages is {stages}, must be at most model.n_layer, {self.model.n_layer}: "
                "each stage needs a block"
            )
        if self.trainer.micro_batch_size is None:
            sizes = (n for n in range(1, batch_size + 1) if batch_size % n == 0 and batch_size // n >= 4 * stages)
            raise ValueError(
                f"trainer.micro_batch_size is null, must be a number with distributed.pipeline_stages {stages}, such "
                f"as {max(sizes, default=1)}: stages work on several micro-batches at once, best on {4 * stages} or "
                "more"
            )
        return self

    @model_validator(mode="after")
    def _check_tree(self) -> "Config":
        cfg = self.trainer
        reason = "with distributed.reduction tree, whose bits depend on it"
        if self.distributed.reduction != "tree":
            return self
        if cfg.micro_batch_size is None:
            raise ValueError(f"trainer.micro_batch_size is null, must be a number {reason}")
        if cfg.threads not in ("auto", 1):
            raise ValueError(f"trainer.threads is {cfg.threads}, must be auto or 1 {reason}")
        if cfg.precision == "fp16":
            raise ValueError("trainer.precision is fp16, must be auto, fp32 or bf16 with distributed.reduction tree")
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> "Config":
        if self.distributed.cpu_offload and self.optimizer.name == "muon":
            raise ValueError(
                "optimizer.name is muon, must be adamw with distributed.cpu_offload: Muon needs whole matrices, and "
                "host memory holds shards"
            )
        return self


SECTIONS: dict[str, Any] = {
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "trainer": TrainerConfig,
    "distributed": DistributedConfig,
}
KEYS: dict[str, FieldInfo] = {
    f"{name}.{key}": info for name, section in SECTIONS.items() for key, info in section.__pydantic_fields__.items()
}


def config_to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries of lists, strings, numbers, booleans and None."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def keys_without_places(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The values of `config_to_dict` by key, such as `data.block_size`, without PLACES."""
    values = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    return {key: value for key, value in values.items() if key not in PLACES}
