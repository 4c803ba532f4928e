"""Looks at what the forward passes over a cache are told: keys and values that depend on more than tokens and their places are nobody else's.

A transformers cache is given keys and values, never what they were computed from. So the pool's model is watched (a hook on its call), however ``generate`` or a loop by
hand comes to call it. Passes that go round the call are not seen, and then nothing that they compute is recorded.
"""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvd.integrations.errors import KvdCacheError

_HARMLESS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        "cache_position",
        "use_cache",
        "labels",
        "logits_to_keep",
        "num_logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
_PADDED = "the prompts are padded: pass their attention_mask up to the last new position, and position_ids that count each row's own tokens from 0"
_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class WatchedCache(ABC):
    """A cache that wants to know what the passes over it are told."""

    _announced: tuple[int, int] = (0, 0)
    """The positions, from and to, of the pass that was seen to begin and has not ended."""

    @abstractmethod
    def begin_pass(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
        """``model`` is about to compute over this cache from ``inputs``, its arguments by name but for the cache. Raises to refuse."""

    def end_pass(self) -> None:
        """However it ended: the next one is another, whether it is seen to begin or not."""
        self._announced = (0, 0)


def watch(model: Any) -> torch.nn.Module:
    """From now on this model tells its caches of passes; the module whose call it is, which stands inside of the wrappers of PEFT and ``torch.compile``."""
    module = getattr(model, "_orig_mod", model)
    module = module.get_base_model() if hasattr(module, "get_base_model") else module
    if module not in _watched:
        module.register_forward_pre_hook(_look, with_kwargs=True)
        module.register_forward_hook(_look_back, with_kwargs=True, always_call=True)
        _watched.add(module)
    return module  # type: ignore[no-any-return]


def _look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs} if args else kwargs
    for name, cache in named.items():
        if isinstance(cache, WatchedCache):
            cache.begin_pass(module, {other: value for other, value in named.items() if other != name})
            return


def _look_back(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, WatchedCache):
            value.end_pass()


def tokens_of(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The pass's tokens ``[rows, new]``.

    Raises:
        KvdCacheError: keys and values would depend on other inputs too, or for all that is known may do so; or on chance.
    """
    refused = sorted(name for name, value in inputs.items() if value is not None and name not in _HARMLESS)
    if refused:
        raise KvdCacheError(f"{', '.join(refused)}: keys and values in the pool are those of input_ids alone: use a DynamicCache for this")
    if inputs.get("use_cache") is False:
        raise KvdCacheError("use_cache=False, and a cache: leave out one of them")
    if model.training:
        raise KvdCacheError("the model is in training mode, where keys and values may depend on chance (dropout): call model.eval()")
    input_ids = inputs.get("input_ids")
    if input_ids is None or input_ids.ndim != 2:
        raise KvdCacheError("the cache wants input_ids [rows, positions]")
    return input_ids  # type: ignore[no-any-return]


def check_places(model: torch.nn.Module, inputs: Mapping[str, Any], start: int, paddings: Sequence[int]) -> None:
    """New positions follow the ``start`` ones there, each row's tokens count from 0 behind its padding, and see all of the row's own before them.

    Raises:
        KvdCacheError: mask or positions say something else.
    """
    input_ids = inputs["input_ids"]
    num_rows, num_new = input_ids.shape
    end = start + num_new
    padding = torch.tensor(paddings, device=input_ids.device)[:, None]
    columns = torch.arange(end, device=input_ids.device)
    mask = inputs.get("attention_mask")
    if mask is None:
        if any(paddings):
            raise KvdCacheError(_PADDED)
    elif not isinstance(mask, torch.Tensor) or mask.shape != (num_rows, end) or not bool(((mask == 0) | (mask == 1)).all()):
        raise KvdCacheError(
            f"the cache wants an attention_mask of 0 and 1, [{num_rows}, {end}], or none: others say who sees whom in a way of their own"
        )
    elif not torch.equal(mask.to(input_ids.device) != 0, columns >= padding):
        raise KvdCacheError("attention_mask: another padding than the cache was made for")
    cache_position = inputs.get("cache_position")
    if cache_position is not None and not torch.equal(cache_position.to(columns), columns[start:]):
        raise KvdCacheError(f"cache_position: the new positions are {start} to {end - 1}")
    position_ids = inputs.get("position_ids")
    if position_ids is None:
        if any(paddings) and "position_ids" in inspect.signature(model.forward).parameters:
            raise KvdCacheError(_PADDED)
        return
    places = columns[start:] - padding
    is_shaped = position_ids.shape[-1] == num_new and (position_ids.ndim == 1 or position_ids.shape[-2] in (1, num_rows))
    if not is_shaped or not bool(((position_ids.to(places) == places) | (places < 0)).all()):
        raise KvdCacheError(
            f"position_ids: keys and values in the pool are those of tokens that count from 0 on; these are positions {start} to {end - 1}"
        )
