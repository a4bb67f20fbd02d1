"""The yaml of configurations, with numbers in JSON's notation.

yaml 1.1 reads 010 as 8, 12:30 as 750, 1_000 as 1000, and yes as true. Here all of these are text, and so are dates.
"""

import json
import math
import re
from typing import Any

import yaml

from mingpt.config.schema import KEYS

HEADER = """\
# All keys, as printed by `python main.py --print_config`. Change a value here, in a file of your own that needs only
# the keys it changes (--config my.yaml), or on the command line (--trainer.max_steps 100)."""
WHOLE = r"[-+]?(0|[1-9][0-9]*)"
# Values that are not text unless they are quoted. 1. and .5 are numbers, too.
SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": WHOLE,
    "float": rf"({WHOLE}(\.[0-9]*)?|[-+]?\.[0-9]+)([eE][-+]?[0-9]+)?",
    "merge": r"<<",
}
# The key is the first character of the values; None: any character.
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
    """SafeDumper that quotes text which another yaml program would read as a number."""

    yaml_implicit_resolvers = yaml.SafeDumper.yaml_implicit_resolvers | RESOLVERS


def load_yaml(content: str | bytes) -> Any:
    """Returns the content of yaml; raises a yaml.YAMLError if it is not valid."""
    return yaml.load(content, _Loader)


def format_value(value: Any) -> str:
    """Formats a value for a message, like in the yaml: `null`, `true`."""
    return json.dumps(value).strip('"')


def dump_config(config: dict[str, dict[str, Any]]) -> str:
    """Returns the yaml of a configuration in ASCII, with the description of each key. `load_yaml` reads it back equal.

    Args:
        config: sections, from `config_to_dict`
    """
    lines = [HEADER]
    for section, keys in config.items():
        lines.append(f"\n{section}:")
        for key, value in keys.items():
            mapping = yaml.dump({key: value}, Dumper=_Dumper, width=math.inf, default_flow_style=True)
            lines.append(f"  {mapping.strip()[1:-1]} # {KEYS[f'{section}.{key}'].description}")
    return "\n".join(lines) + "\n"
