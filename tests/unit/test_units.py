import math

import pytest

from zplan.errors import SpecError
from zplan.units import ITEMSIZE, format_bytes, format_count, parse_count, parse_size


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("512b", 512),
        ("25MB", 25_000_000),
        ("25 mb", 25_000_000),
        (" 80GB ", 80_000_000_000),
        ("80GiB", 80 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("3MiB", 3 * 2**20),
        ("1.5e3KB", 1_500_000),
        ("0.5TB", 500_000_000_000),
    ],
)
def test_parse_size(size: int | str, nbytes: int) -> None:
    assert parse_size(size) == nbytes


@pytest.mark.parametrize(
    "size", ["", "GB", "5 XB", "-5", "80 G B", "80Gb/s", "1,5GB", "x", "0x10", "nan", "inf", 2.5, True, None, b"5"]
)
def test_parse_size_refuses_what_is_no_size(size: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_size(size, what="memory")
    assert str(caught.value) == f"memory {size!r} is no size: write bytes, '25MB' or '80GiB'"


@pytest.mark.parametrize("size", [0, -1, "0", "0.3", "0GB"])
def test_parse_size_refuses_nothing(size: int | str) -> None:
    with pytest.raises(SpecError, match=f"^size {size!r} must be above zero$"):
        parse_size(size)


def test_parse_size_refuses_more_than_a_number_holds() -> None:
    with pytest.raises(SpecError, match=r"^bucket '1e400GB' is no size: no machine holds that much$"):
        parse_size("1e400GB", what="bucket")


@pytest.mark.parametrize(
    ("count", "number"),
    [
        (1, 1),
        (7_500_000_000, 7_500_000_000),
        (7.5e9, 7_500_000_000),
        ("7500000000", 7_500_000_000),
        ("7.5e9", 7_500_000_000),
        ("7.5e+9", 7_500_000_000),
        ("7.5E9", 7_500_000_000),
        ("7.5B", 7_500_000_000),
        (" 7.5 b ", 7_500_000_000),
        ("350M", 350_000_000),
        ("12k", 12_000),
        ("1T", 10**12),
        ("1.000000000001T", 10**12 + 1),
        ("123456789012345678901", 123456789012345678901),
    ],
)
def test_parse_count(count: int | float | str, number: int) -> None:
    assert parse_count(count) == number


@pytest.mark.parametrize("count", [1, 999, 10_600_000, 7_500_000_000])
def test_parse_count_reads_what_format_count_prints(count: int) -> None:
    assert parse_count(format_count(count)) == count


@pytest.mark.parametrize(
    "count",
    ["", "B", "7.5 GB", "7G", "-5", "7,5B", "1e-3", "0x10", "x", "many", "nan", "inf", math.nan, True, None, b"5", [5]],
)
def test_parse_count_refuses_what_is_no_count(count: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_count(count)
    assert str(caught.value) == f"params {count!r} is no count: write 7500000000, '7.5e9' or '7.5B'"


@pytest.mark.parametrize("count", [0, -1, 0.0, -7.5e9, -0.5, "0", "0B"])
def test_parse_count_refuses_nothing(count: int | float | str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_count(count, what="elements")
    assert str(caught.value) == f"elements {count!r} must be above zero"


@pytest.mark.parametrize("count", [7.5, "7.5", "0.3", "1.5e0", "0.0001K"])
def test_parse_count_refuses_parts_of_a_parameter(count: float | str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_count(count)
    assert str(caught.value) == f"params {count!r} is no whole number: write 7500000000, '7.5e9' or '7.5B'"


@pytest.mark.parametrize("count", [math.inf, 1e308, 10**400, "1e400", "1e999999999B", "9" * 400])
def test_parse_count_refuses_more_than_a_number_holds(count: int | float | str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_count(count)
    assert str(caught.value) == f"params {count!r} is no count: no model holds that many"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (335544320, "320 MiB"),
        (1500 * 2**20, "1.465 GiB"),
        (2**50, "1024 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1K"), (10_600_000, "10.6M"), (7_500_000_000, "7.5B"), (2 * 10**15, "2e+03T")],
)
def test_format_count(count: int, text: str) -> None:
    assert format_count(count) == text


def test_item_sizes_are_in_bytes() -> None:
    assert (ITEMSIZE["fp32"], ITEMSIZE["bf16"], ITEMSIZE["fp16"], ITEMSIZE["bool"]) == (4, 2, 2, 1)
