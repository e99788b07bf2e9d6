"""Drawn Latin letters, to pretrain a backbone for a stream of digits without sharing a class with it.

The fonts are those that come with matplotlib, which is not imported. Like scikit-learn's digits, each letter is a
bitmap of 4 x 4 bits a pixel, and a pixel is the number of white ones.

Left out are letters that stand for a digit at 8 pixels (0: O o Q D, 1: I i l, 2: Z z, 5: S s, 6: G b, 8: B, 9: g q), so
that no shape of a digit is learned under another name, and small letters that are their capital again once each is
scaled to fill the image (c k p u v w x).
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field, NonNegativeInt, PositiveInt

from fclmodels.data.sources.base import Catalogue, Source, list_arrays
from fclmodels.errors import UserError
from fclmodels.settings.schema import ImageSettings

LETTERS = tuple("ACEFHJKLMNPRTUVWXY" + "adefhjmnrty")
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmb10", "cmmi10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
BITS = 4  # a pixel's side
POINTS = 96  # in which glyphs are drawn before they are scaled
PENS = (0, 2)  # points by which strokes are widened on each side: a pen is broader than many of these fonts
TURN, SHEAR, STRETCH, SHIFT = 0.2, 0.25, 0.15, 0.03  # radians, slope, share of a side's length, share of the image


class Letters(Source):
    """drawn Latin letters in matplotlib's fonts, turned, sheared, scaled and noisy: grey, no digits, no download"""

    name = "letters"
    reads_root = False

    class Settings(ImageSettings):
        size: PositiveInt = Field(8, le=256, description="side in pixels of the drawn letters")
        samples: PositiveInt = Field(200, le=100_000, description="samples drawn of each letter")
        noise: float = Field(0.005, ge=0, le=0.5, description="share of the drawing's bits that are flipped")
        seed: NonNegativeInt = Field(0, description="seed of the drawing")

    settings: Settings

    @property
    def folders(self) -> tuple[Path, ...]:
        return (find_font_folder(),)

    def catalogue(self) -> Catalogue:
        images = np.stack([image for letter in LETTERS for image in self._draw(letter)])
        labels = np.repeat(np.arange(len(LETTERS)), self.settings.samples)
        return list_arrays(self.name, LETTERS, {None: (images, labels)})

    def _draw(self, letter: str) -> Iterator[np.ndarray]:
        """Yield samples [H, W] of a letter; the first ones are the same however many there are."""
        settings = self.settings
        random = np.random.default_rng([settings.seed, ord(letter)])
        glyphs = [draw_glyph(letter, font, pen) for font in FONTS for pen in PENS]
        for _ in range(settings.samples):
            glyph = glyphs[random.integers(len(glyphs))]
            yield average_bits(flip_bits(draw_bitmap(glyph, settings.size * BITS, random), settings.noise, random))


def find_font_folder() -> Path:
    """Return the folder of matplotlib's fonts, without importing matplotlib."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("data.source: letters are drawn in matplotlib's fonts: pip install 'fclflow[workflow]'")
    return Path(spec.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"


def draw_glyph(letter: str, font: str, pen: int) -> Image.Image:
    """Draw a letter in white on black that fills its image."""
    path = find_font_folder() / f"{font}.ttf"
    try:
        # The basic layout is in every build of Pillow, so that all draw alike.
        typeface = ImageFont.truetype(str(path), POINTS, layout_engine=ImageFont.Layout.BASIC)
    except OSError as problem:
        raise UserError(f"data.source: {path} cannot be read ({problem}). Install matplotlib again.") from problem
    left, top, right, bottom = typeface.getbbox(letter, stroke_width=pen)
    glyph = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(glyph).text((-left, -top), letter, 255, typeface, stroke_width=pen)
    return glyph.crop(glyph.getbbox())


def draw_bitmap(glyph: Image.Image, side: int, random: np.random.Generator) -> np.ndarray:
    """Draw the glyph's bits [side, side] under a random affine map, about as high as the image."""
    turn, shear = random.uniform(-TURN, TURN), random.uniform(-SHEAR, SHEAR)
    wide, high = random.uniform(1 - STRETCH, 1, 2)
    across, down = side * (0.5 + random.uniform(-SHIFT, SHIFT, 2))
    # A slender letter stays slender: no wider than its own proportions make it, and 3/4 of the image at most.
    wide *= min(0.75 * side, side * glyph.width / glyph.height) / glyph.width
    high *= side / glyph.height
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    back = np.linalg.inv(rotation @ np.array([[1, shear], [0, 1]]) @ np.diag([wide, high]))
    x, y = np.array([glyph.width, glyph.height]) / 2 - back @ [across, down]
    (a, b), (c, d) = back
    # Pillow's coefficients lead from a place in the result to one in the glyph.
    image = glyph.transform((side, side), Image.Transform.AFFINE, (a, b, x, c, d, y), Image.Resampling.BILINEAR)
    return np.asarray(image) >= 128


def flip_bits(bits: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    """Flip each bit with this probability."""
    return bits ^ (random.random(bits.shape) < share)


def average_bits(bits: np.ndarray) -> np.ndarray:
    """Return the share of white bits in each block, stretched to 0..255: uint8 [side / BITS, side / BITS]."""
    blocks = bits.reshape(len(bits) // BITS, BITS, -1, BITS)
    return np.rint(blocks.mean((1, 3)) * 255).astype(np.uint8)
