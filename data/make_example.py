"""Writes the example data set beside this file: ``example.jsonl`` and ``images/``. Run: ``python data/make_example.py``.

In: a fixed seed. Out: three image records (landscape, 20:11 as 1280x704) and one text-to-video record.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
SIZE = (160, 88)
SEED = 7


def beach(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    draw.rectangle((0, 0, 160, 40), fill=(250, 190, 120))
    draw.ellipse((100, 14, 128, 42), fill=(255, 240, 180))
    draw.rectangle((0, 40, 160, 66), fill=(40, 110, 160))
    draw.polygon([(0, 66), (160, 60), (160, 88), (0, 88)], fill=(225, 200, 150))
    for _ in range(12):
        x, y = rng.randrange(150), rng.randrange(44, 62)
        draw.line((x, y, x + rng.randrange(6, 16), y), fill=(200, 225, 240))


def boat(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    draw.rectangle((0, 0, 160, 52), fill=(150, 205, 240))
    draw.rectangle((0, 52, 160, 88), fill=(30, 90, 150))
    draw.polygon([(50, 54), (110, 54), (98, 66), (62, 66)], fill=(150, 60, 40))
    draw.polygon([(80, 52), (80, 14), (106, 48)], fill=(250, 250, 245))
    for _ in range(4):
        x, y = rng.randrange(130), rng.randrange(4, 26)
        draw.ellipse((x, y, x + 24, y + 7), fill=(240, 248, 252))


def street(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    draw.rectangle((0, 0, 160, 88), fill=(20, 24, 50))
    for left in range(0, 160, 32):
        top = rng.randrange(8, 34)
        draw.rectangle((left + 2, top, left + 28, 68), fill=(50, 56, 80))
        for x in range(left + 6, left + 26, 8):
            for y in range(top + 5, 62, 10):
                lit = rng.random() < 0.6
                draw.rectangle((x, y, x + 3, y + 4), fill=(250, 220, 120) if lit else (30, 34, 60))
    draw.rectangle((0, 68, 160, 88), fill=(60, 60, 66))


RECORDS = [
    ("beach", beach, "Waves roll slowly onto a sandy beach while the sun sets over the sea."),
    ("boat", boat, "A small sailing boat glides to the right across calm blue water, clouds drift by."),
    ("street", street, "Windows light up one by one in a row of houses at night, the camera moves forward."),
    (None, None, "A red paper kite rises into a clear sky and dances in the wind."),
]


def main() -> None:
    rng = random.Random(SEED)
    (HERE / "images").mkdir(exist_ok=True)
    lines: list[dict[str, object]] = []
    for name, paint, prompt in RECORDS:
        line: dict[str, object] = {"input": prompt}
        if name is not None and paint is not None:
            image = Image.new("RGB", SIZE)
            paint(ImageDraw.Draw(image), rng)
            image.save(HERE / "images" / f"{name}.png", optimize=True)
            line["metadata"] = {"image_path": f"images/{name}.png"}
        lines.append(line)
    lines[-1]["negative_prompt"] = "blurred, flickering"
    (HERE / "example.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
