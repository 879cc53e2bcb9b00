"""The dynamic symbols of a 64-bit little-endian ELF library: what it defines and what it expects from others.

Only what is needed to know which symbols nobody would provide; binutils may be absent where this runs. Layout: the
System V ABI's sections ``.dynsym``, ``.dynstr`` and GNU's ``.gnu.version``.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
SECTION = struct.Struct("<IIQQQQIIQQ")
SHT_DYNSYM = 11
SHT_GNU_VERSYM = 0x6FFFFFFF
SHN_UNDEF = 0
STB_WEAK = 2
VERSION_GLOBAL = 1
"""Symbols of a higher version index belong to a versioned library: libc, libstdc++ and their like."""


@dataclass(frozen=True, slots=True)
class DynamicSymbols:
    """Names of one library."""

    defined: frozenset[str]
    needed: frozenset[str]
    """Undefined, not weak, and not bound to a version of a system library."""


def read_dynamic_symbols(path: Path) -> DynamicSymbols:
    """Read the dynamic symbols of *path*. O(symbols). Raise ValueError if it is no 64-bit little-endian ELF file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", data, 40)
        entry_size, count = struct.unpack_from("<HH", data, 58)
        symbols = np.empty(0, SYMBOL)
        versions: np.ndarray | None = None
        names = b""
        for i in range(count):
            _, kind, _, _, offset, size, link, _, _, _ = SECTION.unpack_from(data, table + i * entry_size)
            if kind == SHT_DYNSYM:
                symbols = np.frombuffer(data[offset : offset + size], SYMBOL)
                _, _, _, _, at, length, *_ = SECTION.unpack_from(data, table + link * entry_size)
                names = data[at : at + length]
            elif kind == SHT_GNU_VERSYM:
                versions = np.frombuffer(data[offset : offset + size], "<u2")
    weak = symbols["info"] >> 4 == STB_WEAK
    undefined = symbols["section"] == SHN_UNDEF
    unversioned = np.ones(len(symbols), bool) if versions is None else versions <= VERSION_GLOBAL

    def texts(chosen: np.ndarray) -> frozenset[str]:
        starts = symbols["name"][chosen].tolist()
        return frozenset(names[start : names.index(b"\0", start)].decode() for start in starts) - {""}

    return DynamicSymbols(defined=texts(~undefined), needed=texts(undefined & ~weak & unversioned))
