"""Saves as plain safetensors files, laid out as Hugging Face and DCP do.

Files are written under temporary names. They get their own when all ranks are done, and the index
comes last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from reshard.api import CheckpointExistsError, PlanError, StateDictError, UnsupportedFormatError
from reshard.checkpoint.directory import put_new
from reshard.checkpoint.open_save import OpenSave
from reshard.checkpoint.writes import WriteOptions, collect_contents
from reshard.convert.drafts import draft_name, final_name, new_token, publish
from reshard.engine.progress import watched
from reshard.engine.workers import default_threads
from reshard.engine.writing import Content, write_file
from reshard.foreign.safetensors import (
    INDEX,
    OFFSETS_FIELD,
    SHARDING_NOTE,
    VERSION_NOTE,
    file_name,
)
from reshard.format.container import Entry
from reshard.format.plain_dtypes import plain_entry, why_not_plain
from reshard.planner import SavePlan, WriteItem
from reshard.planning.columns import BYTES, DTYPES, WriteColumns
from reshard.plans.results import WriteResults, WrittenColumns, WrittenFile
from reshard.plans.traits import save_traits
from reshard.plans.write_items import untouched_items, write_columns
from reshard.storage import WriteResult
from reshard.stores.protocol import Store

_WHOLE_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_SHARD_FILE = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
_VERSION = "1.0"
_SHOWN = 3


@dataclass(frozen=True)
class PlainLayout:
    """Which files tensors go to: the one with the number that `numbers` has for their name.

    Without numbers there is one file. With `is_sharded`, each rank has files of its own, with
    regions of tensors in them.
    """

    numbers: Mapping[str, int] | None
    is_sharded: bool

    def __post_init__(self) -> None:
        for name, number in (self.numbers or {}).items():
            if not isinstance(number, int) or number < 1:
                raise PlanError(
                    f"fqn_to_index_mapping has the number {number!r} for {name!r}: files are "
                    "counted from 1"
                )

    def number(self, name: str) -> int:
        return 1 if self.numbers is None else self.numbers[name]

    def file(self, name: str, shard: int | None) -> str:
        """The file that a tensor goes to."""
        count = max(self.numbers.values(), default=1) if self.numbers is not None else 1
        return file_name(self.number(name), count, shard)

    def check_local(self, plan: SavePlan) -> None:
        """Refuse what such files cannot hold, before anything is written."""
        columns = write_columns(plan.items)
        names, schema = columns.schema.names, columns.schema
        values = [names[row] for row in np.flatnonzero(schema.kinds == BYTES).tolist()]
        if values:
            raise StateDictError(
                f"safetensors files hold tensors only, and {_listed(values)} "
                f"{'is no tensor' if len(values) == 1 else 'are no tensors'}. Save the state dict "
                "of the model by itself, or all of it with reshard.FileSystemWriter"
            )
        for row, code in enumerate(schema.dtypes.tolist()):
            reason = why_not_plain(DTYPES[code], int(schema.ndims[row]))
            if reason:
                raise UnsupportedFormatError(
                    f"safetensors cannot hold {names[row]!r}, which {reason}. Convert it to "
                    "another dtype, or save with reshard.FileSystemWriter"
                )
        if "__metadata__" in names:
            raise StateDictError(
                "a safetensors file cannot hold a tensor of the name '__metadata__': rename it"
            )
        unknown = [name for name in names if self.numbers is not None and name not in self.numbers]
        if unknown:
            raise PlanError(
                f"fqn_to_index_mapping does not say which file {_listed(unknown)} goes to. Add "
                "it, or pass no mapping to have one file"
            )

    def check_global(self, plans: Sequence[SavePlan]) -> None:
        """Refuse plans in which ranks would write parts of one file, unless it is sharded."""
        if self.is_sharded:
            return
        writers: dict[int, int] = {}
        for rank, plan in enumerate(plans):
            columns = write_columns(plan.items)
            names = columns.schema.names
            parts = (columns.sizes != columns.schema.shapes).any(axis=1)
            for row in np.flatnonzero(parts).tolist():
                raise PlanError(
                    f"{names[row]!r} is sharded, and this writer stores whole tensors. Pass "
                    "save_distributed=True (and enable_consolidation=True to have whole tensors "
                    "in the end)"
                )
            for name in names:
                other = writers.setdefault(self.number(name), rank)
                if other != rank:
                    raise PlanError(
                        f"ranks {other} and {rank} would both write the file "
                        f"{self.file(name, None)!r}. Save on one rank with no_dist=True, or pass "
                        "save_distributed=True"
                    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


# Each rank


def write_plain_files(
    items: Sequence[WriteItem],
    planner: Any,
    save: OpenSave,
    layout: PlainLayout,
    options: WriteOptions,
    rank: int,
    world_size: int,
) -> WriteResults:
    """Write the items of a plan, under temporary names."""
    keeps_values = save_traits(planner).keeps_values
    ties = dict(_ties(items))
    contents, _ = collect_contents(items, planner, keeps_values, ())
    threads = options.thread_count or (max(2, default_threads()) if keeps_values else 1)
    written = WrittenColumns.of([content.nbytes for content in contents], [False] * len(contents))
    store, total = save.store, int(written.nbytes.sum())
    token = new_token(save.save_id)
    groups = _group(contents, layout, rank if layout.is_sharded else None, world_size)
    with watched(f"saving {store.location}", total, options.shows_progress) as progress:
        for name, rows in groups.items():
            chosen = [contents[row] for row in rows]
            for content in chosen:
                content.key = content.name
            draft = draft_name(token, name)
            save.written.append(draft)
            file = write_file(
                store,
                draft,
                chosen,
                threads,
                options.durable,
                progress.advance,
                notes=_notes(chosen, ties),
                describe=_describe,
            )
            written.file_ids[rows] = len(written.files)
            written.files.append(
                WrittenFile(draft, file.file_bytes, file.header_bytes, file.header_checksum)
            )
            written.begins[rows] = file.begins
            written.checksums[rows] = file.checksums
            written.digests[rows] = file.digests
    return WriteResults(items, written)


def _describe(content: Content, begin: int) -> Entry:
    return plain_entry(content.dtype, content.shape, begin, begin + content.nbytes)


def _group(
    contents: Sequence[Content], layout: PlainLayout, rank: int | None, world_size: int
) -> dict[str, list[int]]:
    """The contents of each file. A file holds one region of a tensor, since its name is the key."""
    groups: dict[str, list[int]] = {}
    regions: dict[str, int] = {}
    for row, content in enumerate(contents):
        earlier = regions.get(content.name, 0)
        regions[content.name] = earlier + 1
        shard = None if rank is None else rank + 1 + earlier * world_size
        groups.setdefault(layout.file(content.name, shard), []).append(row)
    return groups


def _notes(contents: Sequence[Content], ties: Mapping[str, str]) -> dict[str, str]:
    """Where regions begin, for DCP; and which names are left out, as safetensors notes them."""
    offsets = {content.name: {OFFSETS_FIELD: list(content.offsets or ())} for content in contents}
    notes = {
        SHARDING_NOTE: msgspec.json.encode(offsets).decode(),
        VERSION_NOTE: _VERSION,
        "format": "pt",
    }
    tied = {name: kept for name, kept in ties.items() if kept in offsets and name not in offsets}
    return tied | notes


def _ties(items: Sequence[WriteItem]) -> Iterator[tuple[str, str]]:
    """The names that are not written because another one has the same memory."""
    chosen = untouched_items(items)
    columns: WriteColumns | None = None if chosen is None else chosen.base
    if columns is not None:
        names = columns.schema.names
        for row in np.flatnonzero(columns.aliases >= 0).tolist():
            yield names[row], names[int(columns.aliases[row])]


# The coordinator


def is_shard_file(key: str) -> bool:
    """Whether a file has a name that ranks give to what they hold."""
    return _SHARD_FILE.fullmatch(key) is not None


def check_place(store: Store, is_sharded: bool) -> None:
    """Refuse a place that holds files of the other kind: nobody could tell them apart."""
    other = _WHOLE_FILE if is_sharded else _SHARD_FILE
    for key in store.list():
        if other.fullmatch(key):
            raise CheckpointExistsError(
                f"{store.location} holds {key!r}, of a save with "
                f"save_distributed={not is_sharded}, and one directory cannot hold both. Save to "
                "another one, or remove those files"
            )


def publish_save(
    save: OpenSave, drafts: Sequence[str], index: bytes | None, is_sharded: bool
) -> list[str]:
    """Give all files their names, the index last; or leave none of them. The names.

    Files of an older save are replaced.
    """
    store = save.store
    names = {draft: final_name(draft) for draft in drafts}
    if index is not None:
        draft = draft_name(new_token(save.save_id), INDEX)
        save.written.append(draft)
        put_new(store, draft, index, durable=True)
        names[draft] = INDEX
    pattern = _SHARD_FILE if is_sharded else _WHOLE_FILE
    publish(store, names, {key for key in store.list() if pattern.fullmatch(key) or key == INDEX})
    return list(names.values())


def make_index(results: Sequence[Sequence[WriteResult]]) -> bytes:
    """The file that says where each tensor is."""
    places = {
        result.index.fqn: final_name(result.storage_data.relative_path)
        for results_of_rank in results
        for result in results_of_rank
    }
    total = sum(result.size_in_bytes for of_rank in results for result in of_rank)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
