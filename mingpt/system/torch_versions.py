"""The supported versions of PyTorch."""

import torch

from mingpt.errors import UserError


def check_torch() -> None:
    """Raises a UserError if requirements.txt does not allow this version of PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    if not (2, 10) <= (int(major), int(minor)) < (3, 0):
        raise UserError(
            f"PyTorch is {torch.__version__}, must be at least 2.10 and below 3; run pip install -r requirements.txt"
        )
