"""Fields that change an answer under OpenAI's, vLLM's and llama.cpp's servers and are not computed here: refused by name, not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvd.gateway.errors import unsupported

_NO_TOOLS = "its name here is tools"
_NOT_HERE = "this server does not compute it"
_TEXT_ALONE = "this server takes and gives text alone"
_OWN_TEMPLATE = "the conversation goes through the model's own template"
_FOR_TEMPLATE = "if the model's template knows it, give it in chat_template_kwargs"
_NO_REASONING = "reasoning is not told apart from the rest of an answer"

_Refused = Mapping[str, tuple[tuple[Any, ...], str]]

_OF_OPENAI: _Refused = MappingProxyType(
    {
        "functions": ((None, []), _NO_TOOLS),
        "function_call": ((None, "none", "auto"), _NO_TOOLS),
        "modalities": ((None, ["text"]), "this server answers with text"),
        "audio": ((None,), "this server answers with text"),
        "web_search_options": ((None,), "this server does not search"),
        "suffix": ((None, ""), "the model continues texts, it does not fill gaps"),
        "reasoning_effort": ((None,), _FOR_TEMPLATE),
        "verbosity": ((None,), _FOR_TEMPLATE),
    }
)
_OF_VLLM: _Refused = MappingProxyType(
    {
        "guided_whitespace_pattern": ((None,), "a schema names its white space by x-guidance"),
        "structural_tag": ((None,), _NOT_HERE),
        "logits_processors": ((None, []), _NOT_HERE),
        "vllm_xargs": ((None, {}), _NOT_HERE),
        "skip_special_tokens": ((None, True), "special tokens have no text"),
        "truncation_side": ((None, "left"), "a prompt is cut at its beginning"),
        "prompt_embeds": ((None, []), _TEXT_ALONE),
        "mm_processor_kwargs": ((None, {}), _TEXT_ALONE),
        "chat_template": ((None,), _OWN_TEMPLATE),
        "documents": ((None, []), _OWN_TEMPLATE),
        "continue_final_message": ((None, False), "an answer is always a new turn"),
        "add_generation_prompt": ((None, True), "an answer is always a new turn"),
        "include_reasoning": ((None, True), _NO_REASONING),
        "thinking_token_budget": ((None,), _NO_REASONING),
        "repetition_detection": ((None,), _NOT_HERE),
    }
)
_OF_LLAMA_CPP: _Refused = MappingProxyType(
    {
        "n_predict": ((None,), "its name here is max_tokens"),
        "n_probs": ((None, 0), "its name here is logprobs"),
        "n_cmpl": ((None, 1), "its name here is n"),
        "post_sampling_probs": ((None, False), "log-probabilities are the model's own"),
        "repeat_penalty": ((None, 1), "its name here is repetition_penalty"),
        "repeat_last_n": ((None, -1), "penalties are for all tokens that there are"),
        "lora": ((None, []), "an adapter is named by model, and counts as it was trained"),
        "image_data": ((None, []), _TEXT_ALONE),
        "multimodal_data": ((None, []), _TEXT_ALONE),
        "typical_p": ((None, 1), _NOT_HERE),
        "typ_p": ((None, 1), _NOT_HERE),
        "min_keep": ((None, 0), _NOT_HERE),
        "n_indent": ((None, 0), _NOT_HERE),
        "t_max_predict_ms": ((None, 0, -1), "deadline_s bounds the whole request"),
        "top_n_sigma": ((None, -1), _NOT_HERE),
        "mirostat": ((None, 0), _NOT_HERE),
        "dynatemp_range": ((None, 0), _NOT_HERE),
        "xtc_probability": ((None, 0), _NOT_HERE),
        "dry_multiplier": ((None, 0), _NOT_HERE),
        "adaptive_target": ((None, -1), _NOT_HERE),
        "samplers": ((None,), _NOT_HERE),
        "grammar_lazy": ((None, False), "a grammar holds from the first token on"),
        "thinking_forced_open": ((None, False), _NO_REASONING),
        "thinking_budget_tokens": ((None, -1), _NO_REASONING),
        "reasoning_budget": ((None, -1), _NO_REASONING),
    }
)
_OF_CHATS: _Refused = MappingProxyType(
    {
        "add_special_tokens": ((None, False), "a chat has those of the model's template"),
        "echo": ((None, False), "an answer is always a new turn"),
    }
)
_OF_COMPLETIONS: _Refused = MappingProxyType(
    {
        "add_special_tokens": ((None, True), "a text begins as the model's texts do; give token ids for others"),
        "max_completion_tokens": ((None,), "a completion's name for it is max_tokens"),
        "top_logprobs": ((None,), "a completion's logprobs is the number itself"),
        "tools": ((None, []), "a completion goes through no template; chats are at /v1/chat/completions"),
        "chat_template_kwargs": ((None, {}), "a completion goes through no template; chats are at /v1/chat/completions"),
    }
)
"""By field: the values that ask for nothing, and why others are refused."""

_CHAT: _Refused = MappingProxyType({**_OF_OPENAI, **_OF_VLLM, **_OF_LLAMA_CPP, **_OF_CHATS})
_COMPLETION: _Refused = MappingProxyType({**_OF_OPENAI, **_OF_VLLM, **_OF_LLAMA_CPP, **_OF_COMPLETIONS})


def check_refused(raw: Mapping[str, Any], *, is_chat: bool) -> None:
    """Refuse what a request would have done to its answer elsewhere.

    Raises:
        ApiError: naming the field.
    """
    refused = _CHAT if is_chat else _COMPLETION
    for field, value in raw.items():
        if field in refused:
            harmless, reason = refused[field]
            if value not in harmless:
                raise unsupported(field, reason)
