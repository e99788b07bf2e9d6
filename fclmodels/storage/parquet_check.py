"""A check of the sizes in a Parquet file's headers, before Polars reads it.

Polars trusts a page's counts, and where Rust gets no memory the process ends. Fields have the numbers of parquet.thrift
(github.com/apache/parquet-format); their bytes are Thrift's compact protocol.
"""

from typing import Any

MOST_VALUES = 400_000_000
MOST_PACKED = 1 << 16  # bytes to which a codec expands one

# Fields of the footer: row groups; of a row group: columns and rows; of a column: its metadata, whose last two are
# positions in the file.
ROW_GROUPS, COLUMNS, ROWS, META, VALUES, LENGTH, DATA, DICTIONARY = 4, 1, 3, 3, 5, 7, 9, 11
# Fields of a page's header: sizes, then one for each kind of page: data, a dictionary, data of version 2.
UNPACKED, PACKED, KINDS, DICTIONARY_PAGE, PAGE_VALUES = 2, 3, (5, 7, 8), 7, 1


def refuse_implausible(content: bytes) -> None:
    """Raise ValueError where a page has a negative count or more values than its column, or the file has too many."""
    length = int.from_bytes(content[-8:-4], "little")
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1" or length > len(content) - 12:
        raise ValueError("no Parquet file, or cut short")
    try:
        groups = _Thrift(content, len(content) - 8 - length).read_struct()[ROW_GROUPS]
        columns = [(column[META], group[ROWS]) for group in groups for column in group[COLUMNS]]
        if (values := sum(max(column[VALUES], rows) for column, rows in columns)) > MOST_VALUES:
            raise ValueError(f"{values:,} values are too many")
        for column, _ in columns:
            _check_pages(content, column)
    except (LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError("its footer or a page's header is damaged") from problem


def _check_pages(content: bytes, column: dict[int, Any]) -> None:
    """Raise LookupError where the headers of a column's pages are impossible, up to the page with its last value."""
    at, remaining = column.get(DICTIONARY, column[DATA]), column[VALUES]
    end = at + column[LENGTH]
    while remaining > 0:
        thrift = _Thrift(content, at)
        page = thrift.read_struct()
        counts = [number for kind in KINDS for number in page.get(kind, {}).values() if isinstance(number, int)]
        remaining -= sum(page[kind][PAGE_VALUES] for kind in KINDS if kind in page and kind != DICTIONARY_PAGE)
        at = thrift.at + page[PACKED]
        most_unpacked = (page[PACKED] + 1024) * MOST_PACKED
        if min(counts, default=0) < 0 or page[PACKED] < 0 or not 0 <= page[UNPACKED] <= most_unpacked or at > end:
            raise LookupError("sizes that cannot be")
    if remaining < 0:
        raise LookupError("more values than the column has")


class _Thrift:
    """A reader of values in Thrift's compact protocol, from a position on."""

    def __init__(self, content: bytes, at: int) -> None:
        self.content, self.at = content, at

    def read_struct(self) -> dict[int, Any]:
        """Return the fields by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._read_bytes(1)[0]:
            number = number + (head >> 4) if head >> 4 else self._read_integer()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._read_value(kind)
        return fields

    def _read_value(self, kind: int) -> Any:
        if kind in (1, 2, 3):  # a boolean takes a byte only in a list
            return self._read_bytes(1)[0]
        if kind in (4, 5, 6):
            return self._read_integer()
        if kind == 7:
            return self._read_bytes(8)
        if kind == 8:
            return self._read_bytes(self._read_natural())
        if kind in (9, 10):
            head = self._read_bytes(1)[0]
            count = head >> 4 if head >> 4 < 15 else self._read_natural()
            return [self._read_value(head & 15) for _ in range(count)]
        if kind == 12:
            return self.read_struct()
        raise LookupError(f"{kind} is no kind of value")

    def _read_integer(self) -> int:
        zigzag = self._read_natural()
        return zigzag >> 1 ^ -(zigzag & 1)

    def _read_natural(self) -> int:
        value = 0
        for place in range(0, 70, 7):
            byte = self._read_bytes(1)[0]
            value |= (byte & 127) << place
            if byte < 128:
                return value
        raise LookupError("a number without end")

    def _read_bytes(self, count: int) -> bytes:
        content = self.content[self.at : self.at + count] if self.at >= 0 else b""
        if len(content) < count:
            raise LookupError("beyond the end")
        self.at += count
        return content
