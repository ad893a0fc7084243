"""Sizes as people write them."""

import pytest

from jaxserve.cli.byte_size import parse_byte_size, show_byte_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("1GiB", 1 << 30),
        ("1g", 1 << 30),
        ("512M", 512 << 20),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("10kb", 10_000),
        ("2TiB", 2 << 40),
        ("0", 0),
    ],
)
def test_reads(text: str, size: int) -> None:
    assert parse_byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiBB", "1e9", "one", "1,5G", "9" * 99, "١G"])
def test_refuses_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="1GiB"):
        parse_byte_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(1 << 30, "1.0 GiB"), (500, "500 bytes"), (3 << 40, "3.0 TiB")]
)
def test_shows(size: int, text: str) -> None:
    assert show_byte_size(size) == text
