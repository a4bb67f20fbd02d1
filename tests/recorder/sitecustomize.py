"""Notes who says what goes wrong, in which words and in which test, into the folder that MESSAGES names.

Python imports a module of this name as it starts. tests/messages.py puts this folder into PYTHONPATH, and so each
process of the tests imports it, whoever starts it: pytest, ranks, launchers and their workers. The program knows
nothing of it.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

import errors


def stack(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """File and line of a frame, of its caller and so on."""
    while frame is not None:
        yield os.path.abspath(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back


def note(message: str, lines: Iterator[tuple[str, int]]) -> None:
    """Writes down a message with the lines of code that it comes from, the innermost first."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    row = json.dumps({"message": message, "lines": list(islice(lines, 5)), "test": test})
    file, _ = tempfile.mkstemp(dir=os.environ["MESSAGES"])  # one each: a test limits the size of files
    os.write(file, row.encode())
    os.close(file)


def construct(error: Exception, *args: Any) -> None:
    """In place of the constructors of UserError and PeerError."""
    Exception.__init__(error, *args)
    note(str(error), islice(stack(sys._getframe(1)), 1))
    invalid = sys.exc_info()[1]
    if type(invalid).__name__ == "ValidationError":  # pydantic's, which holds what sections of the yaml have raised
        for mistake in invalid.errors():  # type: ignore[union-attr]
            cause = mistake.get("ctx", {}).get("error")
            if cause is not None:
                [said] = [line.strip() for line in str(error).splitlines() if str(cause) in line]
                trace = cause.__traceback__
                while trace.tb_next:
                    trace = trace.tb_next
                note(said, iter([(trace.tb_frame.f_code.co_filename, trace.tb_lineno)]))


def refuse(parser: argparse.ArgumentParser, message: str, error: Any = argparse.ArgumentParser.error) -> None:
    """In place of argparse's way out."""
    note(message, stack(sys._getframe(1)))
    error(parser, message)


def say(*words: Any, show: Any = builtins.print, **options: Any) -> None:
    """In place of print."""
    if words and str(words[0]).startswith("error: "):
        note(str(words[0]).removeprefix("error: "), stack(sys._getframe(1)))
    show(*words, **options)


class Finder(MetaPathFinder):
    """Finds screen.py, with another `complain`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "screen":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            tell = module.complain

            def complain(line: str) -> None:
                note(line, stack(sys._getframe(1)))
                tell(line)

            module.complain = complain  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
errors.UserError.__init__ = errors.PeerError.__init__ = construct  # type: ignore[method-assign]
argparse.ArgumentParser.error = refuse  # type: ignore[assignment]
builtins.print = say
