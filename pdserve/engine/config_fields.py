"""Reads fields of a JSON object one by one, and rejects fields that were not read. Pure.

An unknown field may change the mathematics, so it is rejected by name. HARMLESS and NEUTRAL list the fields that do not
(checked against the configurations that transformers 4 and 5 write, and those on the Hub).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from pdserve.core.errors import ModelError
from pdserve.core.setting import LARGEST_COUNT

# These do not change the logits with any value.
_HARMLESS_NAMES: Final = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    attention_dropout attn_implementation attn_pdrop begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout
    id2label initializer_range keys_to_ignore_at_inference label2id length_penalty max_length max_sequence_length
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict
"""
HARMLESS: Final = frozenset(_HARMLESS_NAMES.split())

# These do not change the logits if they have the given value, or null.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),  # for families without it; a family that has it reads it
    "attn_logit_softcapping": (0, 0.0),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({},),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}


LARGEST_NUMBER: Final = 1e15


@final
class Fields:
    """One JSON object; `path` is the prefix of names in errors. A null value counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """True even if the value is null, because null has a meaning for some fields."""
        return name in self._values

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = LARGEST_COUNT) -> int:
        value = self._present(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, value, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._present(name, default)
        if type(value) not in (int, float) or not above < value <= LARGEST_NUMBER:
            raise self.error(name, value, f"a number above {above:g}, at most {LARGEST_NUMBER:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, value, "one of " + ", ".join(choices))
        return value

    def refuse_unread(self) -> None:
        """Raises ModelError for the first field that was not read and is not known to be harmless."""
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS or value is None:
                continue
            if name in NEUTRAL:
                if value in NEUTRAL[name]:
                    continue
                raise self.error(name, value, f"{NEUTRAL[name][0]}, the only value that this architecture can serve")
            raise self.error(name, value, "no such field: it may change the mathematics and is not implemented")

    def error(self, name: str, seen: object, expected: str) -> ModelError:
        return ModelError(self._path + name, seen, expected)

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "nothing", "a value: this field is required")
        return value
