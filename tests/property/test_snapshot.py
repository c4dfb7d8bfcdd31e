"""Whatever lies in a state dict, and however its tensors lie in memory: the copy is the same."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from reshard.background.handover import pack, unpack
from reshard.rank_values import PerRank
from reshard.snapshots.pool import StagingPool
from reshard.snapshots.segments import map_segment

WIDE = [
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]
CAN_BE_NEGATED = {torch.float32, torch.float64, torch.complex64, torch.complex128}
BLOCKS = 3
BLOCK_BYTES = 96


@dataclass
class Bag:
    """An object that is not a tensor, and can be changed."""

    content: list[int] = field(default_factory=list)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class View:
    """How a tensor looks at a block of memory. Slices, transposes, overlaps: all are strides."""

    block: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    changes: frozenset[str]

    def of(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        tensor = blocks[self.block].view(self.dtype)
        tensor = tensor.as_strided(self.shape, self.stride, self.offset)
        if self.dtype.is_complex and "conj" in self.changes:
            tensor = tensor.conj()
        if self.dtype in CAN_BE_NEGATED and "neg" in self.changes:
            tensor = torch._neg_view(tensor)
        if self.dtype.is_complex and "imag" in self.changes:
            tensor = tensor.imag
        can_require_grad = self.dtype.is_floating_point or self.dtype.is_complex
        return tensor.requires_grad_(can_require_grad and "grad" in self.changes)


@st.composite
def views(draw: st.DrawFn) -> View:
    block = draw(st.integers(0, BLOCKS - 1))
    dtype = draw(st.sampled_from([torch.bool, *WIDE] if block == 0 else WIDE))
    left = BLOCK_BYTES // dtype.itemsize - 1
    offset = draw(st.integers(0, left))
    left -= offset
    shape, stride = [], []
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, 4))
        step = draw(st.integers(0, left // max(size - 1, 1)))
        left -= step * max(size - 1, 0)
        shape.append(size)
        stride.append(step)
    changes = draw(st.frozensets(st.sampled_from(["conj", "neg", "imag", "grad"])))
    return View(block, dtype, offset, tuple(shape), tuple(stride), changes)


LEAVES = st.one_of(
    views(),
    views(),
    st.sampled_from([None, True, 2**70, -1.5, "text", b"bytes", torch.bfloat16]),
    st.lists(st.integers(0, 9), max_size=2).map(Bag),
)
KEYS = st.sampled_from(["a", "b", "", 0, 1])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda content: defaultdict(list, content)),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(PerRank, inner, st.sampled_from(["error", "drop"])),
    )


FORMS = st.dictionaries(
    st.sampled_from("uvwxyz"), st.recursive(LEAVES, containers, max_leaves=5), max_size=5
)
"""State dicts with a `View` in the place of each tensor. Equal views become one tensor."""


def make_blocks(seed: int) -> list[torch.Tensor]:
    """In the first block there are only zeros and ones, so that it can be bool."""
    noise = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256 if i else 2, (BLOCK_BYTES,), generator=noise, dtype=torch.uint8)
        for i in range(BLOCKS)
    ]


def build(value: Any, made: dict[View, torch.Tensor], blocks: list[torch.Tensor]) -> Any:
    """A state dict of a form."""
    if isinstance(value, View):
        return made.setdefault(value, value.of(blocks))
    if isinstance(value, dict):
        twin = value.copy()
        twin.update({key: build(each, made, blocks) for key, each in value.items()})
        return twin
    if isinstance(value, Pair):
        return Pair(*(build(each, made, blocks) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(build(each, made, blocks) for each in value)
    if isinstance(value, PerRank):
        return PerRank(build(value.value, made, blocks), value.on_resize)
    return Bag(list(value.content)) if isinstance(value, Bag) else value


# What can be seen of tensors and state dicts


def addresses(tensor: torch.Tensor) -> set[int]:
    """Every byte that a tensor looks at."""
    if not tensor.numel():
        return set()
    elements = np.zeros(1, dtype=np.int64)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        steps = np.arange(size) * step * tensor.itemsize
        elements = np.unique(elements[:, None] + steps)
    every = elements[:, None] + np.arange(tensor.itemsize)
    return set((every + tensor.data_ptr()).ravel().tolist())


def content(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What there is to see of a tensor, bit for bit."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
    return tensor.shape, tensor.dtype, tensor.requires_grad, flat.view(torch.uint8).tolist()


def leaves_of(value: Any) -> list[tuple[Any, Any]]:
    """The leaves of nested containers, each with the containers and the keys above it."""
    if isinstance(value, dict):
        inner: list[tuple[Any, Any]] = list(value.items())
        kind: Any = (type(value), getattr(value, "default_factory", None), tuple(value))
    elif isinstance(value, list | tuple):
        inner, kind = list(enumerate(value)), (type(value), len(value))
    elif isinstance(value, PerRank):
        inner, kind = [("value", value.value)], (PerRank, value.on_resize)
    else:
        return [((), value)]
    found = [((kind,), None)]
    for key, each in inner:
        found += [((kind, key, *above), leaf) for above, leaf in leaves_of(each)]
    return found


def look(value: Any) -> Any:
    """Everything that can be seen of a leaf, without the leaf itself."""
    if isinstance(value, torch.Tensor):
        return (type(value), *content(value))
    return list(value.content) if isinstance(value, Bag) else value


def identities(value: Any) -> list[Any]:
    """Which objects a state dict consists of, and how its tensors look at their memory."""
    found: list[Any] = [id(value)]
    if isinstance(value, dict):
        for key, each in value.items():
            found += [key, *identities(each)]
    elif isinstance(value, list | tuple):
        for each in value:
            found += identities(each)
    elif isinstance(value, PerRank):
        found += identities(value.value)
    elif isinstance(value, torch.Tensor):
        found += [value.data_ptr(), value.shape, value.stride(), value._version, value.is_leaf]
        found += [value.requires_grad, value.grad, value.is_conj(), value.is_neg()]
    return found


def ruin(state_dict: dict[str, Any], blocks: list[torch.Tensor]) -> None:
    """Change everything that training could change."""
    for block in blocks:
        block.bitwise_not_()
    for _, leaf in leaves_of(state_dict):
        if isinstance(leaf, Bag):
            leaf.content.append(-1)
    state_dict.clear()


@contextlib.contextmanager
def new_pool() -> Iterator[StagingPool]:
    pool = StagingPool()
    yield pool
    for buffer in [*pool._busy]:
        pool.release(buffer)
    pool.close()


def tensors_of(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves_of(state_dict) if isinstance(leaf, torch.Tensor)]


@settings(max_examples=250, deadline=None)
@given(FORMS, st.integers(0, 99))
def test_a_staged_copy_is_equal_and_shares_memory_as_the_original_does(
    form: dict[str, Any], seed: int
) -> None:
    blocks = make_blocks(seed)
    state_dict = build(form, {}, blocks)
    before = identities(state_dict), [block.tolist() for block in blocks]
    places = [above for above, _ in leaves_of(state_dict)]
    looks = [look(leaf) for _, leaf in leaves_of(state_dict)]
    originals = tensors_of(state_dict)
    with new_pool() as pool:
        staged = pool.stage(state_dict)

        assert (identities(state_dict), [block.tolist() for block in blocks]) == before
        ruin(state_dict, blocks)
        copies = leaves_of(dict(staged))
        assert [above for above, _ in copies] == places
        assert [look(leaf) for _, leaf in copies] == looks
        twins = tensors_of(dict(staged))
        assert all(twin.is_leaf for twin in twins)
        were, are = [*map(addresses, originals)], [*map(addresses, twins)]
        for i, j in itertools.combinations(range(len(twins)), 2):
            shared = bool(were[i] & were[j])
            event(f"shared memory: {shared}")
            assert bool(are[i] & are[j]) == shared
            if shared:
                apart = originals[j].data_ptr() - originals[i].data_ptr()
                assert twins[j].data_ptr() - twins[i].data_ptr() == apart
                assert twins[j].stride() == originals[j].stride()
        begin = staged.segment.memory.data_ptr()
        inside = range(begin, begin + staged.segment.nbytes)
        assert all(place in inside for each in are for place in each)


@settings(max_examples=100, deadline=None)
@given(FORMS, st.integers(0, 99))
def test_a_later_copy_of_the_same_form_lies_in_the_same_memory(
    form: dict[str, Any], seed: int
) -> None:
    blocks = make_blocks(seed)
    state_dict = build(form, {}, blocks)
    with new_pool() as pool:
        first = pool.stage(state_dict)
        number = first.segment.number
        lay = [tensor.data_ptr() for tensor in tensors_of(dict(first))]
        first.release()
        for block, other in zip(blocks, make_blocks(seed + 1), strict=True):
            block.copy_(other)
        looks = [look(leaf) for _, leaf in leaves_of(state_dict)]

        second = pool.stage(state_dict)

        assert second.segment.number == number
        assert [tensor.data_ptr() for tensor in tensors_of(dict(second))] == lay
        assert [look(leaf) for _, leaf in leaves_of(dict(second))] == looks


@settings(max_examples=100, deadline=None)
@given(FORMS, st.integers(0, 99))
def test_a_copy_that_is_handed_over_is_equal_and_lies_where_it_was(
    form: dict[str, Any], seed: int
) -> None:
    state_dict = build(form, {}, make_blocks(seed))
    with new_pool() as pool:
        staged = pool.stage(state_dict)
        segment = staged.segment
        payload = pack(dict(staged), segment.memory)
        memory = map_segment(segment.descriptor, segment.nbytes)

        received = unpack(payload, memory, lambda: None)

        sent = leaves_of(dict(staged))
        assert [above for above, _ in leaves_of(received)] == [above for above, _ in sent]
        assert [look(leaf) for _, leaf in leaves_of(received)] == [look(leaf) for _, leaf in sent]
        apart = memory.data_ptr() - segment.memory.data_ptr()
        for mine, theirs in zip(tensors_of(dict(staged)), tensors_of(received), strict=True):
            assert {place + apart for place in addresses(mine)} == addresses(theirs)
