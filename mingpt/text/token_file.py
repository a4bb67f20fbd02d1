"""Files of tokens that are mapped into memory, not read."""

import mmap
from pathlib import Path

import numpy as np

from mingpt.errors import UserError


class TokenFile:
    """The tokens of a file like an array: an index reads only the tokens that it selects.

    The page cache of the machine holds what was read, once for all processes. A run keeps its tokens if another file
    gets the name.

    Args:
        dtype: type of a token in the file
        vocab_size: upper bound of its tokens

    Attributes:
        length: number of tokens to use, from the start

    Raises:
        OSError: the file can't be read.
        UserError: its size is not a multiple of a token's; or, from an index, a token is not below vocab_size.
    """

    def __init__(self, path: Path, dtype: np.dtype, vocab_size: int) -> None:
        size = path.stat().st_size
        if size % dtype.itemsize or size == 0:
            raise UserError(
                f"data.path: {path} has {size} bytes, must be a multiple of {dtype.itemsize} ({dtype}) and not empty; "
                "write it again with data/prepare.py"
            )
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self.path = path
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.length = size // dtype.itemsize

    def __reduce__(self) -> tuple:
        """A map can't be pickled; workers of a DataLoader open the file again."""
        return TokenFile, (self.path, self.dtype, self.vocab_size), {"length": self.length}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        tokens = np.frombuffer(self.map, self.dtype, self.length)[index].copy()
        # The pages would count as memory of this process, although the machine may drop them at any time.
        self.map.madvise(mmap.MADV_DONTNEED)
        if tokens.max(initial=0) >= self.vocab_size:
            raise UserError(
                f"data.path: {self.path} contains token {tokens.max()}, but its tokenizer.json has {self.vocab_size:,} "
                "tokens; copy the one that wrote the file"
            )
        return tokens


Tokens = np.ndarray | TokenFile  # (n,) unsigned integers
