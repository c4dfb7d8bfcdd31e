"""Plans and results on the wire between ranks: columns, not pickles.

A plan is sent as its schema, which is the same on most ranks, and its regions. The
coordinator decodes each distinct schema once. Its answer to a rank says which of that
rank's own items stay; only a plan that somebody rebuilt is sent in full. What users put
into `planner_data` and `storage_data` is their own, and is pickled if it has to be.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from reshard.api import CheckpointException
from reshard.coordination.exchange import Exchange
from reshard.format.checksum import join_digests
from reshard.metadata import Metadata
from reshard.planner import LoadPlan, SavePlan, WriteItem
from reshard.planning.columns import Bools
from reshard.planning.packing import (
    pack_array,
    pack_regions,
    pack_schema,
    unpack_array,
    unpack_regions,
    unpack_schema,
)
from reshard.plans.read_items import ReadItems, pack_read_columns, read_columns, unpack_read_columns
from reshard.plans.results import WriteResults, WrittenColumns, WrittenFile
from reshard.plans.write_items import WriteItems, write_columns
from reshard.storage import WriteResult
from reshard.tensors.dcp_modules import dumps
from reshard.tensors.paths import PathMap

_NOTHING, _BYTES, _TEXT, _PATHS, _PICKLE, _AS_SENT = range(6)
_WHOLE, _SELECTION = range(2)


def encode_save_plan(plan: SavePlan) -> bytes:
    """A rank's plan for the coordinator."""
    columns = write_columns(plan.items)
    body: Any = None
    if len(columns):
        body = pack_schema(columns.schema), pack_regions(columns)
    return msgspec.msgpack.encode(
        (
            body,
            _encode_data(plan.planner_data),
            _encode_data(plan.storage_data),
            plan.usable,
            plan.fingerprint,
        )
    )


def decode_save_plans(encoded: Sequence[bytes]) -> list[SavePlan]:
    """The plans of all ranks. Equal parts of them are one object."""
    schemas: dict[bytes, Any] = {}
    shared: dict[bytes, Any] = {}
    plans = []
    for message in encoded:
        body, planner_data, storage_data, usable, mark = msgspec.msgpack.decode(message)
        items: Any = []
        if body is not None:
            packed_schema, regions = body
            schema = schemas.get(packed_schema)
            if schema is None:
                schema = schemas[packed_schema] = unpack_schema(packed_schema)
            items = WriteItems(unpack_regions(regions, schema))
        plans.append(
            SavePlan(
                items,
                storage_data=_decode_data(storage_data, shared),
                planner_data=_decode_data(planner_data, shared),
                usable=usable,
                fingerprint=mark,
            )
        )
    return plans


def encode_answer(answer: SavePlan, sent: SavePlan) -> bytes:
    """The coordinator's answer to a rank that sent `sent`."""
    items = answer.items
    body: Any
    if (
        isinstance(items, WriteItems)
        and isinstance(sent.items, WriteItems)
        and items.untouched
        and items.base is sent.items.base
        and items.rows is not None
    ):
        keep = np.zeros(len(items.base), dtype=bool)
        keep[items.rows] = True
        hints = None if items.hints is None else pack_array(items.hints)
        body = _SELECTION, np.packbits(keep).tobytes(), hints
    else:
        body = _WHOLE, encode_save_plan(answer), None
    return msgspec.msgpack.encode(
        (
            body,
            _encode_answer_data(answer.planner_data, sent.planner_data),
            _encode_answer_data(answer.storage_data, sent.storage_data),
            answer.usable,
        )
    )


def decode_answer(encoded: bytes, sent: SavePlan) -> SavePlan:
    """The final plan of this rank, which had sent `sent`."""
    (kind, body, hints), planner_data, storage_data, usable = msgspec.msgpack.decode(encoded)
    items: Any
    if kind == _WHOLE:
        items = decode_save_plans([body])[0].items
    else:
        base = write_columns(sent.items)
        keep = np.unpackbits(np.frombuffer(body, dtype=np.uint8), count=len(base))
        rows = np.flatnonzero(keep)
        items = WriteItems(
            base, rows, None if hints is None else unpack_array(hints, len(rows), True)
        )
    return SavePlan(
        items,
        planner_data=_decode_answer_data(planner_data, sent.planner_data),
        storage_data=_decode_answer_data(storage_data, sent.storage_data),
        usable=usable,
        fingerprint=sent.fingerprint,
    )


def encode_load_plan(plan: LoadPlan) -> bytes:
    return msgspec.msgpack.encode(
        (
            pack_read_columns(read_columns(plan.items)),
            _encode_data(plan.planner_data),
            _encode_data(plan.storage_data),
        )
    )


def decode_load_plan(encoded: bytes) -> LoadPlan:
    columns, planner_data, storage_data = msgspec.msgpack.decode(encoded)
    return LoadPlan(
        ReadItems(unpack_read_columns(columns)),
        planner_data=_decode_data(planner_data, {}),
        storage_data=_decode_data(storage_data, {}),
    )


def _encode_answer_data(data: Any, sent: Any) -> tuple[int, bytes]:
    return (_AS_SENT, b"") if data is sent else _encode_data(data)


def _decode_answer_data(data: Sequence[Any], sent: Any) -> Any:
    return sent if data[0] == _AS_SENT else _decode_data(data, {})


def _encode_data(data: Any) -> tuple[int, bytes]:
    if data is None:
        return _NOTHING, b""
    if isinstance(data, bytes):
        return _BYTES, data
    if type(data) is str:
        return _TEXT, data.encode()
    if type(data) is PathMap and data.is_regular:
        return _PATHS, zlib.compress(data.pack(), 1)
    return _PICKLE, dumps(data)


def _decode_data(data: Sequence[Any], shared: dict[bytes, Any]) -> Any:
    kind, content = data
    if kind == _NOTHING:
        return None
    if kind == _BYTES:
        return content
    if kind == _TEXT:
        return content.decode()
    if kind == _PATHS:
        if content not in shared:
            shared[content] = PathMap.unpack(zlib.decompress(content))
        return shared[content]
    # Sent by another rank of this job, never read from a checkpoint.
    return pickle.loads(content)


def encode_results(results: Sequence[WriteResult], as_answered: bool) -> bytes:
    """What became of a plan. With `as_answered`, its items are those that were sent back."""
    if not isinstance(results, WriteResults) or not results.untouched:
        return msgspec.msgpack.encode((None, dumps(list(results)), 0, None, None))
    written = results.written
    items = None
    if not as_answered:
        columns = write_columns(results.items)
        items = pack_schema(columns.schema), pack_regions(columns)
    numbers = written.numbers
    about = written.codecs, written.has_fingerprints, written.digests.tobytes()
    return msgspec.msgpack.encode((written.files, pack_array(numbers), len(numbers), items, about))


def decode_results(encoded: bytes, items: Sequence[WriteItem]) -> list[WriteResult]:
    """The results of a rank whose final plan had `items`."""
    files, numbers, count, own_items, about = msgspec.msgpack.decode(encoded)
    if files is None:
        results: list[WriteResult] = pickle.loads(numbers)
        return results
    if own_items is not None:
        schema, regions = own_items
        items = WriteItems(unpack_regions(regions, unpack_schema(schema)))
    if len(items) != count:
        raise CheckpointException(
            f"a rank wrote {count} items, but its plan has {len(items)}: a planner or storage of "
            "its own changed the plan without saying so"
        )
    codecs, has_fingerprints, digests = about
    written = WrittenColumns(
        [WrittenFile(*file) for file in files],
        unpack_array(numbers, count),
        join_digests([digests]),
        codecs,
        has_fingerprints,
    )
    return WriteResults(items, written)  # type: ignore[return-value]


# The exchanges of a save and a load


class SaveAnswer(NamedTuple):
    """The coordinator's answer to a rank's plan."""

    save_id: str
    plan: SavePlan | None
    """What the rank is to write; None to plan again, without relying on cached plans."""


class SavePlanExchange(Exchange[SavePlan, SaveAnswer]):
    """Plans of ranks for a plan of all."""

    phase = "plan"

    def encode(self, message: SavePlan) -> bytes:
        return encode_save_plan(message)

    def decode(self, messages: Sequence[bytes]) -> list[SavePlan]:
        return decode_save_plans(messages)

    def encode_answers(
        self, answers: Sequence[SaveAnswer], messages: Sequence[SavePlan]
    ) -> list[bytes]:
        return [
            msgspec.msgpack.encode(
                (answer.save_id, None if answer.plan is None else encode_answer(answer.plan, sent))
            )
            for answer, sent in zip(answers, messages, strict=True)
        ]

    def decode_answer(self, answer: bytes, sent: SavePlan) -> SaveAnswer:
        save_id, plan = msgspec.msgpack.decode(answer)
        return SaveAnswer(save_id, None if plan is None else decode_answer(plan, sent))


class Written(NamedTuple):
    """What a rank has written."""

    results: list[WriteResult]
    as_answered: bool
    """Whether they are of exactly the items that the coordinator knows of."""


class SaveOutcome(NamedTuple):
    """What ranks learn of a save that is committed: the metadata, or how to read it back."""

    reference: str
    metadata: Metadata | None


class ResultExchange(Exchange[Written, SaveOutcome]):
    """Results of ranks for the outcome of the save. The coordinator knows the `plans` of all."""

    phase = "write"

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        self._plans = plans

    def encode(self, message: Written) -> bytes:
        return encode_results(message.results, message.as_answered)

    def decode(self, messages: Sequence[bytes]) -> list[Written]:
        return [
            Written(decode_results(message, plan.items), True)
            for message, plan in zip(messages, self._plans, strict=True)
        ]

    def encode_answers(
        self, answers: Sequence[SaveOutcome], messages: Sequence[Written]
    ) -> list[bytes]:
        outcome = answers[0]
        return [dumps((outcome.reference, outcome.metadata))] * len(answers)

    def decode_answer(self, answer: bytes, sent: Written) -> SaveOutcome:
        return SaveOutcome(*pickle.loads(answer))


class PlannedLoad(NamedTuple):
    """What a rank is to load, and what it does not ask for."""

    unexpected: Bools
    """For each key of the checkpoint, whether nobody asks for it."""
    plan: LoadPlan | None
    """None if the global step has nothing to say: the rank's own plan holds."""


class LoadPlanExchange(Exchange[PlannedLoad, PlannedLoad]):
    """Plans of ranks for those that they carry out."""

    phase = "plan"

    def encode(self, message: PlannedLoad) -> bytes:
        unexpected, plan = message
        bits = np.packbits(unexpected).tobytes()
        encoded = None if plan is None else encode_load_plan(plan)
        return msgspec.msgpack.encode((len(unexpected), bits, encoded))

    def _decode(self, message: bytes) -> PlannedLoad:
        count, bits, plan = msgspec.msgpack.decode(message)
        unexpected = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count)
        return PlannedLoad(
            unexpected.astype(bool), None if plan is None else decode_load_plan(plan)
        )

    def decode(self, messages: Sequence[bytes]) -> list[PlannedLoad]:
        return [self._decode(message) for message in messages]

    def encode_answers(
        self, answers: Sequence[PlannedLoad], messages: Sequence[PlannedLoad]
    ) -> list[bytes]:
        return [self.encode(answer) for answer in answers]

    def decode_answer(self, answer: bytes, sent: PlannedLoad) -> PlannedLoad:
        return self._decode(answer)
