"""Models that run several chains of blocks in one pass: one is chosen, and is as dense arithmetic has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import InDouble, Wiring, dense_blocks, double_model, far, first_two, single_model, sweep, token_ids
from image_models import HEARD
from own_code import WIDTH, Attention, FeedForward, OwnStack, own
from torch import Tensor, nn
from transformers import TimesformerConfig, TimesformerModel, Wav2Vec2Config, Wav2Vec2Model, YolosConfig, YolosModel

from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.support import entry_of_type, examine
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.chains import ByNameError, SeveralStacksError, named
from duat_cli.models.discovery.structure import discover
from duat_cli.zoo import tiny
from duat_cli.zoo.randomise import randomise

CHAINS = {  # type -> the chain, and in the model with a head its list and what attention adds to the stream
    "funnel": ("decoder.layers", Wiring("funnel.decoder.layers", "attention.post_proj")),
    "hrm_text": ("L_module.layers", Wiring("model.L_module.layers", "self_attn.o_proj")),
    "blt": ("local_decoder.layers", Wiring("model.local_decoder.layers", "self_attn.o_proj")),
    "dory": ("layers", Wiring("model.layers", "post_attention_layernorm")),
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ANEW = {"hrm_text": (3, 6), "dory": (1, 3)}  # the calls in front of which the model changes the stream


@pytest.mark.parametrize("model_type", CHAINS)
def test_a_chain_is_that_of_dense_arithmetic(model_type: str) -> None:
    chain, wiring = CHAINS[model_type]
    model = double_model(model_type)
    ids, last, errors = token_ids(model), dict[str, tuple[Tensor, Tensor]](), list[float]()

    def listen(run: Any, step: Any, block: Any) -> None:
        errors.append(step.terms.error)
        last[run.parts.name] = step.operator(run, block).matrix().dense(), run.input[0]  # of its last call
        if run.index in ANEW.get(model_type, ()):
            assert Decomposition().advance(run).terms == step.terms

    expected = dense_blocks(model, ids, wiring)
    with InDouble():
        structure = sweep(model, ids, listen, chain=chain)
    assert max(errors) <= 1e-10
    assert len(last) == len(expected) == len(structure.blocks)
    for (W, x), dense, block in zip(last.values(), expected, structure.blocks, strict=True):
        with InDouble(), torch.no_grad():
            behind = _behind_dory(model, ids, block.parts.module) if model_type == "dory" else torch.ones(x.numel())
        assert far(x, dense.x) <= 1e-10
        assert far(W, behind[:, None] * dense.W) <= 1e-10


def _behind_dory(model: Any, ids: Tensor, block: Any) -> Tensor:
    """What multiplies attention's normed output up to the end of the block: shares by channel, a norm between them."""
    caught: list[Tensor] = []
    handle = block.pre_feedforward_layernorm.register_forward_hook(
        lambda module, args, output: caught.append((output / args[0])[0])
    )
    with handle:
        model(input_ids=ids)
    mine, ffn = ((rate * block.lambda_scale).abs() for rate in (block.lambda_1, block.lambda_2))
    return (mine * caught[-1] * (1 - ffn)).flatten()


def test_a_stream_that_is_halved_between_blocks_is_refused_with_the_factor() -> None:
    """As many checkpoints of this type have it: their config says after how many blocks. Weights that are rescaled once
    are those of the model as it runs."""
    model = first_two(tiny.tiny_model("rwkv"))
    model.config.rescale_every = 1
    with torch.no_grad():
        model(torch.tensor([[40, 41, 42]]))
    with pytest.raises(UnsupportedModelError, match=r"the input of block 1 is 0\.5 times the output of block 0"):
        discover(model)


def test_what_a_chain_is_not_exact_in_is_said_by_its_mechanism() -> None:
    models = single_model("funnel"), single_model("hrm_text"), first_two(single_model("blt"))
    told = {one.stack: one for model in models for one in examine(model).stacks}
    status = {name: one.status for name, one in told.items()}
    assert status == {
        "encoder.blocks.0": "exact",
        "encoder.blocks.1": "refused",
        "encoder.blocks.2": "refused",
        "decoder.layers": "exact",
        "L_module.layers": "partly",
        "H_module.layers": "partly",
        "patcher.layers": "exact",
        "local_encoder.layers": "exact",
        "local_encoder.cross_attn_layers": "refused",
        "global_transformer.layers": "exact",
        "local_decoder.cross_attn_layers": "refused",
        "local_decoder.layers": "partly",
    }
    assert "the stream is pooled in front of its queries alone" in str(told["encoder.blocks.1"].reason)
    assert "in front of block 3, the model changes the stream" in str(told["H_module.layers"].reason)
    assert "is attention with no block around it" in str(told["local_decoder.cross_attn_layers"].reason)


def test_a_stack_over_groups_of_tokens_is_refused_by_that() -> None:
    """Frames by themselves, then each place across the frames."""
    entry = entry_of_type("videoprism_vision_model")
    assert entry.status == "refused"
    assert "temporal_layers.0 takes 9 sequences for one input, its tokens in groups" in str(entry.reason)


def test_a_list_of_blocks_over_groups_of_tokens_is_refused_by_that() -> None:
    """Each frame by itself, in the only list that there is."""
    grid = {"image_size": 8, "patch_size": 4, "num_frames": 3, "attention_type": "space_only"}
    model = TimesformerModel(TimesformerConfig(**SIZES, **grid)).eval()
    with pytest.raises(UnsupportedModelError, match=r"encoder\.layer\.0 takes 3 sequences for one input"):
        discover(model, {"pixel_values": torch.zeros(1, 3, 3, 8, 8)})


def test_without_a_choice_the_stacks_are_listed_by_name() -> None:
    with pytest.raises(SeveralStacksError, match=r"several stacks: L_module\.layers, H_module\.layers; .*--stack NAME"):
        discover(single_model("hrm_text"))
    with pytest.raises(UnsupportedModelError, match="pooled"):
        discover(single_model("funnel"), chain="encoder.blocks.1")


def test_blocks_between_which_the_stream_is_changed_are_read_by_the_name_of_their_list() -> None:
    """Dory's loop takes a norm's result and adds what came in front of the loop; YOLOS adds positions anew."""
    grid = {"image_size": [32, 48], "patch_size": 16, "num_detection_tokens": 3}
    picture = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    yolos = YolosModel(YolosConfig(**SIZES, **grid, use_mid_position_embeddings=True)).eval()
    randomise(yolos, 0)
    for chain, entry in (
        ("layers", entry_of_type("dory")),
        ("encoder.layer", examine(yolos, like={"pixel_values": picture})),
    ):
        assert entry.status == "partly"
        assert [(one.stack, one.status) for one in entry.stacks] == [(chain, "partly")]
        assert "the model changes the stream" in str(entry.stacks[0].reason)
    with pytest.raises(ByNameError, match=r"between its blocks; duat inspect and verify read .* by --stack layers$"):
        discover(single_model("dory"))


def test_no_name_is_offered_where_the_blocks_are_not_read_by_it() -> None:
    entry = entry_of_type("eomt")
    assert entry.status == "refused"
    assert "between its blocks" in str(entry.reason)
    assert "--stack" not in str(entry.reason)


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_convolutions_in_front_of_the_blocks_run_with_each_pass_and_not_beside(norm: str) -> None:
    """Were they tried as norms and as affine maps, that would take several times the memory of the model itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Wav2Vec2Model(Wav2Vec2Config(**HEARD, feat_extract_norm=norm)).eval()
    counts, stem = dict[str, int](), model.feature_extractor
    for name, module in (("whole", stem), *stem.named_modules()):
        module.register_forward_hook(lambda *_, name=name: counts.update({name: counts.get(name, 0) + 1}))
    assert len(discover(model, {"input_values": torch.zeros(1, 500)}).calls) == 2
    assert len(counts) > 6
    assert set(counts.values()) == {counts["whole"]}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("decoder", "decoder.layers"), ("blocks.1", "blocks.1"), ("layers", None), ("enc", None), ("1", "blocks.1")],
)
def test_a_list_is_named_by_its_beginning_or_its_end(wanted: str, found: str | None) -> None:
    assert named(["blocks.0", "blocks.1", "decoder.layers", "global.layers"], wanted) == found


@pytest.mark.parametrize(
    ("model_type", "lists", "ffn"),
    [
        ("segformer", "stages.{}.blocks", "SegformerMixMLP"),
        ("pvt_v2", "encoder.layers.{}.blocks", "PvtV2ConvFeedForwardNetwork"),
    ],
)
def test_stages_between_which_tokens_become_a_picture_again_are_read_one_by_one(
    model_type: str, lists: str, ffn: str
) -> None:
    """Those in front pool keys and values, the last does not."""
    entry = entry_of_type(model_type)
    mixes = f"{ffn} mixes tokens without softmax attention; its output counts among the UAT terms"
    pooled = "operator of block 0, 1: its attention reaches other vectors than the block's own tokens"
    assert entry.parts == [
        *(f"stack {lists.format(stage)}: {mixes}; {pooled}" for stage in range(3)),
        f"stack {lists.format(3)}: {mixes}",
    ]
    assert entry.relative_error is not None
    assert entry.relative_error <= 1e-5


def test_sequences_of_one_token_each_are_no_tokens_of_one_sequence() -> None:
    """MobileViT's blocks take (4, tokens, width), of which a small picture has one token."""
    entry = entry_of_type("mobilevit")
    assert [stack.status for stack in entry.stacks or []] == ["refused"] * 3
    assert all("takes 4 sequences for one input" in (stack.reason or "") for stack in entry.stacks or [])


class _Listed(nn.Module):
    """A block that holds its parts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.parts = nn.ModuleList([Attention(), FeedForward()])

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class _Stage(nn.Module):
    """Tokens that are made of a picture, and become one again."""

    def __init__(self) -> None:
        super().__init__()
        self.between, self.blocks = nn.Conv2d(WIDTH, WIDTH, 1), nn.ModuleList(_Listed() for _ in range(2))

    def forward(self, picture: Tensor) -> Tensor:
        x = torch.tanh(self.between(picture)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.transpose(1, 2).unsqueeze(-1)


class _Staged(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        return super().through(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)


class _Between(OwnStack):
    def through(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("block", "stack", "names"),
    [(_Listed, _Between, ["layers"]), (_Stage, _Staged, ["layers.0.blocks", "layers.1.blocks"])],
)
def test_a_list_of_the_parts_of_a_block_is_no_stack(
    block: type[nn.Module], stack: type[OwnStack], names: list[str]
) -> None:
    entry = examine(own(block, stack))
    assert [one.stack for one in entry.stacks or []] == names
    assert entry.relative_error is not None
    assert entry.relative_error <= 1e-5
