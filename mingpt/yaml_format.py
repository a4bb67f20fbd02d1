"""The yaml of configurations: 3e-4 is a number, a date is text, and what `dump_yaml` writes reads back equal."""

import math
import re
from typing import Any

import yaml

# What JSON has; neither dates nor binary data, which SafeLoader makes objects of Python.
KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z")
MERGE = "tag:yaml.org,2002:merge"
TEXT = "tag:yaml.org,2002:str"
TIMESTAMP = "tag:yaml.org,2002:timestamp"


MAX_BITS = 1024  # of a whole number, as Python writes no number of more than 4,300 digits


class _Loader(yaml.SafeLoader):
    """SafeLoader whose keys are text, that refuses duplicate keys, and whose values are those of JSON."""

    yaml_constructors = {  # noqa: RUF012 - declared so by PyYAML
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in KINDS
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
            if key.tag != MERGE:
                key.tag = TEXT
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = super().construct_yaml_int(node)
        if number.bit_length() > MAX_BITS:
            raise ValueError("a number has too many digits")
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what the loader takes for a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))


def load_yaml(text: str) -> Any:
    """Returns what the text holds.

    Raises:
        yaml.YAMLError: it is no valid yaml, or has a tag or a value that JSON has no kind for.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from None


def dump_yaml(content: dict[str, Any]) -> str:
    """Returns the yaml of nested dictionaries in ASCII, one line for a key. `load_yaml` returns the same."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=math.inf)
