"""The ledger: each equation that does not hold is named, and rows that balance add up to a fleet that balances."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.accounts.ledger import FleetLedger, LedgerRow, Settled, WorkerTotals, add_up

ROW = LedgerRow(
    slot=1,
    incarnation=2,
    totals=WorkerTotals(
        seq=9,
        stepped=100,
        open=10,
        shipped=70,
        shipped_chunks=7,
        discarded={"env_exception": 12, "reset": 3},
        dropped={"oversize": (5, 1)},
    ),
    accepted=(60, 6),
    held=(20, 2),
    settled=Settled(seq=5, committed=(30, 3), dropped={"stale": (10, 1)}),
    lost={"worker_killed": (10, 1)},
)


def _changed(row: LedgerRow, **changes: Any) -> LedgerRow:
    return row.model_copy(update=changes)


def test_a_balanced_ledger_row_has_no_problems() -> None:
    assert list(ROW.problems()) == []
    assert (
        list(
            LedgerRow(
                slot=0, incarnation=1, totals=WorkerTotals(), accepted=(0, 0), held=(0, 0), settled=Settled()
            ).problems()
        )
        == []
    )


T = ROW.totals


@pytest.mark.parametrize(
    ("changes", "equation"),
    [
        ({"totals": T.model_copy(update={"stepped": 101})}, "stepped 101 != open 10"),
        ({"totals": T.model_copy(update={"open": 9})}, "open 9"),
        ({"totals": T.model_copy(update={"discarded": {}})}, "discarded 0"),
        ({"totals": T.model_copy(update={"dropped": {}})}, "dropped 0"),
        ({"totals": T.model_copy(update={"shipped": 71, "stepped": 101})}, r"shipped \(71, 7\) != accepted"),
        (
            {"totals": T.model_copy(update={"module_steps": {"a": 40, "b": 21}})},
            "60 steps != those of its modules 61",
        ),
        ({"totals": T.model_copy(update={"shipped_chunks": 8})}, r"shipped \(70, 8\) != accepted"),
        ({"lost": {}}, r"lost \(0, 0\)"),
        ({"held": (21, 2)}, r"accepted \(60, 6\) != held \(21, 2\)"),
        ({"held": (20, 3)}, r"held \(20, 3\)"),
        ({"settled": Settled(seq=5, committed=(30, 3))}, r"settled \(30, 3\)"),
        ({"closed": True}, "closed with 10 steps still open"),
    ],
)
def test_each_equation_that_does_not_hold_is_named(changes: dict[str, Any], equation: str) -> None:
    problems = list(_changed(ROW, **changes).problems())
    assert len(problems) == 1
    assert problems[0].startswith("slot 1 incarnation 2: ")
    with pytest.raises(AssertionError, match=equation):
        raise AssertionError(problems[0])


def test_a_row_survives_json() -> None:
    assert LedgerRow.model_validate_json(ROW.model_dump_json()) == ROW


@given(
    st.lists(
        st.tuples(
            *[st.integers(0, 50)] * 6, st.sampled_from(["stale", "overflow"]), st.sampled_from(["reset", "env_hang"])
        ),
        max_size=5,
    )
)
def test_rows_that_balance_add_up_to_a_fleet_that_balances(numbers: list[tuple[Any, ...]]) -> None:
    rows = {}
    for slot, (opened, discarded, held, committed, dropped, lost, drop, discard) in enumerate(numbers):
        accepted = held + committed + dropped
        shipped = accepted + lost
        rows[slot, 1] = LedgerRow(
            slot=slot,
            incarnation=1,
            totals=WorkerTotals(
                stepped=opened + discarded + shipped, open=opened, shipped=shipped, discarded={discard: discarded}
            ),
            accepted=(accepted, 0),
            held=(held, 0),
            settled=Settled(committed=(committed, 0), dropped={drop: (dropped, 0)}),
            lost={"worker_killed": (lost, 0)},
        )
        assert list(rows[slot, 1].problems()) == []
    fleet = add_up(rows)
    assert fleet.balance() == 0
    assert fleet.stepped == sum(row.totals.stepped for row in rows.values())
    assert fleet.queued == sum(row.totals.open + row.held[0] for row in rows.values())


def test_the_balance_of_a_fleet_counts_unaccounted_steps() -> None:
    fleet = add_up({(1, 2): ROW})
    assert fleet.balance() == 0
    assert fleet.dropped == {"oversize": (5, 1), "worker_killed": (10, 1), "stale": (10, 1)}
    assert FleetLedger(stepped=5, committed=(3, 1)).balance() == 2


def test_settled_is_a_running_sum() -> None:
    settled = Settled().add((3, 1), {}).add((0, 0), {"stale": (4, 2)}).add((1, 1), {"stale": (1, 1), "poison": (2, 1)})
    assert settled == Settled(seq=3, committed=(4, 2), dropped={"stale": (5, 3), "poison": (2, 1)})
    assert settled.total() == (11, 6)
