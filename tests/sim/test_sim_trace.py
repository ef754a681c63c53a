"""What a trace reader accepts, and what it says of what it does not."""

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.trace import Arrival, TraceError, parse, read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OWN = "seconds,prompt_tokens,output_tokens"


def arrivals(text):
    return list(parse(io.StringIO(text, newline=""), "t.csv"))


def complaint(text):
    with pytest.raises(TraceError) as caught:
        arrivals(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_azure_trace_counts_from_its_first_row():
    """Dates become seconds since the first; seven decimals of a second are cut to six."""
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951699,396,109\n"
    assert arrivals(text) == [Arrival(0.0, 374, 44), Arrival(4.314579, 396, 109)]


def test_an_azure_trace_may_name_its_zone():
    """The 2024 traces do."""
    text = AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 02:00:01.009930+02:00,2,6\n"
    assert [arrival.at_s for arrival in arrivals(text)] == [0.0, 1.0]


def test_our_own_form_may_name_lane_and_tenant():
    """A lane or tenant that is left empty is not named."""
    assert arrivals(f"{OWN}\n0,10,5\n1.5,20,6\n") == [Arrival(0.0, 10, 5), Arrival(1.5, 20, 6)]
    assert arrivals(f"{OWN},lane\n0,10,5,P0\n") == [Arrival(0.0, 10, 5, "P0")]
    assert arrivals(f"{OWN},lane,tenant\n0,10,5,,chat\n") == [Arrival(0.0, 10, 5, None, "chat")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_blank_lines_and_quotes_do_not_matter(end):
    """Spreadsheets write CRLF and quotes; a last line may lack its end."""
    assert arrivals(end.join(["", OWN, "", '"0","10","5"', "", "1, 20 ,6"])) == [Arrival(0, 10, 5), Arrival(1, 20, 6)]


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path):
    """Excel puts one before UTF-8."""
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{OWN}\r\n0,10,5\r\n".encode())
    assert list(read(path)) == [Arrival(0, 10, 5)]


def test_rows_are_read_only_as_far_as_they_are_asked_for():
    """A trace of any size can be cut to a window."""
    endless = itertools.chain([f"{OWN}\n"], (f"{second},10,5\n" for second in itertools.count()))
    assert len(list(itertools.islice(parse(endless, "t.csv"), 1000))) == 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "t.csv:1: is empty"),
        ("\n\n", "t.csv:2: is empty"),
        ("a,b,c\n1,2,3\n", "t.csv:1: unknown header 'a,b,c'"),
        (f"{OWN},tenant\n", "t.csv:1: unknown header"),
        (f"{OWN}\n0,10\n", "t.csv:2: 2 fields, expected 3"),
        (f"{OWN}\n0,10,5,6\n", "t.csv:2: 4 fields, expected 3"),
        (f"{OWN}\n0,10,5\n\nx,10,5\n", "t.csv:4: seconds: 'x' is not a number"),
        (f"{OWN}\n-1,10,5\n", "t.csv:2: seconds: '-1' is not"),
        (f"{OWN}\nnan,10,5\n", "t.csv:2: seconds: 'nan' is not"),
        (f"{OWN}\n0,1.5,5\n", "t.csv:2: prompt_tokens: '1.5' is not a whole number"),
        (f"{OWN}\n0,10,-5\n", "t.csv:2: output_tokens: '-5' is not"),
        (f"{OWN}\n0,²,5\n", "t.csv:2: prompt_tokens: '²' is not"),
        (f"{OWN}\n0,{'9' * 5000},5\n", "t.csv:2: prompt_tokens: '99999"),
        (f"{OWN}\n2,10,5\n1.25,10,5\n", "t.csv:3: time goes back by 0.750 s; sort the trace by time"),
        (f'{OWN}\n0,10,"5\n', "t.csv:2: not CSV: "),
        (f"{AZURE}yesterday,10,5\n", "t.csv:2: TIMESTAMP: 'yesterday' is not a date and time"),
        (f"{AZURE}2023-11-16 18:15:46.68,,5\n", "t.csv:2: ContextTokens: '' is not"),
        (f"{AZURE}2023-11-16 18:15:46,1,5\n2023-11-16 18:15:45,1,5\n", "t.csv:3: time goes back by 1.000 s"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_line(text, says):
    """The first mistake ends the reading."""
    assert complaint(text).startswith(says)


def test_files_that_cannot_be_read_say_so(tmp_path):
    """Absent, a folder, or no text."""
    path = tmp_path / "t.csv"
    for prepare, says in (
        (lambda: None, "No such file"),
        (lambda: path.write_bytes(f"{OWN}\n\xff".encode("latin-1")), "is not UTF-8"),
    ):
        prepare()
        with pytest.raises(TraceError, match=says):
            list(read(path))
    with pytest.raises(TraceError, match="directory"):
        list(read(tmp_path))


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=12), max_size=6), st.sampled_from([AZURE, OWN]))
def test_any_text_is_read_or_refused_in_one_line(rows, header):
    """Nothing but TraceError comes out, whatever stands in the rows."""
    try:
        arrivals("\n".join([header.strip(), *rows]))
    except TraceError as error:
        assert str(error).startswith("t.csv:")  # noqa: PT017 - no error is right too
