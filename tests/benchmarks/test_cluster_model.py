"""What a step takes on paper: operations as counted, links as published, and the ways that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cluster_model import MACHINES, SHAPES, Machine, exposed, flops_per_step, muon_flops, plan, plans, run
from mingpt.config import Config, GPTConfig, OptimizerConfig
from mingpt.config_parser import read_config
from mingpt.optimizer import build_optimizer
from mingpt.utils.progress import run_script
from model import GPT

SHAPE = GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=11, block_size=16)
DGX, ETHERNET = MACHINES


def config(**knobs: Any) -> Config:
    words = [word for key, value in knobs.items() for word in (f"--{key.replace('__', '.')}", str(value))]
    return read_config(["--trainer.batch_size", "2048", "--trainer.save_every", "1000", *words])


def test_operations_are_those_that_pytorch_counts() -> None:
    model, idx = GPT(SHAPE), torch.zeros(5, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counted, torch.autocast("cpu", torch.bfloat16):  # attention in products
        model(idx, idx)[1].backward()
    assert counted.get_total_flops() == flops_per_step(SHAPE, 5)


def test_muons_operations_are_those_that_pytorch_counts() -> None:
    model = GPT(SHAPE)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert counted.get_total_flops() == muon_flops(SHAPE)


def test_a_ring_sends_all_but_its_own_part_over_its_slowest_link() -> None:
    machine = Machine("", inside=100.0, between=50.0, gpus=4, latency=0.0)
    assert machine.passes(1000, 1) == 0
    assert machine.passes(1000, 2) == 5
    assert machine.passes(1000, 4) == 7.5
    assert machine.passes(1000, 8) == 17.5
    assert replace(machine, latency=1.0).passes(1000, 8) == 17.5 + 3


@pytest.mark.parametrize(
    ("sent", "hiding", "seconds"), [(10.0, 100.0, 1.0), (100.0, 10.0, 90.0), (100.0, 95.0, 10.0), (0.0, 1.0, 0.0)]
)
def test_sending_hides_behind_computing_but_for_its_last_part(sent: float, hiding: float, seconds: float) -> None:
    assert exposed(sent, hiding, last=0.1) == pytest.approx(seconds)


def test_more_gpus_are_faster_and_less_than_linear_while_the_network_keeps_up() -> None:
    def fastest(ranks: int, machine: Machine) -> float:
        return min(way.step for way in plans(config(), SHAPES["1.5B"], ranks, machine))

    steps = [fastest(ranks, DGX) for ranks in (8, 64, 1024)]
    assert steps[0] / 8 < steps[1] < steps[0]
    assert steps[1] / 16 < steps[2] < steps[1]
    assert fastest(1024, ETHERNET) > fastest(64, ETHERNET) * 0.9  # the gradient crosses each node's link all the same


def test_what_is_picked_fits_and_what_does_not_is_not_there() -> None:
    found = {way.strategy: way for way in plans(config(), SHAPES["13B"], 8, DGX)}
    assert found.keys() == {"zero2", "fsdp"}  # 12 bytes for each of 13 billion parameters are more than 141 GB
    assert all(way.memory < DGX.memory for way in found.values())
    assert not list(plans(config(), SHAPES["13B"], 8, replace(DGX, memory=1e9)))
    small = {way.strategy for way in plans(config(), SHAPES["124M"], 8, DGX)}
    assert small == {"ddp", "zero1", "zero2", "fsdp"}


def test_a_slower_network_makes_ranks_wait() -> None:
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        asked = config(distributed__strategy=strategy, trainer__micro_batch_size=2)
        fast, slow = (plan(asked, SHAPES["1.5B"], 64, machine) for machine in MACHINES)
        assert fast.waiting < slow.waiting
        assert (fast.compute, fast.update, fast.memory) == (slow.compute, slow.update, slow.memory)


def test_ddp_repeats_muon_and_the_others_deal_it_out() -> None:
    ways = {
        (strategy, name): plan(
            config(distributed__strategy=strategy, optimizer__name=name), SHAPES["1.5B"], 16, DGX
        ).update
        for strategy in ("ddp", "zero1", "fsdp")
        for name in ("adamw", "muon")
    }
    added = {strategy: ways[strategy, "muon"] - ways[strategy, "adamw"] for strategy in ("ddp", "zero1", "fsdp")}
    assert added["zero1"] == pytest.approx(added["ddp"] / 16, rel=0.1)
    assert added["fsdp"] == pytest.approx(added["ddp"] / 16, rel=0.1)


def test_a_line_is_printed_for_each_model_and_number(capsys) -> None:
    words = ("--model.n_layer", "2", "--model.n_head", "4", "--model.n_embd", "256", "--data.block_size", "1024")
    run(["--ranks", "4", "16", *words])
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("| 15M | ")]
    assert [line.split(" | ")[1] for line in lines] == ["4", "16"] * 2
    assert "100 Gb/s Ethernet" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "0"), "error: --ranks: 0 is no number of GPUs, must be at least 1"),
        (("--model.n_layer", "0"), "error: model.n_layer is 0, must be at least 1 (in the command line)"),
        (("--gpus", "8"), "error: command line: unrecognized arguments: --gpus 8; --help lists all"),
    ],
)
def test_a_mistake_is_one_message(words: tuple[str, ...], said: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["scaling.py", *words])
    assert run_script(run) == 2
    printed = capsys.readouterr()
    assert (printed.err.strip(), printed.out) == (said, "")
