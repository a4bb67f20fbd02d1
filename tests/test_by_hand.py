"""The programs in by_hand/ are independent, check themselves, and print the output that the tour shows."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT, clean_env

PROGRAMS = sorted((ROOT / "by_hand").glob("*.py"))
TOUR = (ROOT / "docs/tour.md").read_text()

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)


def docstring(program: Path) -> str:
    return ast.get_docstring(ast.parse(program.read_text())) or ""


def command_of(program: Path) -> str:
    """Returns the command in the program's docstring, which is a line by itself."""
    return re.findall(rf"^ +((?:python|torchrun) .*by_hand/{program.name}.*)$", docstring(program), re.MULTILINE)[0]


@pytest.mark.slow
@each_program
def test_a_program_ends_with_0_and_prints_what_the_tour_shows(program: Path) -> None:
    command = command_of(program)
    assert f"```\n{command}\n```" in TOUR
    shown = re.findall(rf"^```\n{re.escape(command)}\n```\n.*?^```text\n(.*?)^```$", TOUR, re.MULTILINE | re.DOTALL)[0]
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=clean_env(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@each_program
def test_a_program_imports_nothing_of_the_project(program: Path) -> None:
    tree = ast.parse(program.read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    local = {path.stem for path in ROOT.iterdir()} | {path.stem for path in PROGRAMS}
    assert not {module.split(".")[0] for module in modules} & (local - {"copy"})


@each_program
def test_a_program_names_what_does_the_same_for_real(program: Path) -> None:
    places = re.findall(r"^In this repository: (.+)$", docstring(program), re.MULTILINE)
    assert places
    for name, file in re.findall(r"`?([\w.]+)`?\s+in\s+([\w/]+\.py)", places[0]):
        assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", (ROOT / file).read_text()), places
