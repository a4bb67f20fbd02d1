"""Imports of the scripts, which import-linter does not read: it knows packages only."""

import ast

import pytest

from tests.helpers import ROOT

SCRIPTS = {"main", "trainer", "sample", "export", "plot", "benchmarks"}


def imports(script: str) -> set[str]:
    """The modules that a script imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("leaf", ["model", "char_dataset"])
def test_the_leaves_import_no_script(leaf: str) -> None:
    """mingpt imports them, so a script that they imported would be imported by the library."""
    assert not imports(leaf) & SCRIPTS
