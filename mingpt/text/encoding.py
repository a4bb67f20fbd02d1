"""What the bytes of a text are that is not UTF-8, for the message that refuses it."""

import codecs
import re

UTF_16 = "UTF-16, by its byte-order mark: `iconv -f UTF-16 -t UTF-8` converts it"
BEGINNINGS = {  # of files that are not the text
    codecs.BOM_UTF16_LE: UTF_16,
    codecs.BOM_UTF16_BE: UTF_16,
    b"\x1f\x8b": "compressed by gzip: `gunzip` unpacks it",
    b"\xfd7zXZ": "compressed by xz: `unxz` unpacks it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: `unzstd` unpacks it",
    b"PK\3\4": "a zip archive: `unzip` unpacks it",
    b"%PDF-": "a PDF: `pdftotext` converts it",
    b"version https://git-lfs": "a pointer of Git LFS in place of the text: `git lfs pull` fetches that",
}
HAS_NUL = (
    "has NUL characters, which text does not: if it is UTF-16, `iconv -f UTF-16LE -t UTF-8` (or UTF-16BE) converts it, "
    "otherwise `tr -d '\\000'` removes them"
)
# Encodings of texts, by Python's names, the most frequent first. From a longer list, German and French are taken for
# others, such as Mac Roman.
ENCODINGS = ["cp1252", "cp1251", "koi8_r", "cp866", "cp1253", "gb18030", "big5", "cp932", "euc_jp", "cp949"]
READ_SIZE = 1 << 16  # bytes from which an encoding is guessed, and characters that are read at once


def explain_bytes(name: str, first: int) -> str:
    """Says what the bytes of a file are that is not UTF-8, and how to convert them.

    Args:
        first: position of the first byte that is not UTF-8
    """
    import charset_normalizer  # noqa: PLC0415 - each start would take 20 ms longer

    with open(name, "rb") as file:
        file.seek(first)
        sample = file.read(READ_SIZE)
    if b"\0" in sample:
        return f"it {HAS_NUL}"
    invalid, valid = _count_not_ascii(name)
    if invalid < valid:
        return f"all but {invalid:,} of its bytes are UTF-8: `iconv -c -f UTF-8 -t UTF-8` leaves those out"
    lines = [line for line in sample.split(b"\n")[:-1] if not line.isascii()]  # the last one may be cut
    guess = charset_normalizer.from_bytes(b"\n".join(lines) or sample, cp_isolation=ENCODINGS).best()
    if guess is None:
        return "its encoding is unknown, or it is no text: `iconv -f ENCODING -t UTF-8` converts it"
    encoding = min(guess.could_be_from_charset, key=ENCODINGS.index).upper().replace("_", "-")
    beginning = repr(str(guess)[:20])
    return f"as {encoding} it reads {beginning} there: if that is right, `iconv -f {encoding} -t UTF-8` converts it"


def _count_not_ascii(name: str) -> tuple[int, int]:
    """Returns the number of bytes of a file that are not UTF-8, and that of its characters that are, besides ASCII."""
    invalid = not_ascii = 0
    # Each invalid byte is read as one of 128 code points that no text has.
    with open(name, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        while text := file.read(READ_SIZE):
            invalid += len(re.findall("[\udc80-\udcff]", text))
            not_ascii += len(re.findall("[^\0-\x7f]", text))
    return invalid, not_ascii - invalid
