"""Whatever ranks want of whatever chunks: each gets all of it once, and none is read twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.planning import sharing
from reshard.planning.sharing import StoredChunks, Wants, row_dims, share_reads


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Wants], StoredChunks]:
    dims = draw(st.integers(1, 3))
    n_chunks = draw(st.integers(1, 4))
    extents = st.integers(1, 6)
    sizes = np.array([[draw(extents) for _ in range(dims)] for _ in range(n_chunks)])
    wants = []
    for _ in range(draw(st.integers(1, 5))):
        rows, offsets, lengths = [], [], []
        for _ in range(draw(st.integers(0, 4))):
            row = draw(st.integers(0, n_chunks - 1))
            begins = [draw(st.integers(0, int(extent) - 1)) for extent in sizes[row]]
            counts = [
                draw(st.integers(1, int(extent) - begin))
                for extent, begin in zip(sizes[row], begins, strict=True)
            ]
            rows.append(row)
            offsets.append(begins)
            lengths.append(counts)
        shape = (len(rows), dims)
        wants.append(
            Wants(
                np.array(rows, dtype=np.int64),
                np.array(offsets, dtype=np.int64).reshape(shape),
                np.array(lengths, dtype=np.int64).reshape(shape),
            )
        )
    chunks = StoredChunks(
        sizes,
        np.full(n_chunks, 4),
        np.zeros(n_chunks, np.int64),
        np.arange(n_chunks) * 1000,
        np.array([draw(st.booleans()) for _ in range(n_chunks)]),
        draw(st.booleans()),
    )
    return wants, chunks


def box(offsets: np.ndarray, lengths: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True))


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([16, 1 << 24]), st.sampled_from([2, 64]))
def test_each_rank_gets_what_it_wants_once(
    case: tuple[list[Wants], StoredChunks], least: int, most_ranks: int
) -> None:
    wants, chunks = case
    before = sharing._LEAST_CUT_BYTES, sharing.MOST_RANKS
    sharing._LEAST_CUT_BYTES, sharing.MOST_RANKS = least, most_ranks
    try:
        shared = share_reads(wants, chunks)
    finally:
        sharing._LEAST_CUT_BYTES, sharing.MOST_RANKS = before
    got = [[np.zeros(chunks.sizes[row], int) for row in each.rows] for each in wants]
    sent = np.zeros((len(wants), len(wants)), np.int64)
    rows_read: dict[tuple[int, int, int], set[int]] = {}
    dims = row_dims(chunks.sizes)
    for rank, each in enumerate(shared):
        own = zip(each.own_wants, each.own_firsts, each.own_counts, strict=True)
        for want, first, count in own:
            row = wants[rank].rows[want]
            offsets, lengths = wants[rank].offsets[want].copy(), wants[rank].lengths[want].copy()
            offsets[dims[row]], lengths[dims[row]] = first, count
            got[rank][want][box(offsets, lengths)] += 1
            for at in range(first, first + count):
                rows_read.setdefault((rank // most_ranks, int(row), at), set()).add(rank)
        parts = zip(
            each.part_ranks, each.part_wants, each.part_offsets, each.part_lengths, strict=True
        )
        for to, want, offsets, lengths in parts:
            row = wants[to].rows[want]
            got[to][want][box(offsets, lengths)] += 1
            sent[rank, to] += lengths.prod() * 4
            first = offsets[dims[row]]
            for at in range(first, first + lengths[dims[row]]):
                rows_read.setdefault((rank // most_ranks, int(row), at), set()).add(rank)
        # A block is read by a rank that wants some of it itself.
        for block in np.unique(each.part_blocks):
            assert rank in each.part_ranks[each.part_blocks == block]
    for rank, each in enumerate(wants):
        for want in range(len(each.rows)):
            expected = np.zeros_like(got[rank][want])
            expected[box(each.offsets[want], each.lengths[want])] = 1
            assert (got[rank][want] == expected).all()
        np.fill_diagonal(sent, 0)
        announced = np.zeros(len(wants), np.int64)
        announced[shared[rank].senders] = shared[rank].sender_bytes
        assert (announced == sent[:, rank]).all()
    assert all(len(readers) == 1 for readers in rows_read.values())
