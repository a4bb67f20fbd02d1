"""Starts ranks on this machine with Python's multiprocessing: python launch/by_hand.py 2 [options of main.py]."""

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def rank(number: int, size: int, meeting: str, options: list[str]) -> None:
    """One process of the run."""
    import main  # noqa: PLC0415  # each process has a PyTorch of its own

    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size)}
    sys.argv = ["main.py", *options, "--distributed.init_method", f"file://{meeting}"]
    main.main()


if __name__ == "__main__":
    size, options = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:  # a file to meet at must be new at each start
        start = multiprocessing.get_context("spawn").Process
        ranks = [start(target=rank, args=(i, size, f"{folder}/meeting", options)) for i in range(size)]
        for each in ranks:
            each.start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the ranks too, which save
        signal.signal(signal.SIGTERM, lambda number, frame: [each.terminate() for each in ranks])
        for each in ranks:
            each.join()
    sys.exit(max(abs(each.exitcode) for each in ranks))
