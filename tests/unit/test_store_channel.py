"""reshard.coordination.store_channel: exchanges and decisions, with threads for ranks."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from reshard.api import CheckpointException, RankLostError
from reshard.coordination import store_channel
from reshard.coordination.rendezvous import GroupStore, Rendezvous, RendezvousThread
from reshard.coordination.store_channel import StoreChannel

STORES: dict[str, Callable[[], Any]] = {
    "hash": dist.HashStore,
    "file": lambda: dist.FileStore(tempfile.mktemp(), 3),
    "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}
stores = pytest.mark.parametrize("store", list(STORES))


def on_ranks(
    count: int, work: Callable[[StoreChannel], Any], kind: str = "hash", seconds: float = 30.0
) -> list[Any]:
    """What `work` returns or raises on each rank, within its channel."""
    store = STORES[kind]()
    keys = 0 if kind == "file" else store.num_keys()

    def be_rank(rank: int) -> Any:
        thread = RendezvousThread(GroupStore(store), seconds)
        try:
            with StoreChannel(
                thread, "operation", rank, world_size=count, timeout_seconds=seconds, origin=store
            ) as channel:
                return work(channel)
        except Exception as error:  # noqa: BLE001 - for the test to look at
            return error

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(be_rank, range(count)))
    if kind != "file":
        left = store.num_keys() - keys
        assert left == 0 or any(isinstance(each, Exception) for each in outcomes)
    return outcomes


@stores
def test_each_rank_gets_its_own_answer(store: str) -> None:
    def work(channel: StoreChannel) -> list[bytes]:
        return [
            channel.gather_scatter(
                "add",
                lambda: bytes([channel.rank]),
                lambda messages: [message + b"!" for message in messages],
            )
            for _ in range(3)
        ]

    assert on_ranks(3, work, store) == [[bytes([rank]) + b"!"] * 3 for rank in range(3)]


@stores
def test_messages_and_answers_of_any_length_arrive(store: str) -> None:
    def work(channel: StoreChannel) -> tuple[int, int]:
        message = bytes([channel.rank]) * (5 << 20)
        common = channel.gather_scatter(
            "join", lambda: message, lambda messages: [b"".join(messages)] * len(messages)
        )
        own = channel.gather_scatter("same", lambda: message, lambda messages: messages)
        return len(common), own == message

    assert on_ranks(2, work, store) == [(10 << 20, True)] * 2


def test_a_count_that_is_deleted_while_it_is_read_is_none() -> None:
    """As by the last rank that leaves, while the coordinator waits for that."""

    class Deleting(dist.HashStore):
        def check(self, keys: Any) -> bool:
            there = bool(super().check(keys))
            for key in keys:
                self.delete_key(key)
                self.set(key, b"")
            return there

    store = Deleting()
    store.add("left", 1)
    rendezvous = Rendezvous(store, RendezvousThread(GroupStore(store), 1.0))

    assert rendezvous.count("left") in (None, 1)
    assert rendezvous.count("nothing") is None


def test_a_rank_that_is_slow_to_fetch_an_answer_hears_of_an_interrupt_in_the_next_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted = threading.Event()
    wait_for_answer = StoreChannel._wait_for_answer

    def wait_slowly(self: StoreChannel, *args: Any) -> Any:
        interrupted.wait()
        return wait_for_answer(self, *args)

    def give_up(channel: StoreChannel) -> bytes:
        if channel.rank == 0:
            raise KeyboardInterrupt
        return b""

    def work(channel: StoreChannel) -> str:
        channel.gather_scatter("plan", lambda: b"", lambda messages: messages)
        try:
            channel.gather_scatter("write", lambda: give_up(channel), lambda messages: messages)
        except KeyboardInterrupt:
            interrupted.set()
        return "interrupted"

    monkeypatch.setattr(StoreChannel, "_wait_for_answer", wait_slowly)
    monkeypatch.setattr(store_channel, "_ANSWER_GRACE_SECONDS", 0.0)
    here, there = on_ranks(2, work, seconds=2.0)

    assert here == "interrupted"
    assert isinstance(there, CheckpointException)
    assert isinstance(there.failures[0][0], KeyboardInterrupt)


def give_up_while(
    decide: Callable[[StoreChannel, threading.Event], None], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, dict[int, bool]]:
    """Rank 1 gives up while the coordinator decides."""
    monkeypatch.setattr(store_channel, "_ANSWER_GRACE_SECONDS", 0.0)
    left, known = threading.Event(), dict[int, bool]()

    def work(channel: StoreChannel) -> str:
        def decide_late(messages: Any) -> Any:
            decide(channel, left)
            return messages

        try:
            channel.gather_scatter("write", lambda: b"", decide_late)
            return "committed"
        finally:
            known[channel.rank] = channel.outcome_known
            if channel.rank == 1:
                left.set()

    here, there = on_ranks(2, work, seconds=1.0)
    return here, there, known


def test_nothing_is_committed_once_a_rank_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(channel: StoreChannel, left: threading.Event) -> None:
        left.wait()
        channel.seal()

    here, there, known = give_up_while(decide, monkeypatch)

    assert isinstance(here, CheckpointException)
    assert isinstance(here.failures[0][0], RankLostError)
    assert "nothing was committed: rank 1 left" in str(here)
    assert "lost rank 0" in str(there)
    assert known == {0: True, 1: True}, "both know that it failed"


def test_a_rank_that_gives_up_during_the_commit_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decide(channel: StoreChannel, left: threading.Event) -> None:
        channel.seal()
        left.wait()

    here, there, known = give_up_while(decide, monkeypatch)

    assert here == "committed"
    assert "the outcome is not known: lost rank 0" in str(there)
    assert known == {0: True, 1: False}


def test_a_rank_that_leaves_between_exchanges_fails_the_commit() -> None:
    def work(channel: StoreChannel) -> None:
        channel.gather_scatter("plan", lambda: b"", lambda messages: messages)
        if channel.rank == 1:
            raise KeyError("w")
        channel.gather_scatter("write", lambda: b"", lambda messages: messages)

    here, there = on_ranks(2, work)

    assert isinstance(there, KeyError)
    assert "it left with KeyError" in str(here)
