"""Which API keys are accepted as settings, and that no message tells them."""

import traceback
from typing import Any

import pytest

from fmoe_ray.config import ServerSettings, parse_settings
from fmoe_ray.errors import ConfigError

SECRET = "sk-secret"


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys\.1: .*at least 1 character"):
        parse_settings({"server": {"api_keys": ["good", ""]}})


@pytest.mark.parametrize(
    "server",
    [
        {"api_keys": SECRET},
        {"api_keys": {"first": SECRET}},
        {"api_keys": [[SECRET]]},
        {"api_key": SECRET},
        [{"api_keys": [SECRET]}],
    ],
    ids=["text", "mapping", "list in list", "misspelt", "section is a list"],
)
def test_a_wrong_key_setting_is_named_without_the_key(server: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_settings({"server": server})
    assert "server" in str(refused.value)
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_other_values_are_still_told() -> None:
    with pytest.raises(ConfigError, match=r"server\.keep_alive_s: .*, got -3"):
        parse_settings({"server": {"keep_alive_s": -3}})


def test_settings_are_printed_without_their_keys() -> None:
    assert SECRET not in repr(ServerSettings(api_keys=(SECRET,)))
