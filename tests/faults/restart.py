"""Prints where the time goes from the loss of a rank to the next step, under torchrun with restarts.

    python data/prepare.py && python -m tests.faults.restart
    python -m tests.faults.restart --kills 20 --compile

It trains the default configuration on two ranks, and kills one of them several times, at a random moment.
"""

import argparse
import random
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tests.faults.runs import Run, send
from tests.helpers import ROOT

# The place that a part begins at -> the part, which ends at the next place.
PARTS = {
    "killed": "torchrun notices, and the other rank exits",
    "ended": "torchrun starts processes",
    "process": "the interpreter starts",
    "script": "imports until `main()`",
    "config": "configuration",
    "imports": "imports of PyTorch and the library",
    "rendezvous": "rendezvous",
    "init_process_group": "process group",
    "context": "`DistributedContext`",
    "prepare_run": "`prepare_run`",
    "lock": "locks",
    "snapshot": "loading the snapshot",
    "text": "text",
    "strategy": "model, DDP, optimizer",
    "restore": "restoring the state",
    "guard": "rest of `Trainer`",
    "summary": "summary",
    "log": "metrics.jsonl, TensorBoard",
    "step": "first step",
    "finished": "",
}


def read_times(file: Path) -> dict[int, dict[str, float]]:
    """When each process, by its id, reached each place."""
    times: dict[int, dict[str, float]] = {}
    for line in file.read_text().splitlines():
        pid, place, at = line.split()
        times.setdefault(int(pid), {})[place] = float(at)
    return times


def have_trained(file: Path, old: set[int]) -> bool:
    """Whether two processes that are not old have finished a step."""
    return sum("finished" in places and pid not in old for pid, places in read_times(file).items()) == 2


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(run: Run, file: Path, rank: int, old: set[int]) -> dict[str, float]:
    """Kills a rank at a random moment; returns when the next rank 0 reached each place."""
    run.wait(lambda: have_trained(file, old), "a step of both ranks")
    time.sleep(random.uniform(0.5, 3))
    pids = run.ranks()
    other = pids[1 - rank]
    killed = time.time()
    send(pids[rank], signal.SIGKILL)
    while is_running(other):
        time.sleep(0.005)
    ended = time.time()
    old.update(pids)
    run.wait(lambda: have_trained(file, old), "the next step")
    return {"killed": killed, "ended": ended, **read_times(file)[run.ranks()[0]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--compile", action="store_true", help="set trainer.compile")
    args, options = parser.parse_known_args()
    if args.compile:
        options += ["--trainer.compile", "true"]
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        run_dir = Path(folder) / "run"
        file = Path(folder) / "times"
        argv = ["--config", str(ROOT / "gpt2_train_cfg.yaml"), "--trainer.run_dir", str(run_dir), *options]
        argv += ["--trainer.max_steps", "1000000"]
        program = ROOT / "tests/faults/restart_times.py"
        with Run(run_dir, argv, program, RESTART_TIMES=str(file), PYTHONDONTWRITEBYTECODE=None) as run:
            run.start_torchrun(2, f"--max_restarts={args.kills + 1}")
            run.wait(lambda: any(run_dir.glob("snapshots/*.pt")), "a snapshot")
            old: set[int] = set()
            kill(run, file, 0, old)  # the first restart may fill caches
            restarts = [kill(run, file, i % 2, old) for i in range(args.kills)]
    print("| part | median, s | from | to |\n| --- | --- | --- | --- |")
    for place, end in pairwise(PARTS):
        show(PARTS[place], [times[end] - times[place] for times in restarts])
    show("**total**", [times["finished"] - times["killed"] for times in restarts])


def show(part: str, seconds: list[float]) -> None:
    print(f"| {part} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()
