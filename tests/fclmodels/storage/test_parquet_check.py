"""What others write is read as it is; a number that cannot be is refused before Polars takes room for it."""

import io
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from fclmodels.storage import parquet_check
from fclmodels.storage.untrusted import parse_table

FLAT = pl.DataFrame({"path": [f"x/{i % 5}.png" for i in range(24)], "client": range(24), "share": [0.5, None] * 12})
NESTED = FLAT.with_columns(many=pl.Series([[1, 2], [], None] * 8), facts=pl.Series([{"a": 1}, {"a": None}] * 12))


def written(table: pl.DataFrame, **how: Any) -> bytes:
    buffer = io.BytesIO()
    table.write_parquet(buffer, **how)
    return buffer.getvalue()


@pytest.mark.parametrize("table", [FLAT, NESTED, FLAT.clear(), pl.DataFrame()], ids=["flat", "nested", "empty", "none"])
@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "lz4", "brotli", "uncompressed"])
def test_what_polars_writes_is_read(table: pl.DataFrame, compression: str) -> None:
    assert_frame_equal(parse_table(written(table, compression=compression, row_group_size=7)), table)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_what_arrow_writes_is_read(version: str, dictionary: bool) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    arrow.write_table(
        NESTED.to_arrow(), buffer, data_page_version=version, use_dictionary=dictionary, data_page_size=64
    )
    assert_frame_equal(parse_table(buffer.getvalue()), NESTED)


def test_a_long_constant_column_is_read() -> None:
    """It packs to next to nothing, and is no bomb."""
    table = pl.DataFrame({"a": pl.repeat(0, 3_000_000, eager=True)})
    assert parse_table(written(table)).equals(table)


PAGES = {  # bytes of the headers of a column's dictionary and of its data, and others in their place
    "a dictionary of -1 values": ("4c1530", "4c1501"),
    "data of -1 values": ("2c1530", "2c1501"),
    "a value more than the column has": ("2c1530", "2c1532"),
    "-97 bytes unpacked": ("158003158003", "158103158003"),
    "-97 bytes packed": ("158003158003", "158003158103"),
    "more bytes than the column has": ("158003158003", "15800315fe7f"),
}
FOOTERS = {
    "empty": b"",
    "structs in structs": b"\x1c" * 5000,
    "a number without end": b"\x16" + b"\xff" * 90,
    "a list of 2^32 - 1": bytes.fromhex("49fcffffffff0f"),
    "a text of 2^32 - 1": bytes.fromhex("48ffffffff0f"),
    "no row groups": bytes.fromhex("150200"),
    "row groups that are a number": bytes.fromhex("450200"),
}


@pytest.mark.parametrize("what", PAGES)
def test_a_page_that_says_what_cannot_be_is_refused(what: str) -> None:
    """With some of these Polars asks for 2^61 bytes, and Rust ends the process."""
    there, instead = map(bytes.fromhex, PAGES[what])
    content = written(pl.DataFrame({"a": range(24)}), compression="uncompressed", statistics=False)
    parquet_check.refuse_implausible(content)
    assert there in content
    with pytest.raises(ValueError, match="page's header is damaged"):
        parquet_check.refuse_implausible(content.replace(there, instead))


def test_a_page_that_says_that_it_unpacks_to_any_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(FLAT)
    parquet_check.refuse_implausible(content)
    monkeypatch.setattr(parquet_check, "MOST_PACKED", 0)
    with pytest.raises(ValueError, match="page's header is damaged"):
        parquet_check.refuse_implausible(content)


@pytest.mark.parametrize("what", FOOTERS)
def test_a_footer_that_is_none_is_refused(what: str) -> None:
    footer = FOOTERS[what]
    with pytest.raises(ValueError, match="footer or a page's header is damaged"):
        parquet_check.refuse_implausible(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1\xff\xff\xff\xffPAR1", b"PAR1" * 3 + b"\0"])
def test_another_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="no Parquet file"):
        parquet_check.refuse_implausible(content)
