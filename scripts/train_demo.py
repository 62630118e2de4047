"""Make the bundled demo: a small Llama checkpoint, its tokenizer and a LoRA adapter.

Everything is trained from text that comes with Python itself, so one command remakes it anywhere:

    python scripts/train_demo.py

The base model learns the standard library's sources and docstrings. The adapter learns the prose of
``pydoc_data.topics`` (the language reference as text), which the base model never sees. Files of the
corpus are read in sorted order and every random choice is seeded, so runs with the same Python, the same
package versions and the same processor agree. ``--quick --out FOLDER`` is a dry run of a few seconds.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import peft
import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

BOS, EOS = "<s>", "</s>"
BASE_NAME = "duat-demo"
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "duat_cli" / "demo"
SKIPPED_FOLDERS = frozenset((
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
))  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfig", "sitecustomize", "usercustomize")
HELD_OUT_ONE_IN = 16
TOPICS_HELD_OUT_ONE_IN = 8
SHORTEST_DOCSTRING = 80
LORA_TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
PROMPTS = (
    "import os\nimport ",
    "class Node:\n    def __init__(self, name, value):\n        self.name = name\n        self.",
    "    try:\n        value = int(text)\n    except ",
    "Return a new list containing ",
    "The following exceptions are ",
)


@dataclass(frozen=True)
class Schedule:
    """How long and how fast one training run goes."""

    steps: int
    batch: int
    context: int
    peak_rate: float
    warmup: int
    weight_decay: float = 0.1
    last_fraction: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Settings:
    """The whole recipe: corpus limit, vocabulary and the two schedules."""

    vocabulary: int = 2048
    most_files: int | None = None
    base: Schedule = Schedule(steps=1900, batch=8, context=256, peak_rate=3e-3, warmup=100)
    adapter: Schedule = Schedule(steps=240, batch=8, context=256, peak_rate=4e-3, warmup=20, weight_decay=0.0, seed=1)


@dataclass(frozen=True)
class Split:
    """Documents for training and documents that are only ever evaluated."""

    train: list[str]
    held_out: list[str]
    train_files: int
    held_out_files: int

    @property
    def sha256(self) -> str:
        """A hash of every document in order, with the side it stands on."""
        digest = hashlib.sha256()
        for side, documents in (("train", self.train), ("held_out", self.held_out)):
            for document in documents:
                digest.update(f"{side}\0{document}\0".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Stream:
    """One side of a corpus as a single row of token ids, with the text's length in bytes."""

    ids: Tensor
    text_bytes: int


def one_in(name: str, n: int) -> bool:
    """Whether ``name`` belongs to the one in ``n`` names that are held out."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % n == 0


def is_wanted(relative: Path) -> bool:
    """Whether a standard library file belongs to the corpus (no tests, tables or build records)."""
    folders = relative.parts[:-1]
    built = any(folder.startswith("config-") for folder in folders)
    return not built and not SKIPPED_FOLDERS & set(folders) and not relative.name.startswith(SKIPPED_PREFIXES)


def library_files(limit: int | None) -> Iterator[tuple[str, str]]:
    """Relative name and text of each wanted standard library source, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    relatives = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    wanted = [name for name in relatives if is_wanted(Path(name))]
    for name in wanted[:limit]:
        text = (root / name).read_text(encoding="utf-8", errors="replace").strip()
        if text:
            yield name, text + "\n"


def docstrings(source: str) -> list[str]:
    """The longer docstrings of a source file, dedented, in order of appearance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in found if text and len(text) >= SHORTEST_DOCSTRING]


def library_split(limit: int | None) -> Split:
    """Sources, and their docstrings once more as plain prose; whole files are held out."""
    sides: dict[bool, list[str]] = {True: [], False: []}
    files = {True: 0, False: 0}
    seen: set[str] = set()
    for name, source in library_files(limit):
        held_out = one_in(name, HELD_OUT_ONE_IN)
        files[held_out] += 1
        sides[held_out].append(source)
        fresh = [text for text in dict.fromkeys(docstrings(source)) if text not in seen]
        seen.update(fresh)
        if fresh:
            sides[held_out].append("\n\n".join(fresh) + "\n")
    return Split(sides[False], sides[True], files[False], files[True])


def topics_split() -> Split:
    """The language reference's topics. Topics repeat each other: a held-out paragraph never trains."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_names = [name for name in names if one_in(name, TOPICS_HELD_OUT_ONE_IN)]
    train_names = [name for name in names if name not in held_names]
    seen: set[str] = set()
    held_out = [unseen_paragraphs(topics[name], seen) for name in held_names]
    train = [unseen_paragraphs(topics[name], seen) for name in train_names]
    return Split(list(filter(None, train)), list(filter(None, held_out)), len(train_names), len(held_names))


def unseen_paragraphs(text: str, seen: set[str]) -> str:
    """The paragraphs of ``text`` that are not in ``seen`` yet; adds them to it."""
    paragraphs = [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    fresh = []
    for paragraph in paragraphs:
        key = " ".join(paragraph.split())
        if key not in seen:
            seen.add(key)
            fresh.append(paragraph)
    return "\n\n".join(fresh) + "\n" if fresh else ""


def train_tokenizer(documents: list[str], vocabulary: int) -> FastTokenizer:
    """A byte-level BPE tokenizer that opens every text with the bos token."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(documents, trainer)
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return FastTokenizer(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, model_max_length=512, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: FastTokenizer, documents: list[str]) -> Stream:
    """All documents in one row, each between bos and eos."""
    rows = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [i for row in rows for i in (tokenizer.bos_token_id, *row, tokenizer.eos_token_id)]
    return Stream(torch.tensor(ids), sum(len(document.encode()) for document in documents))


def new_model(tokenizer: FastTokenizer, seed: int) -> LlamaForCausalLM:
    """The small Llama with its seeded first weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def windows(ids: Tensor, context: int, offset: int = 0) -> Tensor:
    """Rows of ``context + 1`` ids; neighbours share one id, so each target is counted once."""
    usable = ids[offset:]
    return usable.unfold(0, context + 1, context)


def batches(ids: Tensor, schedule: Schedule) -> Iterator[Tensor]:
    """Endless seeded batches; every epoch shifts the windows and shuffles them anew."""
    generator = torch.Generator().manual_seed(schedule.seed)
    while True:
        offset = int(torch.randint(schedule.context, (1,), generator=generator))
        rows = windows(ids, schedule.context, offset)
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order.split(schedule.batch):
            yield rows[chosen]


def token_losses(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """The loss in nats of each target of some windows, in one row."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def evaluate(model: torch.nn.Module, ids: Tensor, context: int, batch: int = 16) -> float:
    """Mean loss in nats a token over all windows of a stream."""
    model.eval()
    return torch.cat([token_losses(model, rows) for rows in windows(ids, context).split(batch)]).mean().item()


def rate_factor(step: int, schedule: Schedule) -> float:
    """Linear warmup, then a cosine down to the last fraction of the peak rate."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    progress = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.last_fraction + (1 - schedule.last_fraction) * cosine


def new_optimizer(model: torch.nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves gains alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": schedule.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.peak_rate, betas=(0.9, 0.98))


def train(model: torch.nn.Module, ids: Tensor, schedule: Schedule, title: str) -> dict[str, object]:
    """Train in place; returns the time taken and the training loss along the way."""
    optimizer = new_optimizer(model, schedule)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, schedule))
    source, trace, recent, start = batches(ids, schedule), [], [], time.monotonic()
    every = max(1, schedule.steps // 20)
    model.train()
    for step in range(1, schedule.steps + 1):
        loss = token_losses(model, next(source)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        recent.append(loss.item())
        if step % every == 0 or step == schedule.steps:
            mean, seconds = sum(recent) / len(recent), time.monotonic() - start
            recent.clear()
            trace.append({"step": step, "loss": round(mean, 4)})
            print(f"{title} {step}/{schedule.steps} {mean:.4f} {seconds:.0f} s", flush=True)
    minutes = round((time.monotonic() - start) / 60, 2)
    return {"minutes": minutes, "threads": torch.get_num_threads(), "training_loss": trace}


def unigram_loss(train_ids: Tensor, rows: Tensor, vocabulary: int) -> float:
    """Held-out loss of single-token frequencies with add-one smoothing."""
    counts = torch.bincount(train_ids, minlength=vocabulary).double() + 1
    return -(counts / counts.sum()).log()[rows[:, 1:]].mean().item()


def discount(counts: Tensor) -> float:
    """The usual estimate of the absolute discount from how many counts are one and two."""
    ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
    return ones / (ones + 2 * twos) if ones else 0.5


def bigram_loss(train_ids: Tensor, rows: Tensor, vocabulary: int) -> float:
    """Held-out loss of an interpolated Kneser-Ney bigram."""
    pairs = torch.bincount(train_ids[:-1] * vocabulary + train_ids[1:], minlength=vocabulary**2)
    table = pairs.view(vocabulary, vocabulary).double()
    lower = kneser_ney((table > 0).sum(0, keepdim=True).double(), torch.full((1,), 1 / vocabulary).double())
    chances = kneser_ney(table, lower)
    return -chances[rows[:, :-1], rows[:, 1:]].log().mean().item()


def kneser_ney(counts: Tensor, lower: Tensor) -> Tensor:
    """Rows of discounted counts, the freed mass handed to the lower order distribution."""
    taken = discount(counts)
    totals = counts.sum(1, keepdim=True)
    freed = taken * (counts > 0).sum(1, keepdim=True) / totals.clamp(min=1)
    freed = torch.where(totals > 0, freed, 1.0)
    return (counts - taken).clamp(min=0) / totals.clamp(min=1) + freed * lower


def load_model(folder: Path) -> LlamaForCausalLM:
    """The saved weights (rounded to bfloat16), run in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def save_model(model: LlamaForCausalLM, tokenizer: FastTokenizer, folder: Path) -> None:
    """Weights as bfloat16 safetensors, with the configuration and the tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def samples(folder: Path) -> list[dict[str, str]]:
    """Greedy continuations of a few prompts by the saved checkpoint."""
    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        found.append({"prompt": prompt, "greedy": tokenizer.decode(out[0, ids.shape[1] :])})
    return found


def make_base(folder: Path, settings: Settings) -> dict[str, object]:
    """Train, save and evaluate the base checkpoint; returns its record."""
    corpus, schedule = library_split(settings.most_files), settings.base
    tokenizer = train_tokenizer(corpus.train, settings.vocabulary)
    streams = encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out)
    model = new_model(tokenizer, schedule.seed)
    progress = train(model, streams[0].ids, schedule, "base")
    save_model(model, tokenizer, folder)
    return {
        "corpus": corpus_record("Python standard library sources and docstrings", corpus, streams),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "schedule": asdict(schedule),
        **progress,
        "held_out": base_losses(folder, streams, schedule.context, len(tokenizer)),
        "samples": samples(folder),
    }


def corpus_record(text: str, corpus: Split, streams: tuple[Stream, Stream]) -> dict[str, object]:
    """Name, hash and size of a corpus."""
    return {
        "text": text,
        "sha256": corpus.sha256,
        "train": side_record(corpus.train_files, streams[0]),
        "held_out": side_record(corpus.held_out_files, streams[1]),
    }


def side_record(files: int, stream: Stream) -> dict[str, int]:
    """Size of one side of a corpus."""
    return {"files": files, "bytes": stream.text_bytes, "tokens": len(stream.ids)}


def base_losses(folder: Path, streams: tuple[Stream, Stream], context: int, vocabulary: int) -> dict[str, float]:
    """Held-out losses of the saved checkpoint, a bigram and a unigram on the very same targets."""
    train_ids, held_out = streams[0].ids, streams[1]
    rows = windows(held_out.ids, context)
    loss = evaluate(load_model(folder), held_out.ids, context)
    return {
        "targets": rows[:, 1:].numel(),
        "model": round(loss, 4),
        "bigram": round(bigram_loss(train_ids, rows, vocabulary), 4),
        "unigram": round(unigram_loss(train_ids, rows, vocabulary), 4),
        "uniform": round(math.log(vocabulary), 4),
        "model_bits_a_byte": round(loss / math.log(2) * len(held_out.ids) / held_out.text_bytes, 4),
    }


def make_adapter(base: Path, folder: Path, schedule: Schedule) -> dict[str, object]:
    """Fine-tune, save and evaluate the LoRA adapter on the language reference; returns its record."""
    corpus = topics_split()
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    streams = encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out)
    before = evaluate(load_model(base), streams[1].ids, schedule.context)
    model = new_adapter(load_model(base), schedule.seed)
    progress = train(model, streams[0].ids, schedule, "adapter")
    save_adapter(model, folder)
    tuned = peft.PeftModel.from_pretrained(load_model(base), str(folder))
    after = evaluate(tuned, streams[1].ids, schedule.context)
    return {
        "corpus": corpus_record("pydoc_data.topics", corpus, streams),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rank": model.peft_config["default"].r,
        "targets": LORA_TARGETS,
        "schedule": asdict(schedule),
        **progress,
        "held_out": {
            "targets": windows(streams[1].ids, schedule.context)[:, 1:].numel(),
            "before": round(before, 4),
            "after": round(after, 4),
        },
    }


def new_adapter(model: LlamaForCausalLM, seed: int) -> peft.PeftModel:
    """A seeded rank 4 adapter whose configuration names no folder."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=LORA_TARGETS)
    wrapped = peft.get_peft_model(model, config)
    wrapped.peft_config["default"].base_model_name_or_path = BASE_NAME
    return wrapped


def save_adapter(model: peft.PeftModel, folder: Path) -> None:
    """The adapter's weights and configuration, its target names in a fixed order."""
    model.save_pretrained(folder, save_embedding_layers=False)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """What the numbers depend on besides the seeds."""
    packages = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers, peft)}
    return {"python": platform.python_version(), **packages}


MODEL_CARD = """# duat-demo

A small Llama made by `python scripts/train_demo.py` from text that comes with Python itself: the standard
library's sources and their docstrings (Python {python}). It is made to be analysed, not to be useful.

| | |
|---|---|
| parameters | {parameters:,} (bfloat16) |
| layers, width, heads, key/value heads | 6, 192, 6, 2 |
| vocabulary | {vocabulary} (byte-level BPE) |
| training text | {train[files]} files, {train[bytes]:,} bytes, {train[tokens]:,} tokens |
| held-out text | {held[files]} files, {held[bytes]:,} bytes, {held[tokens]:,} tokens |
| corpus SHA-256 | `{sha256}` |
| steps | {steps} of {batch} x {context} tokens, AdamW, peak rate {rate} |
| training time | {minutes} minutes on {threads} processor thread(s) |
| made with | {versions} |

Held-out loss in nats a token, over the same {targets:,} targets (whole held-out files, windows of {context}):

| | nats a token |
|---|---|
| this checkpoint, run in float32 | **{losses[model]:.4f}** |
| bigram (interpolated Kneser-Ney, counted on the training text) | {losses[bigram]:.4f} |
| unigram (add-one, counted on the training text) | {losses[unigram]:.4f} |
| uniform | {losses[uniform]:.4f} |

The checkpoint's loss is {losses[model_bits_a_byte]:.3f} bits a byte. The training text leaves out the
language reference (`pydoc_data.topics`), encodings, tests and generated files. Remade files agree where
Python, the packages and the processor agree. Python's sources are under the PSF License.
"""

ADAPTER_CARD = """# duat-demo-adapter

A LoRA adapter (rank {rank}, on {targets}) for the checkpoint in
`../model`, made by `python scripts/train_demo.py` from the language reference as text
(`pydoc_data.topics`, Python {python}), which the base model never saw: {train[tokens]:,} tokens,
{steps} steps, corpus SHA-256 `{sha256}`.

Loss on {held[files]} held-out topics (no paragraph of them is in the training text), in nats a token:
{losses[before]:.4f} without the adapter, **{losses[after]:.4f}** with it.
"""


def common_fields(record: dict, made_with: dict[str, str]) -> dict[str, object]:
    """The fields both cards share."""
    corpus, schedule = record["corpus"], record["schedule"]
    return {
        "python": made_with["python"],
        "versions": ", ".join(f"{name} {version}" for name, version in made_with.items()),
        "train": corpus["train"],
        "held": corpus["held_out"],
        "sha256": corpus["sha256"],
        "steps": schedule["steps"],
        "losses": record["held_out"],
    }


def model_card(record: dict, made_with: dict[str, str]) -> str:
    """The base checkpoint's README."""
    schedule = record["schedule"]
    return MODEL_CARD.format(
        **common_fields(record, made_with),
        parameters=record["parameters"],
        vocabulary=record["vocabulary"],
        batch=schedule["batch"],
        context=schedule["context"],
        rate=schedule["peak_rate"],
        minutes=record["minutes"],
        threads=record["threads"],
        targets=record["held_out"]["targets"],
    )


def adapter_card(record: dict, made_with: dict[str, str]) -> str:
    """The adapter's README."""
    targets = ", ".join(f"`{name}`" for name in record["targets"])
    return ADAPTER_CARD.format(**common_fields(record, made_with), rank=record["rank"], targets=targets)


def make_demo(out: Path, settings: Settings) -> dict[str, object]:
    """Make both checkpoints and write what was done next to them."""
    transformers.utils.logging.disable_progress_bar()
    made_with = versions()
    base = make_base(out / "model", settings)
    (out / "model" / "README.md").write_text(model_card(base, made_with), encoding="utf-8")
    adapter = make_adapter(out / "model", out / "adapter", settings.adapter)
    (out / "adapter" / "README.md").write_text(adapter_card(adapter, made_with), encoding="utf-8")
    record: dict[str, object] = {"name": BASE_NAME, "versions": made_with, "base": base, "adapter": adapter}
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for weights in out.glob("*/*.safetensors"):
        weights.chmod(0o644)
    return record


def quick(settings: Settings) -> Settings:
    """The same recipe cut down to seconds."""
    return replace(
        settings,
        most_files=40,
        base=replace(settings.base, steps=8, warmup=2, context=64),
        adapter=replace(settings.adapter, steps=4, warmup=1, context=64),
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the bundled demo checkpoint and adapter.")
    parser.add_argument("--out", type=Path, help="folder to write into (default: the package's demo folder)")
    parser.add_argument("--quick", action="store_true", help="a dry run of a few seconds; needs --out")
    parser.add_argument("--steps", type=int, help="training steps of the base model")
    parser.add_argument("--threads", type=int, default=1, help="processor threads (default: 1)")
    parsed = parser.parse_args()
    if parsed.quick and parsed.out is None:
        parser.error("--quick needs --out, so that it never overwrites the bundled demo")
    return parsed


def main() -> None:
    """Run the recipe and print its losses."""
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    settings = quick(Settings()) if chosen.quick else Settings()
    if chosen.steps:
        settings = replace(settings, base=replace(settings.base, steps=chosen.steps))
    record = make_demo(chosen.out or DEMO_FOLDER, settings)
    for part in ("base", "adapter"):
        print(part, json.dumps(record[part]["held_out"]))  # type: ignore[index]


if __name__ == "__main__":
    main()
