"""Bytes and elements, read from what people write and printed as people read them."""

import math
import re
from fractions import Fraction

from zplan.errors import SpecError

DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Above it a count no longer prints as a float.
MOST = 1e300
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)

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
        match = _NUMBER.fullmatch(size)
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


def parse_count(count: int | float | str, *, what: str = "params") -> int:
    """Returns a whole number, say of parameters. B is 1e9, as `format_count` prints it.

    >>> parse_count("7.5e9"), parse_count("350M"), parse_count(7.5e9)
    (7500000000, 350000000, 7500000000)
    """
    refusal = SpecError(f"{what} {count!r} is no count: write 7500000000, '7.5e9' or '7.5B'")
    if isinstance(count, bool) or not isinstance(count, (int, float, str)) or count != count:
        raise refusal
    number, factor = count, 1
    if isinstance(count, str):
        match = _NUMBER.fullmatch(count)
        unit = match.group(2).lower() if match else "?"
        if match is None or unit not in COUNTS:
            raise refusal
        number, factor = match.group(1), COUNTS[unit]
    if not (float(number) if isinstance(number, str) else number) < MOST:
        raise SpecError(f"{what} {count!r} is no count: no model holds that many")
    exact = Fraction(number) * factor
    if exact <= 0:
        raise SpecError(f"{what} {count!r} must be above zero")
    if exact.denominator != 1:
        raise SpecError(f"{what} {count!r} is no whole number: write 7500000000, '7.5e9' or '7.5B'")
    return int(exact)


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
