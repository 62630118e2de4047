"""What a class ties and the files hold twice is one parameter where it is the same, as in a whole load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paging import ids_of, in_parts, outputs, saved, whole
from safetensors.torch import load_file, save_file
from torch import Tensor

from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.paged import ties

TWICE = {
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "bart": ("model.shared.weight", "lm_head.weight"),
    "t5": ("shared.weight", "encoder.embed_tokens.weight"),
}


def doubled(model_type: str, folder: Path, moved: float = 0.0) -> Path:
    """Both of a tied pair in the file, the second one moved in its last value."""
    path = saved(model_type, folder) / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    first, second = TWICE[model_type]
    copy = tensors[first].clone()
    copy[-1, -1] += moved
    save_file(tensors | {second: copy}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("moved", [0.0, 0.5])
@pytest.mark.parametrize("model_type", TWICE)
def test_the_parameters_are_those_of_a_whole_load(
    model_type: str, moved: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ties, "ROWS_BYTES", 4096)  # several pieces of each
    known = whole(doubled(model_type, tmp_path, moved))
    with in_parts(tmp_path) as loaded:
        count = sum(p.numel() for p in known.model.parameters())
        assert sum(p.numel() for p in loaded.model.parameters()) == count
        ids, model, stack = ids_of(known), loaded.model, known.model
        if known.model.config.is_encoder_decoder:
            model, stack = model.get_encoder(), stack.get_encoder()
        assert torch.equal(outputs(model, ids), outputs(stack, ids))
        assert loaded.paged is not None
        assert loaded.paged.fingerprint(loaded.model) == fingerprint(known.model)
