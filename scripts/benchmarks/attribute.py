"""`attribute` against one forward and one backward pass of the model."""

from __future__ import annotations

from benchmarks.common import Row, interleaved, llama_shape, loaded_model, random_prompt

MORE = 3  # prompts beside the first: what is done once a model drops out of the difference


class Numbers:
    """A tokenizer that is not asked for much."""

    unk_token_id = None

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])


def attribute(runs: int) -> list[Row]:
    from duat_cli.analysis.attribute.targets import Asked, Chooser, Words
    from duat_cli.analysis.attribute.work import Work
    from duat_cli.analysis.session import Session
    from duat_cli.loading.words import Labels

    model, prompt = llama_shape(), random_prompt(49152, 128)
    session = Session(loaded_model(model), lambda *_: None, cache=False, factors=False)
    chooser = Chooser(Asked(), Words(Numbers()), Labels(None))

    def both(parameters: bool) -> None:
        model.requires_grad_(parameters)
        embedded = model.get_input_embeddings()(prompt.input_ids).detach().requires_grad_()
        logit = model(inputs_embeds=embedded, use_cache=False).logits[0, -1, 7]
        logit.backward()
        model.zero_grad()
        model.requires_grad_(False)

    def work(count: int) -> None:
        work = Work(session, chooser, lambda *_: None, 10, 10, count)
        found = work.run(dict.fromkeys(range(count), prompt))
        assert max(float(one.parts.residuals()[0].max()) for one in found) < 1e-5

    functions = [lambda: both(False), lambda: both(True), lambda: work(1), lambda: work(1 + MORE)]
    to_input, to_all, first, several = interleaved(functions, runs)
    each = (several - first) / MORE
    return [
        Row("forward and backward, to the input alone", to_input, "s"),
        Row("forward and backward, to the weights as well", to_all / to_input, "x"),
        Row("attribute, a prompt", each / to_input, "x", "<= 2.5"),
        Row("attribute, the first prompt, with what is found once a model", first / to_input, "x"),
    ]
