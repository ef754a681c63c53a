"""The command `tidegate diff`: what two configurations differ in, and what the same traffic would have met under each.

Traffic is sped up or slowed down to what the old configuration's upstreams can take, and is then the same for both.
Each side's providers are taken to allow what its configuration says of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from extproc.settings import Settings, SettingsError
from extproc.settings.changes import Need, differences, version_of
from extproc.sim.compare import Options, play_all, prepare
from extproc.sim.outcome import Outcome
from extproc.sim.policies import PolicyName
from extproc.sim.table import versus
from extproc.sim.trace import TraceError

__all__ = ["played", "run", "told"]

PLAIN_WIDTH = 160


def run(options: Options, old: Settings, new: Settings) -> int:
    """Print it. With a trace in `options` (whose settings do not matter) play that, too. The exit code: 0, or 2 where
    the trace cannot be used. SettingsError as it is.
    """
    for line in told(old, new):
        print(line)  # noqa: T201 - the product of a command
    if options.trace is None:
        return 0
    try:
        found = played(options, old, new)
    except TraceError as error:
        _say(str(error))
        return 2
    console = Console()
    console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
    for load, outcomes in found.items():
        console.print(Text(f"load {load:g} of {options.trace.name}, of what the old config's upstreams can take"))
        versus(outcomes, console)
    return 1 if any(outcome.broken for outcomes in found.values() for outcome in outcomes.values()) else 0


def told(old: Settings, new: Settings) -> list[str]:
    """A line for each setting that differs, with what it needs; and the versions."""
    found = differences(old, new)
    width = max(len(need) for need in Need)
    lines = [f"{one.need:{width}}  {one}" for one in found]
    ends = f"version {version_of(old)} -> {version_of(new)}"
    count = (
        "nothing differs"
        if not found
        else f"{len(found)} {'setting differs' if len(found) == 1 else 'settings differ'}"
    )
    return [*lines, f"{count}; {ends}"]


def played(options: Options, old: Settings, new: Settings) -> dict[float, dict[str, Outcome]]:
    """What came of the traffic under both, by load. SettingsError, TraceError as they are."""
    options = replace(options, settings=old.alone(), policies=(PolicyName.TIDEGATE,))
    prepare(replace(options, settings=new.alone()))  # whatever the new one cannot be asked is said here
    olds = prepare(options).setups
    lanes = {job.lane for setup in olds for job in setup.jobs}
    if missing := lanes - new.lanes.keys():
        raise SettingsError([f"trace: lane {min(missing)!r} is not in the new config"])
    both = [one for setup in olds for one in (setup, replace(setup, settings=new.alone()))]
    outcomes, _ = play_all(both, options.workers, _say)
    found: dict[float, dict[str, Outcome]] = {}
    for number, setup in enumerate(olds):
        found[setup.load or 0.0] = {"old": outcomes[2 * number], "new": outcomes[2 * number + 1]}
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201
