"""Many real processes train on one machine. One is killed, the others name it, and fewer processes resume.

    nice python -m docs.many_ranks
    nice python -m docs.many_ranks --ranks 8 --resumed 6 --distributed.strategy zero1

Each is main.py with one thread and a tiny model, a fork of a process that has imported PyTorch. 64 of them take some GB
of memory. Other options are main.py's.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.helpers import free_port, main_process, read_rows, run_args, start_ranks, wait_for_step, write_text

STEPS = 20  # steps before a rank is killed, and after it
TIMEOUT = 600.0  # seconds for each start and each end


def run_rank(argv: list[str], port: int, output: Path) -> None:
    """For `start_ranks`: runs main.py with torchrun's variables."""
    rank = os.environ["RANK"]
    world_size = os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main_process(argv, output / f"stdout-{rank}", output / f"stderr-{rank}")


def train(ranks: int, argv: list[str], folder: Path, lost: int | None = None) -> tuple[Counter[int], str]:
    """Returns the number of processes by exit status, and their messages. The rank `lost` is killed after STEPS."""
    output = Path(tempfile.mkdtemp(dir=folder))
    processes, _queue = start_ranks(ranks, run_rank, argv, free_port(), output, tmp_path=folder)
    if lost is not None:
        wait_for_step(folder / "run", STEPS, timeout=TIMEOUT)
        processes[lost].kill()
    began = time.monotonic()
    for process in processes:
        process.join(max(0.0, began + TIMEOUT - time.monotonic()))
        process.kill()
        process.join()
    statuses = Counter(process.exitcode for process in processes)
    messages = "".join(file.read_text() for file in sorted(output.glob("stderr-*")))
    print(f"{messages}{ranks} ranks: exit statuses {dict(statuses)} after {time.monotonic() - began:.1f} s")
    return statuses, messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, metavar="N", help="ranks before the kill (default: 64)")
    parser.add_argument("--resumed", type=int, default=48, metavar="N", help="ranks after it (default: 48)")
    args, options = parser.parse_known_args()
    every = dict.fromkeys(("trainer__save_every", "trainer__log_every"), STEPS // 4)
    every |= {"trainer__max_steps": 2 * STEPS, "trainer__eval_every": STEPS}
    size = {"trainer__batch_size": args.ranks, "distributed__timeout_seconds": TIMEOUT / 2}
    lost = 3 * args.ranks // 5
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as name:
        folder = Path(name)
        argv = [*run_args(folder / "run", write_text(folder / "text.txt"), **every, **size), *options]
        statuses, messages = train(args.ranks, argv, folder, lost)
        assert statuses == {-signal.SIGKILL: 1, 1: args.ranks - 1}
        assert messages.count("error: ") == 1
        assert f"error: rank {lost} (" in messages
        assert train(args.resumed, argv, folder)[0] == {0: args.resumed}
        first, *_, last = read_rows(folder / "run")
        assert (first["world_size"], last["world_size"], last["step"]) == (args.ranks, args.resumed, 2 * STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
