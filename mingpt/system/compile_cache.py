"""Keeps the code that torch.compile generates in a folder, so that later starts do not compile again."""

import os
import platform
import shutil
from pathlib import Path

from torch._dynamo.callback import callback_handler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch reads it whenever it compiles


def use_compile_cache(folder: Path) -> None:
    """Makes torch.compile keep its code in a folder, unless TORCHINDUCTOR_CACHE_DIR names another folder.

    While a process compiles, the folder contains a marker file of this process. A marker that is found here was left by
    a process that was killed while it compiled. Then the folder is deleted, because PyTorch (2.13) loads an incomplete
    library without a check and is killed by SIGBUS. No process may be compiling during the call, but several processes
    may call it.
    """
    if os.environ.get(VARIABLE) not in (None, default_cache_dir()):  # PyTorch sets the default when it is imported
        return
    os.environ[VARIABLE] = str(folder.absolute())
    if any(folder.glob("compiling-*")):
        shutil.rmtree(folder, ignore_errors=True)  # another process may also delete it
    marker = folder / f"compiling-{platform.node()}-{os.getpid()}"

    def touch_marker(_: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()

    callback_handler.register_start_callback(touch_marker)
    callback_handler.register_end_callback(lambda _: marker.unlink(missing_ok=True))
