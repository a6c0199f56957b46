"""Real English to measure on: Jane Austen's novels, in the public domain, from Debian's package r-cran-janeaustenr.

Nothing of them is kept here. Where the package is not installed, `apt-get download` fetches it (1.6 MB) and it is
unpacked into a temporary folder: it is data for R, of which nothing else is needed.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

from engines.errors import UserError, one_line

PACKAGE = "r-cran-janeaustenr"
DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
TITLES = ("emma", "mansfield-park", "northanger-abbey", "persuasion", "pride-and-prejudice", "sense-and-sensibility")


def missing() -> str:
    """Why there are no novels here; empty if there are, or can be."""
    here = (Path("/") / DATA).is_file() or all(map(shutil.which, ("apt-get", "dpkg-deb")))
    return "" if here else f"no Debian here to take {PACKAGE} from: give a file of your own by --text"


def novels() -> dict[str, str]:
    """Title -> text, a paragraph a line.

    Raises:
        UserError: the package can neither be found nor fetched, or is not as expected.
    """
    if reason := missing():
        raise UserError(reason)
    if (file := Path("/") / DATA).is_file():
        return dict(zip(TITLES, _texts(file.read_bytes()), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line in (["apt-get", "download", "-qq", PACKAGE], ["sh", "-c", f"dpkg-deb -x {PACKAGE}_*.deb ."]):
                subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True, timeout=300)
            return dict(zip(TITLES, _texts((Path(folder) / DATA).read_bytes()), strict=True))
        except subprocess.SubprocessError as error:
            told = one_line(Exception(getattr(error, "stderr", None) or error))
            raise UserError(f"apt-get download {PACKAGE} failed ({told}): try  apt-get update  first") from error


def _texts(data: bytes) -> list[str]:
    """The books of an R database: of each its length, and a vector of lines, serialized and then deflated."""
    texts = []
    while data:
        stream = zlib.decompressobj()
        vector = stream.decompress(data[4:])
        data = stream.unused_data
        start = 23 + 4  # behind the header, of which the encoding's name UTF-8 is the last, and the vector's type
        (count,), lines = struct.unpack_from(">i", vector, start), []
        at = start + 4
        for _ in range(count):
            (length,) = struct.unpack_from(">i", vector, at + 4)  # behind the string's own type
            lines.append(vector[at + 8 : at + 8 + length].decode())
            at += 8 + length
        paragraphs = "\n".join(lines).split("\n\n")
        texts.append("\n".join(" ".join(p.split()) for p in paragraphs if p.strip()))
    return texts
