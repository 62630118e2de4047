"""The bundled demo checkpoint and adapter (data made by scripts/train_demo.py)."""
