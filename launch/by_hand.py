"""Starts ranks on this machine with Python's multiprocessing: python launch/by_hand.py 2 [options of main.py]."""

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def run_rank(rank: int, world_size: int, rendezvous_file: str, options: list[str]) -> None:
    import main  # noqa: PLC0415  # not in the parent process, which only waits

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    sys.argv = ["main.py", *options, "--distributed.init_method", f"file://{rendezvous_file}"]
    main.main()


if __name__ == "__main__":
    world_size, options = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(rank, world_size, f"{folder}/rendezvous", options))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the ranks too, which save
        signal.signal(signal.SIGTERM, lambda number, frame: [process.terminate() for process in ranks])
        for process in ranks:
            process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
