"""time_to_loss: what it trains, on which text, and until when."""

import math
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import baselines, learning
from benchmarks.__main__ import run, run_case
from benchmarks.cases import CASES, LONG_CASES
from benchmarks.harness import Bench
from mingpt.config.schema import DistributedConfig
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import RankInfo
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.program import run_program as exit_status_of
from tests.benchmarks.test_cases import MODEL, TINY
from tests.helpers import write_text
from trainer import Trainer


@pytest.fixture
def bench(tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench with a tiny model, a short text that can be learned, three repetitions and a short recipe of nanoGPT."""
    (tmp_path / "model.py").write_text(MODEL)
    text = write_text(tmp_path / "words.txt")
    monkeypatch.setattr(learning, "RECIPE_STEPS", 20)
    options = [*TINY, "--trainer.batch_size", "8", "--optimizer.warmup_steps", "2", "--data.path", str(text)]
    return Bench(DistributedContext(RankInfo(), DistributedConfig()), tmp_path, options, {"nanogpt": tmp_path})


def test_time_to_loss_stops_at_the_loss_of_the_recipe(bench: Bench, monkeypatch, capsys) -> None:
    calls: list[tuple] = []

    def record(name: str) -> None:
        function = getattr(learning, name)
        monkeypatch.setattr(
            learning, name, lambda *args: calls.append((name, *args[1:], function(*args))) or calls[-1][-1]
        )

    record("train_recipe")
    record("train_to_loss")
    [ratio] = run_case("time_to_loss", bench)
    assert 0 < ratio.smallest <= ratio.figure <= ratio.largest
    for seed, theirs, ours in zip((1, 2, 3), calls[::2], calls[1::2], strict=True):
        assert theirs[:-1] == ("train_recipe", seed)
        assert ours[:-1] == ("train_to_loss", seed, theirs[-1].loss)
        assert f"{ours[-1].loss:.3f} after {ours[-1].steps} steps instead of {theirs[-1].loss:.3f}" in ratio.what
    assert capsys.readouterr().out == ""


def test_our_run_ends_at_the_first_evaluation_at_the_loss(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(learning, "STEPS", 400)
    reached = learning.train_to_loss(bench, 1, 2.4)
    assert reached.loss <= 2.4
    assert 40 <= reached.steps < 400
    assert reached.steps % 40 == 0
    earlier = learning.train_to_loss(bench, 1, reached.loss + 1e-6)
    assert earlier[1:] == reached[1:]
    assert learning.train_to_loss(bench, 2, 2.4)[1:] != reached[1:]
    bench.options = [*bench.options, "--trainer.max_steps", "7", "--trainer.eval_every", "5"]
    assert learning.train_to_loss(bench, 1, 0.0).steps == 7  # options of the command line win


def test_evaluation_is_not_training_time(bench: Bench, monkeypatch) -> None:
    now, losses = [0.0], iter([9.0, 8.0, 7.0])

    def evaluate(*args: object) -> float:
        now[0] += 1000
        return next(losses)

    def train_step(trainer: Trainer) -> None:
        now[0] += 1
        trainer.progress.step += 1

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(learning, "evaluate", evaluate)
    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(learning, "STEPS", 20)
    assert learning.train_to_loss(bench, 1, 7.5) == (6.0, 6, 7.0)


def test_a_loss_that_is_not_reached_has_no_figure(bench: Bench, monkeypatch) -> None:
    losses = iter([9.0, math.nan, 1.0])
    monkeypatch.setattr(learning, "train_recipe", lambda *args: learning.Run(1.0, 20, 1.5))
    monkeypatch.setattr(learning, "train_to_loss", lambda *args: learning.Run(1.0, 3, next(losses)))
    [row] = run_case("time_to_loss", bench)
    assert row.figure == "not reached by 2 of 3 runs"
    assert "9.000 after 3 steps instead of 1.500 after 20 steps" in row.what


def test_the_recipe_has_nanogpts_schedule_model_and_seeds(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(learning, "RECIPE_STEPS", 2000)
    rates = [learning.recipe_learning_rate(step) for step in (0, 99, 100, 1050, 2000)]
    assert rates == pytest.approx([1e-3 / 101, 1e-3 * 100 / 101, 1e-3, 5.5e-4, 1e-4])
    monkeypatch.setattr(learning, "RECIPE_STEPS", 5)
    built, used = [], []

    class Recorded(baselines.NanoGPT):
        def __init__(self, folder: Path, trainer: object) -> None:
            super().__init__(folder, trainer)
            built.append((self, trainer))

        def step(self, learning_rate: float) -> None:
            super().step(learning_rate)
            used.append(self.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(learning, "NanoGPT", Recorded)
    first, second, other = (learning.train_recipe(bench, seed) for seed in (1, 1, 2))
    assert first.loss == second.loss != other.loss
    assert used[:5] == [learning.recipe_learning_rate(step) for step in range(5)]
    nanogpt, trainer = built[0]
    config = trainer.model_config  # not that of the command line
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size, nanogpt.B) == (4, 4, 128, 64, 12)
    idx, targets = trainer.val_data[range(len(trainer.val_data))]
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            nanogpt.model.weight[idx].flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE_INDEX
        )
    assert first.loss == pytest.approx((losses.sum() / (targets != IGNORE_INDEX).sum()).item(), rel=1e-6)


def test_long_cases_run_only_if_they_are_named(capsys, monkeypatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("benchmarks.__main__.BASELINES", {})  # whose folders are not here
    for name in CASES:
        monkeypatch.setitem(CASES, name, lambda bench, name=name: called.append(name) or iter(()))
    monkeypatch.setattr(Bench, "run_on_ranks", lambda bench, name: called.append(name) or iter(()))
    for names in ([], ["time_to_loss"]):
        monkeypatch.setattr("sys.argv", ["benchmarks", *names])
        assert exit_status_of(run, sys.argv[1:]) == 0
    assert called == [name for name in CASES if name not in LONG_CASES] + ["time_to_loss"]
