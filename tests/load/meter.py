"""What measuring costs: microseconds of CPU per request, and what the SDK's instruments would take for the same.

python -m tests.load.meter
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from extproc.core import events
from extproc.core.request import Request, Session, Usage
from extproc.settings import load
from extproc.telemetry.conventions import Conventions
from extproc.telemetry.measures import Measures
from tests.doubles import request

REQUESTS = 20_000
REPEATS = 3


def streamed(number: int) -> Request:
    """One that streams, of one of 50,000 tenants and sessions that come again and again."""
    tenant = f"tenant-{number % 50_000}"
    return replace(request(), stream=True, tenant=tenant, session=Session(f"session-{number % 50_000}"))


def told(one: Request) -> tuple[events.Event, ...]:
    """What is heard of a request that waited and was answered."""
    usage = Usage(1000, 200)
    return (
        events.Admitted(one, ("primary",), 0.2, 0.3),
        events.Settled(one, "primary", 1, 200, usage, 0.2, 0.4, 3.0, asked="primary"),
    )


def cost_us(work: Callable[[int], None]) -> float:
    """Microseconds of CPU for each of many, the best of a few runs."""
    best = float("inf")
    for _ in range(REPEATS):
        before = time.process_time()
        for number in range(REQUESTS):
            work(number)
        best = min(best, (time.process_time() - before) / REQUESTS * 1e6)
    return best


def measured(requests: int) -> float:
    """Microseconds that all that is measured of a request takes, where so many different ones come by."""
    measures = Measures(Conventions.of(load(None, {})), time.monotonic)
    heard = [told(streamed(number)) for number in range(requests)]

    def work(number: int) -> None:
        for event in heard[number % requests]:
            measures(event)

    return cost_us(work)


def instruments(readers: int) -> float:
    """Microseconds that the SDK's instruments take for the eight values of a request."""
    provider = MeterProvider(metric_readers=[InMemoryMetricReader() for _ in range(readers)], shutdown_on_exit=False)
    histogram = provider.get_meter("bench").create_histogram("bench", unit="s")
    about = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "upstream": "primary"}

    def work(_: int) -> None:
        for _ in range(8):
            histogram.record(0.3, about)

    return cost_us(work)


def main() -> None:
    """Print them."""
    print(f"one tenant                {measured(1):6.1f} us per request")  # noqa: T201
    print(f"20,000 tenants, sessions  {measured(20_000):6.1f} us per request")  # noqa: T201
    for readers in (1, 2):
        print(f"SDK, {readers} reader(s)          {instruments(readers):6.1f} us per request")  # noqa: T201


if __name__ == "__main__":
    main()
