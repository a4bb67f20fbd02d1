"""Local folders and the file systems behind URLs, which fsspec opens."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec

CACHING = ("simplecache", "filecache", "blockcache", "cached")  # protocols, as in simplecache::s3://bucket/text.txt


@contextmanager
def open_file_system(path: str) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """Context manager that gives the file system of a path or URL, and the path in it.

    Copies that `simplecache::` and the like make last as long as the context, unless fsspec's own configuration names
    a folder for them. fsspec would remove them when the interpreter exits, which main.py does not wait for.
    """
    protocols = path.split("::")[:-1]
    caching = [name for name in protocols if name in CACHING and name not in fsspec.config.conf]
    if not caching:
        yield fsspec.url_to_fs(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield fsspec.url_to_fs(path, **{name: {"cache_storage": folder} for name in caching})
