"""Writes the tokens of texts to a folder, which main.py maps into memory: --data.path FOLDER.

    python data/prepare.py 'books/*.txt' --out data/books --tokenizer 4096
    python data/prepare.py 'fineweb/*.parquet' --out data/fineweb --tokenizer gpt2/tokenizer.json --train_split 0.999

The folder has train.bin and val.bin (integers of 16 or 32 bits, little-endian), tokenizer.json and meta.json.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python looks for modules in the folder of the script
from mingpt.errors import UserError
from mingpt.program import run_program
from mingpt.text.documents import Texts
from mingpt.text.files import find_files, readable
from mingpt.text.prepare import prepare, split_at
from mingpt.text.tokenizer import END_OF_TEXT, CharTokenizer, JSONTokenizer, Tokenizer, read_tokenizer

SMALLEST = 257  # tokens: all bytes, and the end of a document


def first_characters(pieces: Iterator[str], length: int) -> Iterator[str]:
    """Yields the pieces that the first `length` characters of a text consist of."""
    for piece in split_at(pieces, length):
        if length <= 0:
            return
        yield piece
        length -= len(piece)


def train_tokenizer(pieces: Iterator[str], length: int, size: int) -> JSONTokenizer:
    """Returns a byte-level byte-pair encoding of the first `length` characters, with GPT-2's rules.

    Args:
        size: maximum number of tokens
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - optional

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(first_characters(pieces, length), trainer)
    return JSONTokenizer(tokenizer.to_str())


def find_tokenizer(args: argparse.Namespace, texts: Texts, characters: set[str], train_length: int) -> Tokenizer:
    """Returns the tokenizer that --tokenizer asks for; raises a UserError if there is none."""
    kind = args.tokenizer
    if kind == "char":
        return CharTokenizer().extended(characters)
    try:
        with readable(kind, "--tokenizer"):
            if kind.isdecimal() and int(kind) >= SMALLEST:
                return train_tokenizer(texts.pieces(), train_length, int(kind))
            return read_tokenizer(kind, args.end_of_text)
    except UserError as error:
        raise UserError(
            f"{error}; --tokenizer must be char, a number of at least {SMALLEST}, or a tokenizer.json or its folder, "
            "like that of `hf download openai-community/gpt2 tokenizer.json --local-dir data/gpt2`"
        ) from error


def run(argv: Sequence[str]) -> None:
    """Prepares texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "texts",
        nargs="+",
        metavar="TEXT",
        help="file, glob or URL: UTF-8 text, JSON lines (.jsonl, .ndjson, .json) or .parquet; also .gz, .bz2 and .xz",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="folder without a train.bin")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="number of tokens of a byte-pair encoding that is trained on the training part; or the path or URL of a "
        "tokenizer.json or its folder; or char",
    )
    parser.add_argument("--field", default="text", help="field of JSON lines and rows (default: %(default)s)")
    parser.add_argument("--end_of_text", metavar="TOKEN", help="token of a tokenizer.json that ends documents")
    parser.add_argument(
        "--train_split", type=float, default=0.9, help="fraction to train on, from the start (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if (args.out / "train.bin").exists():
        raise UserError(f"--out: {args.out} has a train.bin already; name another folder")
    files = [file for path in args.texts for file in find_files(path, "TEXT")]
    texts = Texts(files, "TEXT", args.field)
    try:
        meta = prepare(texts, args.out, args.train_split, partial(find_tokenizer, args, texts))
    except OSError as error:
        raise UserError(f"--out: {args.out} can't be written: {error}; name a folder that you may write to") from error
    options = shlex.join(["--data.path", str(args.out), "--trainer.run_dir", f"runs/{args.out.name}"])
    print(
        f"{meta['train']['tokens']:,} tokens for training, {meta['val']['tokens']:,} for validation\n"
        f"to train:  python main.py {options}"
    )


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
