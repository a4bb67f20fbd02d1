"""The supervisor of a trainer, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, clean_env, wait_until

SUPERVISOR = ROOT / "mingpt/survive/supervisor.py"
# Counts its starts in a file, and does what the start's word says.
CHILD = """
import os, signal, sys, time
from pathlib import Path
file, words = Path(sys.argv[1]), sys.argv[2:]
with file.open("a") as log:
    log.write(f"{os.getpid()}\\n")
word = words[min(len(file.read_text().splitlines()), len(words)) - 1]
if " " in word:
    os.write(int(os.environ["MINGPT_REPORT_FD"]), word[0].encode())
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
        (["SIGKILL", "0"], 0, 2, "ended by SIGKILL: starting another in 0.1 s, after 1 without a finished step"),
        (["2"], 2, 1, ""),
        (["143"], 143, 1, ""),
        (["75", "0"], 0, 2, "ended by the loss of all others: starting another"),
        (["1", "0"], 0, 2, "ended by an error (status 1): starting another"),
        (["failed 1"], 1, 1, ""),
        (["trained SIGKILL"] * 3 + ["2"], 2, 4, "ended by SIGKILL: starting another\n"),
        (["trained SIGKILL"] + ["SIGKILL", "1"] * 3 + ["0"], 0, 8, "(status 1): starting another in 0.1 s, after 6 "),
        (["SIGSEGV"], 139, 5, "ended by SIGSEGV, 5 times before it had finished a step"),
        (["1"], 1, 5, "ended by an error (status 1), 5 times before it had finished a step"),
    ],
)
def test_a_process_is_started_again_unless_its_end_is_final(
    words: list[str], status: int, starts: int, part: str, tmp_path: Path
) -> None:
    process = start(*command(tmp_path / "starts", *words, MAX_DELAY=0.1))
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == status
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert part in stderr


def test_a_signal_just_after_the_end_of_the_process_changes_nothing(tmp_path: Path) -> None:
    process = start(*command(tmp_path / "starts", "0", POLL_SECONDS=1))
    stat = Path(f"/proc/{child_of(tmp_path / 'starts')}/stat")
    wait_until(lambda: stat.read_text().split()[2] == "Z", "end of the child")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert not stderr


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_stops_the_process_unless_it_is_ignored(is_ignored: bool, tmp_path: Path) -> None:
    """As `nohup` ignores it."""
    nohup = ["nohup"] if is_ignored else []
    process = start(*nohup, *command(tmp_path / "starts", "sleep"))
    child_of(tmp_path / "starts")
    time.sleep(0.3)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert (process.poll() is None) == is_ignored
    process.terminate()
    process.communicate(timeout=30)


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
    launch = "import os, subprocess, sys, time; os.environ['MINGPT_LAUNCHER_PID'] = str(os.getpid()); "
    launch += "subprocess.Popen(sys.argv[1:]); time.sleep(60)"
    launcher = start(sys.executable, "-c", launch, *argv)
    child = child_of(tmp_path / "starts")
    launcher.kill()
    launcher.communicate(timeout=30)  # waits for the end of the supervisor too, which has inherited stderr
    assert not Path(f"/proc/{child}").exists()
