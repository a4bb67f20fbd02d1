"""Folders of token files are opened, not read, and train like the text."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mingpt.config.schema import DataConfig
from mingpt.errors import UserError
from mingpt.text import corpus
from tests.faults.runs import assert_same_run
from tests.helpers import loss_curve, read_rows, run_args, run_each_captured, run_ranks, train_run, write_text
from tests.inside import assert_one_message, newest_snapshot, prepare_text


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contains text.txt and `books`, its characters as token files."""
    folder = tmp_path_factory.mktemp("prepared")
    text = write_text(folder / "text.txt")
    text.write_text(text.read_text().replace("figs", "ñandú"), encoding="utf-8")
    prepare_text(text, folder / "books", "char")
    return folder


def open_folder(path: Path, **keys: Any) -> corpus.Corpus:
    return corpus.open_folder(path, DataConfig(block_size=8, **keys))


def test_a_run_on_token_files_has_the_bits_of_the_run_on_the_text(prepared: Path, tmp_path: Path) -> None:
    places = {"text": prepared / "text.txt", "books": prepared / "books"}
    for name, path in places.items():
        train_run(tmp_path / name, path, trainer__max_steps=6)
    assert_same_run(tmp_path / "text", tmp_path / "books")
    rows = [read_rows(tmp_path / name, "eval") for name in places]
    assert [row["val_bpb"] for row in rows[0]] == [row["val_bpb"] for row in rows[1]]
    assert newest_snapshot(tmp_path / "books")["vocabulary"] == newest_snapshot(tmp_path / "text")["vocabulary"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (3, {"distributed__strategy": "zero1"}),
        (3, {"distributed__strategy": "zero2"}),
        (4, {"distributed__strategy": "fsdp"}),
        (3, {"distributed__reduction": "tree"}),
        (2, {"distributed__pipeline_stages": 2, "trainer__batch_size": 8}),
        (4, {"distributed__pipeline_stages": 2, "trainer__batch_size": 8}),
    ],
)
def test_every_strategy_has_the_losses_of_one_process(
    ranks: int, changes: dict[str, Any], prepared: Path, tmp_path: Path
) -> None:
    options = {"model__dropout": 0.0, **changes}
    one = train_run(tmp_path / "one", prepared / "books", **options | {"distributed__pipeline_stages": 1})
    many = train_run(tmp_path / "many", prepared / "books", ranks, **options)
    if "distributed__reduction" in changes:
        assert_same_run(one, many)
    assert dict(loss_curve(many)) == pytest.approx(dict(loss_curve(one)), rel=1e-5)


def test_files_of_nanogpt_work_with_a_tokenizer_json_beside_them(prepared: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(prepared / "books", tmp_path / "nanogpt")
    expected = open_folder(folder)
    (folder / "meta.json").unlink()
    found = open_folder(folder)
    assert found.training[:].tolist() == expected.training[:].tolist()
    assert math.isnan(found.bits_per_byte(1.0))  # the length of its text is not known
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing; .* GPT-2's \(docs/tokens\.md\)"):
        open_folder(folder)


def test_the_training_part_is_truncated(prepared: Path) -> None:
    whole, half = open_folder(prepared / "books"), open_folder(prepared / "books", truncate=0.5)
    assert len(half.training) == len(whole.training) // 2
    assert half.training[:].tolist() == whole.training[: len(half.training)].tolist()
    assert len(half.validation) == len(whole.validation)


def test_damaged_and_foreign_files_are_refused_in_one_message(prepared: Path, tmp_path: Path) -> None:
    tokens = (prepared / "books/train.bin").read_bytes()
    cases = [
        ("train.bin", tokens[:-1], "is not a multiple of the data-type size"),
        ("train.bin", tokens[:-2], "train.bin has 2804 tokens, but 2805 according to meta.json"),
        ("train.bin", b"", "can't be read: ValueError: cannot mmap an empty file"),
        ("meta.json", b"{", "can't be read: JSONDecodeError"),
        ("tokenizer.json", b"{}", "can't be read: KeyError: 'model'"),
    ]
    argvs = []
    for number, (name, content, _) in enumerate(cases):
        folder = shutil.copytree(prepared / "books", tmp_path / f"{number}")
        (folder / name).write_bytes(content)
        argvs.append(run_args(tmp_path / "run", folder, trainer__max_steps=2))
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    for (status, _, err), (*_, message) in zip(results, cases, strict=True):
        assert status == 2
        assert_one_message(err, message)


def test_a_folder_with_another_tokenizer_does_not_continue_a_run(prepared: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text((prepared / "text.txt").read_text().replace("bob", "Bob"))
    prepare_text(other, tmp_path / "other", "char")
    other.write_text((prepared / "text.txt").read_text().replace("ñ", "n"))
    prepare_text(other, tmp_path / "fewer", "char")
    argvs = [
        run_args(tmp_path / "run", path, trainer__max_steps=steps)
        for path, steps in ((prepared / "books", 2), (tmp_path / "other", 3), (tmp_path / "fewer", 3))
    ]
    [[(status, _, _), *refused]] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert status == 0
    for (status, _, err), name in zip(refused, ("other", "fewer"), strict=True):
        assert status == 2
        assert_one_message(
            err, f"error: data.path: {tmp_path}/{name} has the tokens of another tokenizer than this run "
        )
