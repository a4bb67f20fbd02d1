"""Entry point: configuration -> process group -> Trainer -> exit status."""

import faulthandler
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mingpt.signals  # noqa: F401 - reads which process is the launcher, before that can end
from mingpt.config import PLACES, Config, DataConfig, config_to_dict
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import detect_launch_environment, restart_hint
from mingpt.errors import PeerError, RunEnded, UserError, is_oom_error
from mingpt.monitoring.logging import configure_logging, logger, report_peer_error
from mingpt.monitoring.wandb_run import check_wandb
from mingpt.run_lock import lock_run

# What imports PyTorch, which takes over a second, is imported where it is used: `--help` and a mistake in the
# configuration are answered without it.
if TYPE_CHECKING:
    from mingpt.distributed.process_group import DistributedContext
    from trainer import Trainer

    Group = AbstractContextManager[DistributedContext]

ROOT = Path(__file__).parent


def read_shared_config(argv: Sequence[str]) -> Config:
    """Reads the configuration. Processes on one machine read the same, and one of them reports a mistake in it."""
    info = detect_launch_environment(os.environ)
    try:
        config = read_config(argv)
        if config.trainer.init_from is not None:
            from mingpt.snapshot.pretrained import adopt_shape

            config = adopt_shape(config)
        return config
    except UserError as error:
        # Rank 0 always reports it, since a local rank that is set by hand may be any number.
        is_first_on_machine = info.local_rank in (None, 0)
        error.is_reported = info.rank > 0 and not is_first_on_machine
        raise


def train(config: Config) -> int:
    """Trains as configured; returns the exit status."""
    gc.disable()  # looking for garbage among what is imported would take a fifth of the start (measured)
    group, train_loop = choose_launch(config)

    import torch._dynamo  # noqa: F401 - the constructor of an optimizer would import it (torch 2.13)

    from mingpt.hardware.device import check_precision, tune_malloc
    from mingpt.parallel.build import validate
    from trainer import Trainer

    gc.freeze()  # what is imported stays
    gc.enable()

    with group as context:
        context.init_device(config.distributed.backend)
        tune_malloc()
        check_same_start(config, context)
        validate(config, context.world_size)
        check_precision(config.trainer.precision, context.device)  # before anything is written
        with context.shared_errors():
            check_wandb(config.trainer.wandb_project)
        with locked_folders(config, context):
            return train_loop(Trainer(config, context))


def choose_launch(config: Config) -> "tuple[Group, Callable[[Trainer], int]]":
    """How this process becomes one of the ranks, and how it trains then."""
    if config.distributed.survive:
        from mingpt.survive.launch import launch_surviving

        group = launch_surviving(config)  # before PyTorch is imported, which a supervisor does without

        from mingpt.survive.loop import train_surviving

        return group, train_surviving

    from mingpt.distributed.process_group import init_distributed
    from mingpt.parallel.build import strategy_class
    from trainer import Trainer

    needs_group = strategy_class(config).needs_process_group
    return init_distributed(config.distributed, config.trainer.run_dir, needs_group), Trainer.train


def check_same_start(config: Config, context: "DistributedContext") -> None:
    """Raises a UserError if ranks have been started with different configurations or different code."""
    values: dict[str, Any] = {"the code's SHA-256": code_digest()}
    for section, keys in config_to_dict(config).items():
        for key, value in keys.items():
            if f"{section}.{key}" not in PLACES:
                values[f"{section}.{key}"] = value
    context.check_equal(values)


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


@contextmanager
def locked_folders(config: Config, context: "DistributedContext") -> Iterator[None]:
    """Locks the folders that this run writes to, after a look at its text, so that a wrong text makes no folder."""
    from char_dataset import split_lengths
    from mingpt.corpus import check_text, count_characters

    is_new = not os.path.exists(config.trainer.run_dir)
    with context.local_rank0_first():
        write_default_text(config)
        check_text(config.data.path)
        if is_new and context.local_rank == 0:
            characters = count_characters(config.data.path)
            if characters is not None:  # a text of another machine is read when it is encoded
                split_lengths(characters, config.data)
    descriptors = []
    with context.shared_errors():
        if context.rank == 0:
            descriptors = lock_run(config.trainer)
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def run(argv: Sequence[str]) -> int:
    """Reads the configuration and trains. An error that the user can act on becomes one message; returns the status."""
    configure_logging()
    try:
        return train(read_shared_config(argv))
    except RunEnded as ended:
        return ended.status
    except UserError as error:
        if not error.is_reported:
            logger.error(str(error))
        write_error_file(str(error), f"error: {error}")
        return 2
    except PeerError as error:
        report_peer_error(error, restart_hint(os.environ))
        return 1
    except RuntimeError as error:
        if not is_oom_error(error):
            raise
        logger.error(
            f"out of memory in training: {str(error).splitlines()[0]}; lower trainer.micro_batch_size, or set "
            "trainer.activation_checkpointing to full, or with several ranks distributed.strategy to fsdp"
        )
        return 2
    except KeyboardInterrupt:  # before training starts, when there is nothing to save
        return 130


def write_error_file(message: str, call_stack: str) -> None:
    """Writes an error to torchrun's error file, as its `record` does, so that its summary, which comes last, shows it.

    The summary shows the call stack if there is one, else nothing of the message.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    details = {"py_callstack": call_stack, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def main() -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # for paths the terminal can't show
    faulthandler.enable()  # gloo aborts the process if the sizes of a collective differ between ranks
    status = 1
    try:
        status = run(sys.argv[1:])
    except SystemExit as ended:  # after --help and --print_config
        status = int(ended.code or 0)
    except Exception as error:
        write_error_file(f"{type(error).__name__}: {error}", traceback.format_exc())
        with suppress(OSError):
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it, or the disk is full
            stream.flush()
    # The interpreter's own exit would abort if it encountered a thread of PyTorch's C++ code, and would wait in the
    # destructor of a process group that has failed.
    os._exit(status)


if __name__ == "__main__":
    main()
