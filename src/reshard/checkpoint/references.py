"""Chunks that are not written, because another checkpoint holds the same bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from reshard.api import BaseError
from reshard.checkpoint.bases import Base, Candidate
from reshard.engine.memory import BounceBuffer
from reshard.engine.workers import run_all
from reshard.engine.writing import Content, Hashed, hash_content
from reshard.format.checksum import join_digests
from reshard.plans.results import WrittenColumns

_BOUNCE_BYTES = 8 << 20


class References:
    """Which contents of a save are stored in its base, found out in threads.

    `unchanged` are the digests of tensors that are known to be as they were in the base.
    """

    def __init__(self, base: Base, unchanged: Mapping[str, bytes] | None = None) -> None:
        self._base = base
        self._unchanged = unchanged or {}
        self._local = threading.local()
        self._found: dict[int, tuple[Candidate, Hashed]] = {}

    def find(self, contents: Sequence[Content], threads: int) -> None:
        """Compare contents with what the base holds of them."""
        candidates = []
        for position, content in enumerate(contents):
            candidate = self._base.find(content) if content.nbytes else None
            if candidate is not None:
                candidates.append((position, content, candidate))
            elif content.name in self._unchanged:
                raise _replaced(content)
        run_all(self._compare, candidates, threads)

    def _compare(self, task: tuple[int, Content, Candidate]) -> None:
        position, content, candidate = task
        known = candidate.hashed
        if content.name in self._unchanged:
            stored = known or self._base.hash(candidate, None)
            if stored.digest != self._unchanged[content.name]:
                raise _replaced(content)
            self._found[position] = (candidate, stored)
            return
        own = hash_content(content, None if known is None else known.probe, self._bounce())
        if own.digest is None:
            return
        stored = self._base.hash(candidate, own.probe)
        if stored.digest == own.digest:
            self._found[position] = (candidate, own)

    def _bounce(self) -> BounceBuffer:
        bounce: BounceBuffer | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = BounceBuffer(_BOUNCE_BYTES)
        return bounce

    def __contains__(self, position: int) -> bool:
        return position in self._found

    def without_fingerprints(self, contents: Sequence[Content]) -> list[int]:
        """Contents that need not be written, but whose fingerprints the base does not know."""
        found = sorted(self._found.items())
        rows = [row for row, (candidate, _) in found if candidate.fingerprint is None]
        for row in rows:
            if contents[row].name in self._unchanged:
                # There is no copy to compute it from.
                raise _replaced(contents[row])
        return rows

    def record(self, written: WrittenColumns) -> None:
        """Enter where the contents are that need not be written."""
        files = {file: number for number, file in enumerate(written.files)}
        for position, (candidate, hashed) in sorted(self._found.items()):
            written.file_ids[position] = files.setdefault(candidate.file, len(files))
            written.begins[position] = candidate.begin
            written.stored_nbytes[position] = candidate.stored_nbytes
            written.checksums[position] = hashed.probe
            if candidate.fingerprint is not None:
                written.fingerprints[position] = candidate.fingerprint
            if candidate.codec:
                if candidate.codec not in written.codecs:
                    written.codecs.append(candidate.codec)
                written.codec_ids[position] = written.codecs.index(candidate.codec) + 1
        written.files[:] = files
        if self._found:
            rows = sorted(self._found)
            digests = (self._found[row][1].digest or b"" for row in rows)
            written.digests[rows] = join_digests(digests)


def _replaced(content: Content) -> BaseError:
    return BaseError(
        f"the base does not hold {content.key!r} any more, which was left out of the copy of the "
        "state because it has not changed since: the base was replaced meanwhile. Save again"
    )
