"""Where each tensor of the original Δ-IRIS lives in ours.

The names are those of its checkpoints (`tokenizer.` and `world_model.`, without that
prefix). Ours joins what the original keeps in three tensors: queries, keys and values
of an attention layer are one matrix, and each of them a third of its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from reverie.api import UserError

TOKENIZER = [
    (r"encoder_act_emb", "encoder_action"),
    (r"decoder_act_emb", "decoder_action"),
    (r"quantizer\.pre_quant_proj", "quantizer.down"),
    (r"quantizer\.post_quant_proj", "quantizer.up"),
    (r"quantizer\.codewords_freqs", "quantizer.usage"),
    (r"quantizer\.num_codebook_updates", "quantizer.updates"),
    (r"(en|de)coder\.\1coder", r"\1coder.layers"),
    (r"frame_cnn\.encoder", "frame.layers"),
]
WORLD_MODEL = [
    (r"transformer\.pos_emb", "transformer.positions"),
    (r"transformer\.ln", "transformer.norm"),
    (r"transformer\.blocks", "transformer.layers"),
    (r"frame_cnn\.0\.encoder", "frame.layers"),
    (r"frame_cnn\.2", "frame_norm"),
    (r"act_emb", "action"),
    (r"latents_emb", "latent"),
    (r"head_(latents|rewards|ends)\.head_module\.0", r"\1.hidden"),
    (r"head_(latents|rewards|ends)\.head_module\.2", r"\1.out"),
]
INSIDE = [
    (r"\.f\.0\.", ".norm0."),
    (r"\.f\.2\.", ".conv0."),
    (r"\.f\.3\.", ".norm1."),
    (r"\.f\.5\.", ".conv1."),
    (r"\.skip_projection\.", ".skip."),
    (r"\.sa\.ln\.", ".norm0."),
    (r"\.sa\.(query|key|value)\.", ".qkv."),
    (r"\.sa\.attention\.proj\.", ".out."),
    (r"\.mlp\.ln\.", ".norm1."),
    (r"\.mlp\.mlp\.0\.", ".wide."),
    (r"\.mlp\.mlp\.2\.", ".narrow."),
    (r"norm(\d?|_\w+)\.weight$", r"norm\1.scale"),
    (r"norm(\d?|_\w+)\.bias$", r"norm\1.shift"),
]
DERIVED = r".*\.(indices|mask)$"
"""Entries that follow from the sizes."""
THIRDS = ("query", "key", "value")
ADVICE = (
    "use the settings and the environment the original was trained with, as in "
    "`--configs iris_crafter` or `--configs iris_atari --task atari_breakout`."
)


class Place(NamedTuple):
    """A tensor of ours, or a third of its rows."""

    name: str
    third: int | None

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The part that the original calls by its own name, as a view."""
        tensor = tensors[self.name]
        return tensor if self.third is None else tensor.chunk(len(THIRDS))[self.third]


def places(originals: Iterable[str], rules: list[tuple[str, str]]) -> dict[str, Place]:
    """Ours for each name of one part of the original; derived entries are left out."""
    names = [name for name in originals if not re.fullmatch(DERIVED, name)]
    found = {}
    for original in names:
        name = original
        for pattern, ours in rules:
            name = re.sub(rf"^{pattern}(?=\.|$)", ours, name)
        for pattern, ours in INSIDE:
            name = re.sub(pattern, ours, name)
        third = next((i for i, t in enumerate(THIRDS) if f".sa.{t}." in original), None)
        found[original] = Place(name, third)
    return {
        original: place._replace(name=_last_layers(place.name, found.values()))
        for original, place in found.items()
    }


def take_over(
    tensors: Mapping[str, Tensor],
    rules: list[tuple[str, str]],
    like: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """A state of ours, of the names and sizes of `like`, with the original's values."""
    state = {name: tensor.detach().clone() for name, tensor in like.items()}
    found = places(tensors, rules)
    for original, place in found.items():
        if place.name not in state:
            raise UserError(
                f"This world has no place for {original!r}.\n  Fix: {ADVICE}"
            )
        old, new = place.of(state), tensors[original]
        if old.shape != new.shape:
            raise UserError(
                f"{original!r} has shape {tuple(new.shape)}, this world has "
                f"{tuple(old.shape)}.\n  Fix: {ADVICE}"
            )
        old.copy_(new)
    missing = set(state) - {place.name for place in found.values()}
    if missing:
        raise UserError(
            f"The original has nothing for {min(missing)!r}.\n  Fix: {ADVICE}"
        )
    return state


def _last_layers(name: str, places: Iterable[Place]) -> str:
    """Behind the last residual block, norm and activation are one layer of ours."""
    match = re.fullmatch(r"(\w+\.layers\.)(\d+)\.(weight|bias)", name)
    if not match or name.startswith("transformer."):
        return name
    net, index, leaf = match[1], int(match[2]), match[3]
    numbers = [re.match(rf"{re.escape(net)}(\d+)\.", place.name) for place in places]
    last = max(int(number[1]) for number in numbers if number)
    if index == last:
        return f"{net}{last - 1}.{leaf}"
    if index == last - 2:
        return f"{net}{index}.{'scale' if leaf == 'weight' else 'shift'}"
    return name
