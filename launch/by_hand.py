"""Starts ranks on this machine with Python's subprocess: python launch/by_hand.py 2 [options of main.py]."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

MAIN = Path(__file__).resolve().parent.parent / "main.py"

ranks: list[subprocess.Popen[bytes]] = []


def terminate(number: int, frame: FrameType | None) -> None:
    for process in ranks:
        process.terminate()


def main() -> int:
    if len(sys.argv) < 2 or not sys.argv[1].isdecimal() or int(sys.argv[1]) < 1:
        print(__doc__, file=sys.stderr)
        return 0 if "--help" in sys.argv else 2
    world_size = int(sys.argv[1])
    options = sys.argv[2:]
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent ignores it, all exit statuses are 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # a free port for the rendezvous
    command = [sys.executable, str(MAIN), "--distributed.init_method", f"tcp://127.0.0.1:{port}", *options]
    for rank in range(world_size):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        env["MINGPT_LAUNCHER_PID"] = str(os.getpid())  # the ranks save and exit if this process is killed
        ranks.append(subprocess.Popen(command, env=env))  # noqa: S603
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the ranks, which save
    return max(abs(process.wait()) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
