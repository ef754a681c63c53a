"""An explained request as a story to read in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from extproc.telemetry.words import seconds

__all__ = ["told"]


def told(known: Mapping[str, Any]) -> str:
    """The story of what `explain` says, for people."""
    lines = [f"{known['id'] or known['ticket']}: {_headline(known)}"]
    lines += [f"  {name:<10} {text}" for name, text in _told(known) if text]
    return "\n".join(lines) + "\n"


def _headline(known: Mapping[str, Any]) -> str:
    upstream = known.get("choice", {}).get("upstream", "")
    served, lasted = known.get("settlement", {}).get("upstream", ""), seconds(known["lasted_s"])
    refusal = known.get("refusal", {})
    heads = {
        "refused": f"refused after {lasted}: {refusal.get('reason')} ({refusal.get('words')})",
        "served": f"served by {served} in {lasted}",
        "failed": f"went to {served or upstream}, and failed after {lasted}",
        "evicted": f"evicted at {served} after {lasted}: a later copy of it took its place",
        "left": f"its client left after {lasted}",
        "unknown": f"went to {upstream}; what became of it is not known",
        "running": f"runs at {upstream}, {lasted} since it came",
    }
    return heads.get(known["state"], f"{known['state']}, {lasted} since it came")


def _told(known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of the lines of a story, in the order of time. Without a name they go on with the one before."""
    yield "arrived", _arrived(known)
    yield "asked", _told_asked(known.get("asked", {}))
    yield "size", known.get("size", {}).get("words", "")
    yield from _told_checks(known.get("checks", []))
    yield "queue", known.get("queue", {}).get("words", "")
    yield from _told_choice(known.get("choice", {}))
    yield from _told_attempts(known.get("attempts", []))
    yield "refused", _told_refusal(known.get("refusal", {}))
    yield "settled", known.get("settlement", {}).get("words", "")
    for over in known.get("settlement", {}).get("into_debt", []):
        yield "", f"{over['amount']:.0f} of {over['words']} were taken into debt"
    for note in known.get("notes", []):
        yield "note", note
    if earlier := known.get("earlier_of_this_id"):
        yield "note", f"{earlier} with the same id came before it"


def _arrived(known: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(known["arrived"], UTC).isoformat(" ", "milliseconds").replace("+00:00", " UTC")
    caller = known.get("caller", {})
    who = [f"{name} {caller[name]}" for name in ("tenant", "lane", "session") if caller.get(name)]
    return ", ".join([at, *who, f"ticket {known['ticket']}"])


def _told_asked(asked: Mapping[str, Any]) -> str:
    if "model" not in asked:
        return str(asked.get("path", ""))
    stream = " as a stream" if asked["stream"] else ""
    deadline = f", deadline in {seconds(asked['deadline_s'])}" if "deadline_s" in asked else ""
    observed = ", only observed" if asked.get("observed") else ""
    may = seconds(asked["may_wait_s"])
    return (
        f"{asked['endpoint']} of {asked['model']}{stream}, {asked['bytes']} bytes; may wait {may}{deadline}{observed}"
    )


def _told_checks(checks: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    passed = [check["check"] for check in checks if check["passed"]]
    failed = [check for check in checks if not check["passed"]]
    yield "checks", f"passed: {', '.join(passed)}" if passed else ""
    for check in failed:
        yield "" if passed else "checks", f"not passed: {check['check']} ({check['words']})"


def _told_choice(choice: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    order = choice.get("order", [])
    if order:
        behind = f", then {', '.join(order[1:])} if that fails" if order[1:] else ""
        yield "choice", f"{order[0]}{behind}"
    for number, one in enumerate(choice.get("others", [])):
        yield "" if order or number else "upstreams", f"{one['upstream']} {one['words']}"


def _told_attempts(attempts: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for one in attempts:
        if one["ok"]:
            first = one["first_token_s"]
            yield (
                "attempt",
                f"{one['upstream']} answered {one['status']}"
                + (f", first token after {seconds(first)}" if first is not None else ""),
            )
        elif "seconds" in one:
            then = f"; {one['then']} was asked next" if one["then"] else ""
            yield "attempt", f"{one['upstream']} failed after {seconds(one['seconds'])}: {one['cause']}{then}"
        else:
            status = f"answered {one['status']}: " if one["status"] else ""
            yield "attempt", f"{one['upstream']} {status}{one['cause']}"


def _told_refusal(refusal: Mapping[str, Any]) -> str:
    if not refusal:
        return ""
    again = refusal["retry_after_s"]
    hint = "a retry cannot help" if again is None else f"may come again in {seconds(again)}"
    detail = f"; {refusal['detail']}" if refusal["detail"] else ""
    instead = "; the answer written for this case was given instead" if refusal.get("answered_instead") else ""
    return f"{refusal['reason']}, status {refusal['status']}{detail}; {hint}{instead}"
