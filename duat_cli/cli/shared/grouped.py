"""Commands that take their options in groups, which they share and hand on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, get_type_hints

from duat_cli.compat.typer import OptionInfo


class Options:
    """A group: an attribute that its class sets to a `typer.Option` is one, and in an instance what was given for it.

    An option that has no name of its own has the attribute's: `no_cache` is --no-cache, a flag without an opposite. A
    flag without a default is False.
    A class that extends a group and sets an attribute to another value has no such option.
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
        """given: by name; what is missing has the option's own default."""
        for one in self.parameters:
            setattr(self, one.name, given.get(one.name, one.default.default))


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """The command as Typer takes it, with the options of each group in the place of the group."""
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
