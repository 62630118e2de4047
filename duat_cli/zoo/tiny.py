"""A tiny random model of every text model type that the installed transformers knows.

The default config of a type is shrunk by one rule (field name -> small value), the same for all types; exceptions are
in configs/tiny.json under the type, with the reason. No field keeps a value that could hide a mistake: widths differ
from each other, gains differ from 1, biases from 0. A type that cannot be built or run is a `NotBuilt` with the reason,
never a silent gap.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import inspect
import itertools
import re
from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from duat_cli.compat.transformers import auto_models, auto_types, eager_model, modeling_files
from duat_cli.zoo.randomise import randomise
from duat_cli.zoo.rule import rule

MAX_PARAMETERS = 3_000_000
MAX_OTHER = 120_000_000  # for models that read pictures or sound: the rule shrinks few of their fields
FIRST_FREE_ID = 3  # special ids without a place of their own are numbered from here,
FIRST_ORDINARY_ID = 40  # and prompts are drawn from here: no tiny config has that many

How = Literal["small", "tied", "shallow", "default"]
"""How a config is shrunk. 'small' is the rule alone; the others are for types that do not run with it. 'tied' keeps
widths of the parts equal that are equal by default, whatever they are called, and also shrinks lists of widths and
`Rule.tied`; 'shallow' only reduces the number of layers; 'default' changes nothing."""

_WIDTH = re.compile(r"(size|sizes|dim|dims|width|widths|channels)$")
LEAST_WIDTH = 16  # for the entries of a list

# Types in these lists need audio, or generate it; types that merely accept pixels (gemma3) run on text alone.
_OTHER_MODALITIES = ("SPEECH_SEQ_2_SEQ", "TEXT_TO_WAVEFORM")
_TEXT = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TEXT_ENCODING")


class TinyError(Exception):
    """A type that cannot be made tiny, and why."""


@dataclasses.dataclass(frozen=True)
class TinyModel:
    model_type: str
    model: PreTrainedModel
    """Random, eval mode, float32, eager attention."""
    inputs: dict[str, Tensor]
    """Inputs that the model was run on once, with finite outputs."""


@dataclasses.dataclass(frozen=True)
class NotBuilt:
    model_type: str
    reason: str
    made: bool = False
    """Whether the model was built, but needs other inputs than token ids."""


def text_model_types() -> list[str]:
    """The model types that read token ids: LMs, text encoders, and the text parts of multimodal models."""
    return sorted(_text_types())


@functools.cache
def _text_types() -> frozenset[str]:
    listed = {t for task in _TEXT for t in auto_types(task)}
    named = {t for t in CONFIG_MAPPING if t.endswith(("_text", "_text_model"))}
    parts = {t for t in named if not CONFIG_MAPPING[t].sub_configs}
    other = {t for task in _OTHER_MODALITIES for t in auto_types(task)}
    return frozenset((listed | parts) - other)


def other_model_types() -> list[str]:
    """The model types that are not among `text_model_types`, for which transformers has a class."""
    return sorted(t for t in set(CONFIG_MAPPING) - _text_types() if _has_class(CONFIG_MAPPING[t]))


def _has_class(config_class: type[PreTrainedConfig]) -> bool:
    try:
        return config_class in auto_models("BASE") or class_of_config(config_class) is not None
    except TinyError:
        return False


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class a checkpoint of this type would have: its LM where there is one, else the base model.

    A type with both a causal and a masked LM (bert) gets the one its config describes (`is_decoder`).
    """
    tasks = ["CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TEXT_ENCODING"]
    if config.is_encoder_decoder:
        tasks = [tasks.pop(2), "SPEECH_SEQ_2_SEQ", *tasks]
    elif getattr(config, "is_decoder", None) is False:
        tasks.insert(0, tasks.pop(1))
    for table in map(auto_models, [*tasks, "BASE"]):
        if type(config) in table:
            try:
                found = table[type(config)]
            except ValueError:  # the table names a class that its package does not export
                continue
            cls = found[0] if isinstance(found, tuple) else found
            parts = {part for name, part in type(config).sub_configs.items() if name != "text_config"}
            if cls.config_class not in parts:
                return cls
    return class_of_config(type(config))


def class_of_config(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """The model class made for exactly this config; needed because text parts have no auto class."""
    package, modules = modeling_files(config_class)
    members = [c for m in modules for c in vars(m).values() if getattr(c, "__module__", "") == m.__name__]
    found = [c for c in members if isinstance(c, type) and getattr(c, "config_class", None) is config_class]
    models = [c for c in found if issubclass(c, PreTrainedModel) and "PreTrained" not in c.__name__]
    if not models:
        raise TinyError(f"{package} has no model class for {config_class.__name__}")
    return min(models, key=lambda c: (not c.__name__.endswith("ForCausalLM"), len(c.__name__)))


def tiny_config(model_type: str, how: How = "small") -> PreTrainedConfig:
    """The shrunk default config of the type."""
    config_class = CONFIG_MAPPING[model_type]
    if how == "default":
        return _plain(config_class)
    return _shrink(config_class, {}, how, _widths(_plain(config_class)) if how == "tied" else frozenset())


def _widths(config: PreTrainedConfig) -> frozenset[int]:
    """The default widths in a config and in the configs inside it, for which the rule has one small value."""
    values = _stored(config, _declared(type(config)))
    inner = [_widths(value) for value in values.values() if isinstance(value, PreTrainedConfig)]
    small = rule().fields["hidden_size"]
    own = {v for n, v in values.items() if rule().fields.get(n) == small and isinstance(v, int) and v > small}
    return frozenset(own).union(*inner)


def _plain(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    exception = rule().types.get(config_class.model_type)
    return _default(config_class, {}, {} if exception is None else exception.set)


def _shrink(
    config_class: type[PreTrainedConfig], given: dict[str, Any], how: How, widths: frozenset[int]
) -> PreTrainedConfig:
    """The shrunk config of a class. given: what a parent config changes from the class's defaults; widths: the tied
    ones."""
    exception = rule().types.get(config_class.model_type)
    own, undeclared = (exception.set, exception.undeclared) if exception else ({}, {})
    declared = _declared(config_class) | {"per_layer_config"}
    if unknown := set(own) - declared:
        raise TinyError(f"configs/tiny.json sets {sorted(unknown)}, which {config_class.__name__} lacks")
    if known := set(undeclared) & declared:
        raise TinyError(f"configs/tiny.json calls {sorted(known)} undeclared, which {config_class.__name__} declares")
    default = _default(config_class, given, given | own)
    depth = own.get("num_hidden_layers", rule().fields["num_hidden_layers"])
    found = _small_values(default, declared, depth, how, widths, whole=own)
    small = {k: v for k, v in found.items() if k not in own}
    return config_class(**{**given, **small, **own, **undeclared})


def _declared(config_class: type[PreTrainedConfig]) -> set[str]:
    return {f.name for f in dataclasses.fields(config_class)}


def _default(config_class: type[PreTrainedConfig], *attempts: dict[str, Any]) -> PreTrainedConfig:
    """The config from the first of the attempts that the class accepts; a few classes have defaults that fail their own
    checks."""
    errors = []
    for values in attempts:
        try:
            return config_class(**values)
        except Exception as error:
            errors.append(error)
    raise TinyError(f"{config_class.__name__}() fails: {one_line(errors[0])}")


def _small_values(
    default: PreTrainedConfig, declared: set[str], depth: int, how: How, widths: frozenset[int], whole: Collection[str]
) -> dict[str, Any]:
    """Small values for the fields of a config. whole: fields with configs of parts that are not shrunk here."""
    values = _stored(default, declared)
    ids = _special_ids(values)
    small: dict[str, Any] = {}
    for name, value in sorted(values.items()):
        if isinstance(value, PreTrainedConfig):
            if name not in whole:
                small[name] = _shrink(type(value), _changes(value), how, widths)
        elif how == "shallow" and "layers" not in name and not isinstance(value, list):
            continue
        elif name in ids:
            small[name] = ids[name]
        elif isinstance(value, list | tuple) and name in rule().lists:
            small[name] = rule().lists[name]
        elif isinstance(value, list) and len(value) == values.get("num_hidden_layers"):
            small[name] = _pattern(name, value, depth)
        elif (number := _number(name, value)) is not None:
            small[name] = number
        elif how == "tied" and (tied := _tied(name, value, widths)) is not None:
            small[name] = tied
    return small if how == "shallow" else small | _latent_attention(small)


def _tied(name: str, value: Any, widths: Collection[int]) -> Any:
    """The value, where widths are tied, of a field that the rule does not name; None if it stays."""
    if name in rule().tied and isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(rule().tied[name])
    if not _WIDTH.search(name):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return int(rule().fields["hidden_size"]) if value in widths else None
    if isinstance(value, list | tuple) and value and all(type(v) is int and v >= LEAST_WIDTH for v in value):
        shares = 1 << (min(value) // LEAST_WIDTH).bit_length() - 1  # a power of two, so that heads stay whole
        return [v // shares for v in value]
    return None


def _number(name: str, value: object) -> int | float | None:
    if name == "head_dim" and value is None:  # None means hidden / heads; checkpoints set it
        value = 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    table = rule().fields
    key = name if name in table else next((k for k in table if "*" in k and fnmatch.fnmatch(name, k)), None)
    return None if key is None else type(value)(table[key])


def _latent_attention(small: dict[str, Any]) -> dict[str, Any]:
    """Fields that MLA needs to be equal: it shares one latent, so KV heads are not grouped, and head_dim is the rotary
    width."""
    if "kv_lora_rank" not in small:
        return {}
    same = {"num_key_value_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim"}
    return {name: small[source] for name, source in same.items() if name in small}


def _pattern(name: str, per_layer: list[Any], depth: int) -> list[Any]:
    """One entry per layer, with every kind of the default: layer types alternate, other lists repeat their last
    kind."""
    kinds = [k for i, k in enumerate(per_layer) if k not in per_layer[:i]]
    kinds = [k if (number := _number(name, k)) is None else number for k in kinds]
    if name == "mlp_layer_types" and kinds == ["sparse"]:
        kinds = ["dense", "sparse"]
    if name == "layer_types":
        return [kinds[i % len(kinds)] for i in range(depth)]
    return [kinds[min(i, len(kinds) - 1)] for i in range(depth)]


def _special_ids(values: dict[str, Any]) -> dict[str, Any]:
    """Distinct small ids for every special token that the config sets."""
    found = {n: v for n, v in sorted(values.items()) if re.search(r"_token_(id|index)$", n) and v is not None}
    free = itertools.count(FIRST_FREE_ID)
    small = {n: rule().ids[n] if n in rule().ids else next(free) for n in found}
    return {n: [i] if isinstance(found[n], list) else i for n, i in small.items()}


def _changes(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields that differ from the defaults of the config's own class."""
    try:
        plain = type(config)()
    except Exception:
        return {}
    declared = _declared(type(config))
    return {n: v for n, v in _stored(config, declared).items() if v != _stored(plain, {n}).get(n)}


def _stored(config: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Field -> stored value, bypassing the attribute map and fields that vary by layer."""
    own = vars(config)
    alias = config.attribute_map
    return {n: own[alias.get(n, n)] for n in names if alias.get(n, n) in own}


def tiny_model(model_type: str, seed: int = 0, how: How = "small") -> PreTrainedModel:
    """A random model of the type: eval mode, float32, eager attention, nothing degenerate."""
    cls, config = _class_and_config(model_type, how)
    count, most = _parameters(model_type, how), MAX_PARAMETERS if model_type in _text_types() else MAX_OTHER
    if count > most:
        raise TinyError(f"{count} parameters, more than {most}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = eager_model(cls, config, torch.float32)
    randomise(model, seed)
    return model.eval()


def _class_and_config(model_type: str, how: How) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    config = tiny_config(model_type, how)
    cls = model_class(config)
    if cls.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModelForCausalLM does (llama4, qwen3_5)
    return cls, config


@functools.cache
def _parameters(model_type: str, how: How) -> int:
    """Number of parameters, counted without memory; 0 for a shrunk class that cannot be built so, because building it
    with memory shows its own error."""
    cls, config = _class_and_config(model_type, how)
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in cls(config).parameters())
    except Exception:
        if how not in ("small", "tied"):
            raise
        return 0


def default_fault(model_type: str) -> str | None:
    """Why transformers itself cannot build a model of the type's default config; None where it can."""
    try:
        _parameters(model_type, "default")
    except Exception as error:
        return f"transformers itself makes no model of its default config: {one_line(error)}"
    return None


def tiny_inputs(
    config_or_model: PreTrainedConfig | PreTrainedModel, tokens: int = 7, seed: int = 0
) -> dict[str, Tensor]:
    """One prompt of ordinary token ids, (1, tokens), its mask, and for an encoder-decoder a shorter decoder prompt."""
    given_model = isinstance(config_or_model, PreTrainedModel)
    config = config_or_model.config if given_model else config_or_model
    name = _input_name(config_or_model) if given_model else "input_ids"
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or rule().fields["*vocab_size*"]
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randint(FIRST_ORDINARY_ID, int(vocabulary), (1, count), generator=generator)

    inputs = {name: draw(tokens), "attention_mask": torch.ones(1, tokens, dtype=torch.long)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = draw(max(tokens - 2, 1))
    return inputs


def _input_name(model: PreTrainedModel) -> str:
    """The name of the model's input: `input_ids`, or its own (perceiver: `inputs`)."""
    takes_ids = "input_ids" in inspect.signature(model.forward).parameters
    return "input_ids" if takes_ids else str(model.main_input_name)


def ways() -> tuple[How, ...]:
    """All ways to shrink a config, the smallest first."""
    return get_args(How)


def build(model_type: str) -> TinyModel | NotBuilt:
    """The tiny model of the type after one forward with finite outputs, or why there is none."""
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return NotBuilt(model_type, one_line(error))
    try:
        inputs = tiny_inputs(model)
        with torch.no_grad():
            output = model(**inputs)
    except Exception as error:
        needs = f"{type(model).__name__} does not run on token ids alone: {one_line(error)}"
        return NotBuilt(model_type, needs, made=True)
    if not all(torch.isfinite(t).all() for t in _floats(output)):
        return NotBuilt(model_type, "outputs are not finite")
    return TinyModel(model_type, model, inputs)


def _floats(output: Any) -> list[Tensor]:
    found = [v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point()]
    if not found:
        raise TinyError("the output holds no tensor")
    return found


def one_line(error: Exception) -> str:
    """The text of an exception on one line, with its class unless it is a TinyError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, TinyError) else f"{type(error).__name__}: {text}"
