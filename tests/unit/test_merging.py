"""Parts that ranks wrote without each other, as one manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.api import CorruptCheckpointError
from reshard.checkpoint.planner_data import merge_planner_data
from reshard.format.merging import merge_manifests
from reshard.format.tables import Manifest
from reshard.planning.columns import DTYPE_CODES
from reshard.tensors.paths import PathMap
from support.boxes import Box, Tiled, tilings


class Held(NamedTuple):
    """A tensor as one rank holds it."""

    name: str
    shape: tuple[int, ...]
    boxes: Sequence[Box] = ()
    alias_of: str | None = None
    dtype: torch.dtype = torch.int8


def part(rank: int, tensors: Sequence[Held], values: Sequence[str] = ()) -> Manifest:
    """The manifest of one rank; the first byte of each chunk tells who wrote it."""
    width = max([1, *(len(held.shape) for held in tensors)])

    def padded(row: Sequence[int], fill: int) -> list[int]:
        return [*row, *[fill] * (width - len(row))]

    def column(numbers: Sequence[Any]) -> Any:
        return np.array(numbers, dtype=np.int64)

    boxes = [box for held in tensors for box in held.boxes]
    names = [held.name for held in tensors]
    volumes = [box.volume for box in boxes]
    begins = 4096 + np.cumsum([0, *volumes])
    return Manifest(
        files=[f"__{rank}_0.safetensors"],
        file_sizes=column([int(begins[-1]) + 10 * len(values)]),
        header_sizes=column([4096]),
        header_checksums=column([rank]),
        tensor_names=names,
        dtypes=column([DTYPE_CODES[held.dtype] for held in tensors]),
        flags=column([rank % 2] * len(names)),
        ndims=column([len(held.shape) for held in tensors]),
        shapes=column([padded(held.shape, 1) for held in tensors]).reshape(-1, width),
        aliases=column([names.index(h.alias_of) if h.alias_of else -1 for h in tensors]),
        chunk_starts=np.cumsum([0, *(len(held.boxes) for held in tensors)]),
        chunk_offsets=column([padded(box.low, 0) for box in boxes]).reshape(-1, width),
        chunk_sizes=column([padded(box.sizes, 1) for box in boxes]).reshape(-1, width),
        chunk_files=np.zeros(len(boxes), dtype=np.int64),
        chunk_begins=begins[:-1],
        chunk_digests=np.zeros((len(boxes), 16), dtype=np.uint8),
        chunk_probes=column([1000 * rank + row for row in range(len(boxes))]),
        value_names=list(values),
        value_files=np.zeros(len(values), dtype=np.int64),
        value_begins=int(begins[-1]) + 10 * np.arange(len(values)),
        value_nbytes=np.full(len(values), 10),
        value_checksums=column([-1000 * rank - row for row in range(len(values))]),
        value_pickled=np.zeros(len(values), dtype=np.int64),
        notes={"rank": str(rank)},
    )


def row_box(begin: int, end: int) -> Box:
    return Box((begin,), (end,))


def chunks_of(manifest: Manifest, name: str) -> list[tuple[Any, ...]]:
    """(offsets, sizes, file, probe) of a tensor's chunks, in order."""
    row = list(manifest.tensor_names).index(name)
    dims = int(manifest.ndims[row])
    return [
        (
            tuple(manifest.chunk_offsets[chunk, :dims].tolist()),
            tuple(manifest.chunk_sizes[chunk, :dims].tolist()),
            manifest.files[int(manifest.chunk_files[chunk])],
            int(manifest.chunk_probes[chunk]),
        )
        for chunk in range(*manifest.chunk_starts[row : row + 2].tolist())
    ]


def test_chunks_of_several_ranks_become_one_tensor_in_order() -> None:
    second = part(1, [Held("w", (4,), [row_box(2, 4)])])
    first = part(0, [Held("w", (4,), [row_box(0, 2)])])
    for order in ([first, second], [second, first]):
        merged = merge_manifests(order, "here")
        assert list(merged.tensor_names) == ["w"]
        assert chunks_of(merged, "w") == [
            ((0,), (2,), "__0_0.safetensors", 0),
            ((2,), (2,), "__1_0.safetensors", 1000),
        ]


def test_of_a_chunk_that_several_ranks_hold_the_first_counts() -> None:
    held = Held("w", (4,), [row_box(0, 4)])
    merged = merge_manifests([part(rank, [held]) for rank in range(3)], "here")
    assert chunks_of(merged, "w") == [((0,), (4,), "__0_0.safetensors", 0)]


def test_of_a_value_that_several_ranks_hold_the_first_counts() -> None:
    merged = merge_manifests([part(0, [], ["a"]), part(1, [], ["b", "a"])], "here")
    assert list(merged.value_names) == ["a", "b"]
    assert [merged.files[i] for i in merged.value_files] == [
        "__0_0.safetensors",
        "__1_0.safetensors",
    ]
    assert merged.value_checksums.tolist() == [0, -1000]


def test_tensors_of_different_numbers_of_dimensions_share_the_widest_columns() -> None:
    cube = Box((0, 0, 0), (1, 2, 3))
    merged = merge_manifests(
        [part(0, [Held("a", (2,), [row_box(0, 2)])]), part(1, [Held("b", (1, 2, 3), [cube])])], ""
    )
    assert merged.shapes.tolist() == [[2, 1, 1], [1, 2, 3]]
    assert merged.chunk_offsets.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert merged.chunk_sizes.tolist() == [[2, 1, 1], [1, 2, 3]]


@pytest.mark.parametrize(
    "other",
    [
        Held("w", (5,), [row_box(4, 5)]),
        Held("w", (4, 1), [Box((0, 0), (4, 1))]),
        Held("w", (4,), [row_box(0, 4)], dtype=torch.uint8),
    ],
    ids=["shape", "dimensions", "dtype"],
)
def test_ranks_that_disagree_about_a_tensor_are_refused_by_name(other: Held) -> None:
    first = part(0, [Held("v", (1,)), Held("w", (4,), [row_box(0, 4)])])
    with pytest.raises(CorruptCheckpointError, match=r"here.*disagree.*'w'"):
        merge_manifests([first, part(1, [other])], "here")


def test_ranks_may_differ_in_how_a_tensor_was_made() -> None:
    held = Held("w", (4,), [row_box(0, 4)])
    one, other = part(0, [held]), part(1, [held])
    assert one.flags.tolist() != other.flags.tolist()
    assert merge_manifests([one, other], "here").flags.tolist() == one.flags.tolist()


def test_aliases_refer_to_the_same_names_after_merging() -> None:
    pair = [Held("a", (4,), [row_box(2, 4)]), Held("b", (4,), (), alias_of="a")]
    other = [Held("z", (1,), [row_box(0, 1)]), Held("a", (4,), [row_box(0, 2)])]
    merged = merge_manifests([part(0, other), part(1, pair)], "here")
    assert list(merged.tensor_names) == ["z", "a", "b"]
    assert merged.aliases.tolist() == [-1, -1, 1]


def test_a_name_that_only_some_ranks_know_to_be_tied_keeps_all_its_chunks() -> None:
    apart = [Held("a", (4,), [row_box(0, 2)]), Held("b", (4,), [row_box(0, 2)])]
    tied = [Held("a", (4,), [row_box(2, 4)]), Held("b", (4,), (), alias_of="a")]
    merged = merge_manifests([part(0, apart), part(1, tied)], "here")
    row = list(merged.tensor_names).index("b")
    alias = int(merged.aliases[row])
    source = "b" if alias < 0 else merged.tensor_names[alias]
    assert [chunk[:2] for chunk in chunks_of(merged, source)] == [((0,), (2,)), ((2,), (2,))]


def test_an_empty_chunk_does_not_hide_one_that_begins_at_the_same_place() -> None:
    empty = part(0, [Held("w", (4,), [row_box(0, 0)])])
    full = part(1, [Held("w", (4,), [row_box(0, 4)])])
    merged = merge_manifests([empty, full], "here")
    assert ((0,), (4,), "__1_0.safetensors", 1000) in chunks_of(merged, "w")


def test_a_name_that_is_a_tensor_on_one_rank_and_a_value_on_another_is_refused() -> None:
    parts = [part(0, [Held("w", (4,), [row_box(0, 4)])]), part(1, [], ["w"])]
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        merge_manifests(parts, "here")


def test_parts_without_anything_merge_into_nothing() -> None:
    merged = merge_manifests([part(0, []), part(1, [])], "here")
    assert len(merged.tensor_names) == len(merged.chunk_files) == len(merged.value_names) == 0
    assert merged.chunk_starts.tolist() == [0]


@settings(max_examples=100, deadline=None)
@given(st.lists(tilings(), min_size=1, max_size=3), st.data())
def test_any_spread_of_chunks_over_ranks_merges_into_all_of_them(
    tensors: list[Tiled], data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, 4))
    real = [[box for box in tensor.boxes if box.volume] for tensor in tensors]
    holders = [
        [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in boxes] for boxes in real
    ]
    parts = [
        part(
            rank,
            [
                Held(
                    f"t{number}",
                    tensor.shape,
                    sorted(b for b, who in zip(boxes, held, strict=True) if rank in who),
                )
                for number, (tensor, boxes, held) in enumerate(
                    zip(tensors, real, holders, strict=True)
                )
            ],
        )
        for rank in range(ranks)
    ]
    merged = merge_manifests(parts, "here")
    for number, (boxes, held) in enumerate(zip(real, holders, strict=True)):
        found = chunks_of(merged, f"t{number}")
        expected = sorted(
            (box.low, box.sizes, f"__{min(who)}_0.safetensors")
            for box, who in zip(boxes, held, strict=True)
        )
        assert [chunk[:3] for chunk in found] == expected


def test_paths_of_all_parts_are_kept_and_the_first_counts() -> None:
    one = b"N" + PathMap({"a.b": ("a", "b"), "c": ("c",)}).pack()
    other = b"N" + PathMap({"a.b": ("a.b",), "d.0": ("d", 0)}).pack()
    merged = merge_planner_data([one, other], "here")
    assert PathMap.unpack(merged[1:]) == {"a.b": ("a", "b"), "c": ("c",), "d.0": ("d", 0)}


def test_what_planners_of_users_kept_is_that_of_the_first_rank() -> None:
    assert merge_planner_data([b"Vfirst", b"N"], "here") == b"Vfirst"
