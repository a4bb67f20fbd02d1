import re
import shlex
import subprocess
from operator import attrgetter
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
import torch

from tests.helpers import ROOT, clean_env, wait_until

PROGRAMS = sorted((ROOT / "by_hand").glob("*.py"))
TOUR = (ROOT / "docs/tour.md").read_text()


def shown_output(name: str) -> str:
    return command_and_output(ROOT / f"by_hand/{name}.py")[1].strip()


def command_and_output(program: Path) -> tuple[str, str]:
    """Returns the command in the program's docstring, which is a line by itself, and its output in the tour."""
    command = re.findall(rf"^ +((?:python|torchrun) .*by_hand/{program.name}.*)$", program.read_text(), re.MULTILINE)[0]
    block = rf"^```\n{re.escape(command)}\n```\n.*?^```text\n(.*?)^```$"
    return command, re.findall(block, TOUR, re.MULTILINE | re.DOTALL)[0]


# For each question of the tour: replacements in the program, its command, and what its output contains.
QUESTIONS = {
    "data_parallel": ({"N = 4 ": "N = 32 "}, "python", r"copy the weights +2,573,248 +0 .*\n(.*\n)+.* 160,828 +during"),
    "hello": ({}, "torchrun 4", r"RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 GROUP_RANK=0"),
    "launching": ({}, "torchrun 2", r"^subprocess, env:// 2 ranks, sum 3$"),
    "collectives": ({}, "torchrun 4", r"reduce_scatter +60 +64 +68 +72\n"),
    "groups": (
        {"get_rank(evens)": "get_rank(odds)"},
        "torchrun 4",
        r"evens -1,.*\n.*evens +0.*\n.*evens -1.*\n.*evens +1",
    ),
    "send_recv": ({", tag=1": "", ", tag=2": ""}, "torchrun 2", r"tag 1: 20\.0, tag 2: 10\.0"),
    "ring_all_reduce": ({}, "torchrun 4", r"^(.*-scatter .*\n){3}(all-gather .*\n){3}.* 1\.50 times, .* 4 times"),
    "ddp": ({}, "torchrun 4", re.escape(shown_output("ddp"))),
    "sampler": (
        {"rank=rank)": "rank=rank, drop_last=True)"},
        "python",
        r"epoch 0 +\[4, 3\] \[1, 9\] \[7, 0\] \[5, 8\]\n",
    ),
    "zero": ({}, "torchrun 4", r" PPPPGGGGOO\n.* PPPPGOO\n.* PGOO$"),
    "mixed_precision": ({"2**10": "2**2", "2**44": "2**42"}, "python", r"float16 .* 1\.5e-08 +inf"),
    "activation_checkpointing": ({"range(8)": "range(16)"}, "python", r"without +64 +16\ncheckpointing +16 +32$"),
    "pipeline": ({}, "torchrun 4", r"GPipe: stage 0 keeps 4(.*\n)+1F1B: stage 0 keeps 4"),
    "hang": ({"seconds=2": "seconds=10"}, "torchrun 2", r"Connection closed by peer"),
    "elastic": ({}, "torchrun 2 --max_restarts=0", r"restart 0: step 3, total 12$"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with by_hand/, where commands of the tour can be run as they stand."""
    (tmp_path / "by_hand").symlink_to(ROOT / "by_hand")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [program for program in PROGRAMS if program.stem != "train"], ids=attrgetter("stem")
)
def test_a_program_ends_with_0_and_prints_what_the_tour_shows(program: Path, folder: Path) -> None:
    command, shown = command_and_output(program)
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=clean_env(), stdout=PIPE, text=True, timeout=120, check=True
    )
    assert shown in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_the_expected_answer(name: str, tmp_path: Path) -> None:
    replacements, command, answer = QUESTIONS[name]
    program = (ROOT / f"by_hand/{name}.py").read_text()
    for old, new in replacements.items():
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "changed.py").write_text(program)
    launcher, *options = command.split()
    words = ["python"] if launcher == "python" else ["torchrun", "--standalone", f"--nproc_per_node={options[0]}"]
    done = subprocess.run(
        [*words, *options[1:], "changed.py"],
        cwd=tmp_path,
        env=clean_env(),
        stdout=PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert re.search(answer, done.stdout.strip()), done.stdout
    assert (done.returncode == 0) == (name not in ("hang", "elastic"))


@pytest.mark.slow
@pytest.mark.parametrize("powers", [("2**1", "2**42"), ("2**2", "2**41")])
def test_fp16_works_from_the_power_of_two_in_the_answer_to_the_other(powers: tuple[str, str], tmp_path: Path) -> None:
    program = (ROOT / "by_hand/mixed_precision.py").read_text()
    program = program.replace("2**10", powers[0]).replace("2**44", powers[1])
    done = subprocess.run(
        ["python", "-c", program], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, check=False
    )
    assert "AssertionError" in done.stderr


# If they do not, they can abort the process while Python ends (pytorch#190489).
RUN_AND_PRINT_THREADS = """
import runpy, sys
from pathlib import Path

runpy.run_path(sys.argv.pop(1), run_name="__main__")
print([file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads names of threads from /proc")
@pytest.mark.parametrize("name", ["zero", "train"])
def test_threads_of_gloo_end_with_the_process_group(name: str, folder: Path) -> None:
    (folder / "run.py").write_text(RUN_AND_PRINT_THREADS)
    command = ["torchrun", "--standalone", "--nproc_per_node=2", "run.py", f"by_hand/{name}.py"]
    done = subprocess.run(command, cwd=folder, env=clean_env(), stdout=PIPE, text=True, timeout=120, check=True)
    assert done.stdout.count("'python") == 2  # the main thread of each rank
    assert "pt_gloo_runloop" not in done.stdout


def test_each_program_has_a_question() -> None:
    # train.py's question is answered below, and memory.py's by arithmetic.
    assert {program.stem for program in PROGRAMS} == {*QUESTIONS, "train", "memory"}
    programs = re.split(r"^```\n(?=[^`\n]*by_hand/\w+\.py[^`]*^```$)", TOUR, flags=re.MULTILINE)[1:]
    asked = {re.findall(r"by_hand/(\w+)", part)[0] for part in programs if "\nQuestion: " in part}
    assert asked == {program.stem for program in PROGRAMS}


@pytest.mark.slow
def test_the_program_to_copy_resumes_with_the_same_bits_after_a_kill(folder: Path) -> None:
    def start(epochs: int, folder: Path) -> subprocess.Popen:
        command = ["torchrun", "--standalone", "--nproc_per_node=2", ROOT / "by_hand/train.py", str(epochs)]
        return subprocess.Popen(command, cwd=folder, env=clean_env(), stdout=PIPE, text=True)

    snapshot = folder / "runs/tour/train.pt"
    with start(100_000, folder) as killed:
        wait_until(snapshot.exists, "the first save", process=killed)
        for worker in psutil.Process(killed.pid).children():
            worker.kill()
    assert killed.returncode == 1
    epochs = torch.load(snapshot)["epoch"] + 2
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    outputs = []
    for place in (folder, undisturbed):
        with start(epochs, place) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        outputs.append(output.splitlines())
    resumed, whole = outputs
    assert resumed == whole[-2:]
    losses = [float(line.rpartition("loss ")[2]) for line in whole]
    assert losses[-1] < losses[0] / 2
    torch.testing.assert_close(torch.load(snapshot), torch.load(undisturbed / "runs/tour/train.pt"), rtol=0, atol=0)


@pytest.mark.slow
def test_the_program_to_copy_continues_and_saves_what_the_tour_shows(folder: Path) -> None:
    first, continued = re.findall(r"^```\n(torchrun [^`]*by_hand/train.py.*?)^```$", TOUR, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["bash", "-ec", first + continued], cwd=folder, env=clean_env(), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(command_and_output(ROOT / "by_hand/train.py")[1])
    assert re.findall(r"^epoch (\d)", done.stdout, re.MULTILINE) == ["0", "1", "2", "3", "4"]
    names = done.stdout.splitlines()[-1]
    assert f"prints `{names}`" in TOUR
    on_four = ["torchrun", "--standalone", "--nproc_per_node=4", ROOT / "by_hand/train.py", "6"]
    done = subprocess.run(on_four, cwd=folder, env=clean_env(), stdout=PIPE, text=True, check=True)
    assert done.stdout.startswith("epoch 5: 13 steps of 80 samples")  # the answer to the question
    on_one = ["torchrun", "--standalone", ROOT / "by_hand/train.py", "7"]
    subprocess.run(on_one, cwd=folder, env=clean_env(), capture_output=True, check=True)
    [group] = torch.load(folder / "runs/tour/train.pt")["optimizer"]["param_groups"]
    assert group["lr"] == 0.02  # of one rank
    assert names.startswith("0.weight")


@pytest.mark.parametrize("program", PROGRAMS, ids=attrgetter("stem"))
def test_a_program_names_what_does_the_same_for_real_and_does_not_import_it(program: Path) -> None:
    modules = re.findall(r"^\s*(?:from|import) (\w+)", program.read_text(), re.MULTILINE)
    assert modules
    assert not {*modules} & ({path.stem for path in [*ROOT.iterdir(), *PROGRAMS]} - {"copy"})
    places = re.findall(r"^In this repository: (.+)$", program.read_text(), re.MULTILINE)
    assert places
    for name, file in re.findall(r"`?([\w.]+)`?\s+in\s+([\w/]+\.py)", places[0]):
        assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", (ROOT / file).read_text()), places
