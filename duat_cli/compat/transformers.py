"""transformers: known to work with 5.10.1 and 5.24.0.

Two behaviours without a name are relied on as well. `from_pretrained(None, config=…, state_dict=…)` accepts objects
that return a tensor when they are indexed by `...`, and reads no file of its own. `output_loading_info` names missing,
unexpected and mismatched tensors. Without either, loading and its rehearsal fail with an error.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn

# -- configs -----------------------------------------------------------------------------------------------------------


def stated(config: Any, name: str) -> Any:
    """A field of the config's text part; None where it states none, or several that differ.

    `get_text_config` raises where a config has two text parts, and reading a field raises where layers state it apart.
    Without it, models with such a config end in an unexpected error.
    """
    if config is None:
        return None
    try:
        return getattr(config.get_text_config(), name, None)
    except (ValueError, RuntimeError):
        return None


def largest_stated(config: Any, name: str) -> int | None:
    """The same of a size, of which a config may state a list, one for each stage. Without it, a model in stages (Swin)
    ends in an unexpected error."""
    found = stated(config, name)
    size: int | None = max(found) if isinstance(found, list | tuple) else found
    return size


# -- attention ---------------------------------------------------------------------------------------------------------

# Arguments that are passed to every attention function, for those that read them. A tensor of another name is taken for
# the model's own argument, so a name missing here refuses the model.
ATTENTION_ARGUMENTS = frozenset(
    {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "s_aux", "input_ids"}
)
EAGER = "eager_attention_forward"  # name of eager attention functions, or its end


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Makes `name` an attention implementation, with the mask that eager attention gets.

    `name` must contain neither "sdpa" nor "flash", by which transformers chooses masks and kernels. Without a mask
    function of the same name the mask is None, and causality is lost without an error.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def attention_configs(model: Any) -> list[Any]:
    """The configs of a model and of all its parts, its own first; each names an attention implementation."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "set_attn_implementation")]
    while waiting:
        config = waiting.pop(0)
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name) for name in config.sub_configs]
    return list(found.values())


def attention_implementation(config: Any) -> str | None:
    """The name of the attention implementation in use. Without it, whether a model accepted another name is unknown,
    and the old name is lost."""
    name: str | None = config._attn_implementation
    return name


def set_attention_implementation(config: Any, name: str | None) -> None:
    """Sets the attention implementation of one of `attention_configs`. `set_attn_implementation` does so for each
    config of a model, with a search and checks. Without it, every switch of a pass costs two walks over the model."""
    config._attn_implementation_internal = name


def eager_attention(module: nn.Module) -> Callable[..., Any] | None:
    """The one eager attention function that the module's own code names; otherwise the one of the usual name beside its
    class, or beside a class it inherits from. A file may contain several, for text and for pictures.

    Without it, models that use the attention interface are refused.
    """
    for cls in type(module).__mro__:
        beside = getattr(sys.modules.get(cls.__module__), "__dict__", {})
        code = getattr(inspect.unwrap(vars(cls)["forward"]), "__code__", None) if "forward" in vars(cls) else None
        named = [] if code is None else [name for name in code.co_names if name.endswith(EAGER) and name in beside]
        function: Callable[..., Any] | None = beside.get(named[0] if len(named) == 1 else EAGER)
        if function is not None:
            return function
    return None


# -- experts -----------------------------------------------------------------------------------------------------------


def experts_implementation(model: Any) -> str | None:
    """The implementation of routed experts, which affects rounding. Without it, the cache may return results of another
    one."""
    return getattr(model.config, "_experts_implementation", None)


def experts_hold_inputs_first(module: nn.Module | None) -> bool:
    """Whether fused experts are stored as (experts, in, out). Without it, an adapter on experts whose sides are equal
    is refused."""
    return bool(getattr(module, "is_transposed", False))


def is_conv1d(layer: nn.Module | None) -> bool:
    """Whether a layer is transformers' own linear layer that stores its weight as (in, out). Without it, the config of
    an adapter says so of square weights."""
    return type(layer).__name__ == "Conv1D"


# -- chat templates ----------------------------------------------------------------------------------------------------


def template_fault(template: str) -> str | None:
    """Why a chat template cannot be compiled in transformers' way, with the statements that it adds to Jinja; None
    where it can. Without it, a template with a syntax error passes unless a baseline has another template."""
    import jinja2
    from transformers.utils import chat_template_utils

    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiled is None:
        return None
    try:
        compiled(template)
    except jinja2.TemplateSyntaxError as fault:
        return f"line {fault.lineno}: {fault.message}"
    except (jinja2.TemplateError, ImportError):  # an old jinja2, which transformers refuses
        return None
    return None


TEMPLATE_DAY = (2024, 7, 26)  # the date in Llama 3's templates where there is no clock
_CLOCK = threading.Lock()


class _StoppedClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _StoppedClock:
        return cls(*TEMPLATE_DAY, tzinfo=tz)


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """A context in which chat templates that ask for the date (`strftime_now`) get `TEMPLATE_DAY`. Without it, a prompt
    with such a template changes every day, and so do its numbers."""
    from transformers.utils import chat_template_utils

    with _CLOCK:
        was = chat_template_utils.datetime
        chat_template_utils.datetime = _StoppedClock
        try:
            yield
        finally:
            chat_template_utils.datetime = was


# -- configs and classes -----------------------------------------------------------------------------------------------

# Fields of a config.json that choose code: 'org/repo' in one of them makes transformers fetch and run a kernel, even
# when the caller asks for eager. A field that is missing here would let that pass.
IMPLEMENTATION_FIELD = re.compile(r"_?(attn|experts)_implementation(_internal)?")


def with_places(output: Any) -> Any:
    """A plain dictionary, which a checkpoint's own code may return, as transformers' own output, which is read by name
    and by place. Without it, such a model ends in an unexpected error."""
    from transformers.utils import ModelOutput

    return ModelOutput(output) if type(output) is dict else output


def encoder_output(states: Tensor) -> Any:
    """An encoder's states, (1, K, width), as the `encoder_outputs` that an encoder-decoder takes in place of a pass.

    The class is not exported at the top. A tuple does not suffice, because some models read its field by name and fail.
    Models with experts also ask for `router_logits`, used for a loss alone, and Moonshine for the `attention_mask` of
    the states; both are None, as all states are read.
    """
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=states)
    output.router_logits = output.attention_mask = None
    return output


def as_weights_are(config: Any) -> Any:
    """The config without fields that would change a model's code at load, and with it the numbers: fusion_config, and
    quantization_config, by which transformers would look for scales where duat passes weights."""
    config.fusion_config = None
    for inner in (config, *(v for v in vars(config).values() if hasattr(v, "to_diff_dict"))):
        for field in ("quantization_config", "compression_config"):
            vars(inner).pop(field, None)
    return config


def eager_model(cls: type[Any], config: Any, dtype: dtype) -> Any:
    """A model with transformers' own initialisation, in eager attention and this dtype; a class called with its config
    alone chooses others. Without it, there are neither tiny models nor untrained ones to compare with."""
    return cls._from_config(config, attn_implementation="eager", dtype=dtype)


@contextlib.contextmanager
def initialisers_through(run: Callable[..., Any]) -> Iterator[None]:
    """A context in which `run(function, tensor, ...)` is called in place of each function of torch.nn.init that
    initialises a model. Without it, no untrained model can be drawn block by block."""
    from transformers import initialization

    functions = initialization.TORCH_INIT_FUNCTIONS
    own = dict(functions)
    functions.update({name: functools.partial(run, function) for name, function in own.items()})
    try:
        with initialization.guard_torch_init_functions():  # torch's own modules use the same table
            yield
    finally:
        functions.update(own)


def initialise_read(model: Any) -> None:
    """Does what transformers does to a model once its weights are read: it initialises all modules, and most
    initialisers skip a tensor that is marked as read. Without it, tensors whose initialiser does not check (the padding
    row of ChineseCLIP, the last balancing bias of Zaya) differ: as in the files where weights are read in parts,
    otherwise as transformers sets them."""
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


def auto_models(task: str) -> Any:
    """The auto classes' table of a task, or of 'BASE': config class -> model class. A look-up imports the class.

    Without it, models without a named architecture and tiny models have no class.
    """
    return getattr(_modeling_auto(), "MODEL_MAPPING" if task == "BASE" else f"MODEL_FOR_{task}_MAPPING")


def auto_types(task: str) -> set[str]:
    """The model types that have an auto class for a task. Without it, there is no list of text models."""
    return set(getattr(_modeling_auto(), f"MODEL_FOR_{task}_MAPPING_NAMES"))


def auto_class_names(model_type: str) -> set[str]:
    """The class names that any auto class has for a type. Some types use another type's classes; without it, those are
    loaded without their head, with a note."""
    tables = [v for k, v in vars(_modeling_auto()).items() if k.endswith("_MAPPING_NAMES")]
    found = [table[model_type] for table in tables if model_type in table]
    return {name for names in found for name in ([names] if isinstance(names, str) else names)}


def _modeling_auto() -> ModuleType:
    from transformers.models.auto import modeling_auto

    return modeling_auto


def modeling_file(config: Any) -> ModuleType | None:
    """The modeling_ file beside the file of a config. Without it, classes that transformers does not export (text parts
    of multimodal models) are loaded as the base model, with a note."""
    try:
        return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None


def modeling_files(config_class: type[Any]) -> tuple[str, list[ModuleType]]:
    """(package of a config class, all its modeling_ files). Without it, text parts have no tiny model."""
    package = importlib.import_module(config_class.__module__.rpartition(".")[0])
    names = [f.name for f in pkgutil.iter_modules(package.__path__) if f.name.startswith("modeling_")]
    return package.__name__, [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def class_of_checkpoint(reference: str, path: str) -> Any:
    """A class of the code that comes with a local checkpoint; this runs it. Without it, such checkpoints fail."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, path, local_files_only=True)


def is_load_report(line: str) -> bool:
    """Whether a logged text is the table of missing and unexpected tensors, which duat states itself. Without it, the
    table becomes a second warning."""
    return "LOAD REPORT" in line


# -- tokenizers --------------------------------------------------------------------------------------------------------


def named_tokens(tokenizer: Any) -> dict[str, str]:
    """Special tokens by role, including those of other modalities, such as image_token. Without it, the placeholder of
    an image in a text model's tokenizer counts as a token that the embedding lacks."""
    tables = (getattr(tokenizer, "_special_tokens_map", None), getattr(tokenizer, "init_kwargs", None))
    found = {str(name): token for table in tables for name, token in (table or {}).items() if token is not None}
    return {name: str(token) for name, token in found.items() if name.endswith("_token")}


# -- loading a part ----------------------------------------------------------------------------------------------------


def targets_of(model: Any, names: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Tensor of the files -> (the parameter or buffer of the model that it becomes, or the first of several; whether
    its values are changed on the way). A tensor that the model does not use is left out. Without it, no model can be
    read in parts."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping, state = _conversions(model), model.state_dict()
    rules = [[m for m in mapping if isinstance(m, kind)] for kind in (WeightRenaming, WeightConverter)]
    found = {}
    for name in names:
        target, rule = rename_source_key(name, *rules, model.base_model_prefix, state)
        if target not in state and name in state:  # as in transformers, where a rule took the name for another's
            target, rule = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target in state:
            found[name] = target, rule is not None
    return found


def tied_keys(model: Any) -> dict[str, str]:
    """Parameter -> the one that its class ties it to. Without it, tied weights that files store twice stay apart."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


class OnDevice:
    """A tensor of the files, read or not, in a form that transformers accepts. It moves to a GPU as it is stored and is
    cast there, because a bfloat16 cast to float32 is twice as many bytes to move."""

    def __init__(self, stored: Any, device: str) -> None:
        self._stored, self._device = stored, device

    def __getitem__(self, place: Any) -> Tensor:
        tensor: Tensor = self._stored[place]
        return tensor.to(self._device) if self._device.startswith("cuda") else tensor


def load_part(model: Any, tensors: Mapping[str, Any], dtype: dtype, device: str) -> None:
    """Puts these tensors of the files in their places, renamed, fused and cast as a whole load would do it. ValueError
    says what transformers could not convert. Without it, no model can be read in parts."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        device_map={"": device},
        weight_mapping=_conversions(model),
    )
    asked = inspect.signature(convert_and_load_state_dict_in_model).parameters
    plan = {"tp_plan": None} if "tp_plan" in asked else {}  # up to 5.10: split of weights over devices
    stored = {name: OnDevice(tensor, device) for name, tensor in tensors.items()}
    info, _ = convert_and_load_state_dict_in_model(model, stored, config, **plan)
    faults = [*info.error_msgs, *map(str, info.conversion_errors.values()), *map(str, info.mismatched_keys)]
    if faults:
        raise ValueError("; ".join(faults))


def _conversions(model: Any) -> Any:
    """The model's conversion rules, made anew for every load because they collect tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)
