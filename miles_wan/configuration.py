"""Loads and checks the configuration. In: a recipe (YAML) and dotted overrides. Out: a ``Config``, or one ``InputError``
with every fault. It checks what can be known without touching the data, a model or a device.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from miles_wan.combinations import check_config
from miles_wan.config import Config, RewardFunction, Section
from miles_wan.errors import InputError

AnyConfig = TypeVar("AnyConfig", bound=Section)

RECIPES = Path(__file__).resolve().parent.parent / "configs"


def recipe_paths(names: str) -> tuple[Path, ...]:
    """The files of a list of recipes with commas between them: each a path to a YAML file, or the name of one in
    ``configs/`` (a whole run) or ``configs/algorithms/`` (what one algorithm changes).

    Raises:
        InputError: one does not exist.
    """
    if os.path.isfile(names):
        return (Path(names),)
    found, faults = [], []
    for name in filter(None, (part.strip() for part in names.split(","))):
        candidates = [Path(name), RECIPES / f"{name}.yaml", RECIPES / "algorithms" / f"{name}.yaml"]
        path = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
        if path is None:
            faults.append(
                f"--recipe {name}: no such file and no such recipe; recipes are {', '.join(recipe_names())}, and to go with "
                f"one of them {', '.join(recipe_names('algorithms'))}"
            )
        else:
            found.append(path)
    faults += _order_faults(found)
    if faults or not found:
        raise InputError(faults or [f"--recipe {names!r} names none; recipes are {', '.join(recipe_names())}"])
    return tuple(found)


def _order_faults(paths: Sequence[Path]) -> list[str]:
    """Recipes of algorithms change a whole one, so they come after it, and no two may set the same field differently."""
    faults = []
    changes = [path for path in paths if path.parent.name == "algorithms"]
    whole = [place for place, path in enumerate(paths) if path not in changes]
    early = [
        path.stem for place, path in enumerate(paths) if path in changes and place < max(whole, default=len(paths))
    ]
    if early:
        faults.append(
            f"--recipe {', '.join(early)}: changes a whole recipe; give that one before it (tiny_ti2v,{early[0]})"
        )
    seen: dict[str, tuple[str, Any]] = {}
    for path in changes:
        for field, value in _leaves(_read_recipe(path, faults)).items():
            other, before = seen.setdefault(field, (path.stem, value))
            if before != value:
                faults.append(
                    f"--recipe {other},{path.stem}: {field} is {before!r} in one and {value!r} in the other; choose"
                )
    return faults


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def recipe_names(folder: str = ".") -> list[str]:
    """The recipes in ``configs/`` or in a folder of it."""
    return sorted(path.stem for path in (RECIPES / folder).glob("*.yaml"))


def load_config(recipes: Sequence[Path], overrides: Mapping[str, Any], extra_args: Sequence[str] = ()) -> Config:
    """``read_config``, and its combinations of fields are checked, too. Raises InputError with all faults."""
    config = read_config(recipes, overrides, extra_args)
    if faults := check_config(config):
        raise InputError(faults)
    return config


def read_config(recipes: Sequence[Path], overrides: Mapping[str, Any], extra_args: Sequence[str] = ()) -> Config:
    """Merge recipes, ``overrides`` and command line, the later over the earlier; every field is checked for itself.

    Args:
        recipes: YAML files.
        overrides: dotted key -> value. The key ``reward_model`` sets model and processor of every pickscore reward.
        extra_args: dotted overrides as they stand on a command line: ``--algorithm.clip-range 1e-3`` or with ``=``.

    Raises:
        InputError: all faults together.
    """
    faults: list[str] = []
    places = {key: value for key, value in overrides.items() if key != "reward_model"}
    tree = merged(recipes, places, extra_args, faults)
    if (reward_model := overrides.get("reward_model")) is not None:
        _set_reward_model(tree, reward_model)
    _fill_parallel_sizes(tree)
    return validated(Config, tree, faults)


def merged(
    recipes: Sequence[Path], overrides: Mapping[str, Any], extra_args: Sequence[str], faults: list[str]
) -> dict[str, Any]:
    """Recipes, overrides and command line as one tree, the later over the earlier; what is wrong with them goes to
    ``faults``."""
    tree: dict[str, Any] = {}
    for recipe in recipes:
        _merge(tree, _read_recipe(recipe, faults))
    parsed = _parse_args(extra_args, faults)
    for key, value in {**overrides, **parsed}.items():
        _set(tree, key, value, faults)
    return tree


def validated(model: type[AnyConfig], tree: Mapping[str, Any], faults: Sequence[str]) -> AnyConfig:
    """The configuration ``model`` of a tree. Raises InputError with ``faults`` and every fault of a field."""
    try:
        config = model.model_validate(tree)
    except ValidationError as error:
        raise InputError([*faults, *(_sentence(detail, model) for detail in error.errors())]) from None
    if faults:
        raise InputError(faults)
    return config


def dump_config(config: Section, path: Path) -> None:
    """Write the whole configuration as a recipe that ``load_config`` reads back equal. Raises InputError if it cannot."""
    try:
        path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise InputError([f"output_dir: {path} cannot be written ({error.strerror}); choose another folder"]) from error


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice: the second one would replace the first, a whole section even."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(
                problem=f"{', '.join(twice)} comes twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def _read_recipe(recipe: Path, faults: list[str]) -> dict[str, Any]:
    try:
        tree = yaml.load(recipe.read_text(), Loader=_Loader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        faults.append(f"recipe {recipe}: cannot be read as YAML ({' '.join(str(error).split())})")
        return {}
    if not isinstance(tree, dict):
        faults.append(f"recipe {recipe}: expected a mapping of sections, got {type(tree).__name__}")
        return {}
    return tree


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Put ``other`` over ``tree``, section by section; lists are replaced."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _parse_args(tokens: Sequence[str], faults: list[str]) -> dict[str, Any]:
    """``--a.b-c 1`` and ``--a.b_c=1`` to {"a.b_c": 1}; values are YAML."""
    parsed: dict[str, Any] = {}
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("--"):
            faults.append(f"{token!r}: expected a flag; overrides are written --section.field value")
            continue
        key, separator, value = token.removeprefix("--").partition("=")
        if not separator:
            if position == len(tokens) or tokens[position].startswith("--"):
                faults.append(f"{token}: a value is missing")
                continue
            value = tokens[position]
            position += 1
        try:
            parsed[key.replace("-", "_")] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):  # a date that is none, a number without end
            parsed[key.replace("-", "_")] = value
    return parsed


def _set(tree: dict[str, Any], key: str, value: Any, faults: list[str]) -> None:
    *parents, last = key.split(".")
    node: Any = tree
    for part in parents:
        if isinstance(node, dict):
            node = node.setdefault(part, {})
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            faults.append(f"--{key}: there is no {part!r} to set a field of")
            return
    if isinstance(node, list) and last.isdecimal() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        faults.append(f"--{key}: {'.'.join(parents)} has no fields")


def _set_reward_model(tree: dict[str, Any], model: str) -> None:
    reward = tree.setdefault("reward", {})
    functions = reward.setdefault("functions", [{"name": "pickscore"}]) if isinstance(reward, dict) else []
    for function in functions if isinstance(functions, list) else []:
        if isinstance(function, dict) and function.get("name") == "pickscore":
            function.update(model=model, processor=model)


def _fill_parallel_sizes(tree: dict[str, Any]) -> None:
    """By default all devices serve one engine and all hold a shard: tp_size and dp_size follow num_gpus."""
    sections = [tree.setdefault(name, {}) for name in ("rollout", "training", "cluster")]
    if not all(isinstance(section, dict) for section in sections):
        return
    rollout, training, cluster = sections
    try:
        devices = int(cluster.get("num_gpus", 1))
        others = int(rollout.get("num_engines", 1)) * int(rollout.get("sp_size", 1))
    except (TypeError, ValueError, OverflowError):
        return
    if others > 0:
        rollout.setdefault("tp_size", max(1, devices // others))
    training.setdefault("dp_size", max(1, devices))


def _sentence(detail: Any, model: type[Section]) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{place}: no such field{_suggestion(detail['loc'], model)}"
    if detail["type"] == "missing":
        flags = {"model": "--model", "model.path": "--model", "data": "--data-jsonl", "data.train": "--data-jsonl"}
        return f"{place}: required and not given" + (f"; pass {flags[place]}" if place in flags else "")
    return f"{place} = {reprlib.repr(detail['input'])}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _suggestion(location: Sequence[str | int], model: type[Section]) -> str:
    from difflib import get_close_matches

    names = all_fields(model)
    close = get_close_matches(".".join(map(str, location)), names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def all_fields(model: type[Section] = Config) -> list[str]:
    """Dotted names of all fields of a configuration, sections included."""
    names: list[str] = []

    def walk(section: type, prefix: str) -> None:
        for name, info in section.model_fields.items():  # type: ignore[attr-defined]
            names.append(prefix + name)
            if isinstance(info.annotation, type) and hasattr(info.annotation, "model_fields"):
                walk(info.annotation, f"{prefix}{name}.")

    walk(model, "")
    return names + [f"reward.functions.0.{name}" for name in RewardFunction.model_fields if model is Config]
