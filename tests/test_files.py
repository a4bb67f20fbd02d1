import os
from pathlib import Path

import pytest

from mingpt.files import replace_file, replaced_file


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", "old")
    with pytest.raises(TypeError), replaced_file(tmp_path / "file") as file:
        file.writelines([b"new", None])  # type: ignore[list-item]
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
