"""The yaml of configurations: numbers are written as in JSON, and what `dump_yaml` writes reads back equal.

yaml 1.1 reads 010 as 8, 12:30 as 750, 1_000 as 1000, and yes as true. Here these are text, as are dates.
"""

import json
import math
import re
from typing import Any

import yaml

WHOLE = r"[-+]?(0|[1-9][0-9]*)"
# What is not text where it has no quotes. 1. and .5 are numbers, too.
SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": WHOLE,
    "float": rf"({WHOLE}(\.[0-9]*)?|[-+]?\.[0-9]+)([eE][-+]?[0-9]+)?",
    "merge": r"<<",
}
# By the first character; None: any.
RESOLVERS = {None: [(f"tag:yaml.org,2002:{name}", re.compile(rf"({text})\Z")) for name, text in SCALARS.items()]}


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys."""

    yaml_implicit_resolvers = RESOLVERS

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            names.append(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what any yaml program takes for a number."""

    yaml_implicit_resolvers = yaml.SafeDumper.yaml_implicit_resolvers | RESOLVERS


def load_yaml(content: str | bytes) -> Any:
    """Returns what the yaml holds; raises a yaml.YAMLError if it is not valid."""
    try:
        return yaml.load(content, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("its lists or mappings are nested too deeply") from error


def format_value(value: Any) -> str:
    """A value in a message, as in the yaml: `null`, `true`."""
    return json.dumps(value).strip('"')


def dump_yaml(content: dict[str, Any]) -> str:
    """Returns the yaml of nested dictionaries in ASCII, one line for a key. `load_yaml` returns the same."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=math.inf)
