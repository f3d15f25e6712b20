"""The name of vllm-omni's chunk adapter, bound anew, is to whoever uses it as the class was."""

from __future__ import annotations

from typing import Any

import pytest
from trio_mori_vllm_omni._adapter_choice import Choice

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
