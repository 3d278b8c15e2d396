"""The meaning of each reason of lost steps, in the words that all views use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.schemas.accounts.ledger import Discard, Drop, FleetLedger


@dataclass(frozen=True, slots=True)
class Loss:
    """A reason for which steps were discarded or dropped.

    - meaning: a sentence without its full stop, for tables.
    - by: the words after "steps lost" in the verdict; "" if the learner was not meant to get these steps.
    """

    meaning: str
    by: str


LOSSES: Mapping[str, Loss] = {
    f"discarded/{Discard.ENV_EXCEPTION}": Loss("the env raised", "by envs that raised"),
    f"discarded/{Discard.ENV_BAD_DATA}": Loss("the env's answer broke the contract", "by envs with bad data"),
    f"discarded/{Discard.ENV_HANG}": Loss("the env did not answer in time", "by envs that hung"),
    f"discarded/{Discard.ENV_CRASH}": Loss("the env's process ended by itself", "by envs that crashed"),
    f"discarded/{Discard.ENV_NEIGHBOUR}": Loss(
        "another env took down the process that both were in", "by crashes of neighbours"
    ),
    f"discarded/{Discard.ENV_HOST_LOST}": Loss(
        "the host of remote envs fell silent, left, or was refused", "with lost env hosts"
    ),
    f"discarded/{Discard.CLIENT_LOST}": Loss("the driver of an external episode is gone", "with lost clients"),
    f"discarded/{Discard.UNSHIPPED}": Loss(
        "a client that acts by itself could not bring them to its worker", "by clients that could not ship them"
    ),
    f"discarded/{Discard.TRAINING_DISABLED}": Loss("the episode was not to be trained on", ""),
    f"discarded/{Discard.FROZEN}": Loss("the module that acted is not trained", ""),
    f"discarded/{Discard.CALLBACK_EXCEPTION}": Loss("a callback raised", "by callbacks that raised"),
    f"discarded/{Discard.RESET}": Loss("episodes were abandoned, for example by force_reset", ""),
    f"discarded/{Discard.SHUTDOWN}": Loss("the worker was told to stop", ""),
    f"discarded/{Discard.FENCED}": Loss("the worker had been replaced", "by replaced workers"),
    f"discarded/{Discard.WORKER_KILLED}": Loss("the worker died", "by killed workers"),
    f"dropped/{Drop.WORKER_KILLED}": Loss("the worker died before a broker accepted them", "by killed workers"),
    f"dropped/{Drop.FENCED}": Loss("the worker had been replaced", "by replaced workers"),
    f"dropped/{Drop.BROKER_LOST}": Loss("only a broker that died had them", "with a lost broker"),
    f"dropped/{Drop.OVERFLOW}": Loss("more was held, or for longer, than the broker may", "by overflow"),
    f"dropped/{Drop.STALE}": Loss("their weights were more than broker.max_staleness versions behind", "as stale"),
    f"dropped/{Drop.OVERSIZE}": Loss("one chunk, without its infos, was larger than a message may be", "as oversize"),
    f"dropped/{Drop.POISON}": Loss("the broker or the learner could not read the batch", "as unreadable"),
    f"dropped/{Drop.GAP}": Loss("a batch before them is lost, so their episode cannot continue", "behind a gap"),
    f"dropped/{Drop.SHUTDOWN}": Loss("the fleet was stopped before they were delivered", "when the fleet stopped"),
    f"dropped/{Drop.BEFORE_GROUP}": Loss("they were settled before the consumer group began", ""),
    f"dropped/{Drop.OTHER}": Loss("for a reason that only a newer version knows", "for other reasons"),
}
"""By kind/reason."""

_UNKNOWN = Loss("", "for other reasons")


def loss_of(kind: str, reason: str) -> Loss:
    """Return what a reason means; a reason that only a newer version knows has no meaning."""
    return LOSSES.get(f"{kind}/{reason}", _UNKNOWN)


def losses_in_words(books: FleetLedger, nothing: str = "Nothing lost.") -> str:
    """Return a sentence on the steps that were taken and cannot be learned from, by reason; `nothing` without any."""
    counts = [
        *((loss_of("discarded", reason).by, steps) for reason, steps in books.discarded.items()),
        *((loss_of("dropped", reason).by, steps) for reason, (steps, _) in books.dropped.items()),
    ]
    by: dict[str, int] = {}
    for words, steps in counts:
        if words and steps:
            by[words] = by.get(words, 0) + steps
    parts = [f"{steps:,} {words}" for words, steps in by.items()]
    return f"{', '.join(parts).replace(' ', ' steps lost ', 1)}." if parts else nothing
