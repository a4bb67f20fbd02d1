"""What a Trainer needs before it can be built: checks, the text, locks of folders, and initial weights."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt.config.conflicts import find_start_conflicts, refuse
from mingpt.config.schema import Config, DataConfig, GPTConfig, config_to_dict, keys_without_places
from mingpt.distributed.agreement import broadcast_object, check_equal, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import check_wandb
from mingpt.snapshot.format import split_header
from mingpt.snapshot.load import adopt_shape, load_initial_weights, load_pretrained
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.system.device import tune_malloc
from mingpt.system.run_lock import RunLock
from mingpt.text.corpus import Corpus, check_text, encode_corpus
from model import GPT

ROOT = Path(__file__).parents[2]


def prepare_run(config: Config, context: DistributedContext) -> None:
    """Checks all that can be checked before anything is written, and writes the default text where it is missing.

    Raises:
        UserError: on all ranks.
    """
    tune_malloc()
    check_same_start(config, context)
    refuse(find_start_conflicts(config, context.world_size, context.device.type))
    with shared_errors(context):
        check_wandb(config.trainer.wandb_project)
    with context.local_rank0_first():
        if context.local_rank == 0:
            write_default_text(config)
            check_text(config.data.path)


def check_same_start(config: Config, context: DistributedContext) -> None:
    """Raises a UserError if ranks have been started with different configurations, code or versions of PyTorch."""
    versions = {"PyTorch's version": str(torch.__version__), "the code's SHA-256": code_digest()}
    check_equal(context, {**versions, **keys_without_places(config_to_dict(config))})


def code_digest() -> str:
    """SHA-256 of the code that trains: mingpt/, and the modules beside it that this process has imported."""
    files = set(ROOT.glob("mingpt/**/*.py"))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent == ROOT:
            files.add(Path(file))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_default_text(config: Config) -> None:
    """Writes the default text where it is missing, so that a first run needs no other command."""
    path = Path(config.data.path)
    is_default = config.data.path == DataConfig().path and path.resolve() == (ROOT / path).resolve()
    if not is_default or path.exists():
        return
    command = [sys.executable, str(ROOT / "data/prepare.py")]
    program = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if program.returncode:
        raise UserError(f"data.path: {program.stderr.strip().removeprefix('error: ')}")
    logger.info(program.stdout.strip())


def lock_run(config: Config, context: DistributedContext) -> RunLock:
    """Locks the folders that this run writes to. Rank 0 holds the locks; the RunLock of others is empty.

    Raises:
        UserError: on all ranks, if another run has a lock, or a folder can't be written.
    """
    folders = {Path(config.trainer.run_dir): "trainer.run_dir"}
    with shared_errors(context):
        storage = SnapshotStorage(config.trainer.snapshot_path or f"{config.trainer.run_dir}/snapshots", keep=1)
        if storage.is_local:
            folders[Path(storage.path)] = "trainer.snapshot_path"
        lock = RunLock(folders if context.rank == 0 else {})
    return lock


def adopt_snapshot(config: Config, context: DistributedContext, header: dict[str, Any] | None) -> tuple[Config, str]:
    """Returns the configuration with the shape of the model in trainer.init_from.

    A run that continues has that shape itself, and its trainer.init_from is what it began with, which is not read.

    Args:
        header: that of the snapshot from which the run continues; None: it is new

    Returns:
        the configuration, and the characters of trainer.init_from, which the vocabulary has besides those of the text

    Raises:
        UserError: on all ranks, if trainer.init_from can't be loaded, or has another shape than the one configured.
    """
    path = config.trainer.init_from
    if header is not None:
        began_from = header["config"]["trainer"]["init_from"]
        if path is None and began_from is None:
            return config, ""
        if path not in (None, began_from):
            logger.warning(f"trainer.init_from is not used, since the run continues from step {header['step']}")
        config = replace(config, trainer=replace(config.trainer, init_from=began_from))
        source = f"the snapshot of step {header['step']} in the run folder"
        return adopt_shape(config, header, source), "" if began_from is None else header["vocabulary"]
    if path is None:
        return config, ""
    header = {}
    with context.without_timeout(), shared_errors(context):
        if context.rank == 0:
            header = split_header(load_pretrained(path, "trainer.init_from").snapshot)
    header = broadcast_object(context, header)
    return adopt_shape(config, header, f"trainer.init_from, {path}"), header["vocabulary"]


def load_corpus(config: Config, context: DistributedContext, extra_characters: str) -> Corpus:
    """The text as tokens. One process per machine encodes it, or compares the cache with the text and its digest.

    Args:
        extra_characters: characters that the vocabulary has besides those of the text
    """
    cache = Path(config.trainer.run_dir) / "cache"
    with context.local_rank0_first():
        is_ready = context.local_rank > 0
        corpus = encode_corpus(config.data.path, cache, extra_characters, config.trainer.init_from or "", is_ready)
    check_equal(context, {"the text's SHA-256": corpus.sha256})
    return corpus


def initial_weights(
    config: Config, context: DistributedContext, model_config: GPTConfig, vocabulary: str
) -> dict[str, Tensor]:
    """On rank 0, the state dict of a new model, random or from trainer.init_from; on others, it is empty.

    Raises:
        UserError: on all ranks, if trainer.init_from can't be loaded.
    """
    with context.without_timeout(), shared_errors(context):
        if context.rank == 0:
            torch.manual_seed(config.trainer.seed)
            model = GPT(model_config)
            if config.trainer.init_from is None:
                return model.state_dict()
            return load_initial_weights(config.trainer.init_from, model, vocabulary)
    return {}
