"""The Lua scripts, run by LuaJIT on a stand-in of what Envoy gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lupa import luajit21

from extproc.render.lua import tail_script, upstream_script
from tests.render.rig import settings_of, upstream
from tests.render.streams import Data, Stream

CHAT = "/v1/chat/completions"


class Script:
    """A script in a Lua state of its own."""

    def __init__(self, text: str) -> None:
        self.lua = luajit21.LuaRuntime(encoding=None)
        self.lua.execute(Path(__file__).with_name("stand_in.lua").read_bytes())
        self.lua.execute(text.encode())
        self.respond = self.lua.globals()[b"envoy_on_response"]

    def call(self, name: str, *given: Any) -> Any:
        """Call a function of the stand-in with `envoy_on_response` and values."""
        return self.lua.globals()[name.encode()](self.respond, *map(self.value, given))

    def value(self, value: Any) -> Any:
        """A Python value as Lua has it."""
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, Mapping):
            return self.lua.table_from({self.value(k): self.value(v) for k, v in value.items()})
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return self.lua.table_from([self.value(item) for item in value])
        return value


class Tail(Script):
    """What reads a streamed answer."""

    def __init__(self, text: str = tail_script()) -> None:
        super().__init__(text)

    def run(
        self, stream: Stream, *, route: Data | None = None, ending: str = "data", headers: Data | None = None
    ) -> Ran:
        """Play a stream; `route` is what admission wrote."""
        if route is None:
            route = {"ticket": "t", "dialect": stream.dialect, "hide_usage": stream.hide, "path": stream.path}
            route |= {} if stream.cap is None else {"cap": stream.cap}
            route |= {"stops": 1.0} if stream.stops else {}
            route |= {"results": 1.0} if stream.results else {}
        names = {":status": "200", "content-type": "text/event-stream", **(headers or {})}
        sent, tail, writes, logged, left = self.call("run", names, route, stream.chunks, ending)
        return Ran(list(sent.values()), _words(tail), writes, list(logged.values()), {key.decode() for key in left})


class Ran:
    """What came of a stream."""

    def __init__(
        self, sent: list[bytes], notes: dict[str, Any], writes: int, logged: list[bytes], headers: set[str]
    ) -> None:
        self.sent = sent
        self.notes = notes
        self.writes = writes
        self.logged = logged
        self.headers = headers
        self.out = b"".join(sent)


@dataclass
class Answered:
    """What came of one attempt."""

    headers: dict[str, str]
    notes: dict[str, Any]
    limits: dict[str, Any]

    @property
    def status(self) -> int:
        """As the router sees it: 429 and 5xx are tried elsewhere, or end as Envoy's own words."""
        return int(self.headers[":status"])

    @property
    def passed(self) -> bool:
        """Whether the caller gets this answer."""
        return self.status < 500 and self.status != 429

    @property
    def error(self) -> tuple[str, str]:
        """Type and code, as the attempts log has them."""
        kind, _, code = self.headers.get("x-tg-err", "").partition("/")
        return kind, code

    @property
    def logged_status(self) -> int:
        """The status that the record has (`wire.codec`)."""
        sent = int(self.headers.get("x-tg-status", 0))
        return sent if sent >= 400 else self.status


class Attempt(Script):
    """What reads an answer at `here`, an upstream of the provider. Others of a chain: before, `wide` and `narrow`."""

    def __init__(self, provider: str, profile: str = "native", **said: Any) -> None:
        url = "http://127.0.0.1:1"
        settings = settings_of(
            f"gateway: {{profile: {profile}}}",
            here=upstream(1, provider=provider, url=url, window=1000, **said),
            wide=upstream(1, window=2000),
            narrow=upstream(1, window=1000),
        )
        super().__init__(upstream_script(settings, "here"))

    def ask(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of a request as it leaves."""
        table = self.value({":path": CHAT, **headers})
        self.lua.globals()[b"attempt"](self.lua.globals()[b"envoy_on_request"], table, self.value({"path": CHAT}), b"")
        return {key.decode(): value.decode() for key, value in table.items()}

    def run(
        self,
        body: bytes,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        then: Sequence[str] = (),
        path: str = CHAT,
        cap: int | None = None,
        stops: bool = False,
        results: bool = False,
        again: bool = False,
    ) -> Answered:
        """Read an answer. then: those that come after it in the order. again: it may be asked a second time."""
        names = {":status": str(status), "content-type": "application/json", **(headers or {})}
        route: Data = {"ticket": "t", "path": path, "priority_groups": [{"name": name} for name in ("here", *then)]}
        if again:
            route["again"] = True
        if cap is not None:
            route["cap"] = float(cap)
        if stops:
            route["stops"] = 1.0
        if results:
            route["results"] = 1.0
        table = self.value(names)
        written = self.lua.globals()[b"attempt"](self.respond, table, self.value(route), body)
        left = {key.decode(): value.decode() for key, value in table.items()}
        return Answered(left, _words(written[b"llm.tail"]), _words(written[b"llm.limits"]))


def _words(table: Any) -> dict[str, Any]:
    return {k.decode(): v.decode() if isinstance(v, bytes) else v for k, v in table.items()}
