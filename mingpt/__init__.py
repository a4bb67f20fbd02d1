"""The library that main.py, trainer.py and the other scripts use."""

import sys

__version__ = "1.0.0"  # as in pyproject.toml

if sys.platform == "win32":
    sys.exit("error: these programs run on Linux and macOS; on Windows, use WSL")
