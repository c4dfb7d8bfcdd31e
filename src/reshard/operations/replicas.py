"""Finding replicas that have drifted apart, before a save writes one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from reshard.api import ReplicaConflictError
from reshard.checkpoint.writes import fingerprint_items
from reshard.coordination.channel import Channel
from reshard.coordination.exchange import Exchange
from reshard.planner import SavePlan, SavePlanner, WriteItem
from reshard.planning.columns import Bools, Ints
from reshard.planning.global_plan import PlanTable, stack
from reshard.planning.packing import pack_array, unpack_array
from reshard.planning.replicas import describe_conflicts, find_replicated
from reshard.plans.wire import decode_save_plans, encode_save_plan
from reshard.plans.write_items import write_columns


class _HoldingExchange(Exchange[SavePlan, Bools]):
    """What ranks hold for which of it others hold too."""

    phase = "compare replicas"

    def encode(self, message: SavePlan) -> bytes:
        return encode_save_plan(message)

    def decode(self, messages: Sequence[bytes]) -> list[SavePlan]:
        return decode_save_plans(messages)

    def encode_answers(self, answers: Sequence[Bools], messages: Sequence[SavePlan]) -> list[bytes]:
        return [np.packbits(answer).tobytes() for answer in answers]

    def decode_answer(self, answer: bytes, sent: SavePlan) -> Bools:
        bits = np.unpackbits(np.frombuffer(answer, dtype=np.uint8), count=len(sent.items))
        return bits.astype(bool)


class _ReplicaExchange(Exchange[Ints, str]):
    """Fingerprints of what several ranks hold, for nothing or an error."""

    phase = "compare replicas"

    def encode(self, message: Ints) -> bytes:
        return msgspec.msgpack.encode((len(message), pack_array(message)))

    def decode(self, messages: Sequence[bytes]) -> list[Ints]:
        decoded = (msgspec.msgpack.decode(message) for message in messages)
        return [unpack_array(packed, count) for count, packed in decoded]

    def encode_answers(self, answers: Sequence[str], messages: Sequence[Ints]) -> list[bytes]:
        return [answer.encode() for answer in answers]

    def decode_answer(self, answer: bytes, sent: Ints) -> str:
        return answer.decode()


class ReplicaCheck:
    """One comparison of the regions that several ranks hold, as one rank sees it."""

    def __init__(self, planner: SavePlanner, channel: Channel) -> None:
        self._planner = planner
        self._channel = channel
        self._items: Sequence[WriteItem] = ()
        self._table: PlanTable | None = None
        """On the coordinator: what all ranks hold, and the rows that several do."""
        self._rows: Ints = np.zeros(0, dtype=np.int64)

    def run(self, draft: Callable[[], SavePlan]) -> None:
        """Raise a `ReplicaConflictError` on all ranks if replicas of what is drafted differ."""
        shared = self._channel.exchange(_HoldingExchange(), lambda: self._draft(draft), self._find)
        self._channel.exchange(_ReplicaExchange(), lambda: self._look_at(shared), self._compare)

    def _draft(self, draft: Callable[[], SavePlan]) -> SavePlan:
        self._items = draft().items
        return SavePlan(self._items)

    def _look_at(self, shared: Bools) -> Ints:
        positions = np.flatnonzero(shared)
        return fingerprint_items(self._items, positions, self._planner).view(np.int64)

    def _find(self, plans: Sequence[SavePlan]) -> list[Bools]:
        self._table = stack([write_columns(plan.items) for plan in plans])
        replicated = find_replicated(self._table)
        self._rows = np.flatnonzero(replicated)
        return np.split(replicated, self._table.plan_starts[1:-1])

    def _compare(self, prints: Sequence[Ints]) -> list[str]:
        if self._table is not None and len(self._rows):
            conflicts = describe_conflicts(self._table, self._rows, np.concatenate(prints))
            if conflicts:
                raise ReplicaConflictError(
                    f"replicas differ between ranks: {'; '.join(conflicts)}. Nothing was saved. "
                    "Broadcast what is right, or give values that are meant to differ names of "
                    "their own (reshard.per_rank)"
                )
        return [""] * len(prints)
