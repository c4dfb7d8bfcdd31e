"""Fingerprints do not depend on the layout, and tell tensors apart that differ."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from reshard.format import word_sums
from reshard.format.fingerprint import RegionFingerprint, fingerprint

# The backend is the same for all examples of a test.
MANY = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
MASK = (1 << 64) - 1
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16,
    torch.float16, torch.int16, torch.uint16, torch.complex32, torch.float32, torch.int32,
    torch.uint32, torch.float64, torch.int64, torch.uint64, torch.complex64, torch.complex128,
]  # fmt: skip
GOLDEN = (9844162906996350532, 3567069350416112208)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


@pytest.fixture(params=["numpy", "numba"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
        chosen: word_sums.WordSummer = word_sums.choose_summer(1 << 40)
        assert isinstance(chosen, word_sums.NumbaSummer)
    else:
        monkeypatch.setattr(word_sums, "_numba_kernel", functools.cache(lambda: None))
    return str(request.param)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    bits = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=bits).bool()
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=bits)
    return flat.view(dtype).reshape(tuple(shape))


def whole(tensor: torch.Tensor) -> tuple[int, int]:
    first, second = fingerprint(tensor, tensor.shape, [0] * tensor.dim())
    return int(first), int(second)


# The definition, as docs/design/fingerprints.md puts it, one byte at a time.


def mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def weight(stream: int, number: int) -> int:
    return mixed((mixed(stream) + (number + 1) * 0x9E3779B97F4A7C15) & MASK)


def by_definition(tensor: torch.Tensor) -> tuple[int, int]:
    itemsize, shape = tensor.dtype.itemsize, list(tensor.shape)
    columns = 1
    while shape and columns * itemsize < 512:
        columns *= shape.pop()
    row_bytes = columns * itemsize
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    blocks = -(-row_bytes // 8192)
    sums = [0, 0]
    for row in range(math.prod(shape)):
        line = data[row * row_bytes : (row + 1) * row_bytes]
        for block in range(blocks):
            forward = backward = 0
            content = line[block * 8192 : (block + 1) * 8192]
            for column in range(-(-len(content) // 8)):
                word = content[column * 8 : column * 8 + 8].ljust(8, b"\0")
                forward += weight(1, column) * int.from_bytes(word, "little")
                backward += weight(2, column) * int.from_bytes(word, "big")
            number = row * blocks + block
            for i in range(2):
                sums[i] += (
                    weight(3 + 2 * i, number) * forward + weight(4 + 2 * i, number) * backward
                )
    return sums[0] & MASK, sums[1] & MASK


shapes = st.lists(st.integers(1, 40), min_size=0, max_size=4).filter(lambda s: math.prod(s) < 4000)


@MANY
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32))
@example(shape=[3, 700], dtype=torch.complex128, seed=1)
@example(shape=[2, 5001], dtype=torch.bfloat16, seed=1)
@example(shape=[9001], dtype=torch.uint8, seed=1)
@example(shape=[3000, 3], dtype=torch.float32, seed=1)
def test_both_backends_follow_the_definition(
    backend: str, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    tensor = random_tensor(shape, dtype, seed)
    assert whole(tensor) == by_definition(tensor)


Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """Cut a box in two, anywhere, again and again."""
    boxes: list[Box] = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not sizes:
            return [(offsets, sizes)]
        dimension = draw(st.integers(0, len(sizes) - 1))
        cut = draw(st.integers(0, sizes[dimension]))
        for begin, end in ((0, cut), (cut, sizes[dimension])):
            at, size = list(offsets), list(sizes)
            at[dimension] += begin
            size[dimension] = end - begin
            boxes.append((tuple(at), tuple(size)))
    return boxes


wide_shapes = st.one_of(
    shapes,
    st.tuples(st.integers(1, 9), st.integers(200, 9000)).map(list),
    st.tuples(st.integers(200, 9000), st.integers(1, 9)).map(list),
    st.tuples(st.integers(1, 20), st.integers(1, 60), st.integers(1, 4), st.integers(1, 4)).map(
        list
    ),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(100, 700)).map(list),
    st.tuples(st.integers(1, 100_000)).map(list),
)


@MANY
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=wide_shapes)
def test_the_parts_of_any_boxes_add_up(
    backend: str, data: st.DataObject, dtype: torch.dtype, shape: list[int]
) -> None:
    tensor = random_tensor(shape, dtype, 7)
    total = np.zeros(2, dtype=np.uint64)
    for offsets, sizes in data.draw(tilings(shape)):
        region = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        if data.draw(st.booleans()):
            region = region.contiguous()
        part = fingerprint(region, shape, offsets)
        assert region.numel() or not part.any()
        total += part
    assert (int(total[0]), int(total[1])) == whole(tensor)


@MANY
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=wide_shapes)
def test_a_region_in_pieces_is_the_region_at_once(
    backend: str, data: st.DataObject, dtype: torch.dtype, shape: list[int]
) -> None:
    offsets = [data.draw(st.integers(0, 5)) for _ in shape]
    extents = [
        size + offset + data.draw(st.integers(0, 5))
        for size, offset in zip(shape, offsets, strict=True)
    ]
    region = random_tensor(shape, dtype, 7)
    parts = RegionFingerprint(dtype.itemsize, extents, offsets, shape)
    flat = region.reshape(-1).view(torch.uint8).numpy()
    count = region.numel()
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    for begin, end in zip([0, *cuts], [*cuts, count], strict=True):
        parts.update(flat[begin * dtype.itemsize : end * dtype.itemsize].tobytes())
    assert parts.sums().tolist() == fingerprint(region, extents, offsets).tolist()


@MANY
@given(
    rows=st.integers(1, 70), columns=st.integers(1, 70), dtype=st.sampled_from(DTYPES),
    step=st.integers(1, 3),
)  # fmt: skip
def test_strides_do_not_matter(
    backend: str, rows: int, columns: int, dtype: torch.dtype, step: int
) -> None:
    tensor = random_tensor((rows, columns, step), dtype, 3)
    flat = tensor[..., 0]
    for view in (flat, flat.t(), tensor.transpose(0, 1), tensor[1:], tensor.permute(2, 1, 0)):
        assert whole(view) == whole(view.contiguous())


def test_conjugate_and_negative_views_count_as_what_they_show() -> None:
    tensor = torch.randn(40, 40, dtype=torch.complex64)
    assert whole(tensor.conj()) == whole(tensor.conj().resolve_conj().clone())
    assert whole(tensor.conj().imag) == whole(tensor.conj().imag.resolve_neg().clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 700), ()])
def test_an_empty_region_counts_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape, dtype=dtype)
    assert whole(zeros) == (0, 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_tensors_give_the_same_with_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensor = torch.arange(3_000_000, dtype=torch.int32).reshape(1000, 3000)
        # Worked out once: the numbers are part of the format.
        assert whole(tensor) == GOLDEN
    finally:
        torch.set_num_threads(before)


# Strength


@st.composite
def originals(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(
        st.one_of(
            st.tuples(st.integers(2, 40), st.integers(2, 40)),
            st.tuples(st.integers(2, 5), st.integers(200, 3000)),
            st.tuples(st.integers(200, 3000), st.integers(2, 5)),
        )
    )
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8]))
    return random_tensor(shape, dtype, draw(st.integers(0, 2**32)))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def assert_told_apart(one: torch.Tensor, other: torch.Tensor) -> None:
    if torch.equal(bits_of(one), bits_of(other)):
        return
    first, second = whole(one), whole(other)
    # Either sum alone is enough in practice, so that a weakness of one does not hide.
    assert first[0] != second[0]
    assert first[1] != second[1]


@MANY
@given(tensor=originals(), data=st.data())
def test_swapped_elements_are_found(tensor: torch.Tensor, data: st.DataObject) -> None:
    i, j = (data.draw(st.integers(0, tensor.numel() - 1)) for _ in range(2))
    other = tensor.clone().reshape(-1)
    other[[i, j]] = other[[j, i]]
    assert_told_apart(tensor, other.reshape(tensor.shape))


@MANY
@given(tensor=originals(), dimension=st.integers(0, 1), data=st.data())
def test_swapped_rows_and_columns_are_found(
    tensor: torch.Tensor, dimension: int, data: st.DataObject
) -> None:
    order = torch.arange(tensor.shape[dimension])
    i, j = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
    order[[i, j]] = order[[j, i]]
    assert_told_apart(tensor, tensor.index_select(dimension, order))


@MANY
@given(tensor=originals(), seed=st.integers(0, 2**32), dimension=st.sampled_from([0, 1, None]))
def test_permutations_are_found(tensor: torch.Tensor, seed: int, dimension: int | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    if dimension is None:
        order = torch.randperm(tensor.numel(), generator=generator)
        other = tensor.reshape(-1)[order].reshape(tensor.shape)
    else:
        order = torch.randperm(tensor.shape[dimension], generator=generator)
        other = tensor.index_select(dimension, order)
    assert_told_apart(tensor, other)


@MANY
@given(size=st.integers(2, 60), dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int64]))
def test_transposed_squares_are_found(size: int, dtype: torch.dtype) -> None:
    tensor = random_tensor((size, size), dtype, size)
    assert_told_apart(tensor, tensor.t())
    assert_told_apart(tensor, tensor.flip(0))
    assert_told_apart(tensor, tensor.flip(1))


@MANY
@given(tensor=originals(), data=st.data())
def test_zeroed_blocks_are_found(tensor: torch.Tensor, data: st.DataObject) -> None:
    other = tensor.clone()
    spans = []
    for extent in tensor.shape:
        begin = data.draw(st.integers(0, extent - 1))
        spans.append(slice(begin, data.draw(st.integers(begin + 1, extent))))
    bits_of(other)[tuple(spans)] = 0
    assert_told_apart(tensor, other)


@MANY
@given(tensor=originals(), dimension=st.integers(0, 1), data=st.data())
def test_shifted_and_rotated_rows_are_found(
    tensor: torch.Tensor, dimension: int, data: st.DataObject
) -> None:
    by = data.draw(st.integers(1, tensor.shape[dimension] - 1))
    rotated = bits_of(tensor).roll(by, dimension)
    assert_told_apart(bits_of(tensor), rotated)
    shifted = rotated.clone()
    shifted.narrow(dimension, 0, by).zero_()
    assert_told_apart(bits_of(tensor), shifted)
    one = bits_of(tensor).clone()
    one[0] = one[0].roll(1)
    assert_told_apart(bits_of(tensor), one)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 300), (301, 3), (1000,)])
def test_a_flip_of_any_bit_is_found(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = bits_of(random_tensor(shape, dtype, 5))
    for bit in range(8 * dtype.itemsize):
        mask = torch.zeros(dtype.itemsize, dtype=torch.uint8)
        mask[bit // 8] = 1 << (bit % 8)
        for at in (0, 1, 2, 3, 299, tensor.numel() - 1):
            other = tensor.clone()
            other.view(-1)[at] ^= mask.view(tensor.dtype)[0]
            assert not torch.equal(tensor, other)
            assert_told_apart(tensor, other)


@MANY
@given(tensor=originals(), bit=st.integers(0, 63), data=st.data())
def test_the_same_bit_flipped_in_two_elements_is_found(
    tensor: torch.Tensor, bit: int, data: st.DataObject
) -> None:
    i, j = (data.draw(st.integers(0, tensor.numel() - 1)) for _ in range(2))
    assume(i != j)
    itemsize = tensor.dtype.itemsize
    mask = torch.zeros(itemsize, dtype=torch.uint8)
    mask[bit // 8 % itemsize] = 1 << (bit % 8)
    other = bits_of(tensor).clone()
    for at in (i, j):
        other.view(-1)[at] ^= mask.view(other.dtype)[0]
    assert_told_apart(bits_of(tensor), other)


@MANY
@given(tensor=originals())
def test_negated_tensors_are_found(tensor: torch.Tensor) -> None:
    assert_told_apart(tensor, -tensor)
    zeros = torch.zeros_like(tensor)
    if tensor.dtype.is_floating_point:
        assert_told_apart(zeros, -zeros)


@MANY
@given(tensor=originals(), data=st.data())
def test_elements_exchanged_between_tensors_are_found(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    one, other = bits_of(tensor).clone(), bits_of(tensor).flip(0).clone()
    i = data.draw(st.integers(0, tensor.numel() - 1))
    assume(one.view(-1)[i] != other.view(-1)[i])
    new_one, new_other = one.clone(), other.clone()
    new_one.view(-1)[i], new_other.view(-1)[i] = other.view(-1)[i], one.view(-1)[i]
    assert_told_apart(one, new_one)
    assert_told_apart(other, new_other)


def test_no_two_of_many_sign_flips_collide() -> None:
    """The top bits are where sums modulo 2**64 are weakest."""
    flat = torch.zeros(4096, dtype=torch.int16)
    seen = {whole(flat)}
    for i in range(0, 4096, 7):
        for j in range(i + 1, min(i + 40, 4096), 13):
            other = flat.clone()
            other[i] = other[j] = -(2**15)
            seen.add(whole(other))
    assert len(seen) == 1 + sum(len(range(i + 1, min(i + 40, 4096), 13)) for i in range(0, 4096, 7))
