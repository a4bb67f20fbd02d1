import os
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.files import make_folder, replace_file, replaced_file


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("missing")
    message = f"^trainer.run_dir: {tmp_path}/link can't be created: it is a link to missing, which is not a folder; "
    with pytest.raises(UserError, match=message):
        make_folder(tmp_path / "link", "trainer.run_dir")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", "old")
    with pytest.raises(TypeError), replaced_file(tmp_path / "file") as file:
        file.writelines([b"new", None])  # type: ignore[list-item]
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_system_that_cannot_flush_folders_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), os.stat(tmp_path)):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    before = os.listdir("/proc/self/fd")
    replace_file(tmp_path / "file", "text")
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == ["file"]
