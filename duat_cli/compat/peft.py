"""PEFT's adapter files: known to hold for 0.21. PEFT itself is never imported."""

from __future__ import annotations

# PEFT's allow-list for auto_mapping; PEFT writes these names itself. A library that is missing here is reported as
# foreign code; one too many would hide some.
OWN_LIBRARIES = ("transformers", "diffusers", "lerobot")

# PEFT writes this into every LoRA config, and imports it where megatron_config is set. Another value is foreign code.
MEGATRON = "megatron.core"

# Not fields of PEFT's format, but names of code elsewhere: `_custom_modules` is what PEFT keeps at run time.
MODULE_FIELDS = ("auto_map", "custom_modules", "_custom_modules")
