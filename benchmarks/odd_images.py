"""Draw images that do not belong in a folder of photographs, for benchmarks/planted.py.

Each renderer takes a numpy Generator and returns a PIL image: the same generator state gives the same pixels.
`RENDERERS` lists them by name. `darkened` and `varied` change an image instead of drawing one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Array = NDArray[Any]
Colour = tuple[int, int, int]

BICUBIC = Image.Resampling.BICUBIC
SYLLABLES = (
    *("ba", "con", "der", "el", "fi", "gra", "hu", "in", "ju", "ker", "lo", "men"),
    *("nor", "or", "pa", "qui", "ra", "sta", "tur", "un", "ver", "wa", "yen", "zo"),
)


# ------------------------------------------------------------------------------------------------------------- helpers


def _image(values: Array) -> Image.Image:
    """Return an image from numbers in 0..255, of shape (H, W) or (H, W, 3)."""
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def _sides(rng: Generator, low: int, high: int) -> tuple[int, int]:
    """Draw a width and a height."""
    return int(rng.integers(low, high)), int(rng.integers(low, high))


def _between(rng: Generator, low: int, high: int) -> int:
    return int(rng.integers(low, max(high, low + 1)))


def _pick(rng: Generator, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _colour(rng: Generator, low: int = 0, high: int = 256) -> Colour:
    red, green, blue = (int(value) for value in rng.integers(low, high, 3))
    return red, green, blue


def _clouds(rng: Generator, width: int, height: int, cells: int) -> Array:
    """Return a smooth random surface of shape (height, width), about 0 to 1."""
    coarse = Image.fromarray(rng.random((cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((width, height), BICUBIC), np.float64)


@lru_cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Load one of matplotlib's own fonts, so that the text does not depend on the machine."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)


def _words(rng: Generator, count: int) -> str:
    return " ".join("".join(rng.choice(SYLLABLES, _between(rng, 1, 4))) for _ in range(count))


def _contrast(rng: Generator) -> tuple[Colour, Colour]:
    """Draw a light and a dark colour, in either order."""
    light, dark = _colour(rng, 170), _colour(rng, 0, 100)
    return (light, dark) if rng.random() < 0.5 else (dark, light)


# ----------------------------------------------------------------------------------------------------------- renderers


def noise(rng: Generator) -> Image.Image:
    """Noise: per pixel in colour or grey, in blocks, salt and pepper, cloudy, or in lines."""
    width, height = _sides(rng, 96, 320)
    flat = np.full((height, width, 3), 1.0) * _colour(rng, 60, 200)
    style = rng.integers(6)
    if style == 0:
        return _image(rng.integers(0, 256, (height, width, 3)))
    if style == 1:
        return _image(rng.normal(rng.uniform(80, 180), rng.uniform(30, 80), (height, width)))
    if style == 2:
        blocks = _image(rng.integers(0, 256, (_between(rng, 6, 30), _between(rng, 6, 30), 3)))
        return blocks.resize((width, height), Image.Resampling.NEAREST)
    if style == 3:
        specks = rng.random((height, width))
        return _image(np.where(specks[..., None] < 0.25, 0, np.where(specks[..., None] > 0.75, 255, flat)))
    if style == 4:
        octaves = [sum(_clouds(rng, width, height, 2**k) / 2**k for k in range(2, 7)) for _ in range(3)]
        surface = np.stack(octaves, -1)
        return _image(255 * (surface - surface.min()) / np.ptp(surface))
    lines = rng.normal(0, 60, (height, 1, 3)) + rng.normal(0, 25, (height, width, 3))
    return _image(flat + lines)


def scans(rng: Generator) -> Image.Image:
    """A scanned page of text, slightly rotated, on paper with texture."""
    width = _between(rng, 260, 440)
    height = int(width * 2**0.5)  # A4
    page = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(page)
    margin, top = int(width * rng.uniform(0.07, 0.14)), int(height * rng.uniform(0.05, 0.12))
    serif, size = _pick(rng, ("DejaVuSerif", "DejaVuSans", "DejaVuSansMono")), _between(rng, 8, 13)
    if rng.random() < 0.7:
        draw.text((margin, top), _words(rng, 3).title(), font=_font(f"{serif}-Bold", 2 * size), fill=30)
        top += 4 * size
    columns = _pick(rng, (1, 1, 2))
    measure = (width - (columns + 1) * margin) // columns
    for column in range(columns):
        _column(draw, rng, (margin + column * (measure + margin), top), measure, height - margin, _font(serif, size))
    return _scanned(page, rng)


def _column(
    draw: ImageDraw.ImageDraw,
    rng: Generator,
    corner: tuple[int, int],
    measure: int,
    bottom: int,
    font: ImageFont.FreeTypeFont,
) -> None:
    """Fill a column with paragraphs of text."""
    left, y = corner
    step = int(font.size * 1.45)
    while y < bottom - step:
        for _ in range(_between(rng, 3, 9)):
            line = _words(rng, 14)
            while font.getlength(line) > measure and " " in line:
                line = line.rpartition(" ")[0]
            draw.text((left, y), line, font=font, fill=40)
            y += step
            if y >= bottom - step:
                return
        draw.text((left, y), _words(rng, _between(rng, 1, 3)) + ".", font=font, fill=40)
        y += 2 * step


def _scanned(page: Image.Image, rng: Generator) -> Image.Image:
    """Lay the page on a scanner: rotation, paper colour and texture, a shadow along one side, sensor noise."""
    width, height = page.size
    angle, bed = float(rng.normal(0, 1.8)), _pick(rng, (60, 130, 235))
    sheet = np.asarray(page.rotate(angle, BICUBIC, fillcolor=255), np.float64)
    inside = np.asarray(Image.new("L", page.size, 255).rotate(angle, BICUBIC, fillcolor=0), np.float64) / 255
    paper = np.array([1.0, rng.uniform(0.95, 1.0), rng.uniform(0.84, 1.0)])
    light = rng.uniform(0.88, 1.0) + 0.05 * (_clouds(rng, width, height, 12) - 0.5)
    light -= rng.uniform(0, 0.25) * np.linspace(1, 0, width) ** 6
    colours = sheet[..., None] * paper * light[..., None]
    colours = colours * inside[..., None] + bed * (1 - inside[..., None])
    return _image(colours + rng.normal(0, 3, colours.shape))


def tiny(rng: Generator) -> Image.Image:
    """An icon of a few pixels."""
    width, height = _sides(rng, 10, 21)
    ground, ink = _contrast(rng)
    image = Image.new("RGB", (width, height), ground)
    draw, right, bottom, middle = ImageDraw.Draw(image), width - 3, height - 3, height // 2
    shape = _pick(rng, ("disc", "arrow", "box", "lines", "cross", "house"))
    if shape == "disc":
        draw.ellipse((2, 2, right, bottom), fill=ink)
    elif shape == "arrow":
        draw.polygon(((2, 2), (right, middle), (2, bottom)), fill=ink)
    elif shape == "box":
        draw.rectangle((2, 2, right, bottom), outline=ink, width=2)
    elif shape == "lines":
        for y in range(3, height - 2, 3):
            draw.line((2, y, right, y), fill=ink)
    elif shape == "cross":
        draw.line((2, 2, right, bottom), fill=ink, width=2)
        draw.line((2, bottom, right, 2), fill=ink, width=2)
    else:
        draw.polygon(((2, middle), (width // 2, 2), (right, middle)), fill=ink)
        draw.rectangle((4, middle, width - 5, bottom), fill=ink)
    return image


def charts(rng: Generator) -> Image.Image:
    """A bar, line, pie or scatter chart, with title, axes and legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=tuple(rng.uniform((3.2, 2.4), (5.2, 4.0))), dpi=_between(rng, 60, 90))
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    colours, count = _palette(rng), _between(rng, 3, 8)
    style = _pick(rng, ("bar", "bar", "line", "line", "pie", "scatter"))
    names = [_words(rng, 1) for _ in range(count)]
    if style == "pie":
        axes.pie(rng.uniform(1, 6, count), labels=names, colors=colours, startangle=float(rng.uniform(0, 360)))
    elif style == "bar":
        axes.bar(names, rng.uniform(1, 10, count), color=colours if rng.random() < 0.5 else colours[0])
    else:
        for name, colour in zip(names[:4], colours[:4], strict=False):
            if style == "line":
                axes.plot(rng.normal(0.1, 1, 30).cumsum(), color=colour, label=name)
            else:
                axes.scatter(*rng.normal(rng.normal(0, 2, (2, 1)), 1, (2, 25)), s=9, color=colour, label=name)
        axes.legend(fontsize=7)
    if style != "pie":
        axes.grid(bool(rng.random() < 0.5))
        axes.tick_params(labelsize=7)
    axes.set_title(_words(rng, 3))
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def _palette(rng: Generator) -> list[Any]:
    from matplotlib import colormaps

    colours = colormaps[_pick(rng, ("tab10", "Set2", "Dark2"))].colors
    return [colours[k] for k in rng.permutation(len(colours))]


def thermal(rng: Generator) -> Image.Image:
    """A thermal camera's false-colour picture: warm blobs before a cooler ground, sometimes with a scale."""
    from matplotlib import colormaps

    width, height = _pick(rng, ((80, 60), (60, 80), (64, 64)))
    y, x = np.mgrid[:height, :width]
    heat = 0.25 * _clouds(rng, width, height, 4) + rng.uniform(-0.1, 0.1) * y / height
    for _ in range(_between(rng, 1, 6)):
        spread = rng.uniform(0.05, 0.22, 2) * (width, height)
        away = ((x - rng.uniform(0, width)) / spread[0]) ** 2 + ((y - rng.uniform(0, height)) / spread[1]) ** 2
        heat = np.maximum(heat, rng.uniform(0.5, 1.0) * np.exp(-(away ** rng.uniform(0.7, 1.6)) / 2))
    heat += rng.normal(0, 0.012, heat.shape)  # the sensor's
    shown = np.clip((heat - heat.min()) / np.ptp(heat), 0, 1)
    if rng.random() < 0.4:
        shown[4 : height - 4, width - 6 : width - 3] = np.linspace(1, 0, height - 8)[:, None]
    scale = _between(rng, 2, 5)
    return _image(255 * colormaps["inferno"](shown)[..., :3]).resize((scale * width, scale * height), BICUBIC)


def microscopy(rng: Generator) -> Image.Image:
    """Many small cells: fluorescent on a dark ground, or stained on a light one."""
    width, height = _sides(rng, 160, 300)
    stained = rng.random() < 0.5
    cytoplasm, nuclei = np.zeros((height, width)), np.zeros((height, width))
    radius = rng.uniform(4, 9)
    for _ in range(int(rng.uniform(0.25, 0.6) * width * height / (np.pi * radius**2))):
        centre, size = rng.uniform(0, (width, height)), radius * rng.uniform(0.7, 1.3)
        shape = (centre, size, rng.uniform(0.6, 1.0), rng.uniform(0, np.pi))
        _add_cell(cytoplasm, *shape, strength=rng.uniform(0.5, 1.0))
        _add_cell(nuclei, shape[0] + rng.normal(0, 0.8, 2), 0.5 * size, *shape[2:], strength=rng.uniform(0.6, 1.0))
    if stained:
        ground, body, kernel = (np.array(c) for c in ((238, 228, 236), (222, 150, 190), (96, 52, 130)))
        colours = ground + 0.8 * cytoplasm[..., None] * (body - ground)
        colours = colours + 0.85 * nuclei[..., None] * (kernel - colours)
    else:
        body, kernel = _pick(rng, (((20, 170, 40), (60, 90, 250)), ((170, 30, 30), (70, 110, 255)), ((140,) * 3,) * 2))
        colours = 8 + 0.7 * cytoplasm[..., None] * np.array(body) + 0.8 * nuclei[..., None] * np.array(kernel)
    colours = colours + 6 * (_clouds(rng, width, height, 6)[..., None] - 0.5)
    return _image(colours + rng.normal(0, 4, colours.shape)).filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 1.0)))


def _add_cell(field: Array, centre: Array, size: float, ratio: float, angle: float, strength: float) -> None:
    """Draw a soft ellipse into its own patch of the field: the whole field would take a hundred times as long."""
    reach = int(size * 1.5) + 2
    left, top = (max(0, int(c) - reach) for c in centre)
    right, bottom = int(centre[0]) + reach, int(centre[1]) + reach
    patch = field[top:bottom, left:right]
    y, x = np.mgrid[top : top + patch.shape[0], left : left + patch.shape[1]]
    x, y = x - centre[0], y - centre[1]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    away = np.hypot(along / size, across / (size * ratio))
    np.maximum(patch, strength * np.clip((1.1 - away) * 3, 0, 1), out=patch)


def screens(rng: Generator) -> Image.Image:
    """A screenshot: a desktop with windows, or the screen of a telephone."""
    width, height = _pick(rng, ((400, 250), (360, 240), (320, 240), (200, 400), (220, 440)))
    theme = _pick(rng, (((250, 250, 250), (40, 40, 40)), ((38, 40, 46), (225, 225, 225))))
    accent = _colour(rng, 30, 220)
    image = Image.new("RGB", (width, height), _colour(rng, 40, 200))
    draw = ImageDraw.Draw(image)
    if height > width:
        _window(draw, rng, (0, 0, width, height), theme, accent)
        return image
    for _ in range(_between(rng, 1, 4)):
        wide, high = int(width * rng.uniform(0.5, 0.85)), int(height * rng.uniform(0.5, 0.8))
        left, top = _between(rng, 0, width - wide), _between(rng, 0, height - high - 16)
        _window(draw, rng, (left, top, left + wide, top + high), theme, accent)
    draw.rectangle((0, height - 16, width, height), fill=tuple(int(0.8 * value) for value in theme[0]))
    for k in range(_between(rng, 3, 9)):
        draw.rectangle((6 + 18 * k, height - 13, 16 + 18 * k, height - 3), fill=_colour(rng, 40, 230))
    return image


def _window(
    draw: ImageDraw.ImageDraw,
    rng: Generator,
    box: tuple[int, int, int, int],
    theme: tuple[Colour, Colour],
    accent: Colour,
) -> None:
    """Draw a title bar with buttons, a side bar of entries, lines of text, and buttons below."""
    left, top, right, bottom = box
    ground, ink = theme
    font, small = _font("DejaVuSans", 10), _font("DejaVuSans", 8)
    soft = tuple((3 * a + b) // 4 for a, b in zip(ground, ink, strict=True))
    draw.rectangle(box, fill=ground, outline=soft)
    draw.rectangle((left, top, right, top + 15), fill=accent)
    draw.text((left + 5, top + 2), _words(rng, 2).title(), font=font, fill=(255, 255, 255))
    for k, colour in enumerate(((235, 90, 80), (240, 190, 70), (90, 200, 90))):
        draw.ellipse((right - 12 * k - 12, top + 4, right - 12 * k - 5, top + 11), fill=colour)
    side = left + int((right - left) * rng.uniform(0.18, 0.32))
    draw.rectangle((left + 1, top + 16, side, bottom - 1), fill=soft)
    for y in range(top + 22, bottom - 12, 14):
        draw.text((left + 5, y), _words(rng, 1)[:6], font=small, fill=ink)
        words = _words(rng, 12)
        while words and small.getlength(words) > right - side - 12:
            words = words.rpartition(" ")[0]
        if y < bottom - 38 and rng.random() < 0.85:
            draw.text((side + 6, y), words, font=small, fill=ink)
    for k in range(_between(rng, 1, 3)):
        x = right - 60 * (k + 1)
        if x > side:
            draw.rounded_rectangle((x, bottom - 22, x + 52, bottom - 7), 4, fill=accent if k == 0 else soft)
            draw.text((x + 8, bottom - 20), _words(rng, 1)[:6].title(), font=small, fill=(255, 255, 255))


def letters(rng: Generator) -> Image.Image:
    """One large letter."""
    side = _between(rng, 96, 256)
    ground, ink = _contrast(rng)
    image = Image.new("RGB", (side, side), ground)
    style = _pick(rng, ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono-Bold"))
    centre = tuple(side * rng.uniform(0.45, 0.55, 2))
    letter = _pick(rng, "ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghkmnqrt")
    ImageDraw.Draw(image).text(centre, letter, ink, _font(style, int(side * rng.uniform(0.6, 0.9))), anchor="mm")
    return image


RENDERERS: dict[str, Callable[[Generator], Image.Image]] = {
    "noise": noise,
    "scans": scans,
    "tiny": tiny,
    "charts": charts,
    "thermal": thermal,
    "microscopy": microscopy,
    "screens": screens,
    "letters": letters,
}


# ------------------------------------------------------------------------------------------------------------- changes


def enlarged(values: Array, rng: Generator) -> Image.Image:
    """Enlarge a small grey image (H, W) of 0..255 to between 80 and 200 pixels."""
    side = _between(rng, 80, 200)
    return _image(values).resize((side, side), BICUBIC)


def darkened(photo: Image.Image, rng: Generator) -> Image.Image:
    """Return an almost black version of a photograph, with sensor noise, as one taken with the lens nearly covered."""
    values = np.asarray(photo, np.float64) * rng.uniform(0.015, 0.08)
    return _image(values + rng.normal(0, 1.2, values.shape))


def varied(image: Image.Image, rng: Generator) -> Image.Image:
    """Return a near-copy: up to 5% cropped from each side, brightness within 10%, slight noise."""
    width, height = image.size
    left, top, right, bottom = rng.uniform(0, 0.05, 4) * (width, height, width, height)
    cropped = image.crop((int(left), int(top), width - int(right), height - int(bottom)))
    values = np.asarray(cropped, np.float64) * rng.uniform(0.9, 1.1)
    return _image(values + rng.normal(0, rng.uniform(1, 4), values.shape))
