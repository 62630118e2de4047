"""The commands as functions: `import duat_cli as duat; duat.inspect("path")` (configs/docs/from-python.md).

Each returns the report that the command writes, and by default computes the same. An error that the command prints is
raised as `DuatError`, with the same line.

In every call: `model` is a folder or hub id, None for the bundled demo, or, where stated, a transformers or PEFT model
in memory with its `tokenizer`, which is left as it is. `prompts` is a text or several, `prompts_file` a file of them;
without either the bundled set runs. `max_tokens` cuts every prompt. `progress` is called with (done, total, what is
done). Nothing is printed, and the state of the process is restored.
"""
