"""Tests this program on this machine, on as many ranks as are started.

    python -m benchmarks.selftest
    torchrun --standalone --nproc_per_node=N -m benchmarks.selftest
    python -m benchmarks.selftest --only machine speed

Each check prints PASS, FAIL or SKIP with what it found, or with the reason. The last line is a JSON object with all
results, for a report of a problem. Exit status: 0; 1 if a check fails; 2 for a wrong option.
"""

import argparse
import gc
import json
import logging
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from traceback import extract_tb

import torch

from benchmarks import selftest_checks as checks
from benchmarks.harness import ROOT, SkippedError, machine_name
from benchmarks.selftest_checks import CheckFailedError, SelfTest, share_groups
from mingpt.config import DistributedConfig
from mingpt.distributed import position
from mingpt.distributed.process_group import DistributedContext, init_distributed
from mingpt.errors import PeerError, UserError
from mingpt.hardware.device import set_deterministic, tune_malloc
from mingpt.monitoring.logging import run_script

CHECKS: dict[str, Callable[[SelfTest], str]] = {
    "machine": checks.machine,
    "losses": checks.losses,
    "resume": checks.resume,
    "tree": checks.tree,
    "snapshot": checks.snapshot,
    "kill": checks.kill,
    "oom": checks.oom,
    "stop": checks.stop,
    "restart": checks.restart,
    "memory": checks.memory,
    "waits": checks.waits,
    "speed": checks.speed,
}
TIMEOUT = 120.0  # seconds that a rank waits for another within a check
AGREEMENT_TIMEOUT = timedelta(hours=1)  # for which ranks wait for one that makes a check alone


@dataclass(frozen=True)
class Result:
    """What a check found, on one rank or on all."""

    name: str
    status: str  # PASS, FAIL or SKIP
    detail: str  # what was found, or the reason
    seconds: float = 0.0  # that it took
    ended: float = 0.0  # seconds since 1970
    raised: bool = False  # another exception than those of checks

    def __str__(self) -> str:
        line = f"{self.status}  {self.name:<8}  {self.detail}"
        if self.seconds >= 0.1:
            line += f" ({self.seconds:.1f} s)"
        return line


def title(name: str) -> str:
    return (CHECKS[name].__doc__ or "").split("\n")[0]


def run_check(name: str, test: SelfTest) -> Result:
    """Runs a check on this rank."""
    began = time.perf_counter()
    raised = False
    try:
        detail = CHECKS[name](test)
        status = "PASS"
    except SkippedError as reason:
        detail = str(reason)
        status = "SKIP"
    except CheckFailedError as error:
        detail = str(error)
        status = "FAIL"
    except Exception as error:  # whatever it is, the other checks go on
        detail = describe_exception(error)
        status = "FAIL"
        raised = True
    return Result(name, status, detail, round(time.perf_counter() - began, 1), time.time(), raised)


def describe_exception(error: Exception) -> str:
    """The first line of its message, and the line of this program that raised it."""
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0]}"
    own = [frame for frame in extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    if own:
        text += f" ({Path(own[-1].filename).relative_to(ROOT)}, line {own[-1].lineno})"
    return text


def agree(mine: Result, agreement: DistributedContext) -> tuple[Result, str]:
    """What rank 0 found, or the rank that failed first; and why the ranks can't go on together, or an empty string."""
    try:
        results = [Result(**values) for values in agreement.all_gather_object(asdict(mine))]
    except RuntimeError as error:
        gone = f"another rank is gone: {str(error).splitlines()[0]}"
        return replace(mine, status="FAIL", detail=gone), f"another rank is gone since {mine.name}"
    failed = [rank for rank, result in enumerate(results) if result.status == "FAIL"]
    if not failed:
        return results[0], ""
    rank = min(failed, key=lambda rank: results[rank].ended)  # later ones may have failed because of it
    found = results[rank]
    if len(results) > 1:
        found = replace(found, detail=f"rank {rank}: {found.detail}")
    details = {result.detail for result in results}
    if any(result.raised for result in results) and len(details) > 1:
        return found, f"ranks are out of step since rank {rank} failed in {mine.name}"
    return found, ""


def run_checks(names: Sequence[str], test: SelfTest, agreement: DistributedContext) -> tuple[list[Result], str]:
    """Runs checks on all ranks; rank 0 prints each result, and on a terminal the title of the check that runs.

    Args:
        agreement: all ranks, in a process group that no check uses

    Returns:
        the results, and why the ranks could not go on together, or an empty string
    """
    results = []
    broken = ""
    width = 0
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    for name in names:
        if width and test.context.rank == 0:
            print(f"      {name:<8}  {title(name)}"[: width - 1], end="", flush=True)
        result = Result(name, "SKIP", broken)
        if not broken:
            result, broken = agree(run_check(name, test), agreement)
        results.append(result)
        line = str(result)
        if width:
            line = "\r\x1b[K" + textwrap.fill(line, width, subsequent_indent=" " * 16, break_on_hyphens=False)
        if test.context.rank == 0:
            print(line, flush=True)
    return results, broken


def summary(results: Sequence[Result], device: torch.device, ranks: int) -> dict[str, object]:
    """What a report of a problem needs."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = None
    if shutil.which("git"):
        git = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if git.returncode == 0:
            commit = git.stdout.strip()
    rows = []
    for result in results:
        rows.append({key: asdict(result)[key] for key in ("name", "status", "detail", "seconds")})
    return {
        "status": "FAIL" if any(result.status == "FAIL" for result in results) else "PASS",
        "machine": machine_name(device),
        "ranks": ranks,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit,
        "checks": rows,
    }


def run(argv: Sequence[str]) -> None:
    """Runs the checks that the command line names, or all.

    Raises:
        UserError: there is no such check.
    """
    titles = "\n".join(f"  {name:<10}{title(name)}" for name in CHECKS)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nchecks:\n{titles}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the checks to run")
    names = parser.parse_args(argv).only or list(CHECKS)
    for name in names:
        if name not in CHECKS:
            raise UserError(f"--only: there is no check {name}; there are: {', '.join(CHECKS)}")

    position.SLOW_SECONDS = math.inf  # rank 0 is no slow rank while it makes a check alone
    tune_malloc()
    gc.freeze()  # each check collects what the one before has left
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns that gloo lacks an all-to-all
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that files and processes are removed
    config = DistributedConfig(backend="auto" if torch.cuda.is_available() else "gloo", timeout_seconds=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder, init_distributed(config, needs_process_group=True) as context:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        context.init_device(config.backend)
        set_deterministic(context.device)  # NCCL reads its variables once
        torch.use_deterministic_algorithms(False)
        agreement = copy(context)
        agreement.timeout = AGREEMENT_TIMEOUT
        agreement = agreement.subgroup([range(context.world_size)])
        share_groups(context)
        results, broken = run_checks(names, SelfTest(context, Path(folder)), agreement)
        if context.rank == 0:
            counts = Counter(result.status for result in results)
            print(", ".join(f"{counts[status]} {status}" for status in ("PASS", "FAIL", "SKIP")))
            print(json.dumps(summary(results, context.device, context.world_size)), flush=True)
        with suppress(RuntimeError):  # torchrun ends the others when the first exits with an error
            agreement.all_gather_object(None)
        if broken:
            raise PeerError(broken)  # so that the process group stays, which could not be destroyed
    if any(result.status == "FAIL" for result in results):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_script(run))
