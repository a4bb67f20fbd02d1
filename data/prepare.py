"""Writes the tokens of texts to a folder, which main.py maps into memory: --data.path FOLDER.

    python data/prepare.py 'books/*.txt' --out data/books --tokenizer 4096
    python data/prepare.py 'fineweb/*.parquet' --out data/fineweb --tokenizer gpt2/tokenizer.json --train_split 0.999

The folder has train.bin and val.bin (integers of 16 or 32 bits, little-endian), tokenizer.json and meta.json.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python looks for modules in the folder of the script

import fsspec
import numpy as np
from tqdm import tqdm

from mingpt.errors import UserError
from mingpt.monitoring.logging import BAR_OPTIONS
from mingpt.program import run_program
from mingpt.text.files import find_files, open_text, readable, without_query
from mingpt.text.tokenizer import (
    BATCH_SIZE,
    END_OF_TEXT,
    PIECE_SIZE,
    CharTokenizer,
    JSONTokenizer,
    Tokenizer,
    cut,
    parse_tokenizer,
)

END_OF_DOCUMENT = ""  # in a sequence of pieces
PARQUET_BLOCK = 1 << 22  # bytes of a request to a server; a stream could not be read from its end
UNFINISHED = "unfinished-"  # prefix of temporary folders


def iter_documents(fs: fsspec.AbstractFileSystem, name: str) -> Iterator[Iterable[str]]:
    """Yields the chunks of each document: of a file, of a line of .jsonl, or of a row of .parquet."""
    suffixes = Path(without_query(name)).suffixes
    if ".parquet" in suffixes:
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - optional

        with fs.open(name, block_size=PARQUET_BLOCK) as content:
            for batch in ParquetFile(content).iter_batches(columns=["text"], batch_size=1000):
                yield from ([text or ""] for text in batch["text"].to_pylist())
        return
    with open_text(fs, name) as file:
        if ".jsonl" not in suffixes:
            yield iter(partial(file.read, PIECE_SIZE), "")
            return
        for number, line in enumerate(file, 1):
            with readable(f"{name}, line {number},", "TEXT"):
                text = json.loads(line)["text"] or ""
            yield [text.encode(errors="replace").decode()]  # JSON may have half of a surrogate pair


def iter_pieces(paths: Sequence[str]) -> Iterator[str]:
    """Yields the documents of all files in pieces, and END_OF_DOCUMENT after each of them.

    Raises:
        UserError: a file can't be read, is not UTF-8, or has no texts.
    """
    for path in paths:
        fs, names = find_files(path, "TEXT")
        for name in names:
            with readable(name, "TEXT"):
                for document in iter_documents(fs, name):
                    yield from cut(document)
                    yield END_OF_DOCUMENT


def split_pieces(pieces: Iterable[str], train_length: int) -> Iterator[tuple[str, str]]:
    """Yields the first `train_length` characters for `train` and the others for `val`."""
    position = 0
    for piece in pieces:
        end = max(train_length - position, 0)
        position += len(piece)
        if end > 0:
            yield "train", piece[:end]
        if end < len(piece) or end == 0:
            yield "val", piece[end:]


def train_tokenizer(texts: Iterator[str], size: int) -> JSONTokenizer:
    """Returns a byte-level byte-pair encoding with GPT-2's rules and `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - optional

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return JSONTokenizer(tokenizer.to_str())


def find_tokenizer(kind: str, characters: set[str], texts: Iterator[str]) -> Tokenizer:
    """Returns the tokenizer that --tokenizer asks for; raises a UserError if it can't be read."""
    if kind == "char":
        return CharTokenizer("".join(sorted(characters)))
    with readable(kind, "--tokenizer"):
        if kind.isdecimal():
            return train_tokenizer(texts, int(kind))
        with fsspec.open(kind, "r", encoding="utf-8") as file:
            return parse_tokenizer(file.read())


def encode(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[np.ndarray]:
    """Returns the tokens of pieces. A document ends with the tokenizer's end-of-text token, if it has one."""
    end = tokenizer.end_of_text or ""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    encoded = tokenizer.encode_batch([end if piece == END_OF_DOCUMENT else piece for piece in pieces], "TEXT")
    return [tokens.astype(dtype) for tokens in encoded]


def prepare(texts: Sequence[str], out: Path, kind: str, train_split: float, command: str) -> dict[str, Any]:
    """Writes the four files to a temporary folder in `out`, then moves them. Returns the content of meta.json.

    The texts are read once to measure them, once to train a tokenizer, and once to encode them.

    Raises:
        UserError: there is no text, or it can't be read or encoded.
    """
    length = 0
    size = 0
    characters: set[str] = set()
    digest = hashlib.sha256()
    for piece in tqdm(iter_pieces(texts), "reading", unit=" pieces", **BAR_OPTIONS):
        content = piece.encode()
        digest.update(content)
        size += len(content)
        length += len(piece)
        if kind == "char":
            characters.update(piece)
    train_length = int(length * train_split)
    if not 0 < train_length < length:
        raise UserError(f"TEXT: {length} characters, of which --train_split {train_split} leaves none for a part")
    training = (piece for part, piece in split_pieces(iter_pieces(texts), train_length) if part == "train")
    tokenizer = find_tokenizer(kind, characters, training)

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=UNFINISHED) as folder:
        meta = write_tokens(split_pieces(iter_pieces(texts), train_length), size, tokenizer, Path(folder))
        text = tokenizer.to_json()
        meta |= {"format": 1, "vocab_size": tokenizer.vocab_size, "text_sha256": digest.hexdigest()}
        meta |= {"tokenizer_sha256": hashlib.sha256(text.encode()).hexdigest(), "command": command}
        Path(folder, "tokenizer.json").write_text(text, encoding="utf-8")
        Path(folder, "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for name in ("tokenizer.json", "meta.json", "val.bin", "train.bin"):  # main.py looks for train.bin
            os.replace(Path(folder, name), out / name)
    for old in out.glob(f"{UNFINISHED}*"):  # of a killed process
        shutil.rmtree(old, ignore_errors=True)
    return meta


def write_tokens(pieces: Iterator[tuple[str, str]], size: int, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes train.bin and val.bin, and returns their entries of meta.json.

    Args:
        pieces: part and text
        size: bytes of the texts
    """
    meta: dict[str, Any] = {part: {"tokens": 0, "bytes": 0} for part in ("train", "val")}
    digests = {part: hashlib.sha256() for part in meta}
    with ExitStack() as stack, tqdm(desc="encoding", total=size, unit="B", **BAR_OPTIONS) as bar:
        files = {part: stack.enter_context(open(folder / f"{part}.bin", "wb")) for part in digests}
        while batch := list(islice(pieces, BATCH_SIZE)):
            for (part, piece), tokens in zip(batch, encode(tokenizer, [piece for _, piece in batch]), strict=True):
                files[part].write(tokens.data)
                digests[part].update(tokens.data)
                meta[part]["tokens"] += len(tokens)
                length = len(piece.encode())
                meta[part]["bytes"] += length
                bar.update(length)
        for part, file in files.items():
            file.flush()
            os.fsync(file.fileno())
            meta[part]["sha256"] = digests[part].hexdigest()
    return meta | {"dtype": tokens.dtype.name}


def run(argv: Sequence[str]) -> None:
    """Prepares texts. The folder has its files when they are complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "texts",
        nargs="+",
        metavar="TEXT",
        help="file, glob or URL: UTF-8 text, .jsonl or .parquet with texts named `text`; also .gz, .bz2 and .xz",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="new or empty folder")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="number of tokens of a byte-pair encoding that is trained on the training part; or the path or URL of a "
        "tokenizer.json; or char",
    )
    parser.add_argument(
        "--train_split", type=float, default=0.9, help="fraction to train on, from the start (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    out = args.out.resolve()
    if out.exists() and (not out.is_dir() or any(not file.name.startswith(UNFINISHED) for file in out.iterdir())):
        raise UserError(f"--out: {args.out} is not an empty folder; name an empty or a new folder")
    try:
        command = shlex.join(["python", "data/prepare.py", *argv])
        meta = prepare(args.texts, out, args.tokenizer, args.train_split, command)
    except OSError as error:
        raise UserError(f"--out: {args.out} can't be written: {error}; name a folder that you may write to") from error
    size, tokens = (sum(meta[part][key] for part in ("train", "val")) for key in ("bytes", "tokens"))
    options = shlex.join(["--data.path", str(args.out), "--trainer.run_dir", f"runs/{out.name}"])
    print(
        f"{meta['train']['tokens']:,} tokens for training, {meta['val']['tokens']:,} for validation, "
        f"{meta['vocab_size']:,} distinct, {size / tokens:.2f} bytes per token\n"
        f"to train:  python main.py {options}"
    )


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
