"""The yaml of configurations: 3e-4 is a number, a date is text, and what `dump_yaml` writes reads back equal."""

import math
import re
from typing import Any

import yaml

FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            names.append(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what the loader takes for a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)  # a folder's name may be a date


def load_yaml(content: str | bytes) -> Any:
    """Returns what the yaml holds; raises a yaml.YAMLError if it is not valid."""
    try:
        return yaml.load(content, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("its lists or mappings are nested too deeply") from error


def dump_yaml(content: dict[str, Any]) -> str:
    """Returns the yaml of nested dictionaries in ASCII, one line for a key. `load_yaml` returns the same."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=math.inf)
