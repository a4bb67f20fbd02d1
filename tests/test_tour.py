"""docs/tour.md: its links lead to what they name, and its commands exist.

    python tests/test_tour.py

writes today's line numbers into it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/tour.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)\)")
PROGRAMS = ("python", "pytest", "torchrun")
IDEAS = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])


def definitions(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and line of each function, method, class and constant."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield within + name, node.lineno
                if isinstance(node, ast.ClassDef):
                    yield from definitions(node.body, f"{within}{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield within + name, node.lineno


@cache
def lines_of(file: str) -> dict[str, int]:
    return dict(definitions(ast.parse((ROOT / file).read_text()).body))


def with_todays_lines(page: str) -> str:
    """The page, with each name's line as it is now; one that is defined nowhere keeps its own."""
    return LINK.sub(lambda link: f"[`{link[1]}`](../{link[2]}#L{lines_of(link[2]).get(link[1], link[3])})", page)


def commands(idea: str) -> list[str]:
    """The code spans that name one of the programs to run, environment variables before it aside."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", idea)]
    return [span for span in spans if re.match(rf"(\w+=\S+ )*({'|'.join(PROGRAMS)}) ", span)]


def test_links_lead_to_what_they_name() -> None:
    page = PAGE.read_text()
    for link in re.findall(r"\]\((?!https://)([^)]+)\)", page):
        assert (PAGE.parent / link.split("#")[0]).is_file(), link
    links = list(LINK.finditer(page))
    assert len(links) == page.count("#L"), "a link to a line looks like [`Class.method`](../file.py#L1)"
    for link in links:
        assert link[1] in lines_of(link[2]), f"{link[2]} defines no {link[1]}"
    assert page == with_todays_lines(page), "lines have moved; `python tests/test_tour.py` writes today's"


def test_options_are_main_pys() -> None:
    from mingpt.config import KEYS

    assert set(re.findall(r"--(\w+\.\w+)", PAGE.read_text())) <= KEYS.keys()


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_takes_five_lines_and_has_code_and_a_command(idea: str) -> None:
    lines = IDEAS[idea].strip().split("\n")
    assert len(lines) <= 5
    assert max(map(len, lines)) <= 120
    assert LINK.search(IDEAS[idea])
    assert commands(IDEAS[idea])


@pytest.mark.parametrize("command", commands(PAGE.read_text()))
def test_a_command_names_what_exists(command: str) -> None:
    words = [word for word in shlex.split(command) if not re.match(r"\w+=", word)]
    if words[0] == "pytest":
        names_a_test(words[1:])
        return
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        asked = get_args_parser().parse_args(words[1:])
        file, options = asked.training_script, asked.training_script_args
    else:
        file, *options = words[1:]
    assert (ROOT / file).is_file()
    if file == "main.py":
        from mingpt.config_parser import read_config

        read_config(options)
    else:
        assert not any(word.startswith("-") for word in options), "only main.py's options are known here"


def names_a_test(words: list[str]) -> None:
    """That `FILE -k NAME` selects a test that is not slow."""
    file, option, name = words
    assert option == "-k"
    found = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    slow = "pytest.mark.slow"
    assert any(
        node.name.startswith("test_") and name in node.name and slow not in map(ast.unparse, node.decorator_list)
        for node in found
    ), f"{file} has no fast test of that name"


if __name__ == "__main__":
    PAGE.write_text(with_todays_lines(PAGE.read_text()))
