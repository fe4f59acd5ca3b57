"""The decoder, written once: embeddings, blocks, language-model head. Attention is picked by the config.

Shapes: B batch, T new tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from keyshift.attention.frame import Frame, build_frame
from keyshift.attention.module import Attention, attentions
from keyshift.attention.shift import Shift
from keyshift.attention.source import KeySource, query_rms
from keyshift.cache import KeyshiftCache
from keyshift.checkpoint import load_strictly
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError

# transformers renamed the argument and the output between the ends of the range that is supported.
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class SwiGLU(nn.Module):
    """down(act(gate(x)) * up(x)), Llama's feed-forward layer."""

    def __init__(self, config: KeyshiftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))


class Block(GradientCheckpointingLayer):
    """Attention and, unless ``mlp="none"``, SwiGLU, each on a normalised input and added to the stream."""

    def __init__(self, config: KeyshiftConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer_idx)
        self.mlp = None
        if config.mlp == "swiglu":
            self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.mlp = SwiGLU(config)

    def forward(
        self, x_BTE: Tensor, frame: Frame, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.self_attn(self.input_layernorm(x_BTE), frame, cache, **kwargs)
        x_BTE = x_BTE + attended
        if self.mlp is not None:
            x_BTE = x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))
        return x_BTE, weights


class KeyshiftPreTrainedModel(PreTrainedModel):
    """Initialisation and what transformers needs to know."""

    config_class = KeyshiftConfig
    config: KeyshiftConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but every weight must be there and fit.

        Raises:
            UserError: a checkpoint of another model type, a damaged file, missing, unexpected or misshapen
                weights.
        """
        return load_strictly(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Every module once, children first. For code that is not its own transformers passes over modules
        without weights of their own, as `Attention` is, lest loaded weights be overwritten; `init` sees to
        that by itself.
        """
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Shift) and not getattr(module.weight, "_is_hf_initialized", False):
            init.copy_(module.weight, module.initial_weight().to(module.weight.dtype))
        elif isinstance(module, KeySource):
            module.draw_maps(self.config)
        elif isinstance(module, Attention) and self.config.key_map_init == "matched":
            self._match_keys(module)

    def _match_keys(self, attention: Attention) -> None:
        """Start keys at the queries' RMS, the content slice and the rotary slice each (GVA paper, appendix
        A)."""
        attention.source.match_keys(self.config)
        if attention.rope_key is not None:
            init.normal_(attention.rope_key.weight, std=query_rms(self.config) / self.config.hidden_size**0.5)


class KeyshiftModel(KeyshiftPreTrainedModel):
    """The decoder without its head."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: KeyshiftConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = None
        if config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the new tokens; see `KeyshiftForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("pass exactly one of input_ids and inputs_embeds")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        x_BTE = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        frame = build_frame(
            self.config,
            x_BTE,
            first_slot=0 if cache is None else int(cache.get_seq_length()),
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
        )
        if output_attentions and (self.config._attn_implementation != "eager" or frame.first_slot):
            raise UserError(
                "output_attentions=True needs attn_implementation='eager' and an empty cache: fused "
                "attention and cached decoding never form the weights"
            )
        if self.embed_positions is not None:
            x_BTE = x_BTE + self.embed_positions(self._table_rows(frame.positions_BT))
        hidden, attentions = [], []
        for block in self.layers[: self.config.num_hidden_layers]:  # fewer where a draft exits early
            hidden.append(x_BTE)
            x_BTE, weights = block(x_BTE, frame, cache, **kwargs)
            attentions.append(weights)
        x_BTE = self.norm(x_BTE)
        return BaseModelOutputWithPast(
            last_hidden_state=x_BTE,
            hidden_states=(*hidden, x_BTE) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            **{CACHE_NAME: cache},
        )

    def _cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        if self.gradient_checkpointing and self.training:
            if given is not None:
                raise UserError("gradient checkpointing in training mode cannot continue a cache: pass none")
            return None
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        if given is None and wanted:
            return KeyshiftCache(self.config)
        return given

    def _table_rows(self, positions_BT: Tensor) -> Tensor:
        if bool((positions_BT >= self.config.max_position_embeddings).any()):
            raise UserError(
                f"position {int(positions_BT.max())} is beyond max_position_embeddings="
                f"{self.config.max_position_embeddings} of position='learned'; shorten the input"
            )
        return positions_BT


class KeyshiftForCausalLM(KeyshiftPreTrainedModel, GenerationMixin):
    """The language model. A real transformers class: ``from_pretrained``, ``generate``, ``Trainer``."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: KeyshiftConfig):
        super().__init__(config)
        self.model = KeyshiftModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the new tokens, and the loss where labels are given.

        Args:
            input_ids: [B, T], integer; or ``inputs_embeds`` [B, T, E].
            attention_mask: [B, cached + T]: 0 for padding, on the left or on the right.
            position_ids: [B or 1, T]; restarting ones mark packed documents.
            document_ids: [B, cached + T]; a change marks a packed document's start.
            past_key_values, cache: the cache (transformers renamed the argument); written to in place.
            labels: [B, T], the tokens themselves (shifted here), -100 where there is nothing to predict.
            logits_to_keep: how many of the last positions get logits (0: all), or which.
            output_attentions: return the weights; needs ``attn_implementation="eager"``.

        Returns:
            ``loss`` (nats per predicted token), ``logits`` [B, T, V], the cache, and what was asked for.

        Raises:
            UserError: shapes that do not fit, padding between tokens, positions beyond a learned table.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_ids=document_ids,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            cache=cache,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
        )
        return result.to_tuple() if return_dict is False else result

    @torch.no_grad()
    def match_keys_(self, input_ids: Tensor, **inputs: Any) -> None:
        """Rescale the maps to keys so that, on these tokens, keys have the queries' RMS in every layer.

        A fresh model's are right on average over draws (``key_map_init="matched"``); one draw of a small
        model is off by a tenth. Call before training, with a batch of what will be trained on.
        """
        hooks = [
            layer.register_forward_pre_hook(lambda layer, args: layer.match_keys_(args[0]))
            for layer in attentions(self)
        ]
        try:
            self.model(input_ids, use_cache=False, **inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def constrain_(self) -> None:
        """Clamp the weights of ``shift_weights="clip"``; to be called after each optimiser step."""
        for module in self.modules():
            if isinstance(module, Shift):
                module.constrain_()

    def generate(self, *args: Any, cache_dtype: str | None = None, **kwargs: Any) -> Any:
        """As in transformers; and ``cache_dtype="int8"`` or ``"int4"`` rounds the cached content so.

        It may also be set on a generation config.

        Raises:
            UserError: ``cache_dtype`` beside a cache of the caller's, or one that this model cannot have.
        """
        settings = kwargs.get("generation_config") or self.generation_config
        cache_dtype = cache_dtype or getattr(settings, "cache_dtype", None)
        if cache_dtype is not None:
            chosen = {"use_cache": settings.use_cache, "cache_implementation": settings.cache_implementation}
            chosen.update(kwargs)
            caches = ("cache", "past_key_values", "cache_implementation")
            against = [name for name in caches if chosen.get(name) is not None]
            if chosen["use_cache"] is False:
                against.append("use_cache=False")
            if against:
                raise UserError(f"cache_dtype={cache_dtype!r} does not go with {against[0]}; leave one out")
            kwargs[CACHE_NAME] = KeyshiftCache(self.config, cache_dtype=cache_dtype)
        return super().generate(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused (`generate_batch` comes through here): its pages hold expanded keys and values."""
        raise UserError(
            "generate_batch pages the keys and values of every head, which a keyshift model does not cache; "
            "use generate() with a left-padded batch"
        )

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """The two-dimensional mask as it is: `forward` derives everything from it, for static caches too."""
        return attention_mask

    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:
        """Padding that transformers infers from pad tokens counts on the left only: after a token it is
        text."""
        return super()._prepare_attention_mask_for_generation(*args, **kwargs).long().cummax(-1).values

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate()` gets a `KeyshiftCache` of exactly the length it can need, unless told otherwise."""
        given = model_kwargs.get(CACHE_NAME)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get(CACHE_NAME)
        if given is None and isinstance(made, DynamicCache) and not made.offloading:
            made = model_kwargs[CACHE_NAME] = KeyshiftCache(self.config)
        if isinstance(made, KeyshiftCache):
            made.reserve(kwargs["max_cache_length"] if "max_cache_length" in kwargs else args[-1])


AutoModel.register(KeyshiftConfig, KeyshiftModel, exist_ok=True)
AutoModelForCausalLM.register(KeyshiftConfig, KeyshiftForCausalLM, exist_ok=True)
