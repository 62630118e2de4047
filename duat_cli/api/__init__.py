"""The commands as functions: `import duat_cli as duat; duat.inspect("path")`. configs/docs/python.md shows them."""
