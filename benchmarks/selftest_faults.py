"""The checks of selftest.py with injected faults. Rank 0 makes them alone, with ranks of its own under torchrun.

All of them interrupt the same run, which each start resumes.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch

from benchmarks.harness import ROOT, SkippedError
from benchmarks.selftest_harness import CheckFailedError, SelfTest, on_gpu, tiny_options

LAST_STEP = 40
LIMIT = 180  # seconds after which ranks that have not ended are killed
LAUNCHER_VARIABLES = re.compile("RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|SLURM|OMPI|PMI)_")


class Outcome(NamedTuple):
    """What ranks with a fault have done.

    Args:
        status: exit status of torchrun
        output: stdout and stderr of all ranks
        message: the first message in which another rank names the last one, or None
        seconds: from the fault to that message
    """

    status: int
    output: str
    message: str | None
    seconds: float


def kill_step(test: SelfTest) -> str:
    """kill -9 of a rank in a step: the others name it."""
    return _interrupt(test, "kill_step")


def kill_eval(test: SelfTest) -> str:
    """kill -9 of a rank in an evaluation: the others name it."""
    return _interrupt(test, "kill_eval")


def oom(test: SelfTest) -> str:
    """A rank runs out of memory: it says so, others name it."""
    return _interrupt(test, "oom", "error: out of memory in training")


def stop(test: SelfTest) -> str:
    """SIGSTOP of a rank: the others name it after a timeout."""
    return _interrupt(test, "stop")


def restart(test: SelfTest) -> str:
    """The run that these faults interrupted resumes and ends."""
    if test.context.rank:
        return ""
    if not test.faults:
        raise SkippedError("no fault came before it: name one of kill_step, kill_eval, oom and stop too")
    outcome = _start(test, "none")
    resumed = re.search(r"resuming from \S*step_(\d+)\.pt", outcome.output)
    if outcome.status or not resumed:
        raise CheckFailedError(f"it did not resume, or not end: {_last_line(outcome)}")
    return f"resumed from step {int(resumed[1])} after {', '.join(test.faults)}, and ended at step {LAST_STEP}"


def _ranks(test: SelfTest) -> int:
    return max(2, test.context.local_world_size)


def _options(test: SelfTest) -> list[str]:
    """Options of main.py; on GPUs, with gloo if there is none for each rank."""
    has_gpus = on_gpu(test) and torch.cuda.device_count() >= _ranks(test)
    overrides: dict[str, Any] = {
        "trainer.run_dir": test.fault_dir,
        "trainer.micro_batch_size": "null",
        "trainer.max_steps": LAST_STEP,
        "trainer.log_every": 1,
        "trainer.eval_every": 4,
        "trainer.sample_every": "null",
        "trainer.save_every": 2,
        "distributed.backend": "nccl" if has_gpus else "gloo",
        "distributed.timeout_seconds": 20 if has_gpus else 8,
    }
    return test.run_options(tiny_options(_ranks(test)), overrides)


def _interrupt(test: SelfTest, fault: str, own_message: str = "") -> str:
    if test.context.rank:
        return ""
    outcome = _start(test, fault)
    if test.faults and "resuming from" not in outcome.output:
        raise CheckFailedError(f"the run did not resume after {test.faults[-1]}: {_last_line(outcome)}")
    test.faults.append(fault)
    if outcome.message is None:
        raise CheckFailedError(f"no rank named rank {_ranks(test) - 1}: {_last_line(outcome)}")
    if own_message not in outcome.output:
        raise CheckFailedError(f"the rank itself did not report {own_message!r}: {_last_line(outcome)}")
    gloo = "with gloo, as there are fewer GPUs than ranks, " if on_gpu(test) and "gloo" in _options(test) else ""
    return f"{gloo}after {outcome.seconds:.1f} s: {shorten(outcome.message, 150)}"


def _last_line(outcome: Outcome) -> str:
    """Why the ranks have ended, as far as a line can say it."""
    lines = outcome.output.splitlines()
    errors = [line for line in lines if "rror: " in line]
    return f"torchrun's exit status is {outcome.status}; {(errors or lines or ['no output'])[-1]}"


def _start(test: SelfTest, fault: str) -> Outcome:
    folder, ranks = Path(tempfile.mkdtemp(dir=test.folder)), _ranks(test)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "benchmarks.fault_injection", fault, str(folder), *_options(test)]
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    env["TMPDIR"] = str(test.folder)  # where torchrun leaves a folder if it is killed
    output, message, named_at = "", None, 0.0
    # In a session of its own, so that Ctrl-C reaches this process alone, which then ends the others.
    with subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:

        def kill(*files: Path) -> None:
            for file in files:
                with suppress(OSError):
                    os.kill(int(file.read_text()), signal.SIGKILL)

        def kill_all() -> None:
            process.kill()
            kill(*folder.glob("pid-*"))

        timer = threading.Timer(LIMIT, kill_all)
        timer.start()
        try:
            for line in process.stdout or ():
                output += line
                if message is None and f"error: rank {ranks - 1} (" in line:
                    message, named_at = line.partition("error: ")[2].partition(";")[0].strip(), time.time()
                    kill(folder / f"pid-{ranks - 1}")  # torchrun would wait 30 seconds for one that is stopped
            process.wait()
        finally:
            timer.cancel()
            kill_all()
    struck_at = float((folder / "struck").read_text()) if (folder / "struck").exists() else None
    outcome = Outcome(process.returncode, output, message, named_at - (struck_at or named_at))
    if fault != "none" and struck_at is None:
        del test.fault_dir  # that run may have ended
        test.faults.clear()
        raise CheckFailedError(f"the ranks ended before the fault: {_last_line(outcome)}")
    return outcome
