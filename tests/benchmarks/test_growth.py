"""Growth: its panels are measured, and predictions are exact for steps that follow the model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import growth
from benchmarks.cluster_model import MODELS, Cluster, count_parameters, estimate_step, meta_gpt
from benchmarks.growth import MESSAGE_MEGABYTES, SHAPES, Point, fit_cluster, gpt_config, predict
from benchmarks.harness import SMALL, Bench, Shape
from mingpt.config import MAX_STEPS
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext

CONSTANTS = {"elementwise_seconds": 3e-7, "block_seconds": 0.05, "step_seconds": 0.1}
CLUSTER = replace(Cluster("", 1e10, utilization=1.0, overlap=0.0, memory_bandwidth=1e30), **CONSTANTS)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    yield Bench(DistributedContext(RankInfo()), tmp_path, pairs=1, min_run_time=0.0)
    torch.set_num_threads(threads)


def step_seconds(shape: Shape) -> float:
    config = read_config([*shape.options, "--trainer.save_every", str(MAX_STEPS)])
    return estimate_step(config, gpt_config(shape), 1, CLUSTER).seconds


@pytest.fixture(scope="module")
def points() -> list[Point]:
    """Points of a machine that follows the model, with a link that sends 1 MB in the time of a SMALL step."""
    base = step_seconds(SMALL)
    steps = [
        Point(panel, x, "step", *[step_seconds(shape) / base] * 3) for panel in SHAPES for x, shape in SHAPES[panel]
    ]
    messages = [Point("all-reduce", size, "2", *[0.01 + size] * 3) for size in (0.001, 4, 40)]
    others = [Point("ranks", 2, "step", 1.0, 0.9, 1.1), Point("text", 10, "seconds", 1.0, 1.0, 1.0)]
    return [*steps, *messages, *others]


def test_the_fit_recovers_the_parameters_of_the_model(points: list[Point]) -> None:
    base, found = step_seconds(SMALL), fit_cluster(points)
    assert found.flops == pytest.approx(CLUSTER.flops * base, rel=1e-3)
    for key, seconds in CONSTANTS.items():
        assert getattr(found, key) == pytest.approx(seconds / base, rel=1e-3), key
    steps = [point for point in predict(points) if point.panel in SHAPES]
    assert len(steps) == sum(map(len, SHAPES.values()))
    for point in steps:
        assert point.prediction == pytest.approx(point.figure, rel=1e-3)


@pytest.mark.parametrize(("cores", "slowdown"), [(2, 1), (1, 2)])
def test_steps_of_ranks_are_predicted_from_those_of_one_rank_and_the_link(
    cores: int, slowdown: int, points: list[Point], monkeypatch
) -> None:
    monkeypatch.setattr(growth, "available_cores", lambda: cores)
    [point] = [point for point in predict(points) if point.panel == "ranks"]
    half_batch = step_seconds(replace(SMALL, B=SMALL.B // 2)) / step_seconds(SMALL)
    megabytes = 4 * count_parameters(meta_gpt(gpt_config(SMALL))) / 1e6
    assert point.prediction == pytest.approx(slowdown * half_batch + megabytes + 0.01, rel=0.02)


def test_shapes_are_measured(bench: Bench, monkeypatch) -> None:
    tiny = Shape(1, 2, 16, 16, 2)
    monkeypatch.setattr(growth, "SHAPES", {"width": [(16, tiny)], "depth": [(2, replace(tiny, layers=2))]})
    found = list(growth.measure_shapes(bench))
    assert [(point.panel, point.x) for point in found] == [("width", 16), ("depth", 2)]
    assert all(0 < point.figure < 1 for point in found)


@pytest.mark.slow
def test_texts_and_snapshots_are_measured_and_deleted(bench: Bench, tmp_path: Path) -> None:
    found = [*growth.measure_texts(bench, [2]), *growth.measure_snapshots(bench, [16])]
    assert [(point.panel, point.curve) for point in found] == [
        ("text", "seconds to the first step"),
        ("text", "memory of its own at the first step"),
        ("snapshots", "stall, in plain copies"),
        ("snapshots", "load, in torch.load's"),
    ]
    assert all(point.figure > 0 for point in found)
    assert not list(tmp_path.glob("**/*.pt"))
    assert all(file.stat().st_size <= 10**6 for file in tmp_path.glob("*/text.txt"))


def test_a_text_without_enough_disk_space_is_skipped_with_a_message(bench: Bench, monkeypatch, capsys) -> None:
    monkeypatch.setattr(growth, "measure_first_step", lambda options: (1.0, 1.0))
    monkeypatch.setattr(growth.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10**7}))
    assert {point.x for point in growth.measure_texts(bench, [2, 1000])} == {2}
    assert "text of 1,000 MB: skipped" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_are_measured_under_torchrun(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(growth, "RANK_COUNTS", (2,))
    found = list(growth.measure_ranks(bench))
    assert [(point.panel, point.x, point.curve) for point in found] == [
        ("ranks", 2, "step"),
        *(("all-reduce", size, "2") for size in MESSAGE_MEGABYTES),
    ]
    assert all(point.figure > 0 for point in found)


def test_document_and_image_show_points_errors_and_clusters(points: list[Point], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(growth, "GPU_COUNTS", (8,))
    monkeypatch.setattr(growth, "MODELS", {"124M": MODELS["124M"]})
    predicted = predict(points)
    text = "\n".join(growth.document(predicted))
    for point in predicted:
        assert f"\n| {point.panel} | {point.x:,g} | {point.curve} | {point.figure:.3g} | " in text
    assert "\nThe median error of 12 fitted steps is 0%, the largest 0%.\n" in text
    assert text.count("\n| 124M | 8 | ") == 2
    growth.draw(predicted, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
