"""Every option that more than one command takes, declared once.

A command's own group takes one over as a class attribute, such as `Texts.chat`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import typer

from duat_cli.cli.shared.grouped import Options
from duat_cli.cli.terminal.help import written
from duat_cli.cli.terminal.talk import hide
from duat_cli.errors import InputError
from duat_cli.loading.inputs.request import InputFiles, StackName
from duat_cli.text import clean

if TYPE_CHECKING:
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.plan.task import Task

PANEL_INPUT = "Input"
PANEL_COMPUTE = "What to compute"
PANEL_LOADING = "Loading"
PANEL_OUTPUT = "Output"
PLACES = {"FILE": "a file", "DIR": "a folder"}  # metavar -> what its option names, in words


def named(metavar: str) -> Callable[..., Any]:
    """Callback that refuses a file in place of a folder, and an empty name, as of an unset variable, which would be the
    working directory."""
    what = PLACES[metavar]

    def filled(parameter: typer.CallbackParam, value: Any) -> Any:
        option = written(parameter)
        if "" in (value if isinstance(value, list) else [value]):
            raise InputError(f"{option} '': an empty name; expected {what}")
        if metavar == "DIR" and value is not None and os.path.lexists(value) and not os.path.isdir(value):
            raise InputError(f"{option} {clean(value)}: a file; expected {what}")
        return value

    return filled


def option(default: Any = None, *names: str, panel: str, **given: Any) -> Any:
    """An option in a panel of the help. names: needed unless the group's attribute is the only name. default: None is
    False for a flag in a group."""
    if (metavar := given.get("metavar")) in PLACES:
        given.setdefault("callback", named(metavar))
    return typer.Option(default, *names, rich_help_panel=panel, **given)


input_option = functools.partial(option, panel=PANEL_INPUT)
compute_option = functools.partial(option, panel=PANEL_COMPUTE)
loading_option = functools.partial(option, panel=PANEL_LOADING)
output_option = functools.partial(option, panel=PANEL_OUTPUT)
format_option = functools.partial(output_option, None, "--format", metavar="FORMAT")


def same_dashes(name: str) -> str:
    """Name of an option with dashes for underscores, which accelerate and lm_eval use: --trust_remote_code."""
    return name.replace("_", "-")


def _hidden(token: str | None) -> str | None:
    """Hides the token in all messages from here on, and returns it."""
    hide(token)
    return token


CONTEXT: dict[str, Any] = {
    "token_normalize_func": same_dashes,
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
}

Format = Literal["table", "json"]
PageFormat = Literal["table", "json", "html"]
CardFormat = Literal["table", "json", "html", "model-card"]
Dtype = Literal["float32", "float64", "bfloat16", "float16", "fp32", "fp64", "bf16", "fp16", "auto"]

MODEL = typer.Argument(
    None,
    metavar="MODEL",
    help="Folder of a checkpoint, or a hub id such as org/name. Default: the bundled demo model.",
)
LAYERS = input_option(metavar="LIST", help="Report these blocks only, such as 0-3,7.")
OUT = compute_option(
    metavar="DIR",
    help="Keep the result of every prompt in a folder: an interrupted run goes on there, and processes started by "
    "torchrun, accelerate launch or srun share the prompts. More: duat explain many-prompts.",
)
WIDE = output_option(False, "--wide", help="Show tables with all their columns, however narrow the terminal is.")


class Texts(Options):
    """What a model is to read."""

    prompt: list[str] | None = input_option(
        metavar="TEXT", help="A text to run; repeatable; - reads standard input. Default: a bundled set."
    )
    prompts: str | None = input_option(
        metavar="FILE",
        help='A file of texts, one a line. A .jsonl file holds JSON lines with "text", "messages" or "input_ids", a '
        '.parquet file a column "text", "prompt", "messages" or "input_ids". Lines may be compressed, with .gz at '
        "the end of the name. - reads standard input, one text a line.",
    )
    max_tokens: int | None = input_option(metavar="N", min=1, help="Cut every prompt after N tokens.")
    chat: bool = input_option(
        help="Put every text into the checkpoint's chat template, as a message of the user, followed by what opens "
        'the answer. Lines of a .jsonl file may hold "messages" instead of "text".'
    )

    def request(self, files: InputFiles | None = None) -> PromptRequest:
        """The prompts. files: inputs of a model that reads no text, where the command knows such models."""
        from duat_cli.analysis.opening import PromptRequest

        return PromptRequest(self.prompt, self.prompts, self.max_tokens, files, chat=self.chat)


def _stack(more: str = "") -> Any:
    return input_option(
        metavar="PART",
        help="vision, audio or text: only that part of a model that has several. encoder or decoder: of an "
        "encoder-decoder." + more,
    )


def _decoder_prompt(stacks: str) -> Any:
    return input_option(
        metavar="TEXT",
        help=f"With --stack {stacks}: what the decoder reads, for every prompt. Default: the first 15 tokens that the "
        "model itself writes.",
    )


class Files(Options):
    """What a model of images or sound is to read, and which stacks of a model of several."""

    image: list[str] | None = input_option(
        metavar="FILE", help="A picture for a model that reads pictures; repeatable; needs Pillow, the extra vision."
    )
    audio: list[str] | None = input_option(
        metavar="FILE", help="A PCM .wav file for a model that reads sound; repeatable."
    )
    tensors: list[str] | None = input_option(
        None,
        "--inputs",
        metavar="FILE",
        help="A .safetensors file of prepared tensors, named as the arguments of the model's forward pass; repeatable.",
    )
    stack: str | None = _stack(
        " A name: the blocks of that list, for a model that runs several lists of blocks. all: every stack in "
        "turn, with a report for each."
    )
    decoder_prompt: str | None = _decoder_prompt("decoder or all")

    def given(self) -> InputFiles:
        """The input files. Raises InputError where options contradict each other."""
        image, audio, tensors = tuple(self.image or ()), tuple(self.audio or ()), tuple(self.tensors or ())
        return InputFiles(image, audio, tensors, self.stack, self.decoder_prompt).asked()


class OneStack(Files):
    """The input files of a model of images or sound, and the one stack that is read of several."""

    stack: StackName | None = _stack()
    decoder_prompt: str | None = _decoder_prompt("decoder")


class Loading(Options):
    """How a checkpoint is loaded."""

    device: str = loading_option("auto", metavar="DEVICE", help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    device_map: str | None = loading_option(
        metavar="MAP",
        help="Read weights block by block, and keep on the devices what fits there: auto, balanced, sequential, or a "
        "JSON file of modules and devices (cpu, disk, cuda:1). --device is the one that computes. More: duat explain "
        "size.",
    )
    dtype: Dtype = loading_option(
        "float32",
        metavar="DTYPE",
        help="float32, float64, bfloat16, float16, or auto: as stored. The default is float32 because the certificate "
        "is only as sharp as the arithmetic.",
    )
    memory: str | None = loading_option(
        metavar="SIZE",
        help="Memory that the process may take, such as 8GB; if a GPU computes, memory of the GPU. Weights that do "
        "not fit are read block by block. Default: what the system leaves.",
    )
    revision: str | None = loading_option(metavar="REV", help="Branch, tag or commit of a hub checkpoint.")
    token: str | None = loading_option(
        metavar="TOKEN",
        callback=_hidden,
        help="Hub access token, never printed. Default: HF_TOKEN, or the one of 'hf auth login'.",
    )
    cache_dir: str | None = loading_option(
        metavar="DIR", help="Where hub files are kept. Default: the hub's own cache."
    )
    trust_remote_code: bool = loading_option(
        help="Run Python code that comes with the checkpoint. Off: such a model is refused, or read as "
        "transformers' own class of its type, with a warning."
    )

    def request(self, model: str | None, task: Task | None = None) -> ModelRequest:
        """The checkpoint. Raises InputError for a --memory that is no size. task: the command, where it is planned."""
        from duat_cli.analysis.opening import ModelRequest

        return ModelRequest(model, task=task, **(vars(self) | {"memory": parse_memory(self.memory)}))


class Page(Options):
    """The form of a report that has a page with pictures, and where it goes."""

    form: PageFormat | None = format_option(
        help="table, json, or html: a page with pictures. Default: by the ending of the output file's name, else "
        "table.",
    )
    json: bool = output_option(help="Short for --format json.")
    output: str | None = output_option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="Write the result to a file, whole or not at all; - is standard output.",
    )


class Card(Options):
    """The form of a report that has a page with pictures and a section for a model's README, and where it goes."""

    form: CardFormat | None = format_option(
        help="table, json, html (a page with pictures) or model-card (a section for a model's README). Default: by "
        "the ending of the output file's name, else table.",
    )
    json: bool = Page.json
    output: str | None = Page.output


class Plain(Options):
    """The form of a report without a page, and where it goes."""

    form: Format | None = format_option(
        help="table or json. Default: table, or json when the output file ends in .json.",
    )
    json: bool = Page.json
    output: str | None = Page.output


class Voice(Options):
    """What is said beside the result."""

    quiet: bool = output_option(False, "--quiet", "-q", help="Show only the result and errors.")
    verbose: bool = output_option(False, "--verbose", "-v", help="Also show every step, and the libraries' progress.")
    no_color: bool = output_option(help="No colour; NO_COLOR does the same.")


def require_hub(model: str | None, token: str | None) -> None:
    """Raises InputError for --token beside a folder, in a command about tokens of a text: --target may be meant."""
    if token is not None and (model is None or os.path.lexists(model)):
        raise InputError("--token: gives access to the hub, and MODEL is a folder; the token to explain is --target")


def refuse_stack(files: InputFiles | None) -> None:
    """Raises InputError for --stack or input files beside --out, which stores only results of texts."""
    if files is not None and (files.stack or files.option):
        other = "--stack" if files.stack else files.option
        raise InputError(f"--out and {other} contradict each other: results are kept of texts, for the whole model")


def parse_memory(text: str | None) -> int | None:
    """Bytes of '8GB', '2.5GiB' or '900m'. Units are of 1000 with B, of 1024 with iB or alone. None stays None."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE | re.ASCII)
    if match is None or float(match[1]) == 0:
        raise InputError(f"--memory '{clean(text)}': expected a size such as 8GB, 2.5GiB or 900MB")
    unit = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(float(match[1]) * unit ** " kmgt".index(match[2].lower() or " "))
