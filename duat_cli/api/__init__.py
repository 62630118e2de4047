"""The commands as functions: `import duat_cli as duat; duat.inspect("path")` (configs/docs/from-python.md).

Each gives the report that the command writes, computes what it computes by default, and
raises what it says: `DuatError` with the same one line.

In every call: `model` is a folder or hub id, None for the bundled demo, or, where it says so, a transformers or PEFT
model in memory with its `tokenizer`, which is left as it is. `prompts` is a text or several, `prompts_file` a file of
them; without either the bundled set runs. `max_tokens` cuts every prompt. `progress` is called with (done, total, what
is done). Nothing is printed, and nothing of the process stays changed.
"""
