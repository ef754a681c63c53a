"""The live page in a real Chromium: it shows what it is told, whatever that is, and acts for nobody without a token."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from extproc.core import events
from extproc.core.breaker import Outcome
from extproc.core.refusal import Reason
from extproc.core.request import Usage
from extproc.telemetry.dossiers import Dossiers
from extproc.telemetry.explain import explain
from tests.console.pretender import Pretender, pretend
from tests.console.world import TOKEN, World, beside, by_token
from tests.doubles import request

OVERVIEWS = Path(__file__).parent / "overviews"
DESKTOP, PHONE = {"width": 1360, "height": 850}, {"width": 390, "height": 844}
HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script>",
    "abc\u202egpj.exe\u0000\u200b",
    "x" * 5000,
    "' onmouseover='document.title=1' \"{{7*7}}\" ${7*7} %3Cscript%3E",
)


expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and os.environ.get("TIDEGATE_BROWSER") != "required":
        pytest.skip("no Chromium here; Debian's package is called chromium")
    assert found, "TIDEGATE_BROWSER=required, but there is no Chromium"
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=found, args=arguments, timeout=180_000)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may neither complain in its console nor ask anybody but its own server."""
    context = browser.new_context(viewport=DESKTOP, reduced_motion="reduce")
    context.set_default_timeout(60_000)
    page = context.new_page()
    complaints: list[str] = []
    origins: set[str] = set()
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: origins.add(urlsplit(asked.url).netloc))
    yield page
    host = urlsplit(page.url).netloc
    context.close()
    assert origins == {host}
    assert [said for said in complaints if not said.startswith("Failed to load resource")] == []


def told(name: str) -> dict[str, Any]:
    """An overview as a running demo gave it: in peace, at a multiple of its limits, with all its providers killed."""
    return dict(json.loads((OVERVIEWS / f"{name}.json").read_text()))


def see(page: Page, server: Pretender, path: str = "") -> None:
    """Open the page and wait for its first figures."""
    page.goto(server.url + path)
    expect(page.locator("#link-text")).to_have_text("live")


def no_sideways(page: Page) -> None:
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", ["calm", "overload", "outage"])
def test_shows_what_the_overview_says(page: Page, name: str) -> None:
    """Every lane, upstream, binding limit, reason, notice and caller is there with its figures, on desk and phone."""
    overview = told(name)
    with pretend(overview, history=history()) as server:
        see(page, server)
        shown = page.locator("body").inner_text()
        for notice in overview["notices"]:
            assert notice["text"] in shown
        for binding in overview["binding"]:
            assert binding["text"] in shown
            assert binding["help"] in shown
        rows = page.locator("#lane-rows tr")
        assert rows.count() == len(overview["lanes"])
        for i, lane in enumerate(overview["lanes"]):
            assert rows.nth(i).locator("th").inner_text().startswith(lane["name"])
            assert rows.nth(i).locator("td").first.inner_text().startswith(f"{lane['requests']:,}")
        for upstream in overview["upstreams"]:
            card = page.locator("article", has=page.get_by_role("heading", name=upstream["name"], exact=True))
            assert (upstream["state"].replace("_", " ") if not upstream["out"] else "out") in card.inner_text()
            assert card.get_by_role("meter").count() == len(upstream["buckets"]) + bool(upstream["kv"])
        for refusal in overview["refusals"][:6]:
            assert (
                f"{refusal['count_5m']:,}" in page.locator("#reasons li", has_text=refusal["reason"]).first.inner_text()
            )
        assert page.locator("#recent-rows tr").count() == len(overview["recent"])
        assert page.locator("#tenant-rows tr").count() == len(overview["tenants"])
        no_sideways(page)
        page.set_viewport_size(PHONE)
        no_sideways(page)
        cut = "cells => cells.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
        assert page.locator("#recent-rows td:nth-child(6)").evaluate_all(cut) == []


def test_marks_what_is_for_the_best_lane_alone(page: Page) -> None:
    """A bucket of tokens shows where its rest begins to be for the best lane; debt is drawn apart, and told."""
    overview = told("calm")
    primary, backup = (upstream["buckets"][0] for upstream in overview["upstreams"][:2])
    primary["level"], backup["level"] = 0.1 * primary["capacity"], -2 * backup["per_second"]
    with pretend(overview, config={"upstreams": {"primary": {"burn": 0.85}, "backup": {"burn": None}}}) as server:
        see(page, server)
        cards = page.locator("article")
        expect(cards.nth(0)).to_contain_text("90 % used · the rest is for the best lane")
        assert cards.nth(0).locator(".tick").first.evaluate("(tick) => tick.style.left") == "85%"
        expect(cards.nth(1)).to_contain_text("out of debt in 2 s")
        expect(cards.nth(1).locator(".track.debt")).to_have_count(1)
        expect(cards.nth(1).locator(".tick").first).to_be_hidden()


def test_is_loud_about_what_an_operator_moved(page: Page) -> None:
    """Bypass, draining and paused lanes stand above all else; what is in force is listed, each with its way back."""
    overview = told("calm")
    lane, upstream = overview["lanes"][0]["name"], overview["upstreams"][0]["name"]
    overview["levers"] = {
        "bypass": {"until": None}, "draining": True, "lanes": {lane: {"paused": True, "until": None}},
        "upstreams": {upstream: {"out": True, "until": 1e9}},
        "changes": [{"id": "c1", "place": "tenants.chat.tpm", "value": 2e6, "was": 1_500_000, "until": None}],
    }  # fmt: skip
    with pretend(overview) as server:
        see(page, server)
        banners = page.locator("#banners")
        expect(banners).to_contain_text("Bypass until undone: everybody is let go")
        expect(banners).to_contain_text("Draining")
        expect(banners).to_contain_text(f"Lane {lane} is paused")
        expect(page.locator("#in-force li")).to_have_count(5)
        expect(page.locator("#in-force")).to_contain_text("tenants.chat.tpm is 2,000,000 instead of 1,500,000")
        overview["levers"] = {"bypass": None, "draining": False, "lanes": {}, "upstreams": {}, "changes": []}
        expect(banners).to_be_empty()
        expect(page.locator("#in-force li")).to_have_count(0)


def test_who_was_refused_yesterday_is_no_news(page: Page) -> None:
    """Reasons of the last hour stay though nobody was refused for them of late; older ones go."""
    overview = told("calm")
    ages = {"lane_full": 1800, "tenant_quota": 3700}
    overview["refusals"] = [
        {"reason": reason, "count_5m": 0, "last_at": time.time() - age, "ids": ["r1"]} for reason, age in ages.items()
    ]
    with pretend(overview) as server:
        see(page, server)
        expect(page.locator("#reasons li")).to_have_count(1)
        expect(page.locator("#reasons")).to_contain_text("lane_full last 30 min")
        overview["refusals"] = overview["refusals"][1:]
        expect(page.locator("#no-reasons")).to_be_visible()


def test_what_is_not_known_is_a_dash(page: Page) -> None:
    """Whatever may be missing from an overview or a history is missing: the rest is shown all the same."""
    overview = told("overload")
    for one in (*overview["lanes"], *overview["upstreams"], *overview["recent"], *overview["binding"]):
        one.update({key: None for key, value in one.items() if isinstance(value, int | float)})
    overview["upstreams"][0].update(state=None, provider=None, kv={"saturation": None, "fill": None, "stale_s": None})
    overview.update(dict.fromkeys(("tenants", "sessions", "recent", "levers", "process", "alerts")))
    empty = {"step_s": 10, "at": [1.8e9], "lanes": {"P0": {"waiting": [None]}}, "upstreams": {}, "refused": {}}
    with pretend(overview, history=empty) as server:
        see(page, server)
        expect(page.locator("#lane-rows td.n").first).to_have_text("\u2013")
        expect(page.locator("article").first).to_contain_text("not read yet")
        expect(page.locator("#no-tenants")).to_be_visible()
        expect(page.locator("#charts canvas")).to_have_count(4)
        server.overview = {"at": 0}
        expect(page.locator("#lane-rows tr")).to_have_count(0)
        expect(page.locator("#no-recent")).to_be_visible()


def test_names_from_outside_are_only_text(page: Page) -> None:
    """Markup, quotes, controls, bidirectional overrides and endless names stand there as text, and move nothing."""
    overview = told("overload")
    likeness = {
        key: overview[key][0] for key in ("tenants", "recent", "refusals", "notices", "binding", "upstreams", "lanes")
    }
    session = {"tenant": "", "id": "", "requests": 1, "tokens": 1, "usd": 0.0}
    for key, one in (*likeness.items(), ("sessions", session)):
        names = [field for field, value in one.items() if isinstance(value, str)]
        overview[key] += [{**copy.deepcopy(one), **dict.fromkeys(names, evil), "ids": [evil]} for evil in HOSTILE]
    stories = {evil: {"id": evil, "state": evil, "reason": evil, "arrived": 0, "notes": [evil]} for evil in HOSTILE[:2]}
    with pretend(overview, explained=stories, history=history(names=HOSTILE)) as server:
        see(page, server)
        page.locator("#charts canvas").first.wait_for()
        expect(page.locator("#tenant-rows")).to_contain_text(HOSTILE[0])
        expect(page.locator("#tenant-rows")).to_contain_text("abc\\u{202e}gpj.exe\\u{0}\\u{200b}")
        assert page.locator("img:not(.brand img), script:not([src])").count() == 0
        page.locator("#recent-rows button", has_text=HOSTILE[0]).click()
        expect(page.locator("#explain .story")).to_contain_text(HOSTILE[0])
        page.keyboard.press("Escape")
        for size in (DESKTOP, PHONE):
            page.set_viewport_size(size)
            no_sideways(page)
        assert "taken" not in page.title()


def test_of_very_many_callers_the_first_are_shown(page: Page) -> None:
    """And how many there are: a thousand rows, drawn every second, are more than a browser can do."""
    overview = told("calm")
    one = {"requests": 1, "tokens": 1, "usd": 0.0}
    overview["tenants"] = [{**one, "name": f"t{number}", "refused": 0, "waiting": 0} for number in range(1200)]
    overview["sessions"] = [{**one, "tenant": "t", "id": f"s{number}"} for number in range(101)]
    with pretend(overview) as server:
        see(page, server)
        for kind, many in (("tenant", "1,200"), ("session", "101")):
            expect(page.locator(f"#{kind}-rows tr")).to_have_count(100)
            expect(page.locator(f"#{kind}s-most")).to_have_text(f"the first 100 of {many}")
        overview["sessions"] = overview["sessions"][:2]
        expect(page.locator("#session-rows tr")).to_have_count(2)
        expect(page.locator("#sessions-most")).to_have_text("")


def test_acts_with_the_token_and_tells_what_came_of_it(page: Page) -> None:
    """The token is asked for once and kept for this tab only; each action is one request that says what was chosen."""
    overview = told("overload")
    lane, upstream = overview["lanes"][-1]["name"], overview["upstreams"][0]["name"]
    overview["sessions"] = [{"tenant": "a/b", "id": "s?1", "requests": 1, "tokens": 5, "usd": 0.1}]
    config = {"upstreams": {"primary": {"limits": [{"tpm": 120000}]}}, "service": {"drain_s": 5}}
    with pretend(overview, config=config) as server:
        see(page, server)
        ask = page.locator("#ask")

        def act(button: str, go: str, **fields: str) -> None:
            page.get_by_role("button", name=button, exact=True).first.click()
            for name, value in fields.items():
                field = ask.locator(f"[name={name}]")
                field.select_option(value) if name == "for_s" else field.fill(value)
            ask.get_by_role("button", name=go, exact=True).click()

        act(f"Pause lane {lane}", "Pause", token=server.token, for_s="300", reason="storm")
        expect(ask).not_to_be_visible()
        expect(page.locator("#told")).to_contain_text(f"Lane {lane} is paused until")
        act(f"Trip the breaker of {upstream}", "Trip")
        act(f"Reset the breaker of {upstream}", "Reset")
        act(f"Take out {upstream}", "Take out", for_s="")
        act("Raise the budget of session s?1", "Raise", add_tokens="5000")
        page.get_by_role("button", name="Change the limit of primary: Tokens/min").click()
        expect(ask.locator("[name=place]")).to_have_value("upstreams.primary.limits.0.tpm")
        expect(ask).to_contain_text("now 120,000")
        ask.locator("[name=value]").fill("90000")
        page.locator("#ask-go").click()
        act("Drain …", "Drain")
        page.get_by_role("button", name="Bypass …").click()
        ask.get_by_role("button", name="Bypass").click()
        expect(page.locator("#ask-error")).to_have_text("Tick the box first")
        ask.locator("[name=sure]").check()
        ask.get_by_role("button", name="Bypass").click()
        expect(ask).not_to_be_visible()
        assert server.actions() == [
            ("POST", f"/api/v1/lanes/{lane}/pause", {"for_s": 300, "reason": "storm"}),
            ("POST", f"/api/v1/upstreams/{upstream}/trip", {}),
            ("POST", f"/api/v1/upstreams/{upstream}/reset", {}),
            ("POST", f"/api/v1/upstreams/{upstream}/out", {}),
            ("POST", "/api/v1/sessions/a%2Fb/s%3F1", {"add_tokens": 5000}),
            ("POST", "/api/v1/changes", {"place": "upstreams.primary.limits.0.tpm", "value": 90000, "for_s": 900}),
            ("POST", "/api/v1/drain", {}),
            ("POST", "/api/v1/bypass", {"for_s": 900}),
        ]
        assert {proof for method, *_, proof in server.asked if method != "GET"} == {f"Bearer {server.token}"}
        kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
        assert not [place for place in kept if server.token in place]
        overview["sessions"] = [{"tenant": "..", "id": "drain", "requests": 1, "tokens": 5, "usd": 0.1}]
        page.get_by_role("button", name="Raise the budget of session drain").click()
        ask.locator("[name=add_tokens]").fill("5000")
        page.locator("#ask-go").click()
        expect(page.locator("#ask-error")).to_contain_text("the name .. cannot be part of an address")
        page.keyboard.press("Escape")
        assert len(server.actions()) == 8
        server.refuse = (409, "lane P9 is already paused")
        act(f"Pause lane {lane}", "Pause")
        expect(page.locator("#ask-error")).to_have_text("lane P9 is already paused")
        expect(ask).to_be_visible()


class Moving(World):
    """A world whose overview shows its levers as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.told = told("overload")
        self.told["sessions"] = [{"tenant": "agents", "id": "a/b", "requests": 1, "tokens": 10, "usd": 0.0}]

    async def overview(self) -> dict[str, Any]:
        return {**await super().overview(), "levers": self.levers.state()}


def test_moves_levers_of_the_real_console(page: Page, tmp_path: Path) -> None:
    """What the page sends is what the console takes, under the console's own headers; each lever comes back, too."""
    world = Moving()
    with beside(world, by_token(tmp_path)) as url:
        page.goto(url)
        ask, force = page.locator("#ask"), page.locator("#in-force")

        def act(button: str, go: str, **fields: str) -> None:
            page.get_by_role("button", name=button, exact=True).last.click()
            for name, value in fields.items():
                ask.locator(f"[name={name}]").fill(value)
            ask.get_by_role("button", name=go, exact=True).click()

        act("Pause lane P2", "Pause", token=TOKEN, reason="a storm")
        expect(page.locator("#banners")).to_contain_text("Lane P2 is paused")
        act("Trip the breaker of primary", "Trip")
        act("Take out primary", "Take out")
        act("Change a limit …", "Change", place="lanes.P2.max_requests", value="-1")
        expect(page.locator("#ask-error")).to_have_text(re.compile("must be greater than 0"))
        ask.locator("[name=value]").fill("250")
        page.locator("#ask-go").click()
        expect(force).to_contain_text("lanes.P2.max_requests is 250 instead of 1,000")
        act("Raise the budget of session a/b", "Raise", add_tokens="500", add_usd="2.5", reason="more")
        expect(page.locator("#told")).to_contain_text("Session a/b may use more")
        for button, go in (("Resume lane P2", "Resume"), ("Put back primary", "Put back"), ("Return", "Return")):
            act(button, go)
        expect(force.locator("li")).to_have_count(0)
        page.get_by_role("button", name="Bypass …").click()
        ask.locator("[name=sure]").check()
        page.locator("#ask-go").click()
        expect(page.locator("#banners")).to_contain_text("Bypass")
        act("End bypass", "End bypass")
        expect(page.locator("#banners")).to_be_empty()
        assert [action for _, *action in world.levers.done] == [
            ["pause", "P2", 900], ["trip", "primary"], ["take_out", "primary", 900],
            ["change", "lanes.P2.max_requests", 250, 900], ["resume", "P2"], ["put_back", "primary"], ["revert", "c4"],
            ["bypass", 900], ["no_bypass"],
        ]  # fmt: skip
        assert (world.sessions.limit, world.sessions.usd) == (1500, 7.5)
        page.get_by_text("Who did what").click()
        expect(page.locator("#audit-list")).to_contain_text("pause lane (lane P2, for_s 900). Why: a storm")
        expect(page.locator("#audit-list li")).to_have_count(11)
        page.locator("#filter [name=tenant]").fill("agents")
        expect(page.locator("#recent-rows tr")).to_have_count(1)
        page.locator("#recent-rows button").click()
        expect(page.locator("#explain .story")).to_be_visible()


def test_does_nothing_without_a_token(page: Page) -> None:
    """Without a token nothing is sent; a wrong one is asked for again, and not kept."""
    overview = told("calm")
    with pretend(overview) as server:
        see(page, server)
        page.get_by_role("button", name="Pause lane").first.click()
        go, error = page.locator("#ask-go"), page.locator("#ask-error")
        go.click()
        expect(error).to_have_text("Token: none was given")
        page.keyboard.press("Escape")
        expect(page.locator("#ask")).not_to_be_visible()
        page.evaluate("import('./assets/api.js').then((api) => api.act('POST', 'drain', {})).catch(() => {})")
        assert server.actions() == []
        page.get_by_role("button", name="Pause lane").first.click()
        page.locator("[name=token]").fill("wrong")
        go.click()
        expect(error).to_have_text("who are you?")
        assert page.evaluate("sessionStorage.length") == 0
        page.locator("[name=token]").fill(server.token)
        go.click()
        expect(page.locator("#ask")).not_to_be_visible()
        assert len(server.actions()) == 2


def test_reading_may_need_the_token_too(page: Page) -> None:
    """A console that shows nothing to strangers says so; with the token the page begins."""
    with pretend(told("calm"), reading_needs_token=True) as server:
        page.goto(server.url)
        expect(page.locator("#stale")).to_contain_text("Reading needs a token")
        page.locator("#stale-token").click()
        page.locator("[name=token]").fill(server.token)
        page.locator("#ask-go").click()
        expect(page.locator("#link-text")).to_have_text("live")
        expect(page.locator("#stale")).to_be_hidden()


def test_old_figures_do_not_look_new(page: Page) -> None:
    """A lost connection is told with the age of what is shown; the page comes back by itself, its focus in place."""
    with pretend(told("calm")) as server:
        see(page, server)
        button = page.get_by_role("button", name="Pause lane").first
        button.focus()
        server.away = True
        expect(page.locator("#stale-why")).to_contain_text("Connection lost")
        expect(page.locator("#stale-age")).to_contain_text("Figures are")
        assert page.evaluate("document.body.classList.contains('stale')")
        expect(page).to_have_title("no connection: Tidegate")
        server.away = False
        expect(page.locator("#stale")).to_be_hidden()
        expect(page).to_have_title("Tidegate")
        expect(button).to_be_focused()


def test_asks_where_no_stream_gets_through(page: Page) -> None:
    """Something on the way that holds the stream back: the page asks for the overview instead."""
    page.clock.install()
    overview = told("calm")
    with pretend(overview, silent=True) as server:
        page.goto(server.url)
        for _ in range(60):
            page.clock.run_for(1000)
            if page.locator("#link-text").inner_text() == "live":
                break
        expect(page.locator("#link-text")).to_have_text("live")
        assert any(path == "/api/v1/overview" for _, path, *_ in server.asked)


def test_tells_what_happened_to_a_request(page: Page) -> None:
    """By its id, from the list, and by the address: what it waited for, why others were passed over, what it cost."""
    served, refused = stories()
    overview = told("calm")
    overview["recent"] = [{**summary, "id": served["id"], "ticket": "t1"} for summary in overview["recent"][:1]]
    with pretend(overview, explained={"t1": served, refused["id"]: refused}) as server:
        see(page, server)
        page.keyboard.press("/")
        page.keyboard.type(f" {refused['id']} ")
        page.keyboard.press("Enter")
        story = page.locator("#explain")
        expect(story).to_contain_text("Refused: deadline_unmeetable (503)")
        expect(story).to_contain_text(refused["refusal"]["words"])
        page.keyboard.press("Escape")
        page.locator("#recent-rows button").click()
        expect(story).to_contain_text("Sent to backup")
        expect(story).to_contain_text("backup, then local if that fails")
        for words in (served["size"]["words"], served["queue"]["words"], served["choice"]["others"][0]["words"]):
            expect(story).to_contain_text(words)
        expect(story.locator(".story > li h3")).to_have_text(
            [
                "Arrived",
                "Priced",
                "Checked",
                "Waited 5.1 s",
                "Sent to backup",
                "backup failed",
                "local answered",
                "Settled",
            ]
        )
        expect(story).to_contain_text("$0.0123")
        expect(page.locator("#explain-head")).to_have_text(f"Request {served['id']}")
        assert page.url.endswith("#request=t1")
        page.goto(f"{server.url}?again#request={refused['id']}")
        expect(story).to_contain_text("Refused: deadline_unmeetable")
        page.locator("#explain-close").click()
        page.locator("#search-id").fill("nobody")
        page.keyboard.press("Enter")
        expect(story).to_contain_text("Not known.")


def test_finds_decisions_by_what_they_were(page: Page) -> None:
    """The filter asks the service; a tenant's name leads to its decisions, and the way back to the newest of all."""
    overview = told("overload")
    one = overview["recent"][0]
    overview["tenants"] = [{"name": "chat", "requests": 1, "tokens": 1, "usd": 0, "refused": 0, "waiting": 0}]
    found = [{**one, "id": f"found-{tenant}", "ticket": tenant, "tenant": tenant} for tenant in ("chat", "other")]
    with pretend(overview, found=found) as server:
        see(page, server)
        page.locator("#tenant-rows button").click()
        expect(page.locator("#recent-rows")).to_contain_text("found-chat")
        expect(page.locator("#recent-rows tr")).to_have_count(1)
        page.get_by_role("button", name="Newest of all").click()
        expect(page.locator("#recent-rows tr")).to_have_count(len(overview["recent"]))


def test_draws_the_last_hour(page: Page) -> None:
    """Four charts with something on them, one cursor for all, figures beside the names, and words for who sees none."""
    with pretend(told("overload"), history=history()) as server:
        see(page, server)
        canvases = page.locator("#charts canvas")
        expect(canvases).to_have_count(4)
        painted = (
            "(canvas) => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size"
        )
        assert all(canvas.evaluate(painted) > 10 for canvas in canvases.all())
        expect(page.locator(".shaded:visible")).to_have_count(1)
        plot = page.get_by_role("img", name=re.compile("Waiting, by lane: P0 now 59"))
        expect(page.locator(".legend .n").first).to_have_text("59")
        plot.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator(".legend .n").first).to_have_text("58")
        moments = page.locator("#charts .when")
        assert len(set(moments.all_inner_texts())) == 1
        assert moments.first.inner_text() != "now"
        page.locator(".legend button").first.click()
        expect(page.locator(".legend button").first).to_have_attribute("aria-pressed", "false")


def test_draws_what_was_measured_once(page: Page) -> None:
    """A value between gaps is a dot: with little traffic most are alone, and a line of one point is none."""
    lonely = history(names=("P0",))
    lonely["lanes"]["P0"]["wait_p95_s"] = [0.7 if at == 30 else None for at in range(60)]
    with pretend(told("calm"), history=lonely) as server:
        see(page, server)
        chart = page.locator("#charts figure").nth(3)
        chart.locator("canvas").wait_for()
        colour = chart.locator(".swatch").evaluate("(swatch) => getComputedStyle(swatch).color")
        red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
        painted = f"""(canvas) => {{
            const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return data.filter((byte, at) => at % 4 === 0 && byte === {red} && data[at + 1] === {green}
                && data[at + 2] === {blue} && data[at + 3] === 255).length;
        }}"""
        assert 4 <= chart.locator("canvas").evaluate(painted) <= 100


def test_is_light_or_dark(page: Page) -> None:
    """It follows the system until the switch says otherwise, which is remembered; words stand out in both."""
    ground = "getComputedStyle(document.body).backgroundColor"
    with pretend(told("overload"), history=history()) as server:
        see(page, server)
        light = page.evaluate(ground)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(ground)
        assert light != dark
        assert page.evaluate(CONTRASTS) == []
        switch = page.locator("#theme")
        switch.click()
        expect(switch).to_have_text("Light")
        assert page.evaluate(ground) == light
        assert page.evaluate(CONTRASTS) == []
        page.reload()
        expect(switch).to_have_text("Light")
        assert page.evaluate(ground) == light


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => c.map((v) => v / 255).map((v) => (v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const poor = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".unseen")) continue;
    const grounds = [];
    for (let at = node; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
    const [a, b] = [light(rgb(grounds)), light(rgb([...grounds, getComputedStyle(node).color]))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push(`${node.className} ${node.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""Texts that stand out from their ground by less than 4.5 to 1 (WCAG AA)."""


def history(names: tuple[str, ...] = ("P0", "P1")) -> dict[str, Any]:
    """Ten minutes, in which more and more wait."""
    up, flat = [*map(float, range(60))], [1.0] * 60
    return {
        "step_s": 10,
        "at": [1.8e9 + 10 * i for i in range(60)],
        "lanes": {
            name: {"waiting": up, "admitted": flat, "refused": flat, "wait_p95_s": [None, *up[1:]]} for name in names
        },
        "upstreams": {
            name: {"tokens_per_s": up, "errors": flat, "level": up, "state": [*["closed"] * 50, *["open"] * 10]}
            for name in names
        },
        "refused": {"lane_full": flat},
    }


def stories() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two requests as the service explains them: one that was served after a failover, and one that was refused."""
    now = [1000.0]
    dossiers = Dossiers(10, lambda: now[0], lambda: 1.8e9)
    one, two = request(id="served-1", ticket="t1"), request(id="refused-1", ticket="t2")
    dossiers(events.Queued(one, 4.2, position=7, binding=("upstream/primary/total",), waiting={"P1": 6}))
    now[0] += 5.1
    dossiers(events.Waited(one, 5.1, (events.Spell(("upstream/primary/total",), 5.1),)))
    busy = events.PassedOver("primary", events.Why.BUSY, ("upstream/primary/total",), 3.0)
    dossiers(events.Admitted(one, ("backup", "local"), 5.1, 4.2, (busy,)))
    dossiers(events.AttemptFailed("backup", Outcome.FAILURE, 503, "server_error", one.ticket, following="local"))
    usage = Usage(input=120, output=33)
    dossiers(events.Settled(one, "local", 2, 200, usage, 5.1, first_token_s=0.3, duration_s=1.2, cost_usd=0.0123))
    refused = events.Refused(
        Reason.DEADLINE_UNMEETABLE, 503, "chat", "P1", request_id=two.id, request=two, retry_after=7
    )
    dossiers(refused)
    found = dossiers.of("served-1"), dossiers.of("refused-1")
    assert found[0]
    assert found[1]
    return explain(found[0]), explain(found[1])
