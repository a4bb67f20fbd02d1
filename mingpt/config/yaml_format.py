"""Reads and writes configurations in yaml. Values stay text until pydantic converts them.

yaml 1.1 would read 010 as 8, 12:30 as 750, and 1e-3 as text.
"""

import json
import math
import reprlib
from collections.abc import Iterator
from typing import Any

import yaml

from mingpt.config.schema import HEADINGS, KEYS, SECTIONS, Sections
from mingpt.errors import UserError

HEADER = """\
# All keys, as printed by `python main.py --print_config`. Change a value here,
# in a file of your own that needs only the keys it changes (--config my.yaml),
# or on the command line (--trainer.max_steps 100)."""
# For each key, such as data.path: the value, and where it was found, for messages
Values = dict[str, tuple[str | list | None, str]]


def read_yaml(file: str) -> Values:
    """Returns the value of each key with its file and line. Numbers and booleans are text.

    Raises:
        UserError: the file can't be read, is not valid yaml, does not consist of sections, or contains a key twice.
    """
    values: Values = {}
    try:
        with open(file, "rb") as stream:
            root = yaml.compose(stream, yaml.SafeLoader) or yaml.MappingNode("", [])
        if not isinstance(root, yaml.MappingNode):
            raise yaml.YAMLError(f"found {reprlib.repr(root.value)}, must be the sections {', '.join(SECTIONS)}")
        for name, node in _iter_leaves(root):
            if name in values:
                raise yaml.YAMLError(f"duplicate key {name}{node.start_mark}")
            value = node.value
            if isinstance(value, list):
                value = [item.value for item in value]
            if node.tag == "tag:yaml.org,2002:null":
                value = None
            if value or name not in SECTIONS:  # a section may be empty
                values[name] = value, f"{file}, line {node.start_mark.line + 1}"
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--config: {file} can't be read: {' '.join(str(error).split())}") from error
    return values


def _iter_leaves(mapping: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    """Yields the full key and the node of every value that is not a mapping."""
    for key, node in mapping.value:
        if isinstance(node, yaml.MappingNode) and node.value:
            for name, leaf in _iter_leaves(node):
                yield f"{key.value}.{name}", leaf
        else:
            yield str(key.value), node


def format_value(value: Any) -> str:
    """Formats a value like on the command line: text as it is, others as `null`, `true`, `[0.9, 0.99]`."""
    return value if isinstance(value, str) else json.dumps(value)


def dump_config(config: Sections) -> str:
    """Returns the yaml of a configuration in ASCII, with headings and descriptions. `read_yaml` returns equal values.

    Args:
        config: sections, from `config_to_dict`
    """
    lines = [HEADER]
    for section, keys in config.items():
        lines.append(f"\n{section}:")
        for key, value in keys.items():
            name = f"{section}.{key}"
            if name in HEADINGS:
                lines.append(f"\n  # {HEADINGS[name]}")
            mapping = yaml.safe_dump({key: value}, width=math.inf, default_flow_style=True)
            lines.append(f"  {mapping.strip()[1:-1]} # {KEYS[name].description}")
    return "\n".join(lines) + "\n"
