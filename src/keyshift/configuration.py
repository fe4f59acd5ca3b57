"""KeyshiftConfig: a model is a config, and a config picks three things (keys, position, shift)."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2CLS

from keyshift.errors import UserError, nearest

CHOICES: dict[str, tuple[str, ...]] = {
    "attention": ("mha", "mqa", "gqa", "mla", "shared_kv", "gva"),
    "position": ("rope", "decoupled_rope", "alibi", "learned", "none"),
    "rope_allocation": ("additive", "carved"),
    "shift": ("none", "k", "v", "kv", "qkv"),
    "shift_weights": ("free", "gate", "clip"),
    "shift_heads": ("kv", "query"),
    "shift_init": ("uniform", "spread", "leaning", "identity"),
    "key_map_init": ("matched", "standard"),
    "mlp": ("swiglu", "none"),
    "projection_bias": ("none", "qkv", "all"),
}
"""Every field that names a choice, and what it may be."""

GROUPED = ("gqa", "shared_kv", "gva")
"""Mechanisms whose number of key/value heads is free."""

RECONSTRUCTED = ("mla", "shared_kv", "gva")
"""Mechanisms whose keys are computed from the cached stream."""


CARRIED = not __name__.startswith("keyshift.")
"""Whether this file is the copy that a checkpoint carries (`keyshift.hub.carried`)."""


class KeyshiftConfig(PreTrainedConfig):
    """Sizes (named as in Llama) and the three axes: where keys come from, position, shift.

    Sizes that a mechanism has no use for are ignored (``kv_lora_rank`` without MLA), so that variants can
    share a table of sizes; choices that contradict each other raise `UserError`, naming both and a way out.

    Args:
        attention: where keys come from: ``mha``, ``mqa``, ``gqa`` project them; ``mla`` computes them from a
            latent; ``shared_kv`` uses the value itself; ``gva`` maps the value to a key per query head.
        position: ``rope`` on whole heads, ``decoupled_rope`` (a rotated query slice and one shared rotated
            key), ``alibi``, ``learned`` (absolute, added to the embedding), ``none``.
        shift: which of query, key, value are mixed with the previous tokens' (``none``, ``k``, ``v``, ``kv``,
            ``qkv``).
        num_key_value_heads: G. Default H // 4 (at least 1) for grouped mechanisms, H for ``mha`` and ``mla``
            (which has one latent), 1 for ``mqa``.
        head_dim: d_h, the width of a value and, without decoupled RoPE, of a key. Default hidden_size // H.
        qk_rope_head_dim: d_r, the width of the decoupled rotary slice; even. Default half of ``head_dim``,
            made even.
        rope_allocation: ``additive`` keeps a content width of d_h beside d_r; ``carved`` takes d_r out of
            d_h.
        kv_lora_rank: d_c, the width of MLA's latent. Default 4 d_h.
        shift_window: w, how many tokens are mixed: 2, 3 or 4.
        shift_weights: ``free``; ``gate`` (sigmoid, sums to 1); ``clip`` (in [0, 1]: see `Shift.constrain_`).
        shift_heads: one set of weights per key/value head (``kv``, the paper's, default for projected keys)
            or per query head (``query``, default for reconstructed keys, where it costs no cache). MLA's
            single latent counts as one key/value head.
        shift_init: where the weights start: ``uniform`` (the paper's: drawn from U(0, 1), the last 1 minus
            their sum); ``spread`` (as evenly over heads and layers as possible, without a draw); ``leaning``
            (at least half on the token itself); ``identity`` (1 on the token itself: no shift yet).
        scaled_rope: RoPE of longer contexts, as transformers' ``rope_parameters`` has it: ``rope_type``
            (``linear``, ``llama3`` or ``yarn``) and its numbers. None is ordinary RoPE.
        rope_pairs: which of the pairs of ``head_dim`` channels decoupled RoPE turns as (0 is the fastest); a
            pair may be there again. None: those of a head of its own width. A converted model's.
        query_norm, key_norm: RMSNorm on each query head, on each key head (of projected keys only).
        stream_norm: RMSNorm over all that a token caches for its content, before it is cached: the groups'
            values together, MLA's latent. For reconstructed keys only. Default: with ``mla``.
        projection_bias: biases of queries, keys and values (``qkv``, Qwen2's; MLA's latent for the last two),
            of the output too (``all``).
        key_map_init: ``matched`` starts reconstructed and rotary keys at the queries' RMS (GVA paper, eq. 15;
            default for ``gva``), ``standard`` draws them like any weight (default elsewhere).
        mlp: ``swiglu`` or ``none`` (an attention-only model).
        intermediate_size: default 8/3 hidden_size, rounded up to a multiple of 8.

    Raises:
        UserError: for an unknown choice or settings that contradict each other.
    """

    model_type = "keyshift"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    # None stands for a default that depends on other fields; it is filled in below and never stays.
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = None  # type: ignore[assignment]
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048
    attention: str = "gqa"
    position: str = "rope"
    shift: str = "none"
    rope_theta: float = 10000.0
    scaled_rope: dict[str, Any] | None = None
    rope_pairs: list[int] | None = None
    qk_rope_head_dim: int = None  # type: ignore[assignment]
    rope_allocation: str = "additive"
    kv_lora_rank: int = None  # type: ignore[assignment]
    shift_window: int = 2
    shift_weights: str = "free"
    shift_heads: str = None  # type: ignore[assignment]
    shift_init: str = "uniform"
    query_norm: bool = False
    key_norm: bool = False
    stream_norm: bool = None  # type: ignore[assignment]
    projection_bias: str = "none"
    key_map_init: str = None  # type: ignore[assignment]
    mlp: str = "swiglu"
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not CARRIED:
            kwargs.pop("auto_map", None)  # names files of the folder, which are not saved again from here
        self._take_rope_parameters(kwargs)
        self._check_types()
        self._check_choices()
        self._check_sizes()
        self._check_special_tokens()
        self._set_defaults()
        self._check_heads()
        self._check_projections()
        self._check_position()
        self._check_scaled_rope()
        self._check_rope_pairs()
        super().__post_init__(**kwargs)

    @property
    def qk_nope_head_dim(self) -> int:
        """d_n: the width of a key or query head that is not given to decoupled RoPE."""
        carved = self.position == "decoupled_rope" and self.rope_allocation == "carved"
        return self.head_dim - self.qk_rope_head_dim if carved else self.head_dim

    @property
    def decoupled_width(self) -> int:
        """d_r where the position is decoupled, else 0."""
        return (self.qk_rope_head_dim or 0) if self.position == "decoupled_rope" else 0

    @property
    def qk_head_dim(self) -> int:
        """d_qk = d_n + d_r: the width of a whole query head."""
        return self.qk_nope_head_dim + self.decoupled_width

    @property
    def rotary_width(self) -> int:
        """How many channels of a query RoPE rotates: whole heads, the decoupled slice, or none."""
        return self.qk_head_dim if self.position == "rope" else self.decoupled_width

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """transformers' request to save the code beside the weights: for the copy that a checkpoint carries.
        The package's goes along with ``keyshift push``."""
        if CARRIED:
            super().register_for_auto_class(auto_class)

    def shifts(self, what: str) -> bool:
        """Whether ``what`` (``q``, ``k`` or ``v``) is mixed with the previous tokens'."""
        return self.shift != "none" and what in self.shift

    def _take_rope_parameters(self, others: dict[str, Any]) -> None:
        """transformers' way of writing ``rope_theta`` and ``scaled_rope``."""
        parameters = others.pop("rope_parameters", None) or others.pop("rope_scaling", None)
        if parameters is None:
            return
        if not isinstance(parameters, dict):
            raise UserError(f"rope_parameters={parameters!r} must be a table; set rope_theta instead")
        parameters = {name: value for name, value in parameters.items() if value is not None}
        if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                "partial_rotary_factor below 1 is not supported: position='rope' turns whole heads"
            )
        self.rope_theta = parameters.pop("rope_theta", self.rope_theta)
        kind = parameters.setdefault("rope_type", parameters.pop("type", "default"))
        self.scaled_rope = None if kind == "default" else parameters

    def _check_scaled_rope(self) -> None:
        if self.scaled_rope is None:
            return
        if self.position not in ("rope", "decoupled_rope"):
            raise UserError(
                f"scaled_rope={self.scaled_rope!r} scales RoPE, which position={self.position!r} has not; "
                "leave it out"
            )
        if not isinstance(self.scaled_rope, dict):
            raise UserError(f"scaled_rope={self.scaled_rope!r} must be a table with rope_type, or left out")
        from keyshift.attention.rope_scaling import check_scaling  # itself of what reads configurations

        check_scaling(self.scaled_rope)

    def _check_rope_pairs(self) -> None:
        pairs = self.rope_pairs
        if pairs is None:
            return
        if self.position != "decoupled_rope":
            raise UserError(
                f"rope_pairs={pairs!r} is for position='decoupled_rope', not {self.position!r}; leave it out"
            )
        known = isinstance(pairs, list) and all(type(pair) is int for pair in pairs)
        if not known or any(not 0 <= pair < self.head_dim // 2 for pair in pairs):
            raise UserError(
                f"rope_pairs={pairs!r} must be a list of numbers from 0 to {self.head_dim // 2 - 1}: half of "
                f"head_dim={self.head_dim}"
            )
        if 2 * len(pairs) != self.qk_rope_head_dim:
            raise UserError(
                f"rope_pairs has {len(pairs)} pairs and qk_rope_head_dim={self.qk_rope_head_dim} channels; "
                "there must be two channels for a pair"
            )

    def _check_types(self) -> None:
        for field in ("query_norm", "key_norm", "use_cache", "tie_word_embeddings"):
            if not isinstance(getattr(self, field), bool):
                raise UserError(f"{field}={getattr(self, field)!r} must be true or false")
        if self.stream_norm is not None and not isinstance(self.stream_norm, bool):
            raise UserError(f"stream_norm={self.stream_norm!r} must be true, false or left out")
        for field in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UserError(f"{field}={value!r} must be a positive number")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2CLS:
            raise UserError(
                f"hidden_act={self.hidden_act!r} is not known; {nearest(str(self.hidden_act), ACT2CLS)}"
            )

    def _check_choices(self) -> None:
        for field, choices in CHOICES.items():
            value = getattr(self, field)
            if value not in choices and not (value is None and field in ("shift_heads", "key_map_init")):
                raise UserError(f"{field}={value!r} is not known; {nearest(str(value), choices)}")

    def _check_sizes(self) -> None:
        required = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        for field in required:
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise UserError(f"{field}={getattr(self, field)!r} must be a positive integer")
        optional = (
            "intermediate_size",
            "num_key_value_heads",
            "head_dim",
            "qk_rope_head_dim",
            "kv_lora_rank",
        )
        for field in optional:
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{field}={value!r} must be a positive integer or left out")
        if type(self.shift_window) is not int or self.shift_window not in (2, 3, 4):
            raise UserError(f"shift_window={self.shift_window!r} must be 2, 3 or 4")
        if self.shift != "none" and self.shift_init == "identity" and self.shift_weights == "gate":
            raise UserError(
                "shift_init='identity' is where a gate saturates and learns no more; use "
                "shift_init='leaning' or shift_weights='free'"
            )
        if self.shift != "none" and self.shift_window > self.max_position_embeddings:
            raise UserError(
                f"shift_window={self.shift_window} is larger than the sequence "
                f"(max_position_embeddings={self.max_position_embeddings}); use a smaller window"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads="
                f"{self.num_attention_heads}; change one of them or set head_dim"
            )

    def _check_special_tokens(self) -> None:
        for field in ("pad_token_id", "bos_token_id"):
            value = getattr(self, field)
            if value is not None and type(value) is not int:
                raise UserError(f"{field}={value!r} must be an integer or left out")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise UserError(
                f"pad_token_id={self.pad_token_id} is not below vocab_size={self.vocab_size}; "
                "leave it out or make room for it"
            )
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if self.eos_token_id is not None and not (ends and all(type(end) is int for end in ends)):
            raise UserError(
                f"eos_token_id={self.eos_token_id!r} must be an integer, a list of some, or left out"
            )

    def _set_defaults(self) -> None:
        heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // heads
        if self.attention == "mla":
            self.num_key_value_heads = heads
        elif self.num_key_value_heads is None:
            self.num_key_value_heads = {"mha": heads, "mqa": 1}.get(self.attention, max(1, heads // 4))
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // 3 // 8) * 8
        if self.kv_lora_rank is None:
            self.kv_lora_rank = 4 * self.head_dim
        if self.qk_rope_head_dim is None:
            self.qk_rope_head_dim = max(2, self.head_dim // 4 * 2)
        if self.shift_heads is None:
            self.shift_heads = "query" if self.attention in RECONSTRUCTED else "kv"
        if self.key_map_init is None:
            self.key_map_init = "matched" if self.attention == "gva" else "standard"
        if self.stream_norm is None:
            self.stream_norm = self.attention == "mla"

    def _check_heads(self) -> None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        fixed = {"mha": heads, "mqa": 1}.get(self.attention)
        if fixed is not None and groups != fixed:
            raise UserError(
                f"attention={self.attention!r} has {fixed} key/value heads, not "
                f"num_key_value_heads={groups}; set it to that, leave it out, or use attention='gqa'"
            )
        if heads % groups:
            raise UserError(
                f"num_attention_heads={heads} is not divisible by num_key_value_heads={groups}; "
                "the groups must have equal numbers of query heads"
            )

    def _check_projections(self) -> None:
        if self.key_norm and self.attention in RECONSTRUCTED:
            raise UserError(
                f"key_norm=True with attention={self.attention!r} would stand between the cached stream and "
                "the query that meets it; leave it out or use attention='gqa'"
            )
        if self.stream_norm and self.attention not in RECONSTRUCTED:
            raise UserError(
                f"stream_norm=True with attention={self.attention!r}, which projects keys: there is no one "
                "stream to normalise; leave it out or use key_norm=True"
            )

    def _check_position(self) -> None:
        width = self.qk_rope_head_dim
        if self.position == "rope" and self.head_dim % 2:
            raise UserError(
                f"position='rope' needs an even head_dim, not {self.head_dim}; change it or use "
                "position='alibi'"
            )
        if self.position != "decoupled_rope":
            return
        if width % 2:
            raise UserError(f"qk_rope_head_dim={width} must be even: RoPE rotates pairs")
        if self.rope_allocation == "carved":
            if self.attention == "shared_kv":
                raise UserError(
                    "attention='shared_kv' uses the whole value as the key, so rope_allocation='carved' "
                    "cannot narrow it; use rope_allocation='additive' or attention='gva'"
                )
            if width >= self.head_dim:
                raise UserError(
                    f"rope_allocation='carved' needs qk_rope_head_dim={width} below "
                    f"head_dim={self.head_dim}; use a smaller qk_rope_head_dim or rope_allocation='additive'"
                )


AutoConfig.register(KeyshiftConfig.model_type, KeyshiftConfig, exist_ok=True)
