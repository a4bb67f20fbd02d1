"""Formats configurations as yaml."""

import json
import math
from typing import Any

import yaml

from mingpt.config.schema import HEADINGS, KEYS, Sections

HEADER = """\
# All keys, as printed by `python main.py --print_config`. Change a value here,
# in a file of your own that needs only the keys it changes (--config my.yaml),
# or on the command line (--trainer.max_steps 100)."""


def format_value(value: Any) -> str:
    """Formats a value like on the command line: text as it is, others as `null`, `true`, `[0.9, 0.99]`."""
    return value if isinstance(value, str) else json.dumps(value)


def dump_config(config: Sections) -> str:
    """Returns the yaml of a configuration in ASCII, with headings and descriptions.

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
