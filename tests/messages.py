"""Every message that a person can meet who does something wrong, or whom something fails: docs/messages.md.

    python tests/messages.py [TEST ...]

runs the tests that the page names, and these, notes what they provoke and writes the page anew. TEST is a file or
`tests/test_main.py::test_it`; a new message wants its test named once.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/messages.md"
INTRODUCTION = """\
# Every message

What the program says when something is wrong, word for word, by the file that says it: what is wrong, where, what was
found, what is allowed, and what to do next. Under each stands the function that makes it, and the test in which it was
said: `python tests/messages.py` runs these tests, and writes this page of what they have met. What is other at each run
or on each machine stands in capitals.
"""
ERRORS = ("UserError", "PeerError", "NoAnswerError", "NotPrunedError")


class Site(NamedTuple):
    """A place in the code that makes a message: in this room, in this function, the first, second, ... there."""

    room: str
    function: str
    number: int


def rooms() -> list[Path]:
    return [*sorted(ROOT.glob("*.py")), ROOT / "data/prepare.py"]


def sites() -> dict[Site, range]:
    """All places that make a message, and their lines."""
    found: dict[Site, range] = {}
    for room in rooms():
        name, tree = str(room.relative_to(ROOT)), ast.parse(room.read_text())
        own = any(isinstance(node, ast.Call) and _called(node) == "ArgumentParser" for node in ast.walk(tree))
        counts: dict[str, int] = {}
        for node, names in _calls(tree, ()):
            function = ".".join(names) or "__main__"
            if _is_site(node, function, own):
                counts[function] = counts.get(function, 0) + 1
                found[Site(name, function, counts[function])] = range(node.lineno, node.end_lineno + 1)
    return found


def _calls(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    """Calls in the order of their lines, each with the names of the class and the function that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, names
        named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        yield from _calls(child, (*names, child.name) if named else names)


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _is_site(call: ast.Call, function: str, own_parser: bool) -> bool:
    """Whether a call makes a message, and does not only pass one on."""
    name = _called(call)
    if name in ("complain", "_failed"):
        return isinstance(call.args[0], (ast.JoinedStr, ast.Constant))
    if isinstance(call.func, ast.Attribute):  # argparse's complaints, and ours in its form
        return own_parser and name in ("error", "parse_args")
    return name in ERRORS or (name == "ValueError" and function.endswith(("Config.__post_init__", "check_sections")))


def met(tests: list[str]) -> dict[Site, tuple[str, list[str]]]:
    """What these tests provoke: for each site, one test and up to three messages, of several the shortest."""
    with tempfile.TemporaryDirectory() as folder:
        notes, base = Path(folder, "notes"), Path(folder, "base")
        notes.mkdir()
        env = {"MESSAGES": str(notes), "PYTHONPATH": f"{ROOT}/tests/recorder{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={base}", *tests]
        subprocess.run(command, cwd=ROOT, env=os.environ | env, check=True)
        rows = [json.loads(note.read_text()) for note in notes.iterdir()]
    places = {(site.room, line): site for site, lines in sites().items() for line in lines}
    found: dict[Site, dict[str, set[str]]] = {}
    for row in rows:
        # test_prepare.py runs a copy.
        lines = [(os.path.relpath(path, ROOT), line) for path, line in row["lines"]]
        lines = [("data/prepare.py" if room.endswith("/prepare.py") else room, line) for room, line in lines]
        site = next((places[line] for line in lines if line in places), None)
        if site is not None:
            test = row["test"].partition("[")[0]
            found.setdefault(site, {}).setdefault(test, set()).add(settled(row["message"], base))
    chosen = {}
    for site, by_test in found.items():
        ranked = [(sorted(said, key=lambda words: (len(words), words))[:3], test) for test, said in by_test.items()]
        messages, test = min(ranked, key=lambda pair: (len(pair[0][0]), pair))
        chosen[site] = test, messages
    return chosen


def settled(message: str, base: Path) -> str:
    """A message without what is other at each run or on each machine: capitals stand for that."""
    for pattern, word in (
        (rf"{base}/\w+", "FOLDER"),
        (r"(?<=unfinished-)\w+", "NAME"),
        (re.escape(str(ROOT)), "REPOSITORY"),
        (rf"\b{re.escape(platform.node())}\b", "HOST"),
        (rf"\b{platform.machine()} [A-Z\d_]+", "PROCESSOR"),
        (r"(?<=localhost:|127.0.0.1:)\d+|(?<=port: )\d+", "PORT"),
        (r"(?<=process )\d+|(?<=\.cpp:)\d+|(?<=allocate )\d+", "NUMBER"),
        (r"\b[0-9a-f]{64}\b", "DIGEST"),
    ):
        message = re.sub(pattern, word, message)
    return message


def page(found: dict[Site, tuple[str, list[str]]]) -> str:
    """The page's text."""
    lines = [INTRODUCTION]
    for room in dict.fromkeys(site.room for site in sites() if site in found):
        lines.append(f"## {room}\n")
        for site in (site for site in sites() if site in found and site.room == room):
            test, messages = found[site]
            lines += [
                *(f"```\n{message}\n```\n" for message in messages),
                f"`{site.function}` {site.number}, said in `{test}`\n",
            ]
    return "\n".join(lines)


def read_page() -> dict[Site, str]:
    """The sites that the page has, and their tests."""
    found, room = {}, ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            room = line.removeprefix("## ")
        elif entry := re.fullmatch(r"`(.*)` (\d+), said in `(.*)`", line):
            found[Site(room, entry[1], int(entry[2]))] = entry[3]
    return found


def is_there(test: str) -> bool:
    """Whether a test that the page names is there yet."""
    file, _, name = test.partition("::")
    return Path(ROOT, file).exists() and f"def {name}(" in Path(ROOT, file).read_text()


def main(asked: list[str]) -> int:
    """Writes the page; exit status 2 if a site has no message."""
    found = met(sorted(filter(is_there, {*read_page().values()})) + asked)
    PAGE.write_text(page(found))
    missing = sites().keys() - found.keys()
    for site in sorted(missing):
        print(f"{site.room}: {site.function} {site.number}: no test provoked it; name one that does", file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
