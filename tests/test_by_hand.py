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


def command_and_output(program: Path) -> tuple[str, str]:
    """Returns the command in the program's docstring, which is a line by itself, and its output in the tour."""
    command = re.findall(rf"^ +((?:python|torchrun) .*by_hand/{program.name}.*)$", program.read_text(), re.MULTILINE)[0]
    block = rf"^```\n{re.escape(command)}\n```\n.*?^```text\n(.*?)^```$"
    return command, re.findall(block, TOUR, re.MULTILINE | re.DOTALL)[0]


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
    on_one = ["torchrun", "--standalone", ROOT / "by_hand/train.py", "6"]
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
