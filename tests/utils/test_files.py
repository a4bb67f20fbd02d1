"""The run folder's lock, and config.yaml."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from mingpt.utils import files
from mingpt.utils.errors import UserError
from mingpt.utils.files import lock_run_dir, write_config


@pytest.mark.skipif(sys.platform != "linux", reason="run folders are locked on Linux only")
def test_a_run_folder_is_locked_until_the_descriptor_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0.1)
    lock = lock_run_dir(tmp_path)
    os.close(lock_run_dir(tmp_path / "other"))
    with pytest.raises(UserError, match=rf"^trainer\.run_dir: another process is training in {tmp_path}; wait for it"):
        lock_run_dir(tmp_path)
    os.close(lock)
    os.close(lock_run_dir(tmp_path))


def test_config_is_replaced_or_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_config(tmp_path, {"trainer": {"seed": seed, "run_dir": str(tmp_path)}})
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"trainer": {"seed": 2, "run_dir": str(tmp_path)}}
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(UserError, match=rf"^trainer\.run_dir: {tmp_path}/config.yaml can't be written: Is a directory"):
        write_config(tmp_path, {})
