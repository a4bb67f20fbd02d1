"""python -m mingpt.snapshot: lists snapshots, finds damage, and compares runs by fingerprints."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from mingpt.errors import UserError
from mingpt.snapshot.__main__ import run
from mingpt.snapshot.folder import fingerprint
from tests.helpers import run_args, run_each_captured, run_ranks, write_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the same seed and a third of another, of six steps each."""
    folder = tmp_path_factory.mktemp("trained")
    options = {"trainer__max_steps": 6, "trainer__eval_every": 6}
    text = write_text(folder / "text.txt")
    argvs = [run_args(folder / name, text, **options) for name in ("run", "again", "other")]
    argvs[2] += ["--trainer.seed", "2"]
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=folder)
    assert [status for status, _, _ in results] == [0, 0, 0]
    return folder


def list_rows(path: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    run([str(path)])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_run_folder_is_listed_by_step_with_validation_loss(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, first, last = list_rows(trained / "run", capsys)
    assert header == ["step", "val_loss", "state", "weights", "optimizer"]
    val_loss = torch.load(trained / "run/snapshots/step_00000006.pt", weights_only=True)["val_loss"]
    assert first[:2] == ["3", "whole"]  # no evaluation at step 3
    assert last[:3] == ["6", f"{val_loss:.4f}", "whole"]


def test_fingerprints_are_equal_for_equal_bits_and_differ_otherwise(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ("run", "again", "run/snapshots", "run/snapshots/step_00000003.pt", "other")
    expected, *same, one, other = ([row[-2:] for row in list_rows(trained / path, capsys)[1:]] for path in paths)
    assert same == [expected, expected]
    assert one == expected[:1]
    assert len({cell for row in expected + other for cell in row}) == 8

    tensors = {"a": torch.tensor([0.0, 1.0]), "b": {"c": torch.tensor(2.0)}}
    changed = [
        tensors | {"a": torch.tensor([-0.0, 1.0])},
        tensors | {"a": torch.tensor([[0.0, 1.0]])},
        tensors | {"a": torch.tensor([0.0, 1.0]).double()},
        tensors | {"b": {"c": torch.tensor(3.0)}},
        {"a": tensors["a"], "B": tensors["b"]},
    ]
    assert fingerprint(dict(reversed(tensors.items()))) == fingerprint(tensors)
    assert len({fingerprint(tensors), *map(fingerprint, changed)}) == 6


def test_damage_is_reported_with_its_location(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(trained / "run/snapshots", tmp_path / "run")
    file = folder / "step_00000003.pt"
    weight = torch.load(file, weights_only=True)["model"]["transformer.wte.weight"]
    content = bytearray(file.read_bytes())
    content[content.index(weight.numpy().tobytes())] ^= 1
    file.write_bytes(content)
    (folder / "step_00000006.pt").write_bytes(content[:5000])
    (folder / "step_00000009.pt").mkdir()
    with pytest.raises(SystemExit, match="1"):
        run([str(folder)])
    flipped, cut, made = [" ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert re.fullmatch(r"DAMAGED: the bytes of its part archive/data/\d+ do not match their CRC-32", flipped)
    assert cut == "DAMAGED: cut short, or damaged in the list of its parts: File is not a zip file"
    assert made.startswith("[Errno 22] not a regular file: ")


def test_a_missing_path_or_snapshot_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run([])
    assert "the following arguments are required: PATH" in capsys.readouterr().err
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=rf"^PATH: no snapshot at {folder}; main\.py saves them in its run folder"):
            run([str(folder)])
