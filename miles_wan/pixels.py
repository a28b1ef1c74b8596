"""One way to bring a picture to the working size, for first frames and for the frames of clips. In: a picture. Out: one of
the size asked for. A leaf: it knows no file, no record and no model.
"""

from __future__ import annotations

from PIL import Image


def fill_size(image: Image.Image, width: int, height: int, *, pixel_aspect: float = 1.0) -> Image.Image:
    """Resize (Lanczos) until the picture covers ``width`` x ``height`` pixels, then cut out its middle.

    Args:
        pixel_aspect: width of a pixel of ``image`` over its height; those of the result are square.
    """
    shown = (image.width * pixel_aspect, image.height)
    scale = max(width / shown[0], height / shown[1])
    size = (round(shown[0] * scale), round(shown[1] * scale))
    resized = image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)
    left, top = (resized.width - width) // 2, (resized.height - height) // 2
    return resized.crop((left, top, left + width, top + height))
