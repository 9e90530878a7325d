"""`SinkCache`: a cache of transformers that keeps the first tokens and a window of the last ones.

A text of any length then needs the memory and the time of a short one. Keys of the window are not
moved. Keys of the first tokens are re-rotated to positions right before the window, each time from
the original keys. So the model sees the distances of a text without the dropped tokens.
"""

from torch import Tensor, cat
from transformers import PretrainedConfig, __version__

from ..configs import choose, from_hf_config
from ..rerotate import rerotate
from ..spec import Rotary, check_whole, unwrapped

try:
    from transformers.cache_utils import Cache, DynamicLayer

    DynamicLayer.lazy_initialization  # noqa: B018  # which layers of older caches do not have
except (ImportError, AttributeError) as error:
    raise ImportError(f"SinkCache needs transformers 4.57 or newer, got {__version__}") from error


class SinkCache(Cache):  # type: ignore[misc]
    """A cache of a transformers model that drops all but sinks and a window.

    Pass it as `cache=`, which was `past_key_values=` until transformers 5.23. The lowest version is
    4.57.

    config  the config of the model: every layer must rotate, and attend to all earlier tokens
    sinks   how many of the first tokens are kept
    window  how many of the last tokens are kept

    Positions keep counting, as in the model and in `generate`: after n tokens the window is at
    n - window .. n - 1, unmoved, and the sinks are at the `sinks` positions before it. The sinks
    are rotated there from the keys that the model computed, so they are rounded once, however many
    tokens were dropped. A call with several new tokens, such as a prompt, attends to all of them;
    then all but the sinks and the window are dropped.

    Dropped tokens cannot be recalled, so this is no longer memory. Nor does it give the results of
    a fresh run on the kept tokens. Only the keys of the first layer, and so a model of one layer,
    are those of such a run; from the second layer on, keys and values were computed from hidden
    states that attended to dropped tokens. At large positions the model needs exact angles,
    `rotary.patch(model, exact=True)`: float32 angles are off by 8e-3 near 131 072. Rows of a batch
    must not be padded on the left: the padding would be kept as sinks.

    Raises ValueError for a config whose keys cannot be moved in this way: frequencies that depend
    on the length, layers without rotation or of several types, several position axes, a norm after
    the rotation. If all layers have a sliding window, sinks + window must be less than that.
    Source: Xiao et al., StreamingLLM (arXiv 2309.17453), section 3.2.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> import torch
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                      num_attention_heads=4, vocab_size=9)
    >>> cache = SinkCache(config, sinks=2, window=6)
    >>> for token in range(30):
    ...     _ = LlamaModel(config)(torch.tensor([[token % 9]]), cache=cache)
    >>> cache.get_seq_length(), cache.layers[0].keys.shape[-2]
    (30, 8)
    """

    def __init__(self, config: PretrainedConfig, *, sinks: int = 4, window: int = 1020) -> None:
        if not isinstance(config, PretrainedConfig):
            kind = type(config).__qualname__
            raise TypeError(f"config must be the config of a model, model.config, got {kind}")
        text = config.get_text_config(decoder=True)
        spec, seen = _spec_and_window(text)
        sinks, window = unwrapped(sinks), unwrapped(window)
        check_whole("sinks", sinks, 0)
        check_whole("window", window)
        kept = sinks + window
        if seen is not None and kept >= seen:
            raise ValueError(
                f"sinks + window must be less than {seen}, the sliding_window of this model, got "
                f"{kept}: its mask hides keys that are farther away, first of all the sinks"
            )
        layers = [SinkLayer(spec, sinks, window) for _ in range(text.num_hidden_layers)]
        super().__init__(layers=layers)


class SinkLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `SinkCache`; `keys` holds the sinks, not re-rotated, then the window.

    >>> layer = SinkLayer(Rotary(head_dim=4), sinks=1, window=2)
    >>> import torch
    >>> layer.update(torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4))[0].shape
    torch.Size([1, 1, 5, 4])
    >>> layer.keys.shape, layer.get_seq_length(), layer.get_mask_sizes(1)
    (torch.Size([1, 1, 3, 4]), 5, (4, 2))
    """

    is_croppable = False

    def __init__(self, spec: Rotary, sinks: int, window: int) -> None:
        super().__init__()
        self.spec, self.sinks, self.window = spec, sinks, window
        self.cumulative_length = 0  # also of dropped tokens; `reset` sets it to 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Set empty keys and values, of the form of the first ones."""
        if key_states.shape[-1] != self.spec.head_dim:
            raise ValueError(
                f"the model caches keys of {key_states.shape[-1]} channels, but its RoPE has "
                f"{self.spec.head_dim}: SinkCache cannot tell which channels to move"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add new keys and values, and return those to attend to; then drop the ones too old."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        dropped = self._dropped()
        attended = keys = cat((self.keys, key_states), dim=-2)
        values = cat((self.values, value_states), dim=-2)
        if dropped and self.sinks:
            moved = rerotate(self.keys[:, :, : self.sinks], self.spec, shift=dropped, seq_dim=-2)
            attended = cat((moved, keys[:, :, self.sinks :]), dim=-2)
        self.cumulative_length += key_states.shape[-2]
        self.keys, self.values = self._kept(keys), self._kept(values)
        return attended, values

    def _kept(self, states: Tensor) -> Tensor:
        if states.shape[-2] <= self.sinks + self.window:
            return states
        parts = states[:, :, : self.sinks], states[:, :, -self.window :]
        return cat(parts, dim=-2)

    def _dropped(self) -> int:
        return self.cumulative_length - (self.keys.shape[-2] if self.is_initialized else 0)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, dropped ones included: the position of the next."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many keys the next call attends to, and the position of the first.

        query_length  of that call, or the positions of its tokens, as before transformers 5
        """
        new = len(query_length) if isinstance(query_length, Tensor) else query_length
        dropped = self._dropped()
        return self.cumulative_length - dropped + new, dropped

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens that were dropped cannot come back when later ones are removed."""
        raise NotImplementedError("a SinkCache cannot be cropped: dropped tokens are gone")


def _spec_and_window(config: PretrainedConfig) -> tuple[Rotary, int | None]:
    """Return the RoPE of a model, and the window of its mask if all layers have one."""
    kinds = sorted({*(getattr(config, "layer_types", None) or ())})
    windowed = [kind for kind in kinds if kind != "full_attention"]
    if windowed:
        raise _refusal(f"has layers of {', '.join(windowed)}")
    chosen, spec = choose(config, *kinds), from_hf_config(config, *kinds)
    rotated = getattr(config, "no_rope_layers", None) or ()  # 0 where a layer does not rotate
    if spec is None or not all(rotated):
        raise _refusal("has layers that do not rotate")
    if "norm_after" in chosen.model:
        raise _refusal("norms keys after their rotation, and each channel has its own weight")
    if spec.depends_on_length:
        raise _refusal(f"changes its frequencies with the length ({spec.schedule})")
    if spec.num_axes > 1:
        raise _refusal(f"has positions of {spec.num_axes} axes")
    return spec, chosen.window


def _refusal(reason: str) -> ValueError:
    return ValueError(f"SinkCache cannot move the keys of this model: it {reason}")
