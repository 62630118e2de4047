"""`duat compare`: prompts run through one model and are compared in pairs, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from duat_cli.analysis.compare.alignment import (
    Aligned,
    Stretch,
    align,
    align_ends,
    align_inputs,
    align_places,
    common_end,
    every_place,
    sources_of,
)
from duat_cli.analysis.compare.answers import tokens_of
from duat_cli.analysis.compare.blocks import compare_block, mean_of, relative_change
from duat_cli.analysis.compare.captured import as_many_tokens, require_equal
from duat_cli.analysis.compare.context import Context
from duat_cli.analysis.compare.parameters import Moves
from duat_cli.analysis.compare.patching import Patcher
from duat_cli.analysis.compare.request import Texts, as_read, reads_words
from duat_cli.analysis.compare.states import BlockState, require_room, state_of
from duat_cli.analysis.decomposition import Decomposition
from duat_cli.analysis.inspect.run import chosen
from duat_cli.analysis.progress import Progress, ticker
from duat_cli.analysis.session import Listener, Session
from duat_cli.errors import InputError, needed
from duat_cli.kinds import Patched
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.words import Labels, Named, Words
from duat_cli.models.arrays import rounding_for
from duat_cli.models.discovery.causality import HeadTest, LogitsPass, is_classifier
from duat_cli.models.discovery.modality import STATES, Given, placed, stack_of
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.routers import Routers
from duat_cli.results.compare.report import (
    AlignedRun,
    BlockComparison,
    ComparedPrompt,
    CompareReport,
    InputChange,
    InputComparison,
    PairFacts,
)
from duat_cli.statistics.divergence import kl
from duat_cli.text import clean

SHOWN_TEXT = 200  # characters of one run of aligned tokens
STEEP = 1.5  # an amplification that is worth a sentence
STILL = "no operator W' moved: the compared tokens read nothing that differs"
BEGINNING = "; they are a common beginning: give texts that differ early and end alike"
BY_PLACE = "; --align position compares also the tokens that differ, each with the one at its place"
INFINITE = "infinite: behind the second prompt a token has probability 0 that has not behind the first"


Row = dict[int, BlockComparison]  # by block


@dataclass(frozen=True)
class CompareOptions:
    """Options of `duat compare`."""

    layers: frozenset[int] | None = None
    per_prompt: bool = False
    cache: bool = True
    by_place: bool = False
    """Whether a token is compared with the one at its place, not with the same token."""
    patch: Patched | None = None
    """Parts of b to put into a's pass, one at a time; tokens are then compared place by place."""
    answers: Sequence[tuple[Named, Named]] | None = None
    """For every pair with `patch`: the token whose logit is followed, and the one whose logit is subtracted."""


@dataclass(frozen=True)
class Pair:
    """Two runs, and which of their tokens are compared."""

    a: int
    b: int
    aligned: Aligned
    sources: Aligned | str | None = None
    """Of a decoder, which vectors of the encoder are laid beside each other, or why none; None without an encoder."""


def compare(
    loaded: LoadedModel,
    texts: Texts,
    prompts: Sequence[Prompt],
    options: CompareOptions,
    words: Words,
    progress: Progress,
) -> CompareReport:
    """The report. prompts: all of `texts` as token ids, or the pictures or sounds that they stand for."""
    texts = as_read(texts, prompts)
    if texts.made_up and loaded.pair is None and (options.by_place or options.patch is not None):
        prompts = as_many_tokens(prompts)
    runs = prompts[: texts.runs]
    pairs = pairs_of(texts, prompts, words.special, options)
    if options.patch == "tokens":
        require_equal("--patch tokens", runs)
    tokens = reads_words(prompts) and not is_classifier(loaded.model, stack_of(loaded.model))
    labels = None if tokens else Labels(loaded.model.config)
    followed = None if options.answers is None else tokens_of(options.answers, labels or words)
    session = Session(loaded, progress, cache=options.cache)
    chosen(options.layers, session.depth)
    for prompt in runs:
        require_room(session, prompt, session.depth if loaded.paged is None else 1)
    patched = None
    if options.patch is not None:
        patcher = Patcher(session, runs, texts.pairs, options.patch, options.layers, progress, followed)
        said, every = _said(runs[texts.pairs[0][0]], words)
        patched = patcher.report(said if labels is None else labels.text, every)
        del patcher  # frees what it keeps of the prompts
    context = None
    if texts.answered:
        context = Context(texts, prompts, len(pairs[0].aligned.a), words.special)
    rounding = rounding_for(loaded.model.dtype)
    side = SideBySide(session, runs, pairs, options.layers, progress, context, rounding)
    with side.routers.seen(loaded.model):
        session.sweep_all(runs, side.listener)
    layers = chosen(options.layers, len(session.structure.calls))
    session.save_cache()
    progress(0, 0, "predictions")
    wanted: list[tuple[Given, slice]] = [(prompt.given, slice(-1, None)) for prompt in runs]
    answers = [] if context is None else [(answer.ids, answer.rows) for answer in context.answers]
    logits = logits_of(session, [*wanted, *answers], classes=context is None)
    rows = [[side.rows[number][i] for i in layers] for number in range(len(pairs))]
    blocks = [mean_of(column) for column in zip(*rows, strict=True)]
    return CompareReport(
        prompts=[
            ComparedPrompt(sha256=p.sha256, tokens=p.input_ids.shape[1], label=clean(text.where))
            for p, text in zip(runs, texts.texts, strict=False)
        ],
        comparison=InputComparison(
            pairs=len(pairs),
            blocks=blocks,
            parameters=side.moves.parameters(),
            notable=_notable(blocks, pairs, rounding),
        ),
        context=None
        if context is None
        else context.report(logits if isinstance(logits, str) else logits[len(runs) :], rows, layers),
        pairs=[
            _pair_facts(pair, runs, logits, words, row if options.per_prompt else None)
            for pair, row in zip(pairs, rows, strict=True)
        ],
        patched=patched,
        **session.report_facts(max(side.errors.values())),
    )


def pairs_of(texts: Texts, prompts: Sequence[Prompt], special: frozenset[int], options: CompareOptions) -> list[Pair]:
    """The pairs, with the tokens of each that are compared. Raises InputError where a pair has none."""
    ids: list[list[int]] = [prompt.input_ids[0].tolist() for prompt in prompts]
    names = [text.where for text in texts.texts]
    patched = options.patch is not None
    if not prompts[0].of_tokens:
        return [Pair(a, b, align_inputs(prompts[a], prompts[b])) for a, b in texts.pairs]

    by_place = options.by_place or patched

    def pair(a: int, b: int) -> Pair:
        both, decodes = (names[a], names[b]), prompts[a].source is not None
        read = (f"the decoder's tokens of {names[a]}", names[b]) if decodes else both
        if by_place:
            aligned = align_places(ids[a], ids[b], read, patched=patched)
        else:
            aligned = align(ids[a], ids[b], read, special)
        return Pair(a, b, aligned, sources_of(prompts[a], prompts[b], both, special, by_place) if decodes else None)

    if texts.alone is None:
        try:
            return [pair(a, b) for a, b in texts.pairs]
        except InputError as fault:
            if prompts[0].source is None:
                raise
            raise InputError(f"{fault}; with --decoder-prompt TEXT the decoder reads one text for all") from fault
    count = common_end([ids[texts.alone], *ids[: texts.runs]])
    if not count:
        raise InputError(
            "--shared: behind the contexts it has other tokens than alone; begin it with a word, or with a line break"
        )
    return [Pair(a, b, align_ends(ids[a], ids[b], count)) for a, b in texts.pairs]


class SideBySide:
    """Comparison of the blocks of prompts, made as the prompts go through them.

    A prompt's state of a block is kept until the last prompt that it is compared with has gone through that block.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Prompt],
        pairs: Sequence[Pair],
        layers: frozenset[int] | None,
        progress: Progress,
        context: Context | None,
        rounding: float,
    ) -> None:
        self._rounding = rounding
        self._session, self._prompts, self._pairs, self._layers = session, prompts, pairs, layers
        self._context = context
        self._last = {a: max(pair.b for pair in pairs if pair.a == a) for a in {pair.a for pair in pairs}}
        self._kept: dict[tuple[int, int], BlockState] = {}  # by prompt and block
        self._tick = ticker(progress, session.depth, len(prompts))
        self.rows: list[Row] = [{} for _ in pairs]
        self.errors: dict[tuple[int, int], float] = {}
        self.moves = Moves(rounding)
        for pair in pairs:
            if isinstance(pair.sources, Aligned):
                before, after = (needed(prompts[k].prepared)[STATES][0] for k in (pair.a, pair.b))
                self.moves.take({"e": relative_change(before, after, pair.sources)})
        self.routers = Routers()

    def listener(self, number: int) -> Listener:
        """Listener of one prompt; called in the order of the prompts, and again where a sweep begins anew."""
        decomposition, prompt = Decomposition(), self._prompts[number]

        def listen(run: BlockRun) -> None:
            step = decomposition.advance(run)
            self.errors[number, run.index] = step.terms.error
            if self._layers is None or run.index in self._layers:
                routed = list(self.routers.inside(run.parts.module).values())
                # a block on pictures may have other places than the block in front of it
                tokens = (prompt.input_ids if prompt.of_tokens else run.input).shape[1]
                carried = needed(decomposition.carried)
                self._see(number, state_of(self._session, run, step, carried, tokens, routed))
            self._tick(number)

        return listen

    def _see(self, number: int, state: BlockState) -> None:
        if self._context is not None:
            self._context.see(number, state)
        name = self._session.structure.block(state.index).parts.name
        for place, pair in enumerate(self._pairs):
            if pair.b == number:
                before = self._kept[pair.a, state.index]
                text, count = self._prompts[number].of_tokens, len(state.input)
                aligned = pair.aligned if text or count == pair.aligned.tokens[0] else every_place(count)
                row = compare_block(name, before, state, aligned, self._rounding, pair.sources)
                self.rows[place][state.index] = row
                self.moves.add(before, state, aligned, row, pair.sources)
                if self._last[pair.a] == number:
                    del self._kept[pair.a, state.index]
        if number in self._last:
            self._kept[number, state.index] = state


def logits_of(session: Session, wanted: Sequence[tuple[Given, slice]], *, classes: bool) -> list[Tensor] | str:
    """Logits at some tokens of every text, (tokens, vocabulary), or why they are not those of a next token.

    wanted: for every text, ids (1, N) or the input in their place, and which tokens. classes: whether the logits of a
    classifier of whole inputs, (1, classes), are accepted as well.
    """
    model, device = session.loaded.headed, session.loaded.device
    head = HeadTest(model, session.structure.stack, device, session.loaded.like)
    if not head.passes:
        return head.why_no_next_token() or ""
    passes = [LogitsPass(model, placed(given, device, model.dtype), rows) for given, rows in wanted]
    session.together([*head.passes, *passes])
    if classes and head.classes == "text":
        return [one.classes[0] for one in passes if one.classes is not None]
    why_not = head.why_no_next_token()
    if why_not is not None:
        return why_not
    return [one.found[0] for one in passes if one.found is not None]


def _pair_facts(
    pair: Pair,
    prompts: Sequence[Prompt],
    logits: list[Tensor] | str,
    words: Words,
    blocks: list[BlockComparison] | None,
) -> PairFacts:
    divergence, why_not = _divergence(pair, logits)
    return PairFacts(
        a=pair.a,
        b=pair.b,
        aligned=len(pair.aligned.a),
        runs=[_run(stretch, prompts[pair.a], prompts[pair.b], words) for stretch in pair.aligned.stretches()],
        kl=divergence,
        blocks=blocks,
        reasons={} if why_not is None else {"kl": why_not},
    )


def _run(stretch: Stretch, a: Prompt, b: Prompt, words: Words) -> AlignedRun:
    def says(prompt: Prompt, first: int) -> str:
        ids: list[int] = prompt.input_ids[0, first : first + stretch.tokens].tolist()
        return _shown(words.says(ids, "--prompt: "))

    return AlignedRun(
        a=stretch.a,
        b=stretch.b,
        tokens=stretch.tokens,
        text=says(a, stretch.a),
        text_b=None if stretch.same else says(b, stretch.b),
    )


def _divergence(pair: Pair, logits: list[Tensor] | str) -> tuple[float | None, str | None]:
    if isinstance(logits, str):
        return None, logits
    found = float(kl(logits[pair.a], logits[pair.b]))
    if math.isnan(found):
        return None, "the logits hold NaN"
    return (None, INFINITE) if math.isinf(found) else (found, None)


def _said(prompt: Prompt, words: Words) -> tuple[Callable[[int], str], list[str]]:
    """Function that gives a token's text, and the texts of all tokens of a prompt."""

    def said(token: int) -> str:
        return _shown(words.says([token], "--prompt: "))

    return said, [said(token) for token in prompt.input_ids[0].tolist()]


def _shown(text: str) -> str:
    """The text, cut and then escaped, so that no escape sequence is cut."""
    return clean(text if len(text) <= SHOWN_TEXT else text[: SHOWN_TEXT - 2] + "..")


# -- what is notable ---------------------------------------------------------------------------------------------


def _notable(blocks: Sequence[BlockComparison], pairs: Sequence[Pair], rounding: float) -> list[str]:
    """Sentences for a reader to see first, at most four; each rests on numbers of the report."""
    found = [*_most_moved(blocks, pairs, rounding), *_crossing(blocks, rounding), *_heads(blocks, rounding)]
    return [*found, *_amplified(blocks)]


def _most_moved(blocks: Sequence[BlockComparison], pairs: Sequence[Pair], rounding: float) -> list[str]:
    """A sentence on the block whose W' moved most, through what, and how far it would move with uniform attention."""
    sizes = [block.operator.relative for block in blocks if block.operator.relative is not None]
    known = [block for block in blocks if (block.operator.relative or 0.0) > rounding]
    if not known and any(block.cross is not None for block in blocks):
        return []  # a decoder's tokens read the encoder's, too
    if not known:
        placed = any(len(pair.aligned.a) < pair.aligned.tokens[0] == pair.aligned.tokens[1] for pair in pairs)
        beginning = all(pair.aligned.is_beginning() for pair in pairs)
        return [STILL + (BY_PLACE if placed else BEGINNING if beginning else "")] if sizes else []
    top = max(known, key=lambda block: block.operator.relative or 0.0)
    return [f"block {top.index}: W' {_moved(top.operator)}"]


def _moved(change: InputChange) -> str:
    parts = {"routing": change.routing or 0.0, "scale": change.scale or 0.0}
    first = max(parts, key=lambda name: parts[name])
    null = change.null.relative
    beside = "" if null is None else f"; with uniform attention it would be {100 * null:.3g} %"
    whole = f"moved most, by {100 * (change.relative or 0):.3g} % of its norm"
    return f"{whole}, more by {first} ({100 * parts[first]:.3g} %){beside}"


def _crossing(blocks: Sequence[BlockComparison], rounding: float) -> list[str]:
    """A sentence on the block whose W'_c moved most, in a decoder."""
    known = [(block.cross.relative or 0.0, block.index, block.cross) for block in blocks if block.cross is not None]
    moved, index, change = max(known, key=lambda one: one[:2], default=(0.0, 0, None))
    return [] if change is None or moved <= rounding else [f"block {index}: W'_c of cross-attention {_moved(change)}"]


def _heads(blocks: Sequence[BlockComparison], rounding: float) -> list[str]:
    heads = [(head.relative, block.index, head.head) for block in blocks for head in block.heads if head.relative]
    if len(heads) < 2 or max(heads)[0] <= rounding:
        return []
    (most, block, head), least = max(heads), min(heads)
    by = f"{100 * least[0]:.3g} %" if least[0] > rounding else "by rounding alone"
    return [
        f"block {block} head {head} moved most of all heads ({100 * most:.3g} %), block {least[1]} head {least[2]} "
        f"least ({by})"
    ]


def _amplified(blocks: Sequence[BlockComparison]) -> list[str]:
    known = [block for block in blocks if block.amplification is not None]
    top = max(known, key=lambda block: block.amplification or 0.0, default=None)
    if top is None or (top.amplification or 0.0) < STEEP:
        return []
    factor = f"{top.amplification:.3g} times as much as its input, relative to their tokens' norms"
    # no word of distances: a block whose output is shorter than its input raises the relative change by that alone
    return [f"block {top.index} raises the change most: its output changes {factor}"]
