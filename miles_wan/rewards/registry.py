"""Rewards by name. In: a built-in name or ``package.module:function``. Out: the function that scores a batch, or an
InputError that says what is wrong with the name. A new reward is one file and one line of ``BUILT_IN``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_wan.config import RewardFunction
from miles_wan.errors import InputError
from miles_wan.records import RewardInput

if TYPE_CHECKING:
    import torch

RewardCallable = Callable[[Sequence[RewardInput]], Sequence[float]]
"""Scores a batch: one finite number per video, higher is better."""

# name -> factory(function: RewardFunction, *, device, dtype) -> RewardCallable. Written as text, so that naming a reward
# does not import the libraries of all of them.
BUILT_IN: Mapping[str, str] = {
    "clip": "miles_wan.rewards.clip:from_config",
    "pickscore": "miles_wan.rewards.pickscore:from_config",
}


def build(function: RewardFunction, *, device: torch.device, dtype: torch.dtype) -> RewardCallable:
    """The reward that ``function`` names, ready to score on ``device``. Raises InputError if there is no such reward."""
    if function.name in BUILT_IN:
        return load_function(BUILT_IN[function.name])(function, device=device, dtype=dtype)
    return user_function(function.name)


def user_function(name: str) -> RewardCallable:
    """A user's own reward ``package.module:function``; see ``RewardInput`` for its signature. Raises InputError."""
    if ":" not in name:
        known = ", ".join(sorted(BUILT_IN))
        raise InputError([f"reward {name!r}: is not built in ({known}); name your own as package.module:function"])
    function = load_function(name)
    if inspect.iscoroutinefunction(function):
        raise InputError([f"reward {name!r}: is an async function; write a plain def f(batch) that returns the scores"])
    try:
        inspect.signature(function).bind([])
    except TypeError as error:
        raise InputError([f"reward {name!r}: cannot be called with one batch ({error}); write def f(batch)"]) from error
    except ValueError:  # a compiled function shows no signature
        pass
    return function


def load_function(name: str) -> Callable[..., Any]:
    """Import ``package.module:function``. Raises InputError naming what is missing and the remedy."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InputError([f"reward {name!r}: is not of the form package.module:function"])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError([_missing_module(name, module_name, error)]) from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise InputError(
            [f"reward {name!r}: importing {module_name} failed ({type(error).__name__}: {error})"]
        ) from error
    if not hasattr(module, attribute):
        raise InputError([f"reward {name!r}: module {module_name} ({module.__file__}) has no {attribute!r}"])
    function = getattr(module, attribute)
    if not callable(function) or inspect.isclass(function):
        raise InputError([f"reward {name!r}: is a {_kind(function)}; name a function that takes a batch"])
    return function


def _missing_module(name: str, module_name: str, error: ModuleNotFoundError) -> str:
    if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
        return f"reward {name!r}: there is no module {error.name!r}; install it or put its folder on PYTHONPATH"
    return f"reward {name!r}: {module_name} itself imports {error.name!r}, which is missing; install it"


def _kind(value: Any) -> str:
    return "class" if inspect.isclass(value) else type(value).__name__
