"""Tests that only GPUs can run: losses in each precision, compared with a CPU, shipped configurations, and waits."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, TORCHRUN, VISIBLE_GPUS, ranks_on, read_rows, run_args, run_program, write_text
from tests.inside import max_relative_error
from tests.parallel.runs import loss_errors, train, with_stages

pytestmark = pytest.mark.gpu

# Largest relative error of a loss, compared with fp32 on a CPU. In fp16, the first steps may overflow and be skipped.
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
# Each strategy, and over all strategies each precision.
WATCHED: dict[str, dict[str, Any]] = {
    "ddp-fp16": {"trainer__precision": "fp16"},
    "zero1-bf16": {"distributed__strategy": "zero1", "trainer__precision": "bf16", "optimizer__name": "muon"},
    "zero2-fp16": {"distributed__strategy": "zero2", "trainer__precision": "fp16"},
    "fsdp-bf16": {"distributed__strategy": "fsdp", "trainer__precision": "bf16", "optimizer__name": "muon"},
    "tree-fp32": {"distributed__reduction": "tree", "trainer__deterministic": True},
    "stages-bf16": with_stages(2, trainer__precision="bf16"),
}


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gpus_train_in_each_precision_with_the_losses_of_a_cpu(strategy: str, precision: str, tmp_path: Path) -> None:
    [expected] = train(tmp_path / "cpu", 1, {"fp32": {}}, 12).values()
    options = {"trainer__precision": precision, "distributed__strategy": strategy}
    [found] = train(tmp_path / "cuda", ranks_on("cuda", 2), {"run": options}, 12, "cuda").values()
    assert max_relative_error(found, expected) < TOLERANCES[precision]


def test_shards_in_host_memory_train_with_the_losses_of_a_cpu(tmp_path: Path) -> None:
    [expected] = train(tmp_path / "cpu", 1, {"fp32": {}}, 12).values()
    options = {"distributed__strategy": "fsdp", "distributed__cpu_offload": True}
    [found] = train(tmp_path / "cuda", ranks_on("cuda", 2), {"run": options}, 12, "cuda").values()
    assert max_relative_error(found, expected) < TOLERANCES["fp32"]


@pytest.mark.parametrize("name", ["gpt2_small", "nanogpt_char"])
def test_shipped_configurations_train_evaluate_sample_and_are_profiled(name: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", size=30_000)
    run_dir = tmp_path / "run"
    options = (
        f"--config=configs/{name}.yaml --data.path={text} --trainer.run_dir={run_dir} --optimizer.warmup_steps=2 "
        "--trainer.cuda_graphs=true --trainer.batch_size=24 --trainer.max_steps=20 --trainer.log_every=1 "
        "--trainer.sample_every=10 --trainer.eval_every=10 --trainer.profile_steps=2"
    )
    done = run_program("main.py", *options.split(), cwd=ROOT, timeout=900, **VISIBLE_GPUS)
    assert done.returncode == 0, done.stderr
    assert "graphs     CUDA graphs after 3 calls" in done.stdout
    first, *_, last = read_rows(run_dir)
    assert last["loss"] < first["loss"]
    assert last["memory"] > 0
    assert [len(row["text"]) for row in read_rows(run_dir, "sample")] == [120, 120]
    assert '"cat": "kernel"' in (run_dir / "trace-0.json").read_text()

    command = ("sample.py", "--snapshot", str(run_dir), "--temperature", "0", "--max_new_tokens", "40")
    on_gpu = run_program(*command, "--device", "cuda", **VISIBLE_GPUS)
    on_cpu = run_program(*command, "--device", "cpu", **VISIBLE_GPUS)
    assert re.fullmatch(r"(?s).{41}", on_gpu.stdout), on_gpu.stderr
    assert on_gpu.stdout == on_cpu.stdout


def test_stages_on_gpus_train_with_the_losses_of_one_process(tmp_path: Path) -> None:
    ranks = ranks_on("cuda", 2, at_least=2)
    assert max(loss_errors(tmp_path, ranks, [with_stages(2)], device="cuda")) < 1e-4


@pytest.mark.parametrize("name", WATCHED)
def test_no_step_between_log_lines_waits_for_the_gpu(name: str, text: Path, tmp_path: Path) -> None:
    ranks = ranks_on("cuda", 2, at_least=2 if name == "stages-bf16" else 1)
    launcher = (*TORCHRUN, f"--nproc_per_node={ranks}", "-m", "tests.gpu.injected", "WAITS")
    options = WATCHED[name] | dict.fromkeys(("trainer__log_every", "trainer__eval_every", "trainer__save_every"), 100)
    options["trainer__save_overhead"] = None
    done = run_program(*launcher, *run_args(tmp_path / "run", text, **options), timeout=900, **VISIBLE_GPUS)
    assert done.returncode == 0, done.stderr
    assert "synchronizing CUDA operation" not in done.stderr, done.stderr
