"""Encoded images are bit-identical to transformers'; unreadable images are explained."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.inputs import image_file
from optimizer.harness.inputs.image import encode
from optimizer.load.config import image_processor
from tests.harness import small_model
from tests.vision import encoded, picture, processor

SIZES = {
    "a photograph": (60, 80),
    "tall": (97, 41),
    "one pixel": (1, 1),
    "a line": (3, 200),
    "smaller than the crop": (9, 20),
    "huge": (900, 700),
    "as large as the model's": (32, 32),
}
PROCESSORS: dict[str, Any] = {
    "vit": processor("vit", size={"height": 32, "width": 24}),
    "deit": processor(
        "deit", size={"height": 37, "width": 41}, crop_size={"height": 32, "width": 30}
    ),
    "bit": processor("bit", size={"shortest_edge": 35}, crop_size={"height": 32, "width": 32}),
    "convnext": processor("convnext", size={"shortest_edge": 28}),
    "convnext, warped": processor("convnext", size={"shortest_edge": 384}),
    "efficientnet": processor(
        "efficientnet", size={"height": 33, "width": 33}, rescale_offset=True
    ),
    "not normalized": processor("vit", size={"height": 16, "width": 16}, do_normalize=False),
    "not rescaled": processor("vit", size={"height": 16, "width": 16}, do_rescale=False),
    "only cropped": processor("bit", do_resize=False, crop_size={"height": 31, "width": 18}),
    "nearest": processor("vit", size={"height": 20, "width": 20}, resample=0),
    "lanczos": processor("vit", size={"height": 20, "width": 20}, resample=1),
    "grey": processor("vit", size={"height": 16, "width": 16}, image_mean=[0.3], image_std=[0.2]),
}


def contract(settings: Any) -> Contract:
    sides = ["batch", settings.channels, settings.height, settings.width]
    document = small_model.contract("image-classification", image={**vars(settings)})
    document["inputs"][0]["axes"] = sides
    return Contract.from_json(document)


def settings(tmp_path: Path, name: str) -> Any:
    PROCESSORS[name].save_pretrained(tmp_path)
    return image_processor.read_settings(tmp_path, 1 if name == "grey" else 3)


@pytest.mark.parametrize("name", PROCESSORS)
def test_transformers_gives_the_same_bits(tmp_path: Path, name: str) -> None:
    made = contract(settings(tmp_path, name))
    theirs = image_processor.open_processor(tmp_path)
    for height, width in SIZES.values():
        image = picture(height, width, mode="L" if name == "grey" else "RGB")
        expected = theirs(image, return_tensors="np")["pixel_values"]
        ours = tasks.encode(made, None, [encoded(image), np.asarray(image)])["pixel_values"]
        assert ours.dtype == np.float32
        for row in ours:
            np.testing.assert_array_equal(row, np.asarray(expected[0], np.float32))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_becomes_what_transformers_makes_of_it(tmp_path: Path, mode: str) -> None:
    made = contract(settings(tmp_path, "vit"))
    theirs = image_processor.open_processor(tmp_path)
    form = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    image = picture(40, 50, mode="RGBA" if mode in ("LA", "RGBA") else "RGB").convert(mode)
    options = {"transparency": 3} if mode == "P" else {}
    file = encoded(image, form, **options)
    if form == "TIFF":  # read there by transformers, here as a JPEG where there is one
        file = encoded(image, "JPEG", quality=100)
    reopened = Image.open(io.BytesIO(file))
    expected = theirs(reopened, do_convert_rgb=True, return_tensors="np")["pixel_values"]
    ours = tasks.encode(made, None, [file])["pixel_values"]
    np.testing.assert_array_equal(ours, np.asarray(expected))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "BMP"])
def test_a_path_its_bytes_and_its_pixels_are_one_image(tmp_path: Path, form: str) -> None:
    made = contract(settings(tmp_path, "vit"))
    file = tmp_path / f"image.{form.lower()}"
    file.write_bytes(encoded(picture(40, 50), form))
    pixels = np.asarray(Image.open(file).convert("RGB"))
    batch = tasks.encode(made, None, [file, str(file), file.read_bytes(), pixels])
    for row in batch["pixel_values"][1:]:
        np.testing.assert_array_equal(row, batch["pixel_values"][0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_says(tmp_path: Path, orientation: int) -> None:
    made = contract(settings(tmp_path, "vit"))
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encoded(picture(40, 50), "JPEG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    batch = tasks.encode(made, None, [file, np.asarray(upright)])["pixel_values"]
    np.testing.assert_array_equal(batch[0], batch[1])


def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path: Path) -> None:
    made = contract(settings(tmp_path, "vit"))
    grey = np.asarray(picture(40, 50, mode="L"))
    deep = grey.astype(np.uint16) * 256 + 77
    file = encoded(Image.fromarray(deep))
    assert Image.open(io.BytesIO(file)).mode.startswith("I")
    batch = tasks.encode(made, None, [file, deep, grey])["pixel_values"]
    np.testing.assert_array_equal(batch[0], batch[2])
    np.testing.assert_array_equal(batch[1], batch[2])


def animation() -> bytes:
    frames = [picture(8, 8, seed=i) for i in range(2)]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])


def bomb() -> bytes:
    return encoded(Image.new("1", (20_000, 20_000)))


REFUSED = {
    "no file": ("no/such/file.png", "the file does not exist"),
    "a folder": (".", "it is not a file"),
    "a zero byte": ("a\0b.png", "the file does not exist|cannot be read"),
    "a text": (b"a text, and no image", "its format is not supported"),
    "another format": (encoded(picture(8, 8), "GIF"), "its format is not supported"),
    "cut off": (encoded(picture(64, 64), "JPEG")[:700], "damaged or truncated"),
    "a damaged PNG": (encoded(picture(64, 64))[:900] + bytes(200), "damaged or truncated"),
    "an animation": (animation(), "an animation of 2 images"),
    "a decompression bomb": (bomb, "pixels"),
    "floats": (np.zeros((4, 4, 3), np.float32), "is not an image"),
    "channels first": (np.zeros((3, 40, 40), np.uint8), "is not an image"),
    "nothing": (np.zeros((0, 4), np.uint8), "is not an image"),
    "no array": (7, "int is not an image"),
}


@pytest.mark.parametrize(("source", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_image_is_refused_with_a_sentence_and_stops_no_other(
    tmp_path: Path, source: Any, why: str
) -> None:
    made = contract(settings(tmp_path, "vit"))
    source = source() if callable(source) else source
    good, bad = encode(made, None, [encoded(picture(8, 8)), source])
    assert not good.problem
    with pytest.raises(InputError, match=why):
        tasks.encode(made, None, [source])
    assert bad.fix


def test_a_line_that_would_become_huge_is_refused(tmp_path: Path) -> None:
    made = contract(settings(tmp_path, "bit"))
    with pytest.raises(InputError, match="once its shorter side is resized"):
        tasks.encode(made, None, [np.zeros((1, 2_000_000), np.uint8)])


def test_noise_to_time_on_is_of_the_model_s_size(tmp_path: Path) -> None:
    made = contract(settings(tmp_path, "vit"))
    kind = tasks.look_up(made).inputs
    batch = tasks.encode(made, None, kind.neutral(made))
    assert batch["pixel_values"].shape == (8, 3, 32, 24)
    assert tasks.longest(made) == 1
    assert kind.lengthen(iter(["first", "second"]), 9) == "first"


WRONG = {
    "a side too many": {"height": 33},
    "an unknown filter": {"resample": "fancy"},
    "two channels": {"channels": 2},
    "a mean without std": {"std": None},
    "a std of zero": {"std": [0.5, 0.0, 0.5]},
    "a mean too few": {"mean": [0.5]},
    "no size": {"resize": None},
    "a resize that keeps no size": {"resize": {"shortest_edge": 32}},
    "a resize of another kind": {"resize": {"longest_edge": 32}},
    "an unknown key": {"colour": "red"},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, Any]) -> None:
    document = small_model.contract("image-classification")
    Contract.from_json(document)
    with pytest.raises(BundleError, match=r"somewhere\.json: .*image"):
        Contract.from_json({**document, "image": {**document["image"], **change}}, "somewhere.json")


def test_without_pillow_the_machine_is_said_to_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Exception, match="pip install pillow"):
        image_file.import_pillow()
