import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import export
import sample
from main import main
from mingpt import start
from mingpt.program import run_program as exit_status_of
from mingpt.start import code_digests
from mingpt.system import device
from mingpt.system.run_lock import LOCK_NAME
from tests.helpers import main_process, run_args, run_each_captured, run_program, run_ranks, start_ranks, write_text
from tests.inside import assert_one_message
from trainer import Trainer


@pytest.fixture
def argv(text: Path, tmp_path: Path) -> list[str]:
    return run_args(tmp_path / "run", text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and a run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    assert exit_status_of(main, run_args(folder / "run", write_text(folder / "text.txt"), trainer__max_steps=1)) == 0
    return folder


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Bytes and modification time of all files except locks."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME)
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_a_crash_shows_its_traceback_and_ends_the_process_without_waiting_for_destructors(
    argv: list[str], tmp_path: Path
) -> None:
    [process], queue = start_ranks(1, _crash, argv, tmp_path, tmp_path=tmp_path)
    process.join(30)
    stderr = (tmp_path / "stderr").read_text()
    assert (process.exitcode, queue.empty()) == (1, True)
    assert stderr.startswith("Traceback (most recent call last):")
    assert stderr.endswith("RuntimeError: shape '[2]' is invalid\n")


def _crash(argv: list[str], folder: Path) -> None:
    def fail(trainer: Trainer) -> Any:
        raise RuntimeError("shape '[2]' is invalid")

    Trainer.train_step = fail  # type: ignore[method-assign]
    main_process(argv, os.devnull, folder / "stderr")


@pytest.mark.parametrize("message", ["CUDA error: out of memory\nmore", "CUBLAS_STATUS_ALLOC_FAILED when calling `f`"])
def test_errors_of_cuda_that_name_no_cause_are_one_message(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are of type torch.AcceleratorError or RuntimeError. https://github.com/pytorch/pytorch/issues/175253"""

    def fail(argv: Sequence[str]) -> None:
        raise RuntimeError(message)

    assert exit_status_of(fail, []) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: lower trainer.micro_batch_size, ")


def test_help_and_mistakes_are_answered_without_pytorch(tmp_path: Path) -> None:
    """Importing PyTorch would take most of the time."""
    (tmp_path / "torch.py").write_text("raise ImportError('PyTorch is imported')")
    for status, argv, env, part in (
        (0, ["--help"], {}, "max_steps: 1600"),
        (0, ["--print_config"], {}, "max_steps: "),
        (2, ["--trainer.max_steps", "many"], {}, "found 'many'"),
        (2, [], {"RANK": "1"}, "'WORLD_SIZE': None"),
        (1, [], {}, "PyTorch is imported"),
    ):
        done = run_program("main.py", *argv, cwd=tmp_path, PYTHONPATH=str(tmp_path), **env)
        assert (done.returncode, done.stderr == "") == (status, status == 0), (argv, done.stderr)
        assert part in done.stdout + done.stderr, (argv, env)
        if status == 2:
            assert_one_message(done.stderr)
    assert os.listdir(tmp_path) == ["torch.py"]


def test_one_process_without_compile_does_not_import_the_compiler(text: Path, tmp_path: Path) -> None:
    """Importing the compiler takes as long as importing PyTorch."""
    code = """
import sys
import main, plot, sample
*training, run_dir = sys.argv[1:]
for name in ("adamw", "muon"):
    for steps in ("2", "4"):
        options = ["--optimizer.name", name, "--trainer.run_dir", run_dir + name, "--trainer.max_steps", steps]
        assert main.main([*training, *options]) == 0
sample.run(["--snapshot", run_dir + "adamw", "--max_new_tokens", "2"])
plot.run([run_dir + "adamw"])
print("torch._dynamo" in sys.modules, file=sys.stderr)
"""
    argv = run_args(tmp_path, text, trainer__sample_every=2)
    done = run_program("-c", code, *argv, f"{tmp_path}/", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False"), done.stderr


@pytest.mark.parametrize("version", ["2.9.1+cu128", "3.0.0"])
def test_other_versions_of_pytorch_are_refused(
    version: str, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    for run, options in ((main, argv), (sample.run, []), (export.run, ["--out", str(tmp_path / "out")])):
        assert exit_status_of(run, options) == 2
        assert_one_message(capsys.readouterr().err, f"PyTorch is {version}, must be at least 2.10 and below 3")
    assert list(tmp_path.iterdir()) == [tmp_path / "text.txt"]


def test_on_windows_each_program_ends_with_one_line() -> None:
    done = run_program("-c", "import sys; sys.platform = 'win32'; import main", cwd=start.ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: these programs run on Linux and macOS; on Windows, use WSL\n"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model.n_embd", "32", "is 32, but 16 in "),
        ("model.bias", "false", "is false, but true in "),
        ("data.block_size", "8", "is 8, but 16 in "),
        ("data.path", "other.txt", "is other.txt, but this run trains on the tokens of .*/text.txt in run/data"),
        ("data.truncate", "0.5", "is 0.5, but null in "),
        ("data.train_split", "0.5", "is 0.5, but 0.9 in "),
        ("optimizer.name", "muon", "is muon, but adamw in .* set it to adamw"),
        ("trainer.seed", "7", "is 7, but 1 in "),
    ],
)
def test_a_snapshot_of_another_shape_or_vocabulary_is_refused_and_nothing_changes(
    name: str, value: str, expected: str, trained: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    Path("other.txt").write_text(Path("text.txt").read_text().replace("figs", "kiwi"))
    before = contents(trained / "run")
    assert exit_status_of(main, [*run_args(Path("run"), "text.txt", trainer__max_steps=2), f"--{name}", value]) == 2
    message = capsys.readouterr().err
    assert_one_message(message, name, *([] if name == "data.path" else ["step 1"]))
    assert re.search(expected, message)
    assert contents(trained / "run") == before


def test_a_resumed_run_reports_another_learning_rate_text_and_pytorch(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate decays to the run's last step, so raising max_steps changes it."""
    run_dir, text = shutil.copytree(trained / "run", tmp_path / "run"), tmp_path / "text.txt"
    shutil.rmtree(run_dir / "data")  # a lost machine has the snapshots only
    text.write_text((trained / "text.txt").read_text()[::-1])
    argv = run_args(run_dir, text, trainer__max_steps=2, optimizer__warmup_steps=1, optimizer__learning_rate=0.01)
    then = str(torch.__version__)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.99.0"))
    assert exit_status_of(main, argv) == 0
    out = capsys.readouterr().out
    assert f"resuming from {run_dir}/snapshots/step_00000001.pt" in out
    assert f"pytorch {then} -> 2.99.0" in out
    assert re.search(r"the learning rate of step 1 was \S+, and is 0\.01 with this configuration\n", out), out
    assert len(set(re.findall(r"the text's SHA-256 ([0-9a-f]{64}) -> ([0-9a-f]{64})", out)[0])) == 2


def test_ranks_agree_on_configuration_text_code_and_precision(text: Path, tmp_path: Path) -> None:
    """A mistake that all of them make is one message, too."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    same = run_args(tmp_path / "shared", text, trainer__max_steps=1)
    paths = (text, shutil.copy(text, tmp_path / "copy.txt"))
    own_paths = [run_args(tmp_path / str(rank), path, trainer__max_steps=1) for rank, path in enumerate(paths)]
    own_texts = [run_args(tmp_path / str(rank), path, trainer__max_steps=1) for rank, path in enumerate((text, other))]
    auto = run_args(tmp_path / "auto", text, trainer__precision="auto")
    differs = "trainer.precision: auto selects differs between ranks: bf16 on rank 0, fp32 on rank 1"
    no_gpu = "distributed.backend is nccl, but PyTorch sees no CUDA GPU here"
    cases = [  # the command line of each rank, and parts of the message
        ([same, [*same, "--trainer.seed", "2"]], ["trainer.seed", "1 on rank 0", "2 on rank 1"]),
        ([[*same, "--trainer.batch_size", "1"]] * 2, ["trainer.batch_size is 1", "2 ranks"]),
        ([[*argv, "another machine"] for argv in own_texts], ["text", "on rank 0", "on rank 1"]),
        ([[*same, "--distributed.backend", "nccl"]] * 2, [f"error: {no_gpu}; set it to auto or gloo\n"]),
        ([same, [*same, "another code"]], ["the SHA-256 of model.py differs between ranks", "another code on rank 1"]),
        ([same, [*same, "another PyTorch"]], ["PyTorch's version differs between ranks", "2.99 on rank 1"]),
        ([[*auto, "another hardware"]] * 2, [f"error: the precision that {differs}; set it to either\n"]),
    ]
    argvs = [*(argvs for argvs, _ in cases), [[*argv, "another machine"] for argv in own_paths]]
    first, second = run_ranks(2, _run_with_own_argv, argvs, tmp_path=tmp_path)
    for (argvs, parts), (status, _, stderr), (other_status, _, other_stderr) in zip(cases, first, second, strict=False):
        assert (status, other_status) == (2, 2)
        assert_one_message(stderr, *parts)
        assert other_stderr == (stderr if argvs[1][-1] == "another machine" else "")
    assert len(set(re.findall(r"\b[0-9a-f]{64}\b", first[2][2]))) == 2  # of the texts
    assert not (tmp_path / "shared").exists()
    assert [(status, stderr) for status, _, stderr in (first[-1], second[-1])] == [(0, ""), (0, "")]
    assert (tmp_path / "0/snapshots/step_00000001.pt").exists()


def _run_with_own_argv(cases: list[list[list[str]]]) -> list[tuple[int, str, str]]:
    """Runs each case with this rank's command line. Its last word may be a difference other than an option."""
    results = []
    for case in cases:
        argv = case[int(os.environ["RANK"])]
        with pytest.MonkeyPatch.context() as patch:
            if argv[-1] == "another machine":
                patch.setenv("LOCAL_RANK", "0")
            if argv[-1] == "another code":
                patch.setattr(start, "code_digests", lambda: {**code_digests(), "model.py": "another code"})
            if argv[-1] == "another PyTorch":
                patch.setattr(torch, "__version__", TorchVersion("2.99"))
            if argv[-1] == "another hardware":
                patch.setattr(device, "has_bf16", lambda device: (os.environ["RANK"] == "0", ""))
            [result] = run_each_captured([argv[:-1] if argv[-1].startswith("another ") else argv])
        results.append(result)
    return results


def test_the_code_digests_cover_the_library_and_the_scripts_that_train(tmp_path: Path) -> None:
    shutil.copytree(start.ROOT / "mingpt", tmp_path / "mingpt")
    for script in ("main.py", "trainer.py", "model.py", "char_dataset.py", "sample.py"):
        shutil.copy(start.ROOT / script, tmp_path)
    (tmp_path / "mingpt/.#start.py").symlink_to("user@host.1234:5678")  # a lock of Emacs
    (tmp_path / "mingpt/old.py").mkdir()
    before = code_digests(tmp_path)
    assert before == code_digests()
    assert "sample.py" not in before
    changed = ("model.py", "mingpt/optim/muon.py", "mingpt/parallel/sharded.py")
    for file in changed:
        (tmp_path / file).write_text("another version")
    assert code_digests(tmp_path) == before  # the process runs what it has imported
    code_digests.cache_clear()
    after = code_digests(tmp_path)
    assert after.keys() == before.keys()
    assert {file for file in after if after[file] != before[file]} == set(changed)
