import re
import shlex
import subprocess
from doctest import ELLIPSIS, OutputChecker
from operator import attrgetter
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
import torch

from tests.helpers import ROOT, clean_env, wait_until

PROGRAMS = sorted((ROOT / "by_hand").glob("*.py"))
TOUR = (ROOT / "docs/tour.md").read_text()


def command_and_output(program: Path) -> tuple[str, str]:
    """Returns the command in the program's docstring, which is a line by itself, and its output in the tour."""
    command = re.findall(rf"^ +((?:python|torchrun) .*by_hand/{program.name}.*)$", program.read_text(), re.MULTILINE)[0]
    block = rf"^```\n{re.escape(command)}\n```\n.*?^```text\n(.*?)^```$"
    return command, re.findall(block, TOUR, re.MULTILINE | re.DOTALL)[0]


def answer(name: str) -> str:
    """Returns the output in the answer to a program's question in the tour, where `...` stands for any text."""
    block = rf"^```\n[^`\n]*by_hand/{name}\.py.*?^<details><summary>Answer</summary>\n\n```text\n(.*?)^```$"
    return re.findall(block, TOUR, re.MULTILINE | re.DOTALL)[0]


# For each question of the tour: the command, and replacements in the program.
QUESTIONS = {
    "data_parallel": ("python", {"N = 4 ": "N = 32 "}),
    "hello": ("torchrun 4", {}),
    "launching": ("torchrun 2", {}),
    "collectives": ("torchrun 4", {}),
    "groups": ("torchrun 4", {"evens {dist.get_rank(evens)": "odds {dist.get_rank(odds)"}),
    "send_recv": ("torchrun 2", {", tag=1": "", ", tag=2": ""}),
    "ring_all_reduce": ("torchrun 4", {}),
    "ddp": ("torchrun 2", {"i + 3": "i + 2", "parameters), 3": "parameters), 2"}),
    "sampler": ("python", {"rank=rank)": "rank=rank, drop_last=True)"}),
    "zero": ("torchrun 4", {}),
    "memory": ("python", {"{len(bar)}a": "{7 * len(bar)} GB"}),
    "mixed_precision": ("python", {"0, 10, 44": "1, 2, 41, 42"}),
    "activation_checkpointing": ("python", {"range(8)": "range(16)"}),
    "pipeline": ("torchrun 4", {}),
    "hang": ("torchrun 2", {"seconds=2": "seconds=10"}),
    "elastic": ("torchrun 2 --max_restarts=0", {}),
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
def test_the_answer_in_the_tour_is_what_the_changed_program_prints(name: str, tmp_path: Path) -> None:
    command, replacements = QUESTIONS[name]
    program = (ROOT / f"by_hand/{name}.py").read_text()
    for old, new in replacements.items():
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "changed.py").write_text(program)
    launcher, *options = command.split()
    words = ["python"] if launcher == "python" else ["torchrun", "--standalone", f"--nproc_per_node={options[0]}"]
    words += [*options[1:], "changed.py"]
    done = subprocess.run(words, cwd=tmp_path, env=clean_env(), stdout=PIPE, text=True, timeout=120, check=False)
    assert OutputChecker().check_output(answer(name), done.stdout, ELLIPSIS), done.stdout
    assert done.returncode == (1 if name == "elastic" else 0)


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


def test_each_program_has_a_question_and_an_answer() -> None:
    assert {program.stem for program in PROGRAMS} == {*QUESTIONS, "train"}  # train.py's question is answered below
    parts = re.split(r"^```\n(?=[^`\n]*by_hand/)", TOUR, flags=re.MULTILINE)[1:]
    folded = r"\nQuestion: .+\n\n<details><summary>Answer</summary>\n\n```text\n[^`]+```\n\n(.+\n)+\n</details>\n"
    asked = [re.findall(r"by_hand/(\w+)", part)[0] for part in parts if re.search(folded, part)]
    assert sorted(asked) == [program.stem for program in PROGRAMS]
    assert TOUR.count("Question: ") == TOUR.count("<details>") == len(asked)


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
def test_the_program_to_copy_continues_on_other_numbers_of_ranks_as_the_tour_shows(folder: Path) -> None:
    first, continued = re.findall(r"^```\n(torchrun .* by_hand/train.py \d)\n```$", TOUR, re.MULTILINE)
    on_four, on_one = (f"torchrun --standalone --nproc_per_node={n} by_hand/train.py" for n in (4, 1))
    commands = f"{first}\n{continued}\n{on_four} 6\n{on_one} 7"
    done = subprocess.run(["bash", "-ec", commands], cwd=folder, env=clean_env(), stdout=PIPE, text=True, check=True)
    assert done.stdout.startswith(command_and_output(ROOT / "by_hand/train.py")[1])
    assert re.findall(r"^epoch (\d)", done.stdout, re.MULTILINE) == ["0", "1", "2", "3", "4", "5", "6"]
    assert answer("train") in done.stdout
    snapshot = torch.load(folder / "runs/tour/train.pt")
    assert snapshot["optimizer"]["param_groups"][0]["lr"] == 0.02  # of one rank
    assert "0.weight" in snapshot["model"]


@pytest.mark.parametrize("program", PROGRAMS, ids=attrgetter("stem"))
def test_a_program_names_what_does_the_same_for_real_and_does_not_import_it(program: Path) -> None:
    modules = re.findall(r"^\s*(?:from|import) (\w+)", program.read_text(), re.MULTILINE)
    assert modules
    assert not {*modules} & ({path.stem for path in [*ROOT.iterdir(), *PROGRAMS]} - {"copy"})
    places = re.findall(r"^In this repository: (.+)$", program.read_text(), re.MULTILINE)
    assert places
    for name, file in re.findall(r"`?([\w.]+)`?\s+in\s+([\w/]+\.py)", places[0]):
        assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", (ROOT / file).read_text()), places
