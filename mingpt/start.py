"""The start of a run: checks, the text, the snapshot's configuration, and initial weights."""

import hashlib
import platform
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt.config.conflicts import find_start_conflicts, refuse
from mingpt.config.schema import SHAPE_KEYS, Config, DataConfig, GPTConfig, config_to_dict, keys_without_places
from mingpt.distributed.agreement import broadcast_object, check_equal, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.files import replace_file
from mingpt.monitoring.logging import logger
from mingpt.snapshot.folder import open_folders
from mingpt.snapshot.format import KEPT_KEYS, split_header
from mingpt.snapshot.load import NEW_RUN, fit_config, load_initial_weights, load_pretrained
from mingpt.system.device import tune_malloc
from mingpt.text.corpus import Corpus, is_token_folder, open_folder, write_run_tokens
from mingpt.text.files import find_files
from mingpt.text.tokenizer import TextTokenizer, Tokenizer, restore_tokenizer
from model import GPT

ROOT = Path(__file__).parents[1]


def prepare_run(config: Config, context: DistributedContext) -> None:
    """Makes all checks that are possible before the run folder exists, and writes the default text if it is missing.

    Raises:
        UserError: on all ranks.
    """
    tune_malloc()
    code = {f"the SHA-256 of {file}": digest for file, digest in code_digests().items()}
    versions = {"PyTorch's version": str(torch.__version__), **code}
    check_equal(context, {**versions, **keys_without_places(config_to_dict(config))})
    refuse(find_start_conflicts(config, context.world_size, context.device.type))
    with shared_errors(context):
        if context.local_rank == 0:
            if not is_token_folder(str(tokens_folder(config))):
                write_default_text(config)
                find_files(config.data.path, "data.path")
            open_folders(config.trainer)


def tokens_folder(config: Config) -> Path:
    """Returns the folder of the tokens: data.path, or one in the run folder for the tokens of a text."""
    path = config.data.path
    return Path(path) if is_token_folder(path) else Path(config.trainer.run_dir, "data")


@cache  # an edit while the process runs does not change the code that it has imported
def code_digests(root: Path = ROOT) -> dict[str, str]:
    """Returns the first 16 digits of the SHA-256 of each file that trains, by its path in the repository.

    Machines without a shared disk may have different versions of a file, and a run may resume with another one.
    """
    scripts = [root / name for name in ("main.py", "trainer.py", "model.py", "char_dataset.py")]
    digests = {}
    for file in [*scripts, *sorted(root.glob("mingpt/**/*.py"))]:
        if file.is_file():  # an editor's lock is a link that leads nowhere
            digests[file.relative_to(root).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return digests


def write_default_text(config: Config) -> None:
    """Writes the default text if it is missing, so that one command is enough for a first run.

    It consists of the paragraphs of Python's help topics that are not indented, which are mostly prose. Several topics
    contain the same paragraphs, which would be in the training part and in the validation part.
    """
    path = Path(config.data.path)
    is_default = config.data.path == DataConfig().path and ROOT.samefile(".")
    if not is_default or path.exists():
        return
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, for this text only

    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraph for paragraph in paragraphs if not paragraph.startswith(" ")))
    path.parent.mkdir(exist_ok=True)
    replace_file(path, text)
    logger.info(f"{path}: help topics of Python {platform.python_version()}, {len(text):,} characters")


def adopt_snapshot(
    config: Config, context: DistributedContext, header: dict[str, Any] | None
) -> tuple[Config, Tokenizer]:
    """Checks that the configuration fits the snapshot to continue from, and adopts the shape of trainer.init_from.

    A run that continues does not read trainer.init_from, since its own snapshots have that shape.

    Args:
        header: header of the snapshot that the run continues from; None: the run is new

    Returns:
        the configuration, and a tokenizer with the vocabulary of the snapshot or of trainer.init_from

    Raises:
        UserError: on all ranks, if trainer.init_from can't be loaded, or a key that can't change differs.
    """
    path = config.trainer.init_from
    if header is not None:
        began_from = header["config"]["trainer"]["init_from"]
        source = f"the snapshot of step {header['step']} in the run folder"
        advice = f", or {NEW_RUN} to start a new run"
        config = replace(config, trainer=replace(config.trainer, init_from=began_from))
        adopts_shape = path is not None or began_from is not None
        config = fit_config(config, header, source, KEPT_KEYS, adopts_shape, advice)
        return config, restore_tokenizer(header)
    if path is None:
        return config, TextTokenizer()
    header = {}
    with shared_errors(context):
        if context.rank == 0:
            header = split_header(load_pretrained(path, "trainer.init_from").snapshot)
    header = broadcast_object(context, header)
    names = list(SHAPE_KEYS)
    is_given = config.data.block_size != DataConfig.block_size or "data.block_size" in config.given
    if is_given and config.data.block_size < header["config"]["data"]["block_size"]:
        names.remove("data.block_size")  # a shorter window needs no other weights
    config = fit_config(config, header, f"trainer.init_from, {path}", names, adopts_shape=True)
    return config, restore_tokenizer(header)


def load_corpus(
    config: Config, context: DistributedContext, tokenizer: Tokenizer, is_new: bool, is_writer: bool
) -> Corpus:
    """Opens the tokens of the training and the validation text. For a text, the first start of a run writes them.

    Args:
        tokenizer: of the run or of trainer.init_from; a folder must have the same one
        is_new: whether the run is new, so that the text may add characters to the vocabulary
        is_writer: whether this rank writes to its run folder

    Raises:
        UserError: on all ranks, if the text can't be read on one of them, if it has other tokens, or if their texts
            differ.
    """
    folder = tokens_folder(config)
    with shared_errors(context):
        if is_writer and not is_token_folder(config.data.path):
            try:
                write_run_tokens(config.data, folder, tokenizer, is_new)
            except OSError as error:
                raise UserError(
                    f"trainer.run_dir: {folder} can't be written: {error}; free disk space or make it writable"
                ) from error
    with shared_errors(context):
        corpus = open_folder(folder, config.data)
        known = tokenizer.vocabulary
        found = corpus.tokenizer.vocabulary
        may_differ = is_new and (not known or (isinstance(known, str) and isinstance(found, str)))
        if found != known and not may_differ:
            raise UserError(
                f"data.path: {folder} has the tokens of another tokenizer than this run or trainer.init_from; write it "
                f"with the same tokenizer.json, leave trainer.init_from out, or {NEW_RUN}"
            )
    identity = {"the text's SHA-256": corpus.entries["text_sha256"], "train_split": corpus.entries["train_split"]}
    identity["the tokenizer's SHA-256"] = hashlib.sha256(corpus.entries["tokenizer"].encode()).hexdigest()
    check_equal(
        context, identity, advice="use the same text everywhere, and delete `data` in the run folder that had another"
    )
    return corpus


def build_model(config: Config, vocab_size: int) -> GPT:
    """Returns a new GPT on the CPU of each rank. Strategies keep its buffers and tied parameters."""
    torch.manual_seed(config.trainer.seed)
    shape = GPTConfig(**asdict(config.model), vocab_size=vocab_size, block_size=config.data.block_size)
    return GPT(shape).train()


def initial_weights(config: Config, context: DistributedContext, model: GPT, corpus: Corpus) -> dict[str, Tensor]:
    """Returns the first state dict of a run on rank 0, and an empty one on others, whose processors may differ.

    Args:
        model: a new GPT; trainer.init_from replaces its weights

    Raises:
        UserError: on all ranks, if trainer.init_from can't be loaded.
    """
    with shared_errors(context):
        if context.rank == 0:
            path = config.trainer.init_from
            if path is None:
                return model.state_dict()
            pretrained = load_pretrained(path, "trainer.init_from")
            then = pretrained.snapshot
            now = corpus.entries
            is_same_text = then.get("text_sha256", "") == now["text_sha256"]
            if is_same_text and then["train_split"] != now["train_split"]:
                logger.warning(f"{path} has trained on another part of the text, maybe on what is for validation here")
            return load_initial_weights(pretrained, path, model, corpus.tokenizer)
    return {}
