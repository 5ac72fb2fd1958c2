"""Words: names taken apart, and what their verbs say about a second call."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Literal

from effectfence.scan.tables import table

_SPLIT: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")

Meaning = Literal["effect", "same", "read"]

REPEATS: Final = table(
    """create send post add append insert publish charge transfer pay payout refund submit place
    order book invite reply comment upload push enqueue emit trigger run launch spawn duplicate
    clone generate register issue mint swap buy sell notify broadcast forward produce incr
    increment decr decrement import schedule dispatch invoke pop lpush rpush lpop rpop xadd lrem
    restart mutate track copy initialize deposit withdraw capture execute record log purchase
    donate tip recreate build announce email text sms call dial message tweet toot share request
    initiate enroll stake unshift requeue rerun retry reissue resend compose write_draft draft
    start_job provision new quote"""
)
SAME: Final = table(
    """update set put patch delete remove upsert merge archive unarchive close reopen cancel enable
    disable start stop pause resume rename move replace assign unassign mark unsubscribe revoke
    grant approve reject accept claim reclaim release unlock follow unfollow star unstar pin
    unpin leave save write edit modify change complete uncomplete confirm tag untag link unlink
    attach detach clear reset restore purge drop truncate kill terminate destroy expire persist
    deploy apply pull install uninstall upgrade rollback sync overwrite store mkdir rmdir ban
    unban block unblock mute unmute answer declare decide hide unhide activate deactivate
    suspend subscribe settle void finalize finish end abort scale cordon uncordon drain
    bulk_update hset hdel hmset sadd srem zadd zrem del flushall flushdb xdel xack resolve
    unresolve trash untrash empty erase vote upvote downvote like unlike react wipe evict
    disconnect transition toggle shutdown reboot commit checkout rebase fork save_changes
    associate disassociate bind unbind register_or_update add_or_update lock remember forget"""
)
READS: Final = table(
    """get list find fetch read search query count status info check describe show view is has
    exists simulate estimate preview validate verify parse format encode decode lookup load peek
    scan inspect explain compare diff stat summarize summary retrieve ls cat head tail select
    filter browse discover test ping health analyze analyse calculate compute resolve_id wait
    poll watch monitor whoami sign hash encrypt decrypt compress convert transform render dry
    history metadata can should needs to from as with available screen rank geocode"""
)
MONEY: Final = table(
    """pay payment payments payout payouts charge charges refund refunds transfer transfers invoice
    invoices order orders purchase subscription subscriptions checkout billing bill deposit
    withdraw withdrawal balance stk mpesa wallet swap trade trades stake mint donate tip credit
    debit capture bank money price position positions"""
)
_NOUN_AFTER: Final = table(
    """label labels tag tags reaction reactions member members role roles user users contact
    contacts star watcher watchers collaborator collaborators assignee assignees observer
    subscriber follower permission permissions group segment participant"""
)
"""`add_label`, `addMember`: a set, in which a second one is no second."""


@lru_cache(maxsize=8192)
def words(name: str) -> tuple[str, ...]:
    """`createPaymentIntent`, `create_payment-intent` → create, payment, intent."""
    return tuple(part.lower() for part in _SPLIT.findall(name))


@lru_cache(maxsize=8192)
def meaning(name: str) -> Meaning | None:
    """What a name's verb promises about a second call: its first verb, wherever that stands."""
    parts = words(name)
    if not parts:
        return None
    joined = "_".join(parts)
    if joined in REPEATS:
        return "effect"
    if joined in SAME:
        return "same"
    if len(parts) == 2 and parts[1] in ("date", "time", "at"):
        return "read"  # `startDate`, `end_time`
    skipped: Meaning | None = None
    for at, part in enumerate(parts):
        if _DEEPEST_VERB < at < len(parts) - 1:
            continue
        if part in ("create", "add", "insert") and parts[at + 1 : at + 3] == ("or", "update"):
            return "same"
        if part == "resolve" and len(parts) > at + 1 and parts[at + 1] not in _RESOLVED:
            return "read"
        if part in READS:
            if at and part in ("to", "from", "as", "with", "can", "test", "available", "wait"):
                continue
            return "read"
        if part not in SAME and part not in REPEATS:
            continue
        said: Meaning = "same" if part in SAME else "effect"
        if part == "add" and parts[-1] in _NOUN_AFTER:
            said = "same"
        if part in _MOSTLY_NOUNS and (at or _verb_follows(parts[at + 1 :])):
            skipped = skipped or said
            continue
        return said
    return skipped


_DEEPEST_VERB: Final = 2
"""Later words of a long name speak of what it is about, but for the last."""
_RESOLVED: Final = table(
    """issue issues ticket tickets thread threads conversation conversations alert alerts incident
    incidents comment comments discussion case cases dispute todo request merge conflict"""
)
"""What is settled when it is resolved; anything else (a name, an address) is looked up."""


def _verb_follows(rest: tuple[str, ...]) -> bool:
    """`swap_pool_info`, `quote_verify`, `order_create`: the verb is the last word."""
    return bool(rest) and (
        rest[-1] in READS
        or rest[-1] in SAME
        or (rest[-1] in REPEATS - _MOSTLY_NOUNS)
        or rest[0] in READS
    )


_MOSTLY_NOUNS: Final = table(
    """order orders post comment message email text log record share request call charge invite
    build issue book place draft new quote upload run lock import tip transfer refund swap trade
    stake payout pay purchase donate schedule register release store set put close open end
    label mark star pin link tag vote like price stop start state apply request test pull push"""
)
"""Verbs at the front of a name; further back they name a thing, unless nothing stood before."""


def about_money(*names: str) -> bool:
    return any(part in MONEY for name in names for part in words(name))
