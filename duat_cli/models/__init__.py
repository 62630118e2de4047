"""Everything that touches transformers, safetensors, accelerate and peft."""
