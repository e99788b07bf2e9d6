"""What a Parquet file says of its pages, looked at before Polars reads it.

Polars takes a page's counts at their word, and where Rust gets no memory the process ends. Fields have the numbers of
parquet.thrift (github.com/apache/parquet-format); their bytes are Thrift's compact protocol.
"""

from typing import Any

MOST_VALUES = 400_000_000
MOST_PACKED = 1 << 16  # bytes that a codec makes of one

# Of the footer: row groups; of a row group: columns and rows; of a column: its meta, of which the last two are places.
ROW_GROUPS, COLUMNS, ROWS, META, VALUES, LENGTH, DATA, DICTIONARY = 4, 1, 3, 3, 5, 7, 9, 11
# Of a page's header: sizes, then what it says of each kind of page: data, a dictionary, data of version 2.
UNPACKED, PACKED, KINDS, DICTIONARY_PAGE, PAGE_VALUES = 2, 3, (5, 7, 8), 7, 1


def refuse_absurd(content: bytes) -> None:
    """ValueError where a page holds less than nothing or more than its column, or all is more than any data set."""
    length = int.from_bytes(content[-8:-4], "little")
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1" or length > len(content) - 12:
        raise ValueError("no Parquet file, or cut short")
    try:
        groups = _Thrift(content, len(content) - 8 - length).struct()[ROW_GROUPS]
        columns = [(column[META], group[ROWS]) for group in groups for column in group[COLUMNS]]
        if (values := sum(max(column[VALUES], rows) for column, rows in columns)) > MOST_VALUES:
            raise ValueError(f"{values:,} values are too many")
        for column, _ in columns:
            _walk(content, column)
    except (LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError("its footer or a page's header is spoilt") from problem


def _walk(content: bytes, column: dict[int, Any]) -> None:
    """Through the pages of a column, as far as Polars reads them: until they have had all values."""
    at, left = column.get(DICTIONARY, column[DATA]), column[VALUES]
    end = at + column[LENGTH]
    while left > 0:
        thrift = _Thrift(content, at)
        page = thrift.struct()
        counts = [number for kind in KINDS for number in page.get(kind, {}).values() if isinstance(number, int)]
        left -= sum(page[kind][PAGE_VALUES] for kind in KINDS if kind in page and kind != DICTIONARY_PAGE)
        at = thrift.at + page[PACKED]
        most_unpacked = (page[PACKED] + 1024) * MOST_PACKED
        if min(counts, default=0) < 0 or page[PACKED] < 0 or not 0 <= page[UNPACKED] <= most_unpacked or at > end:
            raise LookupError("sizes that cannot be")
    if left < 0:
        raise LookupError("more values than the column has")


class _Thrift:
    """Values of Thrift's compact protocol, from a place on."""

    def __init__(self, content: bytes, at: int) -> None:
        self.content, self.at = content, at

    def struct(self) -> dict[int, Any]:
        """Its fields by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._take(1)[0]:
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2, 3):  # a truth value is a byte only in a list
            return self._take(1)[0]
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            return self._take(8)
        if kind == 8:
            return self._take(self._natural())
        if kind in (9, 10):
            head = self._take(1)[0]
            count = head >> 4 if head >> 4 < 15 else self._natural()
            return [self._value(head & 15) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise LookupError(f"{kind} is no kind of value")

    def _integer(self) -> int:
        zigzag = self._natural()
        return zigzag >> 1 ^ -(zigzag & 1)

    def _natural(self) -> int:
        value = 0
        for place in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 127) << place
            if byte < 128:
                return value
        raise LookupError("a number without end")

    def _take(self, count: int) -> bytes:
        taken = self.content[self.at : self.at + count] if self.at >= 0 else b""
        if len(taken) < count:
            raise LookupError("beyond the end")
        self.at += count
        return taken
