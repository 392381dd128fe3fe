"""Parameter names of the original Δ-IRIS and of the agent in Reverie.

Original names are those of its checkpoints, without the prefixes `tokenizer.` and
`world_model.`. The original has separate matrices for queries, keys and values of an
attention layer; in Reverie their rows are concatenated in one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from reverie.api import UserError

# Lists of regular expressions and replacements: `TOKENIZER` and `WORLD_MODEL` for the
# start of a name, then `LAYERS` for any part of it.
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
    (r"head_(latents|rewards|ends)\.head_module\.0", r"\1.hidden"),
    (r"head_(latents|rewards|ends)\.head_module\.2", r"\1.out"),
    (r"act_emb", "action"),
    (r"latents_emb", "latent"),
]
LAYERS = [
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
"""Buffers of the original that are not imported, because they follow from the sizes."""
QKV = ("query", "key", "value")
"""Names of the separate matrices of the original, in the order of their rows here."""
ADVICE = (
    "use the settings and the environment of the checkpoint, as in "
    "`--configs iris_crafter` or `--configs iris_atari --task atari_breakout`."
)


class Target(NamedTuple):
    """A parameter of the agent, or the rows of it for queries, keys or values."""

    name: str
    qkv_index: int | None
    """0, 1 or 2 for the rows of queries, keys or values; None for all rows."""

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the part that corresponds to the original tensor, as a view."""
        tensor = tensors[self.name]
        if self.qkv_index is None:
            return tensor
        return tensor.chunk(len(QKV))[self.qkv_index]


def find_targets(
    originals: Iterable[str], rules: list[tuple[str, str]]
) -> dict[str, Target]:
    """Return the target of each original name; derived buffers are left out.

    `rules` is one of the lists of replacements above.
    """
    names = [name for name in originals if not re.fullmatch(DERIVED, name)]
    targets = {}
    for original in names:
        name = original
        for pattern, replacement in rules:
            name = re.sub(rf"^{pattern}(?=\.|$)", replacement, name)
        for pattern, replacement in LAYERS:
            name = re.sub(pattern, replacement, name)
        index = next((i for i, x in enumerate(QKV) if f".sa.{x}." in original), None)
        targets[original] = Target(name, index)
    return {
        original: target._replace(name=_rename_last(target.name, targets.values()))
        for original, target in targets.items()
    }


def copy_weights(
    tensors: Mapping[str, Tensor],
    rules: list[tuple[str, str]],
    template: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return a state dict like `template`, with the values of the original tensors."""
    state = {name: tensor.detach().clone() for name, tensor in template.items()}
    targets = find_targets(tensors, rules)
    for original, target in targets.items():
        if target.name not in state:
            raise UserError(
                f"This agent has no parameter for {original!r}.\n  Fix: {ADVICE}"
            )
        old, new = target.view(state), tensors[original]
        if old.shape != new.shape:
            raise UserError(
                f"{original!r} has shape {tuple(new.shape)} in the checkpoint, and "
                f"{tuple(old.shape)} in this agent.\n  Fix: {ADVICE}"
            )
        old.copy_(new)
    missing = set(state) - {target.name for target in targets.values()}
    if missing:
        raise UserError(
            f"The checkpoint has no values for {min(missing)!r}.\n  Fix: {ADVICE}"
        )
    return state


def _rename_last(name: str, targets: Iterable[Target]) -> str:
    """Correct the layer index of the norm and convolution after the last block.

    The original counts the activation between the two as a layer; here it is part of
    the norm. Other names are returned unchanged.
    """
    match = re.fullmatch(r"(\w+\.layers\.)(\d+)\.(weight|bias)", name)
    if not match or name.startswith("transformer."):
        return name
    net, index, leaf = match[1], int(match[2]), match[3]
    numbers = [re.match(rf"{re.escape(net)}(\d+)\.", target.name) for target in targets]
    last = max(int(number[1]) for number in numbers if number)
    if index == last:
        return f"{net}{last - 1}.{leaf}"
    if index == last - 2:
        return f"{net}{index}.{'scale' if leaf == 'weight' else 'shift'}"
    return name
