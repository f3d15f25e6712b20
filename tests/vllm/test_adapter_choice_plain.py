"""The name of vllm-omni's chunk adapter, bound anew, is to whoever uses it as the class was."""

from __future__ import annotations

from typing import Any

import pytest
from trio_mori_vllm_omni._adapter_choice import Choice, is_switched_on, is_wanted

from trio_mori import ConfigError

pytestmark = pytest.mark.deterministic


class Stock:
    """Stands for vllm-omni's class."""

    LIMIT = 3

    def __init__(self, vllm_config: object) -> None:
        self.config = vllm_config


class Config:
    """Of a stage of any connector."""

    model_config = None


choice: Any = Choice(Stock, lambda name, extra: False)


def test_what_it_makes_is_an_instance_of_it() -> None:
    adapter = choice(Config)
    assert type(adapter) is Stock
    assert isinstance(adapter, choice)
    assert not isinstance(object(), choice)


def test_it_can_be_derived_from_and_has_what_the_class_has() -> None:
    class Derived(choice):  # type: ignore[misc]
        pass

    assert isinstance(Derived(Config), Stock)
    assert Derived.LIMIT == choice.LIMIT == 3


@pytest.mark.parametrize(("value", "wanted"), [(True, True), ("On", True), (1, True), (False, False), ("no", False)])
def test_a_yes_or_a_no_in_the_yaml_wins(value: object, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_MORI_CHUNK_ADAPTER", "0" if wanted else "1")
    assert is_wanted({"chunk_adapter": value}) is wanted


@pytest.mark.parametrize("value", ["yess", 2, [True], ""])
def test_what_is_neither_yes_nor_no_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"chunk_adapter: .* is not allowed; give true or false"):
        is_wanted({"chunk_adapter": value})


def test_a_misspelt_yes_in_the_environment_is_refused_and_none_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in ("TRIO_MORI_CHUNK_ADAPTER", "TRIO_MORI_REPLACE_STOCK"):
        monkeypatch.setenv(switch, "yess")
        with pytest.raises(ConfigError, match=f"{switch}: 'yess' is not allowed; set it to 1 or 0"):
            is_switched_on(switch)
        monkeypatch.setenv(switch, "")
        assert not is_switched_on(switch)
    monkeypatch.setenv("TRIO_MORI_CHUNK_ADAPTER", "2")
    with pytest.raises(ConfigError, match="TRIO_MORI_CHUNK_ADAPTER"):
        is_wanted({})
