"""Many real processes train on one machine. One is killed, the others name it, and fewer processes resume.

    nice python -m tests.faults.many_ranks
    nice python -m tests.faults.many_ranks --ranks 8 --resumed 6 --distributed.strategy zero1

Each is main.py with one thread and a tiny model, a fork of a process that has imported PyTorch. 64 of them take some GB
of memory. Their output is printed like on a shared terminal. Other options are main.py's.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import main
from mingpt.program import exit_process, run_program
from tests.helpers import free_port, read_rows, run_args, start_ranks, write_text

STEPS = 20  # steps before a rank is killed, and after it
TIMEOUT = 600.0  # seconds for each start and each end


def run_rank(argv: Sequence[str], port: int, output: Path) -> None:
    """For `start_ranks`: runs main.py with torchrun's variables."""
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["main.py", *argv]
    exit_process(run_program(main.main, argv))


def newest_step(run_dir: Path) -> int:
    rows = read_rows(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    return rows[-1]["step"] if rows else 0


def wait_for_ends(processes: Sequence[Any]) -> Counter[int]:
    """Waits for processes, and kills the ones that do not end. Returns the number of processes by exit status."""
    deadline = time.monotonic() + TIMEOUT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return Counter(process.exitcode for process in processes)


def lose_and_resume(ranks: int, resumed: int, options: Sequence[str], folder: Path) -> bool:
    """Prints the events and the ranks' messages. Returns whether all of them are right."""
    run_dir, output = folder / "run", folder / "output"
    argv = run_args(
        run_dir,
        write_text(folder / "text.txt"),
        trainer__batch_size=ranks,
        trainer__max_steps=2 * STEPS,
        trainer__eval_every=STEPS,
        trainer__save_every=STEPS // 4,
        trainer__log_every=STEPS // 4,
        distributed__timeout_seconds=TIMEOUT / 2,
    )
    argv += options
    lost = 3 * ranks // 5
    began = time.monotonic()
    processes, _queue = start_ranks(ranks, run_rank, argv, free_port(), output, tmp_path=folder)
    while newest_step(run_dir) < STEPS and all(process.is_alive() for process in processes):
        time.sleep(0.1)
    print(f"{ranks} ranks: step {newest_step(run_dir)} after {time.monotonic() - began:.1f} s")

    began = time.monotonic()
    processes[lost].kill()
    statuses = wait_for_ends(processes)
    said = output.read_text()
    print(f"{said}rank {lost} was killed; exit statuses {dict(statuses)} after {time.monotonic() - began:.1f} s")
    print(f"{said.count('error: ')} errors in {said.count(chr(10))} lines")
    is_right = statuses == {-signal.SIGKILL: 1, 1: ranks - 1} and f"error: rank {lost} (" in said

    began = time.monotonic()
    processes, _queue = start_ranks(resumed, run_rank, argv, free_port(), output, tmp_path=folder)
    statuses = wait_for_ends(processes)
    print(output.read_text().removeprefix(said), end="")
    print(f"{resumed} ranks: exit statuses {dict(statuses)} after {time.monotonic() - began:.1f} s")
    first, *_, last = read_rows(run_dir)
    is_right &= statuses == {0: resumed} and last["step"] == 2 * STEPS
    return is_right and [first["world_size"], last["world_size"]] == [ranks, resumed]


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, metavar="N", help="ranks before the kill (default: 64)")
    parser.add_argument("--resumed", type=int, default=48, metavar="N", help="ranks after it (default: 48)")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as folder:
        is_right = lose_and_resume(args.ranks, args.resumed, options, Path(folder))
    print("right" if is_right else "WRONG")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(run_all())
