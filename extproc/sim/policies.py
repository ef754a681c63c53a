"""Other policies to compare with, made of the user's own: the same code under other rules.

    none        no gateway at all; clients back off alone
    fifo        one queue in front of the upstreams: no lanes, no tenants, no shares
    priority    lanes of strict priority: no shares, nothing kept free, nothing smoothed, no fairness
    tidegate    the config as it is

Limits of upstreams, headroom, breakers, chains and KV watermarks are the same in all of them, but for what is left to
better lanes. Where nothing tells requests apart the one queue lets each wait as long as the most patient lane does.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from math import inf

from extproc.core.policy import Lane, Pacing, Policy, RetryRules, SessionLimits, Tenant, Upstream, WhenBusy

__all__ = ["PolicyName", "policy_of"]

ONE = "all"


class PolicyName(StrEnum):
    """See the head of this file."""

    NONE = "none"
    FIFO = "fifo"
    PRIORITY = "priority"
    TIDEGATE = "tidegate"


def policy_of(name: PolicyName, policy: Policy) -> Policy:
    """The rules of `name`, made of the user's."""
    match name:
        case PolicyName.FIFO:
            return _plain(policy, {ONE: _one_queue(policy)})
        case PolicyName.PRIORITY:
            return _plain(policy, {lane.name: _strict(lane) for lane in policy.lanes.values()})
        case _:
            return policy


def _plain(policy: Policy, lanes: dict[str, Lane]) -> Policy:
    """Without tenants, sessions or rules for retries."""
    names = tuple(lanes)
    everybody = Tenant("default", names, names[0])
    return replace(
        policy,
        lanes=lanes,
        tenants={"default": everybody},
        any_tenant=None,
        upstreams={name: _even(upstream) for name, upstream in policy.upstreams.items()},
        sessions=SessionLimits(new_share=1.0),
        retries=RetryRules(share=1.0, least_per_s=inf),
    )


def _one_queue(policy: Policy) -> Lane:
    lanes = policy.lanes.values()
    return Lane(
        name=ONE,
        rank=0,
        max_wait_s=max(lane.max_wait_s for lane in lanes),
        when_busy=WhenBusy.SPILL,
        spill_after_s=min(lane.spill_after_s for lane in lanes),
        max_requests=sum(lane.max_requests for lane in lanes),
        max_tokens=sum(lane.max_tokens for lane in lanes),
        max_bytes=sum(lane.max_bytes for lane in lanes),
    )


def _strict(lane: Lane) -> Lane:
    return replace(lane, min_share=0.0, keep_free=0.0, pacing=Pacing.BURST, lifo_above=None)


def _even(upstream: Upstream) -> Upstream:
    """The same marks for everybody, and nothing reserved."""
    return replace(upstream, burn=None, kv=upstream.kv and replace(upstream.kv, lanes={}))
