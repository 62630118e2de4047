"""Every command that README.md, CONTRIBUTING.md and the pages of `duat explain` print is run as it is printed.

The folders and files that the pages name are made small and real in a temporary folder, and the bundled prompts, which
a command without prompts takes, are cut to a few words. What installs, tests or trains is only looked for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import adapters
import bad_checkpoints
import peft
import pytest
import torch
import typer
import yaml
from chatting import CHAT_TEMPLATE
from image_models import build
from picture_texts import save_llava
from PIL import Image
from safetensors.torch import load_file, save_file
from short_demo import short_adapter, short_demo
from transformers import T5Config, T5ForConditionalGeneration, ViTImageProcessor, WhisperFeatureExtractor

import duat_cli
from duat_cli.analysis.plan.task import EFFORTS, Spent
from duat_cli.analysis.prune.sets import worth
from duat_cli.checks.rules.adapter import LEVELS
from duat_cli.cli.main import app, run
from duat_cli.cli.terminal import libraries, talk
from duat_cli.errors import InputError
from duat_cli.explain.find import explain
from duat_cli.loading import prompts
from duat_cli.loading.checkpoint.source import demo_path
from duat_cli.loading.texts import PromptText
from duat_cli.zoo.tiny import tiny_config, tiny_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "configs" / "docs").glob("*.md"))]
NOT_RUN = ("bash scripts/", "python scripts/")  # they install, run these very tests, measure or train
BLOCKS = 2  # the demo's first; the pages remove one within a budget
README_BYTES = 12_000
DONE: dict[tuple[str, ...], tuple[int, str]] = {}
CODE_WIDTH = 78  # `duat explain` indents code by two, on pages of 80 columns


@dataclass(frozen=True)
class Command:
    """A command line of a page, and the exit codes that the page allows."""

    words: list[str]
    codes: tuple[int, ...] = (0,)

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def fences(page: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> Iterator[Command]:
    """The commands of all fenced blocks; a comment that speaks of exit 1 allows it."""
    for language, content in fences(page):
        if language == "bash":
            for line in content.replace("\\\n", " ").splitlines():
                yield from _of_line(line)
        elif language == "yaml":
            for step in yaml.safe_load(content):
                yield from _of_line(step.get("run", ""))
        else:
            assert not re.search(r"^\s*(duat|bash|python) ", content, re.MULTILINE), content


def _of_line(line: str) -> Iterator[Command]:
    codes = (0, 1) if "exit 1" in line.partition("#")[2] else (0,)
    for part in re.split(r"\s&&\s", line):
        words = shlex.split(os.path.expandvars(part), comments=True)
        if words:
            yield Command(words, codes)


def mentions(page: str) -> Iterator[str]:
    """Commands in the running text: `duat check --weights-only`."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`(duat [^`]+)`", text.replace("\n", " "))


# -- what is wrong with a page -----------------------------------------------------------------------------------


def faults(page: str, call: Callable[[list[str]], tuple[int, str]]) -> list[str]:
    """What does not work; call: runs duat with these arguments, to its exit code and what it wrote."""
    found = []
    for command in commands(page):
        program, *arguments = command.words
        if program.removeprefix(".venv/bin/") == "duat":
            code, said = call(arguments)
            found += [] if code in command.codes else [f"{command.text}: exit code {code}: {said[-300:]}"]
        elif command.text.startswith(NOT_RUN):
            found += [] if (ROOT / arguments[0]).is_file() else [f"{command.text}: no such script"]
        else:
            found.append(f"{command.text}: neither duat nor a script of this project")
    return [*found, *(fault for text in mentions(page) for fault in _faults_of_mention(text))]


def _faults_of_mention(text: str) -> list[str]:
    """A command that is spoken of has to exist, with its options; what it explains has to have a name."""
    name, *rest = shlex.split(text)[1:]
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if name.startswith("-") or name.isupper():
        return []
    if name not in known:
        return [f"{text}: no such command"]
    with typer.Context(known[name]) as context:
        options = {option for parameter in known[name].get_params(context) for option in parameter.opts}
    found = [f"{text}: no option {word}" for word in rest if word.startswith("-") and word not in options]
    if name == "explain" and rest and not rest[0].isupper():
        try:
            explain(" ".join(rest))
        except InputError as error:
            found.append(str(error))
    return found


# -- a place to run in -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, whose last block does little, tuned, adapter and other-adapter, all of the first blocks of the demo."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("base", "tuned"):
        _scaled(short_demo(folder / name, BLOCKS), ("layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"), 0.1)
    for name in ("adapter", "other-adapter"):
        short_adapter(folder / name, BLOCKS)
    _scaled(folder / "tuned", ("layers.1.mlp.down_proj",), 1.25)
    _models_of_images_and_sound(folder)
    _an_encoder_decoder(folder / "t5")
    shutil.copytree(folder / "base", folder / "instruct")
    (folder / "instruct" / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    small = {"vocab_size": 264, "num_layers_per_stack": 1, "L_cycles": 1}  # each of its blocks runs twice
    levels = type(tiny_model("hrm_text"))
    levels(levels.config_class(**{**tiny_config("hrm_text").to_dict(), **small})).save_pretrained(folder / "hrm")
    bad_checkpoints.tokenizer(folder / "hrm")
    other = load_file(folder / "other-adapter" / "adapter_model.safetensors")
    save_file({n: t * 0.5 for n, t in other.items()}, folder / "other-adapter" / "adapter_model.safetensors")
    return folder


def _scaled(folder: Path, names: tuple[str, ...], factor: float) -> None:
    file = folder / "model.safetensors"
    weights = {n: w * factor if any(part in n for part in names) else w for n, w in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def _an_encoder_decoder(folder: Path) -> None:
    config = T5Config(
        vocab_size=264, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=259, pad_token_id=259, eos_token_id=257,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    bad_checkpoints.tokenizer(folder)
    adapters.make(folder, folder.with_name("t5-adapter"), peft.LoraConfig(r=2, target_modules=["q", "wi"]))


def _models_of_images_and_sound(folder: Path) -> None:
    """vit, whisper and llava, and an input of each kind."""
    save_llava(folder / "llava")
    build("vit").save_pretrained(folder / "vit")
    build("whisper").save_pretrained(folder / "whisper")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "fc2"], modules_to_save=["classifier"])
    adapters.make(folder / "vit", folder / "vit-adapter", config)
    tuned = build("whisper")
    tuned.model.encoder.layers[0].fc2.weight.data.mul_(1.1)
    tuned.save_pretrained(folder / "whisper-tuned")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "vit")
    WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=500).save_pretrained(folder / "whisper")
    Image.new("RGB", (20, 20), (200, 80, 10)).save(folder / "picture.png")
    Image.linear_gradient("L").convert("RGB").save(folder / "other.png")
    for name, samples in (("speech", bytes(range(256)) * 100), ("other", bytes(range(0, 256, 2)) * 200)):
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(samples)
    save_file({"pixel_values": torch.ones(1, 3, 16, 16)}, folder / "prepared.safetensors")


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with everything that the pages name."""
    for name in ("path/to/checkpoint", "model", "models/my-model", "base"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(models / "base")
    media = ("t5", "t5-adapter", "hrm", "llava", "vit", "whisper", "vit-adapter", "whisper-tuned")
    media += ("picture.png", "other.png", "speech.wav", "other.wav", "prepared.safetensors")
    for name in ("tuned", "instruct", "adapter", "other-adapter", *media):
        (tmp_path / name).symlink_to(models / name)
    (tmp_path / "my.txt").write_text("def main(argv):\nReturn the number of items.\n", encoding="utf-8")
    (tmp_path / "talks.jsonl").write_text(
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Paris?"}]}\n',
        encoding="utf-8",
    )
    (tmp_path / "pairs.jsonl").write_text('{"a": "The cat sat.", "b": "A cat sat."}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    return tmp_path


@pytest.fixture
def call(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[int, str]]:
    """Run duat in this process, on short prompts."""
    for name in ("CI", "PRE_COMMIT", "HF_TOKEN", "DUAT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(libraries, "calm", lambda talk: None)  # it would silence the tests that come after
    monkeypatch.setattr(talk, "_given_tokens", set())
    monkeypatch.setattr(worth, "RUNS", 1)  # of a written checkpoint, for its time
    monkeypatch.setitem(EFFORTS, "default", Spent(probes=4, measure=4, points=3, tested=3))
    bundled = prompts._bundled
    kept = {prompts.DEFAULT_SET: 2, prompts.HOLDOUT_SET: 31}  # a guarantee needs 29

    def short(name: str) -> list[PromptText]:
        texts = bundled(name)[: kept[name]]
        return [PromptText(" ".join(t.text.split()[:3]), t.where, t.line) for t in texts]

    monkeypatch.setattr(prompts, "_bundled", short)

    given = set(os.listdir(place))

    def here(arguments: list[str]) -> tuple[int, str]:
        """Once for all pages, where neither the page nor the command has made a file."""
        words = tuple(arguments) if set(os.listdir(place)) == given else ()
        if words in DONE:
            return DONE[words]
        capfd.readouterr()
        code = run(arguments)
        done = code, "".join(capfd.readouterr())
        if words and set(os.listdir(place)) == given:
            DONE[words] = done
        return done

    return here


# -- the pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_works(page: Path, call: Callable[[list[str]], tuple[int, str]]) -> None:
    assert faults(page.read_text(encoding="utf-8"), call) == []


def run_python(page: str) -> dict[str, object]:
    """Every block of Python of a page, one after the other; what they left."""
    names: dict[str, object] = {}
    for language, content in fences(page):
        if language == "python":
            exec(compile(content, "page", "exec"), names)
    return names


def test_the_python_of_the_pages_runs_as_it_is_printed(call: Callable[[list[str]], tuple[int, str]]) -> None:
    pytest.importorskip("pandas")
    blocks = {
        page.name: [c for lang, c in fences(page.read_text(encoding="utf-8")) if lang == "python"] for page in PAGES
    }
    assert [name for name, found in blocks.items() if found] == ["from-python.md"]
    left = run_python((ROOT / "configs" / "docs" / "from-python.md").read_text(encoding="utf-8"))
    assert len(left["frame"]) == BLOCKS  # type: ignore[arg-type]
    assert "nothing: no such folder" in str(left["said"])
    assert left["steps"]
    assert left["looks"][0]["step"] == 2  # type: ignore[index]


def test_python_that_fails_is_found() -> None:
    with pytest.raises(AttributeError):
        run_python("```python\nimport duat_cli\n```\n```python\nduat_cli.inspekt()\n```")


BROKEN = {
    "a command that is not there": "```bash\nduat inspekt\n```",
    "an option that is not there": "```bash\nduat inspect base/ --nope\n```",
    "a folder that nobody made": "```bash\nduat check nowhere/ --weights-only\n```",
    "in the second half of a line": "```bash\nbash scripts/setup.sh && .venv/bin/duat inspekt\n```",
    "on the next line": "```bash\nduat check model/ \\\n    --nope\n```",
    "in a workflow": "```yaml\n- run: >\n    duat check models/my-model\n    --nope\n```",
    "a script that is not there": "```bash\nbash scripts/nope.sh\n```",
    "another program": "```bash\npip install duat\n```",
    "a command in the text": "see `duat inspekt` for",
    "an option in the text": "see `duat inspect --nope` for",
    "a name to explain": "see `duat explain efective_heads` for",
}


@pytest.mark.parametrize("page", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_command_is_found(page: str, call: Callable[[list[str]], tuple[int, str]]) -> None:
    assert len(faults(page, call)) == 1


def test_exit_code_1_is_one_only_where_the_page_says_so() -> None:
    def finds(arguments: list[str]) -> tuple[int, str]:
        return 1, ""

    assert faults("```bash\nduat check model/   # exit 1 where a check fails\n```", finds) == []
    assert len(faults("```bash\nduat check model/\n```", finds)) == 1


def test_the_pages_have_commands() -> None:
    """An extraction that finds nothing would pass."""
    counts = {page.name: len(list(commands(page.read_text(encoding="utf-8")))) for page in PAGES}
    assert counts["README.md"] >= 15
    assert sum(counts.values()) >= 45
    assert [name for name, count in counts.items() if count == 0] == ["from-python.md"]  # its blocks are Python


# -- their form --------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_names_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) < README_BYTES
    assert "bash scripts/test.sh" in text  # .ci/run looks for it
    for page in PAGES[2:]:
        assert f"duat explain {page.stem}`" in text
        assert f"(configs/docs/{page.name})" in text


def test_the_readme_ends_with_a_citation_of_this_version() -> None:
    """As a CITATION.cff of format 1.2.0 has it: its required keys, and the version from its one place."""
    language, content = list(fences((ROOT / "README.md").read_text(encoding="utf-8")))[-1]
    cited = yaml.safe_load(content)
    assert language == "cff"
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["cff-version"], cited["version"], cited["license"]) == ("1.2.0", duat_cli.__version__, "Apache-2.0")
    for entry in cited["references"]:
        assert {"type", "title", "authors"} <= entry.keys()
        assert all({"family-names", "given-names"} == author.keys() for author in entry["authors"])


def test_links_lead_somewhere() -> None:
    for page in PAGES[:2]:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_a_page_of_80_columns(page: Path) -> None:
    for language, content in fences(page.read_text(encoding="utf-8")):
        if language:
            assert all(len(line) <= CODE_WIDTH for line in content.splitlines()), content


def test_the_pages_are_shipped() -> None:
    """They are package data, and `duat explain` reads them from there."""
    for page in PAGES[2:]:
        [topic] = explain(page.stem).entries
        assert topic.page == page.read_text(encoding="utf-8")


def test_the_page_about_fine_tunes_lists_every_lint_rule_under_its_level() -> None:
    page = (ROOT / "configs" / "docs" / "fine-tunes.md").read_text(encoding="utf-8").partition("## Lint rules")[2]
    lists = dict(re.findall(r"^- (Error|Warning|Note)s: (.*?)\.$", page, re.MULTILINE | re.DOTALL))
    for level, text in lists.items():
        assert set(re.findall(r"`([\w-]+)`", text)) == {name for name, of in LEVELS.items() if of == level.lower()}
    assert len(lists) == 3


def test_figures_of_the_demo_are_those_of_its_training() -> None:
    made = json.loads((demo_path().parent / "training.json").read_text(encoding="utf-8"))
    page = (ROOT / "configs" / "docs" / "demo.md").read_text(encoding="utf-8")
    base, adapter = made["base"]["held_out"], made["adapter"]["held_out"]
    figures = [base["model"], base["bigram"], base["unigram"], adapter["before"], adapter["after"]]
    for text in (*(f"{figure:.2f}" for figure in figures), f"{made['base']['parameters'] / 1e6:.1f} million"):
        assert text in page
    assert f"rank {made['adapter']['rank']}" in page
