"""The folder in which torch.compile keeps compiled code, so that a start after the first does not compile again."""

import os
import struct
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch reads it whenever it compiles
ELF_HEADER_SIZE = 64  # bytes


def use_compile_cache(folder: Path) -> None:
    """Makes torch.compile keep its code in a folder, or in that of TORCHINDUCTOR_CACHE_DIR if the variable is set.

    Files that a killed compiler has left unfinished are removed, because PyTorch (2.13) loads a library under its final
    name without a check, and dies of SIGBUS in one that is cut off. No process may compile meanwhile.
    """
    if os.environ.get(VARIABLE) in (None, default_cache_dir()):  # PyTorch sets the default when it is imported
        os.environ[VARIABLE] = str(folder.absolute())
    for file in Path(os.environ[VARIABLE]).rglob("*"):
        if file.suffix != ".lock" and file.is_file() and _is_unfinished(file):
            file.unlink(missing_ok=True)


def _is_unfinished(file: Path) -> bool:
    """Whether a file is empty, or a library without the table that linkers write last."""
    size = file.stat().st_size
    if file.suffix != ".so":
        return size == 0
    with file.open("rb") as library:
        header = library.read(ELF_HEADER_SIZE)
    if len(header) < ELF_HEADER_SIZE or not any(header):
        return True
    if not header.startswith(b"\x7fELF"):  # a library of macOS
        return False
    [table] = struct.unpack_from("<Q", header, 40)  # e_shoff
    entry_size, entries = struct.unpack_from("<HH", header, 58)  # e_shentsize, e_shnum
    return table == 0 or table + entry_size * entries > size
