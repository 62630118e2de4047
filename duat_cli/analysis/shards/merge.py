"""The report from a folder of results. It is the same to the last bit, whichever process computed what and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from duat_cli.analysis.progress import Progress
from duat_cli.analysis.shards import attribute, inspect, lora, prune
from duat_cli.analysis.shards.folder import Folder
from duat_cli.results.attribute import AttributeReport
from duat_cli.results.base import Run
from duat_cli.results.inspect import InspectReport
from duat_cli.results.lora import LoraReport
from duat_cli.results.prune.report import PruneReport

Report = InspectReport | AttributeReport | LoraReport | PruneReport

_MERGED: Mapping[str, Callable[[Folder, Callable[[], Run], Progress], Report]] = {
    "inspect": inspect.merged,
    "attribute": attribute.merged,
    "lora-diff": lora.merged,
    "prune-bound": prune.merged,
}


def merge(folder: Folder, run: Callable[[], Run], progress: Progress) -> Report:
    """The report on all prompts. Raises InputError where results are missing. run: is called at the end."""
    return _MERGED[folder.manifest.command](folder, run, progress)
