"""The reference pages say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_SPEC = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
assert _SPEC is not None
assert _SPEC.loader is not None
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)


def test_the_generated_pages_are_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == generate.configuration_markdown(), "run python docs/generate.py"
    assert (DOCS / "supervised-configuration.md").read_text() == generate.supervised_markdown(), "run docs/generate.py"
    assert (DOCS / "metrics.md").read_text() == generate.metrics_markdown(), "run python docs/generate.py"


def test_every_link_in_the_pages_leads_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
