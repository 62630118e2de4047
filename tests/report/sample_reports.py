"""Hand-made reports that look like real ones."""

from __future__ import annotations

from typing import Any, Literal

from duat_cli.kinds import KINDS, Patched
from duat_cli.results.attribute import (
    Agreement,
    AttributeReport,
    Attribution,
    AttributionCertificate,
    Continuation,
    Direct,
    DirectUnit,
    Flow,
    HeadPart,
    InnerPart,
    MeasuredParts,
    Move,
    RemovedPart,
    RemovedToken,
    Rival,
    Source,
    StaticPart,
    TargetFacts,
    TokenName,
    TokenPart,
    UnitPart,
)
from duat_cli.results.attribute import Parts as AttributedParts
from duat_cli.results.attribute import Spread as PartSpread
from duat_cli.results.attribute import Summary as PartSummary
from duat_cli.results.base import Certificate, Environment, ModelFacts, PromptFacts, Run, Skipped
from duat_cli.results.behaviour import Behaviour, TunedBehaviour
from duat_cli.results.check import (
    BaselineFacts,
    Change,
    CheckedFile,
    CheckedModel,
    CheckReport,
    Counts,
    Outcome,
    Problem,
    RuleFacts,
    UndecidedReport,
)
from duat_cli.results.compare.patching import BlockPatch, HeadPatch, PatchedPair, PatchEffect, Patching, TokenPatch
from duat_cli.results.compare.report import (
    AlignedRun,
    BlockComparison,
    BlockRead,
    ComparedPrompt,
    CompareReport,
    ContextRead,
    ContextRun,
    FixedLoss,
    FixedParameters,
    HeadChange,
    InContext,
    InputChange,
    InputComparison,
    NullChange,
    PairFacts,
    ParameterChange,
)
from duat_cli.results.explained.report import ExplainReport, Explanation
from duat_cli.results.heads import Attended, HeadAttended, Heads
from duat_cli.results.inspect import (
    Block,
    BlockCertificate,
    EndToEnd,
    EndToEndNulls,
    InspectReport,
    PromptBlock,
    Range,
    Spread,
    Summary,
    VerifyReport,
)
from duat_cli.results.lora import (
    AnswerChange,
    AnswersSummary,
    BlockChange,
    Eq18,
    LintFinding,
    LoraReport,
    LoraSummary,
    OperatorChange,
    PromptChange,
    TermsChange,
    TokenChange,
)
from duat_cli.results.matrix import Convolution, MatrixCheck, MatrixForm, MatrixReport, NetworkLayer, NetworkReport
from duat_cli.results.operator import (
    Coupling,
    Density,
    HeadRouting,
    NullDensity,
    NullOperator,
    Nulls,
    NullStats,
    OperatorStats,
    Routing,
    RoutingAtDistance,
)
from duat_cli.results.plan import MemoryTerm, PlannedPart, PlannedWeights, PlanReport, Way
from duat_cli.results.prune.eq16 import Eq16
from duat_cli.results.prune.repair import RepairedSet, SetRepair
from duat_cli.results.prune.report import PruneReport
from duat_cli.results.prune.rivals import Allocation, CriterionSet
from duat_cli.results.prune.sets import (
    CurvePoint,
    Guarantee,
    HeldOut,
    MeanGuarantee,
    Plan,
    PooledCosine,
    SetSize,
    SketchRound,
)
from duat_cli.results.prune.terms import (
    Estimated,
    HeadSummary,
    Kind,
    NeuronSummary,
    Prediction,
    Protocol,
    PruneBlock,
    PruneTerm,
)
from duat_cli.results.prune.written import Written
from duat_cli.results.support import SupportEntry, SupportReport
from duat_cli.results.terms import Part, Parts, Terms, UatTerm
from duat_cli.results.weight_change import (
    Alignment,
    Comparison,
    Intruders,
    KindChange,
    KindComparison,
    ModuleChange,
    ModuleComparison,
    Rounding,
)

NOTHING_FITS = "not even the least damaging one stays within the budget"
NO_SPECTRUM = "not computed without --spectrum"
GATED = "a per-channel output gate: W' is no sum of Kronecker products"


def environment() -> Environment:
    return Environment(
        python="3.11.7",
        torch="2.13.0",
        transformers="5.23.0",
        platform="Linux-x86_64",
        device="cpu",
        dtype="float32",
        attention="eager",
        batch_size=1,
    )


def model(name: str = "HuggingFaceTB/SmolLM2-135M") -> ModelFacts:
    return ModelFacts(
        name=name,
        revision="93efa2f097d58c2a74874c7e644dbc9b0cee75a2",
        model_type="llama",
        architecture="LlamaForCausalLM",
        parameters=134_515_008,
        blocks=30,
        hidden_size=576,
        heads=9,
        kv_heads=3,
        fingerprint="ab" * 32,
    )


def prompts() -> list[PromptFacts]:
    return [PromptFacts(sha256="cd" * 32, tokens=31), PromptFacts(sha256="ef" * 32, tokens=128)]


def certificate(exact: bool = True) -> Certificate:
    return Certificate(
        relative_error=3.14e-07 if exact else 0.0321,
        plain_error=0.0,
        tolerance=1e-4,
        exact=exact,
        capture="attention interface",
    )


def run() -> Run:
    return Run(started="2026-11-21T00:00:00+00:00", seconds=3.25, peak_memory_bytes=1_234_567_890)


def operator(index: int, spectrum: bool = False, gated: bool = False) -> OperatorStats:
    if gated:
        return OperatorStats.absent(GATED, rows=45792.0, columns=45792.0, dense_bytes=8387629056.0)
    return OperatorStats(
        rows=45792.0,
        columns=45792.0,
        dense_bytes=8387629056.0,
        frobenius_norm=183.4 + 20 * index,
        spectral_norm=41.27 + index if spectrum else None,
        stable_rank=19.7 - index if spectrum else None,
        effective_heads=4.117 + 0.31 * index,
        block_correlation=0.4123 + 0.04 * index,
        kronecker_products=9,
        certificate_error=2.1e-07,
        reasons={} if spectrum else {"spectral_norm": NO_SPECTRUM, "stable_rank": NO_SPECTRUM},
    )


def density() -> Density:
    return Density(
        structural=0.506,
        numerical=0.4312,
        numerical_low=0.4298,
        numerical_high=0.4326,
        threshold=0.01,
        linear_reference=1 / 79.5,
        linear_reference_paper=1 / 576,
        conv1d_reference=3 / 79.5,
        conv_width=3,
    )


def coupling(index: int, one_token: bool = False) -> Coupling:
    return Coupling(
        off_diagonal_share=0.618 + 0.05 * index,
        entropy_bits=2.31,
        effective_context=6.42 + index,
        mean_distance=17.3,
        distance_deviation=11.8 + index,
        first_token_share=None if one_token else 0.2204,
        reasons={"first_token_share": "the prompts have one token each"} if one_token else {},
    )


def part(share: float) -> Part:
    return Part(share=share, norm=abs(share) ** 0.5, token_median=0.9 * share)


def parts(index: int) -> tuple[Part, Part, Part]:
    linear = 0.62 - 0.21 * index
    return part(linear), part(0.0002), part(1 - linear - 0.0002)


def terms(index: int) -> Terms:
    linear, static, dynamic = parts(index)
    return Terms(
        linear=linear,
        static=static,
        dynamic=dynamic,
        own=part(0.38 - 0.11 * index),
        largest_token=0.0713,
        pre_activation=None if index == 3 else Parts(linear=linear, static=static, dynamic=dynamic),
        reasons={"pre_activation": "a mixture of experts: no single first layer"} if index == 3 else {},
    )


def null_coupling(index: int) -> Coupling:
    return Coupling(
        off_diagonal_share=0.702,
        entropy_bits=5.1,
        effective_context=36.4 + index,
        mean_distance=26.5,
        distance_deviation=15.3,
        first_token_share=0.0402,
    )


def null_stats(index: int, uniform: bool) -> NullStats:
    return NullStats(
        operator=NullOperator(effective_heads=1.0 if uniform else 1.031, block_correlation=1.0 if uniform else 0.9963),
        density=NullDensity(structural=0.507, numerical=0.5021, numerical_low=0.4876, numerical_high=0.5166),
        coupling=null_coupling(index),
        coupling_weighted=null_coupling(index + 1),
    )


def nulls(index: int, full: bool, gated: bool) -> Nulls:
    if gated:
        return Nulls.absent(GATED)
    if not full:
        return Nulls(
            uniform=null_stats(index, True), reinitialised=None, reasons={"reinitialised": "computed with --null all"}
        )
    return Nulls(uniform=null_stats(index, True), reinitialised=null_stats(index, False))


def routing(index: int) -> Routing:
    """Of block 2 there is none."""
    if index == 2:
        return Routing.absent("its softmax is intercepted, behind the scores: queries and keys are not seen")
    shared = {"stable_rank": 6.1 + index, "symmetric_share": 0.74}
    explained = {"r2_plain": 0.31, "r2_centred": 0.142, "r2_bilinear": 0.87}
    head = HeadRouting(
        index=0, singular_values=[2.5, 1.25], frobenius_norm=3.1, spectral_norm=2.5, **shared, **explained
    )
    return Routing(
        rebuilt_error=1.1e-07,
        **shared,
        **explained,
        heads=[head],
        distances=[RoutingAtDistance(distance=distance, **shared) for distance in (0, 1)],
    )


def heads(index: int) -> Heads:
    """Of block 2 there are none; in block 1 the last head is zero."""
    if index == 2:
        return Heads.absent("it calls attention 2 times; heads are read of one call")
    numbers = {
        "effective_context": 2.41,
        "entropy_bits": 1.13,
        "mean_distance": 3.3,
        "first_token_share": 0.11,
        "current_token_share": 0.09,
        "previous_token_share": 0.12,
        "duplicate_token_share": 0.03,
        "induction_share": 0.04,
    }
    names = list(numbers)[3:]
    each = [
        HeadAttended(
            index=head,
            row_sum=1.0 - index / 64,
            **numbers | {names[(head + index) % 5]: 0.9 - (head + 9 * index) / 100},
        )
        for head in range(8)
    ]
    last = HeadAttended.absent("every row of its H is zero", index=8, row_sum=0.0) if index == 1 else None
    return Heads(
        each=[*each, last or HeadAttended(index=8, row_sum=1.0, **numbers)],
        uniform=Attended(**{name: 0.125 if "share" in name else 6.5 for name in numbers}),
        duplicate_rows=14,
        induction_rows=13,
    )


def block(
    index: int, spectrum: bool = False, gated: bool = False, per_prompt: bool = False, with_routing: bool = False
) -> Block:
    pieces = {
        "operator": operator(index, spectrum, gated),
        "density": density(),
        "coupling": coupling(index, one_token=index == 1),
        "coupling_weighted": coupling(index + 1),
        "null": nulls(index, full=not spectrum, gated=gated),
        "terms": terms(index),
        "certificate_error": 1.2e-07 * (index + 1),
        "routing": routing(index) if with_routing else None,
        "heads": heads(index) if with_routing else None,
    }
    return Block(
        range=Range(largest_activation=37.5, place="block", stored_dtype="BF16", share=None, reasons={"share": "-"}),
        index=index,
        name=f"model.layers.{index}",
        **pieces,
        prompts=[PromptBlock(prompt=number, **pieces) for number in range(2)] if per_prompt else None,
        spreads={"coupling.effective_context": Spread(low=5.0, mean=6.4, high=7.9, standard_deviation=1.4)}
        if per_prompt
        else None,
    )


def inspect_report(
    exact: bool = True,
    spectrum: bool = False,
    with_terms: bool = False,
    per_prompt: bool = False,
    name: str = "HuggingFaceTB/SmolLM2-135M",
    warnings: tuple[str, ...] = ("model.safetensors: 2 tensors that the model does not use",),
) -> InspectReport:
    return InspectReport(
        duat_version="0.1.0",
        environment=environment(),
        model=model(name),
        prompts=prompts(),
        certificate=certificate(exact),
        blocks=[
            block(index, spectrum, gated=index == 2, per_prompt=per_prompt, with_routing=with_terms)
            for index in range(4)
        ],
        terms=uat_terms() if with_terms else None,
        end_to_end=EndToEnd(
            coupling=coupling(1),
            null=EndToEndNulls(uniform=coupling(2), reinitialised=None, reasons={"reinitialised": "one by one"}),
            certificate_error=2.5e-07,
        )
        if with_terms
        else None,
        summary=Summary(
            linear_share=0.0102,
            static_share=0.0002,
            dynamic_share=0.9896,
            effective_context=7.92,
            structural_density=0.507,
            notable=[
                "Block 3 reaches the furthest back: 9.42 tokens of effective context, 1.5 times block 0.",
                "The linear path fades from 62.0 % of the output at block 0 to -1.0 % at block 3.",
            ],
        ),
        skipped=[Skipped(what="spectral norm", why="with --spectrum only: about 40 products a block")],
        warnings=list(warnings),
        run=run(),
    )


def of_one_token(report: InspectReport) -> InspectReport:
    """The report, where one token has most of the squared norm behind block 1."""
    first, one, *others = report.blocks
    one = one.model_copy(update={"terms": one.terms.model_copy(update={"largest_token": 0.9377})})
    return report.model_copy(update={"blocks": [first, one, *others]})


def uat_terms() -> list[UatTerm]:
    return [
        UatTerm(name="x_0", kind="linear", block=None, share=0.0102, norm=0.131, token_median=0.0214),
        UatTerm(name="bias", kind="static", block=None, share=0.0002, norm=0.0021, token_median=0.0001),
        UatTerm(name="model.layers.0.mlp", kind="dynamic", block=0, share=-0.0312, norm=0.244, token_median=0.0127),
        UatTerm(name="model.layers.3.mlp", kind="dynamic", block=3, share=1.0208, norm=1.02, token_median=0.9134),
    ]


def attribute_report() -> AttributeReport:
    """Two tokens, one block with an FFN whose neurons are known, one head; a cap behind the logits."""
    return AttributeReport(
        duat_version="0.1.0",
        environment=environment(),
        model=model(),
        prompts=prompts()[:1],
        certificate=AttributionCertificate(residual=3.1e-7, tolerance=1e-5, exact=True),
        held=["RMSNorm: its scale"],
        attribution=[
            Attribution(
                prompt=0,
                position=1,
                target=TargetFacts(
                    kind="token",
                    token=TokenName(id=17, text=" Paris"),
                    given=True,
                    against=None,
                    against_mean=True,
                    reasons={"against": "no other token or class is subtracted"},
                ),
                logit=4.0,
                capped=3.75,
                rank=2,
                probability=0.125,
                rival=Rival(id=19, text=" Rome\x1b", probability=0.4375),
                parts=AttributedParts(
                    tokens=[
                        TokenPart(position=0, id=5, text="\\x1b[31m", value=-0.5, direct=0.0),
                        TokenPart(position=1, id=7, text=" capital", value=1.25, direct=0.25),
                    ],
                    static=StaticPart(value=0.5, blocks=[0.5]),
                    units=[
                        UnitPart(block=0, unit=0, name="Mlp", mixes=False, value=2.5, tokens=[1.0, 1.5]),
                        UnitPart(
                            block=0,
                            unit=1,
                            name="Mixer",
                            mixes=True,
                            value=0.0,
                            tokens=None,
                            reasons={"tokens": "none"},
                        ),
                    ],
                    head_bias=0.25,
                    neurons=[InnerPart(block=0, unit=0, expert=1, index=3, value=2.0, direct=1.5)],
                    experts=[InnerPart(block=0, unit=0, expert=None, index=1, value=-0.75, direct=-0.5)],
                ),
                direct=Direct(
                    tokens=0.25,
                    static=0.5,
                    heads=[HeadPart(block=0, head=0, value=1.0, moved=-0.5)],
                    units=[DirectUnit(block=0, unit=0, value=2.0), DirectUnit(block=0, unit=1, value=0.0)],
                    head_bias=0.25,
                    neurons=[InnerPart(block=0, unit=0, expert=1, index=2, value=0.5, direct=1.75)],
                    experts=[InnerPart(block=0, unit=0, expert=None, index=1, value=-0.75, direct=-0.5)],
                    residual=1e-7,
                ),
                flows=[
                    Flow(
                        block=0,
                        head=0,
                        moved=-0.5,
                        moves=[Move(source=0, target=1, value=-0.5, attention=0.25, carried=-2.0)],
                    )
                ],
                measured=MeasuredParts(
                    heads=[
                        RemovedPart(
                            block=0,
                            unit=None,
                            expert=None,
                            index=0,
                            part=-0.5,
                            direct=1.0,
                            change=0.25,
                            kl=0.125,
                            reasons={"unit": "none", "expert": "none"},
                        )
                    ],
                    neurons=[
                        RemovedPart(
                            block=0,
                            unit=0,
                            expert=2,
                            index=5,
                            part=0.75,
                            direct=None,
                            change=0.5,
                            kl=0.25,
                            reasons={"direct": "of heads alone"},
                        )
                    ],
                    tokens=[
                        RemovedToken(
                            position=1, text=" capital", part=1.25, cut=0.5, cut_kl=0.25, replaced=1.5, replaced_kl=0.75
                        )
                    ],
                    agreement=[
                        Agreement(what="heads", count=1, rank_correlation=None, reasons={"rank_correlation": "few"})
                    ],
                    skipped=[Skipped(what="heads of block 1", why="it has no heads")],
                ),
                residual=3.1e-7,
            )
        ],
        continuations=[
            Continuation(
                prompt=0,
                tokens=[TokenName(id=17, text=" Paris")],
                logits=2.5,
                log_probability=-1.25,
                first_order_error=0.5,
                sources=[Source(position=0, text="The", value=-0.25), Source(position=1, text=" capital", value=1.5)],
            )
        ],
        summary=PartSummary(
            predictions=2,
            logit=4.0,
            tokens=0.75,
            static=0.5,
            units=[2.5],
            head_bias=0.25,
            heads=[
                PartSpread(block=0, unit=None, expert=None, index=0, mean=-0.25, mean_absolute=0.25, deviation=0.125)
            ],
            neurons=[PartSpread(block=0, unit=0, expert=1, index=3, mean=1.0, mean_absolute=1.5, deviation=0.5)],
        ),
        skipped=[Skipped(what="model", why="Mixer mixes tokens without softmax attention")],
        warnings=[],
        run=run(),
    )


def matrix_report() -> MatrixReport:
    """Two tokens, of which the report shows all; one check that could not be made."""
    unbuilt = "too large to build"
    return MatrixReport(
        duat_version="0.1.0",
        environment=environment(),
        model=model(),
        prompt=prompts()[0],
        certificate=certificate(),
        layer=3,
        name="model.layers.3",
        tokens=2,
        hidden_size=576,
        heads=9,
        kv_heads=3,
        head_width=64,
        factors="read",
        dense=False,
        matrices=[
            MatrixForm(
                name="W'_HVO",
                formula="sum_h (H_h S) (x) (V_h O_h)^T",
                shape=[1152, 1152],
                built=False,
                density=None,
                expected_density=0.75,
                expected_formula="(N + 1) / 2N",
                papers=None,
                reasons={"density": unbuilt, "papers": "none states it"},
            )
        ],
        corner=[[0.25, -0.5], [0.125, 1.0]],
        token_texts=["Nui", "\\x1b[31m"],
        coupling=[[1.5, 0.0], [0.75, 2.0]],
        convolution=Convolution(
            width=3, coupling=[[13.9, 13.8], [13.7, 13.9]], tokens_read=2.0, attention_tokens_read=1.5
        ),
        checks=[
            MatrixCheck(
                name="Eq. 10",
                statement="W'_HVO x' is what attention adds",
                relative_error=2.1e-07,
                tolerance=1e-4,
                holds=True,
            ),
            MatrixCheck(
                name="Eq. 9",
                statement="W'_HVO = W'_O W'_HV",
                relative_error=None,
                tolerance=1e-4,
                holds=None,
                reasons={"relative_error": unbuilt, "holds": unbuilt},
            ),
        ],
        warnings=[],
        run=run(),
    )


def network_report() -> NetworkReport:
    """A layer of each equation; one of experts, one without an FFN."""
    none = dict.fromkeys(("activation", "gated", "neurons", "experts", "unit_error", "pre_activation_error"), "no FFN")
    return NetworkReport(
        duat_version="0.1.0",
        environment=environment(),
        model=model(),
        prompt=prompts()[0],
        certificate=certificate(),
        tokens=7,
        hidden_size=576,
        side=4032,
        layers=[
            NetworkLayer(
                layer=1, name="model.layers.0", equation="21", activation="silu", gated=True, neurons=1536,
                experts=None, pre_activation_error=2.1e-7, unit_error=3.1e-7, output_error=2.5e-7,
                reasons={"experts": "none"},
            ),
            NetworkLayer(
                layer=2, name="model.layers.1", equation="23", activation="silu", gated=True, neurons=3072, experts=2,
                pre_activation_error=None, unit_error=4.1e-7, output_error=3.5e-7,
                reasons={"pre_activation_error": "experts hold their weights fused"},
            ),
            NetworkLayer(
                layer=3, name="model.layers.2", equation="33", activation=None, gated=None, neurons=None, experts=None,
                pre_activation_error=None, unit_error=None, output_error=3.6e-7, reasons=none,
            ),
        ],
        whole_error=4.2e-7,
        deviations=["gated FFNs have two pre-activations a neuron"],
        skipped=[Skipped(what="model", why="decoder stack (cross-attention); only the encoder is analysed")],
        warnings=[],
        run=run(),
    )  # fmt: skip


def verify_report(exact: bool = True) -> VerifyReport:
    return VerifyReport(
        duat_version="0.1.0",
        environment=environment(),
        model=model(),
        prompts=prompts(),
        certificate=certificate(exact),
        blocks=[
            BlockCertificate(
                index=index,
                name=f"model.layers.{index}",
                certificate_error=1.2e-07 * (index + 1),
                operator_error=None if index == 2 else 2.1e-07,
                operator_reason=GATED if index == 2 else None,
            )
            for index in range(4)
        ],
        skipped=[],
        warnings=[],
        run=run(),
    )


def plan_report(limit: int = 8 << 30) -> PlanReport:
    """limit: bytes; below 2 GiB nothing fits."""

    def way(weights: Literal["resident", "streamed"], reads: float, /, **terms: int) -> Way:
        size = sum(terms.values())
        return Way(
            weights=weights,
            peak_memory_bytes=size,
            terms=[MemoryTerm(what=what.replace("_", " "), bytes=of) for what, of in terms.items()],
            weight_reads=reads,
            fits=limit is None or size <= limit,
        )

    ways = [
        way("resident", 1.0, libraries=390 << 20, weights=25 << 30),
        way("streamed", 1.03, libraries=390 << 20, one_block=772 << 20, the_next_block_as_stored=386 << 20),
    ]
    chosen = next((found.weights for found in ways if found.fits), None)
    return PlanReport(
        duat_version="0.1.0",
        planned_command="inspect",
        name="org/model\x1b[31m",
        dtype="float32",
        prompt_tokens=[32, 512],
        weights=PlannedWeights(
            stored_bytes=25 << 29,
            bytes=25 << 30,
            blocks=32,
            largest_block=PlannedPart(name="model.layers.0", stored_bytes=386 << 20, bytes=772 << 20),
            layers=[PlannedPart(name="lm_head.weight", stored_bytes=250 << 20, bytes=500 << 20)],
            frame_bytes=16 << 10,
        ),
        operations=2.08e12,
        limit_bytes=limit,
        ways=ways,
        chosen=chosen,
        reason=None if chosen else "streamed, it needs 1548 MiB of memory, has 1024 MiB",
        warnings=["the shards hold fewer bytes than the index says"],
        run=run(),
    )


def support_report() -> SupportReport:
    return SupportReport(
        duat_version="0.1.0",
        transformers="5.23.0",
        entries=[
            SupportEntry(
                model_type="llama",
                status="exact",
                path="attention interface",
                parts=[],
                reason=None,
                relative_error=1.4e-07,
            ),
            SupportEntry(
                model_type="qwen3_next",
                status="partly",
                path="attention interface",
                parts=["operator of blocks 0-2", "density of blocks 0-2"],
                reason=GATED,
                relative_error=2.2e-07,
            ),
            SupportEntry(
                model_type="mamba",
                status="refused",
                path=None,
                parts=[],
                reason="no attention was found: a state-space model has no attention operator W'",
                relative_error=None,
            ),
        ],
        run=run(),
    )


def module_change(row: int, full: bool = False) -> ModuleChange:
    reasons = {"sup_local": "the norm in front is found with prompts"}
    if full:
        reasons |= dict.fromkeys(("rank", "scaling"), "the method states none")
    return ModuleChange(
        name=f"model.layers.{row}.self_attn.q_proj",
        parameter="weight",
        kind="full" if full else "lora",
        shape=[576, 576],
        rank=None if full else 8,
        scaling=None if full else 2.0,
        relative_to="base",
        frobenius_norm=1.25 + row,
        relative_frobenius=0.0312 * (row + 1),
        spectral_norm=0.875,
        numerical_rank=8,
        stable_rank=2.04,
        entropy_rank=3.5,
        energy_rank_90=4,
        singular_values=[0.875, 0.5],
        alignment=Alignment(k=10, j=8, output=0.121, output_random=0.0174, input=0.2, input_random=0.0174),
        intruders=Intruders(k=10, epsilon=0.5, output=2, input=None, reasons={"input": "not settled"}),
        sup_local=None,
        rounding=Rounding(dtype="bfloat16", floor=0.0123, rank_above_floor=7) if full else None,
        reasons=reasons,
    )


def lora_kinds() -> LoraReport:
    """Of more parameters than are listed one by one."""
    kinds = [
        KindChange(
            name=f"{name}_proj",
            parameters=6,
            blocks=[0, 1, 2, 3, 4, 5],
            share=0.75 - 0.5 * row,
            relative=0.412 - 0.1 * row,
            relative_least=0.198,
            relative_most=0.567,
            most_in=4 - row,
            rank_limit=16 - 8 * row,
            energy_rank_90_most=5,
            with_intruders=None if row else 2,
            reasons={"with_intruders": "not settled"} if row else {},
        )
        for row, name in enumerate(("self_attn.q", "mlp.down"))
    ]
    compared = KindComparison(
        name="self_attn.q_proj", parameters=9, cosine=0.25, cosine_least=-0.5, cosine_most=0.75, relative_distance=0.61
    )
    report = lora_report(two=True)
    assert report.comparison is not None
    both = report.comparison.model_copy(update={"modules": report.comparison.modules * 9, "kinds": [compared]})
    modules = [module_change(row) for row in range(12)]
    return report.model_copy(
        update={"modules": modules, "kinds": kinds, "other_modules": modules, "other_kinds": kinds, "comparison": both}
    )


def lora_report(*, full: bool = False, prompts_too: bool = False, two: bool = False) -> LoraReport:
    block = BlockChange(
        index=0,
        name="layers.0",
        operator=OperatorChange(relative_change=0.31, routing=0.12, weights=0.27, interaction=0.043),
        terms=TermsChange(
            ffn=0.2,
            dynamic_bias=None,
            output=0.15,
            output_token_median=0.21,
            reasons={"dynamic_bias": "no single linear layer"},
        ),
        base_certificate=2.2e-07,
        tuned_certificate=2.4e-07,
    )
    moved = [TokenChange(position=3, text=" the", kl=1.25), TokenChange(position=0, text="\\x1b", kl=0.5)]
    answer = AnswerChange(tokens=12, kl=0.71, loss_base=4.4, loss_tuned=3.2)
    prompt = PromptChange(
        prompt=1, output=0.6, kl=0.456, loss_base=3.9, loss_tuned=3.6, answer=answer, moved_tokens=moved
    )
    comparison = Comparison(
        other="second",
        modules=[
            ModuleComparison(
                name="model.layers.0.self_attn.q_proj",
                parameter="weight",
                cosine=0.75,
                distance=1.5,
                relative_distance=0.4,
                output_cosines=[0.9, 0.1],
                input_cosines=[0.8, 0.2],
            )
        ],
        only_first=["model.layers.1.self_attn.q_proj.weight"],
        only_second=[],
        cosine=0.5,
        agreeing=["model.layers.0.self_attn.q_proj.weight"],
        opposing=[],
    )
    return LoraReport(
        duat_version="0.1.0",
        mode="checkpoint" if full else "two adapters" if two else "adapter",
        level="prompts" if prompts_too else "weights",
        base="org/base",
        tuned="./tuned",
        method="full" if full else "LORA",
        dtype="bfloat16",
        modules=[module_change(row, full) for row in range(2)],
        other_modules=[module_change(0)] if two else None,
        unchanged=[f"model.layers.{k}.mlp.up_proj.weight" for k in range(6)] if full else [],
        added=["score.weight"] if full else [],
        removed=[],
        comparison=comparison if two else None,
        environment=environment() if prompts_too else None,
        model=model() if prompts_too else None,
        prompts=prompts() if prompts_too else None,
        blocks=[block] if prompts_too else None,
        by_prompt=[prompt] if prompts_too else None,
        certificate=certificate() if prompts_too else None,
        tuned_certificate=certificate() if prompts_too else None,
        eq18=Eq18(
            statement="Eq. 18, W'_tuned = W'_base + dW in the FFN's linear layers",
            relative_error=2.4e-07,
            tolerance=1e-4,
            change_error=3.1e-06,
            change_tolerance=1e-3,
            holds=True,
            inputs=64,
            failed=[],
            on_second=["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias"],
            on_third=["model.layers.0.mlp.down_proj.weight"],
            through_attention=["model.layers.0.self_attn.q_proj.weight"],
            elsewhere=[],
            not_covered=[Skipped(what="model.layers.1.mlp.gate.weight", why="it is no linear layer of its FFN")],
        )
        if prompts_too
        else None,
        summary=LoraSummary(
            changed=2,
            frobenius_norm=2.6,
            relative_frobenius=0.05,
            notable=[
                "every changed matrix moves, up to rounding, by a change of rank at most 7: a merged low-rank adapter "
                "looks like this"
                if full
                else "something that the numbers support"
            ],
            answers=AnswersSummary(
                prompts=1,
                tokens=12,
                kl=0.71,
                loss_change=-1.2,
                loss_change_low=None,
                loss_change_high=None,
                reasons=dict.fromkeys(("loss_change_low", "loss_change_high"), "of fewer than five prompts"),
            )
            if prompts_too
            else None,
        ),
        lint=[
            LintFinding(rule="untouched", level="warning", where="./tuned", message="1 of 3 modules with an all-zero B")
        ],
        skipped=[Skipped(what="a.weight", why="needs the base's values")],
        warnings=["a warning"],
        run=Run(started="2026-11-01T00:00:00+00:00", seconds=1.5, peak_memory_bytes=None),
    )


def block_comparison(index: int) -> BlockComparison:
    gated, first = index == 2, index == 0
    why = {"relative": GATED, "unaligned": GATED}
    names = ("relative", "routing", "scale", "interaction", "unaligned", "unaligned_a", "unaligned_b")
    operator = InputChange(
        **(dict.fromkeys(names) if gated else {name: (0.412 + 0.05 * index) / k for k, name in enumerate(names, 1)}),
        null=NullChange(relative=None if gated else 0.241, unaligned=None if gated else 0.216,
                        reasons=why if gated else {}),
        reasons=dict.fromkeys(names, GATED) if gated else {},
    )  # fmt: skip
    head = HeadChange(head=0, relative=0.933, routing=0.9, scale=0.1, interaction=0.05, unaligned=0.2)
    return BlockComparison(
        index=index,
        name=f"model.layers.{index}",
        operator=operator,
        heads=[] if gated else [head],
        bias=None if first else 0.133,
        ffn=0.131,
        ffns=[],
        input=0.0 if first else 0.141,
        output=0.189,
        amplification=None if first else 1.34,
        certificate_error=1.2e-7,
        reasons={"bias": "it is zero under the first prompt", "amplification": "the block's input does not change"}
        if first
        else {},
    )


def fixed_report() -> CompareReport:
    runs = [
        FixedLoss(held="H", source="own", loss=6.42, change=0.0, low=0.0, high=0.0),
        FixedLoss(held="H", source="another prompt", loss=6.69, change=0.267, low=0.125, high=0.415),
        FixedLoss(held="H and norms", source="mean", loss=6.8, change=0.382, low=None, high=None,
                  reasons=dict.fromkeys(("low", "high"), "needs 5 prompts")),
    ]  # fmt: skip
    found = FixedParameters(tokens=17, live=6.42, own_error=8.6e-7, tolerance=1e-4, holds=True, runs=runs)
    update = {"comparison": None, "pairs": [], "fixed": found}
    return compare_report().model_copy(update=update)


def patched_report(what: Patched = "blocks") -> CompareReport:
    """`duat compare --patch`: of two pairs, or of one without nulls where heads or tokens are patched."""
    pairs = [PatchedPair(a=0, b=1, token_a=" in", token_b=" out\\x1b", before=-4.2, after=3.37, kl=0.612)]

    def effect(k: int) -> dict[str, Any]:
        null = {"null": 0.694 / (k + 1)} if what == "blocks" else {"null": None, "reasons": {"null": "needs a pair"}}
        return {"effect": 0.793 / (k + 1) * (-1) ** k, "kl": 0.51 / (k + 1), **null}

    def block(index: int | None) -> BlockPatch:
        if what == "heads":
            return BlockPatch(index=index, heads=[HeadPatch(head=k, **effect(k)) for k in range(3)])
        if what == "tokens":
            texts = ("<s>", " keeper", " saw")
            return BlockPatch(
                index=index, tokens=[TokenPatch(token=k, text=t, **effect(k)) for k, t in enumerate(texts)]
            )
        names = ("H", "norms", "ffn", "together")
        return BlockPatch(index=index, **{name: PatchEffect(**effect(k)) for k, name in enumerate(names)})

    blocks = [block(index) for index in range(4)]
    if what == "blocks":
        blocks[2] = blocks[2].model_copy(update={"ffn": PatchEffect.absent("it has no FFN")})
    whole = block(None) if what == "blocks" else None
    found = Patching(what=what, pairs=pairs, blocks=blocks, whole=whole, own_error=1.2e-7, tolerance=1e-4, holds=True)
    return compare_report().model_copy(update={"patched": found})


def context() -> InContext:
    blocks = [BlockRead(index=index, share=0.13, null=0.42) for index in range(2)]
    blocks.append(BlockRead(index=2, share=None, null=None, reasons={"share": GATED, "null": GATED}))
    read = ContextRead(demonstration=1, tokens=19, share=0.13, null=0.42, blocks=blocks)
    alone = ContextRun(prompt=0, label="--shared alone", loss=5.43, loss_change=0.0, bias=0.0, reads=[])
    one = ContextRun(prompt=1, label="--prefix 1", loss=5.07, loss_change=-0.362, bias=0.263, reads=[read])
    return InContext(question_tokens=16, answer_tokens=7, runs=[alone, one])


def compare_report(*, several: bool = False) -> CompareReport:
    blocks = [block_comparison(index) for index in range(4)]
    names = ["--prompt 1", "--prompt 2", "--prompt 3"][: 2 + several]
    runs = [AlignedRun(a=0, b=0, tokens=2, text="<s>The"), AlignedRun(a=3, b=6, tokens=1, text=" keeper\\x1b")]
    pairs = [PairFacts(a=0, b=1, aligned=3, runs=runs, kl=0.0296, blocks=blocks if several else None)]
    if several:
        why = {"kl": "BertModel is no next-token model: it has no LM head"}
        pairs.append(PairFacts(a=0, b=2, aligned=12, runs=runs * 4, kl=None, blocks=blocks, reasons=why))
    return CompareReport(
        duat_version="0.1.0",
        environment=environment(),
        model=model(),
        prompts=[ComparedPrompt(sha256="ab" * 32, tokens=22 + k, label=name) for k, name in enumerate(names)],
        certificate=certificate(),
        comparison=InputComparison(
            pairs=len(pairs),
            blocks=blocks,
            parameters=[
                ParameterChange(name="A_h", what="W_V,h W_O,h", set_by="checkpoint", moved=False, change=0.0),
                ParameterChange(name="W'", what="attention", set_by="input", moved=True, change=0.412),
            ],
            notable=["block 1: W' moved most, by 41.2 % of its norm, more by routing (39.6 %)"],
        ),
        pairs=pairs,
        context=context() if several else None,
        skipped=[Skipped(what="operator of block 2", why=GATED)],
        warnings=[],
        run=run(),
    )


def prune_report(
    *, hidden: bool = False, nothing: bool = False, repaired: bool = False, joint: bool = False, criteria: bool = False
) -> PruneReport:
    """`duat prune-bound`. hidden: the other metric, with mean ablation; nothing: no set within the budget; joint: one
    set of several kinds; criteria: sets of others beside the largest."""
    largest = plan("neuron", 46080, 0 if nothing else 12040, repaired=repaired)
    unit = "relative" if hidden else "nats/token"
    return PruneReport(
        duat_version="0.1.0",
        environment=environment(),
        model=model(),
        prompts=prompts(),
        certificate=certificate(),
        protocol=Protocol(
            metric="hidden" if hidden else "kl",
            unit=unit,
            meaning="mean over prompts of the mean over tokens of "
            "KL(model's next-token distribution || the ablated one), nats",
            ablate="mean" if hidden else "zero",
            probes=32,
            confidence=0.999 if hidden else 0.95,
            tokens=159,
            seed=29,
            loss=None if hidden else 7.7 if nothing else 3.21,
            uniform_loss=None if hidden else 7.62,
            reasons=dict.fromkeys(("loss", "uniform_loss"), "the metric looks at no logits") if hidden else {},
        ),
        blocks=[prune_block(k) for k in range(3)],
        prediction=[prediction("neuron", 24, 46080), prediction("head", 24, 270), prediction("ffn", 2, 30)],
        plans=[joint_plan(46350, 12010)]
        if joint
        else [
            with_criteria(largest) if criteria else largest,
            plan("head", 270, 0 if nothing else 17, passed=False),
            plan("ffn", 30, 0),
        ],
        pooled=[pooled("neuron", 12040, held_out=True), pooled("head", 17, held_out=False)] if hidden else [],
        eq16=[] if joint else eq16_rows(nothing=nothing),
        terms=[prune_term(k) for k in range(3)],
        written=written(bare=hidden) if repaired or hidden else None,
        skipped=[Skipped(what="heads of block 2", why="the block has no softmax attention")],
        warnings=["3 of 31 held-out prompts are left out: the same tokens chose the sets, or came before"],
        run=run(),
    )


def pooled(kind: Kind, removed: int, *, held_out: bool) -> PooledCosine:
    return PooledCosine(
        granularity=kind,
        removed=removed,
        pooling="mean over tokens",
        mean=0.99731,
        lowest=0.98114,
        held_out_mean=0.99524 if held_out else None,
        held_out_lowest=0.96302 if held_out else None,
        reasons={} if held_out else dict.fromkeys(("held_out_mean", "held_out_lowest"), "no held-out prompts"),
    )


def eq16_rows(*, nothing: bool) -> list[Eq16]:
    """nothing: no set was chosen, and nothing ablated."""
    rows = [eq16_row(kind, k, measured=not nothing) for kind in ("block", "attention", "ffn") for k in range(2)]
    return rows if nothing else [*rows, eq16_row("neuron", None, terms=12040), eq16_row("head", None, terms=17)]


def eq16_row(kind: Kind, block: int | None, *, terms: int = 1, measured: bool = True) -> Eq16:
    bound, last = 0.21 * terms**0.1, block == 1 and kind != "attention"
    factor = 1.0 if last else 4.01
    names = ("measured", "ratio", "ratio_largest", "exceeded")
    values = (factor * bound, factor, 1.04 * factor, 0 if last else 2)
    return Eq16(
        what="set" if block is None else "part", name=kind if block is None else f"block.{block}.{kind}.0",
        kind=None if block is None else kind, block=block, terms=terms, bound=bound, triangle=bound * terms**0.5,
        triangle_low=0.98 * bound * terms**0.5, triangle_high=1.02 * bound * terms**0.5, held=bound, error=2.1e-7,
        prompts=2, reasons={} if measured else dict.fromkeys(names, "not in the sample that was ablated"),
        **dict(zip(names, values if measured else (None,) * 4, strict=True)),
    )  # fmt: skip


def written(*, bare: bool) -> Written:
    """bare: of a model without perplexity."""
    return Written(
        granularity="neuron", terms=6020, repaired=not bare, removed_blocks=[], removed_neurons=198,
        removed_groups=0, zeroed=80,
        notes=["198 neurons a block are removed; those beyond, up to 4 a block, are zeroed"], dtype="bfloat16",
        error=2.1e-7, parameters_before=134515008, parameters_after=124148160, bytes_before=269030016,
        bytes_after=248296320, measured_on="chose the set" if bare else "held out", prompts=83, tokens=1963,
        damage=0.0412, exceeded=9,
        perplexity_before=None if bare else 31.42, perplexity_after=None if bare else 33.07, seconds_before=0.00231,
        seconds_after=0.00217, timed_runs=7, timed_tokens=498,
        reasons=dict.fromkeys(("perplexity_before", "perplexity_after"), "BertModel has no LM head") if bare else {},
    )  # fmt: skip


def prune_block(index: int) -> PruneBlock:
    bare = index == 2  # a mixer without attention
    why, heads = "the block has no softmax attention", "the block has no heads that could be told apart"
    return PruneBlock(
        index=index,
        name=f"model.layers.{index}",
        block=0.652 / (index + 1),
        attention=None if bare else 0.0992,
        ffn=0.643,
        block_measured=4.39 / (index + 1),
        attention_measured=None if bare or index == 1 else 2.56,
        ffn_measured=3.04,
        heads=None
        if bare
        else HeadSummary(count=9, kv_heads=3, least=0.0149, least_index=3, largest=0.215, largest_index=8),
        neurons=NeuronSummary(
            count=1536,
            median=3.2e-4,
            largest=0.024,
            negligible_share=0.701,
            certified_largest=41.2,
            certified_largest_relative=3.1,
        ),
        attention_place=None if bare else f"input of layers.{index}.post_attention_layernorm",
        ffn_place=f"output of layers.{index}",
        certified_attention=None if bare else 166.0,
        certified_attention_relative=None if bare else 12.5,
        certified_ffn=1343.0,
        certified_ffn_relative=88.4,
        reasons=dict.fromkeys(
            (
                "attention",
                "attention_measured",
                "attention_place",
                "certified_attention",
                "certified_attention_relative",
            ),
            why,
        )
        | {"heads": heads}
        if bare
        else {"attention_measured": "not ablated for real"}
        if index == 1
        else {},
    )


def prune_term(index: int) -> PruneTerm:
    return PruneTerm(
        kind="head",
        block=0,
        index=index,
        module="layers.0.self_attn.o_proj",
        place="input of layers.0.post_attention_layernorm",
        local=0.11,
        frozen=0.09,
        linearised=0.1,
        linearised_low=0.08,
        linearised_high=0.13,
        certified=12.0,
        certified_relative=0.9,
        certified_vacuous=False,
        measured=0.104,
    )


def prediction(kind: Kind, n: int, of: int) -> Prediction:
    if n < 3:
        names = ("spearman", "kendall", "median_ratio")
        off = "no prediction above 0 is below that of the first term that is off by more: "
        off += "block.0.ffn.0 is predicted to do 0.643 and did 3.04"
        return Prediction(
            granularity=kind, metric="kl", n=n, of=of, mean_predicted=0.643, mean_measured=None, criteria={},
            worst_ratio=4.73, valid_to=None,
            reasons=dict.fromkeys(names, f"{n} ablated terms are too few to be ranked")
            | {"valid_to": off, "mean_measured": f"{n} ablated terms say too little of all {of}"},
            **dict.fromkeys(names),
        )  # fmt: skip
    return Prediction(
        granularity=kind,
        metric="kl",
        n=n,
        of=of,
        mean_predicted=0.00118,
        mean_measured=Estimated(value=0.00124, low=0.00119, high=0.00129),
        spearman=Estimated(value=0.991, low=0.959, high=1.0),
        kendall=Estimated(value=0.949, low=0.88, high=0.99),
        median_ratio=Estimated(value=0.942, low=0.9, high=1.1),
        worst_ratio=25.8,
        valid_to=0.0922,
        criteria={
            "magnitude": Estimated(value=-0.222, low=-0.5, high=0.1),
            "activation x norm": Estimated(value=0.864, low=0.7, high=0.9),
            "taylor": None,
        },
    )


def repaired_set(removed: int, of: int, prompts: int) -> RepairedSet:
    size = removed / of
    return RepairedSet(
        removed=removed, share=size, prompts=prompts, mean_before=0.71 * size, mean_after=0.34 * size,
        percentile_90_before=1.3 * size, percentile_90_after=0.6 * size, share_exceeded_before=2.1 * size,
        share_exceeded_after=0.4 * size, dropped=False,
    )  # fmt: skip


def set_repair(removed: int, of: int) -> SetRepair:
    return SetRepair(
        calibration_prompts=15, calibration_tokens=1734, calibration_sha256="cd" * 32, refitted=58, unchanged=2,
        short=0, ridge_low=0.01, ridge_high=10.0, chosen_on=[repaired_set(removed, of, 15)],
        held_out=[repaired_set(removed // 2, of, 83), repaired_set(removed, of, 83)],
    )  # fmt: skip


def plan(kind: Kind, of: int, removed: int, *, passed: bool = True, repaired: bool = False) -> Plan:
    curve = [CurvePoint(removed=max(1, of * k // 40), share=max(1, of * k // 40) / of, predicted=0.0049 * k**2,
                        measured=0.005 * k**2) for k in range(7)]  # fmt: skip
    if not removed:
        return Plan.absent(
            NOTHING_FITS, granularity=kind, budget=0.1, removed=0, of=of, share=0.0, curve=curve, uniform=False,
            remove=None, rounds=[], parameters=0, parameters_share=0.0, parameters_of="blocks", held_out=[], set=[],
            criteria=[],
        )  # fmt: skip
    given = removed // 2 if passed else 0
    tested = [max(1, round(removed * k / 4)) for k in range(1, 5)]
    return Plan(
        granularity=kind,
        budget=0.1,
        removed=removed,
        of=of,
        share=removed / of,
        predicted=0.0905,
        measured=0.0929,
        curve=curve,
        guarantee=Guarantee(
            budget=0.1,
            confidence=0.999,
            share_above_limit=0.125,
            exceeded=1 if passed else 0,
            may_exceed=1,
            holdout_prompts=83,
            holdout_sha256="ab" * 32,
            method="Clopper-Pearson",
            tested=tested,
            removed=given,
            share=given / of,
            saves=size(given, kind) if given else None,
            set=[f"block.0.{kind}.{k}" for k in range(given)],
            reasons={} if given else {"saves": "the set is empty"},
        ),
        held_out=[
            HeldOut(
                removed=n,
                share=n / of,
                prompts=83 if n in (tested[-1], given) else 21,
                mean=0.11 * n / removed,
                percentile_90=0.2 * n / removed,
                exceeded=n * 20 // removed,
                share_exceeded=0.25 * n / removed,
                limit=0.231 * n / removed if n in (tested[-1], given) else None,
            )
            for n in tested
        ],
        mean_guarantee=MeanGuarantee(
            budget=0.1,
            confidence=0.999,
            most=0.5,
            counted_for_less=1 if passed else 0,
            mean=0.0731 if passed else None,
            holdout_prompts=83,
            holdout_sha256="ab" * 32,
            method="betting",
            tested=tested,
            removed=tested[2] if passed else 0,
            share=tested[2] / of if passed else 0.0,
            reasons={} if passed else {"mean": "the set is empty"},
        ),
        saves=size(removed, kind, counted=passed),
        uniform=False,
        remove=None,
        rounds=[],
        parameters=1729 * removed,
        parameters_share=0.5 * removed / of,
        parameters_of="blocks",
        repair=set_repair(removed, of) if repaired else None,
        set=[f"block.0.{kind}.{k}" for k in range(removed)],
        reasons={} if repaired else {"repair": "--repair was not given"},
    )


def joint_plan(of: int, removed: int) -> Plan:
    """One set of neurons and heads that holds a share of all parameters, of three rounds."""
    rounds = [
        SketchRound(
            removed=removed * k // 3, measured=0.011 * k**2, single_removed=removed * k // 3 + k - 1,
            single_measured=0.0111 * k**2,
        )
        for k in range(1, 4)
    ]  # fmt: skip
    changes = {"granularity": "neuron,head", "remove": 0.2, "rounds": rounds, "parameters_of": "all", "uniform": True}
    return plan("neuron", of, removed).model_copy(update=changes)


def with_criteria(given: Plan) -> Plan:
    """Beside two of its sets."""
    chosen = [
        ("duat", "one order", 1.0), ("magnitude", "one order", 8.35), ("magnitude", "same share of layers", 1.89),
        ("activation x norm", "one order", 1.12), ("activation x norm", "same share of layers", 1.62),
        ("taylor", "one order", 0.91), ("random", "one order", 13.2),
    ]  # fmt: skip
    sizes = (given.held_out[2].removed, given.removed)
    rows = [criterion_set(size, *one, damage=0.04 * k) for k, size in enumerate(sizes, 1) for one in chosen]
    return given.model_copy(update={"criteria": rows})


def criterion_set(size: int, criterion: str, allocation: Allocation, times: float, *, damage: float) -> CriterionSet:
    drawn = criterion == "random"
    return CriterionSet.explained(
        "one set alone", beside=size, criterion=criterion, allocation=allocation, sets=5 if drawn else 1, removed=size,
        parameters=1729 * size, prompts=83, mean=damage * times, percentile_90=1.7 * damage * times,
        lowest=0.9 * damage * times if drawn else None, highest=1.2 * damage * times if drawn else None, ratio=times,
        ratio_low=times if times == 1 else 0.95 * times, ratio_high=times if times == 1 else 1.07 * times,
    )  # fmt: skip


def size(terms: int, granularity: str, *, counted: bool = True) -> SetSize:
    return SetSize(
        terms_removed=terms // 2,
        parameters_removed=1729 * terms,
        parameters_zeroed=288 * terms if counted else None,
        bytes_removed=3458 * terms,
        uniform_leaves=[kind for kind in KINDS[:2] if kind in granularity.split(",")],
        reasons={} if counted else {"parameters_zeroed": "a weight to be zeroed is tied to another place"},
    )


def outcome(rule: str, status: str, **fields: object) -> Outcome:
    """A check with every field; `fields` say what differs from one that passed."""
    plain: dict[str, object] = {
        "rule": rule,
        "level": "warn" if status == "warned" else "error",
        "status": status,
        "block": None,
        "where": None,
        "measured": 0.0,
        "low": None,
        "high": 0.0,
        "beyond": None,
        "unit": "values",
        "message": "none found",
        "advice": None,
        "source": "policy default",
        "location": {"file": "model/config.json", "line": 1},
    }
    return Outcome.model_validate({**plain, **fields})


def check_report(*, sound: bool = False, name: str = "org/model") -> CheckReport:
    """What a gate may find: numbers, places, foreign strings, and checks that did not run."""
    from duat_cli.checks.drift import Deviation  # half of what a process of the fake duat would take to start
    from duat_cli.checks.verdict.causes import grouped

    drift = "If the change is meant, run again with --update-baseline and commit the baseline."
    moved = [
        outcome(
            "drift.weights",
            "failed",
            block=number,
            where=f"weights.model.layers.{number}.mlp.up_proj.weight",
            measured=0.35 - number / 100,
            high=1e-4,
            beyond=0.3499 - number / 100,
            unit="relative",
            message=f"'model.layers.{number}.mlp.up_proj.weight' moved by about {0.35 - number / 100:.2g} of its norm",
            advice=drift,
            source="tolerance of float32",
            location={"file": "duat-baseline.json", "line": 9 + number},
        )
        for number in range(9)
    ]
    findings = [
        *moved,
        outcome(
            "drift.coupling",
            "failed",
            block=3,
            where="blocks.3.coupling.effective_context",
            measured=2.5,
            low=3.0,
            high=3.2,
            beyond=0.5,
            message="'blocks.3.coupling.effective_context' went from 3.1 to 2.5",
            advice=drift,
            source="tolerance of float32",
            location={"file": "duat-baseline.json", "line": 4},
        ),
        outcome(
            "bounds",
            "failed",
            block=1,
            where="blocks.1.coupling.first_token_share",
            measured=None,
            high=0.5,
            message="blocks.1.coupling.first_token_share has no value: the prompts have one token each",
            advice="Compare with `duat inspect`; change the checkpoint, or the bound in the policy.",
            source="duat.toml",
            location={"file": "duat.toml", "line": 7},
            reasons={"measured": "it has no value", "beyond": "it has no value"},
        ),
        outcome(
            "integrity.unexpected",
            "warned",
            where="x\x1b[2J, 100%: [link=https://evil.example]y[/link] | `z` <b>",
            measured=1.0,
            beyond=1.0,
            unit="tensors",
            message="1 unexpected tensor: 'x\x1b[2J, 100%: [link=https://evil.example]y[/link] | `z` <b>'",
            advice="Remove it.",
            location={"file": "models/a b,c:d%.json", "line": 1},
        ),
    ]
    passed = [
        outcome("integrity.nonfinite", "passed"),
        outcome("integrity.zero_blocks", "passed"),
        outcome("integrity.dead_neurons", "passed", measured=0.004, high=0.01, unit="share"),
        outcome("exactness.certificate", "passed", measured=3.1e-07, high=1e-4, unit="relative"),
    ]
    skipped = [
        outcome(rule, "skipped", measured=None, message="no --adapter was given", reasons={"measured": "skipped"})
        for rule in ("adapter.config", "adapter.non_finite")
    ]
    moves = [Deviation("blocks.3.coupling.effective_context", "beyond", 3.1, 2.5, -0.6, None)]
    tensors = [f"model.layers.{number}.mlp.{kind}.weight" for number in range(12) for kind in ("up_proj", "down_proj")]
    outcomes, causes = grouped([*([] if sound else findings), *passed, *skipped], moves, tensors)
    ran = {o.rule: o for o in outcomes if o.status != "skipped"}
    return CheckReport(
        duat_version="0.1.0",
        verdict="passed" if sound else "failed",
        model=CheckedModel(
            name=name,
            path="/models/model",
            revision=None,
            model_type="llama",
            files=[CheckedFile(name="model.safetensors", bytes=4_631_280)],
            tensors=56,
            stored=["BF16", "F32"],
            header_sha256="ab" * 32,
            fingerprint="cd" * 32,
            reasons={"revision": "a local folder has none"},
        ),
        environment=environment(),
        certificate=certificate(),
        behaviour=behaviour(masked=not sound),
        prompts=prompts(),
        policy=["policy default", "duat.toml"],
        baseline=BaselineFacts(
            file="duat-baseline.json",
            status="compared",
            entries=229,
            changes=[Change(key="summary.linear_share", old="0.1", new=None), Change(key="a", old=None, new="2")],
        ),
        counts=Counts(passed=4, failed=0 if sound else 11, warned=0 if sound else 1, skipped=2),
        causes=causes,
        outcomes=outcomes,
        rules=[
            RuleFacts(id=rule, about=f"what {rule} looks at", advice=o.advice or "None.") for rule, o in ran.items()
        ],
        off=["integrity.mixed_dtypes"],
        warnings=["a \x1b[31mwarning"],
        run=Run(started="2026-11-01T00:00:00+00:00", seconds=1.5, peak_memory_bytes=None),
        reasons={},
    )


def undecided_report(*, name: str = "org/model") -> UndecidedReport:
    """A check that could not tell."""
    problem = Problem(kind="checkpoint", message="100%: cannot be read\x1b[2J", exit_code=2)
    return UndecidedReport(duat_version="0.1.0", verdict="undecided", model=name, error=problem)


def behaviour(*, masked: bool) -> Behaviour:
    """Of a masked model against a baseline, or of a next-token model with an adapter."""
    names = ("agreement", "near_ties", "kl", "cosine", "cosine_error")
    return Behaviour(
        predicts="masked token" if masked else "next token",
        predictions=1734,
        scored=1719,
        scored_bytes=None if masked else 3668,
        vocabulary=30522,
        loss_per_token=9.1234,
        loss_per_byte=None if masked else 2.8162,
        uniform=10.3262,
        unigram=9.2,
        entropy=4.2764,
        largest_logit=17.616,
        logit_range=18.521,
        never_predicted=0.0674,
        nonfinite_logits=0,
        agreement=0.9985 if masked else None,
        near_ties=3 if masked else None,
        kl=None,
        cosine=None,
        cosine_error=None,
        tuned=None if masked else TunedBehaviour(loss_per_token=6.203),
        reasons=dict.fromkeys(names, "no --baseline was given"),
    )


def explain_report() -> ExplainReport:
    """One field with everything that can be said of it."""
    entry = Explanation(
        name="stable_rank",
        kind="field",
        where=["inspect: blocks[].operator.stable_rank"],
        columns=["inspect: stable rank"],
        definition="how many directions carry it",
        formula="sum sigma^2 / sigma_1^2",
        unit="dimensions",
        source="Lanczos",
        exact="estimate",
        nulls=["blocks[].null.uniform.operator.stable_rank"],
        facts={"needs": "--spectrum"},
        page=None,
    )
    return ExplainReport(duat_version="0.1.0", asked="stable_rank", entries=[entry])
