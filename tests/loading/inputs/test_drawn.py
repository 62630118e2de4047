"""The drawn picture and the computed tone: of the shapes that a config asks for, the same in every run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from duat_cli.errors import InputError
from duat_cli.loading.inputs.drawn import RATE, TONES, default_inputs, drawn_picture, drawn_video, tone


@pytest.mark.parametrize(("side", "channels"), [(16, 3), ((20, 12), 1), (32, 4)])
def test_a_picture_has_the_shape_of_the_config(side: int | tuple[int, int], channels: int) -> None:
    picture = drawn_picture(SimpleNamespace(image_size=side, num_channels=channels))
    height, width = (side, side) if isinstance(side, int) else side
    assert picture.shape == (1, channels, height, width)
    assert torch.allclose(picture.mean(dim=(2, 3)), torch.zeros(1, channels), atol=1e-4)
    assert torch.allclose(picture.flatten(2).std(dim=2), torch.ones(1, channels), atol=1e-4)
    assert torch.equal(picture, drawn_picture(SimpleNamespace(image_size=side, num_channels=channels)))


def test_of_a_model_of_several_parts_its_shape_is_that_of_the_part_that_sees() -> None:
    eye = SimpleNamespace(image_size=16, num_channels=3)
    assert torch.equal(drawn_picture(SimpleNamespace(vision_config=eye)), drawn_picture(eye))


@pytest.mark.parametrize(
    ("stated", "shape"),
    [({"input_size": [1, 40, 56]}, (1, 40, 56)), ({"input_size": "large"}, (3, 224, 224)), ("none", (3, 224, 224))],
)
def test_a_model_of_timm_states_its_shape_in_its_own_way(stated: object, shape: tuple[int, ...]) -> None:
    assert drawn_picture(SimpleNamespace(pretrained_cfg=stated))[0].shape == shape


def test_its_parts_differ() -> None:
    picture = drawn_picture(SimpleNamespace(image_size=32, num_channels=3))
    patches = picture.unfold(2, 8, 8).unfold(3, 8, 8).reshape(3, 16, -1)[0]
    assert torch.cdist(patches, patches).fill_diagonal_(9).min() > 0.5


def test_the_frames_of_a_video_are_the_picture_each_further_to_the_right() -> None:
    config = SimpleNamespace(image_size=16, num_channels=3)
    picture, video = drawn_picture(config)[0], drawn_video(config, 4)
    assert video.shape == (1, 4, 3, 16, 16)
    assert all(torch.equal(frame, picture.roll(2 * k, dims=2)) for k, frame in enumerate(video[0]))


def test_a_tone_holds_its_frequencies() -> None:
    samples = tone()
    assert samples.dtype == np.float32
    assert np.abs(samples).max() <= 0.5
    for part, hertz in zip(np.split(samples, len(TONES)), TONES, strict=True):
        spectrum = np.abs(np.fft.rfft(part))
        assert abs(np.fft.rfftfreq(len(part), 1 / RATE)[spectrum.argmax()] - hertz) < 3


def test_what_cannot_be_made_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it reads `input_features`, and has no preprocessor_config"):
        default_inputs("input_features", SimpleNamespace(), tmp_path, False)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(tmp_path)
    assert default_inputs("input_features", SimpleNamespace(), tmp_path, False)["input_features"].shape == (1, 8, 100)


def test_samples_are_made_where_the_model_reads_samples(tmp_path: Path) -> None:
    found = default_inputs("input_values", SimpleNamespace(conv_stride=(5, 2)), tmp_path, False)["input_values"]
    assert found.shape == (1, len(tone()))
    assert abs(float(found.mean())) < 1e-4
    assert abs(float(found.std()) - 1) < 1e-3
