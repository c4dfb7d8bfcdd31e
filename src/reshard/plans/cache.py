"""What save planners remember from one save to the next."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.api import StalePlanError
from reshard.metadata import Metadata
from reshard.planner import SavePlan
from reshard.plans.global_plan import FINGERPRINT_BYTES, plan_fingerprint

_START_OVER = "forget_cached_plans() on every rank's planner"


@dataclass
class PlanCache:
    """What planners remember from one save to the next, on this rank.

    A planner has one of its own. Pass one explicitly to go on with it in another
    planner. An entry is only used when the fingerprints of all ranks say that nothing
    changed, so planners of different models can never confuse each other.
    """

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    # Of this rank: its last accepted plan, and the coordinator's answer to it.
    local_plan: SavePlan | None = None
    final_plan: SavePlan | None = None
    # Of the coordinator: the last plan of each rank, and what came of them.
    all_plans: list[SavePlan] = field(default_factory=list)
    global_plan: list[SavePlan] = field(default_factory=list)
    metadata: Metadata | None = None
    answer_fingerprints: dict[int, bytes] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything but the key."""
        vars(self).update(vars(PlanCache(self.key)))

    def contents(self) -> dict[str, Any]:
        """What is remembered, by the names that DCP has for it."""
        return {
            "save_plan": self.local_plan,
            "final_save_plan": self.final_plan,
            "all_plans": self.all_plans,
            "global_plan": self.global_plan,
            "metadata": self.metadata,
        }

    def abbreviate(self, plan: SavePlan) -> SavePlan:
        """`plan`, or a fingerprint in its place if it is the last plan that was accepted.

        The fingerprint says which plan this is, and which one it became last time.
        """
        if self.local_plan is None or plan.fingerprint != self.local_plan.fingerprint:
            return plan
        final = self.final_plan
        answer = b"" if final is None else plan_fingerprint(final)
        return SavePlan([], usable=False, fingerprint=plan.fingerprint + answer)

    def plan(
        self,
        all_plans: Sequence[SavePlan],
        create: Callable[[Sequence[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> tuple[list[SavePlan], Metadata]:
        """The global plan, made anew by `create` only if some rank sends another plan."""
        self._check_known(all_plans)
        if any(plan.usable for plan in all_plans) or self.metadata is None:
            self.all_plans = [
                plan if plan.usable else self.all_plans[rank] for rank, plan in enumerate(all_plans)
            ]
            self.metadata, self.answer_fingerprints = None, {}
            self.global_plan, self.metadata = create(self.all_plans)
        return self.global_plan, self.metadata

    def _check_known(self, all_plans: Sequence[SavePlan]) -> None:
        """A rank that sends a fingerprint must be known by it."""
        known = self.all_plans
        stale = [
            rank
            for rank, plan in enumerate(all_plans)
            if not plan.usable
            and (
                len(known) != len(all_plans)
                or known[rank].fingerprint != plan.fingerprint[:FINGERPRINT_BYTES]
            )
        ]
        if stale:
            raise StalePlanError(
                f"ranks {stale} refer to plans that the coordinator does not hold. Call "
                f"{_START_OVER}, or make new planners, and save again"
            )

    def answers(self, all_plans: Sequence[SavePlan]) -> list[SavePlan]:
        """For each rank its part of the global plan, or that it should do what it did last."""
        return [
            SavePlan([], usable=False)
            if not plan.usable
            and plan.fingerprint[FINGERPRINT_BYTES:] == self._answer_fingerprint(rank)
            else self.global_plan[rank]
            for rank, plan in enumerate(all_plans)
        ]

    def _answer_fingerprint(self, rank: int) -> bytes:
        if rank not in self.answer_fingerprints:
            self.answer_fingerprints[rank] = plan_fingerprint(self.global_plan[rank])
        return self.answer_fingerprints[rank]

    def final(self, answer: SavePlan) -> SavePlan:
        """The plan that this rank carries out, given the coordinator's answer."""
        if answer.usable:
            self.final_plan = answer
        elif self.final_plan is None:
            raise StalePlanError(
                "the coordinator refers to a plan that this rank does not hold. Call "
                f"{_START_OVER} and save again"
            )
        # The storage's part of the answer is new each time.
        return dataclasses.replace(self.final_plan, storage_data=answer.storage_data)
