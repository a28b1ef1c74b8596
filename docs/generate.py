"""Writes the reference pages that follow from the code: docs/configuration.md, docs/supervised-configuration.md and
docs/metrics.md (with summary.json).

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles_wan.config import Config, RewardFunction
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.summary import SUPERVISED_FIELDS
from miles_wan.tracking.names import metrics_table_markdown
from miles_wan.tracking.summary import summary_markdown

HERE = Path(__file__).resolve().parent
HEAD = """# Configuration

Generated from `miles_wan/config.py`. A run's configuration is a recipe (YAML, see `configs/`) plus overrides: every field has
a dotted flag, `--section.field value` or `--section.field=value`; values are YAML, so lists are `"[a, b]"`. Entries of
`reward.functions` go by number: `--reward.functions.0.weight 0.5`. Unknown keys and illegal combinations are refused together
before anything starts. `tp_size` and `dp_size` follow `cluster.num_gpus` unless they are given.
"""


SUPERVISED_HEAD = """# Configuration of supervised training

Generated from `miles_wan/supervised/config.py`: the fields of `miles-wan sft` ([supervised training](supervised.md)). As
elsewhere every field has a dotted flag, `--section.field value`, and values are YAML: `--data.buckets "[[832, 480], [480, 832]]"`.
"""


def configuration_markdown() -> str:
    """The page docs/configuration.md."""
    parts = [HEAD, *_sections(Config)]
    parts += ["## reward.functions[i]\n", _table("reward.functions.0.", RewardFunction.model_fields)]
    return "\n".join(parts)


def supervised_markdown() -> str:
    """The page docs/supervised-configuration.md."""
    rows = "".join(f"| `{key}` | {meaning} |\n" for key, meaning in SUPERVISED_FIELDS.items())
    summary = f"## summary.json\n\nWritten at the end of a run.\n\n| field | meaning |\n|---|---|\n{rows}"
    return "\n".join([SUPERVISED_HEAD, *_sections(SftConfig), summary])


def _sections(config: type[BaseModel]) -> list[str]:
    """A table of the fields outside all sections, then one for each section."""
    top = {name: info for name, info in config.model_fields.items() if not _is_section(info)}
    parts = ["## Run\n", _table("", top)]
    for name, info in config.model_fields.items():
        if _is_section(info):
            parts += [f"## {name}\n", _table(f"{name}.", info.annotation.model_fields)]  # type: ignore[union-attr]
    return parts


def metrics_markdown() -> str:
    """The page docs/metrics.md."""
    return metrics_table_markdown() + "\n" + summary_markdown()


def _table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, info in fields.items():
        if _is_section(info):
            rows += _table(f"{prefix}{name}.", info.annotation.model_fields).splitlines()[2:]  # type: ignore[union-attr]
        else:
            rows.append(f"| `{prefix}{name}` | {_default(info)} | {_choices(info)}{info.description} |")
    return "\n".join(rows) + "\n"


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def _choices(info: FieldInfo) -> str:
    """The values of a field that takes few."""
    parts = get_args(info.annotation) if get_origin(info.annotation) is not Literal else (info.annotation,)
    values = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
    return f"One of {', '.join(f'`{value}`' for value in values)}. " if len(values) > 1 else ""


def _default(info: FieldInfo) -> str:
    value: Any = info.get_default(call_default_factory=True) if info.default_factory is None else None
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "-"
    if isinstance(value, tuple):
        value = [item.name if isinstance(item, RewardFunction) else item for item in value]
    return f"`{value}`"


def main() -> None:
    """Write the pages."""
    (HERE / "configuration.md").write_text(configuration_markdown())
    (HERE / "supervised-configuration.md").write_text(supervised_markdown())
    (HERE / "metrics.md").write_text(metrics_markdown())


if __name__ == "__main__":
    main()
