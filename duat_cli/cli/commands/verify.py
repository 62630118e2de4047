"""`duat verify`."""

from __future__ import annotations

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND
from duat_cli.loading.inputs.request import EVERY


def verify(
    model: options.Model = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    image: options.Images = None,
    audio: options.Sounds = None,
    tensors: options.InputTensors = None,
    stack: options.Stacks = None,
    decoder_prompt: options.DecoderPrompts = None,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """Only the certificate, block by block: is the DUAT form the model's own output?

    Exit code: 0 exact, 1 not exact, 2 could not tell.
    """
    from duat_cli.analysis.opening import ModelRequest, PromptRequest, open_stacks
    from duat_cli.analysis.plan.task import Task
    from duat_cli.cli.shared.many import processes
    from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
    from duat_cli.cli.terminal.progress import Progress

    limit = options.parse_memory(memory)
    task = Task("verify", processes=processes())
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, task, device_map)
    files = options.input_files(image, audio, tensors, stack, decoder_prompt)
    texts = PromptRequest(prompt, prompts, max_tokens, files, chat=chat)
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of(output, form, json, no_color, wide=wide)

    announce(model, talk)
    with Progress(talk) as progress:
        reports = []
        for loaded, inputs in open_stacks(wanted, texts, progress):
            from duat_cli.analysis.inspect.verify import verify as compute

            reports.append(compute(loaded, inputs, progress))

    from duat_cli.report.tables.verify import render_verify
    from duat_cli.results.inspect import VerifyStacks

    several = VerifyStacks(duat_version=reports[0].duat_version, stacks=reports) if stack == EVERY else None
    presentation.emit_stacks(reports, several, render_verify, talk)
    return EXIT_SOUND if all(report.certificate.exact for report in reports) else EXIT_FINDINGS
