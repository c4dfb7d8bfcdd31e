"""A shard file whose layout turns out while it is written.

Contents are placed one after the other, in order, as their stored sizes become known. The
header is written last, into space for the longest that it can become.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from reshard.engine.writing import Content, Sums, Written, file_order, stored_entry
from reshard.format.checksum import checksum, signed
from reshard.format.container import Entry, build_header
from reshard.stores.protocol import Store

_ANY_END = 10**16
"""A number with as many digits as any offset in a file may have."""


class GrowingFile:
    """What is known so far of a file; `position` is where the next content begins.

    It has no lock. Whoever takes a place for a content sees to it that nobody else does.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        contents: Sequence[Content],
        save_id: str,
        fingerprint: bool = False,
    ) -> None:
        self.contents = contents
        self.order = file_order(contents)
        self.sums = Sums(contents, fingerprint)
        self._notes = {"format": "pt", "save_id": save_id} if save_id else {"format": "pt"}
        self._header_nbytes = self.position = self._most_header_nbytes()
        self._begins = np.zeros(len(contents), dtype=np.int64)
        self._stored_nbytes = np.array([content.nbytes for content in contents], dtype=np.int64)
        self._encoded = np.zeros(len(contents), dtype=np.int64)
        self.writer = store.open_writer(key, None)

    def _most_header_nbytes(self) -> int:
        """The size of the longest header that the contents can need."""
        entries = {}
        encoded = Entry("U8", (_ANY_END,), _ANY_END, _ANY_END)
        for content in self.contents:
            plain = stored_entry(content, 0)._replace(begin=_ANY_END, end=_ANY_END)
            longest = max(plain, encoded, key=lambda entry: len(msgspec.json.encode(entry)))
            entries[content.key] = longest
        return len(build_header(entries, self._notes))

    def begin_content(self, i: int) -> None:
        """Content `i` begins here."""
        self._begins[i] = self.position

    def begin_of(self, i: int) -> int:
        return int(self._begins[i])

    def note_encoded(self, i: int, stored_nbytes: int) -> None:
        """Content `i` is stored encoded, in so many bytes."""
        self._encoded[i], self._stored_nbytes[i] = 1, stored_nbytes

    def finish(self, durable: bool) -> Written:
        """Write the header, once all contents are written."""
        entries = {}
        for i in self.order:
            content, begin = self.contents[i], self.begin_of(i) - self._header_nbytes
            entry = stored_entry(content, begin)
            if self._encoded[i]:
                stored = int(self._stored_nbytes[i])
                entry = Entry("U8", (stored,), begin, begin + stored)
            entries[content.key] = entry
        header = build_header(entries, self._notes, self._header_nbytes)
        self.writer.write(0, [memoryview(header)])
        if durable:
            self.writer.sync()
        return Written(
            self.position,
            len(header),
            signed(checksum(header)),
            self._begins,
            self.sums.checksums,
            self.sums.digests,
            self.sums.fingerprints,
            self._encoded,
            self._stored_nbytes,
        )

    def close(self) -> None:
        self.writer.close()
