"""Bytes and elements, read from what people write and printed as people read them."""

import math
import re

from zplan.errors import SpecError

DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)

# Bytes per element, by the short names that plans print.
ITEMSIZE = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


def parse_size(size: int | str, *, what: str = "size") -> int:
    """Returns bytes. GB is 1e9 bytes, GiB is 2**30.

    >>> parse_size("80GB"), parse_size("1.5 GiB"), parse_size(4096)
    (80000000000, 1610612736, 4096)
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise SpecError(f"{what} {size!r} is no size: write bytes, '25MB' or '80GiB'")
    if isinstance(size, int):
        nbytes = size
    else:
        match = _SIZE.fullmatch(size)
        unit = match.group(2).lower() if match else "?"
        factor = DECIMAL.get(unit) or BINARY.get(unit)
        if match is None or factor is None:
            raise SpecError(f"{what} {size!r} is no size: write bytes, '25MB' or '80GiB'")
        exact = float(match.group(1)) * factor
        if math.isinf(exact):
            raise SpecError(f"{what} {size!r} is no size: no machine holds that much")
        nbytes = round(exact)
    if nbytes <= 0:
        raise SpecError(f"{what} {size!r} must be above zero")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Four figures at most, in binary units.

    >>> format_bytes(512), format_bytes(1536), format_bytes(335544320)
    ('512 B', '1.5 KiB', '320 MiB')
    """
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    text = f"{value:.0f}" if unit == "B" or abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}"


def format_count(count: int) -> str:
    """A count of elements or FLOPs.

    >>> format_count(999), format_count(10_600_000), format_count(7_500_000_000)
    ('999', '10.6M', '7.5B')
    """
    value, unit = float(count), ""
    for unit in ("", "K", "M", "B", "T"):
        if abs(value) < 1000 or unit == "T":
            break
        value /= 1000
    return f"{value:.3g}{unit}"
