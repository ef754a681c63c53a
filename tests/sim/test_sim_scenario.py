"""What a simulation is told: files and lines of words, and every mistake in them."""

import pytest

from extproc.settings import SettingsError, parse
from extproc.sim.plan import MixError
from extproc.sim.scenario import Scenario, changed, load_scenario, read_burst, read_fault

SETTINGS = parse(
    """
upstreams:
  openai: {provider: openai, limits: [{model: m, tpm: 60000, rpm: 600}, {tpm: 1000}], headroom: 0.1}
  pool: {provider: vllm, url: http://v:8000, owned: true, kv: {tokens: 50000}, models: {m: own}}
  fake: {provider: fake, url: http://f:1, concurrency: 3, fake: {first_token_s: 2, burst_s: 7}}
routes: [{models: [m], chain: [openai, fake, pool]}]
""",
    "test",
)


def test_a_fault_is_a_line_of_words():
    """In any order after its name; the factor has a default of its own."""
    fault = read_fault("slow openai for 60 at 600 by 3")
    assert (fault.kind, fault.upstream, fault.at_s, fault.for_s, fault.factor) == ("slow", "openai", 600, 60, 3)
    assert read_fault("limit openai at 1 for 2").factor == 0.5
    assert read_fault("slow openai at 1 for 2").factor == 2.0


def test_a_burst_is_a_line_of_words():
    """Sizes are one number or two."""
    burst = read_burst("P1 at 60 for 30 load 5 prompt 8000-32000 output 100 patience 2 retries 3 tenant t")
    assert (burst.lane, burst.load, burst.prompt, burst.output) == ("P1", 5.0, (8000, 32000), (100, 100))
    assert (burst.patience_s, burst.retries, burst.tenant) == (2.0, 3, "t")


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (read_fault, "", "kind"),
        (read_fault, "quake openai at 1 for 2", "kind"),
        (read_fault, "outage openai at 1", "for: is required"),
        (read_fault, "outage openai at", "pairs of a word and a value"),
        (read_fault, "outage openai at 1 for 2 for 3", "pairs of a word and a value"),
        (read_fault, "outage openai at 1 until 2", "unknown word 'until'; known: at, for, by"),
        (read_fault, "outage openai at -1 for 2", "at: "),
        (read_burst, "", "for: is required"),
        (read_burst, "P1 for 30", "give either rps or load"),
        (read_burst, "P1 for 30 rps 1 load 2", "give either rps or load"),
        (read_burst, "P1 for 30 rps 1 prompt 9-3", "9-3 has its ends swapped"),
        (read_burst, "P1 for 30 rps 1 prompt many", "prompt"),
        (read_burst, "P1 for 30 rps 0", "rps"),
    ],
)
def test_a_mistake_in_a_line_is_told_with_the_line(read, text, said):
    """One error, the text in it."""
    with pytest.raises(SettingsError) as caught:
        read(text)
    assert said in str(caught.value)
    assert repr(text) in str(caught.value)


def test_a_file_is_read_whole(tmp_path):
    """Everything has a default; lines and files add up."""
    path = tmp_path / "scenario.yaml"
    path.write_text("""
clients: {retries: 1}
slo_s: {P0: 2}
upstreams: {openai: {burst_s: 5, first_token_s: 1}, pool: {engine: {instances: 2, kv_tokens: 9000}}}
faults: [{kind: outage, upstream: openai, at_s: 1, for_s: 2}]
bursts: [{lane: P0, for_s: 5, rps: 1, prompt: 100, output: 5-10}]
""")
    scenario = changed(
        load_scenario(path), faults=["blind pool at 3 for 4"], lanes="P0=1,P1=0,P2=3", slo_s="P1=7", tenants="a,b"
    )
    assert scenario.clients.retries == 1
    assert [fault.kind for fault in scenario.faults] == ["outage", "blind"]
    assert scenario.lanes == {"P0": 0.25, "P2": 0.75}
    assert scenario.tenants == {"a": 0.5, "b": 0.5}
    assert scenario.slo_s == {"P0": 2.0, "P1": 7.0}
    assert list(scenario.problems(SETTINGS)) == []
    engine = scenario.engine_of(SETTINGS, "pool")
    assert scenario.engine_rules(SETTINGS, "pool", engine).kv_tokens == 9000
    assert scenario.account_rules(SETTINGS, "openai", "m").burst_s == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client: {}", "client: unknown key"),
        ("clients: {retries: -1}", "clients.retries"),
        ("[1, 2]", "should be"),
        ("a: [", "not YAML"),
        ("upstreams: {openai: {engine: {kv: 3}}}", "upstreams.openai.engine.kv"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(tmp_path, text, said):
    """Path of the file, path in the file."""
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"scenario\.yaml") as caught:
        load_scenario(path)
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    """As the config is."""
    with pytest.raises(SettingsError, match="No such file"):
        load_scenario(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not YAML"):
        load_scenario(tmp_path / "bytes.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert load_scenario(tmp_path / "empty.yaml") == Scenario()


def test_words_on_the_command_line_are_checked_too():
    """Mixes as everywhere, numbers as in the file."""
    with pytest.raises(MixError):
        changed(Scenario(), lanes="P0=x")
    with pytest.raises(SettingsError, match="slo_s"):
        changed(Scenario(), slo_s="P0=soon")


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (Scenario(lanes={"P9": 1.0}), "lanes: lane 'P9'"),
        (Scenario(slo_s={"P9": 1.0}), "slo_s: lane 'P9'"),
        (Scenario(upstreams={"nobody": {}}), "upstreams: upstream 'nobody'"),
        (changed(Scenario(), faults=["outage nobody at 1 for 1"]), "faults: upstream 'nobody'"),
        (changed(Scenario(), faults=["limit pool at 1 for 1"]), "pool is an engine and has no rate limit"),
        (changed(Scenario(), faults=["blind openai at 1 for 1"]), "openai is no engine"),
        (changed(Scenario(), bursts=["P9 for 1 rps 1"]), "bursts: lane 'P9'"),
    ],
)
def test_what_does_not_fit_the_config_is_told(scenario, said):
    """Names of lanes and upstreams, and kinds of upstreams."""
    assert any(said in line for line in scenario.problems(SETTINGS))


def test_upstreams_behave_as_the_config_says():
    """Limits of the model without headroom; engines where there are metrics or an engine; fakes as they are told."""
    scenario = Scenario()
    openai = scenario.account_rules(SETTINGS, "openai", "m")
    assert (openai.tpm, openai.rpm, openai.concurrency) == (60_000, 600, None)
    assert scenario.account_rules(SETTINGS, "openai", "other").tpm == 1000
    fake = scenario.account_rules(SETTINGS, "fake", "m")
    assert (fake.concurrency, fake.first_token_s, fake.burst_s) == (3, 2, 7)
    assert scenario.engine_of(SETTINGS, "openai") is None
    engine = scenario.engine_of(SETTINGS, "pool")
    assert scenario.engine_rules(SETTINGS, "pool", engine).kv_tokens == 50_000
