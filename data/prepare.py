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
import sys
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


def find_tokenizer(kind: str, texts: Sequence[str], train_length: int) -> Tokenizer:
    """Returns the tokenizer that --tokenizer asks for; raises a UserError if it can't be read."""
    if kind == "char":
        return CharTokenizer("".join(sorted({character for piece in iter_pieces(texts) for character in piece})))
    with readable(kind, "--tokenizer"):
        if kind.isdecimal():
            parts = split_pieces(iter_pieces(texts), train_length)
            return train_tokenizer((piece for part, piece in parts if part == "train"), int(kind))
        with fsspec.open(kind, "r", encoding="utf-8") as file:
            return parse_tokenizer(file.read())


def write_tokens(pieces: Iterator[tuple[str, str]], tokenizer: Tokenizer, out: Path) -> dict[str, Any]:
    """Writes train.bin.tmp and val.bin.tmp, and returns the content of meta.json.

    A document ends with the tokenizer's end-of-text token, if it has one.

    Args:
        pieces: part and text
    """
    end = tokenizer.end_of_text or ""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    meta: dict[str, Any] = {"dtype": dtype.name, "vocab_size": tokenizer.vocab_size}
    meta |= {part: {"tokens": 0, "bytes": 0} for part in ("train", "val")}
    digests = {part: hashlib.sha256() for part in ("train", "val")}
    with ExitStack() as stack, tqdm(desc="encoding", unit="B", **BAR_OPTIONS) as bar:
        files = {part: stack.enter_context(open(out / f"{part}.bin.tmp", "wb")) for part in digests}
        while batch := list(islice(pieces, BATCH_SIZE)):
            texts = [end if piece == END_OF_DOCUMENT else piece for _, piece in batch]
            for (part, piece), tokens in zip(batch, tokenizer.encode_batch(texts, "TEXT"), strict=True):
                content = tokens.astype(dtype).tobytes()
                files[part].write(content)
                digests[part].update(content)
                meta[part]["tokens"] += len(tokens)
                meta[part]["bytes"] += len(piece.encode())
                bar.update(len(piece))
        for part, file in files.items():
            file.flush()
            os.fsync(file.fileno())
            meta[part]["sha256"] = digests[part].hexdigest()
    return meta


def prepare(texts: Sequence[str], out: Path, kind: str, train_split: float) -> dict[str, Any]:
    """Writes the four files, train.bin last. Returns the content of meta.json.

    The texts are read once to measure them, once to make a tokenizer, and once to encode them.

    Raises:
        UserError: there is no text, or it can't be read or encoded.
    """
    length = sum(len(piece) for piece in tqdm(iter_pieces(texts), "reading", unit=" pieces", **BAR_OPTIONS))
    train_length = int(length * train_split)
    if not 0 < train_length < length:
        raise UserError(f"TEXT: {length} characters, of which --train_split {train_split} leaves none for a part")
    tokenizer = find_tokenizer(kind, texts, train_length)
    out.mkdir(parents=True, exist_ok=True)
    meta = write_tokens(split_pieces(iter_pieces(texts), train_length), tokenizer, out)
    (out / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    for name in ("val.bin", "train.bin"):  # main.py looks for train.bin
        os.replace(out / f"{name}.tmp", out / name)
    return meta


def run(argv: Sequence[str]) -> None:
    """Prepares texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "texts",
        nargs="+",
        metavar="TEXT",
        help="file, glob or URL: UTF-8 text, .jsonl or .parquet with texts named `text`; also .gz, .bz2 and .xz",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="folder without a train.bin")
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
    if (args.out / "train.bin").exists():
        raise UserError(f"--out: {args.out} has a train.bin already; name another folder")
    try:
        meta = prepare(args.texts, args.out, args.tokenizer, args.train_split)
    except OSError as error:
        raise UserError(f"--out: {args.out} can't be written: {error}; name a folder that you may write to") from error
    options = shlex.join(["--data.path", str(args.out), "--trainer.run_dir", f"runs/{args.out.name}"])
    print(
        f"{meta['train']['tokens']:,} tokens for training, {meta['val']['tokens']:,} for validation, "
        f"{meta['vocab_size']:,} distinct\nto train:  python main.py {options}"
    )


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
