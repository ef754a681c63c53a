"""What a flood of batch work costs the people who wait for a first token: steady P0 streams, with and without 1,000 P2
jobs behind them, in one run on a real Envoy.

    python -m tests.load.flood [--seconds 15] [--rounds 2] [--jobs 1000]

Two upstreams, one at a time: a provider with a token limit, and an engine with a few slots. P0 alone would use a third
of it; the jobs ask for far more than the rest. Calm and flooded phases take turns; the figure is the ratio of the 99th
percentiles of P0's first token. The jobs' own share is told, for a lane that is simply stopped costs nobody anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

from extproc.settings import Settings  # noqa: E402
from extproc.sim.figures import percentile  # noqa: E402
from extproc.stack import Stack  # noqa: E402
from tests.e2e.conftest import fill_buckets, settings_for  # noqa: E402

P0_PER_S = 8.0
P0_TOKENS, P2_TOKENS = 100, 400
PROMPT = "word " * 40
FAKE = {"first_token_s": 0.1, "output_tokens_per_s": 400, "tokens_per_event": 20}
UPSTREAMS = {
    "provider": {"limits": [{"tpm": 240_000, "rpm": 60_000}], "fake": FAKE, "owned": True},
    "engine": {"concurrency": 12, "fake": FAKE, "owned": True},
}


async def first_token(session: aiohttp.ClientSession, url: str, lane: str, tokens: int) -> tuple[int, float]:
    """One stream, read to its end: its status, and seconds until its first byte."""
    body = {"model": "m", "max_tokens": tokens, "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
    began = time.monotonic()
    async with session.post(url, json=body, headers={"x-tidegate-priority": lane}) as response:
        await response.content.readany()
        at = time.monotonic() - began
        await response.read()
        return response.status, at


async def steady(session: aiohttp.ClientSession, url: str, seconds: float) -> list[tuple[int, float]]:
    """P0 at its own pace, whatever becomes of it."""
    sent, began = [], time.monotonic()
    for n in range(int(seconds * P0_PER_S)):
        await asyncio.sleep(began + n / P0_PER_S - time.monotonic())
        sent.append(asyncio.create_task(first_token(session, url, "P0", P0_TOKENS)))
    return await asyncio.gather(*sent)


async def phase(url: str, seconds: float, jobs: int) -> tuple[list[tuple[int, float]], int]:
    """P0 for so long over a flood of `jobs`; how many jobs were done meanwhile."""
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        flood = [asyncio.create_task(first_token(session, url, "P2", P2_TOKENS)) for _ in range(jobs)]
        await asyncio.sleep(2.0 if jobs else 0.0)
        seen = await steady(session, url, seconds)
        done = sum(task.done() and not task.exception() and task.result()[0] == 200 for task in flood)
        for task in flood:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*flood, return_exceptions=True)
    await asyncio.sleep(3.0)
    return seen, done


def measure(settings: Settings, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Calm and flooded phases in turn."""
    calm: list[tuple[int, float]] = []
    flooded: list[tuple[int, float]] = []
    jobs = 0
    with Stack(settings, folder, workers=1) as stack:
        url = f"{stack.url}/v1/chat/completions"
        for _ in range(options.rounds):
            calm += uvloop.run(phase(url, options.seconds, 0))[0]
            seen, done = uvloop.run(phase(url, options.seconds, options.jobs))
            flooded += seen
            jobs += done
    before, during = (sorted(s for status, s in seen if status == 200) for seen in (calm, flooded))
    p99 = [percentile(seen, 0.99) or 0.0 for seen in (before, during)]
    p50 = [percentile(seen, 0.5) or 0.0 for seen in (before, during)]
    return {
        "p0_sent": len(flooded), "p0_served": len(during), "jobs_done": jobs,
        "p50_calm_s": p50[0], "p50_flood_s": p50[1], "p99_calm_s": p99[0], "p99_flood_s": p99[1],
        "ratio_p99": p99[1] / p99[0] if p99[0] else 0.0,
    }  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--only", choices=list(UPSTREAMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns = ("upstream", "P0 served", "first token p50 calm / flood", "p99 calm / flood", "ratio of p99", "jobs done")
    table = Table(*columns)
    found = {}
    for name, upstream in UPSTREAMS.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="tidegate-flood-") as folder:
                settings = settings_for(
                    upstreams={name: dict(upstream)}, service={"state_file": str(Path(folder) / "levels.json")}
                )
                fill_buckets(settings)
                seen = found[name] = measure(settings, Path(folder), options)
            table.add_row(
                name,
                f"{seen['p0_served']:g} of {seen['p0_sent']:g}",
                f"{seen['p50_calm_s']:.3f} / {seen['p50_flood_s']:.3f} s",
                f"{seen['p99_calm_s']:.3f} / {seen['p99_flood_s']:.3f} s",
                f"{seen['ratio_p99']:.2f}",
                f"{seen['jobs_done']:g}",
            )
    Console(width=140).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
