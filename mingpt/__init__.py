"""The library that main.py, trainer.py and the other scripts use."""

import sys

if sys.platform == "win32":
    sys.exit("error: these programs run on Linux and macOS; on Windows, use WSL")
