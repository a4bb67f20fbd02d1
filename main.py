"""Entry point: configuration -> process group -> Trainer -> exit status."""

import faulthandler
import hashlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from mingpt.config import Config, config_to_dict
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import detect_launch_environment, restart_hint
from mingpt.distributed.process_group import DistributedContext, init_distributed
from mingpt.distributed.supervisor import is_supervised
from mingpt.parallel.strategies import strategy_class
from mingpt.utils.device import tune_malloc
from mingpt.utils.errors import PeerError, RunEnded, SharedUserError, UserError, is_oom_error
from mingpt.utils.logging import configure_logging, logger, report_peer_error
from trainer import Trainer

ROOT = Path(__file__).parent
MAY_DIFFER = ("trainer.run_dir", "trainer.snapshot_path", "data.path", "distributed.init_method")  # between ranks


def code_digest() -> str:
    """SHA-256 of the code that trains: mingpt/, and the modules beside it that this process has imported."""
    imported = {Path(file) for module in sys.modules.values() if (file := getattr(module, "__file__", None))}
    files = {file for file in imported if file.parent == ROOT} | set(ROOT.glob("mingpt/**/*.py"))
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def choose_group(config: Config) -> AbstractContextManager[DistributedContext]:
    """The process group of this run; with distributed.survive, this process first becomes its trainer's supervisor."""
    if not config.distributed.survive:
        needs_group = strategy_class(config).needs_process_group
        return init_distributed(config.distributed, config.trainer.run_dir, needs_group)
    from mingpt.distributed.surviving_launch import init_surviving, supervise  # noqa: PLC0415 - only if configured

    if not is_supervised(os.environ):
        supervise(config)
    return init_surviving(config.distributed, config.trainer.run_dir)


def run(argv: Sequence[str]) -> int:
    """Trains as the command line says; returns the exit status."""
    configure_logging()
    reports_errors, rank = True, 0
    try:
        # One process per machine reports errors of the yaml, which all of them read; without a local rank, all do.
        # Rank 0 always does, since a local rank that is set by hand may be any number.
        info = detect_launch_environment(os.environ)
        reports_errors, rank = info.local_rank in (None, 0) or info.rank == 0, info.rank
        config = read_config(argv)
        group = choose_group(config)
        reports_errors = True  # errors before the group exists are each process's own
        with group as context:
            reports_errors = context.rank == 0  # from here on, all ranks raise the same UserError
            context.init_device(config.distributed.backend)
            tune_malloc()
            sections = config_to_dict(config).items()
            facts = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
            shared = {name: value for name, value in facts.items() if name not in MAY_DIFFER}
            context.check_equal(shared | {"the code's SHA-256": code_digest()})
            return Trainer(config, context).train()
    except RunEnded:
        return 0
    except UserError as error:
        if reports_errors and not error.is_reported and not (rank and isinstance(error, SharedUserError)):
            logger.error(str(error))
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


def main() -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # for paths the terminal can't show
    faulthandler.enable()  # gloo aborts the process if the sizes of a collective differ between ranks
    status = 1
    try:
        status = record(run)(sys.argv[1:]) or 0  # torchrun's summary then shows a worker's traceback
    except Exception:
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
