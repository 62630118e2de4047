"""The callback in a real Trainer: what it logs, what it costs, and that training goes as without it."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from accelerate import PartialState
from children import PATIENCE, free_port
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

import duat_cli as duat
from duat_cli import callbacks
from duat_cli.callbacks import PREFIX, DuatCallback
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.checkpoint.source import demo_path

TEXTS = ["def main(argv):", "Return the number of items."]
CLOCKED = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
STEPS = 4
LOSS = "behaviour.loss_per_token"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_path())


def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.2, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_lora() -> Any:
    """With dropout, and with a hook that PEFT registers for gradient checkpointing."""
    settings = peft.LoraConfig(r=2, lora_dropout=0.3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny(), settings)


def trainer_of(model: Any, tokenizer: Any, folder: Path, kind: type[Trainer] = Trainer, **given: Any) -> Trainer:
    words = torch.Generator().manual_seed(1)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(5, 2000, (16, 12), generator=words)]
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 2, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-3, "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **(settings | given))
    return kind(model, arguments, default_data_collator, train_dataset=data, processing_class=tokenizer)


def with_callback(trainer: Trainer, **given: Any) -> DuatCallback:
    made = DuatCallback(trainer, **({"prompts": TEXTS, "share": 1e9} | given))
    trainer.add_callback(made)
    return made


def told(trainer: Trainer) -> dict[int, dict[str, float]]:
    """Step -> what the callback logged there."""
    return {
        entry["step"]: {name.removeprefix(PREFIX): value for name, value in entry.items() if name.startswith(PREFIX)}
        for entry in trainer.state.log_history
        if any(name.startswith(PREFIX) for name in entry)
    }


def others(trainer: Trainer) -> list[dict[str, float]]:
    """What the Trainer logs itself, without what the clock says."""
    kept = [e for e in trainer.state.log_history if not any(name.startswith(PREFIX) for name in e)]
    return [{name: value for name, value in entry.items() if name not in CLOCKED} for entry in kept]


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (tiny, {"gradient_accumulation_steps": 2}),
    "peft": (tiny_lora, {"gradient_checkpointing": True}),
    "bf16": (tiny, {"bf16": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_bit_for_bit_as_without_it(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    make, given = KINDS[kind]
    trained = []
    for name in ("without", "with"):
        trainer = trainer_of(make(), tokenizer, tmp_path / name, **given)
        if name == "with":
            with_callback(trainer, every=3, metrics=["**"])
        trainer.train()
        trained.append(trainer)
    first, second = (dict(t.model.named_parameters()) for t in trained)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert others(trained[0]) == others(trained[1])
    assert len(others(trained[1])) == STEPS // 2 + 1
    looks = told(trained[1])
    assert list(looks) == [3]  # between two entries of the Trainer's own
    assert all(look["failed"] == 0 for look in looks.values())
    assert all(look["certificate.relative_error"] < 1e-4 for look in looks.values())  # float32, also under bf16


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_the_loss_of_an_adapter_on_a_tied_weight_is_the_model_s_own(
    target: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
    trainer = trainer_of(tuned, tokenizer, tmp_path, learning_rate=1e-2)
    with_callback(trainer, every=STEPS, prompts=TEXTS[:1], metrics=[LOSS])
    trainer.train()
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = tuned.eval()(input_ids=ids, labels=ids).loss.item()
    assert told(trainer)[STEPS][LOSS] == pytest.approx(own, rel=1e-4)


def test_prompts_may_be_what_a_user_says(tokenizer: Any, tmp_path: Path) -> None:
    model, chatty = tiny(), copy.deepcopy(tokenizer)
    chatty.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    trainer = trainer_of(model, tokenizer, tmp_path, learning_rate=0.0)
    with_callback(trainer, every=STEPS, prompts=TEXTS[:1], chat=True, tokenizer=chatty, metrics=[LOSS])
    trainer.train()
    ids = tokenizer(f"<s>{TEXTS[0]}</s>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = model.eval()(input_ids=ids, labels=ids).loss.item()
    assert told(trainer)[STEPS][LOSS] == pytest.approx(own, rel=1e-4)


def test_the_model_is_left_as_it_is(tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_lora(), tokenizer, tmp_path)
    callback = with_callback(trainer, every=1)
    model = trainer.model
    model.train()
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    hooked = model.base_model.model.model.layers[0].register_forward_hook(lambda *call: None)
    random.seed(5)

    def state() -> Any:
        return {
            "modes": [module.training for module in model.modules()],
            "hooks": [list(module._forward_hooks) for module in model.modules()],
            "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
            "asked": {n: (p.requires_grad, p.data_ptr(), str(p.device)) for n, p in model.named_parameters()},
            "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),  # type: ignore[call-overload]
            "attention": model.config._attn_implementation,
            "grad mode": torch.is_grad_enabled(),
        }  # fmt: skip

    before = copy.deepcopy(state())
    callback.on_step_end(trainer.args, TrainerState(global_step=1), TrainerControl())
    after = state()
    grads, found = before.pop("grads"), after.pop("grads")
    assert after == before
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads.values())
    for name, grad in grads.items():
        assert (grad is None and found[name] is None) or torch.equal(grad, found[name])
    assert callback.report is not None
    hooked.remove()


def test_the_numbers_are_those_of_the_saved_checkpoint(tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny(), tokenizer, tmp_path, save_strategy="steps", save_steps=2, save_total_limit=5)
    with_callback(trainer, metrics=["summary.*", "behaviour.loss_per_token", "blocks.1.operator.stable_rank"])
    trainer.train()
    looks = told(trainer)
    assert sorted(looks) == [2, 4]
    for step, look in looks.items():
        folder = tmp_path / f"checkpoint-{step}"
        check = duat.check(folder, prompts=TEXTS)
        report = duat.inspect(folder, prompts=TEXTS, spectrum=True, null="uniform")
        assert check.behaviour is not None
        assert look["behaviour.loss_per_token"] == pytest.approx(check.behaviour.loss_per_token, rel=1e-6)
        assert look["summary.linear_share"] == pytest.approx(report.summary.linear_share, rel=1e-5)
        assert look["blocks.1.operator.stable_rank"] == pytest.approx(report.blocks[1].operator.stable_rank, rel=1e-4)
        assert look["failed"] == check.counts.failed
    assert looks[2]["behaviour.loss_per_token"] != looks[4]["behaviour.loss_per_token"]


def test_others_get_the_numbers_through_the_trainer(tokenizer: Any, tmp_path: Path) -> None:
    """As TensorBoard and W&B do: callbacks that the Trainer made before."""
    seen: list[dict[str, float]] = []

    class Reporting(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            seen.append(dict(logs))

    trainer = trainer_of(tiny(), tokenizer, tmp_path)
    trainer.add_callback(Reporting())
    with_callback(trainer, every=2)
    trainer.train()
    mine = [entry for entry in seen if f"{PREFIX}failed" in entry]
    assert len(mine) == 2
    assert all(isinstance(value, float | int) for entry in mine for value in entry.values())
    assert {f"{PREFIX}certificate.relative_error", f"{PREFIX}behaviour.loss_per_token"} <= mine[0].keys()


class Averaging(Trainer):
    """As TRL's trainers: the means of its own metrics go into an entry, after which they are cleared."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.norms: list[float] = []

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*given, **named)
        self.norms.append(loss.item())
        return loss

    def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        own = {"mean": sum(self.norms) / len(self.norms), "count": len(self.norms)} if self.norms else {}
        super().log({**logs, **own}, *given, **named)
        self.norms.clear()


def test_a_trainer_that_logs_means_of_its_own_has_the_same_ones(tokenizer: Any, tmp_path: Path) -> None:
    trained = []
    for name in ("without", "with"):
        trainer = trainer_of(tiny(), tokenizer, tmp_path / name, Averaging)
        if name == "with":
            with_callback(trainer, every=1)
        trainer.train()
        trained.append(trainer)
    assert [entry["count"] for entry in others(trained[1]) if "count" in entry] == [2, 2]
    assert others(trained[0]) == others(trained[1])
    assert not any("count" in look for look in told(trained[1]).values())


@pytest.mark.parametrize("stop", [True, False])
def test_a_failed_policy_ends_the_training_where_that_is_asked_for(
    stop: bool, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('extends = "default"\n[rules]\n"behaviour.loss" = { level = "error", max = 0.5 }\n')
    trainer = trainer_of(tiny(), tokenizer, tmp_path / "run")
    callback = with_callback(trainer, every=2, policy=policy, stop=stop)
    with caplog.at_level(logging.WARNING, "duat_cli.callbacks"):
        trainer.train()
    assert trainer.state.global_step == (2 if stop else STEPS)
    assert callback.report is not None
    assert callback.report.verdict == "failed"
    assert told(trainer)[2]["failed"] == 1
    assert "step 2: 1 check failed, first behaviour.loss: loss" in caplog.text
    assert ("training stops" in caplog.text) == stop


def test_a_weight_that_is_no_number_is_found(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny()
    trainer = trainer_of(model, tokenizer, tmp_path)
    callback = with_callback(trainer, every=1)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    callback.on_step_end(trainer.args, TrainerState(global_step=1), TrainerControl())
    assert callback.report is not None
    assert [o.rule for o in callback.report.outcomes if o.status == "failed"] == ["integrity.nonfinite"]


class Hours:
    """A clock that the test moves on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_the_cost_keeps_to_its_share(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step takes 10 s and a look 2 s, of which a tenth is allowed."""
    clock = Hours()
    monkeypatch.setattr(callbacks, "time", clock)
    trainer = trainer_of(tiny(), tokenizer, tmp_path)
    callback = with_callback(trainer, every=1, share=0.1)

    def numbers(step: int) -> tuple[dict[str, float], bool]:
        clock.now += 2.0
        return {}, False

    monkeypatch.setattr(callback, "_numbers", numbers)
    callback.on_train_begin(trainer.args, TrainerState(), TrainerControl())
    looks = []
    with caplog.at_level(logging.INFO, "duat_cli.callbacks"):
        for step in range(1, 21):
            clock.now += 10.0
            before = callback.spent
            callback.on_step_end(trainer.args, TrainerState(global_step=step), TrainerControl())
            looks += [step] if callback.spent > before else []
            assert callback.spent <= 0.1 * clock.now or step == 1
    # look n + 1 fits from step k on where 2 (n + 1) <= 0.1 (10 k + 2 n)
    assert looks == [1, 4, 6, 8, 10, 11, 13, 15, 17, 19, 20]
    assert callback.skipped == 20 - len(looks)
    assert "step 2: no look: 2.0 s are spent and one takes 2.0 s, more than share=0.1 of 22.0 s" in caplog.text
    assert trainer.state.log_history[-1].keys() <= {f"{PREFIX}skipped", f"{PREFIX}seconds", "epoch", "step"}


@pytest.mark.parametrize("fault", [UnsupportedModelError("no proven form"), RuntimeError("boom\nand more")])
def test_what_cannot_be_told_does_not_end_a_training(
    fault: Exception, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any) -> Any:
        raise fault

    monkeypatch.setattr(callbacks, "check_given", fail)
    trainer = trainer_of(tiny(), tokenizer, tmp_path)
    with_callback(trainer, every=2, stop=True)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert [look["undecided"] for look in told(trainer).values()] == [1.0, 1.0]
    assert str(fault).splitlines()[0] in caplog.text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "every": ({"every": 0}, "every 0: expected a whole number of at least 1"),
    "half a step": ({"every": 1.5}, "every 1.5: expected a whole number"),
    "every, a text": ({"every": "2"}, "every '2': expected a whole number"),
    "no metrics": ({"metrics": None}, "metrics None: expected a list of texts"),
    "a number": ({"metrics": [3]}, r"metrics \[3\]: expected a list of texts"),
    "rules": ({"select": 3}, "select 3: expected a list of texts"),
    "share, a text": ({"share": "a"}, "share 'a': expected a number of at least 0"),
    "half a token": ({"prompts": TEXTS, "max_tokens": 2.5}, "max_tokens 2.5: expected a whole number of at least 1"),
    "no template": ({"prompts": TEXTS, "chat": True}, "the checkpoint has no chat template"),
    "no template for the bundled ones": ({"chat": True}, "the checkpoint has no chat template"),
    "a foreign id": ({"prompts": [[5, 6, 5000]]}, r"prompts\[0\]: token id 5000 is out of the vocabulary"),
    "too long": ({"prompts": [[5] * 65]}, r"prompts\[0\]: too long, 65 tokens"),
    "never": ({"at_save": False}, "there is no step to look at"),
    "a metric": ({"metrics": ["summary.linear_shar"]}, "linear_share"),
    "a group": ({"metrics": ["sumary.*"]}, r"the nearest known is 'summary\.\*'"),
    "a behaviour": ({"metrics": ["behaviour.los"]}, "no report has such a number"),
    "a text": ({"metrics": "summary.*"}, "expected a list"),
    "a policy": ({"policy": "./nope.toml"}, "no such file"),
    "a share": ({"share": -1}, "at least 0"),
    "prompts": ({"prompts": []}, "empty list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_training(name: str, tokenizer: Any, tmp_path: Path) -> None:
    given, words = WRONG[name]
    with pytest.raises(InputError, match=words):
        DuatCallback(trainer_of(tiny(), tokenizer, tmp_path), **given)


@pytest.mark.parametrize("trainer", [None, "model"])
def test_what_is_no_trainer(trainer: Any) -> None:
    with pytest.raises(InputError, match=f"trainer: expected a transformers Trainer, got {type(trainer).__name__}"):
        DuatCallback(trainer)


def test_a_trainer_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tokenizer missing"):
        DuatCallback(trainer_of(tiny(), None, tmp_path), every=1)


# -- several processes -------------------------------------------------------------------------------------------


def rank(number: int, port: int, tokenizer: Any, policy: Path) -> None:
    """One of two, as torchrun starts them."""
    PartialState._reset_state()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(number)}
    os.environ["LOCAL_RANK"] = str(number)
    for stop in (True, False):
        folder = policy.parent / ("stops" if stop else "goes on")
        trainer = trainer_of(tiny(), tokenizer, folder / "run", ddp_backend="gloo")
        callback = with_callback(trainer, every=2, policy=policy, stop=stop)
        trainer.train()
        assert (trainer.args.process_index, trainer.args.world_size) == (number, 2)
        looked = callback.report is not None
        (folder / f"rank{number}").write_text(f"{trainer.state.global_step} {looked} {sorted(told(trainer))}")


@pytest.mark.slow
def test_two_processes_end_together(tokenizer: Any, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('extends = "default"\n[rules]\n"behaviour.loss" = { level = "error", max = 0.5 }\n')
    fork, port = multiprocessing.get_context("fork"), free_port()
    ranks = [fork.Process(target=rank, args=(number, port, tokenizer, policy)) for number in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(PATIENCE)
    assert [one.exitcode for one in ranks] == [0, 0]
    for folder, steps, looks in ((tmp_path / "stops", 2, "[2]"), (tmp_path / "goes on", 4, "[2, 4]")):
        assert (folder / "rank0").read_text() == f"{steps} True {looks}"
        assert (folder / "rank1").read_text() == f"{steps} False []"
