"""Draw docs/pictures/saliency.png: what two trained models look at.

    nox -s gallery                      # downloads the models
    python docs/saliency_picture.py     # writes the picture

The image and the sound are drawn here: words for a model that says whether text stands upright, and tones with their overtones,
as a spectrogram, for a model that rates speech. Needs pillow, matplotlib and onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import refgrad
from refgrad.backends import get_backend

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "build" / "gallery" / "models"
DIRECTION = MODELS / "rapidocr-onnxruntime-1.4.4" / "ch_ppocr_mobile_v2.0_cls_infer.onnx"
SPEECH = MODELS / "speechmos-0.0.1.1" / "model_v8.onnx"
PICTURE = ROOT / "docs" / "pictures" / "saliency.png"
WORDS, WIDTH, HEIGHT = "which way up?", 192, 48  # the size that the model of PaddleOCR takes
FRAMES, BANDS = 900, 120  # the size that the model of DNSMOS takes: 10 ms, and bands of the mel scale
PART = 300  # frames that are shown


def text() -> np.ndarray:
    """An image of words: (height, width), 0 is black and 1 is white."""
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    ImageDraw.Draw(image).text((8, 8), WORDS, font=ImageFont.load_default(size=26), fill=0)
    return np.asarray(image, np.float32) / 255


def tones() -> np.ndarray:
    """A spectrogram of three tones that rise and fall, with overtones: (frames, bands), −1 is silence."""
    time, band = np.arange(FRAMES)[:, None], np.arange(BANDS)[None]
    loudness = np.full((FRAMES, BANDS), -0.9, np.float32)
    for start, length, pitch in ((40, 70, 14), (130, 60, 18), (210, 70, 12)):
        for again in range(0, FRAMES, PART):
            inside = (time >= start + again) & (time < start + again + length)
            bend = pitch + 4 * np.sin(np.pi * (time - start - again) / length)
            for overtone in range(1, 7):
                line = np.exp(-(((band - overtone * bend) / 1.6) ** 2)) * 1.7 / overtone**0.5
                loudness = np.where(inside, np.maximum(loudness, line - 0.9), loudness)
    return loudness.astype(np.float32)


def saliency(path: Path, name: str, value: np.ndarray, axis: int | None = None) -> np.ndarray:
    """|d of the largest output / d the input|, as the recipe writes it, on ONNX Runtime."""
    written = refgrad.recipes.saliency(str(path), axis=axis)
    found: np.ndarray = get_backend("ort-cpu").prepare(written).run({name: value})[f"{name}_saliency"]
    return found[0]


def main() -> None:
    """Write the picture."""
    image, sound = text(), tones()
    pixels = np.broadcast_to(2 * image - 1, (1, 3, HEIGHT, WIDTH)).astype(np.float32)
    of_image = saliency(DIRECTION, "x", pixels, axis=1)
    of_sound = saliency(SPEECH, "input_1", sound[None])[:PART].T
    plt.rcParams.update({"font.size": 8, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 2, figsize=(7.2, 2.9), height_ratios=(1, 1.25), dpi=100)
    shown = (
        (image, "gray", "an image: does the text stand upright?", "upper"),
        (of_image, "magma", "where a pixel changes the answer", "upper"),
        (sound[:PART].T, "gray_r", "a spectrogram: how good is the speech?", "lower"),
        (of_sound, "magma", "where a tone changes the answer", "lower"),
    )
    for place, (array, colours, title, origin) in zip(
        (axes[0, 0], axes[0, 1], axes[1, 0], axes[1, 1]), shown, strict=True
    ):
        top = np.quantile(array, 0.995) if colours == "magma" else array.max()
        place.imshow(array, cmap=colours, origin=origin, aspect="auto", vmax=top, interpolation="nearest")
        place.set_title(title, fontsize=8)
        place.set_xticks([])
        place.set_yticks([])
    figure.tight_layout(pad=0.4)
    figure.savefig(PICTURE)
    small = Image.open(PICTURE).convert("RGB").quantize(96)
    small.save(PICTURE, optimize=True)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
