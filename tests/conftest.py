"""Which profile of Envoy's configuration the tests run stacks with."""

from __future__ import annotations

import os

import pytest

VARIABLE = "TIDEGATE_PROFILE"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--profile classic`, or the variable."""
    parser.addoption("--profile", choices=("native", "classic"), default=os.environ.get(VARIABLE, "native"))


def pytest_configure(config: pytest.Config) -> None:
    """Told to whatever makes settings, in whatever process; to commands that read a config as an override."""
    os.environ[VARIABLE] = profile = config.getoption("--profile")
    if profile != "native":
        os.environ["TIDEGATE__GATEWAY__PROFILE"] = profile


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What does not hold in the other profile says why."""
    if config.getoption("--profile") == "classic":
        for item in items:
            if mark := item.get_closest_marker("native"):
                item.add_marker(pytest.mark.skip(reason=f"classic profile: {mark.args[0]}"))
