"""First-frame images. In: paths. Out: digest and size of what really decodes, or the fault; and which images a working
size crops. It knows no record file and no model.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import ExifTags, Image, UnidentifiedImageError

from miles_wan.records import PromptRecord

# A warning names so many images and counts the rest.
_NAMED = 5
_ORIENTATION = ExifTags.Base.Orientation
_TURNED = (5, 6, 7, 8)  # orientations by a quarter turn


@dataclass(frozen=True)
class CheckedImage:
    """``sha256`` of the file's bytes (empty if it cannot be read), ``fault`` None if the image decodes."""

    sha256: str
    fault: str | None


@dataclass(frozen=True)
class CropReport:
    """Images whose aspect ratio is far from the working size: ``names`` are file names, ``images`` counts them all."""

    names: tuple[str, ...]
    images: int
    width: int
    height: int
    ratio: float

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def warning(self) -> str | None:
        """One sentence for the user, None if no image is far off."""
        if not self.names:
            return None
        more = f" and {self.count - _NAMED} more" if self.count > _NAMED else ""
        return (
            f"{self.count} of {self.images} images have a shape that differs from the working size "
            f"{self.width}x{self.height} by more than a factor of {self.ratio:g} and are cropped: "
            f"{', '.join(self.names[:_NAMED])}{more}; "
            f"choose rollout.width and rollout.height to fit, or crop them yourself"
        )


def check_images(paths: Iterable[Path]) -> dict[Path, CheckedImage]:
    """Decode every image once, in threads (PIL decodes outside the interpreter lock)."""
    unique = list(dict.fromkeys(paths))
    with ThreadPoolExecutor() as pool:
        return dict(zip(unique, pool.map(_check_image, unique), strict=True))


def crop_report(records: Sequence[PromptRecord], width: int, height: int, ratio: float) -> CropReport:
    """Which images are cropped hard at ``width`` x ``height`` pixels, that is by more than the factor ``ratio``.

    Records without an image do not count.
    """
    paths = list(dict.fromkeys(record.image_path for record in records if record.image_path is not None))
    working = width / height
    far = [path for path in paths if _factor(_aspect(path), working) > ratio]
    return CropReport(tuple(Path(path).name for path in far), len(paths), width, height, ratio)


def _check_image(path: Path) -> CheckedImage:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return CheckedImage("", f"image {path} does not exist; relative paths start at the folder of the data file")
    except OSError as error:
        return CheckedImage("", f"image {path} cannot be read ({error.strerror or error}); check path and rights")
    digest = hashlib.sha256(content).hexdigest()
    try:
        with Image.open(io.BytesIO(content)) as image:
            deep = image.mode.startswith(("I", "F"))
            image.convert("RGB")  # decodes every pixel: a truncated file shows only here
    except UnidentifiedImageError:
        return CheckedImage(digest, f"image {path} is not an image that can be read; replace it by a PNG or JPEG")
    except Exception as error:  # each decoder has errors of its own for damaged files
        return CheckedImage(digest, f"image {path} cannot be decoded ({error}); replace the file")
    if deep:
        return CheckedImage(
            digest, f"image {path} has more than 8 bits a channel and would turn white; save it with 8 bits"
        )
    return CheckedImage(digest, None)


def _aspect(path: str) -> float:
    with Image.open(path) as image:
        aspect = image.width / image.height
        turned = image.getexif().get(_ORIENTATION, 1) in _TURNED  # the engine turns it upright when it loads it
    return 1 / aspect if turned else aspect


def _factor(first: float, second: float) -> float:
    return max(first / second, second / first)
