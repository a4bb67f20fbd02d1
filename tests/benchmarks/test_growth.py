"""Growth: its panels are measured, and the arithmetic's constants come back from steps that follow it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import run_program

from benchmarks import growth
from benchmarks.cluster_model import Machine, plan
from benchmarks.growth import (
    PANELS,
    SHAPES_HERE,
    Point,
    document,
    draw,
    fitted,
    gpt,
    measure_shapes,
    snapshots,
    table,
    text,
    with_predictions,
)
from benchmarks.harness import SMALL, Bench
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext
from model import GPT

HERE = Machine("", flops=1e10, share=1.0, elementwise=3e-7, block=0.05, step=0.1, hides=0.0, reads=1e30)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    yield Bench(DistributedContext(RankInfo()), tmp_path, pairs=1, timeout=0.0)
    torch.set_num_threads(threads)


def step(shape: growth.Shape, machine: Machine, ranks: int = 1) -> float:
    config = read_config([*shape.words, "--trainer.save_every", "1000000000"])
    return plan(config, gpt(shape), ranks, machine).step


@pytest.fixture
def points() -> list[Point]:
    """Those of a machine that does what the arithmetic says, with a link of 1 MB in a default step's time."""
    base = step(SMALL, HERE)
    made = [
        Point(panel, x, "step", *[step(shape, HERE) / base] * 3)
        for panel, shapes in SHAPES_HERE.items()
        for x, shape in shapes
    ]
    for megabytes in (0.001, 4, 40):
        made.append(Point("all-reduce", megabytes, "2", *[0.01 + megabytes] * 3))
    return [*made, Point("ranks", 2, "step", 1.0, 0.9, 1.1), Point("text", 10, "seconds", 1.0, 1.0, 1.0)]


def test_constants_come_back_from_steps_that_follow_the_arithmetic(points: list[Point]) -> None:
    base, found = step(SMALL, HERE), fitted(points)
    assert found.flops == pytest.approx(HERE.flops * base, rel=1e-3)
    assert found.elementwise == pytest.approx(HERE.elementwise / base, rel=1e-3)
    assert found.block == pytest.approx(HERE.block / base, rel=1e-3)
    assert found.step == pytest.approx(HERE.step / base, rel=1e-3)
    steps = [point for point in with_predictions(points) if point.panel in SHAPES_HERE]
    assert len(steps) == sum(map(len, SHAPES_HERE.values()))
    for point in steps:
        assert point.prediction == pytest.approx(point.figure, rel=1e-3)


def test_ranks_are_foretold_from_one_ranks_constants_and_the_links_speed(points: list[Point], monkeypatch) -> None:
    monkeypatch.setattr(growth, "cores", lambda: 2)
    [point] = [point for point in with_predictions(points) if point.panel == "ranks"]
    base, megabytes = step(SMALL, HERE), 4 * sum(p.numel() for p in GPT(gpt(SMALL)).parameters()) / 1e6
    halves = step(growth.replace(SMALL, B=6), HERE) / base
    assert point.prediction == pytest.approx(halves + megabytes + 0.01, rel=0.02)
    monkeypatch.setattr(growth, "cores", lambda: 1)  # two ranks take turns
    [crowded] = [point for point in with_predictions(points) if point.panel == "ranks"]
    assert crowded.prediction == pytest.approx(2 * halves + megabytes + 0.01, rel=0.02)


def test_shapes_are_measured(bench: Bench, monkeypatch) -> None:
    tiny = growth.Shape(1, 2, 16, 16, 2)
    monkeypatch.setattr(growth, "SHAPES_HERE", {"width": [(16, tiny)], "depth": [(2, growth.replace(tiny, layers=2))]})
    found = list(measure_shapes(bench))
    assert [(point.panel, point.x) for point in found] == [("width", 16), ("depth", 2)]
    assert all(0 < point.figure < 1 for point in found)


@pytest.mark.slow
def test_texts_and_snapshots_are_measured_and_leave_nothing(bench: Bench, tmp_path: Path) -> None:
    found = [*text(bench, [2]), *snapshots(bench, [16])]
    assert [(point.panel, point.curve) for point in found] == [
        ("text", "seconds to the first step"),
        ("text", "memory of its own at the first step"),
        ("snapshots", "stall, in plain copies"),
        ("snapshots", "load, in torch.load's"),
    ]
    assert all(point.figure > 0 for point in found)
    assert not [
        *tmp_path.glob("*/*.pt"),
        *(file for file in tmp_path.glob("*/text.txt") if file.stat().st_size > 10**6),
    ]


def test_a_text_that_finds_no_room_is_skipped_and_said(bench: Bench, monkeypatch, capsys) -> None:
    monkeypatch.setattr(growth, "first_step", lambda words: (1.0, 1.0))
    monkeypatch.setattr(growth.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10**7}))
    assert {point.x for point in text(bench, [2, 1000])} == {2}
    assert "text of 1,000 MB: skipped" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_are_measured() -> None:
    done = run_program("-m", "benchmarks.growth", "ranks", "--json")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["x"] for each in found if each["panel"] == "ranks"] == [2, 3, 4]
    assert sum(each["panel"] == "all-reduce" for each in found) == 9
    assert all(each["figure"] > 0 for each in found)


def test_the_document_has_every_point_the_error_and_the_paper(points: list[Point], monkeypatch) -> None:
    monkeypatch.setattr(growth, "NUMBERS", (8,))
    monkeypatch.setattr(growth, "SHAPES", {"124M": growth.SHAPES["124M"]})
    lines = "\n".join(document([*with_predictions(points)])).splitlines()
    for line in table([*with_predictions(points)]):
        assert line in lines
    assert "Off by 0% in the median of 12 fitted steps, by 0% at most." in lines
    assert sum(line.startswith("| 124M | 8 | ") for line in lines) == 2


def test_what_is_drawn_is_a_picture(points: list[Point], tmp_path: Path) -> None:
    draw([*with_predictions(points)], tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiem",), f"there is no panel tiem; there are: {', '.join(PANELS)}"),
        (("--panel", "text"), "unrecognized arguments: --panel"),
        (("text", "--out", "."), "--out is about all panels: name none"),
        (("--out", "nowhere"), "--out: there is no folder nowhere"),
    ],
)
def test_a_mistake_is_one_message(words: tuple[str, ...], said: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["growth.py", *words])
    with pytest.raises(SystemExit, match="2"):
        growth.main()
    assert capsys.readouterr().err.strip().endswith(said)
