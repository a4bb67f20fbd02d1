"""Imported by interpreters that have this folder in PYTHONPATH: shows them a pretended GPU."""

from tests.gpu import pretended_gpu

pretended_gpu.install()
