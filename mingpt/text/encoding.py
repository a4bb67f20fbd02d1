"""Explains the bytes of a file that is not UTF-8, for the message that refuses it."""

import codecs
import re

UTF_16 = "UTF-16, by its byte-order mark: `iconv -f UTF-16 -t UTF-8` converts it"
BEGINNINGS = {  # first bytes of files that are not plain text
    codecs.BOM_UTF16_LE: UTF_16,
    codecs.BOM_UTF16_BE: UTF_16,
    b"\x1f\x8b": "compressed by gzip: `gunzip` unpacks it",
    b"\xfd7zXZ": "compressed by xz: `unxz` unpacks it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: `unzstd` unpacks it",
    b"PK\3\4": "a zip archive: `unzip` unpacks it",
    b"%PDF-": "a PDF: `pdftotext` converts it",
    b"version https://git-lfs": "a pointer of Git LFS in place of the text: `git lfs pull` fetches the text",
}
HAS_NUL = (
    "has NUL characters, so it is not plain text: if it is UTF-16, `iconv -f UTF-16LE -t UTF-8` (or UTF-16BE) converts "
    "it, otherwise `tr -d '\\000'` removes them"
)
# Python's names of common encodings, the most frequent first. With a longer list, German and French texts are mistaken
# for other encodings, such as Mac Roman.
ENCODINGS = ["cp1252", "cp1251", "koi8_r", "cp866", "cp1253", "gb18030", "big5", "cp932", "euc_jp", "cp949"]
READ_SIZE = 1 << 16  # bytes to guess an encoding from, and characters per read


def explain_bytes(name: str, first: int) -> str:
    """Describes the bytes of a file that is not UTF-8, and tells how to convert them.

    Args:
        first: position of the first byte that is not UTF-8
    """
    import charset_normalizer  # noqa: PLC0415 - it would make each start 20 ms slower

    with open(name, "rb") as file:
        file.seek(first)
        sample = file.read(READ_SIZE)
    if b"\0" in sample:
        return f"it {HAS_NUL}"
    invalid, valid = _count_not_ascii(name)
    if invalid < valid:
        return f"all but {invalid:,} of its bytes are UTF-8: `iconv -c -f UTF-8 -t UTF-8` removes the others"
    lines = [line for line in sample.split(b"\n")[:-1] if not line.isascii()]  # the last line may be incomplete
    guess = charset_normalizer.from_bytes(b"\n".join(lines) or sample, cp_isolation=ENCODINGS).best()
    if guess is None:
        return "its encoding is unknown, or it is not text: `iconv -f ENCODING -t UTF-8` converts it"
    encoding = min(guess.could_be_from_charset, key=ENCODINGS.index).upper().replace("_", "-")
    beginning = repr(str(guess)[:20])
    return f"as {encoding} it reads {beginning} there: if that is right, `iconv -f {encoding} -t UTF-8` converts it"


def _count_not_ascii(name: str) -> tuple[int, int]:
    """Returns the number of bytes of a file that are not UTF-8, and the number of its valid characters beyond ASCII."""
    invalid = not_ascii = 0
    # Each invalid byte is read as one of 128 code points that never occur in text.
    with open(name, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        while text := file.read(READ_SIZE):
            invalid += len(re.findall("[\udc80-\udcff]", text))
            not_ascii += len(re.findall("[^\0-\x7f]", text))
    return invalid, not_ascii - invalid
