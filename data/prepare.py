"""Writes the tokens of texts to a folder, which main.py maps into memory: --data.path FOLDER.

    python data/prepare.py 'books/*.txt' --out data/books --tokenizer 4096
    python data/prepare.py fineweb/*.parquet --out data/fineweb --tokenizer gpt2/tokenizer.json --train_split 0.999

The folder has train.bin and val.bin (integers of 16 or 32 bits, little-endian), tokenizer.json and meta.json.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python looks for modules in the folder of the script

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.errors import UserError
from mingpt.monitoring.live_line import BAR_OPTIONS
from mingpt.program import run_program
from mingpt.text.files import check_plain, find_files, open_content, readable
from mingpt.text.tokenizer import JSONTokenizer, TextTokenizer, Tokenizer, parse_tokenizer

FORMAT_VERSION = 1
PIECE_SIZE = 1 << 16  # characters of a long document that are encoded at once
BATCH_SIZE = 1 << 22  # characters that all cores encode together; their tokens take some 100 MB
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # of GPT-2, Llama 3, Llama 2 and Gemma
LAST_WORD = re.compile(r"(?s).*\S(?=\s\S)")  # up to the last word that is followed by one blank and another word


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    is_last: bool  # of its document
    part: str = ""  # train or val


def iter_pieces(files: Sequence[str]) -> Iterator[Piece]:
    """Yields the documents of files: the texts of lines of JSON, those of rows of parquet, or whole files.

    Raises:
        UserError: a file can't be read, is not UTF-8, or has no texts.
    """
    for file in files:
        with readable(file, "TEXT"):
            if file.endswith(".parquet"):
                yield from _iter_rows(file)
                continue
            with open_content(LocalFileSystem(), file) as content:
                lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="\n")
                is_json = ".jsonl" in Path(file).suffixes[-2:]  # the last one may be .gz
                yield from _iter_json(lines, file) if is_json else _iter_text(lines, file)


def _iter_rows(file: str) -> Iterator[Piece]:
    try:
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - optional
    except ImportError as error:
        raise UserError(f"TEXT: {file}: {error}; run `pip install pyarrow`") from error
    with ParquetFile(file) as rows:
        for batch in rows.iter_batches(columns=["text"], batch_size=1000):
            for text in batch["text"].to_pylist():
                yield Piece(text, is_last=True)


def _iter_json(lines: io.TextIOWrapper, file: str) -> Iterator[Piece]:
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["text"].encode(errors="replace").decode()  # JSON may have half a surrogate pair
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f'TEXT: {file}, line {number}: must be JSON like {{"text": "..."}}: {error!r}') from error
        yield Piece(text, is_last=True)


def _iter_text(lines: io.TextIOWrapper, file: str) -> Iterator[Piece]:
    rest = ""
    while new := lines.read(PIECE_SIZE):
        text = check_plain(rest + new, file, "TEXT")
        word = LAST_WORD.match(text)  # no token of a byte-pair encoding crosses its end
        end = word.end() if word else len(text)
        yield Piece(text[:end], is_last=False)
        rest = text[end:]
    yield Piece(rest, is_last=True)


def split_pieces(pieces: Iterator[Piece], train_length: int) -> Iterator[Piece]:
    """Assigns the first `train_length` characters to the training part and the others to the validation part."""
    position = 0
    for text, is_last, _ in pieces:
        end = max(train_length - position, 0)
        position += len(text)
        if 0 < end < len(text):
            yield Piece(text[:end], False, "train")
            yield Piece(text[end:], is_last, "val")
        else:
            yield Piece(text, is_last, "train" if end else "val")


def iter_batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yields lists of pieces with BATCH_SIZE characters together, or more by less than a document."""
    batch = []
    length = 0
    for piece in pieces:
        batch.append(piece)
        length += len(piece.text)
        if length >= BATCH_SIZE:
            yield batch
            batch = []
            length = 0
    yield batch


def train_tokenizer(texts: Iterator[str], size: int) -> JSONTokenizer:
    """Returns a byte-level byte-pair encoding with GPT-2's rules and `size` tokens."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - optional
    except ImportError as error:
        raise UserError(f"--tokenizer {size}: {error}; run `pip install tokenizers`") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return JSONTokenizer(tokenizer.to_str(), "--tokenizer")


def read_tokenizer(path: str) -> Tokenizer:
    with readable(path, "--tokenizer"), fsspec.open(path, encoding="utf-8", mode="r") as file:
        return parse_tokenizer(file.read(), f"--tokenizer: {path}")


def encode(tokenizer: Tokenizer, batch: list[Piece]) -> list[np.ndarray]:
    """Returns the tokens of each piece. A document ends with the tokenizer's end-of-text token, if it has one."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    if not isinstance(tokenizer, JSONTokenizer):
        return [tokenizer.encode(piece.text, "TEXT").astype(dtype) for piece in batch]
    tokenizer.tokenizer.encode_special_tokens = True  # as text
    end_of_text = [token for token in map(tokenizer.tokenizer.token_to_id, END_OF_TEXT) if token is not None][:1]
    encodings = tokenizer.tokenizer.encode_batch([piece.text for piece in batch], add_special_tokens=False)
    return [
        np.array(encoding.ids + end_of_text * piece.is_last, dtype)
        for encoding, piece in zip(encodings, batch, strict=True)
    ]


def prepare(files: Sequence[str], out: Path, kind: str, train_split: float, command: str) -> None:
    """Writes the four files. The texts are read once before they are encoded, and once for a new vocabulary.

    Args:
        kind: `char`, a number of tokens, or the path of a tokenizer.json

    Raises:
        UserError: there is no text, or it can't be read or encoded.
    """
    digest = hashlib.sha256()
    characters = 0
    size = 0
    tokenizer: Tokenizer = TextTokenizer()
    with tqdm(desc="reading", unit="B", **BAR_OPTIONS) as bar:
        for piece in iter_pieces(files):
            content = piece.text.encode()
            digest.update(content)
            characters += len(piece.text)
            size += len(content)
            if kind == "char":
                tokenizer = tokenizer.extended(piece.text)
            bar.update(len(content))
    train_length = int(characters * train_split)
    if not 0 < train_length < characters:
        raise UserError(f"TEXT: there are {characters} characters, too few for a training and a validation part")
    if kind.isdecimal():
        training = (piece.text for piece in split_pieces(iter_pieces(files), train_length) if piece.part == "train")
        tokenizer = train_tokenizer(training, int(kind))
    elif kind != "char":
        tokenizer = read_tokenizer(kind)

    tokens = {"train": 0, "val": 0}
    lengths = {"train": 0, "val": 0}
    digests = {"train.bin": hashlib.sha256(), "val.bin": hashlib.sha256()}
    with ExitStack() as stack, tqdm(desc="encoding", total=size, unit="B", **BAR_OPTIONS) as bar:
        outputs = {name: stack.enter_context(open(out / name, "wb")) for name in digests}
        for batch in iter_batches(split_pieces(iter_pieces(files), train_length)):
            for piece, ids in zip(batch, encode(tokenizer, batch), strict=True):
                name = f"{piece.part}.bin"
                outputs[name].write(ids.data)
                digests[name].update(ids.data)
                length = len(piece.text.encode())
                tokens[piece.part] += len(ids)
                lengths[piece.part] += length
                bar.update(length)
    text = tokenizer.to_json()
    (out / "tokenizer.json").write_text(text, encoding="utf-8")
    sha256 = {name: each.hexdigest() for name, each in digests.items()}
    meta = {
        "format": FORMAT_VERSION,
        "dtype": f"uint{8 * ids.itemsize}",
        "vocab_size": tokenizer.vocab_size,
        "tokens": tokens,
        "bytes": lengths,
        "sha256": {"text": digest.hexdigest(), "tokenizer.json": hashlib.sha256(text.encode()).hexdigest(), **sha256},
        "command": command,
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    for name in os.listdir(out):
        with open(out / name, "rb") as file:
            os.fsync(file.fileno())
    lengths_text = f"{tokens['train']:,} tokens for training, {tokens['val']:,} for validation"
    print(f"{lengths_text}, {tokenizer.vocab_size:,} distinct, {size / sum(tokens.values()):.2f} bytes per token")


def run(argv: Sequence[str]) -> None:
    """Prepares texts in a folder beside --out, and renames it at the end."""
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
    out = args.out
    if not 0 < args.train_split < 1:
        raise UserError(f"--train_split is {args.train_split}, must be greater than 0 and less than 1")
    if args.tokenizer.isdecimal() and int(args.tokenizer) <= 256:
        raise UserError(f"--tokenizer is {args.tokenizer}, must be greater than 256, the number of bytes")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} is not an empty folder; name an empty or a new folder")
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process
        (unfinished / "downloads").mkdir(parents=True)
        files = [file for path in args.texts for file in local_files(path, unfinished / "downloads")]
        command = shlex.join(["python", "data/prepare.py", *argv])
        (unfinished / "files").mkdir()
        prepare(files, unfinished / "files", args.tokenizer, args.train_split, command)
        os.replace(unfinished / "files", out)
    except OSError as error:
        raise UserError(f"--out: {out} can't be written: {error}; name a folder that you may write to") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"to train:  python main.py --data.path {shlex.quote(str(out))} --trainer.run_dir runs/{out.name}")


def local_files(path: str, downloads: Path) -> list[str]:
    """Returns the files of a path, a glob or a URL. Files of a URL are downloaded first."""
    fs, names = find_files(path, "TEXT")
    if isinstance(fs, LocalFileSystem):
        return names
    files = []
    for name in names:
        file = downloads / f"{len(os.listdir(downloads)):05}-{os.path.basename(name.partition('?')[0])}"
        with readable(name, "TEXT"):
            fs.get_file(name, str(file))
        files.append(str(file))
    return files


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
