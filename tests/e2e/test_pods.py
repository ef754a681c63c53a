"""Rendered pods at work: they start and end in order, and one is replaced under load without anybody noticing."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from extproc.render import k8s
from extproc.settings import Settings
from extproc.stack import Stack, free_ports
from tests.certificates import Mounted, tls_of
from tests.e2e.conftest import chat, settings_for
from tests.e2e.doubles import CHAT, Upstream, until
from tests.e2e.pods import Pod

HTTP = httpx.Client(timeout=60)
LAG_S = 1.5
"""How long callers go on coming to a pod that ends, as they do until all have heard."""
STREAM = {"stream": True, "max_tokens": 240}
"""With the fake's speed a stream takes three seconds."""
FAKE = {"first_token_s": 0.05, "output_tokens_per_s": 80, "burst_s": 100_000}


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Stack]:
    """Only the fake provider of a stack, which outlives every pod."""
    settings = settings_for(upstreams={"vendor": {"owned": True, "concurrency": 1000, "fake": FAKE}})
    stack = Stack(settings, tmp_path / "provider")
    stack.workdir.mkdir()
    try:
        stack.start_fake("vendor")
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that users other than ours may pass through, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="tidegate-pods-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def pods() -> Iterator[Callable[[Pod], Pod]]:
    """Starts pods, and sees to it that nothing of them is left."""
    with ExitStack() as running:

        def start(pod: Pod) -> Pod:
            running.callback(pod.kill)
            pod.start()
            return pod

        yield start


def gateway(folder: Path, **overrides: Any) -> tuple[Settings, Pod]:
    """A pod of a gateway of its own, on ports of its own."""
    metrics = {"metrics_port": free_ports(1)[0]}
    settings = settings_for(**{**overrides, "gateway": {**metrics, **overrides.get("gateway", {})}})
    documents = k8s.objects(settings)
    config = {each["metadata"]["name"]: each for each in documents if each["kind"] == "ConfigMap"}
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    keys = {entry: Path(file).read_text("utf-8") for entry, file in k8s.needed_files(settings).items()}
    return settings, Pod(deployment["spec"]["template"]["spec"], config, folder, {"tidegate-files": keys})


def state(settings: Settings) -> dict[str, Any]:
    """A pod's state page."""
    return dict(HTTP.get(f"http://{settings.service.console}/state").json())


def settled(settings: Settings) -> bool:
    """Whether nothing waits, flies, is unsettled or holds a slot."""
    told = state(settings)
    held = [counter for counter in told["counters"].values() if counter.get("used", 0)]
    return not (held or told["flying"] or told["unsettled"])


def balanced(settings: Settings) -> bool:
    """Whether it comes to that, and by the records of Envoy, not for want of them."""
    until(lambda: settled(settings))
    return state(settings)["tally"]["unknown_usage"] == 0


class Callers:
    """Clients that call without a pause: short requests on connections that are kept, and streams. All go to `port`."""

    def __init__(self, port: int) -> None:
        """Nothing is sent before `run`."""
        self.port = port
        self.sent = itertools.count()
        self.good = 0
        self.bad: list[str] = []
        self.over = False

    async def run(self) -> None:
        """Until `over`."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
            callers = [self._short(session) for _ in range(3)] + [self._streams(session) for _ in range(6)]
            await asyncio.gather(*callers)

    async def _short(self, session: aiohttp.ClientSession) -> None:
        while not self.over:
            await self._ask(session, chat(f"short {next(self.sent)}", max_tokens=4), b'"finish_reason"')
            await asyncio.sleep(0.05)

    async def _streams(self, session: aiohttp.ClientSession) -> None:
        while not self.over:
            await self._ask(session, chat(f"stream {next(self.sent)}", **STREAM), b"data: [DONE]\n\n")

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], end: bytes) -> None:
        try:
            async with session.post(f"http://127.0.0.1:{self.port}{CHAT}", json=body) as answer:
                data = await answer.read()
                good = answer.status == 200 and end in data
                told = "" if good else f"{answer.status} {data[-200:]!r}"
        except aiohttp.ClientError as error:
            good, told = False, repr(error)
        self.good += good
        self.bad += [told] if told else []


async def test_a_pod_is_replaced_under_load_and_nobody_notices(
    provider: Stack, open_folder: Path, pods: Callable[[Pod], Pod]
) -> None:
    """A new pod is up, then the old one ends: hook, Envoy, Tidegate. Callers come to the old one for a while after it
    began to end, and streams are under way: all get whole answers, and Tidegate has heard of every outcome at its end.
    """
    upstreams = {"vendor": provider.settings.upstreams["vendor"].model_dump(mode="json", exclude_unset=True)}
    old_settings, old = gateway(open_folder / "old", upstreams=upstreams)
    new_settings, new = gateway(open_folder / "new", upstreams=upstreams)
    await asyncio.to_thread(pods, old)
    assert old.ready()
    assert old.alive()
    callers = Callers(old_settings.gateway.port)
    calling = asyncio.create_task(callers.run())
    await asyncio.to_thread(pods, new)
    assert new.ready()
    await asyncio.to_thread(until, lambda: provider.record("vendor")["in_flight"] >= 4)
    books: list[bool] = []
    ending = asyncio.create_task(asyncio.to_thread(old.terminate, lambda: books.append(balanced(old_settings))))
    await asyncio.sleep(LAG_S)
    callers.port = new_settings.gateway.port
    await ending
    before = callers.good
    await asyncio.to_thread(until, lambda: callers.good >= before + 5 or callers.bad)
    callers.over = True
    await calling
    assert callers.bad == []
    assert callers.good == next(callers.sent)
    assert old.hooks == [("envoy", 0)]
    assert old.ended == [("envoy", 0), ("tidegate", 0)]
    assert books == [True]
    assert len(provider.record("vendor")["requests"]) == callers.good
    await asyncio.to_thread(until, lambda: settled(new_settings))
    await asyncio.to_thread(new.terminate)
    assert new.ended == [("envoy", 0), ("tidegate", 0)]


def test_a_pod_writes_nothing_but_its_state(provider: Stack, open_folder: Path, pods: Callable[[Pod], Pod]) -> None:
    """Its root is read-only, it has no rights and is nobody, and it works, with mutual TLS inside and probes that know
    none. No file is open for writing but the log, which is a pipe in a cluster; and what is left is the levels.
    """
    upstreams = {"vendor": provider.settings.upstreams["vendor"].model_dump(mode="json", exclude_unset=True)}
    tls = {**tls_of(Mounted(open_folder / "own", "tidegate.svc")), "server_name": "tidegate.svc"}
    service = {"tls": tls, "health": f"127.0.0.1:{free_ports(1)[0]}"}
    settings, pod = gateway(open_folder / "pod", upstreams=upstreams, service=service)
    pods(pod)
    assert pod.ready()
    assert pod.alive()
    url = f"http://127.0.0.1:{settings.gateway.port}{CHAT}"
    assert HTTP.post(url, json=chat()).status_code == 200
    logs = {str(open_folder / "pod" / f"{name}.log") for name in ("envoy", "tidegate")}
    assert pod.written_to() <= logs
    pod.terminate()
    assert json.loads((open_folder / "pod" / "tidegate-state" / "levels.json").read_text("utf-8"))["levels"] is not None


def test_a_secret_that_kubernetes_changes_is_in_use_at_once(open_folder: Path, pods: Callable[[Pod], Pod]) -> None:
    """By the link that it swaps; the pod is not restarted."""
    (open_folder / "own-key").write_text("sk-old", "utf-8")
    with Upstream().listening() as vendor:
        settings, pod = gateway(
            open_folder / "pod",
            gateway={"drain_s": 1},
            upstreams={
                "vendor": {
                    "provider": "openai", "url": f"http://127.0.0.1:{vendor.port}", "concurrency": 9, "owned": True,
                    "key_file": str(open_folder / "own-key"), "follow_headers": False,
                }
            },
        )  # fmt: skip
        pods(pod)
        url = f"http://127.0.0.1:{settings.gateway.port}{CHAT}"

        def asked_with() -> bytes | None:
            assert HTTP.post(url, json=chat()).status_code == 200
            return vendor.last().get("authorization")

        assert asked_with() == b"Bearer sk-old"
        mounted = open_folder / "pod" / "tidegate-files"
        (mounted / "..2").mkdir()
        (mounted / "..2" / "vendor.key").write_text("sk-new", "utf-8")
        (mounted / "..next").symlink_to("..2")
        (mounted / "..next").rename(mounted / "..data")
        until(lambda: asked_with() == b"Bearer sk-new", within_s=20)
        pod.terminate()


def test_a_pod_of_many_upstreams(provider: Stack, open_folder: Path, pods: Callable[[Pod], Pod]) -> None:
    """Fifty upstreams and two hundred routes: what Envoy reads is unpacked first, and any of them serves."""
    one = {"provider": "compatible", "url": provider.fakes["vendor"].url, "owned": True, "concurrency": 9}
    routes = [{"models": [f"m{i}"], "chain": [f"u{i % 50}"]} for i in range(200)]
    settings, pod = gateway(
        open_folder / "pod", upstreams={f"u{i}": one for i in range(50)}, routes=routes, gateway={"drain_s": 1}
    )
    assert "unpack" in [container["name"] for container in pod.spec["initContainers"]]
    pods(pod)
    url = f"http://127.0.0.1:{settings.gateway.port}{CHAT}"
    for i in (0, 199):
        answer = HTTP.post(url, json={**chat(), "model": f"m{i}"})
        assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, f"u{i % 50}")
    pod.terminate()


def test_a_drain_waits_for_who_is_still_answered(
    provider: Stack, open_folder: Path, pods: Callable[[Pod], Pod]
) -> None:
    """The hook is over when the last answer is, not before, and says so when its time is up."""
    upstreams = {"vendor": provider.settings.upstreams["vendor"].model_dump(mode="json", exclude_unset=True)}
    settings, pod = gateway(open_folder / "pod", upstreams=upstreams, gateway={"drain_s": 6})
    pods(pod)
    answers: list[str] = []

    def ask() -> None:
        body, headers = chat(stream=True), {"x-fake-fault": "stall;s=60;at=4"}
        url = f"http://127.0.0.1:{settings.gateway.port}{CHAT}"
        try:
            answers.append(HTTP.post(url, json=body, headers=headers).text)
        except httpx.HTTPError:
            answers.append("cut")

    caller = threading.Thread(target=ask)
    caller.start()
    until(lambda: provider.record("vendor")["in_flight"] == 1)
    began = time.monotonic()
    pod.terminate()
    caller.join()
    assert time.monotonic() - began >= 6
    assert pod.hooks == [("envoy", 1)]
    assert "not everybody was done after gateway.drain_s (6 s)" in pod.folder.joinpath("envoy.hooks.log").read_text()
    assert answers == ["cut"]
    assert [name for name, _ in pod.ended] == ["envoy", "tidegate"]


def test_a_sidecar_is_up_before_its_application_and_ends_after_it(
    provider: Stack, open_folder: Path, pods: Callable[[Pod], Pod]
) -> None:
    """The application, here a caller that asks once as its last act, is served as soon as it starts, and to its end."""
    upstreams = {"vendor": provider.settings.upstreams["vendor"].model_dump(mode="json", exclude_unset=True)}
    settings = settings_for(upstreams=upstreams)
    beside = k8s.sidecar(settings)
    url = f"http://127.0.0.1:{settings.gateway.port}{CHAT}"
    app = {
        "name": "app",
        "command": ["python", "-c", APP, url, json.dumps(chat())],
        "securityContext": {"runAsUser": 65532, "readOnlyRootFilesystem": True},
        "startupProbe": {"exec": {"command": ["python", "-c", ""]}, "timeoutSeconds": 10, "periodSeconds": 1,
                         "failureThreshold": 9},
    }  # fmt: skip
    spec = {**beside.patch["spec"]["template"]["spec"], "containers": [app], "terminationGracePeriodSeconds": 30}
    pod = Pod(spec, {beside.config["metadata"]["name"]: beside.config}, open_folder / "pod")
    pods(pod)
    until(lambda: pod.log("app") == "200\n", within_s=30)
    pod.terminate()
    assert pod.log("app") == "200\n200\n"
    assert pod.ended == [("app", 0), ("envoy", 0), ("tidegate", 0)]


APP = """
import signal, sys, threading, urllib.request
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: over.set())
def ask():
    request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
    print(urllib.request.urlopen(request, timeout=30).status, flush=True)
ask()
over.wait()
ask()
"""
