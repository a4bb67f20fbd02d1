"""The self-test passes, and fails with the right check when something is broken on purpose."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT, TORCHRUN, VISIBLE_GPUS, clean_env, find_processes, kill_processes, wait_until

from benchmarks import selftest
from benchmarks.selftest import CHECKS, Result, agree
from benchmarks.selftest_checks import COLUMNS, peak_flops
from mingpt.config_parser import read_config
from mingpt.monitoring.logging import run_script

SELFTEST = ("-m", "benchmarks.selftest")
NEEDS_GPU = {"waits", "speed"}

# Programs that run the self-test after a line that breaks something.
BREAK = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import fault_injection, selftest, selftest_checks
from mingpt.parallel import memory, sharded, strategy, tree_reduction
from mingpt.snapshot.manager import AsyncSnapshotWriter
from mingpt.monitoring.logging import run_script
from trainer import Trainer
rank = int(os.environ.get("RANK", "0"))
"""
RUN = """
sys.exit(run_script(selftest.run))
"""


@pytest.fixture
def variable(tmp_path: Path) -> Iterator[str]:
    """The temporary folder of a self-test, as a variable by which its processes are found."""
    (tmp_path / "tmp").mkdir()
    variable = f"TMPDIR={tmp_path / 'tmp'}"
    yield variable
    kill_processes(variable)


def run_selftest(
    variable: str, *argv: str, ranks: int = 1, timeout: float = 240, **env: str | None
) -> tuple[int, dict[str, list[str]], dict[str, Any], str]:
    """Runs it; returns its exit status, status and detail by check as printed, the JSON object, and stderr."""
    name, value = variable.split("=")
    launcher = [*TORCHRUN, f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command, env = [sys.executable, *launcher, *argv], clean_env(**{name: value}, OMP_NUM_THREADS="1", **env)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    *lines, _, summary = done.stdout.splitlines() or ["", "{}"]
    rows = [re.fullmatch(r"(PASS|FAIL|SKIP)  (\w+) +(.*?)( \([\d.]+ s\))?", line) for line in lines]
    assert all(rows), done.stdout + done.stderr
    left = {path.name.partition("_")[0] for path in Path(value).iterdir()}
    assert left <= {"torchelastic", "torchinductor"}  # of the launcher above, and headers that torch.compile compiles
    assert not find_processes(variable)
    return done.returncode, {row[2]: [row[1], row[3]] for row in rows if row}, json.loads(summary), done.stderr


def run_broken(lines: str, variable: str, folder: Path, *argv: str, **options: Any) -> tuple:
    """`run_selftest` after lines that break something."""
    file = folder / "broken.py"
    file.write_text(BREAK + lines + RUN)
    return run_selftest(variable, str(file), *argv, **options)


@pytest.mark.slow
def test_all_checks_pass_or_say_why_not(variable: str) -> None:
    status, rows, summary, stderr = run_selftest(variable, *SELFTEST, ranks=2)
    assert status == 0, rows
    assert list(rows) == list(CHECKS)
    skipped = {name: detail for name, (status, detail) in rows.items() if status == "SKIP"}
    assert set(skipped) == NEEDS_GPU
    assert all(detail.strip() for detail in skipped.values())
    assert [[check["status"], check["detail"]] for check in summary["checks"]] == list(rows.values())
    assert (summary["status"], summary["ranks"], summary["cuda"]) == ("PASS", 2, None)
    for fault in ("kill", "oom", "stop"):
        assert re.match(r"after \d+\.\d s: rank 1 \(", rows[fault][1]), rows[fault]
    assert rows["restart"][1].startswith("resumed from step 1")
    assert "Traceback" not in stderr


@pytest.mark.gpu
def test_all_checks_pass_on_gpus(variable: str) -> None:
    status, rows, _, stderr = run_selftest(variable, *SELFTEST, timeout=1800, **VISIBLE_GPUS)
    assert status == 0, (rows, stderr)
    assert {name for name, (status, _) in rows.items() if status == "SKIP"} <= {"tree"}


CONTROLS = {  # what is broken, the check that fails, and a part of its line
    "fsdp's gradients twice as large": (
        "sharded.FSDP.gradient_divide_factor = property(lambda self: 2.0, lambda self, value: None)",
        "losses",
        "fsdp's gradient norms in fp32 differ by 1 (allowed 0.01)",
    ),
    "dropout with a random seed": (
        "strategy.seed_device = lambda device, seed: strategy.torch.default_generator.seed()",
        "resume",
        "other bits with ddp from step 1 on; zero1",
    ),
    "no optimizer state after a restart": (
        "load = strategy.Strategy.load_full_state\n"
        "strategy.Strategy.load_full_state = lambda self, weights, state, source: load(self, weights, {}, source)",
        "resume",
        "other bits with ddp from step 6 on; zero1",
    ),
    "snapshots without copies": (
        "AsyncSnapshotWriter._buffer = lambda self, name, tensor: tensor",
        "snapshot",
        "the file has other bits than the state at its step with ddp",
    ),
    "an estimate without optimizer state": (
        "memory.optimizer_bytes = lambda *args: 0",
        "memory",
        "MiB estimated/measured differ: ddp 0.",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_the_right_check_finds_what_is_broken(control: str, variable: str, tmp_path: Path) -> None:
    line, check, message = CONTROLS[control]
    other = "memory" if check in ("snapshot", "resume") else "snapshot"
    status, rows, summary, _ = run_broken(line, variable, tmp_path, "--only", check, other)
    assert (status, summary["status"]) == (1, "FAIL")
    assert {name: row[0] for name, row in rows.items()} == {check: "FAIL", other: "PASS"}
    assert message in rows[check][1]


@pytest.mark.slow
def test_bits_that_depend_on_the_number_of_ranks_are_found(variable: str, tmp_path: Path) -> None:
    line = "strategy.Strategy.dropout_seed = lambda self, first: first + self.context.rank"
    status, rows, _, _ = run_broken(line, variable, tmp_path, "--only", "tree", "resume", ranks=2)
    assert status == 1
    assert rows["tree"] == ["FAIL", "rank 0: other bits on 1 ranks than on 2"]
    assert rows["resume"][0] == "PASS"


@pytest.mark.slow
def test_a_fault_that_no_rank_names_is_a_failure(variable: str, tmp_path: Path) -> None:
    """The program that the check starts is broken through a module that Python imports at its start."""
    line = "from mingpt.distributed.health import HealthMonitor\nHealthMonitor._find_cause = lambda self, error: ''\n"
    (tmp_path / "sitecustomize.py").write_text(line)
    path = f"{tmp_path}:{ROOT}"
    status, rows, _, _ = run_selftest(variable, *SELFTEST, "--only", "kill", "restart", PYTHONPATH=path)
    assert status == 1
    assert rows["kill"][0] == "FAIL"
    assert rows["kill"][1].startswith("no rank named rank 1: torchrun's exit status is 1; ")
    assert rows["restart"][0] == "PASS"


@pytest.mark.slow
def test_checks_are_skipped_after_one_rank_has_lost_the_others(variable: str, tmp_path: Path) -> None:
    lines = (
        "selftest.TIMEOUT = 5.0\n"
        "step = Trainer.train_step\n"
        "Trainer.train_step = lambda self: 1 / 0 if self.step == 3 and rank == 1 else step(self)"
    )
    names = ("machine", "losses", "tree", "snapshot")
    status, rows, _, stderr = run_broken(lines, variable, tmp_path, "--only", *names, ranks=2)
    assert status == 1
    assert rows["machine"][0] == "PASS"
    assert rows["losses"][0] == "FAIL"
    error = r"rank 1: ZeroDivisionError: division by zero \(benchmarks/selftest_checks.py, line"
    assert re.match(error, rows["losses"][1])
    assert rows["tree"] == rows["snapshot"] == ["SKIP", "ranks are out of step since rank 1 failed in losses"]
    assert "Traceback" not in re.sub(r"(?s)Traceback.*ChildFailedError.*", "", stderr)  # torchrun's own


@pytest.mark.slow
def test_speed_is_measured_for_each_column(variable: str, tmp_path: Path) -> None:
    """Of tiny models on the CPU, with a pretended peak."""
    lines = (
        "from benchmarks.harness import Shape\n"
        "selftest_checks.require_gpu = lambda test: None\n"
        "selftest_checks.peak_flops = lambda device: 1e12\n"
        "tiny = Shape(1, 2, 16, 16, 8)\n"
        "selftest_checks.COLUMNS = {name: (tiny, {'trainer.precision': 'bf16'}) for name in ('10.7M', '124M')}\n"
    )
    status, rows, _, _ = run_broken(lines, variable, tmp_path, "--only", "speed")
    assert status == 0, rows
    speed = r"[\d,]+ tokens/s in bf16 \(MFU [\d.]+%\)"
    expected = "; ".join(f"{name} {speed}; {name} compiled {speed}" for name in ("10.7M", "124M"))
    assert re.fullmatch(expected, rows["speed"][1]), rows["speed"]


@pytest.mark.slow
def test_a_step_that_waits_for_the_gpu_is_found(variable: str, tmp_path: Path) -> None:
    """On the CPU, with a pretended GPU that warns as PyTorch does."""
    lines = """
import torch, warnings
selftest_checks.SelfTest.on_gpu = True
selftest_checks.strategy_options = lambda test: {name: {"distributed.strategy": name} for name in ("ddp", "fsdp")}
torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
forward_backward, mode = strategy.Strategy.forward_backward, []
torch.cuda.set_sync_debug_mode = mode.append

def waiting(strategy, *args):
    if mode[-1:] == ["warn"] and isinstance(strategy, sharded.FSDP):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    return forward_backward(strategy, *args)

strategy.Strategy.forward_backward = waiting
selftest_checks.precisions = lambda test: ["fp32", "bf16"]
"""
    status, rows, _, _ = run_broken(lines, variable, tmp_path, "--only", "waits")
    assert status == 1
    assert re.fullmatch(r"fsdp in fp32: \S+/trainer.py:\d+; fsdp in bf16: \S+/trainer.py:\d+", rows["waits"][1]), rows


@pytest.mark.slow
def test_sigterm_leaves_no_process_and_no_file(variable: str, tmp_path: Path) -> None:
    name, value = variable.split("=")
    command, env = [sys.executable, *SELFTEST, "--only", "stop"], clean_env(**{name: value})
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: bool(list(Path(value).glob("*/*/struck"))), "the fault")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 143
    wait_until(lambda: not find_processes(variable), "all processes have ended")
    assert list(Path(value).iterdir()) == []


def result(status: str, detail: str, ended: float, raised: bool = False) -> Result:
    return Result("losses", status, detail, ended=ended, raised=raised)


@pytest.mark.parametrize(
    ("results", "status", "detail", "broken"),
    [
        ([result("PASS", "fine", 1), result("PASS", "", 2)], "PASS", "fine", ""),
        ([result("PASS", "fine", 1), result("FAIL", "wrong", 2)], "FAIL", "rank 1: wrong", ""),
        ([result("FAIL", "oh", 1, True), result("FAIL", "oh", 2, True)], "FAIL", "rank 0: oh", ""),
        ([result("FAIL", "timeout", 9, True), result("FAIL", "oh", 2, True)], "FAIL", "rank 1: oh", "since rank 1"),
    ],
)
def test_ranks_agree_on_the_first_failure(results: list[Result], status: str, detail: str, broken: str) -> None:
    agreement: Any = SimpleNamespace(all_gather_object=lambda mine: [asdict(each) for each in results])
    found, reason = agree(results[0], agreement)
    assert (found.status, found.detail) == (status, detail)
    assert broken in reason
    assert bool(reason) == bool(broken)


def test_a_check_that_does_not_exist_is_one_message(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["selftest", "--only", "speeed"])
    assert run_script(selftest.run) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --only: there is no check speeed; there are: machine, losses, ")
    assert error.count("\n") == 1


def test_checks_have_titles_that_fit() -> None:
    for name in CHECKS:
        assert 0 < len(selftest.title(name)) < 80 - len(str(Result(name, "PASS", ""))), name


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_are_found_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_models_of_the_speed_check_are_the_configurations_that_users_can_run() -> None:
    files = [
        [],
        ["--config", str(ROOT / "configs/nanogpt_char.yaml")],
        ["--config", str(ROOT / "configs/gpt2_small.yaml")],
    ]
    for argv, (shape, overrides) in zip(files, COLUMNS.values(), strict=True):
        config = read_config(argv)
        model = config.model
        assert (model.n_layer, model.n_head, model.n_embd, config.data.block_size) == (
            shape.layers,
            shape.heads,
            shape.width,
            shape.T,
        )
        assert (model.architecture, model.dropout, config.optimizer.name) == (
            overrides.get("model.architecture", "nanochat"),
            overrides.get("model.dropout", 0.0),
            overrides.get("optimizer.name", "muon"),
        )
