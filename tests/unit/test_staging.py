"""reshard.staging: memory for copies, used again and again, and never twice at once."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reshard.snapshots.pool
import reshard.snapshots.segments
from reshard.api import UnsupportedLayoutError
from reshard.snapshots.pool import Buffer, Staged, StagingPool
from reshard.snapshots.segments import Segment, map_segment
from reshard.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions

SMALL = {"w": torch.arange(4.0)}
LARGE = {"w": torch.arange(1 << 20, dtype=torch.float32)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the segments that were made, in order."""
    sizes: list[int] = []

    class Noted(Segment):
        def __init__(self, nbytes: int, pinned: bool = False) -> None:
            sizes.append(nbytes)
            super().__init__(nbytes, pinned)

    monkeypatch.setattr(reshard.snapshots.pool, "Segment", Noted)
    return sizes


def open_segments() -> int:
    """How many segments this process has a descriptor of."""
    gc.collect()
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:reshard-staging" in os.readlink(link):
                found.add(link.stat().st_ino)
    return len(found)


def mapped_bytes() -> int:
    """How much staging memory this process has mapped, whoever holds it."""
    gc.collect()
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:reshard-staging" in line:
            begin, end = line.split()[0].split("-")
            found += int(end, 16) - int(begin, 16)
    return found


def plus(state_dict: dict[str, Any], amount: float) -> dict[str, Any]:
    return {key: value + amount for key, value in state_dict.items()}


# The pool


def test_state_dicts_of_one_form_use_the_same_memory(pool: StagingPool, made: list[int]) -> None:
    first = pool.stage(SMALL)
    place = first["w"].data_ptr(), first.segment.number, first.lease.buffer.layout
    first.release()
    second = pool.stage(plus(SMALL, 5))
    assert (second["w"].data_ptr(), second.segment.number, second.lease.buffer.layout) == place
    assert second["w"].tolist() == [5, 6, 7, 8]
    assert len(made) == 1


def test_a_larger_state_dict_gets_larger_memory_and_the_old_is_freed(pool: StagingPool) -> None:
    before, opened = mapped_bytes(), open_segments()
    staged = pool.stage(SMALL)
    old = staged.segment.number
    staged.release()
    del staged
    staged = pool.stage(LARGE)
    assert torch.equal(staged["w"], LARGE["w"])
    assert pool.nbytes == LARGE["w"].nbytes
    assert mapped_bytes() - before == LARGE["w"].nbytes
    assert open_segments() - opened == 1
    assert pool.segment_numbers() == {staged.segment.number}
    assert old not in pool.segment_numbers()


def test_a_smaller_state_dict_uses_what_is_there(pool: StagingPool, made: list[int]) -> None:
    for state_dict in (LARGE, SMALL, LARGE, SMALL, {}):
        staged = pool.stage(state_dict)
        assert all(torch.equal(staged[key], state_dict[key]) for key in state_dict)
        staged.release()
    assert made == [LARGE["w"].nbytes]


def test_memory_that_is_in_use_is_not_handed_out(pool: StagingPool) -> None:
    staged = [pool.stage(plus(SMALL, i)) for i in range(5)]
    assert len({each.segment.number for each in staged}) == 5
    assert [each["w"][0].item() for each in staged] == [0, 1, 2, 3, 4]


def test_of_idle_buffers_the_one_of_the_same_form_is_taken(
    pool: StagingPool, made: list[int]
) -> None:
    for staged in [pool.stage(SMALL), pool.stage(LARGE)]:
        staged.release()
    assert len(made) == 2
    staged = pool.stage(LARGE)
    assert len(made) == 2
    assert staged.segment.nbytes == LARGE["w"].nbytes


def test_of_idle_buffers_one_that_is_large_enough_is_taken(
    pool: StagingPool, made: list[int]
) -> None:
    for staged in [pool.stage(SMALL), pool.stage(LARGE)]:
        staged.release()
    pool.stage({"w": LARGE["w"][1:]})
    assert len(made) == 2


def test_to_release_twice_does_not_free_two_buffers(pool: StagingPool) -> None:
    staged = pool.stage(SMALL)
    staged.release()
    staged.release()
    one, two = pool.stage(SMALL), pool.stage(SMALL)
    assert one.lease.buffer is not two.lease.buffer


def test_to_release_twice_does_not_free_the_buffer_of_the_next(pool: StagingPool) -> None:
    first = pool.stage(SMALL)
    first.release()
    second = pool.stage(plus(SMALL, 5))
    first.release()
    pool.stage(plus(SMALL, 9))
    assert second["w"].tolist() == [5, 6, 7, 8]


def test_threads_that_stage_at_once_never_share_memory(pool: StagingPool) -> None:
    start = threading.Barrier(4)

    def work(number: int) -> bool:
        start.wait(30)
        same = True
        for step in range(50):
            # Forms of three sizes, so that buffers grow and change hands.
            state_dict = {"w": torch.full((1000 << step % 3,), float(number))}
            staged = pool.stage(state_dict)
            same &= bool((staged["w"] == number).all())
            staged.release()
        return same

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert len(pool.segment_numbers()) <= 4


class Unwilling:
    def __deepcopy__(self, memo: Any) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("obstacle", "error"),
    [(threading.Lock(), UnsupportedLayoutError), (Unwilling(), KeyboardInterrupt)],
)
def test_memory_comes_back_when_staging_fails(
    pool: StagingPool, made: list[int], obstacle: Any, error: type[BaseException]
) -> None:
    pool.stage(SMALL).release()
    for _ in range(3):
        with pytest.raises(error):
            pool.stage({**SMALL, "obstacle": obstacle})
    staged = pool.stage(plus(SMALL, 1))
    assert staged["w"].tolist() == [1, 2, 3, 4]
    assert len(made) == 1


def test_memory_that_cannot_be_had_leaves_the_pool_usable(pool: StagingPool) -> None:
    pool.stage(SMALL).release()
    opened = open_segments()
    with pytest.raises(MemoryError, match="GiB of memory to stage a save"):
        pool.stage({"w": torch.zeros(1).expand(2**50)})
    assert open_segments() < opened
    assert pool.nbytes == 0
    assert pool.stage(SMALL)["w"].tolist() == [0, 1, 2, 3]


def test_more_memory_than_can_be_named_is_refused_without_a_leak(pool: StagingPool) -> None:
    opened = open_segments()
    with pytest.raises((MemoryError, OverflowError)) as caught:
        pool.stage({"w": torch.zeros(1).expand(2**61)})
    assert open_segments() == opened
    assert caught.type is MemoryError


def test_after_a_prewarm_staging_takes_no_memory(pool: StagingPool, made: list[int]) -> None:
    pool.prewarm(LARGE)
    assert pool.nbytes == LARGE["w"].nbytes
    opened, mapped = open_segments(), mapped_bytes()
    staged = pool.stage(plus(LARGE, 1))
    assert torch.equal(staged["w"], LARGE["w"] + 1)
    assert (len(made), open_segments(), mapped_bytes()) == (1, opened, mapped)


def test_closing_frees_what_is_idle_and_leaves_what_is_in_use(pool: StagingPool) -> None:
    before, opened = mapped_bytes(), open_segments()
    used, idle = pool.stage(SMALL), pool.stage(LARGE)
    idle.release()
    idle.clear()
    pool.close()
    assert pool.segment_numbers() == {used.segment.number}
    assert open_segments() - opened == 1
    assert mapped_bytes() - before < LARGE["w"].nbytes
    assert used["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="was given back"):
        _ = idle.segment
    used.release()
    used.clear()
    pool.close()
    assert (pool.nbytes, open_segments(), mapped_bytes()) == (0, opened, before)
    assert pool.stage(SMALL)["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("state_dict", [{}, {"step": 3, "names": ["a"]}, {"w": torch.ones(0, 3)}])
def test_a_state_dict_without_data_is_staged(pool: StagingPool, state_dict: dict[str, Any]) -> None:
    staged = pool.stage(state_dict)
    assert str(dict(staged)) == str(state_dict)
    assert staged.segment.nbytes > 0
    staged.release()
    assert pool.stage(state_dict).lease.buffer is staged.lease.buffer


def test_nothing_that_is_asked_of_a_copy_stays_for_the_next(pool: StagingPool) -> None:
    weight = torch.ones(3)
    staged = pool.stage({"w": weight})
    staged["w"].requires_grad_().sum().backward()
    staged.release()
    again = pool.stage({"w": weight})["w"]
    assert (again.requires_grad, again.grad) == (False, None)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_does_not_matter(pool: StagingPool, device: str) -> None:
    weight = torch.ones(3)
    with torch.device(device):
        staged = pool.stage({"w": weight, "tied": weight[1:], "other": weight.clone()})
    assert [value.device.type for value in staged.values()] == ["cpu"] * 3


def test_memory_that_was_taken_in_inference_mode_can_be_used_outside_of_it(
    pool: StagingPool,
) -> None:
    with torch.inference_mode():
        pool.stage(SMALL).release()
    assert pool.stage(plus(SMALL, 1))["w"].tolist() == [1, 2, 3, 4]


def test_a_forked_child_does_not_write_into_the_memory_of_its_parent(pool: StagingPool) -> None:
    pool.prewarm(SMALL)
    go, come = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        pool.stage(plus(SMALL, 9))
        os._exit(0)
    staged = pool.stage(SMALL)
    os.write(come, b"!")
    assert os.waitpid(child, 0)[1] == 0
    assert staged["w"].tolist() == [0, 1, 2, 3]


def test_the_pool_can_be_measured_while_a_buffer_grows(pool: StagingPool) -> None:
    segment = Segment(1)
    looks = iter([segment])

    class Growing(Buffer):
        """Its segment is freed right after somebody has looked whether it is there."""

        segment = property(lambda self: next(looks, None), lambda self, segment: None)

    pool.stage(SMALL)
    pool._busy.append(Growing())
    try:
        assert pool.nbytes > 0
    finally:
        segment.close()


# Segments


def test_a_segment_is_seen_through_every_mapping_of_it() -> None:
    segment = Segment(100)
    other = map_segment(segment.descriptor, segment.nbytes)
    segment.memory.fill_(7)
    assert other.tolist() == [7] * 100
    segment.close()
    segment.close()
    assert other.tolist() == [7] * 100


class Runtime:
    """Stands in for the CUDA runtime; notes what is registered."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.mark.parametrize(("code", "names"), [(0, ["register", "unregister"]), (2, ["register"])])
def test_pinned_memory_is_registered_and_unregistered(
    monkeypatch: pytest.MonkeyPatch, code: int, names: list[str]
) -> None:
    runtime = Runtime(code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    segment = Segment(100, pinned=True)
    address = segment.memory.data_ptr()
    segment.close()
    assert runtime.calls == [(name, address) for name in names]


class Elsewhere(torch.Tensor):
    """Says that it is on the second of several accelerators, in want of one."""

    device = property(lambda self: torch.device("cuda", 1))


class Streams:
    """Stands in for torch.accelerator; notes what is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[torch.device | None] = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.accelerator, "synchronize", self.waited.append)

    def current_stream(self, device: torch.device | None = None) -> Any:
        return SimpleNamespace(synchronize=lambda: self.waited.append(device))


def test_copies_that_do_not_block_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, pool: StagingPool
) -> None:
    streams = Streams(monkeypatch)
    state_dict = {"w": torch.ones(2).as_subclass(Elsewhere)}
    pool.stage(state_dict, non_blocking=False)
    assert not streams.waited
    pool.stage(state_dict, non_blocking=True)
    assert streams.waited


def test_copies_are_waited_for_on_the_device_that_they_come_from(
    monkeypatch: pytest.MonkeyPatch, pool: StagingPool
) -> None:
    streams = Streams(monkeypatch)
    pool.stage({"w": torch.ones(2).as_subclass(Elsewhere)}, non_blocking=True)
    assert torch.device("cuda", 1) in streams.waited


# Stagers


def test_a_stager_that_defines_nothing_says_so() -> None:
    class Empty(AsyncStager):
        pass

    assert Empty().should_synchronize_after_execute
    with pytest.raises(NotImplementedError, match="Empty has no stage method"):
        Empty().stage({})
    assert isinstance(DefaultStager(), AsyncStager)
    assert not DefaultStager().should_synchronize_after_execute


@pytest.mark.usefixtures("process_pool")
def test_the_default_stager_copies_in_a_thread() -> None:
    stager = DefaultStager()
    here = threading.get_ident()
    threads = []

    class Witness:
        def __deepcopy__(self, memo: Any) -> Witness:
            threads.append(threading.get_ident())
            return self

    future = stager.stage({**SMALL, "witness": Witness()})
    assert isinstance(future, Future)
    stager.synchronize_staging()
    assert future.done()
    assert future.result()["w"].tolist() == [0, 1, 2, 3]
    assert here not in threads
    stager.close()
    stager.close()


@pytest.mark.parametrize(
    "make", [BlockingAsyncStager, lambda: DefaultStager(StagingOptions(use_async_staging=False))]
)
@pytest.mark.usefixtures("process_pool")
def test_a_stager_that_blocks_returns_the_copy(make: Any) -> None:
    stager = make()
    staged = stager.stage(SMALL)
    assert isinstance(staged, Staged)
    stager.synchronize_staging()
    stager.close()


def test_a_stager_gives_its_last_copy_back_when_the_next_is_made(process_pool: StagingPool) -> None:
    stager = BlockingAsyncStager()
    first = stager.stage(SMALL).lease
    assert stager.stage(SMALL).lease.buffer is first.buffer
    stager.close()
    other = DefaultStager()
    assert other.stage(SMALL).result().lease.buffer is first.buffer
    assert other.stage(SMALL).result().lease.buffer is first.buffer
    assert len(process_pool.segment_numbers()) == 1


@pytest.mark.usefixtures("process_pool")
def test_a_copy_that_somebody_keeps_stays() -> None:
    stager = BlockingAsyncStager()
    first = stager.stage(SMALL)
    first.lease.keep()
    second = stager.stage(plus(SMALL, 5)).lease
    stager.close()
    assert first["w"].tolist() == [0, 1, 2, 3]
    first.release()
    assert stager.stage(plus(SMALL, 9)).lease.buffer in (first.lease.buffer, second.buffer)


def test_a_failure_to_stage_is_told_by_the_future(process_pool: StagingPool) -> None:
    stager = DefaultStager()
    future = stager.stage({"lock": threading.Lock(), **SMALL})
    with pytest.raises(UnsupportedLayoutError, match="'lock' is a lock"):
        stager.synchronize_staging()
    assert isinstance(future.exception(), UnsupportedLayoutError)
    assert stager.stage(SMALL).result()["w"].tolist() == [0, 1, 2, 3]
    stager.close()
    assert len(process_pool.segment_numbers()) == 1


def test_to_ask_for_type_checks_has_no_effect_and_says_so() -> None:
    with pytest.warns(UserWarning, match="type_check has no effect"):
        BlockingAsyncStager(type_check=True)


OPTIONS = ["use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy"]


@pytest.mark.parametrize("bits", range(16))
def test_every_combination_of_options_works_without_a_device(bits: int) -> None:
    chosen = {name: bool(bits >> place & 1) for place, name in enumerate(OPTIONS)}
    stager = DefaultStager(StagingOptions(**chosen))
    original = {"w": torch.ones(3), "list": [1, 2]}
    staged: Any = stager.stage(original)
    assert isinstance(staged, Future) == chosen["use_async_staging"]
    copied = staged.result() if isinstance(staged, Future) else staged
    original["w"].zero_()
    original["list"].append(3)
    assert (copied["w"].tolist(), copied["list"]) == ([1, 1, 1], [1, 2])
    stager.close()


def test_pages_are_allocated_also_where_the_kernel_has_no_advice_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reshard.snapshots.segments, "_MADV_POPULATE_WRITE", 9999)
    segment = Segment(1 << 20)
    # A file has the blocks that were written to.
    assert os.fstat(segment.descriptor).st_blocks * 512 == 1 << 20
    segment.close()
