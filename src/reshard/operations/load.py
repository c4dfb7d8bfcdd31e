"""A load, as one rank sees it: open, plan, read, give back, together with the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reshard.api import CheckpointException, MissingKeyError, PlanError, _note_on_error
from reshard.background.overlap import late_copies
from reshard.background.queue import save_queue
from reshard.checkpoint.shared_reads import SharedRead
from reshard.coordination.agreement import announce_load
from reshard.coordination.channel import Channel, checking_arguments, failing_together
from reshard.coordination.exchange import TextExchange
from reshard.default_planner import DefaultLoadPlanner
from reshard.engine.collector import paused_collection, paused_in_front
from reshard.engine.reading import Verify
from reshard.format.tables import Manifest
from reshard.logger import logged
from reshard.metadata import Metadata
from reshard.operations.adapters import adapt_for_load
from reshard.operations.load_report import LoadReport
from reshard.operations.ranks import Ranks
from reshard.operations.receipts import LoadReceipt, gather_receipts, not_restored
from reshard.operations.renaming import Rename, renamed
from reshard.operations.sharing import (
    REPLICATED_READS,
    agree,
    announce,
    read_together,
    wants_to_share,
)
from reshard.operations.targets import LoadSource, comparable_place
from reshard.operations.user_calls import (
    overridden,
    set_up_reader,
    with_defaults,
)
from reshard.operations.verification import (
    FingerprintExchange,
    count_verified,
    find_held_regions,
    manifest_with_fingerprints,
)
from reshard.planner import LoadPlan, LoadPlanner
from reshard.planning.columns import Bools
from reshard.plans.mismatches import dtype_mismatch, missing_keys
from reshard.plans.traits import (
    fills_blanks,
    knows_casts,
    load_traits,
    plans_alone,
    views_files,
)
from reshard.plans.wire import LoadPlanExchange, PlannedLoad
from reshard.rank_values import PerRank, choose_rank_values, restore_rank_values
from reshard.stateful import is_stateful
from reshard.storage import StorageReader, parameters_of, takes_any_keyword
from reshard.tensors.blanks import BlankState, with_ties


@dataclass(frozen=True)
class LoadSettings:
    """How to load, as `load` documents it. None: as the storage or the planner was told."""

    strict: bool | Literal["exact", "receipt"] = True
    rename: Rename | None = None
    exclude: Sequence[str] = ()
    verify: str | None = None
    allow_pickle: bool | None = None
    assign: bool = False
    replicated_reads: str = "auto"
    dtype: Literal["cast", "same"] = "cast"
    receipt: bool = False

    @property
    def shared(self) -> tuple[tuple[str, str], ...]:
        """What all ranks must agree on: they exchange messages for it."""
        asked = "'receipt'" if self.strict == "receipt" else "something else"
        return ("strict", asked), ("receipt", str(bool(self.receipt)))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Those of `exclude`, which may be one."""
        return (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude)

    def apply(self, reader: StorageReader, planner: LoadPlanner) -> contextlib.ExitStack:
        """Set what a call asks of its storage and its planner, until the stack is closed."""
        pickles = self.allow_pickle or getattr(reader, "allow_pickle", None) or None
        verify = None if self.verify is None else Verify(self.verify)
        with contextlib.ExitStack() as undo:
            undo.enter_context(
                overridden(reader, verify=verify, verify_views=verify, allow_pickle=pickles)
            )
            undo.enter_context(
                overridden(
                    planner,
                    exclude=self.patterns or None,
                    allow_pickle=pickles,
                    # A receipt names all that is missing, not only what is found first.
                    allow_partial_load=True if self.strict in (False, "receipt") else None,
                    keeps_blanks=self.assign or None,
                )
            )
            return undo.pop_all()

    def check(self, planner: LoadPlanner) -> None:
        if self.strict not in (True, False, "exact", "receipt"):
            raise ValueError(f"strict is True, False, 'exact' or 'receipt', not {self.strict!r}")
        if self.verify not in (None, *(each.value for each in Verify), *Verify):
            raise ValueError(
                f"verify is 'off', 'chunks', 'full' or 'fingerprint', not {self.verify!r}"
            )
        if not (self.rename is None or callable(self.rename) or isinstance(self.rename, Mapping)):
            raise TypeError(f"rename is a dict of prefixes or a function, not {self.rename!r}")
        if self.replicated_reads not in REPLICATED_READS:
            raise ValueError(
                f"replicated_reads is 'auto', 'direct' or 'share', not {self.replicated_reads!r}"
            )
        if self.dtype not in ("cast", "same"):
            raise ValueError(f"dtype is 'cast' or 'same', not {self.dtype!r}")
        if self.dtype == "same" or self.strict == "receipt":
            option = "dtype='same'" if self.dtype == "same" else "strict='receipt'"
            if not knows_casts(planner):
                raise ValueError(
                    f"{option} needs a planner that fills tensors as DefaultLoadPlanner does, "
                    f"unlike {type(planner).__name__}: load with dtype='cast' and strict=True"
                )
        if self.patterns and not load_traits(planner).is_default:
            raise ValueError(
                f"exclude needs a planner that derives from DefaultLoadPlanner, not "
                f"{type(planner).__name__}: leave the keys out of the state dict"
            )
        if self.assign and not fills_blanks(planner):
            raise ValueError(
                f"assign needs a planner that looks up tensors as DefaultLoadPlanner does, unlike "
                f"{type(planner).__name__}: load without assign, which fills tensors in place"
            )


def load_now(
    state_dict: dict[str, Any],
    source: LoadSource,
    planner: LoadPlanner | None,
    ranks: Ranks,
    settings: LoadSettings,
) -> LoadReport:
    """Load while the caller waits."""
    planner = planner if planner is not None else DefaultLoadPlanner()
    late_copies().finish()
    channel = ranks.open_channel(source.intent(settings.verify, settings.shared))
    with checking_arguments(channel):
        settings.check(planner)
        reader, planner = adapt_for_load(source.choose_reader(), planner)
    with channel:
        with failing_together(channel, "open"):
            undo = settings.apply(reader, planner)
        with undo:
            return Load(state_dict, reader, planner, channel, settings, ranks.group).run()


class Load:
    """One load, as one rank sees it."""

    metadata: Metadata
    """As stored."""
    stored: list[str]
    """The keys of the checkpoint, renamed."""
    states: dict[str, Any]
    """The states to fill: of `Stateful` values theirs, of others the value itself."""
    template: dict[str, Any]
    """The same with per-rank values under the names that they are stored by."""

    def __init__(
        self,
        state_dict: dict[str, Any],
        reader: StorageReader,
        planner: LoadPlanner,
        channel: Channel,
        settings: LoadSettings = LoadSettings(),  # noqa: B008 - frozen
        group: Any = None,
    ) -> None:
        self._group = group
        self.original = state_dict
        self.reader = reader
        self.planner = planner
        self.channel = channel
        self.settings = settings
        self.report = LoadReport()
        self._planner_hooks = with_defaults(planner, LoadPlanner)
        self._reader_hooks = with_defaults(reader, StorageReader)
        self._requests_before = getattr(reader, "requests_made", 0)
        self._plans_alone = plans_alone(planner, reader)
        self._left_out: list[str] = []
        self._blank_state: BlankState | None = None
        self._owned: dict[str, Any] = {}
        self._manifest: Manifest | None = None
        """With the fingerprints that the load is to be verified with, if it is."""
        self._quiet = contextlib.ExitStack()

    def _logged(self, name: str) -> contextlib.AbstractContextManager[None]:
        place = getattr(self.reader, "checkpoint_id", None)
        return logged(name, {"checkpoint_id": place, "process_group": self._group})

    def run(self) -> LoadReport:
        # States are asked for, and given back, only when no rank can fail for another reason:
        # both may communicate, and would wait for the rank that failed.
        sharing = self.channel.exchange(TextExchange("open"), self._open, agree)
        with self._quiet:
            planned = self.channel.exchange(
                LoadPlanExchange(), self._plan_locally, self._plan_globally
            )
            self.report.unexpected = self._name_unexpected(planned.unexpected)
            if self.settings.strict == "receipt":
                self._check_receipt("Nothing was loaded.")
            plan = self._plan if planned.plan is None else planned.plan
            if sharing:
                read_together(
                    self.channel, sharing, lambda: self._open_shared_read(plan), self._note_shared
                )
            else:
                self.channel.do_together("read", lambda: self._read(plan))
            if self._manifest is not None:
                self._verify(self._manifest)
        self.channel.do_together("give back", self._give_back)
        if self.settings.strict == "receipt":
            self.report._of_all_ranks = self._check_receipt("All else was loaded.")
        elif self.settings.receipt:
            self.report._of_all_ranks = gather_receipts(self.report.receipt(), self.channel)
        return self.report

    def _check_receipt(self, done: str) -> LoadReceipt:
        """The receipt of all ranks; an error on each of them if something is not restored."""
        receipt = gather_receipts(self.report.receipt(), self.channel)

        def check() -> None:
            if not receipt.all_restored:
                raise not_restored(receipt, done)

        self.channel.do_together("receipt", check)
        return receipt

    # Open

    def _open(self) -> str:
        place = comparable_place(getattr(self.reader, "checkpoint_id", None))
        save_queue().settle(place)
        self.metadata, self._is_common = self._read_metadata()
        asked = (self.settings.verify, getattr(self.reader, "verify", None))
        if Verify.FINGERPRINT in asked or Verify.FINGERPRINT.value in asked:
            self._manifest = manifest_with_fingerprints(self.metadata, place)
        opened = announce_load(self.metadata.storage_meta if self._is_common else None)
        mode = self.settings.replicated_reads
        shares = self._is_common and wants_to_share(mode, self.reader, self.planner, self.channel)
        return announce(shares, opened)

    def _read_metadata(self) -> tuple[Metadata, bool]:
        """The metadata, and whether it is common to all ranks or that of this rank only."""
        try:
            return self.reader.read_metadata(), True
        except CheckpointException:
            raise
        except Exception as error:
            is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            if isinstance(error, OSError) and not is_absent:
                # What cannot be reached or is refused would be so again, after as long a wait.
                raise
            if not takes_any_keyword(type(self.reader).read_metadata):
                raise
            try:
                return self.reader.read_metadata(rank=self.channel.rank), False
            except CheckpointException:
                raise
            except Exception:  # noqa: BLE001 - why there is none for all says more
                raise error from None

    # Plan

    def _plan_locally(self) -> PlannedLoad:
        with self._logged("local_step"):
            return self._local_plan()

    def _local_plan(self) -> PlannedLoad:
        channel, reader, planner = self.channel, self.reader, self.planner
        self.states = self._ask_for_states()
        if self.settings.assign:
            self.states = self._with_blanks(self.states)
        seen = renamed(self.metadata, self.settings.rename)
        if self._manifest is not None:
            self._stored_names = dict(
                zip(seen.state_dict_metadata, self.metadata.state_dict_metadata, strict=True)
            )
        self._ask_for_templates(seen)
        # From here on nobody is asked for a state, which may take memory and make cycles.
        self._quiet.enter_context(paused_in_front())
        self.template, self._rank_values = choose_rank_values(
            self.states, channel.rank, channel.world_size, _names_in(seen)
        )
        with paused_collection():
            planner.set_up_planner(self.template, seen, channel.is_coordinator)
        set_up_reader(reader, self.metadata, channel)
        with paused_collection():
            plan = planner.create_local_plan()
        self.report.casts = dict(self._planner_hooks.casts)
        if self.report.casts and self.settings.dtype == "same":
            raise dtype_mismatch(self.report.casts)
        self._plan = reader.prepare_local_plan(plan)
        self._check_values()
        return PlannedLoad(self._compare_keys(seen), None if self._plans_alone else self._plan)

    def _check_values(self) -> None:
        """Look at stored values that must fit before anything is loaded."""
        names = self._planner_hooks.values_to_check()
        if names:
            self._planner_hooks.check_values(self._reader_hooks.read_values(names))

    def _ask_for_states(self) -> dict[str, Any]:
        if not any(map(is_stateful, self.original.values())):
            return self.original
        # In the same order on all ranks, since state_dict() may communicate.
        states = {}
        for key, value in sorted(self.original.items()):
            with _note_on_error(f"asking {key!r} for its state"):
                asked = is_stateful(value) and not _gives_template(value)
                states[key] = value.state_dict() if asked else value
        return states

    def _with_blanks(self, states: dict[str, Any]) -> dict[str, Any]:
        """`states` without the tensors that are to be replaced, which stay until the end."""
        self._owned = {
            key: state for key, state in states.items() if _can_be_assigned(self.original[key])
        }
        self._blank_state = BlankState(self._owned)
        return {**states, **self._blank_state.state}

    def _ask_for_templates(self, metadata: Metadata) -> None:
        """Ask those that decide by the checkpoint what they want of it."""
        rank, world_size = self.channel.rank, self.channel.world_size
        for key, value in self.states.items():
            if _gives_template(value):
                template = value.template_for(metadata, key, rank, world_size)
                # Made from the checkpoint: what nobody wants of it must not be there at all.
                self.states[key], left_out = value.pruned(
                    template, key, self._planner_hooks.excludes
                )
                self._left_out += left_out

    def _compare_keys(self, metadata: Metadata) -> Bools:
        """Fill the report, and say which stored keys this rank does not ask for."""
        entries = metadata.state_dict_metadata
        self.stored = list(entries)
        wanted = getattr(self.planner, "state_dict", self.template)
        excludes = self._planner_hooks.excludes
        tied = self._planner_hooks.tied_names
        held = {n: n in entries or n in tied for n in wanted if not excludes(n)}
        self.report.loaded = [name for name, is_held in held.items() if is_held]
        self.report.missing = [name for name, is_held in held.items() if not is_held]
        if self.settings.strict == "receipt" and self.report.missing and not self.report.loaded:
            # It says how the names differ.
            raise missing_keys(held, self.stored)
        self.report.excluded = [*self._left_out, *(n for n in wanted if excludes(n))]
        self._report_dropped()
        self._report_missing_parts()
        self.report.groups = self._name_groups()
        covered = (
            # What other ranks stored of a value that differs by rank is not for this one.
            *(".".join(map(str, path)) + ".rank-" for path in self._rank_values),
            *self._planner_hooks.covered_prefixes,
            *(f"{name}." for name in self._left_out),
        )
        unexpected = (
            name not in wanted and not name.startswith(covered) and not excludes(name)
            for name in self.stored
        )
        return np.fromiter(unexpected, dtype=bool, count=len(self.stored))

    def _report_dropped(self) -> None:
        """Note values that differ by rank and that this rank has no share of."""
        for path, key in self._rank_values.items():
            if key is not None:
                continue
            name = ".".join(map(str, path))
            is_stored = any(stored.startswith(f"{name}.rank-") for stored in self.stored)
            self._note_left([name], self.report.dropped if is_stored else self.report.missing)

    def _report_missing_parts(self) -> None:
        """Note what those that decide by the checkpoint did not find in it."""
        for key, value in self.original.items():
            if _gives_template(value):
                self._note_left(value.missing_names(key), self.report.missing)

    def _note_left(self, names: Sequence[str], noted: list[str]) -> None:
        """Add names to a list of the report, or to the excluded ones, unless they are there."""
        known = {*noted, *self.report.excluded}
        for name in names:
            if name not in known:
                is_excluded = self._planner_hooks.excludes(name)
                (self.report.excluded if is_excluded else noted).append(name)

    def _name_groups(self) -> list[str]:
        """The keys of the state dict that hold several values, by their parts where they have."""
        groups: list[str] = []
        for key, value in self.original.items():
            if _gives_template(value):
                below = f"{key}."
                missing = (n[len(below) :] for n in self.report.missing if n.startswith(below))
                parts = [*self.states[key], *(name.partition(".")[0] for name in missing)]
                groups += [below + part for part in dict.fromkeys(parts)]
            elif is_stateful(value) or isinstance(value, Mapping | list | tuple | PerRank):
                groups.append(str(key))
        return groups

    def _name_unexpected(self, unexpected: Bools) -> list[str]:
        return [self.stored[row] for row in np.flatnonzero(unexpected).tolist()]

    def _plan_globally(self, planned: Sequence[PlannedLoad]) -> list[PlannedLoad]:
        with self._logged("global_step"):
            return self._answer(planned)

    def _answer(self, planned: Sequence[PlannedLoad]) -> list[PlannedLoad]:
        # A key that any rank asks for is expected: stages of a pipeline ask for their own. Ranks
        # with metadata of their own have keys of their own.
        masks = [each.unexpected for each in planned]
        if self._is_common:
            masks = [np.logical_and.reduce(masks)] * len(masks)
        unexpected: Bools = masks[self.channel.rank]
        if self.settings.strict == "exact" and unexpected.any():
            nobody_wants = self._name_unexpected(unexpected)
            shown = ", ".join(map(repr, nobody_wants[:5]))
            raise MissingKeyError(
                f"the checkpoint has {len(nobody_wants)} keys that no state dict asks for, such as "
                f"{shown}. Add them, or load with strict=True"
            )
        plans = [each.plan for each in planned if each.plan is not None]
        if not plans:
            return [PlannedLoad(mask, None) for mask in masks]
        if len(plans) < len(planned):
            raise PlanError(
                "some ranks plan the load with another planner or storage than the others. Pass "
                "the same on all ranks"
            )
        final = self.reader.prepare_global_plan(self.planner.create_global_plan(plans))
        return [PlannedLoad(mask, plan) for mask, plan in zip(masks, final, strict=True)]

    # Read

    def _read(self, plan: LoadPlan) -> None:
        with self._logged("read_data"):
            self._read_data(plan)

    def _read_data(self, plan: LoadPlan) -> None:
        final = self._final_plan = self.planner.finish_plan(plan)
        if self.settings.assign and not views_files(self.reader):
            self.planner.fill_blanks({})  # type: ignore[attr-defined]
        with self._counted():
            self.reader.read_data(final, self.planner).wait()
        self._planner_hooks.finish_load()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Note what a storage of ours reads meanwhile."""
        before = self._count()
        yield
        self.report.nbytes, self.report.bytes_read = (
            now - then for now, then in zip(self._count(), before, strict=True)
        )
        self.report.requests = getattr(self.reader, "requests_made", 0) - self._requests_before

    def _count(self) -> tuple[int, int]:
        reader = self.reader
        return getattr(reader, "bytes_read", 0), getattr(reader, "bytes_from_store", 0)

    @contextlib.contextmanager
    def _open_shared_read(self, plan: LoadPlan) -> Iterator[SharedRead]:
        final = self._final_plan = self.planner.finish_plan(plan)
        with (
            self._logged("read_data"),
            self._counted(),
            self.reader.open_shared_read(final, self.planner) as read,  # type: ignore[attr-defined]
        ):
            yield read

    def _note_shared(self, read: SharedRead) -> None:
        self.report.bytes_received = read.bytes_received
        self._planner_hooks.finish_load()

    # Verify

    def _verify(self, manifest: Manifest) -> None:
        """Compare what is in memory now with what was saved."""
        self.report.verified = self.channel.exchange(
            FingerprintExchange(),
            lambda: find_held_regions(self._final_plan, self.planner, self._stored_names, manifest),
            lambda held: [count_verified(manifest, held)] * len(held),
        )

    # Give back

    def _give_back(self) -> None:
        """Hand loaded states to their owners, and put other values in their place."""
        if self.template is not self.states:
            restore_rank_values(self.states, self.template, self._rank_values)
        if self.states is self.original:
            if type(self.original) is not dict and isinstance(self.original, dict):
                # All is in its place, but a class of dicts may watch what is put into it.
                for key, value in list(self.original.items()):
                    self.original[key] = value
            return
        if self._blank_state is not None:
            self._put_back(self._blank_state)
        for key, value in sorted(self.original.items()):
            state = self.states[key]
            if not is_stateful(value):
                self.original[key] = state
                continue
            if _gives_template(value):
                # Where the checkpoint has nothing, there may be memory that nothing filled.
                missing = set(self.report.missing)
                state, _ = value.pruned(state, key, missing.__contains__)
            with _note_on_error(f"giving {key!r} its state"):
                if key in self._owned:
                    value.load_state_dict(with_ties(value, state), assign=True)
                else:
                    value.load_state_dict(state)
        self._report_missing_parts()

    def _put_back(self, blank: BlankState) -> None:
        """Replace tensors, in the containers that they came from, by those that were loaded."""
        wanted = getattr(self.planner, "state_dict", {})
        filled = {id(wanted[name]) for name in self.report.loaded if name in wanted}
        loaded = {key: self.states[key] for key in self._owned}
        blank.put_back(self._owned, loaded, filled)
        self.states |= self._owned


def _names_in(metadata: Metadata) -> Iterator[str]:
    """All names of a checkpoint, those of dicts without content included."""
    yield from metadata.state_dict_metadata
    for path in getattr(metadata.planner_data, "empties", ()):
        yield ".".join(map(str, path))


def _gives_template(value: Any) -> bool:
    return is_stateful(value) and hasattr(type(value), "template_for")


def _can_be_assigned(value: Any) -> bool:
    """Whether tensors of `value` may be replaced. Others are filled where they are."""
    if not is_stateful(value):
        return True
    return not _gives_template(value) and "assign" in parameters_of(value.load_state_dict)
