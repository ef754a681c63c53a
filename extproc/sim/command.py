"""The command `tidegate simulate`: run every policy at every load, print the figures, write the files.

Exit code 0; 1 when an invariant does not hold, and then the figures are not to be trusted; 2 when nothing could be run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from extproc.sim.compare import Options, compare
from extproc.sim.page import PageError, page, plotly
from extproc.sim.table import data, shown
from extproc.sim.trace import TraceError
from extproc.sim.virtual import Stuck

__all__ = ["run"]

PLAIN_WIDTH = 160


def run(options: Options, *, html: Path | None = None, json_file: Path | None = None) -> int:
    """Run it. The exit code; see the head of this file. SettingsError as it is."""
    try:
        if html is not None:
            plotly()  # whatever is missing is said before the long part, not after it
        for path in filter(None, (html, json_file)):
            path.touch()
        comparison = compare(options, _say)
    except (TraceError, PageError) as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}")
    except Stuck:
        return _failed("the simulated world stands still; this is a bug")
    console = Console()
    shown(comparison, console if console.is_terminal else Console(width=PLAIN_WIDTH))
    if json_file is not None:
        json_file.write_text(json.dumps(data(comparison)), "utf-8")
    if html is not None:
        html.write_text(page(comparison, _title(options)), "utf-8")
    return 1 if comparison.broken else 0


def _title(options: Options) -> str:
    source = options.trace.stem if options.trace is not None else "bursts"
    return f"{source} on {', '.join(options.settings.upstreams)}"


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201


def _failed(line: str) -> int:
    _say(line)
    return 2
