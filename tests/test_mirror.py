"""Every module of the package has a test of its own name, or a reason here why it has none."""

from __future__ import annotations

import re
from pathlib import Path

import duat_cli

ROOT = Path(duat_cli.__file__).parent
TESTS = Path(__file__).parent
FREE = {"__init__.py", "__main__.py"}

LISTED = {  # reason -> modules; the files named in a reason run them
    "types or constants alone": "analysis/inspect/options analysis/progress kinds",
    "types, and bounds that checks/verdict/test_judge.py judges by": "checks/rule",
    "fields alone; results/test_meaning.py and report/test_json.py read every one": """
        results/attribute results/behaviour results/check results/compare/patching
        results/compare/report
        results/explained/report results/heads results/inspect results/lora results/matrix results/operator results/plan
        results/prune/chosen results/prune/eq16 results/prune/repair results/prune/report results/prune/rivals
        results/prune/sets results/prune/terms results/prune/written results/support results/weight_change""",
    "options alone; cli/test_main.py runs every exit code, cli/terminal/test_help.py every help page": """
        cli/commands/inspect cli/commands/schema cli/commands/support cli/commands/verify
        cli/shared/options cli/shared/pruning""",
    "what every command says and writes: cli/test_main.py, cli/terminal/test_streams.py": """
        cli/terminal/faults cli/terminal/signals cli/terminal/talk errors""",
    "the command with nothing faked: checks/test_command.py, checks/test_cases.py": """
        cli/commands/check cli/shared/outlets checks/verdict/conclude checks/verdict/locate checks/rules/files""",
    "fine-tunes held against their base: checks/test_drift.py": "analysis/check/against",
    "golden text at every width: report/test_table.py": """
        report/check/table report/tables/attribute/columns report/tables/attribute/report
        report/tables/columns report/tables/compare report/tables/facts report/tables/inspect report/tables/lora
        report/tables/nulls report/tables/page report/tables/patching report/tables/plan
        report/tables/prune/eq16 report/tables/prune/repair
        report/tables/prune/rivals report/tables/prune/sets report/tables/support
        report/tables/verify""",
    "golden text: report/forms/test_check.py": """
        report/check/github report/check/junit report/check/markdown report/check/sarif report/check/words""",
    "every explanation and every page: explain/test_find.py": """
        cli/commands/explain explain/fields report/explain
        report/headers report/markdown""",
    "every schema against a report: report/test_json.py": "report/schema",
    "all numbers of a report: analysis/inspect/test_run.py": """
        analysis/clock analysis/inspect/assemble analysis/inspect/sweep""",
    "against the dense W': analysis/inspect/test_operator.py": """
        analysis/inspect/measured/entries analysis/inspect/measured/numbers""",
    "against dense W_QK: analysis/inspect/test_routing.py": "models/instrument/functions/scores operators/bilinear",
    "files read back: analysis/inspect/save/test_states.py": "analysis/dynamic analysis/inspect/save/asked",
    "against loops: analysis/inspect/test_uniform.py": "operators/uniform",
    "the re-initialised model: analysis/inspect/test_untrained.py": "models/edits/reinitialised",
    "against the dense W' of two prompts: analysis/compare/test_run.py": """
        analysis/compare/blocks analysis/compare/parameters analysis/compare/states""",
    "held in passes of the model: analysis/compare/test_fixed.py, analysis/compare/test_patching.py": """
        analysis/compare/captured""",
    "the largest activation: analysis/inspect/test_range.py": "models/instrument/activations",
    "against dense float64: analysis/lora/weights/test_adapter_diff.py": """
        analysis/lora/weights/comparison analysis/lora/weights/weight_change""",
    "kinds and what is said of them: analysis/lora/weights/test_notable.py": "analysis/lora/weights/kinds",
    "blocks removed, repeated, new: analysis/lora/weights/test_checkpoint_diff.py": "loading/adapter/origins",
    "against PEFT's own merge: analysis/lora/weights/test_change.py": """
        loading/adapter/base_weights loading/adapter/folder loading/adapter/keys
        loading/adapter/lora loading/adapter/others loading/adapter/parameter loading/adapter/plan""",
    "against PEFT's wrapped model: analysis/lora/test_prompts.py": """
        analysis/lora/applied analysis/lora/ground analysis/lora/places analysis/lora/prediction analysis/lora/report
        models/edits/tuned""",
    "what both models read: analysis/lora/test_pictures.py": "analysis/lora/reading",
    "against the model's attention: analysis/matrix/test_run.py": """
        analysis/matrix/case analysis/matrix/checks analysis/matrix/convolution
        analysis/matrix/forms report/tables/matrix""",
    "against the Jacobians of the model: analysis/network/test_run.py": """
        analysis/network/evaluation analysis/network/file analysis/network/layer""",
    "kinds and samples: analysis/prune/test_run.py": "analysis/prune/wanted",
    "what a prompt gives, kept or not: analysis/shards/test_prune.py": "analysis/prune/responding",
    "orders and their curves: analysis/prune/sets/test_nested.py": """
        analysis/prune/sets/order""",
    "read back by transformers: analysis/prune/sets/test_apply.py": """
        models/edits/cutting models/edits/heads models/edits/neurons""",
    "streamed against resident: analysis/prune/test_work.py": "analysis/prune/terms/ground",
    "bounds against true damage: analysis/prune/terms/test_certified.py": """
        analysis/prune/terms/layers models/terms/inner""",
    "no file that is read is written over: api/test_target.py": "analysis/shards/names",
    "by one process and several: analysis/shards/test_run.py": """
        analysis/shards/inspect cli/commands/merge""",
    "the whole report: analysis/prune/test_run.py": "analysis/prune/report analysis/prune/sets/plan",
    "the file read back: analysis/test_operator_file.py": "analysis/tensor_file",
    "faults planted in the instruments: analysis/test_session.py": "models/arrays",
    "adding up, and each part taken out of the frozen network: analysis/attribute/test_run.py": """
        analysis/attribute/leading analysis/attribute/parts analysis/attribute/report
        analysis/attribute/work""",
    "every tiny model: zoo/test_tiny.py": "zoo/randomise",
    "every type of model: models/discovery/test_structure.py": """
        models/block/mixer models/block/parts models/block/slots models/instrument/records
        models/instrument/tracing models/value_path/operator""",
    "H and W' by other ways: models/discovery/test_mixers.py": """
        models/discovery/kernels models/instrument/mixer models/instrument/tape
        models/value_path/offsets""",
    "models of images and sound: cli/test_other_modalities.py": "loading/inputs/request models/discovery/modality",
    "what moved, and how far: checks/test_drift.py": "checks/rules/drift checks/tolerances",
    "every faulty file: loading/checkpoint/test_preflight.py": "loading/checkpoint/files",
    "weights as their libraries read them: loading/quantised/test_find.py": """
        loading/quantised/formula loading/quantised/grouped""",
    "shards read again: loading/checkpoint/test_seal.py": "loading/checkpoint/stored loading/checkpoint/stream",
    "every case of a load: loading/model/test_load.py": "loading/model/notes",
    "every parameter, to the bit: loading/paged/test_drawn.py": "loading/paged/recorder",
    "every plan is made of them: analysis/plan/test_memory.py": "analysis/plan/terms",
    "every call against its command: api/test_commands.py": """
        api/comparing api/files api/models api/planning api/settings api/words""",
    "the table and nothing else: api/test_results.py": "report/notebook",
    "every page in a browser: report/html/test_document.py": """
        report/html/attribute/heads report/html/attribute/page report/html/attribute/tokens
        report/html/compare/blocks report/html/compare/page report/html/compare/patching
        report/html/drawing/blocks report/html/drawing/figure
        report/html/drawing/marks report/html/drawing/plot report/html/drawing/table
        report/html/glossary report/html/inspect/blocks report/html/inspect/page report/html/lora report/html/matrix
        report/html/plan report/html/prune/damage report/html/prune/page report/html/sheets""",
    "a few probes at a time: analysis/prune/terms/test_responses.py": "models/budgets",
}


def modules() -> set[str]:
    return {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if p.name not in FREE}


def faults(modules: set[str], tests: set[str], listed: dict[str, str]) -> list[str]:
    """What is wrong with the mirror; `tests` are the files below tests/."""
    entries = [f"{name}.py" for names in listed.values() for name in names.split()]
    own = {module for module in modules if re.sub(r"([^/]+)$", r"test_\1", module) in tests}
    found = [f"{module} has no test of its own name and no reason" for module in sorted(modules - own - {*entries})]
    found += [f"{module} is listed and is no module" for module in entries if module not in modules]
    found += [f"{module} is listed and has a test of its own name" for module in entries if module in own]
    found += [f"{module} is listed twice" for module in sorted({m for m in entries if entries.count(m) > 1})]
    named = {file for reason in listed for file in re.findall(r"[\w/]+\.py", reason)}
    return found + [f"{file} is named in a reason and is no test" for file in sorted(named - tests)]


def test_every_module_has_a_test_of_its_name_or_a_reason() -> None:
    tests = {p.relative_to(TESTS).as_posix() for p in TESTS.rglob("test_*.py")}
    assert len(tests) > 80
    assert faults(modules(), tests, LISTED) == []


def test_the_check_can_fail() -> None:
    a_module, its_test = {"a/b.py"}, {"a/test_b.py"}
    assert faults(a_module, its_test, {}) == []
    assert faults(a_module, {"test_b.py"}, {}) == ["a/b.py has no test of its own name and no reason"]
    assert faults(a_module, set(), {"types": "a/b"}) == []
    assert faults(a_module, its_test, {"types": "a/b"}) == ["a/b.py is listed and has a test of its own name"]
    assert faults(set(), set(), {"types": "a/b"}) == ["a/b.py is listed and is no module"]
    assert faults(a_module, set(), {"x": "a/b", "y": "a/b"}) == ["a/b.py is listed twice"]
    assert faults(a_module, set(), {"in a/test_c.py": "a/b"}) == ["a/test_c.py is named in a reason and is no test"]
