"""Steps that are recorded as CUDA graphs have the losses of other steps, and the same bits after a resume."""

from pathlib import Path

import pytest
import torch

from mingpt.config.conflicts import find_start_conflicts
from mingpt.config.parser import read_config
from mingpt.errors import UserError
from tests.helpers import DEVICES, VISIBLE_GPUS, assert_equal_snapshots, loss_curve, run_program, run_ranks
from tests.parallel import graphs


@pytest.mark.skipif(torch.__version__ < "2.11", reason="trainer.cuda_graphs needs PyTorch 2.11")
@pytest.mark.parametrize("device", DEVICES)
def test_recorded_steps_have_the_losses_of_other_steps_and_the_bits_after_a_resume(device: str, tmp_path: Path) -> None:
    if device == "cpu":
        runs = graphs.RUNS | graphs.CPU_RUNS
        run_ranks(1, graphs.train_all, tmp_path, tmp_path=tmp_path, timeout=400)
    else:
        runs = graphs.RUNS | graphs.GPU_RUNS
        done = run_program("-m", "tests.parallel.graphs", str(tmp_path), timeout=900, **VISIBLE_GPUS)
        assert done.returncode == 0, done.stderr
    for name in runs:
        one, plain, parts = (tmp_path / f"{name}-{part}" for part in ("graphs", "plain", "parts"))
        assert_equal_snapshots(one, parts)
        assert loss_curve(one) == loss_curve(parts), name
        expected = [loss for _, loss in loss_curve(plain)]
        rel = 0 if device == "cpu" else 1e-5
        assert [loss for _, loss in loss_curve(one)] == pytest.approx(expected, rel=rel, abs=0), name


def test_graphs_are_refused_where_they_can_not_be_recorded() -> None:
    config = read_config(["--trainer.cuda_graphs", "true"])
    assert not list(find_start_conflicts(config, 1, "cuda"))
    for world_size, device in ((1, "cpu"), (2, "cuda")):
        [message] = find_start_conflicts(config, world_size, device)
        assert message == (
            f"trainer.cuda_graphs is true, which needs one process on a CUDA GPU, not {world_size} on {device}"
        )
    with pytest.raises(UserError, match=r"trainer\.cuda_graphs is true, must be false with distributed\.strategy"):
        read_config(["--trainer.cuda_graphs", "true", "--distributed.strategy", "fsdp"])
