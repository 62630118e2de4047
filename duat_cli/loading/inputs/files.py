"""Pictures, sounds and prepared tensors as arguments of a forward pass. Errors are one line and name the file."""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor

from duat_cli.errors import InputError
from duat_cli.loading.declared.fields import PROCESSORS
from duat_cli.loading.inputs.request import label
from duat_cli.loading.quiet import foreign_errors, hushed
from duat_cli.text import clean, expanded, plural

PARTS = {AutoImageProcessor: "image_processor", AutoFeatureExtractor: "feature_extractor"}  # attributes of a processor
MAX_BYTES = 1 << 30  # most bytes of one file
_DEEP = ("I", "F")
_UNSTATED = 0x7FFF0000  # header sizes from this on, in bytes, are those of streams whose end was not known
Home = Any
"""Source of the processor: the checkpoint's folder, a Path; or, beside a model in memory, the processor itself."""


def read_image(given: Any, home: Home, trust_remote_code: bool, number: int = 1) -> dict[str, Tensor]:
    """A picture, from a file or of PIL, through the checkpoint's image processor. number: its number among those
    given."""
    where = label("--image", given, number)
    return pixels_of(open_picture(given, where), where, home, trust_remote_code)


def pixels_of(picture: Any, where: str, home: Home, trust_remote_code: bool) -> dict[str, Tensor]:
    """A picture of Pillow, or values (height, width, 3) between 0 and 255, through the image processor."""
    processor = load_processor(AutoImageProcessor, "--image", home, trust_remote_code)
    return _processed(where, lambda: processor(images=picture, return_tensors="pt"))


def in_tiles(made: Mapping[str, Tensor]) -> str:
    """A hint for a picture that a processor split into tiles or frames, where a model takes none so; else empty."""
    counts = [value.shape[1] for value in made.values() if value.ndim == 5 and len(value) == 1]
    many = plural(counts[0], "tile or frame", "tiles or frames") if counts else ""
    return f", as {many} of a picture: give what it reads with --inputs" if counts else ""


def open_picture(given: Any, where: str) -> Any:
    """A file of --image as Pillow's picture, or such a picture itself; RGB. where: its name in errors."""
    if not isinstance(given, str):
        return _upright(given, where)
    path = _regular("--image", given)
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InputError(
            "--image needs Pillow: pip install 'duat-cli[vision]', or give prepared tensors with --inputs"
        ) from error
    try:
        with Image.open(path) as picture:
            return _upright(picture, where)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{where}: no picture that Pillow can read ({clean(str(error))})") from error


def _upright(picture: Any, where: str) -> Any:
    """The picture turned upright by its EXIF orientation, as in transformers' `load_image`; RGB."""
    from PIL import ImageOps

    if picture.mode in _DEEP or picture.mode.startswith("I;"):  # Pillow would clip these to white, not scale them
        raise InputError(f"{where}: more than 8 bits a value (Pillow's mode {picture.mode}); save it with 8")
    return ImageOps.exif_transpose(picture).convert("RGB")


def read_sound(name: str, home: Home, trust_remote_code: bool) -> dict[str, Tensor]:
    """A .wav file through the checkpoint's feature extractor, which fixes the sampling rate."""
    wanted, extractor = _extractor(home, trust_remote_code, "--audio")
    rate, samples = read_wav(name)
    if rate != wanted:
        raise InputError(
            f"--audio {clean(name)}: sampled at {rate} Hz, the model reads {wanted} Hz; resample it first, as with "
            f"ffmpeg -i IN -ar {wanted} OUT.wav"
        )
    return _processed(f"--audio {clean(name)}", lambda: extractor(samples, sampling_rate=rate, return_tensors="pt"))


def sound_of(samples: Any, rate: int, home: Home, trust_remote_code: bool) -> dict[str, Tensor]:
    """Samples (time,) through the checkpoint's feature extractor."""
    wanted, extractor = _extractor(home, trust_remote_code, "the tone")
    return _processed(f"the tone {rate} Hz", lambda: extractor(samples, sampling_rate=wanted, return_tensors="pt"))


def read_wav(name: str) -> tuple[int, Any]:
    """Samples a second, and the samples of a PCM .wav file between -1 and 1, float32 (time,). Channels are averaged."""
    path = _regular("--audio", name)
    try:
        with wave.open(str(path), "rb") as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            stated = file.getnframes() * channels * width
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        raise InputError(f"--audio {clean(name)}: no PCM .wav file ({clean(str(error) or 'it ends early')})") from error
    if len(raw) < stated < _UNSTATED:
        raise InputError(f"--audio {clean(name)}: it ends early, after {len(raw)} of {stated} bytes; fetch it again")
    kinds: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}
    if width not in kinds:
        raise InputError(f"--audio {clean(name)}: {8 * width} bits a sample; expected 8, 16 or 32")
    whole = len(raw) // (width * channels) * width * channels
    values = np.frombuffer(raw[:whole], dtype=kinds[width]).astype(np.float32).reshape(-1, channels)
    if not len(values):
        raise InputError(f"--audio {clean(name)}: it holds no samples")
    centred = values - 128 if width == 1 else values
    return rate, (centred / float(1 << (8 * width - 1))).mean(axis=1)


def read_tensors(given: str | Mapping[str, Any], number: int = 1) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a mapping, by the forward pass's argument names."""
    where = label("--inputs", given, number)
    if not isinstance(given, str):
        with foreign_errors(f"{where}: it holds what is no tensor", InputError):
            return {str(name): torch.as_tensor(value).detach().cpu() for name, value in given.items()}
    path = _regular("--inputs", given)
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{where}: no .safetensors file ({clean(str(error))})") from error


def _regular(option: str, name: str) -> Path:
    path = expanded(name)
    if not path.is_file():
        raise InputError(f"{option} {clean(name)}: {'not a file' if path.exists() else 'no such file'}")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{option} {clean(name)}: {path.stat().st_size} bytes; expected at most {MAX_BYTES}")
    return path


def has_processor(home: Home) -> bool:
    """Whether there is a processor, or its config in the checkpoint's folder."""
    return any((home / file).is_file() for file in PROCESSORS) if isinstance(home, Path) else home is not None


def load_processor(kind: Any, option: str, home: Home, trust_remote_code: bool) -> Any:
    """A checkpoint's processor of a kind; InputError where there is none, or it cannot be loaded."""
    if not has_processor(home):
        lacking = f"{clean(str(home))} has no {PROCESSORS[0]}" if isinstance(home, Path) else "no processor was given"
        raise InputError(f"{option}: {lacking}, which says how its input is made; give prepared tensors with --inputs")
    if not isinstance(home, Path):
        return getattr(home, PARTS.get(kind, ""), home)
    with hushed(), foreign_errors(f"{clean(str(home))}: its {PROCESSORS[0]} cannot be loaded", InputError):
        return kind.from_pretrained(str(home), local_files_only=True, trust_remote_code=trust_remote_code)


def _extractor(home: Home, trust_remote_code: bool, option: str) -> tuple[int, Any]:
    extractor = load_processor(AutoFeatureExtractor, option, home, trust_remote_code)
    rate = getattr(extractor, "sampling_rate", None)
    if not isinstance(rate, int):
        own = f"{clean(str(home))}: its {PROCESSORS[0]}" if isinstance(home, Path) else type(extractor).__name__
        raise InputError(f"{option}: {own} names no sampling_rate, so it is no sound's")
    return rate, extractor


def _processed(where: str, process: Any) -> dict[str, Tensor]:
    with hushed(), foreign_errors(f"{where}: the checkpoint's processor fails", InputError):
        return {key: value for key, value in process().items() if isinstance(value, torch.Tensor)}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of tensors: their names, dtypes, shapes and values."""
    hashed = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key].contiguous()
        hashed.update(f"{key} {value.dtype} {list(value.shape)}\n".encode())
        hashed.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return hashed.hexdigest()
