"""Choose one reader for each stored byte that several ranks want.

What is read by one rank is a block of rows of a stored chunk. Rows that only one rank wants stay
with that rank. A chunk that is to be verified is one block, since its digest is of all its bytes.
Ranks share within groups of neighbours: a few dozen readers of the same bytes do not hurt a
store, and each rank keeps a connection to each other rank of its group at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from reshard.planning.balance import choose_holders
from reshard.planning.columns import Bools, Ints

MOST_RANKS = 64
"""How many ranks share their reads with each other."""
_LEAST_CUT_BYTES = 16 << 20
"""Blocks are not cut into smaller ones than this for the sake of balance."""


class Wants(NamedTuple):
    """Regions of stored chunks that one rank wants, by rows of the manifest. None is empty."""

    rows: Ints
    offsets: Ints
    lengths: Ints


class StoredChunks(NamedTuple):
    """What is known of all chunks of a checkpoint."""

    sizes: Ints
    itemsizes: Ints
    files: Ints
    begins: Ints
    undivided: Bools
    """Chunks that one rank reads, whatever is wanted of them."""
    whole_by_one: bool
    """Whether one rank reads all of a chunk that somebody wants whole: it can verify it."""


class SharedReads(NamedTuple):
    """What one rank reads: for itself alone, and for others as well.

    Of want `own_wants[i]` it reads by itself `own_counts[i]` rows of the chunk, from
    `own_firsts[i]` on. Part `i` is a region of a block that this rank reads, for want
    `part_wants[i]` of rank `part_ranks[i]`, which may be this rank itself; parts of one block
    have the same `part_blocks`. From rank `senders[i]` it gets `sender_bytes[i]` bytes.
    """

    own_wants: Ints
    own_firsts: Ints
    own_counts: Ints
    part_blocks: Ints
    part_ranks: Ints
    part_wants: Ints
    part_offsets: Ints
    part_lengths: Ints
    senders: Ints
    sender_bytes: Ints

    def peers(self, rank: int) -> list[int]:
        """The ranks that this one sends to or gets from."""
        return [r for r in np.union1d(self.part_ranks, self.senders).tolist() if r != rank]


def row_dims(sizes: Ints) -> Ints:
    """The dimension along which a chunk is cut into rows that lie one after the other."""
    return np.asarray(np.argmax(sizes > 1, axis=1))


def share_reads(wants: Sequence[Wants], chunks: StoredChunks) -> list[SharedReads]:
    """What each rank reads, such that no byte is read twice in a group and all read alike much."""
    shared: list[SharedReads] = []
    for first in range(0, len(wants), MOST_RANKS):
        shared += _share_in_group(wants[first : first + MOST_RANKS], first, chunks)
    return shared


class _Wanted(NamedTuple):
    """The wants of all ranks of a group, sorted by chunk and rank."""

    ranks: Ints
    numbers: Ints
    rows: Ints
    offsets: Ints
    lengths: Ints
    dims: Ints
    firsts: Ints
    ends: Ints


class _Blocks(NamedTuple):
    rows: Ints
    firsts: Ints
    ends: Ints
    wants: list[Ints]
    """Those that want some of each block, as rows of `_Wanted`."""


def _share_in_group(
    wants: Sequence[Wants], first_rank: int, chunks: StoredChunks
) -> list[SharedReads]:
    wanted = _join(wants, first_rank, chunks)
    own, blocks = _find_blocks(wanted, chunks)
    own_of, own_firsts, own_ends = own
    row_bytes = _row_bytes(chunks)
    blocks = _cut(blocks, wanted, chunks, row_bytes, len(wants))
    order = np.lexsort((blocks.firsts, chunks.begins[blocks.rows], chunks.files[blocks.rows]))
    blocks = _Blocks(
        blocks.rows[order],
        blocks.firsts[order],
        blocks.ends[order],
        [blocks.wants[i] for i in order.tolist()],
    )
    of = np.concatenate([np.empty(0, np.int64), *blocks.wants])
    block = np.repeat(np.arange(len(blocks.rows)), [len(each) for each in blocks.wants])
    offsets, lengths = wanted.offsets[of].copy(), wanted.lengths[of].copy()
    at = np.arange(len(of)), wanted.dims[of]
    begins = np.maximum(wanted.firsts[of], blocks.firsts[block])
    offsets[at], lengths[at] = begins, np.minimum(wanted.ends[of], blocks.ends[block]) - begins
    nbytes = lengths.prod(axis=1) * chunks.itemsizes[wanted.rows[of]]
    # What a rank reads by itself counts, too.
    own_bytes = np.zeros(len(wants), np.int64)
    alone_bytes = (own_ends - own_firsts) * row_bytes[wanted.rows[own_of]]
    np.add.at(own_bytes, wanted.ranks[own_of] - first_rank, alone_bytes)
    weights = (blocks.ends - blocks.firsts) * row_bytes[blocks.rows]
    readers = _choose_readers(block, wanted.ranks[of] - first_rank, weights, own_bytes) + first_rank
    reader = readers[block]
    answers = []
    for rank in range(first_rank, first_rank + len(wants)):
        mine = np.flatnonzero(reader == rank)
        alone = np.flatnonzero(wanted.ranks[own_of] == rank)
        coming = np.flatnonzero((wanted.ranks[of] == rank) & (reader != rank))
        sums = np.bincount(reader[coming], nbytes[coming]).astype(np.int64)
        senders = np.flatnonzero(sums)
        answers.append(
            SharedReads(
                wanted.numbers[own_of[alone]],
                own_firsts[alone],
                (own_ends - own_firsts)[alone],
                block[mine],
                wanted.ranks[of[mine]],
                wanted.numbers[of[mine]],
                offsets[mine],
                lengths[mine],
                senders,
                sums[senders],
            )
        )
    return answers


def _join(wants: Sequence[Wants], first_rank: int, chunks: StoredChunks) -> _Wanted:
    counts = [len(each.rows) for each in wants]
    ranks = np.repeat(np.arange(first_rank, first_rank + len(wants)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    rows = np.concatenate([each.rows for each in wants])
    order = np.lexsort((numbers, ranks, rows))
    rows = rows[order]
    offsets = np.concatenate([each.offsets for each in wants])[order]
    lengths = np.concatenate([each.lengths for each in wants])[order]
    dims = row_dims(chunks.sizes[rows])
    at = np.arange(len(rows)), dims
    firsts = offsets[at]
    return _Wanted(
        ranks[order], numbers[order], rows, offsets, lengths, dims, firsts, firsts + lengths[at]
    )


def _row_bytes(chunks: StoredChunks) -> Ints:
    """How long a row of each chunk is."""
    extents = chunks.sizes[np.arange(len(chunks.sizes)), row_dims(chunks.sizes)]
    return np.asarray(chunks.sizes.prod(axis=1) // np.maximum(extents, 1) * chunks.itemsizes)


def _find_blocks(wanted: _Wanted, chunks: StoredChunks) -> tuple[tuple[Ints, Ints, Ints], _Blocks]:
    """Row ranges that one rank wants, each with the want; and blocks that several do."""
    starts = np.flatnonzero(np.diff(wanted.rows, prepend=-1))
    stops = np.append(starts[1:], len(wanted.rows))
    if not len(starts):
        none = np.empty(0, np.int64)
        return (none, none, none), _Blocks(none, none, none, [])
    rows = wanted.rows[starts]
    lowest = np.minimum.reduceat(wanted.firsts, starts)
    highest = np.maximum.reduceat(wanted.ends, starts)
    is_whole = (wanted.lengths == chunks.sizes[wanted.rows]).all(axis=1)
    undivided = chunks.undivided[rows]
    if chunks.whole_by_one:
        undivided = undivided | np.logical_or.reduceat(is_whole, starts)
    is_alike = (np.maximum.reduceat(wanted.firsts, starts) == lowest) & (
        np.minimum.reduceat(wanted.ends, starts) == highest
    )
    by_one = wanted.ranks[starts] == wanted.ranks[stops - 1]
    in_one = ~by_one & (undivided | is_alike)
    apart = ~in_one & (by_one | _have_rows_apart(wanted, starts, stops))
    alone = np.flatnonzero(np.repeat(apart, stops - starts))
    own = [(alone, wanted.firsts[alone], wanted.ends[alone])]
    pieces = [
        (rows[i], lowest[i], highest[i], np.arange(starts[i], stops[i]))
        for i in np.flatnonzero(in_one).tolist()
    ]
    for i in np.flatnonzero(~in_one & ~apart).tolist():
        for first, end, of in _segments(wanted, int(starts[i]), int(stops[i])):
            if wanted.ranks[of[0]] == wanted.ranks[of[-1]]:
                bounds = np.full((2, len(of)), ((first,), (end,)))
                own.append((of, bounds[0], bounds[1]))
            else:
                pieces.append((rows[i], first, end, of))
    columns = [np.array([piece[k] for piece in pieces], dtype=np.int64) for k in range(3)]
    joined = [np.concatenate(column) for column in zip(*own, strict=True)]
    return (joined[0], joined[1], joined[2]), _Blocks(
        columns[0], columns[1], columns[2], [piece[3] for piece in pieces]
    )


def _have_rows_apart(wanted: _Wanted, starts: Ints, stops: Ints) -> Bools:
    """For each chunk, whether no row is wanted twice."""
    group = np.repeat(np.arange(len(starts)), stops - starts)
    order = np.lexsort((wanted.ends, wanted.firsts, group))
    # All chunks one behind the other on one line: none reaches into the next.
    shift = group * (int(wanted.ends.max()) + 1)
    firsts, ends = (wanted.firsts + shift)[order], (wanted.ends + shift)[order]
    meets = firsts[1:] < np.maximum.accumulate(ends)[:-1]
    met = np.zeros(len(starts), dtype=bool)
    met[group[order[1:][meets]]] = True
    return ~met


def _segments(wanted: _Wanted, start: int, stop: int) -> Iterable[tuple[int, int, Ints]]:
    """Row ranges of one chunk, as large as they are wanted by the same wants."""
    firsts, ends = wanted.firsts[start:stop], wanted.ends[start:stop]
    bounds = np.unique(np.concatenate([firsts, ends])).tolist()
    for first, end in itertools.pairwise(bounds):
        of = np.flatnonzero((firsts <= first) & (ends >= end))
        if len(of):
            yield first, end, of + start


def _cut(
    blocks: _Blocks, wanted: _Wanted, chunks: StoredChunks, row_bytes: Ints, n_ranks: int
) -> _Blocks:
    """Cut blocks that are more than the even share of a rank, unless they are to be verified."""
    nbytes = (blocks.ends - blocks.firsts) * row_bytes[blocks.rows]
    most = max(_LEAST_CUT_BYTES, int(nbytes.sum()) // n_ranks)
    is_large = (nbytes > most) & ~chunks.undivided[blocks.rows]
    kept = np.flatnonzero(~is_large).tolist()
    pieces = [(blocks.rows[i], blocks.firsts[i], blocks.ends[i], blocks.wants[i]) for i in kept]
    for i in np.flatnonzero(is_large).tolist():
        row, of = int(blocks.rows[i]), blocks.wants[i]
        is_whole = (wanted.lengths[of] == chunks.sizes[row]).all(axis=1).any()
        if chunks.whole_by_one and is_whole:
            pieces.append((row, blocks.firsts[i], blocks.ends[i], of))
            continue
        step = max(1, most // 2 // max(1, int(row_bytes[row])))
        for first in range(int(blocks.firsts[i]), int(blocks.ends[i]), step):
            end = min(first + step, int(blocks.ends[i]))
            meets = (wanted.firsts[of] < end) & (wanted.ends[of] > first)
            pieces.append((row, first, end, of[meets]))
    columns = [np.array([piece[k] for piece in pieces], dtype=np.int64) for k in range(3)]
    return _Blocks(columns[0], columns[1], columns[2], [piece[3] for piece in pieces])


def _choose_readers(block: Ints, ranks: Ints, weights: Ints, own_bytes: Ints) -> Ints:
    """The rank that reads each block, among those that want some of it."""
    n_ranks = len(own_bytes)
    holders = np.unique(block * n_ranks + ranks)
    starts = np.searchsorted(holders, np.arange(len(weights) + 1) * n_ranks)
    # What each rank reads by itself is a block that nobody else holds.
    all_ranks = np.concatenate([np.arange(n_ranks), holders % n_ranks])
    all_starts = np.concatenate([np.arange(n_ranks), starts + n_ranks])
    all_weights = np.maximum(np.concatenate([own_bytes, weights]), 1)
    chosen = choose_holders(all_ranks, all_starts, all_weights, n_ranks)
    return np.asarray(all_ranks[chosen[n_ranks:]])
