"""The supervisor of a trainer, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, clean_env, wait_until

SUPERVISOR = ROOT / "mingpt/distributed/supervisor.py"
# Counts its starts in a file, and does what the start's word says.
CHILD = """
import os, signal, sys, time
from pathlib import Path
file, words = Path(sys.argv[1]), sys.argv[2:]
with file.open("a") as log:
    log.write(f"{os.getpid()}\\n")
word = words[min(len(file.read_text().splitlines()), len(words)) - 1]
if word.startswith("join "):
    os.write(int(os.environ["MINGPT_JOINED_FD"]), b"x")
action = word.split()[-1]
if action == "sleep":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    time.sleep(60)
if action.isdecimal():
    sys.exit(int(action))
os.kill(os.getpid(), getattr(signal, action))
"""


def command(file: Path, *words: str, **constants: float) -> list[str]:
    """The command of a supervisor whose child does what the words say, one at each start."""
    changes = "; ".join(f"supervisor.{name} = {value}" for name, value in constants.items())
    run = f"import supervisor, sys; {changes or 'pass'}; sys.exit(supervisor.Supervisor(sys.argv[1:]).run())"
    return [sys.executable, "-c", run, sys.executable, "-c", CHILD, str(file), *words]


def start(*argv: str, **env: str) -> subprocess.Popen[str]:
    path = {"PYTHONPATH": str(SUPERVISOR.parent)}
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=clean_env(**env) | path)


def child_of(file: Path, number: int = 1) -> int:
    """The process id of the child that was started as the given one."""
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= number, "start of a child")
    return int(file.read_text().splitlines()[number - 1])


def test_a_supervisor_needs_only_the_standard_library() -> None:
    run = "import sys; sys.argv = ['', '-c', '']; import supervisor; assert not {'torch', 'yaml'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-S", "-c", run], check=True, env={"PYTHONPATH": str(SUPERVISOR.parent)})


@pytest.mark.parametrize(
    ("words", "status", "starts", "part"),
    [
        (["SIGKILL", "0"], 0, 2, "its process was ended by SIGKILL: starting another"),
        (["2"], 2, 1, ""),
        (["75", "0"], 0, 2, "starting another"),
        (["join SIGKILL"] * 3 + ["3"], 3, 4, "starting another"),
        (["SIGSEGV"], 139, 5, "ended by SIGSEGV, 5 times in a row before it had joined the others"),
    ],
)
def test_only_signals_start_another_process(
    words: list[str], status: int, starts: int, part: str, tmp_path: Path
) -> None:
    process = start(*command(tmp_path / "starts", *words, MAX_DELAY=0.1))
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == status
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert part in stderr


def test_signals_reach_a_process_even_if_it_is_stopped(tmp_path: Path) -> None:
    process = start(*command(tmp_path / "starts", "sleep"))
    child = child_of(tmp_path / "starts")
    time.sleep(0.3)
    os.kill(child, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert not Path(f"/proc/{child}").exists()


def test_a_process_that_stays_stopped_is_replaced(tmp_path: Path) -> None:
    process = start(*command(tmp_path / "starts", "sleep", "0", STOPPED_SECONDS=0.5))
    os.kill(child_of(tmp_path / "starts"), signal.SIGSTOP)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert child_of(tmp_path / "starts", 2)


def test_the_loss_of_the_launcher_stops_the_process(tmp_path: Path) -> None:
    argv = [*command(tmp_path / "starts", "sleep")]
    launch = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(60)"
    launcher = start(sys.executable, "-c", launch, *argv, TORCHELASTIC_RUN_ID="x")
    child = child_of(tmp_path / "starts")
    launcher.kill()
    launcher.communicate(timeout=30)  # waits for the end of the supervisor too, which has inherited stderr
    assert not Path(f"/proc/{child}").exists()
