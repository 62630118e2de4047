"""What PEFT writes into an adapter of its own accord is no foreign code."""

from __future__ import annotations

from peft import LoraConfig
from peft.auto import get_default_import_allowlist

from duat_cli.compat.peft import MEGATRON, MODULE_FIELDS, OWN_LIBRARIES


def test_own_libraries_are_those_of_the_allow_list() -> None:
    """megatron-core has an option of its own, `megatron_core`, and is no name that can be imported."""
    assert set(OWN_LIBRARIES) == set(get_default_import_allowlist()) - {"megatron-core"}


def test_what_a_config_holds_unasked() -> None:
    config = LoraConfig()
    assert config.megatron_core == MEGATRON
    assert [name for name in MODULE_FIELDS if vars(config).get(name)] == []
    assert "_custom_modules" in vars(config)
