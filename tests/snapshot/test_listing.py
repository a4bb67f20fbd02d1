"""`python snapshot.py PATH`: what is there, whether it is whole, and whether two runs hold the same bits."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from helpers import run_args, run_program, run_ranks, train_main, write_text

from mingpt.snapshot.__main__ import main
from mingpt.snapshot.storage import fingerprint


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the same seed and a third of another, of six steps each."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    for name, seed in (("run", 1), ("again", 1), ("other", 2)):
        argv = run_args(folder / name, text, trainer__max_steps=6, trainer__eval_every=6, trainer__seed=seed)
        assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    return folder


def listed(path: Path) -> tuple[int, list[list[str]], str]:
    """Exit status, the words of each row, and stderr."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr("sys.argv", ["snapshot.py", str(path)])
        status = main()
    return status, [line.split() for line in out.getvalue().splitlines()], err.getvalue()


def test_a_run_folder_is_listed_by_step_with_bytes_and_validation_loss(trained: Path) -> None:
    done = run_program("-m", "mingpt.snapshot", str(trained / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    header, first, last = [line.split() for line in done.stdout.splitlines()]
    assert header == ["step", "written", "bytes", "val_loss", "state", "weights", "optimizer"]
    size = (trained / "run/snapshots/step_00000003.pt").stat().st_size
    val_loss = torch.load(trained / "run/snapshots/step_00000006.pt", weights_only=True)["val_loss"]
    assert (first[0], first[4:6]) == ("3", [f"{size:,}", "whole"])  # no validation loss was made at step 3
    assert (last[0], last[5:7]) == ("6", [f"{val_loss:.4f}", "whole"])


@pytest.mark.slow
def test_fingerprints_are_equal_for_equal_bits_and_differ_otherwise(trained: Path) -> None:
    def prints(name: str) -> list[list[str]]:
        return [row[-2:] for row in listed(trained / name)[1][1:]]

    assert prints("run") == prints("again") == prints("run/snapshots")
    assert all(set(mine).isdisjoint(other) for mine, other in zip(prints("run"), prints("other"), strict=True))
    assert len({word for row in prints("run") for word in row}) == 4


def test_a_fingerprint_sees_every_bit_name_shape_and_type() -> None:
    tensors = {"a": torch.tensor([0.0, 1.0]), "b": {"c": torch.tensor(2.0)}}
    others = [
        tensors | {"a": torch.tensor([-0.0, 1.0])},
        tensors | {"a": torch.tensor([[0.0, 1.0]])},
        tensors | {"a": torch.tensor([0.0, 1.0]).double()},
        tensors | {"b": {"c": torch.tensor(3.0)}},
        {"a": tensors["a"], "B": tensors["b"]},
    ]
    assert fingerprint(dict(reversed(tensors.items()))) == fingerprint(tensors)
    assert len({fingerprint(tensors), *map(fingerprint, others)}) == 6


def test_damage_is_told_with_its_place(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained / "run/snapshots", tmp_path / "run")
    weight = torch.load(run / "step_00000003.pt", weights_only=True)["model"]["transformer.wte.weight"]
    content = bytearray((run / "step_00000003.pt").read_bytes())
    content[content.index(weight.numpy().tobytes())] ^= 1
    (run / "step_00000003.pt").write_bytes(content)
    (run / "step_00000006.pt").write_bytes(content[:5000])
    status, [_, flipped, cut], err = listed(run)
    assert (status, err) == (1, "")
    assert flipped[5] == cut[5] == "DAMAGED:"
    assert "/data/" in flipped[-1]
    assert " ".join(cut).endswith("cut short, or in the list of its parts")


def test_it_wants_a_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["snapshot.py"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "the following arguments are required: PATH" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_where_there_is_none_it_says_so(place: str, tmp_path: Path) -> None:
    status, listing, err = listed(tmp_path / place)
    assert (status, listing) == (2, [])
    assert err.startswith(f"error: PATH: no snapshot at {tmp_path / place}: ")
    assert err.endswith("; main.py makes them in its run folder\n")
