"""A collector of OpenTelemetry that takes whatever it is sent, and counts only how much that is."""

from __future__ import annotations

from aiohttp import web

__all__ = ["Collector"]


class Collector:
    """`taken`: bytes so far, as they came over the wire."""

    def __init__(self) -> None:
        """Use `listen`."""
        self.taken = 0

    async def listen(self, port: int) -> web.AppRunner:
        """Serve on loopback; returns the runner to clean up."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", self._take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    async def _take(self, request: web.Request) -> web.Response:
        self.taken += len(await request.read())
        return web.Response(content_type="application/x-protobuf")
