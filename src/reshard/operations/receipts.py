"""What became of every value in a load, for people and for programs.

A receipt is made from the report of one rank; those of all ranks are merged into one. Nothing
here looks at tensors or at a checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

import xxhash

from reshard.api import NotRestoredError, _name_ranks
from reshard.coordination.channel import Channel
from reshard.coordination.exchange import TextExchange

Fate = Literal["missing", "unused", "dropped", "cast", "excluded", "restored"]
"""What became of a value, worst first."""
_FATES: tuple[Fate, ...] = get_args(Fate)
_REASONS: Mapping[Fate, str] = {
    "missing": "not in the checkpoint, left as it was",
    "unused": "in the checkpoint, but nothing here takes it",
    "dropped": "saved by another number of ranks, left as it was",
    "excluded": "left as it was, as asked for",
}
_LINES_SHOWN = 20


@dataclass(frozen=True)
class ReceiptLine:
    """A value that is not simply restored.

    `stored` and `loaded` are the dtypes of a cast. `ranks` are those that it is true of, if other
    ranks hold the value and fared better.
    """

    fate: Fate
    stored: str = ""
    loaded: str = ""
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        why = f"{self.stored} -> {self.loaded}" if self.fate == "cast" else _REASONS[self.fate]
        return f"{why} ({_name_ranks(self.ranks)})" if self.ranks else why


@dataclass(frozen=True)
class LoadReceipt:
    """For every value of a state dict, what a load made of it.

    A value is *restored* if every rank that holds it has what was saved. Otherwise it is in
    `others`: *missing* in the checkpoint; *dropped*, since it differs by rank and the number of
    ranks has changed; *cast* from another dtype; *excluded* by the caller; or *unused*: stored in
    a group of the state dict, where nothing takes it, such as the moments of an optimizer
    that has no state yet. Groups are the keys of the state dict, and the parts of a `TrainState`.
    """

    restored: tuple[str, ...]
    others: Mapping[str, ReceiptLine]
    groups: tuple[str, ...] = ()
    """Dotted prefixes. A value outside of all is grouped by the first part of its name."""
    unexpected: int = 0
    """How many keys the checkpoint has that no group of the state dict covers."""
    ranks: int = 1
    """How many ranks have told what became of their values."""

    @property
    def all_restored(self) -> bool:
        return not self.others

    @cached_property
    def totals(self) -> dict[Fate, int]:
        """How many values had which fate, worst first."""
        counts = Counter(line.fate for line in self.others.values())
        counts["restored"] = len(self.restored)
        return {fate: counts[fate] for fate in _FATES if counts[fate]}

    @cached_property
    def totals_by_group(self) -> dict[str, dict[Fate, int]]:
        """The same for each group, the one with the worst fate first."""
        counts: dict[str, Counter[Fate]] = {}
        for name, fate in self._fates():
            counts.setdefault(self.group_of(name), Counter())[fate] += 1
        ordered = sorted(counts.items(), key=lambda item: [-item[1][fate] for fate in _FATES])
        return {group: {f: found[f] for f in _FATES if found[f]} for group, found in ordered}

    def _fates(self) -> Iterator[tuple[str, Fate]]:
        for name, line in self.others.items():
            yield name, line.fate
        for name in self.restored:
            yield name, "restored"

    def group_of(self, name: str) -> str:
        """The group that a value belongs to."""
        prefix = name
        while prefix and prefix not in self._group_names:
            prefix = prefix.rpartition(".")[0]
        return prefix or name.partition(".")[0]

    @cached_property
    def _group_names(self) -> frozenset[str]:
        return frozenset(self.groups)

    # For people

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, most_lines: int = _LINES_SHOWN) -> str:
        """One line if all is well; otherwise the groups and values that are not, worst first."""
        held = len(self.restored) + sum(line.fate != "unused" for line in self.others.values())
        beyond = f"; {self.unexpected} more in the checkpoint" if self.unexpected else ""
        if self.all_restored:
            return f"all {held} values restored{beyond}"
        bad = ", ".join(f"{n} {fate}" for fate, n in self.totals.items() if fate != "restored")
        lines = [f"{len(self.restored)} of {held} values restored: {bad}{beyond}"]
        lines += _table(self.totals_by_group)
        shown = list(self.others.items())[:most_lines]
        width = max((len(name) for name, _ in shown), default=0)
        lines += [f"{line.fate:<8}  {name:<{width}}  {line}" for name, line in shown]
        if len(self.others) > len(shown):
            lines.append(f"... and {len(self.others) - len(shown)} more")
        return "\n".join(lines)

    # For programs

    def to_json(self, indent: int | None = None) -> str:
        """Every value by name. `from_json` reads it back."""
        return json.dumps(
            {
                "all_restored": self.all_restored,
                "ranks": self.ranks,
                "totals": self.totals,
                "groups": self.totals_by_group,
                "not_restored": {name: _to_dict(line) for name, line in self.others.items()},
                "restored": self.restored,
                "unexpected": self.unexpected,
            },
            indent=indent,
        )

    @staticmethod
    def from_json(text: str) -> LoadReceipt:
        """The receipt that `to_json` wrote."""
        read = json.loads(text)
        lines = {name: _from_dict(line) for name, line in read["not_restored"].items()}
        return LoadReceipt(
            tuple(read["restored"]), lines, tuple(read["groups"]), read["unexpected"], read["ranks"]
        )


def make_receipt(
    restored: Sequence[str],
    others: Mapping[str, ReceiptLine],
    unexpected: Sequence[str] = (),
    groups: Sequence[str] = (),
) -> LoadReceipt:
    """The receipt of one rank. What it did not restore wins over what it did."""
    blank = LoadReceipt((), {}, tuple(groups))
    unused = {name for name in unexpected if blank.group_of(name) in blank._group_names}
    lines = {**others, **{name: ReceiptLine("unused") for name in unused}}
    kept = sorted({*restored} - lines.keys())
    return LoadReceipt(tuple(kept), _sorted(lines), blank.groups, len(unexpected) - len(unused))


def merge_receipts(receipts: Sequence[LoadReceipt]) -> LoadReceipt:
    """One receipt for all ranks, given that of each in order."""
    # Most ranks have the same to tell.
    alike: dict[int, tuple[LoadReceipt, list[int]]] = {}
    for rank, each in enumerate(receipts):
        alike.setdefault(id(each), (each, []))[1].append(rank)
    holders: dict[str, list[int]] = {}
    told: dict[str, dict[ReceiptLine, list[int]]] = {}
    for each, ranks in alike.values():
        for name in (*each.restored, *each.others):
            holders.setdefault(name, []).extend(ranks)
        for name, line in each.others.items():
            told.setdefault(name, {}).setdefault(line, []).extend(ranks)
    lines = {name: _worst(by_line, len(holders[name])) for name, by_line in told.items()}
    return LoadReceipt(
        tuple(sorted(holders.keys() - lines.keys())),
        _sorted(lines),
        tuple(dict.fromkeys(group for each, _ in alike.values() for group in each.groups)),
        max((each.unexpected for each in receipts), default=0),
        len(receipts),
    )


def gather_receipts(receipt: LoadReceipt, channel: Channel) -> LoadReceipt:
    """The merged receipt, on every rank. Called by all ranks."""
    text = receipt.to_json()
    mark = xxhash.xxh3_128_hexdigest(text.encode())
    # Of ranks that have the same to tell, one tells it.
    is_first = channel.exchange(TextExchange("receipt"), lambda: mark, _choose_tellers)
    message = f"{mark} {text if is_first else ''}"
    return LoadReceipt.from_json(
        channel.exchange(TextExchange("receipt"), lambda: message, _merge_messages)
    )


def _choose_tellers(marks: Sequence[str]) -> list[str]:
    first = {mark: rank for rank, mark in reversed(list(enumerate(marks)))}
    return ["first" if first[mark] == rank else "" for rank, mark in enumerate(marks)]


def _merge_messages(messages: Sequence[str]) -> list[str]:
    parts = [message.partition(" ") for message in messages]
    told = {mark: LoadReceipt.from_json(text) for mark, _, text in parts if text}
    merged = merge_receipts([told[mark] for mark, _, _ in parts])
    return [merged.to_json()] * len(messages)


def not_restored(receipt: LoadReceipt, done: str) -> NotRestoredError:
    """For a load that may leave nothing as it was, and has `done` so much."""
    return NotRestoredError(
        f"{receipt}\n{done} Make the state dict fit the checkpoint, or load with "
        "strict=False and look at `LoadReport.receipt()`, which says the same."
    )


def _worst(by_line: Mapping[ReceiptLine, list[int]], holders: int) -> ReceiptLine:
    line = min(by_line, key=lambda line: _FATES.index(line.fate))
    ranks = sorted(by_line[line])
    own = () if len(ranks) == holders else tuple(ranks)
    return ReceiptLine(line.fate, line.stored, line.loaded, own)


def _sorted(lines: Mapping[str, ReceiptLine]) -> dict[str, ReceiptLine]:
    return dict(sorted(lines.items(), key=lambda item: (_FATES.index(item[1].fate), item[0])))


def _table(groups: Mapping[str, Mapping[Fate, int]]) -> list[str]:
    """The groups that are not restored as a whole."""
    bad = {group: counts for group, counts in groups.items() if {*counts} != {"restored"}}
    fates = [f for f in _FATES if f == "restored" or any(f in counts for counts in bad.values())]
    width = max(map(len, bad))
    heading = [f"{'group':<{width}}", *(f"{fate:>8}" for fate in fates)]
    rows = [
        [f"{group:<{width}}", *(f"{counts.get(fate, 0):>8}" for fate in fates)]
        for group, counts in bad.items()
    ]
    whole = len(groups) - len(bad)
    end = [f"({whole} other group{'s' if whole > 1 else ''}: all restored)"] if whole else []
    return ["  ".join(cells) for cells in (heading, *rows)] + end


def _to_dict(line: ReceiptLine) -> dict[str, Any]:
    cast_of = {"from": line.stored, "to": line.loaded} if line.fate == "cast" else {}
    return {"fate": line.fate, **cast_of, **({"ranks": line.ranks} if line.ranks else {})}


def _from_dict(read: Mapping[str, Any]) -> ReceiptLine:
    fate = cast(Fate, read["fate"])
    return ReceiptLine(fate, read.get("from", ""), read.get("to", ""), tuple(read.get("ranks", ())))
