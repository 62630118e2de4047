"""Groups of options, which commands share and hand on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, get_type_hints

from duat_cli.compat.typer import OptionInfo


class Options:
    """Base of a group of options. An attribute that the class sets to a `typer.Option` is an option; in an instance it
    has the value that was given.

    An option without a name of its own is named after the attribute: `no_cache` is --no-cache, a flag without an
    opposite. A flag without a default is False. A subclass drops an option by setting its attribute to another value.
    """

    parameters: ClassVar[list[inspect.Parameter]] = []
    """The options as parameters of a function, in their order."""

    def __init_subclass__(cls) -> None:
        cls.parameters = []
        for name, kind in get_type_hints(cls).items():
            if isinstance(option := getattr(cls, name), OptionInfo):
                option.param_decls = option.param_decls or (f"--{name.replace('_', '-')}",)
                option.default = bool(option.default) if kind is bool else option.default
                parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
                cls.parameters.append(parameter)

    def __init__(self, **given: Any) -> None:
        """given: values by name; an option that is missing there has its own default."""
        for one in self.parameters:
            setattr(self, one.name, given.get(one.name, one.default.default))


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """The command in the form that Typer takes: each group parameter is replaced by the group's options."""
    parameters, groups = list[inspect.Parameter](), dict[str, type[Options]]()
    for one in inspect.signature(command, eval_str=True).parameters.values():
        if isinstance(one.annotation, type) and issubclass(one.annotation, Options):
            groups[one.name] = one.annotation
            parameters += one.annotation.parameters
        else:
            parameters.append(one)

    def flat(*args: Any, **given: Any) -> int:
        made = {
            name: group(**{one.name: given.pop(one.name) for one in group.parameters if one.name in given})
            for name, group in groups.items()
        }
        return command(*args, **given, **made)

    flat.__doc__ = command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat
