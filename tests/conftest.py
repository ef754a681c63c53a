"""Which profile of Envoy's configuration the tests run stacks with, and in which order."""

from __future__ import annotations

import os
from functools import partial

import pytest
import yaml
from hypothesis import settings

from tests.turns import Turns, turn_of

VARIABLE = "TIDEGATE_PROFILE"

# What was rendered is read again so often that libyaml, ten times faster, saves a minute.
yaml.safe_load = partial(yaml.load, Loader=yaml.CSafeLoader)
yaml.safe_load_all = partial(yaml.load_all, Loader=yaml.CSafeLoader)

# An example that took long tells of a busy machine, not of a mistake.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--profile classic`, or the variable."""
    parser.addoption("--profile", choices=("native", "classic"), default=os.environ.get(VARIABLE, "native"))


def pytest_configure(config: pytest.Config) -> None:
    """Told to whatever makes settings, in whatever process; to commands that read a config as an override."""
    os.environ[VARIABLE] = profile = config.getoption("--profile")
    if profile != "native":
        os.environ["TIDEGATE__GATEWAY__PROFILE"] = profile


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What does not hold in the other profile says why. Files on Envoy that take long begin first."""
    items.sort(key=lambda item: turn_of(item.path))
    if config.getoption("--profile") == "classic":
        for item in items:
            if mark := item.get_closest_marker("native"):
                item.add_marker(pytest.mark.skip(reason=f"classic profile: {mark.args[0]}"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Turns | None:
    """How tests are dealt out where each file is to stay whole."""
    return Turns(config, log) if config.getoption("dist") == "loadfile" else None
