"""Every check of the doctor says ok where all is well, and names what is wrong where it is not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from extproc.cli import app
from extproc.core.policy import Route
from extproc.core.refusal import Reason
from extproc.doctor import command, free
from extproc.doctor.asking import Answer, BadUrl, Gateway, NoAnswer
from extproc.doctor.visit import Expected, Result, Verdict, Visit
from tests.doctor.rig import Sham, listening

CHAIN = (Route("r", ("gpt-5",), ("primary", "backup")),)
KNOWN = Expected(known=True, message_timeout_s=0.1, routes=CHAIN)
Seen = dict[str, Result]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be held for seconds to tell whether it is."""
    monkeypatch.setattr(free, "HELD_MS", 150)
    monkeypatch.setattr(free, "BEYOND_MS", 50)


def look(sham: Sham, expected: Expected = KNOWN, **visit: Any) -> Seen:
    """What all checks find, by name."""
    with listening(sham) as url:
        results = command.examine(Visit(Gateway(url, "key"), expected, **visit))
    return {check.name: result for check, result in zip(command.CHECKS, results, strict=True)}


def by_verdict(seen: Seen, verdict: Verdict) -> set[str]:
    """Names of the checks that came to it."""
    return {name for name, result in seen.items() if result.verdict is verdict}


def test_a_gateway_as_it_should_be_passes_every_check() -> None:
    """Everything is ok, and nothing is to be changed."""
    seen = look(Sham())
    assert by_verdict(seen, Verdict.OK) == {check.name for check in command.CHECKS}, seen
    assert not any(result.change for result in seen.values())


def spoilt(**headers: str | None) -> Callable[..., Any]:
    """Refusals with other headers; None takes one away."""

    def spoil(status: int, named: dict[str, str], data: Any) -> Any:
        changed = {**named, **headers}
        return status, {name: value for name, value in changed.items() if value is not None}, data

    return spoil


WORDS = {"refuses", "without Tidegate"}
"""The checks that read refusals."""
WRONG: list[tuple[str, Sham, set[str], str]] = [
    ("not in the path", Sham(filtered=False), {"in the path"}, "ext_proc"),
    ("away", Sham(away=True), {"in the path"}, "grpc_service"),
    ("one path goes past", Sham(past=("/v1/completions",)), {"all LLM paths"}, "ext_proc"),
    ("one path is not read", Sham(unread=("/v1/embeddings",)), {"all LLM paths"}, "request_body_mode"),
    ("another status", Sham(spoil=lambda _, named, data: (418, named, data)), WORDS, "error pages"),
    ("another body", Sham(spoil=lambda status, named, _: (status, named, {"oops": 1})), {"refuses"}, "error pages"),
    ("another type", Sham(spoil=spoilt(**{"content-type": "text/html"})), WORDS, "error pages"),
    ("no retry words", Sham(spoil=spoilt(**{"x-should-retry": None})), WORDS, "error pages"),
    ("contradiction", Sham(spoil=spoilt(**{"x-should-retry": "true", "retry-after": None})), WORDS, "error pages"),
    ("short message timeout", Sham(message_timeout_s=0.02), {"slow answers"}, "message_timeout"),
    ("no patience", Sham(max_message_timeout_s=0.0), {"holds"}, "max_message_timeout"),
    ("too little patience", Sham(max_message_timeout_s=20.0), {"holds"}, "max_message_timeout"),
    ("small buffer", Sham(largest=1_048_576), {"reads 1 MB", "passes 1 MB"}, "per_connection_buffer_limit_bytes"),
    ("small messages", Sham(largest=2_000_000, away_when_large=True), {"reads 1 MB"}, "messages of gateway.max_body"),
    ("refused unread", Sham(largest=1_048_576, shut=True), {"reads 1 MB", "passes 1 MB"}, "client_max_body_size"),
    ("part of the body", Sham(partial=2_097_152), {"reads 1 MB"}, "BUFFERED"),
    ("upstream takes less", Sham(largest_upstream=1_048_576), {"passes 1 MB"}, "request_body_buffer_limit"),
    ("upstream breaks off", Sham(largest_upstream=1_048_576, breaks=True), {"passes 1 MB"}, "request_body_buffer_lim"),
    ("streams at once", Sham(buffered=True), {"streams"}, "response_body_mode"),
    ("no retries", Sham(retries=False), {"moves on"}, "refresh_cluster_on_retry"),
    ("fails open", Sham(opens=True), {"without Tidegate"}, "failure_mode_allow"),
    ("others refused by Envoy", Sham(others="away"), {"other paths"}, "ExtProcPerRoute"),
]  # fmt: skip


@pytest.mark.parametrize(("sham", "names", "change"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_is_named(sham: Sham, names: set[str], change: str) -> None:
    """These checks, and no others, say wrong, and what to change."""
    seen = look(sham)
    assert by_verdict(seen, Verdict.WRONG) == names, seen
    assert any(change in seen[name].change for name in names), seen


def test_every_check_can_say_wrong() -> None:
    """None is there for show."""
    assert {name for _, _, names, _ in WRONG for name in names} == {check.name for check in command.CHECKS}


NOT_TOLD: list[tuple[str, Sham, dict[str, Any], set[str]]] = [
    ("old service", Sham(old=True), {}, {"slow answers", "holds", "reads 1 MB", "passes 1 MB", "streams", "moves on",
                                         "without Tidegate"}),
    ("key refused", Sham(barred=True), {}, {"slow answers", "holds", "reads 1 MB", "passes 1 MB", "streams", "moves on",
                                            "without Tidegate"}),
    ("others ask, too", Sham(busy=True), {}, {"slow answers", "holds", "without Tidegate"}),
    ("spends nothing", Sham(), {"tokens": False}, {"passes 1 MB", "streams", "moves on"}),
    ("model refused", Sham(refuses_models=Reason.TENANT_QUOTA), {}, {"passes 1 MB", "streams", "moves on"}),
    ("no model is listed", Sham(models=("text-embedding-3",)), {}, {"passes 1 MB", "streams", "moves on"}),
    ("short streams", Sham(events=3), {}, {"streams"}),
    ("fast streams", Sham(first_token_s=0.01, events=8, buffered=True), {}, {"streams"}),
    ("nobody tells who served", Sham(internal=False), {}, {"moves on"}),
    ("patient Envoy", Sham(message_timeout_s=30.0), {}, {"without Tidegate"}),
    ("a listener of its own", Sham(others="tidegate"), {}, {"other paths"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sham", "visit", "names"), [case[1:] for case in NOT_TOLD], ids=[case[0] for case in NOT_TOLD]
)
def test_what_cannot_be_seen_is_not_told(sham: Sham, visit: dict[str, Any], names: set[str]) -> None:
    """Nothing is called right or wrong without proof, and the reason is given."""
    seen = look(sham, **visit)
    assert by_verdict(seen, Verdict.NOT_TOLD) >= names, seen
    assert not by_verdict(seen, Verdict.WRONG), seen
    assert all(seen[name].why for name in names)


def test_nothing_else_is_judged_where_tidegate_is_not_in_the_path() -> None:
    """Only whether others are left alone can be seen then; no model is asked."""
    sham = Sham(filtered=False)
    seen = look(sham, model="gpt-5")
    assert by_verdict(seen, Verdict.OK) == {"other paths"}
    assert not sham.asked


def test_an_old_service_is_still_seen_to_be_in_the_path() -> None:
    """A refusal in Tidegate's words proves that much, and a key that is not let in is said to be the reason."""
    assert look(Sham(old=True))["in the path"].verdict is Verdict.OK
    barred = look(Sham(barred=True))
    assert barred["in the path"].verdict is Verdict.OK
    assert "--key" in barred["holds"].why


@pytest.mark.parametrize(("opens", "verdict"), [(True, Verdict.OK), (False, Verdict.WRONG)])
def test_to_fail_open_may_be_what_is_wanted(*, opens: bool, verdict: Verdict) -> None:
    """Then it is wrong to fail closed."""
    seen = look(Sham(opens=opens), replace(KNOWN, fails_open=True))
    assert seen["without Tidegate"].verdict is verdict


def test_to_fail_closed_without_a_word_is_told() -> None:
    """It is closed as it should be, but streams are cut at every restart."""
    result = look(Sham(bare=True))["without Tidegate"]
    assert result.verdict is Verdict.OK
    assert "failure_mode_allow" in result.change


def test_an_envoy_that_is_patient_by_itself_says_nothing_of_leave() -> None:
    """Where it would wait as long without being asked, nobody can see whether it heeds that."""
    seen = look(Sham(message_timeout_s=30.0, max_message_timeout_s=0.0))
    assert (seen["holds"].verdict, "cannot be seen" in seen["holds"].why) == (Verdict.OK, True)
    assert "longest wait" in look(Sham())["holds"].why


def test_what_is_not_served_is_not_missed() -> None:
    """A gateway for one dialect has no paths of the other: nobody gets past there."""
    seen = look(Sham(absent=("/v1/messages", "/v1/messages/count_tokens")))
    assert by_verdict(seen, Verdict.OK) == {check.name for check in command.CHECKS}, seen
    assert "not served here: /v1/messages, /v1/messages/count_tokens" in seen["all LLM paths"].why


def test_a_gateway_may_have_tls_and_a_path_of_its_own(tmp_path: Path) -> None:
    """Its certificate has to be trusted."""
    pem = tmp_path / "both.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    made += [
        "-subj",
        "/CN=gateway",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        pem,
        "-out",
        tmp_path / "c.pem",
    ]
    subprocess.run(made, check=True, capture_output=True)
    pem.write_text(pem.read_text("utf-8") + (tmp_path / "c.pem").read_text("utf-8"), "utf-8")
    with listening(Sham(certificate=pem, prefix="/llm")) as url:
        results = command.examine(Visit(Gateway(url, ca_file=str(tmp_path / "c.pem")), KNOWN))
        assert {result.verdict for result in results} == {Verdict.OK}, results
        with pytest.raises(NoAnswer, match=r"certificate.*--ca-file"):
            command.examine(Visit(Gateway(url), KNOWN))


def test_a_path_of_another_service_must_not_be_refused() -> None:
    """Where one is named, a 404 of Tidegate's is wrong."""
    seen = look(Sham(others="tidegate"), other="/orders")
    assert seen["other paths"].verdict is Verdict.WRONG
    assert look(Sham(), other="/orders")["other paths"].verdict is Verdict.OK


def test_statuses_and_chains_are_those_of_the_config() -> None:
    """A status that the config changes is right, and a chain of one has nobody to move on to."""
    other = Sham(spoil=lambda status, named, data: (422 if status == 400 else status, named, data))
    assert look(other, replace(KNOWN, statuses={Reason.BAD_REQUEST: 422}))["refuses"].verdict is Verdict.OK
    assert look(other)["refuses"].verdict is Verdict.WRONG
    alone = (Route("r", ("gpt-5",), ("primary",)),)
    only = look(Sham(upstreams=("primary",)), replace(KNOWN, routes=alone))["moves on"]
    assert (only.verdict, "whole chain" in only.why) == (Verdict.OK, True)
    assert look(Sham(retries=False), replace(KNOWN, known=False, routes=()))["moves on"].verdict is Verdict.NOT_TOLD


def test_a_gateway_that_takes_small_bodies_is_tried_with_those() -> None:
    """What the config does not let in is not asked for."""
    seen = look(Sham(largest=100_000), replace(KNOWN, max_body_bytes=100_000))
    assert not by_verdict(seen, Verdict.WRONG)
    assert "100,000" in seen["reads 1 MB"].why


def test_the_large_body_costs_no_more_than_a_small_one() -> None:
    """It is large by spaces, inside the list of messages."""
    sham = Sham()
    look(sham)
    assert sham.asked[0]["messages"] == [{"role": "user", "content": "reply OK"}]
    assert sham.asked[0]["max_tokens"] == 16


def test_newer_models_are_asked_with_the_newer_cap() -> None:
    """The cap is named as the model wants it."""
    sham = Sham(newer=True)
    assert not by_verdict(look(sham), Verdict.NOT_TOLD)
    assert sham.asked[-1]["max_completion_tokens"]


@pytest.mark.parametrize(
    ("model", "anthropic", "path"), [("claude-x", None, True), ("x", True, True), ("x", False, False)]
)
def test_the_dialect_is_the_models_own(model: str, *, anthropic: bool | None, path: bool) -> None:
    """Claude is asked as Anthropic's SDK asks, unless something else is said."""
    sham = Sham()
    look(sham, model=model, anthropic=anthropic)
    assert all(("stream_options" in asked) is not path for asked in sham.asked if asked.get("stream"))


def test_a_connection_that_breaks_is_wrong_and_no_answer_at_all_is_an_error() -> None:
    """Somebody who is not there cannot be examined."""
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free_port.getsockname()[1]}"
    with pytest.raises(NoAnswer, match="no whole answer"):
        command.examine(Visit(Gateway(url, timeout_s=1.0)))


@pytest.mark.parametrize("url", ["gateway:10000", "ftp://gateway", "http://", "http://gateway:99999", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    """It says what one looks like."""
    with pytest.raises(BadUrl, match="http://gateway:10000"):
        Gateway(url)


def test_files_and_headers_that_are_none_are_refused(tmp_path: Path) -> None:
    """A CA that cannot be read, and a key that is no header."""
    with pytest.raises(BadUrl, match="missing"):
        Gateway("https://gateway", ca_file=str(tmp_path / "missing"))
    with listening(Sham()) as url, pytest.raises(BadUrl, match="header"):
        Gateway(url, key="a\nb").ask("GET", "/v1/models")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b'{"error": "text"}', b'{"error": {"message": 5}}', b"[" * 100_000]
)
def test_answers_may_be_anything(body: bytes) -> None:
    """Whatever comes back is read as far as it can be."""
    answer = Answer(502, {}, body)
    assert isinstance(answer.data, dict)
    assert isinstance(answer.message, str)


def tidegate(*arguments: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, done.output


def test_the_command_shows_a_table_and_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 where nothing is wrong, else 1, with the setting's name."""
    with listening(Sham(message_timeout_s=2.0)) as url:
        code, output = tidegate(url, "--no-spend", monkeypatch=monkeypatch, folder=tmp_path)
    assert (code, "in the path" in output, "0 requests" in output) == (0, True, True), output
    with listening(Sham(message_timeout_s=2.0, past=("/v1/responses",))) as url:
        code, output = tidegate(url, "--json", "found.json", monkeypatch=monkeypatch, folder=tmp_path)
    assert code == 1
    assert "/v1/responses" in output
    assert "envoy.filters.http.ext_proc" in output
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert [check["name"] for check in found["checks"]] == [check.name for check in command.CHECKS]
    assert {check["verdict"] for check in found["checks"]} == {"ok", "wrong"}
    assert found["spent"]["requests"] == 3
    assert found["model"] == "gpt-5"


def test_the_command_may_write_json_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json -` prints that, and nothing else."""
    with listening(Sham(barred=True)) as url:
        code, output = tidegate(url, "--json", "-", "--header", "x-team: a", monkeypatch=monkeypatch, folder=tmp_path)
    assert code == 0
    assert json.loads(output)["checks"][0]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--api", "gemini"), "openai or anthropic"), (("--other", "orders"), "begin with /"),
     (("--json", "no/such/folder"), "no such folder"),
     (("--header", "x-team"), "x-team: search"), (("--header", "a: b\tc"), "x-team: search")],
)  # fmt: skip
def test_wrong_arguments_are_told(
    arguments: tuple[str, ...], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is asked."""
    code, output = tidegate("http://127.0.0.1:1", *arguments, monkeypatch=monkeypatch, folder=tmp_path)
    assert (code, word in output) == (2, True), output


def test_nobody_there_is_a_message_and_no_finding(tmp_path: Path) -> None:
    """The exit status tells it from a gateway with something wrong."""
    command_line = [sys.executable, "-m", "extproc", "doctor", "http://127.0.0.1:1", "--timeout", "1"]
    done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no whole answer")
    assert "Traceback" not in done.stderr


def test_the_report_counts_verdicts_and_tokens() -> None:
    """The last line says how it went and what it cost."""
    text = StringIO()
    with listening(Sham()) as url:
        visit = Visit(Gateway(url), KNOWN)
        assert command.run(visit, Console(file=text, width=100)) == 0
    assert "11 ok; 3 requests to gpt-5 took about" in text.getvalue()
    assert 40 <= visit.spent.tokens <= 300
