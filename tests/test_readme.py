"""README's commands, word for word, in a copy of the repository with a run of a few steps in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from helpers import ROOT, clean_env, write_text

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
SHORT = "--trainer.max_steps 4 --trainer.eval_every 2 --trainer.log_every 1"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository after README's first command, but for the length of the run."""
    folder = tmp_path_factory.mktemp("copy")
    for file in (*ROOT.glob("*.py"), ROOT / "gpt2_train_cfg.yaml", ROOT / "data/prepare.py"):
        (folder / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(file, folder / file.relative_to(ROOT))
    first = (
        "pip install -r requirements.txt && python data/prepare.py && torchrun --standalone --nproc_per_node=2 main.py"
    )
    assert f"```\n{first}\n```" in README
    run(f"{first.partition(' && ')[2]} {SHORT}", folder)
    (folder / "books").mkdir()
    write_text(folder / "books/one.txt")
    return folder


def run(command: str, folder: Path) -> str:
    """What a shell command writes to stdout; it must succeed without a word on stderr."""
    env = clean_env(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH="", OMP_NUM_THREADS="1")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def lines_with(words: str) -> list[str]:
    """Lines of README's code blocks that hold these words."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line for language, block in blocks if not language for line in block.splitlines() if words in line]


def test_sampling(copy: Path) -> None:
    commands = lines_with("python sample.py")
    assert len(commands) >= 4
    for command in commands:
        if "runs/books" not in command:
            assert len(run(command, copy)) > 200


def test_stages(copy: Path) -> None:
    [command] = lines_with("pipeline_stages")
    assert "replicas x stages: 1 x 2, 1f1b, 4 micro-batches of 3: each stage waits 20% of the time" in run(
        f"{command} {SHORT}", copy
    )


def test_elsewhere_and_back(copy: Path) -> None:
    [exporting] = lines_with("python export.py")
    [starting] = lines_with("trainer.init_from")
    assert "exported: step 4" in run(exporting, copy)
    assert "starting from the weights of exported" in run(f"{starting} {SHORT}", copy)
    assert json.loads((copy / "exported/config.json").read_text())["n_embd"] == 128


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # CPython closes it when the loop is over
def test_another_tracker(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of wandb that takes what its documentation says that it takes."""
    [block] = re.findall(r"^```python\n(import json, wandb.*?)^```", README, re.MULTILINE | re.DOTALL)
    logged = []
    started = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    wandb = types.SimpleNamespace(init=lambda project, id, resume: started)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(copy)
    exec(block, {})
    assert [step for step, row in logged if "loss" in row] == [1, 2, 3, 4]
    assert [step for step, row in logged if "val_loss" in row] == [2, 4]
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)
    assert len(block.replace("\n\n", "\n").splitlines()) == 5


def test_what_torchruns_agent_tells(copy: Path) -> None:
    [command] = lines_with("ConsoleMetricHandler")
    assert "workers.default.remaining_restarts=0" in run(f"{command} {SHORT} --trainer.run_dir runs/metrics", copy)
    assert "`torchrun --event_log_handler=console ...`" in README
    command = f"torchrun --event_log_handler=console --standalone main.py {SHORT} --trainer.run_dir runs/events"
    assert '"torchelastic.worker.status.SUCCEEDED"' in run(f"{command} 2>&1", copy)
