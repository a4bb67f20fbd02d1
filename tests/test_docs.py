import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.utils import get_total_norm

from benchmarks.__main__ import choose_sides
from mingpt.config.parser import read_config
from mingpt.config.schema import KEYS
from mingpt.snapshot.folder import load_snapshot
from tests.helpers import ROOT, clean_env, read_rows, wait_until, write_text

DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "notebook.ipynb"
README, CONTRIBUTING, PAGES = ROOT / "README.md", ROOT / "CONTRIBUTING.md", sorted(DOCS.glob("*.md"))
CHINESE = ROOT / "README.zh-CN.md"
FENCED = r"(?ms)^```.*?^```$"
KEY = r"(?:data|model|optimizer|trainer|distributed)\.(?!py\b)\w+"
SMALL = {"max_steps": 40, "eval_every": 20, "eval_windows": 40, "save_every": 10, "sample_every": 40, "log_every": 5}

each_page = pytest.mark.parametrize("page", [README, CHINESE, CONTRIBUTING, *PAGES], ids=lambda page: page.stem)


def blocks(page: Path | str, language: str = "") -> list[str]:
    text = page if isinstance(page, str) else page.read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def prose(page: Path) -> str:
    return re.sub(FENCED, "", page.read_text())


def commands(page: Path) -> list[list[str]]:
    """The words of each command of `python` or `torchrun`, in a block or a code span."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]
    lines = [line for block in blocks(page) for line in block.splitlines()] + spans
    starts = [re.search(r"\b(python|torchrun) .*", line) for line in lines if not re.search(r"[$;<]|\.\.\.", line)]
    return [shlex.split(re.split(r" (?:\||&&|>>) ", found[0])[0], comments=True) for found in starts if found]


def defines(file: Path, name: str) -> bool:
    """Whether a module has a function, a class, a constant or a `Class.method` of this name."""
    text = file.read_text()
    return all(re.search(rf"^ *(def|class) {part}\b|^{part}\b.* = ", text, re.MULTILINE) for part in name.split("."))


def test_readme_is_short_and_leads_to_every_page() -> None:
    text = README.read_text()
    assert len(text.split()) <= 800
    assert set(re.findall(r"\]\((docs/[\w-]+\.(?:md|ipynb))", text)) == {
        f"docs/{page.name}" for page in (*PAGES, NOTEBOOK)
    }
    assert set(blocks(README)[-1].splitlines()) <= set((ROOT / ".ci/run").read_text().splitlines())  # the test commands


def facts(page: Path) -> list[str]:
    """For each section: code blocks, of the file tree only the names; sorted links, code spans and numbers."""
    found = []
    for section in re.split(r"^## ", page.read_text().replace(CHINESE.name, README.name), flags=re.MULTILINE):
        text, fenced = " ".join(re.sub(FENCED, "", section).split()), re.findall(FENCED, section)
        code = [re.sub(r" {2,}.*", "", block) if "\ntrainer.py  " in block else block for block in fenced]
        kinds = [r"\]\(([^)]+)\)", r"`([^`]+)`", r"\d+(?:[.,]\d+)*%?"]
        found += ["##", *code, *(each for kind in kinds for each in sorted(re.findall(kind, text)))]
    return found


def test_the_chinese_page_has_the_commands_outputs_links_and_numbers_of_readme() -> None:
    assert facts(CHINESE) == facts(README)


@pytest.mark.parametrize("page", [README, CHINESE, CONTRIBUTING, *PAGES, NOTEBOOK], ids=lambda page: page.stem)
def test_links_resolve_and_name_what_exists(page: Path) -> None:
    for text, link in re.findall(r"\[([^\]]*)\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:  # GitHub's anchors of headings
            headings = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings], link
        label = text.strip("`")
        if label.endswith((".py", ".yaml", ".md")):
            assert str(target).endswith(f"/{label}"), (text, link)
        elif text.startswith("`") and target.suffix == ".py":
            assert defines(target, label), f"{link} does not define {label}"


def test_each_guarantee_and_each_fault_has_tests() -> None:
    text = CONTRIBUTING.read_text()
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert [f"{file}::{name}" for file, name in tests if not defines(ROOT / file, name)] == []
    section = text.partition("## Guarantees and their tests\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!---|promise|fault)(.*)", section, re.MULTILINE)
    assert len(rows) > 50
    assert all("::" in row for row in rows)


def test_the_tree_names_all_modules_and_the_layers_are_those_that_lint_imports_checks() -> None:
    tree, shown = (
        block for block in blocks(DOCS / "architecture.md", "text") if block.startswith(("mingpt/", "start"))
    )
    found = {
        ROOT / ("mingpt" if line[0] == " " else "") / name
        for line in tree.splitlines()
        for name in line.strip().split("  ")[0].split()
    }
    assert [path for path in found if not path.exists()] == []
    assert {path for path in (ROOT / "mingpt").iterdir() if not path.name.startswith("__")} <= found
    [layers] = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert shown.splitlines() == [layer.replace("mingpt.", "") for layer in re.findall(r'"(.+)"', layers)]


@each_page
def test_yaml_keys_in_backticks_and_options_of_main_py_exist(page: Path) -> None:
    assert set(re.findall(rf"`({KEY})(?=[`: ])|--({KEY})", page.read_text())) <= {
        pair for key in KEYS for pair in ((key, ""), ("", key))
    }
    for words in commands(page):
        if "main.py" in words and not {"--help", "--print_config", "--config"} & {*words}:
            read_config([word for word in words[words.index("main.py") + 1 :] if word != "--"])


def test_each_result_of_benchmarks_has_a_command() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| \d", (DOCS / "benchmarks.md").read_text(), re.MULTILINE)
    assert len(rows) >= 7
    for row in rows:
        words = shlex.split(re.sub(r" --(ranks|seconds) \d+", "", row.replace("FOLDER", str(ROOT))))
        size = 3 if words[0] == "ab" else 2
        for _, command in choose_sides(words[:size], shlex.join(words[size:])):
            read_config(shlex.split(command)[1:])


def test_the_tour_has_a_row_for_each_idea_of_a_step_and_the_pictures_that_their_script_draws(tmp_path: Path) -> None:
    tour = (DOCS / "tour.md").read_text()
    ideas = (DOCS / "architecture.md").read_text().partition("## Before you change the step\n")[2].partition("\n## ")[0]
    rows = tour.partition("## From train.py to main.py\n")[2]
    assert len(re.findall(r"^\d+\. ", ideas, re.MULTILINE)) == len(re.findall(r"^\| .* \|$", rows, re.MULTILINE)) - 2
    shutil.copy(DOCS / "figures.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "figures.py"], check=True)
    drawn = {file.name: file.read_text() for file in tmp_path.glob("*.svg")}
    assert drawn == {file.name: file.read_text() for file in DOCS.glob("*.svg")}
    assert all(f"]({name})" in tour for name in drawn)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with a short run in its yaml, and stand-ins for pip and pytest that list their calls."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("mingpt", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    yaml = (ROOT / "gpt2_train_cfg.yaml").read_text()
    for key, value in SMALL.items():
        yaml, count = re.subn(rf"^  {key}: \w+", f"  {key}: {value}", yaml, flags=re.MULTILINE)
        assert count == 1
    (folder / "gpt2_train_cfg.yaml").write_text(yaml)
    (folder / "bin").mkdir()
    for name in ("pip", "pytest"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >> calls.txt\n')
        (folder / "bin" / name).chmod(0o755)
    return folder


def start(command: str, folder: Path) -> subprocess.Popen:
    """Starts a command in bash, in a separate process group."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = clean_env(PATH=path, PYTHONPATH="", OMP_NUM_THREADS="1")
    argv, pipe = ["bash", "-e", "-o", "pipefail", "-c", command], subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def run(command: str, folder: Path) -> str:
    """Runs a command, which must succeed; returns stdout and stderr."""
    with start(command, folder) as process:
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    return stdout + stderr


@pytest.mark.slow
def test_readme_works_as_pasted(checkout: Path) -> None:
    first_run, kill_and_resume, own_text, retuning, many, tests = blocks(README)
    output = run(first_run, checkout)
    assert "data/input.txt: help topics of Python" in output
    assert "done in" in output
    first, again, on_two_processes = (line.partition("#")[0] for line in kill_and_resume.splitlines())
    for command, step in ((first, 10), (again, 20)):
        with start(command, checkout) as process:
            try:
                wait_until((checkout / f"runs/killed/snapshots/step_{step:08d}.pt").exists, command)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
    output = run(on_two_processes, checkout)
    assert re.search(r"resuming from runs/killed/snapshots/step_000000[234]0.pt", output)
    assert "Each" in run(own_text, checkout)
    assert "done in" in run(retuning, checkout)
    output = run(many, checkout)
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in output
    for words in commands(README):
        if words[1] in ("sample.py", "plot.py") or words[1:3] == ["-m", "mingpt.snapshot"]:
            assert run(shlex.join(words), checkout)
    run(tests, checkout)
    install = "pip install -r requirements.txt"
    calls = [install, "pytest -m gpu", install.replace("install", "install -q"), "pytest", "pytest -m slow"]
    assert (checkout / "calls.txt").read_text().splitlines() == calls


@pytest.mark.slow
def test_docs_work_as_pasted(checkout: Path) -> None:
    run("python main.py", checkout)
    pytest.importorskip("transformers", reason="transformers is not installed")
    for command in blocks(DOCS / "export.md"):
        run(command, checkout)
    assert json.loads((checkout / "exported/config.json").read_text())["n_embd"] == 128
    [stages] = [block for block in blocks(DOCS / "parallelism.md") if "pipeline_stages" in block]
    assert "1 x 2, 1f1b, 4 micro-batches of 3" in run(stages, checkout)
    _, plots = blocks(DOCS / "monitoring.md")
    run(plots.replace("runs/retuned", "runs/stages"), checkout)


CHANGED_RUN = (
    "--data.path words.txt --data.block_size 16 --model.n_layer 2 --model.n_embd 32 --trainer.batch_size 12 "
    "--trainer.micro_batch_size 3 --trainer.precision fp32 --trainer.threads 1 --trainer.log_every 1 "
    "--trainer.sample_every null --optimizer.warmup_steps 10 --optimizer.decay_steps 120"
)
# The options of each change in docs/changes/, and why export.py refuses its snapshots; None: it does not.
CHANGES = {
    "answers": ("--data.answer_after d", None),
    "averaged_weights": ("--optimizer.average_decay 0.9", None),
    "bytes": ("", "the tokens of transformers differ from this program's"),
    "convolution": ("--model.conv_kernel_size 4", "has other weights: "),
    "grouped_query_attention": ("--model.n_kv_head 2", "has other weights: "),
    "label_smoothing": ("--model.label_smoothing 0.1", None),
    "layer_decay": ("--optimizer.layer_decay 0.5", None),
    "lora": ("--model.lora_rank 4 --trainer.init_from runs/base", "has other weights: "),
    "mixture_of_experts": ("--model.n_expert 4", "has other weights: "),
    "nanochat": ("", "has other weights: "),
    "parameter_norm": ("", None),
    "replay": ("--trainer.replay_every 3", None),
    "sgd": ("--optimizer.name sgd --optimizer.learning_rate 0.1", None),
    "warmup_stable_decay": ("--optimizer.stable 0.8 --optimizer.learning_rate 2.5e-3", None),
}


@pytest.fixture(scope="module")
def trained(checkout: Path) -> Path:
    """The copy with a text, and with a run in runs/base."""
    write_text(checkout / "words.txt")
    (checkout / "tests").mkdir()
    shutil.copy(ROOT / "tests/helpers.py", checkout / "tests")
    run(f"python main.py {CHANGED_RUN} --trainer.max_steps 120 --trainer.run_dir runs/base", checkout)
    return checkout


# Runs in the changed copy: on two processes with three strategies, and on one process that is killed. All of them, and
# sample.py, are forks of a process that has imported PyTorch.
RUN_CHANGED = """
import sys
from pathlib import Path
import sample
from mingpt.program import run_program
from tests.helpers import run_captured, run_each_captured, run_ranks, start_ranks, train_main, wait_until

def draw_sample(path):
    sys.stdout = open(path, "w")
    return run_program(sample.run, "--snapshot runs/two --max_new_tokens 20 --prompt".split() + ["anna does"])

if __name__ == "__main__":
    here = Path.cwd()
    one, two = ([*sys.argv[1:], "--trainer.run_dir", f"runs/{name}", "--trainer.max_steps"] for name in ("one", "two"))
    fsdp, stages = ["80", "--distributed.strategy", "fsdp"], ["120", "--distributed.pipeline_stages", "2"]
    for results in run_ranks(2, run_each_captured, [[*two, "40"], [*two, *fsdp], [*two, *stages]], tmp_path=here):
        assert [status for status, _, _ in results] == [0, 0, 0], results
    [process], _ = start_ranks(1, train_main, *one, "100000", tmp_path=here)
    wait_until(Path("runs/one/snapshots/step_00000010.pt").exists, "a snapshot")
    process.kill()
    [(status, out, err)] = run_ranks(1, run_captured, *one, "120", tmp_path=here)
    assert status == 0 and "resuming from runs/one/snapshots/" in out, err
    assert run_ranks(1, draw_sample, "sample.txt", tmp_path=here) == [0]
"""


# Rank 1 computes a wrong gradient once, in the first of the two computations of step 4.
RUN_WRONG = """
import os
import sys
from pathlib import Path
from mingpt.parallel.strategy import Strategy
from model import Block
from tests.helpers import run_captured, run_ranks

def train_wrong(*argv):
    forward, forward_backward, calls = Block.forward, Strategy.forward_backward, []

    def counted(self, *args):
        calls.append(args)
        return forward_backward(self, *args)

    def wrong(self, *args):
        output = forward(self, *args)
        if len(calls) == 5 and os.environ["RANK"] == "1":
            output.register_hook(lambda gradient: 1.001 * gradient)
        return output

    Strategy.forward_backward, Block.forward = counted, wrong
    return run_captured(*argv)

if __name__ == "__main__":
    (first, _, message), (second, _, _) = run_ranks(2, train_wrong, *sys.argv[1:], tmp_path=Path.cwd())
    assert (first, second) == (2, 2)
    print(message)
"""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_trains_on_ranks_as_on_one_is_killed_resumes_samples_and_is_exported_or_refused(
    change: str, trained: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained, tmp_path / "changed")
    run(f"GIT_CEILING_DIRECTORIES={tmp_path} git apply docs/changes/{change}.diff", folder)
    options, refusal = CHANGES[change]
    (folder / "run_changed.py").write_text(RUN_CHANGED)
    run(f"python run_changed.py {CHANGED_RUN} {options}", folder)
    base, alone, together = (
        [row["loss"] for row in read_rows(run)] + [row["val_loss"] for row in read_rows(run, "eval")]
        for run in (folder / "runs/base", folder / "runs/one", folder / "runs/two")
    )
    assert together == pytest.approx(alone, rel=2e-3)  # rounding errors grow from step to step
    assert (alone == base) == (change in ("parameter_norm", "replay"))

    text = (folder / "sample.txt").read_text()
    assert text.startswith("anna does")
    if change == "parameter_norm":
        [row] = [row for row in read_rows(folder / "runs/two") if row["step"] == 120]
        weights = list(load_snapshot(str(folder / "runs/two/snapshots/step_00000120.pt"))["model"].values())
        assert row["parameter_norm"] == pytest.approx(get_total_norm(weights).item(), rel=1e-4)
    if change == "replay":
        (folder / "run_wrong.py").write_text(RUN_WRONG)
        message = run(f"python run_wrong.py {CHANGED_RUN} {options} --trainer.run_dir runs/wrong", folder)
        assert message.startswith("error: step 4: two computations of the same gradients differ on rank 1 (")
    pytest.importorskip("transformers", reason="transformers is not installed")
    with start("python export.py --snapshot runs/two --out exported_change", folder) as process:
        _, message = process.communicate(timeout=120)
    assert process.returncode == (2 if refusal else 0), message
    if refusal:
        assert message.startswith("error: --snapshot: ")
        assert refusal in message
        assert not (folder / "exported_change").exists()


def test_each_change_of_the_docs_applies_and_is_tested() -> None:
    files = list(DOCS.glob("changes/*.diff"))
    assert {file.stem for file in files} == CHANGES.keys()
    for file in files:
        subprocess.run(["git", "apply", "--check", file], cwd=ROOT, check=True)


def test_the_notebook_has_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the cells in an empty folder, with shorter runs, and then mistakes; the kernel continues after each."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("PATH", f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    origin = shutil.copytree(checkout, tmp_path / "origin")
    yaml = origin / "gpt2_train_cfg.yaml"
    yaml.write_text(yaml.read_text().replace("  max_steps: 40", "  max_steps: 150"))
    run("git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm a", origin)

    book = nbformat.read(NOTEBOOK, as_version=4)
    book.cells = [cell for cell in book.cells if cell.cell_type == "code"]
    shorter = {"1650": "200", "1700": "250", "1750": "300"}
    more = {"https://github.com/OWNER/NAME": str(origin), "max(1, torch.cuda.device_count())": "2"}
    for cell in book.cells:
        for old, new in (shorter | more).items():
            cell.source = cell.source.replace(old, new)
    mistakes = ["%run main.py --help", "%run main.py --trainer.max_step 3", "import main; main.main()"]
    book.cells += [nbformat.v4.new_code_cell(cell) for cell in mistakes]
    book.cells[-2].metadata.tags = ["raises-exception"]
    (tmp_path / "empty").mkdir()
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path / "empty")}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in book.cells]
    clone, killed, resumed, parallel, plot, *rest = printed
    assert "mingpt" in clone
    assert "done in" not in killed
    assert book.cells[1].outputs[-1].data["text/plain"] == "-9"
    assert "resuming from runs/notebook/snapshots/step_00" in resumed
    for text in (resumed, parallel, rest[1]):
        assert "done in" in text
    assert "MEMBER: 2/2" in parallel
    assert "drawn: " in plot
    assert book.cells[4].outputs[-1].data["image/png"]
    for text, part in zip(
        rest,
        ["The ", "done in", "ln_f", "251 ", "usage: ", "trainer.max_step ", "runs/default/snapshots"],
        strict=True,
    ):
        assert part in text, text
    assert len(book.cells[2].outputs) < 60  # lines of log_every


# Output that the tour predicts for the commands of main.py in its sections.
TOUR_OUTPUT = {
    "DDP": r"\n6\n",
    "Gradient accumulation": r"\n6\n",
    "ZeRO and FSDP": r"\n30\n",
    "One error for all ranks": r"error: data.path: missing.txt can't be read: .*No such file",
}


@pytest.mark.slow
def test_the_tour_works_as_pasted(checkout: Path) -> None:
    tour = (DOCS / "tour.md").read_text()
    assert blocks(tour)[0] == "export OMP_NUM_THREADS=1\n"  # tests/test_by_hand.py runs the programs by hand
    sections = re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", tour, re.MULTILINE | re.DOTALL)
    found = {name: "".join(each for each in blocks(text) if "by_hand/" not in each) for name, text in sections}
    texts = {name: text for name, text in found.items() if text}
    [option] = re.findall(r"With `(--trainer\.\S+ \d)`, the\s+command of \[DDP\]\(#ddp\) also prints 6\.", tour)
    texts["Gradient accumulation"] = (
        texts["DDP"].replace("tour/reduce\n", f"tour/reduce {option}\n").replace("tour/reduce", "tour/accumulation")
    )
    assert texts.keys() == TOUR_OUTPUT.keys()
    missing = {}
    for name, command in texts.items():
        with start(command, checkout) as process:  # after the first command, `export OMP_NUM_THREADS=1`
            stdout, stderr = process.communicate(timeout=300)
        if not re.search(TOUR_OUTPUT[name], f"\n{stdout}{stderr}"):
            missing[name] = stdout + stderr
    assert not missing
