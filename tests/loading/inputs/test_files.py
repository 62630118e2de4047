"""Pictures, sounds and tensor files: what is read of them, and what is refused in one line."""

from __future__ import annotations

import struct
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import save_file
from transformers import ViTImageProcessor, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from duat_cli.errors import InputError
from duat_cli.loading.inputs.files import in_tiles, read_image, read_sound, read_tensors, read_wav


def sound(path: Path, values: Any, *, rate: int = 16_000, width: int = 2, channels: int = 1) -> str:
    """values: between -1 and 1, (time, channels)."""
    scale = float(1 << (8 * width - 1)) - 1
    numbers = np.round(np.asarray(values) * scale)
    raw = (numbers + 128).astype("u1") if width == 1 else numbers.astype(f"<i{width}")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw.tobytes())
    return str(path)


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """A folder whose processor makes 16 x 16 pictures between -1 and 1."""
    size = {"height": 16, "width": 16}
    ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(tmp_path / "seen")
    return tmp_path / "seen"


def test_a_picture_is_what_its_pixels_say(seen: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = read_image(str(tmp_path / "a.png"), seen, False)["pixel_values"]
    expected = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    assert torch.allclose(found, expected.float(), atol=1e-6)


def test_a_grey_picture_has_three_channels(seen: Path, tmp_path: Path) -> None:
    Image.new("L", (40, 30), 255).save(tmp_path / "a.png")
    found = read_image(str(tmp_path / "a.png"), seen, False)["pixel_values"]
    assert torch.allclose(found, torch.ones(1, 3, 16, 16))


def test_a_picture_is_turned_as_its_camera_was_held(seen: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned by 90 degrees, clockwise
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    found = read_image(str(tmp_path / "a.png"), seen, False)["pixel_values"]
    upright = read_image(Image.fromarray(np.rot90(pixels, -1).copy()), seen, False)["pixel_values"]
    assert torch.equal(found, upright)
    assert torch.equal(read_image(Image.open(tmp_path / "a.png"), seen, False)["pixel_values"], upright)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_eight_bits_a_value(mode: str, seen: Path, tmp_path: Path) -> None:
    """Pillow makes white of all values of 255 and more."""
    picture = Image.new(mode, (16, 16), 4000)
    assert f"(Pillow's mode {mode}); save it with 8" in refused(read_image, picture, seen, False, 2)
    picture.save(tmp_path / "a.tiff")
    assert "--image 2 (Image): more than 8 bits" in refused(read_image, picture, seen, False, 2)
    assert "a.tiff: more than 8 bits" in refused(read_image, str(tmp_path / "a.tiff"), seen, False)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_samples_lie_between_minus_one_and_one(width: int, tmp_path: Path) -> None:
    values = np.array([0.0, 0.5, -0.5, 1.0, -1.0])
    rate, found = read_wav(sound(tmp_path / "a.wav", values, width=width, rate=8000))
    assert rate == 8000
    assert found.dtype == np.float32
    assert np.abs(found - values).max() < 2 / (1 << (8 * width - 1)) + 1e-6


def test_channels_are_averaged(tmp_path: Path) -> None:
    values = np.array([[1.0, 0.0], [0.5, -0.5]])
    assert np.allclose(read_wav(sound(tmp_path / "a.wav", values, channels=2))[1], [0.5, 0.0], atol=1e-4)


def test_a_sound_is_what_its_extractor_makes_of_it(tmp_path: Path) -> None:
    values = np.sin(np.arange(1600) / 9) * 0.5
    Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(tmp_path)
    found = read_sound(sound(tmp_path / "a.wav", values), tmp_path, False)["input_values"][0].numpy()
    assert np.allclose(found, (values - values.mean()) / values.std(), atol=1e-3)


def refused(read: Any, *args: Any) -> str:
    with pytest.raises(InputError) as fault:
        read(*args)
    assert "\n" not in str(fault.value)
    return str(fault.value)


def test_another_rate_names_both(tmp_path: Path) -> None:
    WhisperFeatureExtractor().save_pretrained(tmp_path)
    said = refused(read_sound, sound(tmp_path / "a.wav", np.zeros(9), rate=44_100), tmp_path, False)
    assert "sampled at 44100 Hz, the model reads 16000 Hz" in said


BROKEN = {
    "not there": (None, "no such file"),
    "no wav": (b"hello there", "no PCM .wav file"),
    "empty": (b"", "no PCM .wav file"),
    "cut in its header": (b"RIFF" + struct.pack("<I", 99) + b"WAVEfmt ", "no PCM .wav file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_sound(case: str, tmp_path: Path) -> None:
    content, said = BROKEN[case]
    if content is not None:
        (tmp_path / "a.wav").write_bytes(content)
    assert said in refused(read_wav, str(tmp_path / "a.wav"))


def test_a_sound_that_ends_early(tmp_path: Path) -> None:
    """But for what a program wrote that did not know where it would end."""
    path = Path(sound(tmp_path / "a.wav", np.zeros(100)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-120])
    assert "it ends early, after 80 of 200 bytes" in refused(read_wav, str(path))
    assert whole[40:44] == struct.pack("<I", 200)
    path.write_bytes(whole[:4] + b"\xff" * 4 + whole[8:40] + b"\xff" * 4 + whole[44:])
    assert len(read_wav(str(path))[1]) == 100


def test_a_sound_without_samples(tmp_path: Path) -> None:
    assert "it holds no samples" in refused(read_wav, sound(tmp_path / "a.wav", []))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "not a file" in refused(read_tensors, str(tmp_path))


def test_a_corrupt_picture(seen: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    assert "no picture that Pillow can read" in refused(read_image, str(tmp_path / "a.png"), seen, False)


def test_without_pillow_the_extra_is_named(seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'duat-cli[vision]'" in refused(read_image, str(tmp_path / "a.png"), seen, False)


def test_a_checkpoint_that_does_not_say_how_its_input_is_made(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    said = refused(read_image, str(tmp_path / "a.png"), tmp_path, False)
    assert "has no preprocessor_config.json" in said
    assert "--inputs" in said


def test_an_extractor_of_pictures_reads_no_sound(seen: Path, tmp_path: Path) -> None:
    said = refused(read_sound, sound(tmp_path / "a.wav", np.zeros(9)), seen, False)
    assert str(seen) in said


def test_tensors_come_back_as_they_are(tmp_path: Path) -> None:
    save_file({"pixel_values": torch.arange(12.0).reshape(1, 3, 2, 2)}, tmp_path / "a.safetensors")
    assert read_tensors(str(tmp_path / "a.safetensors"))["pixel_values"].flatten().tolist() == list(range(12))
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    assert "no .safetensors file" in refused(read_tensors, str(tmp_path / "b.safetensors"))


def test_a_picture_in_tiles_is_told_of() -> None:
    assert in_tiles({"pixel_values": torch.zeros(1, 3, 9, 9)}) == ""
    assert in_tiles({"pixel_values": torch.zeros(1, 5, 3, 9, 9)}).startswith(", as 5 tiles or frames of a picture")
