"""What does this run do? Yaml and command line -> Config -> process group -> Trainer."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from mingpt.config import (
    config_to_dict,
)
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import detect_launch_environment
from mingpt.distributed.process_group import init_distributed
from mingpt.parallel.memory import is_oom_error
from mingpt.utils.device import tune_malloc
from mingpt.utils.errors import PeerError, UserError
from mingpt.utils.progress import complain
from trainer import Trainer

ROOT = Path(__file__).parent
PLACES = (
    "trainer.run_dir",
    "trainer.snapshot_path",
    "data.path",
    "distributed.init_method",
)  # may differ between ranks


def code_digest() -> str:
    """SHA-256 of the code that trains: all of mingpt/, and the modules beside it that this process has imported."""
    imported = {Path(file) for m in sys.modules.values() if (file := getattr(m, "__file__", None))}
    files = {file for file in imported if file.parent == ROOT} | set(ROOT.glob("mingpt/**/*.py"))
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def _how_to_go_on(env: Mapping[str, str]) -> str:
    """What to do when a rank is gone: nothing where torchrun has restarts left, or had some."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS")
    if restarts is None:
        return "; the same command goes on"
    return "; start torchrun with --max_restarts=3 and it goes on by itself" if restarts == "0" else ""


def run(argv: Sequence[str]) -> int:
    """Trains as the command line says; returns the exit status."""
    speaks = True
    try:
        # One process of a machine says what they all read; one started by hand may have a yaml of its own.
        speaks = detect_launch_environment(os.environ).local_rank in (None, 0)
        config = read_config(argv)
        speaks = True  # who comes to no group has a trouble of its own
        with init_distributed(config.distributed, config.trainer.run_dir) as context:
            speaks = context.rank == 0  # from here on, errors are raised on all ranks alike
            context.init_device(config.distributed.backend)
            tune_malloc()
            facts = {f"{s}.{key}": value for s, keys in config_to_dict(config).items() for key, value in keys.items()}
            context.check_equal(
                {name: value for name, value in facts.items() if name not in PLACES}
                | {"the code's SHA-256": code_digest()}
            )
            return Trainer(config, context).train()
    except UserError as error:
        if speaks:
            complain(str(error))
        return 2
    except PeerError as error:
        complain(f"{error}{_how_to_go_on(os.environ)}")
        return 1
    except RuntimeError as error:
        if not is_oom_error(error):
            raise
        complain(
            f"out of memory in training: {str(error).splitlines()[0]}; lower trainer.micro_batch_size, or set "
            "trainer.activation_checkpointing to full, or with several ranks distributed.strategy to fsdp"
        )
        return 2
    except KeyboardInterrupt:  # before training, where there is nothing to save
        return 130


@record
def main() -> None:
    """The program, under torchrun as without it: a worker's traceback reaches the launcher's summary."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a path may hold what a terminal can't
    status = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written; Python's own end would abort when it meets a thread in PyTorch's C++ code


if __name__ == "__main__":
    main()
